"""Options that take several values: read, each once, and refused with the option's name."""

from __future__ import annotations

import pytest

from spmoe.cli.listed import listed, speed, whole
from spmoe.config import Size
from spmoe.errors import UsageError


def test_values_are_read_in_order_and_once() -> None:
    assert listed("-k", " 4, 0,4 ,2", whole) == [4, 0, 2]
    assert listed("--link-gbps", "25,0.5", speed) == [25.0, 0.5]
    assert listed("--expert-memory", "25%,1GiB", Size.parse) == [Size(share=0.25), Size(bytes=2**30)]


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "commas"), (",", "commas"), ("1,,2", "commas"), ("1,-2", "'-2' is not a whole number"), ("one", "'one'")],
)
def test_what_is_no_list_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as refused:
        listed("--draft-tokens", text, whole)
    assert str(refused.value).startswith("--draft-tokens ")


@pytest.mark.parametrize("text", ["0", "-1", "inf", "nan", "fast"])
def test_what_is_no_speed(text: str) -> None:
    with pytest.raises(UsageError, match="not a speed"):
        listed("--link-gbps", text, speed)
