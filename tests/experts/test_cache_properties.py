"""The experts room under generated programs, on virtual time: whatever happens, its invariants hold.

The checks themselves are in `experts_helpers.Room`; here are the programs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest
from experts_helpers import BLOB, ExpertRuntime, MarkedSlots, within
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
from spmoe.experts.source import ExpertSource
from spmoe.experts.transfer import CopyHandle, CopyJob, HostPaced
from spmoe.observe.clock import VirtualClock
from spmoe.observe.ledger import Counters
from spmoe.registry import EVICTION_POLICIES
from spmoe.types import ExpertKey, PrefetchRequest, PrefetchRequests, Residency

LAST_LAYER = 6  # experts of the last layer: more than there are slots, so that a lost slot shows

SCORES = (0.1, 0.5, 0.9, 1.0)
SLACKS = (0, 0, 0, 0, 0, -1, 1, None)  # a prefetch request's deadline, seen from its own layer; None: not to be fetched

# One number is drawn for a whole prefetch request, and one for a set of experts: most of the time goes into drawing. Numbers of
# layers and experts are taken modulo how many there are.
numbers = st.integers(0, 7)
some_keys = st.integers(0, 63).map(lambda n: (n // 8, n % 8))
some_wishes = st.lists(
    st.integers(0, 2047).map(lambda n: (n // 256, n // 32 % 8, SCORES[n // 8 % 4], SLACKS[n % 8])),
    min_size=1,
    max_size=6,
)
some_experts = st.integers(1, 255).map(lambda n: [e for e in range(8) if n >> e & 1])
durations = st.sampled_from([0.0, 0.25, 0.5, 1.0, 1.0, 2.0, 5.0])
copy_seconds = st.sampled_from([0.25, 1.0, 1.0, 4.0])


evictions = pytest.mark.parametrize("eviction", EVICTION_POLICIES.names())


class DecodeGraphs(RuleBasedStateMachine):
    """A model's thread, its loop and a flaky disk, in any order."""

    evictions: Sequence[str]
    room: ExpertRuntime

    @initialize(
        rule=numbers,
        slots=st.integers(1, 5),
        depth=st.integers(1, 4),
        experts=st.lists(st.integers(1, 3), min_size=1, max_size=2),
        seconds=copy_seconds,
        follow=st.booleans(),
    )
    def build(self, rule: int, slots: int, depth: int, experts: list[int], seconds: float, follow: bool) -> None:
        eviction = self.evictions[rule % len(self.evictions)]
        self.room = ExpertRuntime(eviction, slots, depth, [*experts, LAST_LAYER], seconds, follow=follow)

    def key(self, layer: int, expert: int) -> ExpertKey:
        layer %= len(self.room.experts)
        return ExpertKey(layer, expert % self.room.experts[layer])

    @property
    def using(self) -> bool:
        return self.room.using is not None

    @rule(begins=st.booleans())
    @precondition(lambda self: not self.using)
    def turn(self, begins: bool) -> None:
        if begins:
            self.room.begin_step()
        else:
            self.room.end_step()

    @rule(prefetches=some_wishes)
    def prefetch(self, prefetches: list[tuple[int, int, float, int | None]]) -> None:
        keys = [self.key(layer, expert) for layer, expert, _, _ in prefetches]
        self.room.prefetch(
            PrefetchRequest(key, score, key.layer + (slack or 0), fetch=slack is not None)
            for key, (_, _, score, slack) in zip(keys, prefetches, strict=True)
        )

    @rule(seconds=durations, pump=st.booleans())
    def pass_time(self, seconds: float, pump: bool) -> None:
        self.room.clock.sleep(seconds)
        if pump:
            self.room.pump()

    @rule(layer=numbers, experts=some_experts)
    @precondition(lambda self: not self.using)
    def use(self, layer: int, experts: list[int]) -> None:
        layer %= len(self.room.experts)
        self.room.use(layer, [self.key(layer, e).expert for e in experts])

    @rule(batches=st.integers(1, 8))
    @precondition(lambda self: self.using)
    def consume(self, batches: int) -> None:
        for _ in range(batches):
            if self.using:
                self.room.next_wave()

    @rule(raises=st.booleans())
    @precondition(lambda self: self.using)
    def leave(self, raises: bool) -> None:
        if raises:
            self.room.consumer_raises()
        else:
            self.room.abandon()

    @rule(
        broken=st.sets(some_keys, max_size=3),
        refusing=st.integers(0, 3),
        seconds=copy_seconds,
        budget=st.none() | st.integers(0, 8 * BLOB),
    )
    def disturb(self, broken: set[tuple[int, int]], refusing: int, seconds: float, budget: int | None) -> None:
        self.room.broken = {self.key(*key) for key in broken}
        self.room.refusing = refusing == 1
        self.room.transfer.link.change_rate(BLOB / seconds)
        self.room.source.grants.step_budget = budget

    @rule(really=st.integers(0, 9))
    def close(self, really: int) -> None:
        if really == 1:
            self.room.close()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "room"):
            self.room.check()

    def teardown(self) -> None:
        if hasattr(self, "room") and sys.exc_info()[0] is None:  # else the failure itself is what to see
            self.room.finish()


