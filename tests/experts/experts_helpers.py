"""What the tests of the experts room share: slots that show their content, a watched transfer, a small expert file."""

from __future__ import annotations

import faulthandler
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spmoe.errors import SpmoeError, TransferError
from spmoe.experts.batches import ExpertBatch
from spmoe.experts.eviction import make_eviction
from spmoe.experts.link import EmulatedLink, VirtualTransfer
from spmoe.experts.source import ExpertSource
from spmoe.experts.store import BlobLayout, StoreSpec
from spmoe.experts.transfer import CopyHandle, CopyJob
from spmoe.observe.clock import Clock, VirtualClock
from spmoe.observe.ledger import Counters
from spmoe.types import ExpertKey, PrefetchRequest, PrefetchRequests, Residency

BLOB = 64  # bytes of a blob that is only played
GARBAGE = -1


def code_of(key: ExpertKey) -> int:
    """What a slot shows when this expert is in it."""
    return 1000 * key.layer + key.expert


class MarkedSlots:
    """Slots whose one weight is the code of the expert in them, read when it is looked at."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.marks = [GARBAGE] * count
        self.closings = 0

    def weights(self, slot: int) -> Mapping[str, Tensor]:
        assert not self.closings, "the slots were given back"
        return Marked(self.marks, slot)

    def close(self) -> None:
        self.closings += 1


class Marked(Mapping[str, Tensor]):
    def __init__(self, marks: list[int], slot: int) -> None:
        self._marks = marks
        self._slot = slot

    def __getitem__(self, name: str) -> Tensor:
        return torch.tensor({"code": self._marks[self._slot]}[name])

    def __iter__(self) -> Iterator[str]:
        return iter(["code"])

    def __len__(self) -> int:
        return 1


class WatchedLink(EmulatedLink):
    """A link that remembers who entered it, in which order, and who was hurried."""

    def __init__(self, bytes_per_second: float, clock: Clock) -> None:
        super().__init__(bytes_per_second, clock)
        self.prefetches: list[Any] = []  # passages that entered without urgency
        self.overtakers: list[tuple[Any, list[Any]]] = []  # an urgent passage, and those it must overtake
        self.hurried: list[Any] = []

    def enter(self, nbytes: int, urgent: bool) -> Any:
        self.next_event()  # lets what is due start
        behind = [p for p in self.prefetches if p.done_at is None]
        link_copy = super().enter(nbytes, urgent)
        if urgent:
            self.overtakers.append((link_copy, behind))
        else:
            self.prefetches.append(link_copy)
        return link_copy

    def prioritize(self, link_copy: Any) -> None:
        super().prioritize(link_copy)
        self.hurried.append(link_copy)

    def change_rate(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second


class WatchedClock(VirtualClock):
    """A virtual clock that tells before somebody sleeps on it."""

    def __init__(self) -> None:
        super().__init__()
        self.before_sleep: Callable[[], None] = lambda: None

    def sleep(self, seconds: float) -> None:
        self.before_sleep()
        super().sleep(seconds)


class WatchedTransfer(VirtualTransfer):
    """A virtual transfer whose every submission is looked at before it starts."""

    def __init__(self, room: ExpertRuntime, clock: Clock, rate: float, depth: int) -> None:
        super().__init__(clock, BLOB, rate, depth, on_start=room.started, on_done=room.done)
        self.link: WatchedLink = WatchedLink(rate, clock)
        self.passages: dict[ExpertKey, Any] = {}  # of the latest copy of each expert
        self.closings = 0
        self._room = room

    def copy(self, jobs: Sequence[CopyJob], *, urgent: bool) -> list[CopyHandle]:
        self._room.submitting(jobs, urgent)
        handles = super().copy(jobs, urgent=urgent)
        entered = [p for p, _ in self.link.overtakers] if urgent else self.link.prefetches
        self.passages.update(zip((job.key for job in jobs), entered[-len(jobs) :], strict=True))
        return handles

    def close(self) -> None:
        assert not self._room.slots.closings, "a copy may still be writing into a slot"
        super().close()
        self.closings += 1


@dataclass
class Using:
    """A `use` that has begun."""

    asked: list[ExpertKey]
    batches: Iterator[ExpertBatch]
    retried: set[ExpertKey]  # a prefetch of theirs failed before the use began, which nobody has looked at yet
    late: list[Any]  # passages that were under way, by a prefetch request, when asked for
    bystanders: list[Any]  # passages of other prefetch requests that had not started by then
    demanded: int  # ABSENT when asked for
    delivered: list[ExpertKey] = field(default_factory=list)
    failed: set[ExpertKey] = field(default_factory=set)
    submitted: int = 0
    batch: ExpertBatch | None = None


class ExpertRuntime:
    """An `ExpertSource` on virtual time with a model of what it may do; every step of it is checked.

    The model never looks at the source's own queue or counters to decide what is right.
    """

    def __init__(
        self, eviction: str, slots: int, depth: int, experts: Sequence[int], copy_seconds: float, *, follow: bool
    ) -> None:
        self.experts = tuple(experts)
        self.clock = WatchedClock()
        self.slots = MarkedSlots(slots)
        self.transfer = WatchedTransfer(self, self.clock, BLOB / copy_seconds, depth)
        self.counters = Counters()
        self.source = ExpertSource(
            self.slots,
            self.transfer,
            make_eviction(eviction, experts),
            BLOB,
            self.clock,
            self.counters,
            threaded=False,
        )
        if follow:
            self.clock.add_event_source(self.transfer.link.next_event, self.source.pump)
        self.using: Using | None = None
        self.closed = False
        self.refusing = False  # submissions raise
        self.broken: set[ExpertKey] = set()  # copies of these fail
        # the model
        self.writing: dict[int, CopyJob] = {}
        self.doomed: set[int] = set()  # slots whose copy will fail
        self.unneeded: set[ExpertKey] = set()  # prefetched, in a slot, never asked for
        self.wished: dict[ExpertKey, int] = {}  # live prefetch requests: the latest deadline of each expert
        self.position = -1
        self.issued_in_step = 0
        self.expected = Counters()

    # ---- what a program may do

    def begin_step(self) -> None:
        self.wished.clear()
        self.position = -1
        self.issued_in_step = 0
        self.source.begin_step()

    def end_step(self) -> None:
        self.wished.clear()
        self.source.end_step()

    def prefetch(self, prefetches: Iterable[PrefetchRequest]) -> None:
        prefetches = list({request.key: request for request in prefetches}.values())
        for request in prefetches:
            if not self.closed:
                self.expected.prefetches_requested += 1
                if request.fetch and request.deadline > self.position:
                    self.wished[request.key] = max(request.deadline, self.wished.get(request.key, -1))
        self.source.prefetch(PrefetchRequests.of(prefetches))

    def pump(self) -> None:
        handle = self.source.pump()
        if handle is not None:
            assert not handle.ready(), "a worker would spin on a copy that has ended"
            assert self.wished, "nothing is wished for that could follow"
            assert len(self.writing) >= min(self.transfer.depth, max(1, self.slots.count - 1)), "there is room"

    def use(self, layer: int, experts: Sequence[int]) -> None:
        """Begin a use and take its first batch."""
        assert self.using is None
        asked = [ExpertKey(layer, e) for e in dict.fromkeys(experts)]
        ended = self._ended()
        retried = {key for key in asked if ended.get(key) is False}
        ready: set[ExpertKey] = set()
        late: list[Any] = []
        for key in asked:
            entry = self.source.cache.get(key)
            if entry is None or key in retried:
                continue
            if entry.state is Residency.READY or key in ended:
                ready.add(key)
            else:
                self.expected.late += 1
                late.append(self.transfer.passages[key])
                if key in self.unneeded:
                    self.expected.late_bytes += BLOB
            if key in self.unneeded:
                self.unneeded.remove(key)
                self.expected.used_bytes += BLOB
        demanded = len(asked) - len(ready) - len(late)
        self.expected.hits += len(ready)
        self.expected.demand_loads += demanded
        self.expected.demand_bytes += BLOB * demanded
        link = self.transfer.link
        link.next_event()
        bystanders = [p for p in link.prefetches if p.done_at is None and p not in late and p not in link.hurried]
        self.using = Using(asked, self.source.use(layer, experts), retried, late, bystanders, demanded)
        self.position = layer
        self.wished = {key: deadline for key, deadline in self.wished.items() if deadline > layer}
        self.next_wave()
        if self.using is not None and ready:
            assert set(self.using.delivered) == ready, "those READY come first, in one batch"

    def next_wave(self) -> SpmoeError | None:
        """Give the batch back and take the next; the error if there is none to come because of one."""
        using = self.using
        assert using is not None
        using.batch = None
        self.clock.before_sleep = self._blocked
        try:
            batch, error = next(using.batches, None), None
        except SpmoeError as raised:
            batch, error = None, raised
        finally:
            self.clock.before_sleep = lambda: None
        if batch is None:
            self.using = None
            if error is None:
                self._finished(using)
            else:
                self._failed(using)
            return error
        using.batch = batch
        assert batch.experts
        assert batch.layer == using.asked[0].layer
        assert len(batch.experts) == len(batch.slots) == len(batch.weights) == len(set(batch.slots))
        using.delivered += [ExpertKey(batch.layer, e) for e in batch.experts]
        assert len(set(using.delivered)) == len(using.delivered), "delivered twice"
        assert set(using.delivered) <= set(using.asked)
        self.check_wave()
        return None

    def abandon(self) -> None:
        """Stop half-way, as a consumer that breaks out of its loop."""
        using, self.using = self.using, None
        assert using is not None
        using.batches.close()  # type: ignore[attr-defined]

    def consumer_raises(self) -> None:
        using, self.using = self.using, None
        assert using is not None
        with pytest.raises(RuntimeError, match="the consumer failed"):
            using.batches.throw(RuntimeError("the consumer failed"))  # type: ignore[attr-defined]

    def close(self) -> None:
        self.source.close()
        self.closed = True
        self.wished.clear()

    # ---- what the transfer tells

    def submitting(self, jobs: Sequence[CopyJob], urgent: bool) -> None:
        assert not self.closed, "a copy after close"
        assert not urgent or self.using is not None, "a demand load that nobody demanded"
        assert len({job.slot for job in jobs}) == len({job.key for job in jobs}) == len(jobs)
        for job in jobs:
            assert 0 <= job.slot < self.slots.count
            assert job.slot not in self.writing, "a slot that is being written is rewritten"
            assert self.using is None or self.using.batch is None or job.slot not in self.using.batch.slots, (
                "a slot in use is rewritten"
            )
            leaving = self.slots.marks[job.slot]
            if leaving != GARBAGE:
                self._evicted(ExpertKey(*divmod(leaving, 1000)))
            self.slots.marks[job.slot] = GARBAGE
        for job in jobs:
            assert job.key not in [other.key for other in self.writing.values()], "a key in two slots"
            assert code_of(job.key) not in self.slots.marks, "a key in two slots"
        if urgent:
            assert self.using is not None
            assert {job.key for job in jobs} <= set(self.using.asked) - set(self.using.delivered)
        else:
            self._submitting_wishes(jobs)
        if self.refusing:
            if not urgent:
                self.expected.failed_bytes += BLOB * len(jobs)
            raise TransferError("refused")
        if self.using is not None and urgent:
            self.using.submitted += len(jobs)
        if not urgent:
            self.unneeded |= {job.key for job in jobs}

    def started(self, job: CopyJob) -> None:
        self.writing[job.slot] = job
        if job.key in self.broken:
            self.doomed.add(job.slot)

    def done(self, job: CopyJob) -> None:
        assert self.writing.pop(job.slot) == job
        if job.slot in self.doomed:
            self.doomed.remove(job.slot)
            if self.using is not None and job.key in self.using.retried:
                self.using.retried.remove(job.key)
            elif self.using is not None and job.key in self.using.asked:
                self.using.failed.add(job.key)
            if job.key in self.unneeded:
                self.unneeded.remove(job.key)
                self.expected.failed_bytes += BLOB
            raise TransferError(f"{job.key} is broken")
        self.slots.marks[job.slot] = code_of(job.key)

    # ---- checks

    def check(self) -> None:
        """Everything that holds between any two calls."""
        entries = self.source.cache.entries()
        assert len({e.slot for e in entries}) == len(entries) <= self.slots.count
        assert self.source.cache.peak <= self.slots.count
        for entry in entries:
            if entry.state is Residency.READY:
                assert self.slots.marks[entry.slot] == code_of(entry.key), "READY, but something else is in the slot"
                assert entry.slot not in self.writing
            else:
                assert entry.state is Residency.LOADING
                assert self.writing[entry.slot].key == entry.key
        assert {e.key for e in entries if e.prefetched} == self.unneeded
        self.check_wave()
        self.check_ledger()
        for urgent, behind in self.transfer.link.overtakers:
            assert_before([urgent], [p for p in behind if p not in self.transfer.link.hurried])

    def check_wave(self) -> None:
        if self.using is not None and self.using.batch is not None:
            batch = self.using.batch
            for expert, slot, weights in zip(batch.experts, batch.slots, batch.weights, strict=True):
                assert weights["code"].item() == self.slots.marks[slot] == code_of(ExpertKey(batch.layer, expert))

    def check_ledger(self) -> None:
        counted, expected = self.counters, self.expected
        for name in ("hits", "late", "demand_loads", "demand_bytes", "late_bytes", "used_bytes", "wasted_bytes"):
            assert getattr(counted, name) == getattr(expected, name), name
        assert counted.failed_bytes == expected.failed_bytes
        assert counted.prefetch_loads == expected.prefetch_loads
        assert counted.issued_bytes == BLOB * expected.prefetch_loads
        assert counted.held_bytes == BLOB * len(self.unneeded)
        assert counted.late_bytes <= counted.used_bytes
        assert counted.prefetches_requested == expected.prefetches_requested
        spent = (
            counted.prefetch_loads
            + counted.prefetches_resident
            + counted.prefetches_stale
            + counted.prefetches_over_budget
        )
        assert spent <= counted.prefetches_requested

    def finish(self) -> None:
        """Let everything end, see that no slot and no pin was lost, and close."""
        while self.using is not None:
            self.next_wave()
            self.check()
        self.end_step()
        self.clock.sleep(1000.0)
        self.broken.clear()
        self.doomed.clear()
        self.refusing = False
        if not self.closed:
            layer = len(self.experts) - 1
            assert self.experts[layer] >= self.slots.count
            hits = self.counters.hits
            self.use(layer, range(self.experts[layer]))
            assert self.using is not None
            assert self.counters.hits - hits + self.using.submitted == self.slots.count, "a slot or a pin was lost"
            while self.using is not None:
                assert self.next_wave() is None
                self.check()
        self.close()
        self.close()
        assert self.transfer.closings == self.slots.closings == 1
        submissions = len(self.transfer.submissions)
        self.prefetch([PrefetchRequest(ExpertKey(layer, 0), 1.0, layer) for layer in range(len(self.experts))])
        assert self.source.pump() is None
        assert len(self.transfer.submissions) == submissions
        self.check()

    def _submitting_wishes(self, jobs: Sequence[CopyJob]) -> None:
        for job in jobs:
            assert job.key in self.wished, "a prefetch request that is stale, or that nobody had, cost bytes"
            del self.wished[job.key]
        if self.using is not None:
            unserved = set(self.using.asked) - set(self.using.delivered) - self.using.failed
            for key in unserved:
                assert self.source.cache.get(key) is not None, (
                    "a prefetch request took a slot that a demand load waits for"
                )
        self.issued_in_step += BLOB * len(jobs)
        self.expected.prefetch_loads += len(jobs)
        budget = self.source.grants.step_budget
        assert budget is None or self.issued_in_step <= budget, "over the step's budget"
        assert len(self.writing) + len(jobs) <= self.transfer.depth, "deeper than the transfer wants"

    def _evicted(self, key: ExpertKey) -> None:
        if key in self.unneeded:
            self.unneeded.remove(key)
            self.expected.wasted_bytes += BLOB
        if self.using is not None:
            assert key not in set(self.using.asked) - set(self.using.delivered), (
                "evicted between its claim and its batch"
            )

    def _ended(self) -> dict[ExpertKey, bool]:
        """Copies that have ended and whose end nobody has looked at yet, and whether they ended well."""
        return {
            e.key: e.slot not in self.doomed
            for e in self.source.cache.entries()
            if e.state is Residency.LOADING and e.handle is not None and e.handle.ready()
        }

    def _blocked(self) -> None:
        """Somebody sleeps in a use: on a copy of its own, unless a prefetch request has started to write the only slot there is."""
        using = self.using
        assert using is not None
        loading = [e.key for e in self.source.cache.entries() if e.state is Residency.LOADING]
        assert self.slots.count == 1 or set(loading) & set(using.asked), (
            "a demand load waits for the slot of a prefetch request"
        )

    def _failed(self, using: Using) -> None:
        assert self.closed or self.refusing or using.failed, "raised for no reason"
        for key in using.failed:
            entry = self.source.cache.get(key)
            assert entry is None or entry.prefetched, "the copy failed, so the expert is absent until wished for again"

    def _finished(self, using: Using) -> None:
        assert set(using.delivered) == set(using.asked)
        assert not using.failed, "a copy failed, yet the use did not"
        assert using.submitted == using.demanded, "demand loads and copies differ"
        assert_before(using.late, using.bystanders)


def assert_before(these: Iterable[Any], those: Iterable[Any]) -> None:
    """All of these passages end before any of those."""
    those = list(those)
    for link_copy in these:
        for other in those:
            if other.done_at is not None:
                assert link_copy.done_at is not None, "a prefetch request started before what is waited for"
                assert link_copy.done_at < other.done_at, "a prefetch request went before what is waited for"


# ---- a small expert file with known content

LAYOUT = BlobLayout.of({"up": (8, 16), "down": (16, 8)}, torch.float32)


def spec_of(experts: Sequence[int] = (3, 3), fingerprint: str = "one", layout: BlobLayout = LAYOUT) -> StoreSpec:
    return StoreSpec(fingerprint, layout, tuple(experts))


def weights_of(key: ExpertKey, layout: BlobLayout = LAYOUT) -> dict[str, Tensor]:
    """This expert's tensors, unlike any other's."""
    dtype = getattr(torch, layout.dtype)
    generator = torch.Generator().manual_seed(code_of(key))
    return {f.name: torch.randn(f.shape, generator=generator).to(dtype) for f in layout.fields}


def fill(key: ExpertKey, views: dict[str, Tensor]) -> None:
    """Write an expert of `LAYOUT`."""
    for name, tensor in weights_of(key).items():
        views[name].copy_(tensor)


def blob_of(key: ExpertKey, layout: BlobLayout = LAYOUT) -> bytes:
    """All bytes of this expert's blob."""
    blob = torch.zeros(layout.nbytes, dtype=torch.uint8)
    views = layout.views(blob)
    for name, tensor in weights_of(key, layout).items():
        views[name].copy_(tensor)
    return blob.numpy().tobytes()


def leftovers(directory: Path) -> list[str]:
    """Every file there but locks."""
    return sorted(p.name for p in directory.iterdir() if p.suffix != ".lock")


def within(seconds: float, body: Callable[[], None]) -> None:
    """Run `body` in a thread of its own; fail, with every thread's stack, if it hangs."""
    outcome: list[BaseException | None] = []

    def run() -> None:
        try:
            body()
        except BaseException as error:
            outcome.append(error)
        else:
            outcome.append(None)

    thread = threading.Thread(target=run, name="test-body", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        faulthandler.dump_traceback(file=sys.__stderr__)
        raise AssertionError(f"still running after {seconds} s")
    if outcome[0] is not None:
        raise outcome[0]


def own_threads() -> set[threading.Thread]:
    """The engine's threads that are alive."""
    return {t for t in threading.enumerate() if t.name.startswith("spmoe-")}
