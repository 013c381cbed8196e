"""What can be switched off to measure what it is worth: batching and asynchrony; and eviction rules that change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from spmoe.errors import TransferError
from spmoe.experts.eviction import make_eviction
from spmoe.experts.link import ThrottledTransfer, VirtualTransfer
from spmoe.experts.prefetcher import _CHUNK_BYTES
from spmoe.experts.source import ExpertSource
from spmoe.experts.transfer import CopyHandle, CopyJob
from spmoe.observe.clock import VirtualClock
from spmoe.observe.ledger import Counters
from spmoe.registry import EVICTION_POLICIES
from spmoe.types import ExpertKey, PrefetchRequest, PrefetchRequests, Residency

LAYERS, EXPERTS = 4, 4


class NoWeights:
    """Slots that hold nothing."""

    def __init__(self, count: int) -> None:
        self.count = count

    def weights(self, slot: int) -> dict[str, object]:
        return {}

    def close(self) -> None:
        pass


class Refusing(VirtualTransfer):
    """Refuses the copy of one expert."""

    refused: ExpertKey | None = None

    def copy(self, jobs: Sequence[CopyJob], *, urgent: bool) -> list[CopyHandle]:
        if any(job.key == self.refused for job in jobs):
            raise TransferError("refused")
        return super().copy(jobs, urgent=urgent)


class Place:
    """A source on a virtual clock; a copy takes a second."""

    def __init__(self, slots: int = 12, depth: int = 4, rule: str = "lru", blob: int = 1) -> None:
        self.clock = VirtualClock()
        self.transfer = Refusing(self.clock, 1, 1.0, depth)
        eviction = make_eviction(rule, [EXPERTS] * LAYERS)
        room: Any = NoWeights(slots)
        self.source = ExpertSource(room, self.transfer, eviction, blob, self.clock, Counters(), threaded=False)
        self.clock.add_event_source(self.transfer.link.next_event, self.source.pump)
        self.source.begin_step()

    def prefetch(self, *keys: tuple[int, int]) -> None:
        self.source.prefetch(PrefetchRequests.of([PrefetchRequest(ExpertKey(*key), 1.0, key[0]) for key in keys]))

    def use(self, layer: int, *experts: int) -> None:
        for _ in self.source.use(layer, experts):
            pass

    def state(self, layer: int, expert: int) -> Residency:
        entry = self.source.cache.get(ExpertKey(layer, expert))
        return Residency.ABSENT if entry is None else entry.state


@pytest.mark.parametrize("batching", [True, False])
def test_one_copy_per_submission_without_batching(batching: bool) -> None:
    place = Place()
    place.source.loads.batching = batching
    assert place.transfer.batched == place.source.loads.batching == batching
    place.prefetch((1, 0), (1, 1), (1, 2))
    place.use(0, 0, 1, 2)  # the first that is demanded does not wait for the others
    assert [len(jobs) for jobs in place.transfer.submissions] == ([3, 1, 2] if batching else [1] * 6)
    assert {job.key for jobs in place.transfer.submissions for job in jobs} == {
        ExpertKey(layer, e) for layer in range(2) for e in range(3)
    }  # fmt: skip


@pytest.mark.parametrize("batching", [True, False])
def test_a_submission_that_is_refused_fails_what_was_not_submitted(batching: bool) -> None:
    place = Place()
    place.source.loads.batching = batching
    place.transfer.refused = ExpertKey(1, 1)
    place.prefetch((1, 0), (1, 1), (1, 2))
    first = Residency.ABSENT if batching else Residency.LOADING
    assert [place.state(1, expert) for expert in range(3)] == [first, Residency.ABSENT, Residency.ABSENT]
    assert place.source.counters.failed_bytes == (3 if batching else 2)
    place.transfer.refused = None
    place.use(1, 0, 1, 2)
    assert all(place.state(1, expert) is Residency.READY for expert in range(3))


def test_a_slower_link_passes_the_switch_on() -> None:
    clock = VirtualClock()
    inner = VirtualTransfer(clock, 1, 1.0)
    throttled = ThrottledTransfer(inner, 1, 1.0, clock)
    throttled.batched = False
    assert inner.batched is throttled.batched is False


@pytest.mark.parametrize("depth", [1, 2, 8])
def test_what_the_draft_wishes_for_is_waited_for_when_it_is_over(depth: int) -> None:
    place = Place(depth=depth)
    place.source.overlap = False
    place.prefetch((0, 0), (1, 0))
    place.clock.sleep(5.0)  # the draft goes on
    assert place.transfer.submissions == [], "nothing overlaps with it"
    place.prefetch((2, 0))
    place.source.draft_is_over()
    assert place.clock.now() == pytest.approx(8.0)
    assert place.source.counters.stall_seconds == pytest.approx(3.0)
    assert all(place.state(layer, 0) is Residency.READY for layer in range(3))
    for layer in range(3):
        place.use(layer, 0)
    assert (place.source.counters.hits, place.source.counters.late) == (3, 0)
    assert place.clock.now() == pytest.approx(8.0)


def test_what_the_target_wishes_for_is_waited_for_at_once() -> None:
    place = Place()
    place.source.overlap = False
    place.source.draft_is_over()
    place.use(0, 0)
    now = place.clock.now()
    place.prefetch((1, 1), (1, 2))
    assert place.clock.now() == pytest.approx(now + 2.0)
    assert place.state(1, 1) is place.state(1, 2) is Residency.READY


def test_a_wish_that_finds_no_slot_holds_nothing_up() -> None:
    place = Place(slots=2)
    place.source.overlap = False
    place.prefetch((1, 0), (1, 1), (1, 2), (2, 0))
    place.source.draft_is_over()
    assert place.source.counters.prefetch_loads == 2, (
        "what was promised in this step is not pushed out by prefetch requests"
    )
    place.use(1, 0, 1)
    assert place.source.counters.hits == 2


def test_a_failed_copy_is_told_where_the_expert_is_used() -> None:
    place = Place()
    place.source.overlap = False
    broken = ExpertKey(1, 1)

    def fail(job: CopyJob) -> None:
        if job.key == broken:
            raise TransferError("broken")

    place.transfer._on_done = fail
    place.prefetch((1, 0), (1, 1))
    place.source.draft_is_over()
    assert place.state(1, 0) is Residency.READY
    assert place.state(1, 1) is Residency.ABSENT
    with pytest.raises(TransferError, match="broken"):
        place.use(1, 0, 1)


@pytest.mark.parametrize("rule", EVICTION_POLICIES.names())
def test_another_rule_takes_over_what_is_resident(rule: str) -> None:
    place = Place(slots=4, rule="lru")
    lru = place.source.cache.eviction
    place.use(0, 0, 1)
    place.use(1, 0, 1)
    place.source.change_eviction(make_eviction(rule, [EXPERTS] * LAYERS))
    place.source.begin_step()
    place.use(2, 0, 1)  # which takes two victims
    assert len(place.source.cache) == 4
    place.source.change_eviction(lru)
    place.use(3, 0, 1)
    assert len(place.source.cache) == 4
    assert place.state(3, 0) is place.state(3, 1) is Residency.READY


def test_wishes_are_granted_a_chunk_at_a_time() -> None:
    place = Place(depth=8, blob=_CHUNK_BYTES // 2)
    place.prefetch((1, 0), (1, 1), (1, 2), (1, 3), (2, 0))
    assert [len(jobs) for jobs in place.transfer.submissions] == [2, 2, 1]
