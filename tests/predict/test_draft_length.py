"""How many tokens are drafted: what pays under known costs is found, and kept to."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmoe.predict.draft_length import FIRST, LENGTHS, DraftLength
from spmoe.predict.latency import evenly_needed

MOST = LENGTHS[-1]
Verify = Callable[[int], float]


def loads(k: int) -> float:
    """Verification that waits for experts alone, eight of which there are in a layer."""
    return 65.0 * evenly_needed(8, 2, k + 1)


def compute(k: int) -> float:
    """Verification that reads weights and works on rows."""
    return 3.0 + 1.2 * k


def play(
    length: DraftLength, steps: int, kept: float, draft_pass: float, verify: Verify, seed: int = 0, noise: float = 0.1
) -> list[int]:
    """Steps in which each drafted token is kept with this chance; how many were drafted in each."""
    dice, found = random.Random(seed), []
    for _ in range(steps):
        k = length.current
        accepted = 0
        while accepted < k and dice.random() < kept:
            accepted += 1
        length.learn(k, accepted, k * draft_pass, verify(k) * dice.lognormvariate(0, noise))
        found.append(k)
    return found


def best(kept: float, draft_pass: float, verify: Verify) -> int:
    return max(LENGTHS, key=lambda k: _rate(k, kept, draft_pass, verify))


def _rate(k: int, kept: float, draft_pass: float, verify: Verify) -> float:
    return sum(kept**position for position in range(k + 1)) / (k * draft_pass + verify(k))


@pytest.mark.parametrize(
    ("kept", "draft_pass", "verify", "at_least", "at_most"),
    [
        (0.92, 2.3, loads, 12, MOST),  # rows share experts, whose loads are what takes time
        (0.5, 2.3, loads, 0, 2),
        (0.92, 2.1, compute, 0, 0),
        (0.92, 0.4, compute, 2, 8),
        (0.3, 2.1, compute, 0, 0),  # plain decoding is faster than any draft
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_what_pays_is_found(
    kept: float, draft_pass: float, verify: Verify, at_least: int, at_most: int, seed: int
) -> None:
    assert at_least <= best(kept, draft_pass, verify) <= at_most, "the case is what it is said to be"
    drafted = play(DraftLength(8, 2, MOST), 150, kept, draft_pass, verify, seed)[50:]
    inside = [k for k in drafted if at_least <= k <= at_most]
    assert len(inside) >= 0.7 * len(drafted), drafted


@pytest.mark.parametrize(("kept", "draft_pass", "verify"), [(0.92, 2.3, loads), (0.8, 2.1, compute), (0.8, 2.3, loads)])
def test_it_is_hardly_slower_than_the_best_and_than_what_it_begins_with(
    kept: float, draft_pass: float, verify: Verify
) -> None:
    chosen = [play(DraftLength(8, 2, MOST), 200, kept, draft_pass, verify, seed) for seed in range(5)]
    tokens = sum(sum(kept**position for position in range(k + 1)) for run in chosen for k in run)
    seconds = sum(k * draft_pass + verify(k) for run in chosen for k in run)
    assert tokens / seconds > 0.9 * _rate(best(kept, draft_pass, verify), kept, draft_pass, verify)
    assert tokens / seconds > 0.96 * _rate(FIRST, kept, draft_pass, verify)


def test_it_follows_a_text_that_becomes_harder() -> None:
    length = DraftLength(8, 2, MOST)
    assert play(length, 100, 0.95, 2.3, loads)[-1] >= 12
    assert max(play(length, 150, 0.4, 2.3, loads)[100:]) <= 4


def test_the_first_step_of_each_length_is_not_timed() -> None:
    slow_at_first, never, met = DraftLength(8, 2, MOST), DraftLength(8, 2, MOST), set[int]()
    for _ in range(60):
        k = never.current
        for length, factor in ((slow_at_first, 1 if k in met else 1000), (never, 1)):
            length.learn(k, k, 2.3 * k, loads(k) * factor)
        met.add(k)
        assert slow_at_first.current == never.current
    assert len(met) > 2


def test_a_step_that_took_oddly_long_changes_little() -> None:
    length = DraftLength(8, 2, MOST)
    play(length, 60, 0.92, 2.3, loads)
    before = [length.seconds(k) for k in LENGTHS]
    length.learn(length.current, length.current, 1e6, 1e9)
    assert all(length.seconds(k) < 1.2 * old for k, old in zip(LENGTHS, before, strict=True))


@pytest.mark.parametrize("times", [10, 100, 1000])
def test_a_first_draft_that_took_oddly_long_is_forgotten(times: int) -> None:
    length = DraftLength(8, 2, MOST)
    for _ in range(2):
        length.learn(FIRST, FIRST, times * 2.3 * FIRST, loads(FIRST))
    assert play(length, 150, 0.95, 2.3, loads)[-1] >= 12


def test_drafts_that_are_shorter_than_asked_for_teach_as_well() -> None:
    """As those that repeat what the text said before: they find many tokens, few or none."""
    length, dice = DraftLength(8, 2, MOST), random.Random(0)
    for _ in range(200):
        drafted = dice.choice([0, min(2, length.current), length.current])
        length.learn(drafted, drafted, 0.0, loads(drafted))
    assert length.current == MOST
    assert length.seconds(MOST) == pytest.approx(loads(MOST), rel=0.1)


@pytest.mark.parametrize("most", [0, 1, 4, 5, MOST])
def test_no_more_than_the_most(most: int) -> None:
    length = DraftLength(8, 2, most)
    assert max(play(length, 60, 1.0, 0.01, loads)) == max(k for k in LENGTHS if k <= most)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, MOST), st.floats(0.0, 1.0), st.floats(0.0, 1e3), st.floats(0.0, 1e3))))
def test_whatever_is_seen_times_stay_positive_and_lengths_those_there_are(
    steps: list[tuple[int, float, float, float]],
) -> None:
    length = DraftLength(64, 8, MOST)
    for other, share, draft, verify in steps:
        k = length.current if other % 2 else other
        length.learn(k, round(k * share), draft, verify)
        assert length.current in LENGTHS
        assert all(length.seconds(one) > 0 and 1 <= length.tokens(one) <= one + 1 for one in LENGTHS)
