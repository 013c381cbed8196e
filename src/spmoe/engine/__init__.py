"""Request in, tokens out."""
