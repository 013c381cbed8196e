"""Everything that depends on transformers: loading, inspecting and running its models."""
