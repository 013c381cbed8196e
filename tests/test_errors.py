"""Helpers of errors: text for terminals, and panics of libraries in Rust."""

from __future__ import annotations

import pytest

from spmoe.errors import is_panic, panics_as_errors, printable, reason, suggestion


class PanicException(BaseException):
    """Stands in for the exception of libraries in Rust."""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 漢 🎉\n\ttab", "plain é 漢 🎉\n\ttab"),
        ("a\x1b[31mred\x1b]0;title\x07", r"a\x1b[31mred\x1b]0;title\x07"),
        ("\x9b31m\x7f\x00\x08", r"\x9b31m\x7f\x00\x08"),
        ("over\rwritten\r\n", "over\\x0dwritten\r\n"),
    ],
)
def test_control_characters_are_shown(text: str, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.parametrize(
    ("wrong", "names", "found"),
    [
        ("draftgate", ("draft-gate", "next-gate"), "; did you mean draft-gate?"),
        ("gpu", ("auto", "cpu", "cuda"), "; did you mean cuda?"),
        ("FP16", ("float32", "bfloat16", "float16"), "; did you mean float16?"),
        ("half", ("on", "off"), ""),
        ("", ("auto",), ""),
        (None, ("auto",), ""),
    ],
)
def test_the_nearest_name_is_suggested(wrong: object, names: tuple[str, ...], found: str) -> None:
    assert suggestion(wrong, names) == found


def test_a_quoted_reason_has_no_control_characters() -> None:
    assert reason(ValueError("bad \x1b[2J name")) == r"bad \x1b[2J name"


def test_panics_become_errors_and_interrupts_stay() -> None:
    with pytest.raises(RuntimeError, match="a library failed: index out of bounds"), panics_as_errors():
        raise PanicException("index out of bounds")
    for kind in (KeyboardInterrupt, SystemExit, ValueError):
        assert not is_panic(kind())
        with pytest.raises(kind), panics_as_errors():
            raise kind
