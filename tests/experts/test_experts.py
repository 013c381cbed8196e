"""Experts on virtual time: random actions keep every invariant, and one small test per property.

The invariants are in `experts_helpers.CheckedExperts`; the actions are here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import pytest
from experts_helpers import BLOB, CheckedExperts, EmptySlots, within
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from spmoe.errors import TransferError
from spmoe.experts.cache import ExpertCache
from spmoe.experts.eviction import make_eviction
from spmoe.experts.eviction.base import ScoredEviction
from spmoe.experts.experts import Experts
from spmoe.experts.transfer import CopyHandle, CopyJob, HostCompute
from spmoe.observe.clock import VirtualClock
from spmoe.registry import EVICTION_POLICIES
from spmoe.types import ExpertKey, PrefetchRequest, PrefetchRequests, Residency

LAST_LAYER = 6  # experts of the last layer: more than there are slots, so that a lost slot is noticed

SCORES = (0.1, 0.5, 0.9, 1.0)
SLACKS = (0, 0, 0, 0, 0, -1, 1, None)  # deadline minus layer of a request; None: a request that is not to be fetched

# Hypothesis spends most of its time on drawing: one number is drawn for a whole prefetch request, and one for a set of
# experts. Numbers of layers and experts are taken modulo how many there are.
numbers = st.integers(0, 7)
some_keys = st.integers(0, 63).map(lambda n: (n // 8, n % 8))
some_requests = st.lists(
    st.integers(0, 2047).map(lambda n: (n // 256, n // 32 % 8, SCORES[n // 8 % 4], SLACKS[n % 8])),
    min_size=1,
    max_size=6,
)
some_experts = st.integers(1, 255).map(lambda n: [e for e in range(8) if n >> e & 1])
durations = st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.0, 2.0, 5.0])
copy_seconds = st.sampled_from([0.25, 1.0, 1.0, 4.0])

every_eviction = pytest.mark.parametrize("eviction", EVICTION_POLICIES.names())


class RandomActions(RuleBasedStateMachine):
    """A model's forwards, an engine's steps and a transfer that fails now and then, in any order."""

    evictions: Sequence[str]
    checked: CheckedExperts

    @initialize(
        policy=numbers,
        slots=st.integers(1, 5),
        depth=st.integers(1, 4),
        experts=st.lists(st.integers(1, 3), min_size=1, max_size=2),
        seconds=copy_seconds,
        auto_pump=st.booleans(),
    )
    def build(self, policy: int, slots: int, depth: int, experts: list[int], seconds: float, auto_pump: bool) -> None:
        eviction = self.evictions[policy % len(self.evictions)]
        self.checked = CheckedExperts(eviction, slots, depth, [*experts, LAST_LAYER], seconds, auto_pump=auto_pump)

    def key(self, layer: int, expert: int) -> ExpertKey:
        layer %= len(self.checked.experts_per_layer)
        return ExpertKey(layer, expert % self.checked.experts_per_layer[layer])

    @property
    def in_use(self) -> bool:
        return self.checked.active is not None

    @rule(begin=st.booleans())
    @precondition(lambda self: not self.in_use)
    def begin_or_end_step(self, begin: bool) -> None:
        if begin:
            self.checked.begin_step()
        else:
            self.checked.end_step()

    @rule(requests=some_requests)
    def prefetch(self, requests: list[tuple[int, int, float, int | None]]) -> None:
        keys = [self.key(layer, expert) for layer, expert, _, _ in requests]
        self.checked.prefetch(
            PrefetchRequest(key, score, key.layer + (slack or 0), fetch=slack is not None)
            for key, (_, _, score, slack) in zip(keys, requests, strict=True)
        )

    @rule(seconds=durations, pump=st.booleans())
    def pass_time(self, seconds: float, pump: bool) -> None:
        self.checked.clock.sleep(seconds)
        if pump:
            self.checked.pump()

    @rule(layer=numbers, experts=some_experts)
    @precondition(lambda self: not self.in_use)
    def use(self, layer: int, experts: list[int]) -> None:
        layer %= len(self.checked.experts_per_layer)
        self.checked.use(layer, [self.key(layer, e).expert for e in experts])

    @rule(batches=st.integers(1, 8))
    @precondition(lambda self: self.in_use)
    def take_batches(self, batches: int) -> None:
        for _ in range(batches):
            if self.in_use:
                self.checked.next_batch()

    @rule(error=st.booleans())
    @precondition(lambda self: self.in_use)
    def leave(self, error: bool) -> None:
        if error:
            self.checked.raise_in_consumer()
        else:
            self.checked.abandon()

    @rule(
        broken=st.sets(some_keys, max_size=3),
        refuse=st.integers(0, 3),
        seconds=copy_seconds,
        budget=st.none() | st.integers(0, 8 * BLOB),
    )
    def disturb(self, broken: set[tuple[int, int]], refuse: int, seconds: float, budget: int | None) -> None:
        self.checked.broken = {self.key(*key) for key in broken}
        self.checked.refuse_submissions = refuse == 1
        self.checked.transfer.link.change_rate(BLOB / seconds)
        self.checked.experts.scheduler.step_budget = budget

    @rule(n=st.integers(0, 9))
    def close_one_time_in_ten(self, n: int) -> None:
        if n == 1:
            self.checked.close()

    @invariant()
    def check(self) -> None:
        if hasattr(self, "checked"):
            self.checked.check()

    def teardown(self) -> None:
        if hasattr(self, "checked") and sys.exc_info()[0] is None:  # else the failure itself is what to see
            self.checked.finish()


@pytest.mark.parametrize("evictions", [EVICTION_POLICIES.names()[::2], EVICTION_POLICIES.names()[1::2]], ids=", ".join)
def test_random_actions_keep_the_invariants(evictions: Sequence[str]) -> None:
    modest = settings(
        max_examples=200,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    machine = type("RandomActions", (RandomActions,), {"evictions": evictions})
    within(300.0, lambda: run_state_machine_as_test(machine, settings=modest))


# ---- one property per test; a copy takes one second


def make_checked(
    eviction: str = "lru", *, slots: int, depth: int = 2, experts: Sequence[int] = (4, 4, 8)
) -> CheckedExperts:
    return CheckedExperts(eviction, slots, depth, experts, 1.0, auto_pump=True)


def prefetch(checked: CheckedExperts, *keys: tuple[int, int], score: float = 0.9) -> None:
    """Request prefetches, each due at the expert's own layer."""
    checked.prefetch(PrefetchRequest(ExpertKey(*key), score, key[0]) for key in keys)


