"""Eviction with quotas of slots per layer: equal quotas, and quotas that adapt to measured gains."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmoe.experts.cache import ExpertCache
from spmoe.experts.eviction.adaptive import AdaptiveQuotas, best_quotas
from spmoe.experts.eviction.lru_per_layer import EqualQuotas, equal_quotas
from spmoe.types import ExpertKey, PrefetchRequest, PrefetchRequests

INFINITY = float("inf")


def holding(*keys: tuple[int, int], experts: tuple[int, ...] = (4, 4, 4)) -> EqualQuotas:
    policy = EqualQuotas(experts)
    for key in keys:
        policy.on_insert(ExpertKey(*key))
    return policy


def evicted(
    policy: EqualQuotas, layer: int | None, n: int = 1, below: float = INFINITY
) -> list[tuple[int, int]] | None:
    found = policy.victims(n, np.zeros(policy.shape, dtype=bool), below, layer)
    return None if found is None else [tuple(key) for key in found]


def test_layer_at_its_quota_evicts_its_own_least_recently_used() -> None:
    policy = holding((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1))
    assert policy.quotas == [2, 2, 2]
    assert evicted(policy, 0) == [(0, 0)]
    assert evicted(policy, 1) == [(1, 0)]
    assert evicted(policy, 2, 2) == [(2, 0), (2, 1)]
    policy.on_use(1, [0])
    assert evicted(policy, 1) == [(1, 1)], "although other layers have older experts"


def test_layer_below_its_quota_takes_slots_from_layers_above_theirs() -> None:
    policy = holding((0, 0), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1))
    policy.on_use(1, [0])
    assert evicted(policy, 0) == [(1, 1)], "layer 1 is one over its quota"
    assert evicted(policy, 2) == [(1, 1)], "the oldest of the two layers that are over their quota"
    policy.on_use(1, [1])
    policy.on_use(1, [2])
    assert evicted(policy, 2) == [(2, 0)]


def test_layer_that_needs_more_than_its_quota_borrows_slots() -> None:
    policy = holding((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1))
    assert evicted(policy, 1, 4) == [(1, 0), (1, 1), (0, 0), (0, 1)]
    held = np.zeros(policy.shape, dtype=bool)
    held[1, :2] = True
    assert policy.victims(2, held, INFINITY, 1) == [(0, 0), (0, 1)]
    assert evicted(policy, 1, 6) is not None
    assert evicted(policy, 1, 7) is None


def test_prefetch_respects_quota_and_predicted_experts() -> None:
    policy = holding((0, 0), (0, 1), (1, 0), (1, 1))
    bound = policy.score(ExpertKey(1, 2))
    assert bound < INFINITY
    assert evicted(policy, 1, below=bound) == [(1, 0)]
    policy.on_prefetches(
        PrefetchRequests.of([PrefetchRequest(ExpertKey(1, 0), 1.0, 1), PrefetchRequest(ExpertKey(1, 1), 1.0, 1)])
    )
    assert evicted(policy, 1, below=bound) is None, "a prefetch does not borrow"
    assert evicted(policy, 1) == [(0, 0)], "a demand load borrows before it evicts predicted experts"
    assert evicted(policy, 1, 4) == [(0, 0), (0, 1), (1, 0), (1, 1)], "but it can evict any"
    policy.begin_step()
    assert evicted(policy, 1, below=bound) == [(1, 0)]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(slots=st.integers(3, 12), wanted=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=60))
def test_equals_one_lru_cache_per_layer(slots: int, wanted: list[tuple[int, int]]) -> None:
    policy = EqualQuotas((4, 4, 4))
    cache = ExpertCache(slots, policy)
    recent: list[list[int]] = [[], [], []]
    every = [(layer, expert) for layer in range(3) for expert in range(4)]
    for layer, expert in [*every * 2, *wanted]:  # after two rounds every layer fills its quota
        key = ExpertKey(layer, expert)
        if cache.get(key) is None:
            (reservation,) = cache.reserve_for_demand([key])
            cache.mark_ready(reservation.entry)
        policy.on_use(key.layer, [key.expert])
        recent[layer] = [expert, *(e for e in recent[layer] if e != expert)]
    assert sum(policy.quotas) == slots
    held = {(layer, e) for layer, quota in enumerate(policy.quotas) for e in recent[layer][:quota]}
    assert {tuple(entry.key) for entry in cache.entries()} == held


# ---- adaptive


def scan(policy: AdaptiveQuotas, steps: int, uses: dict[int, list[list[int]]], predicted: tuple[int, ...] = ()) -> None:
    """Run steps in which each layer uses its lists in turn; the layers in `predicted` are predicted."""
    for step in range(steps):
        policy.begin_step()
        for layer, turns in uses.items():
            keys = [ExpertKey(layer, expert) for expert in turns[step % len(turns)]]
            if layer in predicted:
                policy.on_prefetches(PrefetchRequests.of([PrefetchRequest(key, 1.0, layer) for key in keys]))
            for key in keys:
                policy.on_use(key.layer, [key.expert])
    policy.begin_step()


def tracked(slots: int = 4) -> AdaptiveQuotas:
    """Make a policy with this many slots, filled with any experts: only its quotas matter."""
    policy = AdaptiveQuotas((4, 4))
    policy._slots = slots
    policy._update_quotas()
    return policy


def test_quotas_are_equal_until_enough_steps_were_observed() -> None:
    policy = AdaptiveQuotas((4, 4))
    for e in range(4):
        policy.on_insert(ExpertKey(0, e))
    assert policy.quotas == [2, 2]


def test_gains_are_the_loads_that_each_slot_would_have_saved() -> None:
    policy = tracked()
    # layer 0 uses one expert, layer 1 three in turn: one slot saves it nothing, three slots save all loads
    for _ in range(3):
        policy.on_use(0, [2])
    for e in (0, 1, 2, 0, 1, 2):
        policy.on_use(1, [e])
    prior = [0.01 * sum(1 / d for d in range(1, c + 1)) for c in range(5)]
    # the first use of expert 2 of layer 0 was at distance 2; those of layer 1 at 0, 1 and 2, then three times at 2
    assert policy.gains()[0] == pytest.approx([prior[c] + (0, 2, 2, 3, 3)[c] for c in range(5)])
    assert policy.gains()[1] == pytest.approx([prior[c] + (0, 1, 2, 6, 6)[c] for c in range(5)])


def test_slots_go_to_layers_that_gain_most() -> None:
    policy = tracked()
    assert policy.quotas == [2, 2]
    scan(policy, 20, {0: [[0]], 1: [[0], [1], [2]]})
    assert policy.quotas == [1, 3]


@pytest.mark.parametrize(("predicted", "quotas"), [((), [0, 3]), ((1,), [2, 1])])
def test_predicted_loads_count_half(predicted: tuple[int, ...], quotas: list[int]) -> None:
    policy = tracked(slots=3)
    # two slots save two thirds of the loads that three slots save
    scan(policy, 20, {0: [[0], [1], []], 1: [[0], [1], [2]]}, predicted)
    assert policy.quotas == quotas


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    experts=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    slots=st.integers(1, 20),
    uses=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), min_size=20, max_size=40),
)
def test_adaptive_quotas_use_all_slots(experts: list[int], slots: int, uses: list[tuple[int, int]]) -> None:
    policy = AdaptiveQuotas(experts)
    cache = ExpertCache(slots, policy)
    for layer, expert in uses:
        layer %= len(experts)
        key = ExpertKey(layer, expert % experts[layer])
        policy.begin_step()
        policy.on_layer(layer)
        if cache.get(key) is None:
            (reservation,) = cache.reserve_for_demand([key])
            cache.mark_ready(reservation.entry)
        policy.on_use(key.layer, [key.expert])
    assert sum(policy.quotas) == cache.peak <= slots
    assert all(0 <= quota <= count for quota, count in zip(policy.quotas, experts, strict=True))


# ---- sharing out slots

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
def test_equal_quotas_use_all_slots_and_differ_by_at_most_one(experts: list[int], slots: int) -> None:
    quotas = equal_quotas(experts, slots)
    assert sum(quotas) == min(slots, sum(experts))
    assert all(0 <= quota <= count for quota, count in zip(quotas, experts, strict=True))
    smallest = min((q for q, count in zip(quotas, experts, strict=True) if q < count), default=max(quotas))
    assert max(quotas) <= smallest + 1, "a layer with fewer slots has one fewer, or all its experts"


@modest
@given(experts=counts, slots=st.integers(0, 16), data=st.data())
def test_best_quotas_equal_exhaustive_search(experts: list[int], slots: int, data: st.DataObject) -> None:
    steps = st.integers(0, 20)
    gains = [
        np.cumsum([0.0, *data.draw(st.lists(steps, min_size=count, max_size=count))]) for count in experts
    ]  # any curve that does not fall: gains need not diminish
    quotas = best_quotas(gains, slots)
    assert sum(quotas) == min(slots, sum(experts))
    every = product(*(range(count + 1) for count in experts))
    best = max(sum(g[c] for g, c in zip(gains, q, strict=True)) for q in every if sum(q) == sum(quotas))
    assert sum(g[c] for g, c in zip(gains, quotas, strict=True)) == best


def test_best_quotas_find_gains_that_need_several_slots() -> None:
    """Two slots that only help together: a greedy choice, slot by slot, would never give the first."""
    gains = [np.array([0.0, 0.0, 9.0]), np.array([0.0, 2.0, 3.0])]
    assert best_quotas(gains, 2) == [2, 0]
    assert best_quotas(gains, 3) == [2, 1]
    assert best_quotas(gains, 1) == [0, 1]
