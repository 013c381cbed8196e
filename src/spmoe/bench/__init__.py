"""Measuring pairs and engines."""
