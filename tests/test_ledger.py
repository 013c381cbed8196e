"""Counters, the ledger that writes them, and the clocks."""

from __future__ import annotations

import threading
from dataclasses import fields

import pytest

from spmoe.observe.clock import RealClock, VirtualClock
from spmoe.observe.ledger import Counters, Ledger


def distinct(scale: int = 1) -> Counters:
    """Counters with a different value in every field."""
    counters = Counters()
    for number, f in enumerate(fields(counters), start=1):
        old = getattr(counters, f.name)
        new = [number * scale, (number + 100) * scale] if isinstance(old, list) else type(old)(number * scale)
        setattr(counters, f.name, new)
    return counters


# --- counters ---


def test_counters_start_at_zero() -> None:
    counters = Counters()
    assert all(getattr(counters, f.name) in (0, []) for f in fields(counters))


def test_minus_subtracts_every_field() -> None:
    assert distinct(3).minus(distinct(1)) == distinct(2)
    assert distinct(3).minus(distinct(3)) == distinct(0)
    assert distinct(3).minus(Counters()) == distinct(3)


def test_minus_handles_draft_positions_missing_in_the_earlier_snapshot() -> None:
    earlier = Counters(drafted_at=[5], accepted_at=[2])
    later = Counters(drafted_at=[7, 2, 1], accepted_at=[3, 1, 0])
    since = later.minus(earlier)
    assert since.drafted_at == [2, 2, 1]
    assert since.accepted_at == [1, 1, 0]


def test_plus_adds_every_field() -> None:
    assert distinct(1).plus(distinct(2)) == distinct(3)
    counters = distinct(1)
    counters.add(distinct(4))
    assert counters == distinct(5)
    short, long = Counters(drafted_at=[5], accepted_at=[2]), Counters(drafted_at=[1, 1], accepted_at=[1, 0])
    assert short.plus(long).drafted_at == long.plus(short).drafted_at == [6, 1]


def test_minus_does_not_change_its_operands() -> None:
    later, earlier = distinct(2), distinct(1)
    later.minus(earlier).drafted_at.append(9)
    assert (later, earlier) == (distinct(2), distinct(1))


def test_copy_is_not_changed_by_later_counts() -> None:
    counters = distinct()
    snapshot = counters.copy()
    assert snapshot == counters == distinct()
    counters.count_draft(drafted=3, accepted=3)
    counters.hits += 1
    assert snapshot == distinct()
    assert counters.minus(snapshot).hits == 1


def test_count_draft_counts_each_position() -> None:
    counters = Counters()
    for drafted, accepted in ((4, 4), (4, 0), (2, 1), (0, 0), (4, 2)):
        counters.count_draft(drafted, accepted)
    assert counters.drafted == 14
    assert counters.accepted == 7
    assert counters.drafted_at == [4, 4, 3, 3]
    assert counters.accepted_at == [3, 2, 1, 1]
    assert sum(counters.drafted_at) == counters.drafted
    assert sum(counters.accepted_at) == counters.accepted
    assert counters.acceptance_by_position == pytest.approx([3 / 4, 1 / 2, 1 / 3, 1 / 3])
    assert counters.mean_acceptance_length == pytest.approx(1 + 7 / 4)  # the empty draft is no draft


def test_count_draft_grows_the_position_lists() -> None:
    counters = Counters()
    counters.count_draft(1, 1)
    counters.count_draft(3, 2)
    assert counters.drafted_at == [2, 1, 1]
    assert counters.accepted_at == [2, 1, 0]


def test_minus_of_draft_counts() -> None:
    counters = Counters()
    counters.count_draft(2, 2)
    before = counters.copy()
    counters.count_draft(4, 1)
    since = counters.minus(before)
    assert (since.drafted, since.accepted) == (4, 1)
    assert since.mean_acceptance_length == 2.0
    assert since.acceptance_by_position == [1.0, 0.0, 0.0, 0.0]


def test_hit_rate_and_loads() -> None:
    counters = Counters(hits=6, late=1, demand_loads=3, prefetch_loads=5)
    assert counters.asked == 10
    assert counters.hit_rate == pytest.approx(0.6)
    assert counters.loads == 8


def test_held_bytes_do_not_count_late_bytes_twice() -> None:
    counters = Counters(issued_bytes=1000, used_bytes=400, late_bytes=300, wasted_bytes=250, failed_bytes=50)
    assert counters.held_bytes == 300  # late bytes are among the used ones


def test_rates_without_counts_are_none() -> None:
    counters = Counters(steps=3, tokens=3)
    counters.count_draft(0, 0)
    assert counters.hit_rate is None
    assert counters.mean_acceptance_length is None
    assert counters.acceptance_by_position == []
    assert Counters(demand_loads=2).hit_rate == 0.0


# --- ledger ---

BLOB = 1000


