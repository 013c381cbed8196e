"""Slots of each layer's own: equal ones, and those that are allotted by what was measured."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmoe.experts.cache import ExpertCache
from spmoe.experts.quotas import AdaptiveQuotas, EqualQuotas
from spmoe.types import ExpertKey, PrefetchRequest, PrefetchRequests

INFINITY = float("inf")


def holding(*keys: tuple[int, int], experts: tuple[int, ...] = (4, 4, 4)) -> EqualQuotas:
    rule = EqualQuotas(experts)
    for key in keys:
        rule.on_insert(ExpertKey(*key))
    return rule


def leaving(rule: EqualQuotas, layer: int | None, n: int = 1, below: float = INFINITY) -> list[tuple[int, int]] | None:
    found = rule.victims(n, np.zeros(rule.shape, dtype=bool), below, layer)
    return None if found is None else [tuple(key) for key in found]


def test_a_full_layer_gives_up_its_own_least_recently_used() -> None:
    rule = holding((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1))
    assert rule.quotas == [2, 2, 2]
    assert leaving(rule, 0) == [(0, 0)]
    assert leaving(rule, 1) == [(1, 0)]
    assert leaving(rule, 2, 2) == [(2, 0), (2, 1)]
    rule.on_use(1, [0])
    assert leaving(rule, 1) == [(1, 1)], "whatever is older elsewhere"


def test_a_layer_gets_its_slots_back_from_who_has_more() -> None:
    rule = holding((0, 0), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1))
    rule.on_use(1, [0])
    assert leaving(rule, 0) == [(1, 1)], "layer 1 has one too many"
    assert leaving(rule, 2) == [(1, 1)], "the oldest of the two layers that are over their quota"
    rule.on_use(1, [1])
    rule.on_use(1, [2])
    assert leaving(rule, 2) == [(2, 0)]


def test_a_layer_that_needs_more_than_its_own_borrows() -> None:
    rule = holding((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1))
    assert leaving(rule, 1, 4) == [(1, 0), (1, 1), (0, 0), (0, 1)]
    held = np.zeros(rule.shape, dtype=bool)
    held[1, :2] = True
    assert rule.victims(2, held, INFINITY, 1) == [(0, 0), (0, 1)]
    assert leaving(rule, 1, 6) is not None
    assert leaving(rule, 1, 7) is None


def test_a_wish_keeps_to_its_layers_quota_and_spares_what_was_wished_for() -> None:
    rule = holding((0, 0), (0, 1), (1, 0), (1, 1))
    bound = rule.worth(ExpertKey(1, 2))
    assert bound < INFINITY
    assert leaving(rule, 1, below=bound) == [(1, 0)]
    rule.on_prefetches(
        PrefetchRequests.of([PrefetchRequest(ExpertKey(1, 0), 1.0, 1), PrefetchRequest(ExpertKey(1, 1), 1.0, 1)])
    )
    assert leaving(rule, 1, below=bound) is None, "nothing is borrowed for a prefetch request"
    assert leaving(rule, 1) == [(0, 0)], "a demand rather borrows than takes what was wished for"
    assert leaving(rule, 1, 4) == [(0, 0), (0, 1), (1, 0), (1, 1)], "but it takes any"
    rule.begin_step()
    assert leaving(rule, 1, below=bound) == [(1, 0)]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(slots=st.integers(3, 12), wanted=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=60))
def test_one_expert_at_a_time_it_is_lru_in_a_cache_of_each_layers_own(
    slots: int, wanted: list[tuple[int, int]]
) -> None:
    rule = EqualQuotas((4, 4, 4))
    cache = ExpertCache(slots, rule)
    recent: list[list[int]] = [[], [], []]
    every = [(layer, expert) for layer in range(3) for expert in range(4)]
    for layer, expert in [*every * 2, *wanted]:  # after two rounds every layer has what is its own
        key = ExpertKey(layer, expert)
        if cache.get(key) is None:
            (reservation,) = cache.reserve_for_demand([key])
            cache.loaded(reservation.entry)
        rule.on_use(key.layer, [key.expert])
        recent[layer] = [expert, *(e for e in recent[layer] if e != expert)]
    assert sum(rule.quotas) == slots
    held = {(layer, e) for layer, quota in enumerate(rule.quotas) for e in recent[layer][:quota]}
    assert {tuple(entry.key) for entry in cache.entries()} == held


# ---- adaptive


def scan(rule: AdaptiveQuotas, steps: int, uses: dict[int, list[list[int]]], named: tuple[int, ...] = ()) -> None:
    """Layers use what their list says of each step in turn; those named are foretold."""
    for step in range(steps):
        rule.begin_step()
        for layer, turns in uses.items():
            keys = [ExpertKey(layer, expert) for expert in turns[step % len(turns)]]
            if layer in named:
                rule.on_prefetches(PrefetchRequests.of([PrefetchRequest(key, 1.0, layer) for key in keys]))
            for key in keys:
                rule.on_use(key.layer, [key.expert])
    rule.begin_step()


def tracked(slots: int = 4) -> AdaptiveQuotas:
    """With so many slots, whatever is in them: only the quotas are looked at."""
    rule = AdaptiveQuotas((4, 4))
    rule._slots = slots
    rule._share_out()
    return rule


def test_quotas_are_equal_until_enough_was_seen() -> None:
    rule = AdaptiveQuotas((4, 4))
    for e in range(4):
        rule.on_insert(ExpertKey(0, e))
    assert rule.quotas == [2, 2]


def test_gains_are_what_each_further_slot_would_have_saved() -> None:
    rule = tracked()
    # layer 0 uses one expert over and over, layer 1 three in turns: a slot saves it nothing, three save all
    for _ in range(3):
        rule.on_use(0, [2])
    for e in (0, 1, 2, 0, 1, 2):
        rule.on_use(1, [e])
    unseen = [0.01 * sum(1 / d for d in range(1, c + 1)) for c in range(5)]
    # the first use of expert 2 of layer 0 was at distance 2; those of layer 1 at 0, 1 and 2, then three times at 2
    assert rule.gains()[0] == pytest.approx([unseen[c] + (0, 2, 2, 3, 3)[c] for c in range(5)])
    assert rule.gains()[1] == pytest.approx([unseen[c] + (0, 1, 2, 6, 6)[c] for c in range(5)])


def test_slots_go_where_they_save_most() -> None:
    rule = tracked()
    assert rule.quotas == [2, 2]
    scan(rule, 20, {0: [[0]], 1: [[0], [1], [2]]})
    assert rule.quotas == [1, 3]


@pytest.mark.parametrize(("named", "quotas"), [((), [0, 3]), ((1,), [2, 1])])
def test_what_is_foretold_needs_slots_half_as_much(named: tuple[int, ...], quotas: list[int]) -> None:
    rule = tracked(slots=3)
    scan(rule, 20, {0: [[0], [1], []], 1: [[0], [1], [2]]}, named)  # two slots save two thirds of what three do
    assert rule.quotas == quotas


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    experts=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    slots=st.integers(1, 20),
    uses=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=20, max_size=40),
)
def test_adaptive_quotas_are_all_the_slots(experts: list[int], slots: int, uses: list[tuple[int, int]]) -> None:
    rule = AdaptiveQuotas(experts)
    cache = ExpertCache(slots, rule)
    for layer, expert in uses:
        layer %= len(experts)
        key = ExpertKey(layer, expert % experts[layer])
        rule.begin_step()
        rule.on_layer(layer)
        if cache.get(key) is None:
            (reservation,) = cache.reserve_for_demand([key])
            cache.loaded(reservation.entry)
        rule.on_use(key.layer, [key.expert])
    assert sum(rule.quotas) == cache.peak <= slots
    assert all(0 <= quota <= count for quota, count in zip(rule.quotas, experts, strict=True))
