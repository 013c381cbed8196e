"""Temperature, top-k, top-p and min-p against a float64 reference and the logits warpers of transformers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from spmoe.config import SamplingParams
from spmoe.verify.filters import probabilities

INF = float("inf")


def reference(logits: list[float], sampling: SamplingParams, slack: float = 0.0) -> np.ndarray:
    """Apply the filters to one row in float64, token by token; `slack` moves the bounds of top-p and min-p."""
    scores = np.array(logits, dtype=np.float64) / sampling.temperature
    kept = set(range(len(scores)))

    def renormalized() -> np.ndarray:
        weights = np.array([np.exp(s - scores.max()) if i in kept else 0.0 for i, s in enumerate(scores)])
        return weights / weights.sum()

    if sampling.top_k:
        smallest = sorted(scores, reverse=True)[min(sampling.top_k, len(scores)) - 1]
        kept = {i for i in kept if scores[i] >= smallest}
    if sampling.top_p < 1.0:
        probs, mass, nucleus = renormalized(), 0.0, set[int]()
        for i in sorted(kept, key=lambda i: (-scores[i], i)):  # ties: the lower token first
            if nucleus and mass >= sampling.top_p + slack:
                break
            nucleus.add(i)
            mass += probs[i]
        kept = nucleus
    if sampling.min_p > 0.0:
        probs = renormalized()
        kept = {i for i in kept if probs[i] >= min(sampling.min_p + slack, 1.0) * max(probs)}
    return renormalized()


def warped(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Apply the filters of transformers."""
    chain = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature))])
    if sampling.top_k > 0:
        chain.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        chain.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0.0:
        chain.append(MinPLogitsWarper(sampling.min_p))
    return chain(torch.zeros(len(logits), 1, dtype=torch.long), logits).softmax(dim=-1)


def one_row(logits: list[float], **options: float) -> list[float]:
    options = {"temperature": 1.0, **options}
    (row,) = probabilities(torch.tensor([logits]), SamplingParams(**options)).tolist()  # type: ignore[arg-type]
    return row


def logits_of(*masses: float) -> list[float]:
    """Return logits whose softmax is `masses`."""
    return [math.log(m) if m else -INF for m in masses]


# multiples of 1/8, so that ties are common and exact
logits_rows = st.lists(st.integers(-64, 64).map(lambda n: n / 8), min_size=1, max_size=12)
samplings = st.builds(
    SamplingParams,
    temperature=st.floats(0.05, 20.0),
    top_k=st.integers(0, 14),
    top_p=st.just(1.0) | st.floats(0.01, 0.999),
    min_p=st.just(0.0) | st.floats(0.001, 1.0),
)
any_samplings = st.builds(
    SamplingParams,
    temperature=st.floats(0.0, 1e308, exclude_min=True),
    top_k=st.integers(0, 14),
    top_p=st.floats(0.0, 1.0, exclude_min=True),
    min_p=st.floats(0.0, 1.0),
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(logits_rows, samplings)
def test_matches_float64_reference(logits: list[float], sampling: SamplingParams) -> None:
    expected = reference(logits, sampling)
    # float32 and float64 may differ for a token that meets a bound up to rounding
    assume(sampling.min_p == 1.0 or np.array_equal(reference(logits, sampling, 1e-5), expected))
    assume(sampling.min_p == 1.0 or np.array_equal(reference(logits, sampling, -1e-5), expected))
    (row,) = probabilities(torch.tensor([logits]), sampling).numpy()
    assert (row > 0).tolist() == (expected.astype(np.float32) > 0).tolist()
    np.testing.assert_allclose(row, expected, rtol=2e-5, atol=1e-30)


@pytest.mark.parametrize("min_p", [0.0, 0.02, 0.3])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 0.01])
@pytest.mark.parametrize("top_k", [-1, 0, 1, 7, 200])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_matches_transformers(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    rng = torch.Generator().manual_seed(11)
    logits = 4 * torch.randn(16, 150, generator=rng)
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    torch.testing.assert_close(probabilities(logits, sampling), warped(logits, sampling), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.55, 0.2])
@pytest.mark.parametrize("top_k", [0, 2, 5])
def test_matches_transformers_with_ties_up_to_the_order_of_equal_tokens(top_k: int, top_p: float) -> None:
    # Both keep all tied tokens in top-k and min-p, and the same number of them in top-p. Which of the tied tokens top-p
    # keeps is free: transformers keeps the higher ones, spmoe the lower ones, as argmax does.
    rng = torch.Generator().manual_seed(12)
    logits = torch.randint(0, 4, (64, 20), generator=rng).float()
    sampling = SamplingParams(temperature=0.9, top_k=top_k, top_p=top_p, min_p=0.1)
    found, expected = probabilities(logits, sampling), warped(logits, sampling)
    torch.testing.assert_close(found.sort(dim=-1).values, expected.sort(dim=-1).values, rtol=1e-5, atol=1e-9)


