"""The choice of K under known costs and acceptance rates."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmoe.predict.draft_length import FIRST, LENGTHS, DraftLength
from spmoe.predict.latency import expected_experts

MOST = LENGTHS[-1]
Verify = Callable[[int], float]


def loads(k: int) -> float:
    """Seconds of a verification that only loads experts, with eight experts in a layer."""
    return 65.0 * expected_experts(8, 2, k + 1)


def compute(k: int) -> float:
    """Seconds of a verification that only computes."""
    return 3.0 + 1.2 * k


def simulate(
    length: DraftLength,
    steps: int,
    acceptance: float,
    draft_pass: float,
    verify: Verify,
    seed: int = 0,
    noise: float = 0.1,
) -> list[int]:
    """Run steps in which each draft token is accepted with this probability; return K of each step."""
    rng, found = random.Random(seed), []
    for _ in range(steps):
        k = length.current
        accepted = 0
        while accepted < k and rng.random() < acceptance:
            accepted += 1
        length.learn(k, accepted, k * draft_pass, verify(k) * rng.lognormvariate(0, noise))
        found.append(k)
    return found


def best(acceptance: float, draft_pass: float, verify: Verify) -> int:
    return max(LENGTHS, key=lambda k: _rate(k, acceptance, draft_pass, verify))


def _rate(k: int, acceptance: float, draft_pass: float, verify: Verify) -> float:
    return sum(acceptance**position for position in range(k + 1)) / (k * draft_pass + verify(k))


@pytest.mark.parametrize(
    ("acceptance", "draft_pass", "verify", "at_least", "at_most"),
    [
        (0.92, 2.3, loads, 12, MOST),  # rows share the experts, whose loads take all of the time
        (0.5, 2.3, loads, 0, 2),
        (0.92, 2.1, compute, 0, 0),
        (0.92, 0.4, compute, 2, 8),
        (0.3, 2.1, compute, 0, 0),  # plain decoding is fastest
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_finds_the_fastest_length(
    acceptance: float, draft_pass: float, verify: Verify, at_least: int, at_most: int, seed: int
) -> None:
    assert at_least <= best(acceptance, draft_pass, verify) <= at_most, "the expected range contains the fastest length"
    drafted = simulate(DraftLength(8, 2, MOST), 150, acceptance, draft_pass, verify, seed)[50:]
    inside = [k for k in drafted if at_least <= k <= at_most]
    assert len(inside) >= 0.7 * len(drafted), drafted


@pytest.mark.parametrize(
    ("acceptance", "draft_pass", "verify"), [(0.92, 2.3, loads), (0.8, 2.1, compute), (0.8, 2.3, loads)]
)
def test_is_nearly_as_fast_as_the_best_and_the_initial_length(
    acceptance: float, draft_pass: float, verify: Verify
) -> None:
    runs = [simulate(DraftLength(8, 2, MOST), 200, acceptance, draft_pass, verify, seed) for seed in range(5)]
    tokens = sum(sum(acceptance**position for position in range(k + 1)) for run in runs for k in run)
    seconds = sum(k * draft_pass + verify(k) for run in runs for k in run)
    assert tokens / seconds > 0.9 * _rate(best(acceptance, draft_pass, verify), acceptance, draft_pass, verify)
    assert tokens / seconds > 0.96 * _rate(FIRST, acceptance, draft_pass, verify)


def test_shortens_drafts_when_acceptance_drops() -> None:
    length = DraftLength(8, 2, MOST)
    assert simulate(length, 100, 0.95, 2.3, loads)[-1] >= 12
    assert max(simulate(length, 150, 0.4, 2.3, loads)[100:]) <= 4


def test_the_first_step_of_each_length_is_not_timed() -> None:
    slow_at_first, never_slow, run_before = DraftLength(8, 2, MOST), DraftLength(8, 2, MOST), set[int]()
    for _ in range(60):
        k = never_slow.current
        for length, factor in ((slow_at_first, 1 if k in run_before else 1000), (never_slow, 1)):
            length.learn(k, k, 2.3 * k, loads(k) * factor)
        run_before.add(k)
        assert slow_at_first.current == never_slow.current
    assert len(run_before) > 2


def test_one_slow_step_changes_little() -> None:
    length = DraftLength(8, 2, MOST)
    simulate(length, 60, 0.92, 2.3, loads)
    before = [length.seconds(k) for k in LENGTHS]
    length.learn(length.current, length.current, 1e6, 1e9)
    assert all(length.seconds(k) < 1.2 * old for k, old in zip(LENGTHS, before, strict=True))


@pytest.mark.parametrize("times", [10, 100, 1000])
def test_recovers_from_a_slow_first_draft(times: int) -> None:
    length = DraftLength(8, 2, MOST)
    for _ in range(2):
        length.learn(FIRST, FIRST, times * 2.3 * FIRST, loads(FIRST))
    assert simulate(length, 150, 0.95, 2.3, loads)[-1] >= 12


def test_learns_from_drafts_shorter_than_requested() -> None:
    """An n-gram drafter proposes many tokens, few or none."""
    length, rng = DraftLength(8, 2, MOST), random.Random(0)
    for _ in range(200):
        drafted = rng.choice([0, min(2, length.current), length.current])
        length.learn(drafted, drafted, 0.0, loads(drafted))
    assert length.current == MOST
    assert length.seconds(MOST) == pytest.approx(loads(MOST), rel=0.1)


@pytest.mark.parametrize("most", [0, 1, 4, 5, MOST])
def test_never_exceeds_the_maximum(most: int) -> None:
    length = DraftLength(8, 2, most)
    assert max(simulate(length, 60, 1.0, 0.01, loads)) == max(k for k in LENGTHS if k <= most)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, MOST), st.floats(0.0, 1.0), st.floats(0.0, 1e3), st.floats(0.0, 1e3))))
def test_times_stay_positive_and_lengths_valid_for_any_steps(
    steps: list[tuple[int, float, float, float]],
) -> None:
    length = DraftLength(64, 8, MOST)
    for other, share, draft, verify in steps:
        k = length.current if other % 2 else other
        length.learn(k, round(k * share), draft, verify)
        assert length.current in LENGTHS
        assert all(length.seconds(one) > 0 and 1 <= length.tokens(one) <= one + 1 for one in LENGTHS)
