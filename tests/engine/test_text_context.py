"""Text after a prompt is that of the tokenizer for the whole, where a token's text depends on tokens before it."""

from __future__ import annotations

import pytest
from test_text import fallback_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from spmoe.engine.text import TextStream

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
A, B, EOS, SPACE = 256, 257, 258, 259  # tokens of `fallback_tokenizer`


def streamed(tokenizer: PreTrainedTokenizerFast, prompt: list[int], output: list[int]) -> str:
    stream = TextStream(tokenizer, prompt, ())
    text = "".join([*(stream.push(token) for token in output), stream.finish()])
    assert text == stream.text
    return text


def after_prompt(tokenizer: PreTrainedTokenizerFast, prompt: list[int], output: list[int]) -> str:
    """Return the text of the whole after the text of the prompt."""
    before, whole = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, prompt + output))
    assert whole.startswith(before)
    return whole[len(before) :]


@pytest.mark.parametrize("count", range(1, 10))
def test_space_after_special_tokens(count: int) -> None:
    """The decoder drops the first space of a text; special tokens at the end of the prompt are no text."""
    tokenizer, prompt = fallback_tokenizer(), [A] + [EOS] * count
    assert after_prompt(tokenizer, prompt, [SPACE, B]) == " b"
    assert streamed(tokenizer, prompt, [SPACE, B]) == " b"


def test_space_after_a_prompt_without_text() -> None:
    tokenizer = fallback_tokenizer()
    assert streamed(tokenizer, [EOS] * 8, [SPACE, B]) == after_prompt(tokenizer, [EOS] * 8, [SPACE, B]) == "b"


@pytest.mark.parametrize("count", range(1, 5))
def test_byte_in_a_run_that_is_no_text(count: int) -> None:
    """A byte-fallback decoder replaces every byte of a run with an invalid one, also those that are characters."""
    tokenizer = fallback_tokenizer()
    prompt, output = [A, B, 0xFF, *b"xyzw"[:count]], [*b"v", A]
    assert after_prompt(tokenizer, prompt, output) == f"{REPLACEMENT}a"
    assert streamed(tokenizer, prompt, output) == f"{REPLACEMENT}a"


def test_text_that_depends_on_six_tokens_before() -> None:
    """A decoder may join tokens; this one changes the last letter of a word of seven tokens."""
    letters = "abcdefg"
    core = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="a"))
    core.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace("abcdefg", "abcdef!")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    prompt, output = list(range(6)), [6, 0]
    assert after_prompt(tokenizer, prompt, output) == "!a"
    assert streamed(tokenizer, [0, 0, *prompt], output) == "!a"