def use_all(checked: CheckedExperts, layer: int, experts: Sequence[int]) -> list[tuple[float, tuple[int, ...]]]:
    """Use experts to the end; return the time and the experts of every batch."""
    batches = []
    checked.use(layer, experts)
    while checked.active is not None:
        assert checked.active.batch is not None
        batches.append((checked.clock.now(), checked.active.batch.experts))
        assert checked.next_batch() is None
        checked.check()
    return batches


@every_eviction
def test_ready_experts_come_at_once_and_the_others_as_they_arrive(eviction: str) -> None:
    checked = make_checked(eviction, slots=6)
    prefetch(checked, (0, 3), score=0.9)
    prefetch(checked, (0, 1), score=0.5)
    checked.clock.sleep(1.5)
    assert use_all(checked, 0, [0, 1, 2, 3]) == [(1.5, (3,)), (2.0, (1,)), (3.0, (0,)), (4.0, (2,))]
    assert checked.counters.stall_seconds == 2.5
    checked.finish()


@every_eviction
def test_batches_come_in_the_order_of_arrival(eviction: str) -> None:
    checked = make_checked(eviction, slots=6)
    prefetch(checked, (0, 3), score=0.9)
    prefetch(checked, (0, 2), score=0.5)
    assert use_all(checked, 0, [1, 2, 3]) == [(1.0, (3,)), (2.0, (2,)), (3.0, (1,))]
    checked.finish()