def test_top_k_keeps_all_tokens_tied_with_the_last() -> None:
    assert one_row(logits_of(0.4, 0.2, 0.2, 0.2), top_k=2) == pytest.approx([0.4, 0.2, 0.2, 0.2])
    assert one_row(logits_of(0.4, 0.3, 0.2, 0.1), top_k=2) == pytest.approx([4 / 7, 3 / 7, 0, 0])


def test_top_k_above_the_vocabulary_size_is_off() -> None:
    assert one_row(logits_of(0.7, 0.3), top_k=9) == pytest.approx([0.7, 0.3])


def test_top_p_keeps_the_smallest_sufficient_set_and_the_lowest_of_tied_tokens() -> None:
    logits = logits_of(4 / 12, 2 / 12, 2 / 12, 1 / 12, 1 / 12, 1 / 12, 1 / 12)
    assert one_row(logits, top_p=0.45) == pytest.approx([2 / 3, 1 / 3, 0, 0, 0, 0, 0])
    assert one_row(logits, top_p=0.55) == pytest.approx([1 / 2, 1 / 4, 1 / 4, 0, 0, 0, 0])
    assert one_row(logits, top_p=0.70) == pytest.approx([4 / 9, 2 / 9, 2 / 9, 1 / 9, 0, 0, 0])


def test_top_p_met_exactly_keeps_no_further_token() -> None:
    uniform = [0.0] * 4
    assert one_row(uniform, top_p=0.25) == [1.0, 0.0, 0.0, 0.0]
    assert one_row(uniform, top_p=0.5) == [0.5, 0.5, 0.0, 0.0]
    assert one_row(uniform, top_p=0.500001) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0.0])


@pytest.mark.parametrize("top_p", [1e-3, 1e-30, 1e-46, 5e-324])
def test_top_p_always_keeps_the_first_token(top_p: float) -> None:
    assert one_row([0.0, 3.0, 1.0], top_p=top_p) == [0.0, 1.0, 0.0]


def test_top_p_applies_to_the_probabilities_after_top_k() -> None:
    # top-k leaves 4/7 and 3/7, so one token is enough for 0.5; without top-k it takes two
    assert one_row(logits_of(0.4, 0.3, 0.2, 0.1), top_k=2, top_p=0.5) == [1.0, 0.0, 0.0, 0.0]
    assert one_row(logits_of(0.4, 0.3, 0.2, 0.1), top_p=0.5) == pytest.approx([4 / 7, 3 / 7, 0.0, 0.0])


def test_min_p_is_relative_to_the_most_likely_token_and_keeps_ties() -> None:
    masses = logits_of(0.4, 0.4, 0.15, 0.05)
    assert one_row(masses, min_p=0.3) == pytest.approx([0.4 / 0.95, 0.4 / 0.95, 0.15 / 0.95, 0.0])
    assert one_row(masses, min_p=1.0) == pytest.approx([0.5, 0.5, 0.0, 0.0])


def test_temperature_is_applied_before_the_other_filters() -> None:
    masses = logits_of(0.4, 0.2, 0.2, 0.1)
    squared = [0.64, 0.16, 0.16, 0.04]
    assert one_row(masses, temperature=0.5) == pytest.approx(squared)
    assert one_row(masses, temperature=0.5, top_p=0.6) == [1.0, 0.0, 0.0, 0.0]
    assert one_row(masses, temperature=0.5, min_p=0.1) == pytest.approx([x / 0.96 for x in squared[:3]] + [0.0])


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
@pytest.mark.parametrize("temperature", [1e-4, 1e-20, 1e-38, 1e-45, 5e-324])
def test_lowest_temperatures_return_the_argmax(temperature: float, options: dict[str, float]) -> None:
    for logits in ([1.0, 20.0, -3.0, -INF], [-900.0, -800.0, -801.0, -850.0], [0.0, 30000.0, 29999.0, -30000.0]):
        assert one_row(logits, temperature=temperature, **options) == [0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("temperature", [1e10, 1e30, 1e38, 1e40, 1.7e308])
def test_highest_temperatures_are_uniform_over_finite_logits(temperature: float) -> None:
    logits = [1.0, 20.0, -3.0, -INF]
    assert one_row(logits, temperature=temperature) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0.0])
    # the filters still rank tokens by their logits
    assert one_row(logits, temperature=temperature, top_k=2) == pytest.approx([1 / 2, 1 / 2, 0.0, 0.0])
    assert one_row(logits, temperature=temperature, top_p=0.6) == pytest.approx([1 / 2, 1 / 2, 0.0, 0.0])
    assert one_row(logits, temperature=temperature, top_p=0.3) == [0.0, 1.0, 0.0, 0.0]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(logits=st.lists(st.integers(-30_000, 30_000).map(float), min_size=1, max_size=12), sampling=any_samplings)
