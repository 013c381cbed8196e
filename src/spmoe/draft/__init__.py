"""Drafters, which propose tokens: one module per drafter, named as in `--draft`."""