def test_every_ledger_event_writes_its_counters() -> None:
    ledger = Ledger(BLOB)
    ledger.hit(6)
    ledger.late(2)
    ledger.demanded(3)
    ledger.requested(20)
    ledger.resident(5)
    ledger.stale(4)
    ledger.over_budget(1)
    for _ in range(7):
        ledger.prefetch_issued()
    ledger.prefetch_used()
    ledger.prefetch_used(late=True)
    ledger.prefetch_used(late=True)
    ledger.prefetch_wasted()
    ledger.prefetch_wasted()
    ledger.prefetch_failed()
    ledger.stalled(0.25)
    ledger.stalled(0.5)
    ledger.computed(0.5)
    ledger.computed(0.25)
    ledger.waited_for_cpu(0.125)
    ledger.expert_copied(0.5)
    ledger.computing_failed(2)
    ledger.path_chosen(wrong=True)
    ledger.path_chosen(wrong=False)
    ledger.timed_copies(10 * BLOB, 2.0)
    ledger.step(tokens=3, drafted=4, accepted=2, missing=5, draft_seconds=0.125, verify_seconds=1.0)
    assert ledger.counters == Counters(
        steps=1,
        cpu_experts=2,
        cpu_bytes=2 * BLOB,
        cpu_seconds=0.75,
        cpu_wait_seconds=0.125,
        cpu_copies=1,
        cpu_copy_seconds=0.5,
        cpu_failures=2,
        path_choices=2,
        wrong_path_choices=1,
        timed_bytes=10 * BLOB,
        timed_seconds=2.0,
        tokens=3,
        drafted=4,
        accepted=2,
        drafted_at=[1, 1, 1, 1],
        accepted_at=[1, 1, 0, 0],
        verified=1,
        missing=5,
        hits=6,
        late=2,
        demand_loads=3,
        demand_bytes=3 * BLOB,
        prefetch_loads=7,
        issued_bytes=7 * BLOB,
        prefetch_used=3,
        used_bytes=3 * BLOB,
        late_bytes=2 * BLOB,
        wasted_bytes=2 * BLOB,
        failed_bytes=BLOB,
        prefetches_requested=20,
        prefetches_resident=5,
        prefetches_stale=4,
        prefetches_over_budget=1,
        stall_seconds=0.75,
        draft_seconds=0.125,
        verify_seconds=1.0,
    )
    assert ledger.counters.asked == 6 + 2 + 3 + 2
    assert ledger.counters.cpu_gbps == pytest.approx(2 * BLOB / 0.75 / 1e9)
    assert ledger.counters.link_gbps == pytest.approx(10 * BLOB / 2 / 1e9)
    assert ledger.counters.held_bytes == BLOB, "issued 7, used 3, wasted 2, failed 1"
    assert all(getattr(ledger.counters, f.name) for f in fields(Counters)), "an event writes every counter"


def test_step_without_draft_counts_no_missing_experts() -> None:
    ledger = Ledger(BLOB)
    ledger.step(tokens=1, missing=9)
    assert (ledger.counters.steps, ledger.counters.tokens) == (1, 1)
    assert (ledger.counters.verified, ledger.counters.missing, ledger.counters.drafted_at) == (0, 0, [])


def test_ignore_demand_drops_demand_and_stalls_but_keeps_prefetches() -> None:
    ledger = Ledger(BLOB)
    ledger.prefetch_issued()
    ledger.prefetch_issued()
    ledger.hit(1)
    before = ledger.counters.copy()

    def fill() -> None:
        with ledger.ignore_demand():
            ledger.hit(3)
            ledger.late(3)
            ledger.demanded(3)
            ledger.stalled(2.0)
            ledger.prefetch_used()
            ledger.prefetch_wasted()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fill()
    since = ledger.counters.minus(before)
    assert since == Counters(prefetch_used=1, used_bytes=BLOB, wasted_bytes=BLOB)
    assert ledger.counters.held_bytes == 0


# --- accounts ---


def test_events_belong_to_the_account_that_is_charged() -> None:
    ledger, first, second = Ledger(BLOB), Counters(), Counters()
    ledger.hit(1)  # before any request
    ledger.charge(first)
    ledger.hit(10)
    ledger.step(tokens=3, drafted=2, accepted=2)
    ledger.charge(second)
    ledger.hit(100)
    ledger.step(tokens=1, drafted=4, accepted=0)
    assert ledger.snapshot(first) == first
    assert (first.hits, first.tokens, first.drafted_at) == (10, 3, [1, 1])
    ledger.charge(first)
    ledger.hit(1000)
    ledger.close_account(second)  # it is not charged
    ledger.hit(1000)
    ledger.close_account(first)
    ledger.hit(5)  # after all requests
    assert (ledger.snapshot(first).hits, ledger.snapshot(second).hits) == (2010, 100)
    assert ledger.snapshot(second).drafted_at == [1, 1, 1, 1]
    assert ledger.snapshot().hits == 1 + 2010 + 100 + 5
    assert ledger.snapshot() == ledger.counters
    assert ledger.snapshot() is not ledger.counters


