"""OpenAI-compatible server; needs the `serve` extra."""
