"""Drafters: whatever proposes tokens. One module per drafter, named as `--draft` names it."""
