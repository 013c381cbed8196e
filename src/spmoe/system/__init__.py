"""Host machine and cache directory: facts that need neither torch nor a model."""