@pytest.mark.parametrize("evictions", [EVICTION_POLICIES.names()[::2], EVICTION_POLICIES.names()[1::2]], ids=", ".join)
def test_any_program_keeps_the_invariants(evictions: Sequence[str]) -> None:
    modest = settings(
        max_examples=200,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    machine = type("Program", (DecodeGraphs,), {"evictions": evictions})
    within(300.0, lambda: run_state_machine_as_test(machine, settings=modest))


# ---- the same, in small: one property each, for a reader; copies take one second


def make_runtime(
    eviction: str = "lru", *, slots: int, depth: int = 2, experts: Sequence[int] = (4, 4, 8)
) -> ExpertRuntime:
    return ExpertRuntime(eviction, slots, depth, experts, 1.0, follow=True)


def prefetch(room: ExpertRuntime, *keys: tuple[int, int], score: float = 0.9) -> None:
    room.prefetch(PrefetchRequest(ExpertKey(*key), score, key[0]) for key in keys)


def use_all(room: ExpertRuntime, layer: int, experts: Sequence[int]) -> list[tuple[float, tuple[int, ...]]]:
    """The batches of a whole use, and when each came."""
    batches = []
    room.use(layer, experts)
    while room.using is not None:
        assert room.using.batch is not None
        batches.append((room.clock.now(), room.using.batch.experts))
        assert room.next_wave() is None
        room.check()
    return batches


@evictions
def test_ready_experts_come_at_once_and_the_others_as_they_arrive(eviction: str) -> None:
    room = make_runtime(eviction, slots=6)
    prefetch(room, (0, 3), score=0.9)
    prefetch(room, (0, 1), score=0.5)
    room.clock.sleep(1.5)
    assert use_all(room, 0, [0, 1, 2, 3]) == [(1.5, (3,)), (2.0, (1,)), (3.0, (0,)), (4.0, (2,))]
    assert room.counters.stall_seconds == 2.5
    room.finish()


@evictions
def test_waves_come_in_the_order_of_arrival_not_of_asking(eviction: str) -> None:
    room = make_runtime(eviction, slots=6)
    prefetch(room, (0, 3), score=0.9)
    prefetch(room, (0, 2), score=0.5)
    assert use_all(room, 0, [1, 2, 3]) == [(1.0, (3,)), (2.0, (2,)), (3.0, (1,))]
    room.finish()


@evictions
def test_an_expert_asked_for_twice_is_given_once(eviction: str) -> None:
    room = make_runtime(eviction, slots=4)
    use_all(room, 0, [0])
    assert use_all(room, 0, [1, 0, 2, 1, 0, 1]) == [(1.0, (0,)), (2.0, (1,)), (3.0, (2,))]
    room.finish()


@evictions
def test_more_experts_than_slots_come_in_turns(eviction: str) -> None:
    room = make_runtime(eviction, slots=2)
    batches = use_all(room, 2, range(8))
    assert sorted(e for _, experts in batches for e in experts) == list(range(8))
    assert room.counters.demand_loads == 8
    room.finish()


@evictions
def test_a_demand_load_never_waits_for_the_slot_of_a_wish(eviction: str) -> None:
    """Two slots, two prefetch requests, one of them not started: the demand load is second in line, not third."""
    room = make_runtime(eviction, slots=2, depth=2)
    prefetch(room, (1, 0), (1, 1))
    room.clock.sleep(0.5)
    assert use_all(room, 0, [0]) == [(2.0, (0,))]
    room.finish()


@evictions
def test_a_wish_never_takes_a_slot_that_a_demand_load_waits_for(eviction: str) -> None:
    room = make_runtime(eviction, slots=2)
    use_all(room, 0, [0])
    prefetch(room, (2, 0))
    room.begin_step()
    prefetch(room, (2, 1), (2, 2))
    room.use(0, [0, 1])  # 0 is there, and 1 finds one slot in use and the other being written
    room.clock.sleep(5.0)  # the first prefetch request, which is stale by now, has arrived
    room.check()
    while room.using is not None:
        room.next_wave()
    keys = [job.key for jobs in room.transfer.submissions for job in jobs]
    assert keys[:3] == [(0, 0), (2, 0), (0, 1)]
    room.finish()


@evictions
def test_the_failure_of_a_wish_that_was_in_the_way_is_not_the_users(eviction: str) -> None:
    room = make_runtime(eviction, slots=1)
    room.broken = {ExpertKey(1, 0)}
    prefetch(room, (1, 0))
    room.clock.sleep(0.5)
    assert use_all(room, 0, [0]) == [(2.0, (0,))]
    room.finish()


def test_a_wish_that_found_no_slot_is_asked_again_as_the_pass_proceeds() -> None:
    room = make_runtime(slots=3)
    use_all(room, 1, [0])
    use_all(room, 0, [0, 1])
    room.begin_step()
    prefetch(room, (0, 0), (0, 1), (1, 0), (2, 0), (2, 1))
    use_all(room, 0, [0])
    demanded = [(1, 0), (0, 0), (0, 1)]
    loading = [job.key for jobs in room.transfer.submissions for job in jobs]
    assert loading == demanded, "prefetch requests do not push each other out"
    room.use(1, [0])
    loading = [job.key for jobs in room.transfer.submissions for job in jobs]
    assert loading == [*demanded, (2, 0), (2, 1)], "layer 0 has had its turn, used or not"
    room.finish()


@evictions
def test_a_wish_that_is_not_to_be_fetched_only_protects(eviction: str) -> None:
    room = make_runtime(eviction, slots=2)
    use_all(room, 2, [0])
    use_all(room, 1, [0])
    room.begin_step()
    room.prefetch(PrefetchRequest(ExpertKey(2, e), 0.9, 2, fetch=False) for e in (0, 1))
    room.clock.sleep(5.0)
    assert room.counters.prefetch_loads == 0
    use_all(room, 0, [0])
    assert {entry.key for entry in room.source.cache.entries()} == {(0, 0), (2, 0)}
    room.finish()


def test_a_wish_for_what_was_demanded_in_the_meantime_costs_nothing() -> None:
    room = make_runtime(slots=4, depth=1)
    prefetch(room, (1, 0))
    room.prefetch([PrefetchRequest(ExpertKey(0, 0), 0.9, 2)])  # wanted for later than its layer
    use_all(room, 0, [0])
    room.clock.sleep(5.0)
    assert [len(jobs) for jobs in room.transfer.submissions] == [1, 1]
    assert room.counters.prefetches_resident == 1
    room.finish()


@evictions
def test_a_failed_prefetch_that_nobody_uses_is_no_news(eviction: str) -> None:
    room = make_runtime(eviction, slots=4)
    room.broken = {ExpertKey(1, 0)}
    prefetch(room, (1, 0), (1, 1))
    room.clock.sleep(5.0)
    room.check()
    assert room.source.cache.get(ExpertKey(1, 0)) is None
    assert room.counters.failed_bytes == BLOB
    assert use_all(room, 1, [1])[0][1] == (1,)
    room.broken.clear()
    assert use_all(room, 1, [0])[0][1] == (0,), "asked for, it is tried again"
    assert room.counters.demand_loads == 1
    room.finish()


@evictions
@pytest.mark.parametrize("prefetched", [False, True])
def test_a_failed_copy_raises_where_the_expert_is_used_and_leaves_it_absent(eviction: str, prefetched: bool) -> None:
    room = make_runtime(eviction, slots=4)
    use_all(room, 1, [1])
    room.broken = {ExpertKey(1, 0)}
    if prefetched:
        prefetch(room, (1, 0))
    room.use(1, [0, 1, 2])
    assert room.using is not None
    assert room.using.delivered == [ExpertKey(1, 1)], "what is there is given first"
    errors = []
    while room.using is not None:
        errors.append(room.next_wave())
        room.check()
    assert isinstance(errors[-1], TransferError)
    assert room.source.cache.get(ExpertKey(1, 0)) is None
    room.broken.clear()
    assert sorted(e for _, batch in use_all(room, 1, [0, 1, 2]) for e in batch) == [0, 1, 2]
    room.finish()


def test_the_worker_is_not_given_a_copy_that_has_ended_to_wait_for() -> None:
    """A copy that failed, and whose user has not come back yet, must neither fill the link nor keep the worker busy."""
    room = make_runtime(slots=6, depth=1)
    use_all(room, 0, [1])
    room.broken = {ExpertKey(0, 0)}
    room.use(0, [0, 1])
    prefetch(room, (1, 0), (1, 1))
    room.clock.sleep(1.5)
    room.pump()
    assert room.source.cache.get(ExpertKey(1, 0)) is not None, "the link was free for a prefetch request"
    assert isinstance(room.next_wave(), TransferError)
    room.finish()


@evictions
def test_wishes_end_with_their_layer_and_their_step(eviction: str) -> None:
    room = make_runtime(eviction, slots=6, depth=1)
    prefetch(room, (0, 0), (0, 1), (1, 0), (1, 1))
    use_all(room, 1, [2])
    room.check()
    assert room.counters.prefetches_stale == 3, "all but the one under way"
    prefetch(room, (0, 2), (1, 3), (2, 0), (2, 1), (2, 2))
    assert room.counters.prefetches_stale == 5
    room.end_step()
    room.clock.sleep(10.0)
    assert [job.key for jobs in room.transfer.submissions for job in jobs] == [(0, 0), (1, 2), (2, 0)]
    counted = room.counters
    assert counted.prefetches_requested == counted.prefetches_stale + counted.prefetch_loads == 9
    room.finish()


def test_wishes_move_again_after_a_use_that_was_left_with_experts_to_come() -> None:
    room = make_runtime(slots=2)
    use_all(room, 0, [0, 1])
    room.use(0, [0, 1, 2])
    room.abandon()
    prefetch(room, (1, 0))
    assert room.source.cache.get(ExpertKey(1, 0)) is not None
    room.finish()


@evictions
def test_every_wish_ends_in_one_column_of_the_ledger(eviction: str) -> None:
    room = make_runtime(eviction, slots=8, depth=8)
    use_all(room, 0, [0])
    room.begin_step()
    room.source.grants.step_budget = 2 * BLOB + 1
    prefetch(room, (0, 0), (0, 1), (1, 0), (1, 1), (2, 0))
    room.check()
    counted = room.counters
    assert (counted.prefetches_requested, counted.prefetches_resident, counted.prefetch_loads) == (5, 1, 2)
    assert (counted.prefetches_over_budget, counted.prefetches_stale) == (2, 0)
    prefetch(room, (1, 1))
    assert counted.prefetches_over_budget == 3
    room.begin_step()
    prefetch(room, (1, 1))
    assert counted.prefetch_loads == 3, "each step has its own budget"
    room.finish()


def test_closing_voids_what_is_wished_for_and_gives_everything_back_once() -> None:
    room = make_runtime(slots=4, depth=1)
    prefetch(room, (0, 0), (0, 1), (1, 0))
    room.close()
    assert (room.counters.prefetch_loads, room.counters.prefetches_stale) == (1, 2)
    room.clock.sleep(5.0)
    room.close()
    assert room.transfer.closings == room.slots.closings == 1
    room.finish()


@evictions
def test_no_wave_is_given_once_the_slots_are_gone(eviction: str) -> None:
    room = make_runtime(eviction, slots=4)
    use_all(room, 0, [0])
    room.use(0, [0, 1])
    room.close()
    room.check()
    assert isinstance(room.next_wave(), TransferError)
    room.use(0, [0])
    assert room.using is None, "not even what is there"
    room.finish()


def test_what_an_abandoned_use_left_under_way_is_late_but_was_no_prefetch() -> None:
    room = make_runtime(slots=4)
    use_all(room, 0, [0])
    room.use(0, [0, 1])
    room.abandon()
    use_all(room, 0, [1])
    assert (room.counters.hits, room.counters.late, room.counters.demand_loads) == (1, 1, 2)
    assert room.counters.late_bytes == room.counters.used_bytes == 0
    room.finish()


class InstantTransfer(HostPaced):
    """Copies that end as soon as one has looked at them twice."""

    depth = 1

    def __init__(self) -> None:
        self.submissions: list[CopyJob] = []

    def copy(self, jobs: Sequence[CopyJob], *, urgent: bool) -> list[CopyHandle]:
        self.submissions += jobs
        return [SecondLook() for _ in jobs]

    def close(self) -> None:
        pass


class SecondLook:
    def __init__(self) -> None:
        self.looks = 0

    def ready(self) -> bool:
        self.looks += 1
        return self.looks > 1

    def wait(self) -> None:
        self.looks = 2

    order = wait

    def prioritize(self) -> None:
        pass


def one_slot() -> ExpertSource:
    return ExpertSource(
        MarkedSlots(1),
        InstantTransfer(),
        make_eviction("lru", (4, 4)),
        BLOB,
        VirtualClock(),
        Counters(),
        threaded=False,
    )


def test_a_copy_may_end_between_any_two_looks_at_it() -> None:
    """The prefetch request that holds the only slot arrives just after no slot could be had: that is no dead end."""
    source = one_slot()
    source.prefetch(PrefetchRequests.of([PrefetchRequest(ExpertKey(1, 0), 1.0, 1)]))
    assert [batch.experts for batch in source.use(0, [0])] == [(0,)]
    source.close()


def test_a_wave_that_was_never_given_back_is_an_error_and_no_hang() -> None:
    source = one_slot()
    held = source.use(0, [0])
    next(held)
    with pytest.raises(AssertionError, match="never given back"):
        next(source.use(0, [1]))
    held.close()  # type: ignore[attr-defined]
    assert [batch.experts for batch in source.use(0, [1])] == [(1,)]
    source.close()


# ---- the cache by itself


@evictions
def test_a_key_gets_one_slot_and_a_refused_reservation_changes_nothing(eviction: str) -> None:
    cache = ExpertCache(2, make_eviction(eviction, (4,)))
    first = next(cache.reserve_for_demand([ExpertKey(0, 0)]), None)
    second = cache.reserve(ExpertKey(0, 1))
    assert first is not None
    assert second is not None
    assert {first.entry.slot, second.entry.slot} == {0, 1}
    with pytest.raises(ValueError, match="already has a slot"):
        cache.reserve(ExpertKey(0, 0))
    assert next(cache.reserve_for_demand([ExpertKey(0, 2)]), None) is None, "both are being written"
    cache.loaded(first.entry)
    cache.pin(first.entry)
    assert next(cache.reserve_for_demand([ExpertKey(0, 2)]), None) is None, "one is in use, one is being written"
    assert cache.entries() == [first.entry, second.entry]
    cache.unpin(first.entry)
    third = next(cache.reserve_for_demand([ExpertKey(0, 2)]), None)
    assert third is not None
    assert third.evicted is first.entry
    assert third.entry.slot == first.entry.slot
    assert first.entry.state is Residency.ABSENT
    assert cache.get(ExpertKey(0, 0)) is None
    cache.failed(second.entry)
    assert cache.get(ExpertKey(0, 1)) is None
    fourth = next(cache.reserve_for_demand([ExpertKey(0, 3)]), None)
    assert fourth is not None
    assert fourth.evicted is None
    assert fourth.entry.slot == second.entry.slot
    assert len(cache) == cache.peak == 2
