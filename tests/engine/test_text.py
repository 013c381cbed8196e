"""Text as it is generated: whole characters only, stop strings wherever they fall, and nothing taken back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import END, byte_tokenizer
from spmoe.engine.text import TextStream

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Pieces:
    """A tokenizer whose tokens are whatever bytes they are said to be; None is a special token."""

    def __init__(self, tokens: Sequence[bytes | None]) -> None:
        self.tokens = tokens

    def decode(self, ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        assert skip_special_tokens
        assert not clean_up_tokenization_spaces
        return b"".join(self.tokens[i] or b"" for i in ids).decode("utf-8", errors="replace")


def run(tokens: Sequence[bytes | str | None], stop: Sequence[str] = (), prompt: Sequence[bytes] = ()) -> list[str]:
    """What each token releases, and in the end what finishing does; ends where the stream has stopped."""
    encoded = [t.encode() if isinstance(t, str) else t for t in tokens]
    tokenizer = Pieces([*prompt, *encoded])
    stream = TextStream(tokenizer, list(range(len(prompt))), stop)
    pieces = []
    for token in range(len(prompt), len(prompt) + len(encoded)):
        pieces.append(stream.push(token))
        assert stream.text == "".join(pieces)
        if stream.stopped:
            break
    pieces.append(stream.finish())
    assert stream.text == "".join(pieces)
    assert stream.finish() == "", "finishing twice releases nothing twice"
    return pieces


# ---- characters


def test_text_comes_token_by_token() -> None:
    assert run(["he", "llo", " ", "world"]) == ["he", "llo", " ", "world", ""]


@pytest.mark.parametrize("character", ["é", "€", "😀"])
def test_a_character_split_over_tokens_comes_whole(character: str) -> None:
    parts = [bytes([byte]) for byte in character.encode()]
    assert run(["a", *parts, "b"]) == ["a", *[""] * (len(parts) - 1), character, "b", ""]


def test_text_before_half_a_character_in_one_token_waits_for_it() -> None:
    assert run([b"a\xe2\x82", b"\xac!"]) == ["", "a€!", ""]


def test_half_a_character_at_the_end_is_shown_for_what_it_is() -> None:
    assert run(["a", b"\xe2", b"\x82"]) == ["a", "", "", REPLACEMENT]


def test_bytes_that_are_no_text_do_not_hold_the_rest_back() -> None:
    assert run([b"\xff", "a", b"\xff\xff", "b"]) == ["", f"{REPLACEMENT}a", "", f"{REPLACEMENT * 2}b", ""]


def test_special_tokens_have_no_text() -> None:
    assert run(["a", None, "b", None]) == ["a", "", "b", "", ""]


def test_the_prompt_is_context_only() -> None:
    assert run(["c", "d"], prompt=[b"a", b"b"]) == ["c", "d", ""]
    assert run(["c"], prompt=[b"ab"], stop=["bc"]) == ["c", ""], "a stop string begins in the output"


def test_a_character_that_the_prompt_began_is_finished() -> None:
    assert run([b"\xac", "x"], prompt=[b"a", b"\xe2\x82"]) == ["€", "x", ""]
    assert run(["x"], prompt=[b"a", b"\xe2\x82"]) == ["x", ""]
    assert run([b"\x82", b"\xac", "x"], prompt=[b"a", b"\xe2"]) == ["", "€", "x", ""]


def test_a_tokenizer_of_bytes() -> None:
    tokenizer = byte_tokenizer()
    text = "naïve € 😀 ok"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text.encode())
    stream = TextStream(tokenizer, tokenizer("a prompt")["input_ids"], ())
    pieces = [stream.push(token) for token in [*ids, tokenizer.convert_tokens_to_ids(END)]]
    assert "".join(pieces) == text
    assert [p for p in pieces if p] == list(text)
    assert stream.finish() == ""


# ---- stop strings


def test_a_stop_string_inside_a_token() -> None:
    assert run(["one", "two STOP three"], ["STOP"]) == ["one", "two ", ""]


def test_a_stop_string_across_tokens() -> None:
    assert run(["one S", "TO", "P two"], ["STOP"]) == ["one ", "", "", ""]


def test_what_only_looked_like_a_stop_string_comes_after_all() -> None:
    assert run(["one S", "TO", "OL"], ["STOP"]) == ["one ", "", "STOOL", ""]
    assert run(["one S", "TO"], ["STOP"]) == ["one ", "", "STO"]


def test_prefixes_that_overlap_themselves() -> None:
    assert run(list("aabaabaac"), ["aabaac"]) == ["", "", "", "", "", "aab", "", "", "", ""]
    assert "".join(run(list("ababac"), ["abac"])) == "ab"


def test_the_earliest_of_several_stop_strings_wins() -> None:
    assert "".join(run(["abcdef"], ["ef", "bc"])) == "a"
    assert "".join(run(["abcdef"], ["bcd", "bc"])) == "a"
    assert "".join(run(list("abcdef"), ["cde", "d"])) == "abc", "whichever is complete first"


def test_what_may_become_any_of_several_stop_strings_is_held_back() -> None:
    assert run(["x", "a", "b"], ["ab", "cd"]) == ["x", "", "", ""]
    assert run(["x", "a", "z"], ["ab", "cd"]) == ["x", "", "az", ""]


def test_a_stop_string_beside_half_a_character() -> None:
    assert "".join(run(["x€s", "top"], ["stop"])) == "x€"
    assert "".join(run([b"a\xe2\x82", b"\xacstop"], ["€stop"])) == "a"
    assert "".join(run([b"stop\xe2"], ["stop"])) == "", "also when only finishing shows it"


def test_after_a_stop_nothing_is_released() -> None:
    stream = TextStream(Pieces([b"a STOP b"]), [], ["STOP"])
    assert stream.push(0) == "a "
    assert stream.stopped
    assert stream.finish() == ""
    assert stream.text == "a "


# ---- any tokens, any stop strings

ALPHABET = ["a", "b", "é", "€", "😀"]
chunks = st.one_of(
    st.sampled_from(["a", "b", "ab", "é", "€a", "😀"]).map(str.encode),
    st.sampled_from([b"\xe2", b"\x82", b"\xac", b"\xc3", b"\xa9", b"\xf0\x9f", b"\x98\x80"]),
    st.sampled_from([b"\xff", b"a\xe2", b"\xacb"]),
    st.none(),
)
stops = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3)


def first_stop(text: str, stop: Sequence[str]) -> int | None:
    return min((at for s in stop if (at := text.find(s)) >= 0), default=None)


def check(tokens: Sequence[bytes | None], stop: Sequence[str]) -> None:
    """The pieces make up the text of all tokens taken, up to the first stop string, and no token too many is taken."""

    def decoded(count: int) -> str:
        return b"".join(t or b"" for t in tokens[:count]).decode("utf-8", errors="replace")

    pieces = run(tokens, stop)
    count = len(pieces) - 1  # tokens that were taken before the stream stopped
    at = first_stop(decoded(count), stop)
    assert "".join(pieces) == decoded(count)[:at]
    if at is None:
        assert count == len(tokens)
    for fewer in range(count):
        seen = decoded(fewer)
        if not seen.endswith(REPLACEMENT):
            assert first_stop(seen, stop) is None, "it should have stopped there"


@settings(max_examples=300, deadline=None)
@given(st.lists(chunks, max_size=14), stops)
def test_the_pieces_make_up_the_text_up_to_the_first_stop(tokens: list[bytes | None], stop: list[str]) -> None:
    check(tokens, stop)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=3).map(str.encode), max_size=10),
    st.lists(st.text("ab", min_size=2, max_size=6), min_size=1, max_size=3),
)
def test_stop_strings_that_are_all_but_there(tokens: list[bytes], stop: list[str]) -> None:
    """Two letters only, so that every text is full of beginnings of stop strings."""
    check(tokens, stop)


@settings(max_examples=300, deadline=None)
@given(st.text([*ALPHABET, REPLACEMENT], max_size=12), st.data(), stops)
def test_characters_are_never_released_half(text: str, data: st.DataObject, stop: list[str]) -> None:
    """Whole text, cut into tokens at any byte."""
    encoded = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(encoded)))) | {0, len(encoded)})
    tokens: list[Any] = [encoded[a:b] for a, b in pairwise(cuts)]
    pieces = run(tokens, stop)
    assert text.startswith("".join(pieces))
    assert sum(p.count(REPLACEMENT) for p in pieces) <= text.count(REPLACEMENT)
    if not stop:
        assert "".join(pieces) == text


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=3), max_size=10), st.lists(st.text("ab", min_size=1, max_size=4)))
def test_nothing_is_held_back_longer_than_a_stop_string_could_need(words: list[str], stop: list[str]) -> None:
    """What is not yet released could still become a stop string."""
    pieces = run(words, stop)
    released = ""
    for count, piece in enumerate(pieces[:-1], start=1):
        released += piece
        held = "".join(words[:count])[len(released) :]
        if first_stop("".join(words[:count]), stop) is None:
            assert not held or any(s.startswith(held) for s in stop)
