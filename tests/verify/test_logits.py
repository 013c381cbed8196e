"""Logits processors give each row of a verification the logits that plain decoding would have there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from spmoe.config import SamplingParams
from spmoe.types import Sequence
from spmoe.verify.logits import LogitsProcessors, process_logits, token_logprobs
from spmoe.verify.sampling import PositionNoise

VOCABULARY = 13
PROMPT = [3, 1, 4, 1]
ENDS = (7, 9)


def sequence(output: list[int], **options: Any) -> Sequence:
    sampling = SamplingParams(max_tokens=50, **options)
    made = Sequence(0, [*PROMPT, *output], len(PROMPT), sampling, PositionNoise(0), capacity=100)
    made.processors = LogitsProcessors.of(sampling, ENDS, len(PROMPT), VOCABULARY)
    return made


def logits_of(rows: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def repetition(penalty: float) -> Callable[[list[int], Tensor], Tensor]:
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    return lambda history, row: processor(torch.tensor([history]), row[None].clone())[0]


def minimum(count: int) -> Callable[[list[int], Tensor], Tensor]:
    processor = MinNewTokensLengthLogitsProcessor(len(PROMPT), count, list(ENDS))
    return lambda history, row: processor(torch.tensor([history]), row[None].clone())[0]


def bias(biases: dict[int, float]) -> Callable[[list[int], Tensor], Tensor]:
    processor = SequenceBiasLogitsProcessor({(token,): value for token, value in biases.items()})
    return lambda history, row: processor(torch.tensor([history]), row[None].clone())[0]


REFERENCES: dict[str, tuple[dict[str, Any], Callable[[list[int], Tensor], Tensor]]] = {
    "repetition above 1": ({"repetition_penalty": 1.3}, repetition(1.3)),
    "repetition below 1": ({"repetition_penalty": 0.7}, repetition(0.7)),
    "minimum length": ({"min_tokens": 5}, minimum(5)),
    "bias": ({"logit_bias": {2: 3.5, 7: -100}}, bias({2: 3.5, 7: -100.0})),
}


@pytest.mark.parametrize("name", REFERENCES)
@given(
    output=st.lists(st.integers(0, VOCABULARY - 1), max_size=6),
    draft=st.lists(st.integers(0, VOCABULARY - 1), max_size=4),
    seed=st.integers(0, 100),
)
@settings(max_examples=25, deadline=None)
def test_every_row_has_the_bits_of_transformers(name: str, output: list[int], draft: list[int], seed: int) -> None:
    options, reference = REFERENCES[name]
    one, logits = sequence(output, **options), logits_of(len(draft) + 1, seed)
    before = logits.clone()
    found = process_logits(logits, one, draft)
    for row, scores in enumerate(found):
        assert torch.equal(scores, reference(one.tokens + draft[:row], before[row]))
    assert torch.equal(logits, before), "the model's own logits are not changed"


@given(
    output=st.lists(st.integers(0, VOCABULARY - 1), max_size=8),
    draft=st.lists(st.integers(0, VOCABULARY - 1), max_size=4),
)
@settings(max_examples=25, deadline=None)
def test_presence_and_frequency_count_the_output_only(output: list[int], draft: list[int]) -> None:
    one, logits = sequence(output, presence_penalty=0.5, frequency_penalty=-0.25), logits_of(len(draft) + 1)
    for row, scores in enumerate(process_logits(logits, one, draft)):
        counts = Counter(output + draft[:row])
        expected = [float(logits[row, t]) + 0.25 * counts[t] - 0.5 * (counts[t] > 0) for t in range(VOCABULARY)]
        assert scores.tolist() == pytest.approx(expected, abs=1e-6)


EVERYTHING = {
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "min_tokens": 4,
    "logit_bias": {1: 2.0, 11: -5.0},
}


@given(
    output=st.lists(st.integers(0, VOCABULARY - 1), max_size=8),
    draft=st.lists(st.integers(0, VOCABULARY - 1), max_size=5),
)
@settings(max_examples=25, deadline=None)
def test_rows_are_those_of_plain_decoding(output: list[int], draft: list[int]) -> None:
    """A row of a verification, a draft's single row, and a sequence that has the draft's tokens agree."""
    logits = logits_of(len(draft) + 1)
    rows = process_logits(logits, sequence(output, **EVERYTHING), draft)
    drafting = sequence(output, **EVERYTHING)
    for row in range(len(logits)):
        plain = process_logits(logits[row : row + 1], sequence(output + draft[:row], **EVERYTHING), [])
        assert torch.equal(rows[row], plain[0])
        assert torch.equal(rows[row], process_logits(logits[row : row + 1], drafting, draft[:row])[0])


def test_counts_follow_a_growing_sequence() -> None:
    one = sequence([], **EVERYTHING)
    for step, new in enumerate(([5], [5, 6, 5], [], [1, 2])):
        one.tokens += new
        fresh = sequence(one.tokens[len(PROMPT) :], **EVERYTHING)
        logits, draft = logits_of(3, step), [6, 5]
        assert torch.equal(process_logits(logits, one, draft), process_logits(logits, fresh, draft))


def test_processors_run_in_this_order() -> None:
    """A bias is added before penalties, so that it is scaled by the repetition penalty."""
    one = sequence([2], repetition_penalty=2.0, presence_penalty=1.0, logit_bias={2: 4.0})
    scores = process_logits(torch.ones(1, VOCABULARY), one, [])[0]
    assert float(scores[2]) == (1 + 4) / 2 - 1
    assert float(scores[3]) == 1 / 2, "a token of the prompt"
    assert float(scores[5]) == 1


def test_logits_without_processors_are_not_copied() -> None:
    logits = logits_of(2)
    assert sequence([1]).processors is None
    assert process_logits(logits, sequence([1]), [5]) is logits
    assert process_logits(logits, sequence([1], repetition_penalty=1.0, logit_bias={}), [5]) is logits


def test_minimum_length_ends() -> None:
    """Afterwards the device's own argmax can be used again."""
    one, logits = sequence([1, 2], min_tokens=3), logits_of(3)
    found = process_logits(logits, one, [5, 5])
    assert found[0, list(ENDS)].tolist() == [float("-inf")] * 2
    assert torch.equal(found[1:], logits[1:]), "three tokens are generated before these rows"
    one.tokens.append(5)
    assert process_logits(logits, one, [5, 5]) is logits


