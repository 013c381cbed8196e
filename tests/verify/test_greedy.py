"""Greedy verification: what comes out is what plain greedy decoding would have written."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmoe.config import SamplingParams
from spmoe.errors import SpmoeError
from spmoe.types import Draft, Sequence, VerifyResult
from spmoe.verify.greedy import GreedyVerifier
from spmoe.verify.rejection import RejectionVerifier


def sequence(tokens: list[int] | None = None) -> Sequence:
    tokens = tokens or [0]
    return Sequence(0, tokens, len(tokens), SamplingParams(), torch.Generator().manual_seed(0), capacity=1000)


def verify(draft: list[int], choices: list[int], vocabulary: int = 8) -> VerifyResult:
    """The verdict when the target's most likely tokens are `choices`."""
    logits = torch.nn.functional.one_hot(torch.tensor(choices), vocabulary).float()
    return GreedyVerifier().verify(sequence(), Draft(draft), logits)


def test_all_kept_and_the_bonus_token_follows() -> None:
    assert verify([3, 1, 4], [3, 1, 4, 5]) == VerifyResult(accepted=3, next_token=5)


def test_the_first_wrong_token_is_replaced_by_the_targets() -> None:
    assert verify([3, 1, 4], [3, 2, 4, 5]) == VerifyResult(accepted=1, next_token=2)
    assert verify([3, 1, 4], [6, 1, 4, 5]) == VerifyResult(accepted=0, next_token=6)
    assert verify([3, 1, 4], [3, 1, 7, 5]) == VerifyResult(accepted=2, next_token=7)


def test_without_a_draft_the_next_token_is_the_targets() -> None:
    assert verify([], [6]) == VerifyResult(accepted=0, next_token=6)


def test_tokens_that_agree_again_after_a_wrong_one_are_not_kept() -> None:
    # after a wrong token the target's logits are those of another text
    assert verify([1, 2, 2, 2], [1, 3, 2, 2, 2]) == VerifyResult(accepted=1, next_token=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_equal_logits_the_lowest_token_wins(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 5.0], [2.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 7.0]], dtype=dtype)
    verifier = GreedyVerifier()
    assert verifier.verify(sequence(), Draft([1, 0]), logits) == VerifyResult(2, 3)
    assert verifier.verify(sequence(), Draft([2, 0]), logits) == VerifyResult(0, 1)
    assert verifier.verify(sequence(), Draft([1, 3]), logits) == VerifyResult(1, 0)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data(), st.integers(0, 6), st.integers(1, 4))
def test_keeps_the_longest_matching_prefix(data: st.DataObject, k: int, vocabulary: int) -> None:
    token = st.integers(0, vocabulary - 1)
    draft = data.draw(st.lists(token, min_size=k, max_size=k))
    choices = data.draw(st.lists(token, min_size=k + 1, max_size=k + 1))
    result = verify(draft, choices, vocabulary)
    longest = max(n for n in range(k + 1) if draft[:n] == choices[:n])
    assert result == VerifyResult(longest, choices[longest])


@pytest.mark.parametrize("k", [0, 1, 2, 4, 7])
@pytest.mark.parametrize("quality", [0.0, 0.6, 1.0])
def test_generation_is_that_of_plain_decoding(k: int, quality: float) -> None:
    """A toy target whose logits depend on the last two tokens; a draft that is right with chance `quality`."""
    rng = torch.Generator().manual_seed(21)
    table = torch.randint(0, 5, (6, 6, 6), generator=rng).float()  # small whole numbers: many ties

    def plain(tokens: list[int]) -> int:
        return int(table[tokens[-2], tokens[-1]].argmax())

    expected = [0, 1]
    while len(expected) < 60:
        expected.append(plain(expected))

    written, steps = [0, 1], 0
    while len(written) < 60:
        draft: list[int] = []
        for _ in range(k):
            right = float(torch.rand((), generator=rng)) < quality
            draft.append(plain(written + draft) if right else int(torch.randint(0, 6, (), generator=rng)))
        text = written + draft
        logits = torch.stack([table[text[i - 1], text[i]] for i in range(len(written) - 1, len(text))])
        result = GreedyVerifier().verify(sequence(written), Draft(draft), logits)
        written = [*written, *draft[: result.accepted], result.next_token]
        steps += 1
    assert written[:60] == expected
    if quality == 1.0:
        assert steps == -(-58 // (k + 1))  # every step wrote k + 1 tokens


@pytest.mark.parametrize("row", [0, 2])
def test_logits_that_are_not_numbers_are_refused(row: int) -> None:
    logits = torch.randn(3, 8)
    logits[row, 5] = float("nan")
    with pytest.raises(SpmoeError, match="not a number"):
        GreedyVerifier().verify(sequence(), Draft([1, 2]), logits)
    with pytest.raises(SpmoeError, match="not a number"):
        RejectionVerifier().verify(sequence(), Draft([1, 2], torch.full((2, 8), 0.125)), logits)
