"""Streaming detokenization: complete characters, stop strings across tokens, and final text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from checkpoints import END, byte_tokenizer
from spmoe.engine.text import TextStream

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class BytesTokenizer:
    """Tokenizer whose tokens are the given bytes; None is a special token."""

    def __init__(self, tokens: Sequence[bytes | None]) -> None:
        self.tokens = tokens

    def decode(self, ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        assert skip_special_tokens
        assert not clean_up_tokenization_spaces
        return b"".join(self.tokens[i] or b"" for i in ids).decode("utf-8", errors="replace")


def run(tokens: Sequence[bytes | str | None], stop: Sequence[str] = (), prompt: Sequence[bytes] = ()) -> list[str]:
    """Return the text that each token releases, and at the end that of `finish`; stops with the stream."""
    encoded = [t.encode() if isinstance(t, str) else t for t in tokens]
    tokenizer = BytesTokenizer([*prompt, *encoded])
    stream = TextStream(tokenizer, list(range(len(prompt))), stop)
    pieces = []
    for token in range(len(prompt), len(prompt) + len(encoded)):
        pieces.append(stream.push(token))
        assert stream.text == "".join(pieces)
        if stream.stopped:
            break
    pieces.append(stream.finish())
    assert stream.text == "".join(pieces)
    assert stream.finish() == "", "the second call releases nothing"
    return pieces


# ---- characters


def test_text_is_released_token_by_token() -> None:
    assert run(["he", "llo", " ", "world"]) == ["he", "llo", " ", "world", ""]


@pytest.mark.parametrize("character", ["é", "€", "😀"])
def test_character_split_over_tokens_is_released_at_once(character: str) -> None:
    parts = [bytes([byte]) for byte in character.encode()]
    assert run(["a", *parts, "b"]) == ["a", *[""] * (len(parts) - 1), character, "b", ""]


def test_text_before_an_incomplete_character_in_one_token_waits() -> None:
    assert run([b"a\xe2\x82", b"\xac!"]) == ["", "a€!", ""]


def test_incomplete_character_at_the_end_becomes_a_replacement_character() -> None:
    assert run(["a", b"\xe2", b"\x82"]) == ["a", "", "", REPLACEMENT]


def test_invalid_bytes_do_not_hold_back_the_rest() -> None:
    assert run([b"\xff", "a", b"\xff\xff", "b"]) == ["", f"{REPLACEMENT}a", "", f"{REPLACEMENT * 2}b", ""]


def test_special_tokens_have_no_text() -> None:
    assert run(["a", None, "b", None]) == ["a", "", "b", "", ""]


def test_special_tokens_inside_a_character_delay_nothing() -> None:
    assert run([b"\xe2", None, None, b"\x82", b"\xac", "x"], ["€"]) == ["", "", "", "", "", ""]
    assert run([b"\xe2", None, None, None, b"\x82", None, b"\xac", "x"]) == [*[""] * 6, "€", "x", ""]


def test_prompt_is_context_only() -> None:
    assert run(["c", "d"], prompt=[b"a", b"b"]) == ["c", "d", ""]
    assert run(["c"], prompt=[b"ab"], stop=["bc"]) == ["c", ""], "stop strings that start in the prompt do not count"


def test_character_started_in_the_prompt_is_completed() -> None:
    assert run([b"\xac", "x"], prompt=[b"a", b"\xe2\x82"]) == ["€", "x", ""]
    assert run(["x"], prompt=[b"a", b"\xe2\x82"]) == ["x", ""]
    assert run([b"\x82", b"\xac", "x"], prompt=[b"a", b"\xe2"]) == ["", "€", "x", ""]


def test_byte_level_tokenizer() -> None:
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


def test_stop_string_inside_a_token() -> None:
    assert run(["one", "two STOP three"], ["STOP"]) == ["one", "two ", ""]


def test_stop_string_across_tokens() -> None:
    assert run(["one S", "TO", "P two"], ["STOP"]) == ["one ", "", "", ""]


def test_incomplete_stop_string_is_released() -> None:
    assert run(["one S", "TO", "OL"], ["STOP"]) == ["one ", "", "STOOL", ""]
    assert run(["one S", "TO"], ["STOP"]) == ["one ", "", "STO"]


def test_stop_strings_with_overlapping_prefixes() -> None:
    assert run(list("aabaabaac"), ["aabaac"]) == ["", "", "", "", "", "aab", "", "", "", ""]
    assert "".join(run(list("ababac"), ["abac"])) == "ab"


def test_earliest_of_several_stop_strings_wins() -> None:
    assert "".join(run(["abcdef"], ["ef", "bc"])) == "a"
    assert "".join(run(["abcdef"], ["bcd", "bc"])) == "a"
    assert "".join(run(list("abcdef"), ["cde", "d"])) == "abc", "the one that is complete first"


def test_start_of_any_stop_string_is_held_back() -> None:
    assert run(["x", "a", "b"], ["ab", "cd"]) == ["x", "", "", ""]
    assert run(["x", "a", "z"], ["ab", "cd"]) == ["x", "", "az", ""]


def test_stop_string_next_to_an_incomplete_character() -> None:
    assert "".join(run(["x€s", "top"], ["stop"])) == "x€"
    assert "".join(run([b"a\xe2\x82", b"\xacstop"], ["€stop"])) == "a"
    assert "".join(run([b"stop\xe2"], ["stop"])) == "", "also if only `finish` decodes it"


def test_nothing_is_released_after_a_stop_string() -> None:
    stream = TextStream(BytesTokenizer([b"a STOP b"]), [], ["STOP"])
    assert stream.push(0) == "a "
    assert stream.stopped
    assert stream.finish() == ""
    assert stream.text == "a "


# ---- random tokens and stop strings

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
    """Check that the released text is that of the tokens taken, up to the first stop string, and stops in time."""

    def decoded(count: int) -> str:
        return b"".join(t or b"" for t in tokens[:count]).decode("utf-8", errors="replace")

    pieces = run(tokens, stop)
    count = len(pieces) - 1  # tokens that were taken before the stream stopped
    at = first_stop(decoded(count), stop)
    assert "".join(pieces) == decoded(count)[:at]
    if at is None:
        assert count == len(tokens)
    for fewer in range(count):
        text = decoded(fewer)
        if not text.endswith(REPLACEMENT):
            assert first_stop(text, stop) is None, "it should have stopped there"


@settings(max_examples=300, deadline=None)
@given(st.lists(chunks, max_size=14), stops)
def test_released_text_ends_at_the_first_stop_string(tokens: list[bytes | None], stop: list[str]) -> None:
    check(tokens, stop)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=3).map(str.encode), max_size=10),
    st.lists(st.text("ab", min_size=2, max_size=6), min_size=1, max_size=3),
)
def test_near_matches_of_stop_strings(tokens: list[bytes], stop: list[str]) -> None:
    """Use two letters only, so that texts contain many starts of stop strings."""
    check(tokens, stop)


@settings(max_examples=300, deadline=None)
@given(st.text([*ALPHABET, REPLACEMENT], max_size=12), st.data(), stops)
def test_no_incomplete_character_is_released(text: str, data: st.DataObject, stop: list[str]) -> None:
    """Split valid text into tokens at any byte."""
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
def test_text_is_held_back_only_while_it_may_become_a_stop_string(words: list[str], stop: list[str]) -> None:
    pieces = run(words, stop)
    released = ""
    for count, piece in enumerate(pieces[:-1], start=1):
        released += piece
        held = "".join(words[:count])[len(released) :]
        if first_stop("".join(words[:count]), stop) is None:
            assert not held or any(s.startswith(held) for s in stop)


# ---- stop strings and a minimum length


@pytest.mark.parametrize(
    ("min_tokens", "text", "reason"),
    [
        (0, "x", "ab"),
        (1, "x", "ab"),
        (2, "x", "ab"),  # its last character comes with the third token
        (3, "xabc", "ab"),
        (4, "xabc", "ab"),
        (5, "xabcab", "yy"),
        (7, "xabcabyyz", None),
    ],
)
def test_stop_strings_that_end_within_the_minimum_are_text(min_tokens: int, text: str, reason: str | None) -> None:
    tokens = ["x", "a", "bc", "a", "b", "yy", "z"]
    stream = TextStream(BytesTokenizer([t.encode() for t in tokens]), [], ["never", "yy", "ab"], min_tokens)
    for token in range(len(tokens)):
        stream.push(token)
        if stream.stopped:
            break
    stream.finish()
    assert (stream.text, stream.stop_reason) == (text, reason)


# ---- byte fallback


def fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with the decoder of Llama and Mixtral: letters, and single bytes for everything else."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {letter: 256 + number for number, letter in enumerate("abc\u2581")}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, fuse_unk=True))
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="c")


def test_prompt_that_ends_with_characters_of_several_bytes() -> None:
    tokenizer = fallback_tokenizer()
    prompt = list("\N{PARTY POPPER}\N{GRINNING FACE}".encode())
    stream = TextStream(tokenizer, prompt, ())
    pieces = [stream.push(byte) for byte in "\N{PARTY POPPER}".encode()]
    assert [*pieces, stream.finish()] == ["", "", "", "\N{PARTY POPPER}", ""]


@settings(max_examples=300, deadline=None)
@given(
    st.text("ab \u20ac\N{PARTY POPPER}\N{GRINNING FACE}\u00e9", max_size=8),
    st.text("ab \u20ac\N{PARTY POPPER}", max_size=6),
)
def test_streamed_text_is_the_text_after_the_prompt(prompt: str, output: str) -> None:
    tokenizer = fallback_tokenizer()

    def encode(text: str) -> list[int]:
        known = {"a": 256, "b": 257, " ": 259}
        return [token for one in text for token in ([known[one]] if one in known else list(one.encode()))]

    stream = TextStream(tokenizer, [256, *encode(prompt)], ())
    text = "".join([*(stream.push(token) for token in encode(output)), stream.finish()])
    assert text == stream.text == output


def test_long_runs_without_text_are_not_decoded_again_and_again() -> None:
    decoded = 0

    class Counting(BytesTokenizer):
        def decode(self, ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
            nonlocal decoded
            decoded += len(ids)
            return super().decode(ids, skip_special_tokens, clean_up_tokenization_spaces)

    for token in (None, b"\x80"):
        decoded, count = 0, 2000
        stream = TextStream(Counting([token]), [], ())
        for _ in range(count):
            stream.push(0)
        stream.finish()
        assert decoded < 20 * count