@every_eviction
def test_repeated_expert_is_delivered_once(eviction: str) -> None:
    checked = make_checked(eviction, slots=4)
    use_all(checked, 0, [0])
    assert use_all(checked, 0, [1, 0, 2, 1, 0, 1]) == [(1.0, (0,)), (2.0, (1,)), (3.0, (2,))]
    checked.finish()


@every_eviction
def test_more_experts_than_slots_come_in_turns(eviction: str) -> None:
    checked = make_checked(eviction, slots=2)
    batches = use_all(checked, 2, range(8))
    assert sorted(expert for _, experts in batches for expert in experts) == list(range(8))
    assert checked.counters.demand_loads == 8
    checked.finish()


@every_eviction
def test_demand_load_never_waits_for_the_slot_of_a_prefetch(eviction: str) -> None:
    """Two slots, two prefetch requests, one of them not started: the demand load is second in line, not third."""
    checked = make_checked(eviction, slots=2, depth=2)
    prefetch(checked, (1, 0), (1, 1))
    checked.clock.sleep(0.5)
    assert use_all(checked, 0, [0]) == [(2.0, (0,))]
    checked.finish()


@every_eviction
def test_prefetch_never_takes_a_slot_that_a_demand_load_waits_for(eviction: str) -> None:
    checked = make_checked(eviction, slots=2)
    use_all(checked, 0, [0])
    prefetch(checked, (2, 0))
    checked.begin_step()
    prefetch(checked, (2, 1), (2, 2))
    checked.use(0, [0, 1])  # expert 0 is READY; for expert 1, one slot is in use and the other is being written
    checked.clock.sleep(5.0)  # the prefetch of the step before has arrived
    checked.check()
    while checked.active is not None:
        checked.next_batch()
    assert checked.transfer.submitted_keys[:3] == [(0, 0), (2, 0), (0, 1)]
    checked.finish()


@every_eviction
def test_failure_of_a_prefetch_that_a_use_waited_for_is_not_raised_there(eviction: str) -> None:
    checked = make_checked(eviction, slots=1)
    checked.broken = {ExpertKey(1, 0)}
    prefetch(checked, (1, 0))
    checked.clock.sleep(0.5)
    assert use_all(checked, 0, [0]) == [(2.0, (0,))]
    checked.finish()


def test_request_that_found_no_slot_is_tried_again_as_layers_run() -> None:
    checked = make_checked(slots=3)
    use_all(checked, 1, [0])
    use_all(checked, 0, [0, 1])
    checked.begin_step()
    prefetch(checked, (0, 0), (0, 1), (1, 0), (2, 0), (2, 1))
    use_all(checked, 0, [0])
    demanded = [(1, 0), (0, 0), (0, 1)]
    assert checked.transfer.submitted_keys == demanded, "requests do not evict what other requests name"
    checked.use(1, [0])
    assert checked.transfer.submitted_keys == [*demanded, (2, 0), (2, 1)], "layer 0 has run: its experts may go"
    checked.finish()


@every_eviction
def test_request_without_fetch_only_protects_from_eviction(eviction: str) -> None:
    checked = make_checked(eviction, slots=2)
    use_all(checked, 2, [0])
    use_all(checked, 1, [0])
    checked.begin_step()
    checked.prefetch(PrefetchRequest(ExpertKey(2, e), 0.9, 2, fetch=False) for e in (0, 1))
    checked.clock.sleep(5.0)
    assert checked.counters.prefetch_loads == 0
    use_all(checked, 0, [0])
    assert checked.experts.pool.slots_by_key().keys() == {(0, 0), (2, 0)}
    checked.finish()


