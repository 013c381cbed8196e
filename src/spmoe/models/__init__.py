"""The seam to transformers, and the only place that knows its model code."""
