"""Drafts: whatever proposes tokens."""