def test_request_for_an_expert_that_was_demanded_meanwhile_moves_no_bytes() -> None:
    checked = make_checked(slots=4, depth=1)
    prefetch(checked, (1, 0))
    checked.prefetch([PrefetchRequest(ExpertKey(0, 0), 0.9, 2)])  # with a deadline later than its layer
    use_all(checked, 0, [0])
    checked.clock.sleep(5.0)
    assert [len(jobs) for jobs in checked.transfer.submissions] == [1, 1]
    assert checked.counters.prefetches_resident == 1
    checked.finish()


@every_eviction
def test_failed_prefetch_of_an_unused_expert_raises_nothing(eviction: str) -> None:
    checked = make_checked(eviction, slots=4)
    checked.broken = {ExpertKey(1, 0)}
    prefetch(checked, (1, 0), (1, 1))
    checked.clock.sleep(5.0)
    checked.check()
    assert checked.experts.pool.residency(ExpertKey(1, 0)) is Residency.ABSENT
    assert checked.counters.failed_bytes == BLOB
    assert use_all(checked, 1, [1])[0][1] == (1,)
    checked.broken.clear()
    assert use_all(checked, 1, [0])[0][1] == (0,), "a demand loads it again"
    assert checked.counters.demand_loads == 1
    checked.finish()


@every_eviction
@pytest.mark.parametrize("prefetched", [False, True])
def test_failed_copy_raises_in_the_use_and_leaves_the_expert_absent(eviction: str, prefetched: bool) -> None:
    checked = make_checked(eviction, slots=4)
    use_all(checked, 1, [1])
    checked.broken = {ExpertKey(1, 0)}
    if prefetched:
        prefetch(checked, (1, 0))
    checked.use(1, [0, 1, 2])
    assert checked.active is not None
    assert checked.active.delivered == [ExpertKey(1, 1)], "READY experts come first"
    errors = []
    while checked.active is not None:
        errors.append(checked.next_batch())
        checked.check()
    assert isinstance(errors[-1], TransferError)
    assert checked.experts.pool.residency(ExpertKey(1, 0)) is Residency.ABSENT
    checked.broken.clear()
    assert sorted(expert for _, batch in use_all(checked, 1, [0, 1, 2]) for expert in batch) == [0, 1, 2]
    checked.finish()


def test_worker_is_not_given_a_copy_that_has_ended_to_wait_for() -> None:
    """A failed copy whose user has not come back yet must neither fill the transfer nor keep the worker busy."""
    checked = make_checked(slots=6, depth=1)
    use_all(checked, 0, [1])
    checked.broken = {ExpertKey(0, 0)}
    checked.use(0, [0, 1])
    prefetch(checked, (1, 0), (1, 1))
    checked.clock.sleep(1.5)
    checked.pump()
    assert checked.experts.pool.residency(ExpertKey(1, 0)) is not Residency.ABSENT, "the link was free for a prefetch"
    assert isinstance(checked.next_batch(), TransferError)
    checked.finish()


@every_eviction
def test_requests_are_dropped_when_their_layer_runs_or_their_step_ends(eviction: str) -> None:
    checked = make_checked(eviction, slots=6, depth=1)
    prefetch(checked, (0, 0), (0, 1), (1, 0), (1, 1))
    use_all(checked, 1, [2])
    checked.check()
    assert checked.counters.prefetches_stale == 3, "all except the one in flight"
    prefetch(checked, (0, 2), (1, 3), (2, 0), (2, 1), (2, 2))
    assert checked.counters.prefetches_stale == 5
    checked.end_step()
    checked.clock.sleep(10.0)
    assert checked.transfer.submitted_keys == [(0, 0), (1, 2), (2, 0)]
    counted = checked.counters
    assert counted.prefetches_requested == counted.prefetches_stale + counted.prefetch_loads == 9
    checked.finish()


def test_requests_are_submitted_again_after_a_use_was_abandoned_with_absent_experts() -> None:
    checked = make_checked(slots=2)
    use_all(checked, 0, [0, 1])
    checked.use(0, [0, 1, 2])
    checked.abandon()
    prefetch(checked, (1, 0))
    assert checked.experts.pool.residency(ExpertKey(1, 0)) is not Residency.ABSENT
    checked.finish()


