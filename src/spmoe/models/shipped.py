"""The model pair that ships with the package: a small target and draft trained on Python source, and a sample text."""

from __future__ import annotations

from spmoe.config import SHIPPED_PAIR as ROOT


def shipped_pair() -> tuple[str, str]:
    """Return the directories of the target and the draft."""
    return str(ROOT / "target"), str(ROOT / "draft")


def sample_text() -> str:
    """Return Python source that the pair was not trained on: part of this package at the time of training."""
    return (ROOT / "sample.txt").read_text(encoding="utf-8")
