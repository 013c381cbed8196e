"""Experts that compute is given before it is known which of them it needs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from spmoe.errors import TransferError
from spmoe.experts.eviction import make_eviction
from spmoe.experts.link import VirtualTransfer
from spmoe.experts.source import ExpertSource
from spmoe.experts.transfer import CopyHandle, CopyJob
from spmoe.observe.clock import VirtualClock
from spmoe.observe.ledger import Counters
from spmoe.types import ExpertKey, PrefetchRequest, PrefetchRequests, Residency


class NoWeights:
    """Slots that hold nothing."""

    def __init__(self, count: int) -> None:
        self.count = count

    def weights(self, slot: int) -> dict[str, object]:
        return {}

    def close(self) -> None:
        pass


class NotedFences(VirtualTransfer):
    """Remembers which slots compute was said to read."""

    fenced: list[int]

    def fence(self, slots: object, mark: int | None = None) -> None:
        self.fenced = [*getattr(self, "fenced", []), *slots]  # type: ignore[misc]


def room(slots: int) -> tuple[ExpertSource, NotedFences]:
    clock = VirtualClock()
    transfer = NotedFences(clock, 1, 1.0)
    eviction = make_eviction("draft-informed", (4, 4))
    source = ExpertSource(NoWeights(slots), transfer, eviction, 1, clock, Counters(), threaded=False)  # type: ignore[arg-type]
    return source, transfer


def fill(source: ExpertSource, layer: int, *experts: int) -> None:
    for _ in source.use(layer, experts):
        pass


def test_what_was_opened_is_booked_and_not_yielded_again() -> None:
    source, transfer = room(4)
    fill(source, 0, 0, 1, 2)
    before = source.counters.copy()
    pinned = source.open(0)
    assert np.flatnonzero(pinned.slots >= 0).tolist() == [0, 1, 2]
    transfer.fenced = []
    batches = [batch.experts for batch in source.use(0, [1, 2, 3], pinned)]
    assert batches == [(3,)], "compute has 1 and 2, and 3 was missing"
    spent = source.counters.minus(before)
    assert (spent.hits, spent.demand_loads) == (2, 1)
    slots = {source.cache.get(ExpertKey(0, e)): e for e in (1, 2)}
    assert {entry.slot for entry in slots if entry is not None} <= set(transfer.fenced)
    assert all(entry.pins == 0 for entry in source.cache.entries())


def test_what_is_open_stays_until_it_is_used_or_shut() -> None:
    source, _ = room(2)
    fill(source, 0, 0, 1)
    pinned = source.open(0)
    assert next(source.cache.reserve_for_demand([ExpertKey(1, 0)]), None) is None
    source.shut(pinned)
    source.shut(pinned)
    assert next(source.cache.reserve_for_demand([ExpertKey(1, 0)]), None) is not None


def test_what_is_open_but_not_needed_makes_room() -> None:
    source, _ = room(2)
    fill(source, 0, 0, 1)
    pinned = source.open(0)
    batches = [expert for batch in source.use(0, [2, 3], pinned) for expert in batch.experts]
    assert batches == [2, 3], "both slots held experts that nobody needs"
    assert not pinned.is_open


def test_what_is_under_way_makes_room_behind_its_fence() -> None:
    source, transfer = room(2)
    fill(source, 0, 0, 1)
    pinned = source.open(0)
    transfer.fenced = []
    batches = [expert for batch in source.use(0, [0, 1, 2], pinned) for expert in batch.experts]
    assert batches == [2]
    assert sorted(set(transfer.fenced)) == [0, 1]


def test_a_use_that_is_abandoned_lets_go() -> None:
    source, _ = room(3)
    fill(source, 0, 0, 1)
    pinned = source.open(0)
    uses = source.use(0, [0, 2], pinned)
    next(uses)
    uses.close()
    assert all(entry.pins == 0 for entry in source.cache.entries())


def test_experts_that_arrive_after_the_opening_come_as_a_wave() -> None:
    source, _ = room(4)
    fill(source, 0, 0)
    pinned = source.open(0)
    fill(source, 0, 1)
    assert [batch.experts for batch in source.use(0, [0, 1], pinned)] == [(1,)]


def test_a_closed_source_opens_nothing() -> None:
    source, _ = room(2)
    fill(source, 0, 0)
    source.close()
    with pytest.raises(TransferError):
        source.open(0)


def test_what_compute_has_already_may_be_booked_later() -> None:
    source, transfer = room(4)
    fill(source, 0, 0, 1)
    fill(source, 1, 2, 3)
    before = source.counters.copy()
    pinned = source.open(0)
    transfer.fenced = []
    assert source.use_pinned(pinned, [1])
    assert source.counters.minus(before).hits == 0
    following = source.open(1)  # the next layer begins before anything is booked
    assert next(source.cache.reserve_for_demand([ExpertKey(1, 0)]), None) is None, "all that is open stays"
    source.book()
    source.book()
    assert source.counters.minus(before).hits == 1
    assert transfer.fenced == [source.cache.get(ExpertKey(0, 1)).slot]  # type: ignore[union-attr]
    assert source.use_pinned(following, [2, 3])
    source.end_step()
    assert source.counters.minus(before).hits == 3
    assert all(entry.pins == 0 for entry in source.cache.entries())


def test_what_was_not_opened_is_not_put_off() -> None:
    source, _ = room(3)
    fill(source, 0, 0, 1)
    pinned = source.open(0)
    assert not source.use_pinned(pinned, [0, 2])
    assert [batch.experts for batch in source.use(0, [0, 2], pinned)] == [(2,)]


@pytest.mark.parametrize("then", ["begin_step", "end_step", "use", "use_pinned"])
def test_nothing_happens_before_what_was_put_off(then: str) -> None:
    source, _ = room(4)
    fill(source, 0, 0, 1)
    before = source.counters.copy()
    source.use_pinned(source.open(0), [0, 1])
    if then == "use":
        fill(source, 1, 0)
    elif then == "use_pinned":
        source.use_pinned(source.open(0), [])
    else:
        getattr(source, then)()
    assert source.counters.minus(before).hits == 2


@pytest.mark.parametrize("batching", [True, False])
def test_a_submission_that_is_refused_midway_leaves_no_pins(batching: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    source, transfer = room(4)
    source.loads.batching = batching
    copy, copies = transfer.copy, 0

    def refuse_the_third(jobs: Sequence[CopyJob], *, urgent: bool) -> list[CopyHandle]:
        nonlocal copies
        copies += 1
        if copies == (2 if batching else 3):
            raise TransferError("refused")
        return copy(jobs, urgent=urgent)

    monkeypatch.setattr(transfer, "copy", refuse_the_third)
    with pytest.raises(TransferError):
        fill(source, 0, 0, 1, 2)
    assert all(entry.pins == 0 for entry in source.cache.entries())


class Over:
    """An event that is over, or is not."""

    def __init__(self, over: bool) -> None:
        self.over = over

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        pass


@pytest.mark.parametrize(("over", "under_way"), [(True, 1), (False, 2)])
def test_wishes_are_submitted_until_something_else_is_more_urgent(over: bool, under_way: int) -> None:
    clock, blob = VirtualClock(), 16 * 2**20
    transfer, eviction = VirtualTransfer(clock, blob, blob), make_eviction("draft-informed", (4, 4))
    source = ExpertSource(NoWeights(6), transfer, eviction, blob, clock, Counters(), threaded=False)  # type: ignore[arg-type]
    assert transfer.depth == 2
    source.begin_step()
    source.patient = True
    source.prefetch(PrefetchRequests.of(PrefetchRequest(ExpertKey(1, expert), 0.9, 1) for expert in range(4)))
    assert len(source.loads) == 0, "whoever is patient asks for it"
    source.see_to_wishes(Over(over))
    assert len(source.loads) == under_way


@pytest.mark.parametrize("where", ["before", "after"])
def test_an_interrupt_while_copies_are_settled_leaves_none_under_way_for_good(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    clock, blob = VirtualClock(), 16 * 2**20
    transfer, eviction = VirtualTransfer(clock, blob, blob), make_eviction("lru", (4, 4))
    source = ExpertSource(NoWeights(6), transfer, eviction, blob, clock, Counters(), threaded=False)  # type: ignore[arg-type]
    source.begin_step()
    source.prefetch(PrefetchRequests.of([PrefetchRequest(ExpertKey(1, 0), 0.9, 1)]))
    (handle,) = source.loads.handles
    clock.sleep(100.0)

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(*(handle, "wait") if where == "before" else (source.loads, "_note"), interrupted)
    with pytest.raises(KeyboardInterrupt):
        source.pump()
    monkeypatch.undo()
    source.pump()
    assert not len(source.loads)
    assert [entry.state for entry in source.cache.entries()] == [Residency.READY]