@every_eviction
def test_every_request_is_counted_once(eviction: str) -> None:
    checked = make_checked(eviction, slots=8, depth=8)
    use_all(checked, 0, [0])
    checked.begin_step()
    checked.experts.scheduler.step_budget = 2 * BLOB + 1
    prefetch(checked, (0, 0), (0, 1), (1, 0), (1, 1), (2, 0))
    checked.check()
    counted = checked.counters
    assert (counted.prefetches_requested, counted.prefetches_resident, counted.prefetch_loads) == (5, 1, 2)
    assert (counted.prefetches_over_budget, counted.prefetches_stale) == (2, 0)
    prefetch(checked, (1, 1))
    assert counted.prefetches_over_budget == 3
    checked.begin_step()
    prefetch(checked, (1, 1))
    assert counted.prefetch_loads == 3, "each step has its own budget"
    checked.finish()


def test_close_drops_requests_and_releases_everything_once() -> None:
    checked = make_checked(slots=4, depth=1)
    prefetch(checked, (0, 0), (0, 1), (1, 0))
    checked.close()
    assert (checked.counters.prefetch_loads, checked.counters.prefetches_stale) == (1, 2)
    checked.clock.sleep(5.0)
    checked.close()
    assert checked.transfer.close_calls == checked.slots.close_calls == 1
    checked.finish()


@every_eviction
def test_no_batch_is_delivered_after_close(eviction: str) -> None:
    checked = make_checked(eviction, slots=4)
    use_all(checked, 0, [0])
    checked.use(0, [0, 1])
    checked.close()
    checked.check()
    assert isinstance(checked.next_batch(), TransferError)
    checked.use(0, [0])
    assert checked.active is None, "not even READY experts"
    checked.finish()


def test_demand_load_left_in_flight_by_an_abandoned_use_counts_as_late_but_not_as_prefetch() -> None:
    checked = make_checked(slots=4)
    use_all(checked, 0, [0])
    checked.use(0, [0, 1])
    checked.abandon()
    use_all(checked, 0, [1])
    assert (checked.counters.hits, checked.counters.late, checked.counters.demand_loads) == (1, 1, 2)
    assert checked.counters.late_bytes == checked.counters.used_bytes == 0
    checked.finish()


# ---- a single slot, and copies that end at the second look at them


class SecondLookTransfer(HostCompute):
    """Transfer whose copies end when `ready` has been called twice."""

    depth = 1

    def copy(self, jobs: Sequence[CopyJob], *, urgent: bool) -> list[CopyHandle]:
        return [SecondLookHandle() for _ in jobs]

    def close(self) -> None:
        pass


class SecondLookHandle:
    def __init__(self) -> None:
        self.looks = 0

    def ready(self) -> bool:
        self.looks += 1
        return self.looks > 1

    def wait(self) -> None:
        self.looks = 2

    stream_wait = wait

    def prioritize(self) -> None:
        pass


def make_single_slot() -> Experts:
    eviction = make_eviction("lru", (4, 4))
    return Experts.build(EmptySlots(1), SecondLookTransfer(), eviction, BLOB, VirtualClock(), threaded=False)


def test_copy_may_end_between_any_two_looks_at_it() -> None:
    """The prefetch that holds the only slot ends just after no slot could be taken: the use must not give up."""
    experts = make_single_slot()
    experts.scheduler.request(PrefetchRequests.of([PrefetchRequest(ExpertKey(1, 0), 1.0, 1)]))
    assert [batch.experts for batch in experts.access.use(0, [0])] == [(0,)]
    experts.close()


def test_batch_that_was_never_released_is_an_error_and_not_a_hang() -> None:
    experts = make_single_slot()
    unreleased = experts.access.use(0, [0])
    next(unreleased)
    with pytest.raises(AssertionError, match="never released"):
        next(experts.access.use(0, [1]))
    unreleased.close()
    assert [batch.experts for batch in experts.access.use(0, [1])] == [(1,)]
    experts.close()


