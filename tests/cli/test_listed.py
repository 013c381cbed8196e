"""Options with several values: order, duplicates and errors."""

from __future__ import annotations

import pytest

from spmoe.cli.listed import parse_gbps, parse_list, parse_whole
from spmoe.config import Size
from spmoe.errors import UsageError


def test_values_keep_their_order_without_duplicates() -> None:
    assert parse_list("-k", " 4, 0,4 ,2", parse_whole) == [4, 0, 2]
    assert parse_list("--link-gbps", "25,0.5", parse_gbps) == [25.0, 0.5]
    assert parse_list("--expert-memory", "25%,1GiB", Size.parse) == [Size(share=0.25), Size(bytes=2**30)]


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "commas"), (",", "commas"), ("1,,2", "commas"), ("1,-2", "'-2' is not a whole number"), ("one", "'one'")],
)
def test_invalid_list_is_rejected_with_the_option_name(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as raised:
        parse_list("--draft-tokens", text, parse_whole)
    assert str(raised.value).startswith("--draft-tokens ")


@pytest.mark.parametrize("text", ["0", "-1", "inf", "nan", "fast"])
def test_invalid_bandwidth_is_rejected(text: str) -> None:
    with pytest.raises(UsageError, match="not a bandwidth"):
        parse_list("--link-gbps", text, parse_gbps)