def test_rows_sum_to_one_and_keep_the_most_likely_token(logits: list[float], sampling: SamplingParams) -> None:
    row = probabilities(torch.tensor([logits]), sampling)
    assert row.dtype == torch.float32
    assert float(row.sum()) == pytest.approx(1.0, abs=1e-6)
    assert float(row.min()) >= 0.0
    assert float(row[0, int(torch.tensor(logits).argmax())]) == float(row.max()) > 0.0


def test_rows_are_independent_and_logits_are_not_modified() -> None:
    rng = torch.Generator().manual_seed(13)
    logits = 3 * torch.randn(5, 40, generator=rng)
    before = logits.clone()
    sampling = SamplingParams(temperature=0.8, top_k=10, top_p=0.9, min_p=0.02)
    full = probabilities(logits, sampling)
    row_by_row = torch.cat([probabilities(row[None], sampling) for row in logits])
    assert torch.equal(full, row_by_row)
    assert torch.equal(logits, before)
    torch.testing.assert_close(full.sum(dim=-1), torch.ones(5), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_all_float_types_are_computed_in_float32(dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(14)
    logits = torch.randn(3, 30, generator=rng).to(dtype)
    sampling = SamplingParams(temperature=0.7, top_p=0.8)
    probs = probabilities(logits, sampling)
    assert probs.dtype == torch.float32
    assert torch.equal(probs, probabilities(logits.float(), sampling))


@pytest.mark.parametrize("top_k", [0, 30])
@pytest.mark.parametrize("top_p", [0.999, 0.9, 0.3])
@pytest.mark.parametrize("spread", [0.0, 0.5, 8.0])
@pytest.mark.parametrize("first", [1, 3, 16])
def test_top_p_does_not_depend_on_the_tokens_that_are_sorted_first(
    monkeypatch: pytest.MonkeyPatch, spread: float, top_p: float, top_k: int, first: int
) -> None:
    rng = torch.Generator().manual_seed(15)
    logits = torch.cat([spread * torch.randn(4, 300, generator=rng), torch.randint(0, 4, (4, 300), generator=rng)])
    logits[:, ::7] = -INF
    sampling = SamplingParams(temperature=0.9, top_k=top_k, top_p=top_p)
    monkeypatch.setattr("spmoe.verify.filters._SORTED_FIRST", 1000)
    expected = probabilities(logits, sampling)
    monkeypatch.setattr("spmoe.verify.filters._SORTED_FIRST", first)
    torch.testing.assert_close(probabilities(logits, sampling), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("row", [[1.0, math.nan, *[0.5] * 600], [-INF] * 600], ids=["nan", "no token"])
def test_top_p_of_logits_that_are_no_distribution_is_nan(row: list[float]) -> None:
    assert probabilities(torch.tensor([row]), SamplingParams(temperature=1.0, top_p=0.5)).sum().isnan()


@pytest.mark.parametrize("top_k", [0, 20])
def test_top_p_sorts_few_tokens_of_a_large_vocabulary(monkeypatch: pytest.MonkeyPatch, top_k: int) -> None:
    logits, counts = 6 * torch.randn(3, 50_000, generator=torch.Generator().manual_seed(16)), list[int]()
    for name in ("sort", "argsort"):
        own = getattr(Tensor, name)

        def noted(self: Tensor, *args: Any, own: Any = own, **options: Any) -> Any:
            counts.append(self.numel())
            return own(self, *args, **options)

        monkeypatch.setattr(Tensor, name, noted)
    probabilities(logits, SamplingParams(temperature=0.7, top_p=0.9, top_k=top_k))
    assert 0 < sum(counts) < 3000
