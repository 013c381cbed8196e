"""Greedy verification gives the output of greedy decoding without a draft."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmoe.config import SamplingParams
from spmoe.errors import SpmoeError
from spmoe.types import Draft, Sequence, VerifyResult
from spmoe.verify.greedy import argmax_rows, read_argmax, verify_greedy
from spmoe.verify.sampling import PositionNoise, verify_sampled


def sequence(tokens: list[int] | None = None) -> Sequence:
    tokens = tokens or [0]
    return Sequence(0, tokens, len(tokens), SamplingParams(), PositionNoise(0), capacity=1000)


def verify(draft: list[int], argmax: list[int], vocabulary: int = 8) -> VerifyResult:
    """Verify a draft against a target whose argmax tokens are `argmax`."""
    logits = torch.nn.functional.one_hot(torch.tensor(argmax), vocabulary).float()
    return verify_logits(draft, logits)


def verify_logits(draft: list[int], logits: Tensor) -> VerifyResult:
    return verify_greedy(Draft(draft), read_argmax(argmax_rows(logits)))


def test_accepts_all_and_adds_the_bonus_token() -> None:
    assert verify([3, 1, 4], [3, 1, 4, 5]) == VerifyResult(accepted=3, next_token=5)


def test_replaces_the_first_wrong_token_by_the_targets() -> None:
    assert verify([3, 1, 4], [3, 2, 4, 5]) == VerifyResult(accepted=1, next_token=2)
    assert verify([3, 1, 4], [6, 1, 4, 5]) == VerifyResult(accepted=0, next_token=6)
    assert verify([3, 1, 4], [3, 1, 7, 5]) == VerifyResult(accepted=2, next_token=7)


def test_empty_draft_returns_the_targets_token() -> None:
    assert verify([], [6]) == VerifyResult(accepted=0, next_token=6)


def test_rejects_matching_tokens_after_a_wrong_one() -> None:
    # the target's logits after a wrong token belong to another text
    assert verify([1, 2, 2, 2], [1, 3, 2, 2, 2]) == VerifyResult(accepted=1, next_token=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lowest_token_wins_a_tie(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 5.0], [2.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 7.0]], dtype=dtype)
    assert verify_logits([1, 0], logits) == VerifyResult(2, 3)
    assert verify_logits([2, 0], logits) == VerifyResult(0, 1)
    assert verify_logits([1, 3], logits) == VerifyResult(1, 0)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data(), st.integers(0, 6), st.integers(1, 4))
def test_accepts_the_longest_matching_prefix(data: st.DataObject, k: int, vocabulary: int) -> None:
    token = st.integers(0, vocabulary - 1)
    draft = data.draw(st.lists(token, min_size=k, max_size=k))
    argmax = data.draw(st.lists(token, min_size=k + 1, max_size=k + 1))
    result = verify(draft, argmax, vocabulary)
    longest = max(n for n in range(k + 1) if draft[:n] == argmax[:n])
    assert result == VerifyResult(longest, argmax[longest])


@pytest.mark.parametrize("k", [0, 1, 2, 4, 7])
@pytest.mark.parametrize("quality", [0.0, 0.6, 1.0])
def test_generation_equals_decoding_without_a_draft(k: int, quality: float) -> None:
    """Decode a toy target whose logits depend on the last two tokens, with a draft of accuracy `quality`."""
    rng = torch.Generator().manual_seed(21)
    table = torch.randint(0, 5, (6, 6, 6), generator=rng).float()  # small integers, so that there are many ties

    def next_token(tokens: list[int]) -> int:
        return int(table[tokens[-2], tokens[-1]].argmax())

    expected = [0, 1]
    while len(expected) < 60:
        expected.append(next_token(expected))

    output, steps = [0, 1], 0
    while len(output) < 60:
        draft: list[int] = []
        for _ in range(k):
            right = float(torch.rand((), generator=rng)) < quality
            draft.append(next_token(output + draft) if right else int(torch.randint(0, 6, (), generator=rng)))
        text = output + draft
        logits = torch.stack([table[text[i - 1], text[i]] for i in range(len(output) - 1, len(text))])
        result = verify_logits(draft, logits)
        output = [*output, *draft[: result.accepted], result.next_token]
        steps += 1
    assert output[:60] == expected
    if quality == 1.0:
        assert steps == -(-58 // (k + 1))  # every step emits k + 1 tokens


@pytest.mark.parametrize("row", [0, 2])
def test_nan_logits_raise_an_error(row: int) -> None:
    logits = torch.randn(3, 8)
    logits[row, 5] = float("nan")
    with pytest.raises(SpmoeError, match="contain NaN"):
        verify_logits([1, 2], logits)
    with pytest.raises(SpmoeError, match="contain NaN"):
        verify_sampled(sequence(), Draft([1, 2]), logits)
