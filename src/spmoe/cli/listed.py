"""Options that take several values, with commas between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from spmoe.config import DraftTokens
from spmoe.errors import UsageError

T = TypeVar("T")


def listed(name: str, text: str, convert: Callable[[str], T]) -> list[T]:
    """The values of an option, each once; `convert` may raise ValueError with what is wrong."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise UsageError(f"{name} takes values with commas between them, not {text!r}")
    try:
        return list(dict.fromkeys(convert(word) for word in words))
    except ValueError as error:
        raise UsageError(f"{name} cannot be {text!r}: {error}") from error


def whole(word: str) -> int:
    """A whole number, 0 or more."""
    if not word.isdecimal():
        raise ValueError(f"{word!r} is not a whole number")
    return int(word)


def whole_or_auto(word: str) -> DraftTokens:
    """Such a number, or `auto`."""
    return "auto" if word.lower() == "auto" else whole(word)


def speed(word: str) -> float:
    """Gigabytes per second."""
    try:
        found = float(word)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise ValueError(f"{word!r} is not a speed; write gigabytes per second, such as 25")
    return found
