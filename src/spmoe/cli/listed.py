"""Options that take several values, separated by commas."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from spmoe.config import DraftTokens
from spmoe.errors import UsageError

T = TypeVar("T")


def parse_list(option: str, text: str, parse: Callable[[str], T]) -> list[T]:
    """Return the values of an option without duplicates; `parse` converts one and raises ValueError if it cannot."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise UsageError(f"{option} takes values separated by commas, not {text!r}")
    try:
        return list(dict.fromkeys(parse(word) for word in words))
    except ValueError as error:
        raise UsageError(f"{option} cannot be {text!r}: {error}") from error


def parse_whole(word: str) -> int:
    """Parse a whole number, 0 or more."""
    if not word.isdecimal():
        raise ValueError(f"{word!r} is not a whole number")
    return int(word)


def parse_draft_tokens(word: str) -> DraftTokens:
    """Parse a whole number, 0 or more, or `auto`."""
    return "auto" if word.lower() == "auto" else parse_whole(word)


def parse_gbps(word: str) -> float:
    """Parse a bandwidth in gigabytes per second."""
    try:
        value = float(word)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{word!r} is not a bandwidth; write gigabytes per second, such as 25")
    return value