def test_snapshot_of_a_charged_account_is_up_to_date_and_final() -> None:
    ledger, account = Ledger(BLOB), Counters()
    ledger.charge(account)
    ledger.prefetch_issued()
    ledger.prefetch_issued()
    first = ledger.snapshot(account)
    assert first.prefetch_loads == 2
    for _ in range(3):
        ledger.prefetch_issued()
    assert ledger.snapshot(account) == ledger.snapshot(account)
    assert ledger.snapshot(account).prefetch_loads == 5, "nothing is counted twice"
    assert first.prefetch_loads == 2


def test_snapshots_may_be_taken_while_another_thread_counts() -> None:
    """Positions of drafts are two lists: a snapshot between two changes would be torn."""
    lock = threading.RLock()
    ledger, account, stop = Ledger(BLOB, lock), Counters(), threading.Event()

    def count() -> None:
        steps = 0
        while not stop.is_set():
            ledger.step(tokens=1, drafted=steps % 60, accepted=steps % 7)
            with lock:
                ledger.prefetch_issued()
            steps += 1

    ledger.charge(account)
    thread = threading.Thread(target=count)
    thread.start()
    try:
        for _ in range(300):
            found = ledger.snapshot(account)
            assert len(found.drafted_at) == len(found.accepted_at)
            assert sum(found.drafted_at) == found.drafted
            assert found.issued_bytes == found.prefetch_loads * BLOB
    finally:
        stop.set()
        thread.join()
    assert ledger.snapshot(account) == ledger.snapshot()


# --- clocks ---


class Alarms:
    """Observer of a clock with events at given times; logs when each one ran."""

    def __init__(
        self, clock: VirtualClock, *times: float, name: str = "", log: list[tuple[str, float]] | None = None
    ) -> None:
        self.times, self.name, self._clock = sorted(times), name, clock
        self.log = [] if log is None else log
        clock.add_event_source(lambda: self.times[0] if self.times else None, self.ring)

    def ring(self) -> None:
        self.times.pop(0)
        self.log.append((self.name, self._clock.now()))


def test_virtual_clock_moves_only_by_sleep() -> None:
    clock = VirtualClock()
    assert clock.now() == clock.now() == 0.0
    clock.sleep(1.5)
    clock.sleep(0.25)
    assert clock.now() == 1.75


def test_virtual_clock_never_goes_back() -> None:
    clock = VirtualClock()
    clock.sleep(2.0)
    clock.sleep(-1.0)
    clock.sleep(0.0)
    assert clock.now() == 2.0


def test_virtual_clock_stops_at_every_event() -> None:
    clock = VirtualClock()
    alarms = Alarms(clock, 1.0, 3.0, 3.0, 7.0)
    clock.sleep(5.0)
    assert [at for _, at in alarms.log] == [1.0, 3.0, 3.0]
    assert clock.now() == 5.0
    clock.sleep(1.0)
    assert len(alarms.log) == 3
    clock.sleep(1.0)  # an event at the very end is on the way
    assert [at for _, at in alarms.log] == [1.0, 3.0, 3.0, 7.0]


def test_events_of_several_observers_come_in_time_order() -> None:
    clock = VirtualClock()
    log: list[tuple[str, float]] = []
    Alarms(clock, 2.0, 4.0, name="a", log=log)
    Alarms(clock, 1.0, 2.0, 5.0, name="b", log=log)
    clock.sleep(4.5)
    assert log == [("b", 1.0), ("a", 2.0), ("b", 2.0), ("a", 4.0)]


def test_event_may_schedule_another() -> None:
    clock = VirtualClock()
    rung: list[float] = []

    def ring() -> None:
        rung.append(clock.now())
        pending.pop()
        if len(rung) < 3:
            pending.append(clock.now() + 2.0)

    pending = [1.0]
    clock.add_event_source(lambda: pending[0] if pending else None, ring)
    clock.sleep(4.0)
    assert rung == [1.0, 3.0]
    clock.sleep(10.0)
    assert rung == [1.0, 3.0, 5.0]
    assert clock.now() == 14.0


def test_past_event_runs_immediately() -> None:
    clock = VirtualClock()
    clock.sleep(10.0)
    alarms = Alarms(clock, 4.0)
    clock.sleep(0.0)
    assert alarms.log == [("", 10.0)]
    assert clock.now() == 10.0


def test_real_clock_goes_forward_and_ignores_negative_sleeps() -> None:
    clock = RealClock()
    before = clock.now()
    clock.sleep(-5.0)
    clock.sleep(0.0)
    assert clock.now() >= before
