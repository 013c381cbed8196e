"""Verification of draft tokens by the target's logits."""
