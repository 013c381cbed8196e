"""Prediction of the experts that will be needed: policies, projection, cutoff, latency model, governor."""
