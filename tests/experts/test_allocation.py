"""Slots per layer: all are given out, and by dynamic programming as well as by trying everything."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmoe.experts.allocation import best_quotas, equal_quotas

modest = settings(max_examples=150, deadline=None, derandomize=True)
counts = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@pytest.mark.parametrize(
    ("experts", "slots", "quotas"),
    [
        ((4, 4, 4), 6, [2, 2, 2]),
        ((4, 4, 4), 8, [3, 3, 2]),
        ((4, 4, 4), 2, [1, 1, 0]),
        ((3, 1, 4), 7, [3, 1, 3]),
        ((3, 1, 4), 20, [3, 1, 4]),
        ((3, 1, 4), 0, [0, 0, 0]),
    ],
)
def test_equal_quotas(experts: tuple[int, ...], slots: int, quotas: list[int]) -> None:
    assert equal_quotas(experts, slots) == quotas


@modest
@given(experts=st.lists(st.integers(1, 9), min_size=1, max_size=12), slots=st.integers(0, 80))
def test_equal_quotas_are_all_the_slots_and_as_equal_as_can_be(experts: list[int], slots: int) -> None:
    quotas = equal_quotas(experts, slots)
    assert sum(quotas) == min(slots, sum(experts))
    assert all(0 <= quota <= count for quota, count in zip(quotas, experts, strict=True))
    poorest = min((q for q, count in zip(quotas, experts, strict=True) if q < count), default=max(quotas))
    assert max(quotas) <= poorest + 1, "who has fewer than another has all its experts, or one fewer"


@modest
@given(experts=counts, slots=st.integers(0, 16), data=st.data())
def test_the_best_quotas_are_those_of_trying_everything(experts: list[int], slots: int, data: st.DataObject) -> None:
    steps = st.integers(0, 20)
    gains = [
        np.cumsum([0.0, *data.draw(st.lists(steps, min_size=count, max_size=count))]) for count in experts
    ]  # any curve that does not fall: hits need not get fewer and fewer
    quotas = best_quotas(gains, slots)
    assert sum(quotas) == min(slots, sum(experts))
    every = product(*(range(count + 1) for count in experts))
    best = max(sum(g[c] for g, c in zip(gains, q, strict=True)) for q in every if sum(q) == sum(quotas))
    assert sum(g[c] for g, c in zip(gains, quotas, strict=True)) == best


def test_a_curve_that_rises_late_is_worth_waiting_for() -> None:
    """Two experts that only help together: greedily, slot by slot, nobody would give the first."""
    gains = [np.array([0.0, 0.0, 9.0]), np.array([0.0, 2.0, 3.0])]
    assert best_quotas(gains, 2) == [2, 0]
    assert best_quotas(gains, 3) == [2, 1]
    assert best_quotas(gains, 1) == [0, 1]