# ---- the cache alone


class FixedScores(ScoredEviction):
    """Scores the experts of one layer as given."""

    def __init__(self, scores: Sequence[float], *, chances: bool) -> None:
        super().__init__((len(scores),))
        self.scores_are_chances = chances
        self._given = np.array([scores])

    def compute_scores(self) -> np.ndarray:
        return self._given


def full_cache(scores: Sequence[float], slots: int, *, chances: bool) -> ExpertCache:
    """Make a cache whose slots hold the first experts."""
    cache = ExpertCache(slots, FixedScores(scores, chances=chances))
    for expert in range(slots):
        reservation = cache.reserve(ExpertKey(0, expert), 0.0)
        assert reservation is not None, "a free slot is taken, whatever that is worth"
        cache.mark_ready(reservation.entry)
    return cache


@pytest.mark.parametrize(
    ("worth", "evicted"),
    [(0.0, None), (0.3, None), (0.31, 1), (0.6, 1), (0.85, 1), (1.0, 1), (float("inf"), 1)],
)
def test_prefetch_evicts_only_experts_whose_chance_is_below_its_worth(worth: float, evicted: int | None) -> None:
    cache = full_cache((0.6, 0.3, 0.9), 2, chances=True)
    before = cache.entries()
    found = cache.reserve(ExpertKey(0, 2), worth)
    if evicted is None:
        assert found is None
        assert cache.entries() == before
    else:
        assert found is not None
        assert found.evicted is before[evicted]
        assert {entry.key.expert for entry in cache.entries()} == {0, 2}


def test_prefetch_evicts_no_expert_that_scores_more_whatever_it_is_worth() -> None:
    for worth in (0.5, 1.0, float("inf")):
        assert full_cache((0.6, 0.3, 0.3), 2, chances=True).reserve(ExpertKey(0, 2), worth) is None


@pytest.mark.parametrize("worth", [0.0, 0.5, float("inf")])
def test_worth_is_not_compared_with_scores_that_are_no_chances(worth: float) -> None:
    found = full_cache((60.0, 30.0, 90.0), 2, chances=False).reserve(ExpertKey(0, 2), worth)
    assert found is not None
    assert found.evicted is not None
    assert found.evicted.key.expert == 1


@every_eviction
def test_cache_gives_each_key_one_slot_and_a_refused_reservation_changes_nothing(eviction: str) -> None:
    cache = ExpertCache(2, make_eviction(eviction, (4,)))
    first = next(cache.reserve_for_demand([ExpertKey(0, 0)]), None)
    second = cache.reserve(ExpertKey(0, 1))
    assert first is not None
    assert second is not None
    assert {first.entry.slot, second.entry.slot} == {0, 1}
    with pytest.raises(ValueError, match="already has a slot"):
        cache.reserve(ExpertKey(0, 0))
    assert next(cache.reserve_for_demand([ExpertKey(0, 2)]), None) is None, "both are being written"
    cache.mark_ready(first.entry)
    cache.pin(first.entry)
    assert next(cache.reserve_for_demand([ExpertKey(0, 2)]), None) is None, "one is pinned, one is being written"
    assert cache.entries() == [first.entry, second.entry]
    cache.unpin(first.entry)
    third = next(cache.reserve_for_demand([ExpertKey(0, 2)]), None)
    assert third is not None
    assert third.evicted is first.entry
    assert third.entry.slot == first.entry.slot
    assert first.entry.state is Residency.ABSENT
    assert cache.get(ExpertKey(0, 0)) is None
    cache.mark_failed(second.entry)
    assert cache.get(ExpertKey(0, 1)) is None
    fourth = next(cache.reserve_for_demand([ExpertKey(0, 3)]), None)
    assert fourth is not None
    assert fourth.evicted is None
    assert fourth.entry.slot == second.entry.slot
    assert len(cache) == cache.peak == 2