def test_end_tokens_outside_the_vocabulary_are_ignored() -> None:
    processors = LogitsProcessors.of(SamplingParams(min_tokens=2), [VOCABULARY, 3], 1, VOCABULARY)
    assert processors is not None
    assert processors.process(logits_of(1), [1], [])[0, 3] == float("-inf")
    assert LogitsProcessors.of(SamplingParams(min_tokens=2), [VOCABULARY], 1, VOCABULARY) is None


def test_half_precision_logits_are_processed_in_float32() -> None:
    logits = logits_of(1).bfloat16()
    found = process_logits(logits, sequence([3], repetition_penalty=1.3), [])
    assert found.dtype == torch.float32
    assert torch.equal(found[0], repetition(1.3)([*PROMPT, 3], logits[0].float()))


@pytest.mark.parametrize("count", [0, 1, 4, -1, 50])
def test_log_probabilities(count: int) -> None:
    logits, tokens = logits_of(4), [2, 11, 5]
    found = token_logprobs(logits, tokens, count)
    assert len(found) == 3
    expected = logits.double().log_softmax(dim=-1)
    for row, (token, one) in enumerate(zip(tokens, found, strict=True)):
        order = expected[row].argsort(descending=True).tolist()
        assert one.logprob == pytest.approx(float(expected[row, token]), abs=1e-5)
        assert one.rank == order.index(token) + 1
        assert list(one.top) == order[: VOCABULARY if count < 0 else count]
        assert list(one.top.values()) == pytest.approx([float(expected[row, t]) for t in one.top], abs=1e-5)
