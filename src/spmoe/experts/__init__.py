"""Holding and moving experts. Knows nothing of models."""
