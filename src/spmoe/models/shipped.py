"""The pair that ships with the package, a small target and draft trained on Python source, and a text to try it on."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "pair"


def shipped_pair() -> tuple[str, str]:
    """Directories of the target and the draft."""
    return str(ROOT / "target"), str(ROOT / "draft")


def sample_text() -> str:
    """Python source that the pair was not trained on: some of this package's own, as it was when the pair was made."""
    return (ROOT / "sample.txt").read_text(encoding="utf-8")
