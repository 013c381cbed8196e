"""Helpers for tests of `spmoe.experts`: slots that show their content, a checked expert pool, an expert file."""

from __future__ import annotations

import faulthandler
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spmoe.errors import SpmoeError, TransferError
from spmoe.experts.access import ExpertBatch
from spmoe.experts.cache import ExpertCache
from spmoe.experts.eviction import make_eviction
from spmoe.experts.experts import Experts
from spmoe.experts.link import EmulatedLink, VirtualTransfer
from spmoe.experts.store import BlobLayout, StoreSpec
from spmoe.experts.transfer import CopyHandle, CopyJob
from spmoe.observe.clock import Clock, VirtualClock
from spmoe.observe.ledger import Counters
from spmoe.types import ExpertKey, PrefetchRequest, PrefetchRequests, Residency

BLOB = 64  # bytes of a blob that no test ever reads
GARBAGE = -1  # code of a slot that no complete expert is in


def cache_of(experts: Experts) -> ExpertCache:
    """Return the private cache, for assertions on entries (pins, prefetched flags, handles)."""
    return experts.pool._cache


def open_demands(experts: Experts) -> int:
    """Return how many demands the private list of the pool holds."""
    return len(experts.pool._demands)


def requests_for(*keys: tuple[int, int], score: float = 0.9) -> PrefetchRequests:
    """Make prefetch requests, each due at the expert's own layer."""
    return PrefetchRequests.of(PrefetchRequest(ExpertKey(*key), score, key[0]) for key in keys)


def code_of(key: ExpertKey) -> int:
    """Return the value that a slot shows while this expert is in it."""
    return 1000 * key.layer + key.expert


class MarkedSlots:
    """Slots whose only weight, `code`, is the code of the expert in the slot at the time of access."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.codes = [GARBAGE] * count
        self.close_calls = 0

    def weights(self, slot: int) -> Mapping[str, Tensor]:
        assert not self.close_calls, "the slots were released"
        return CodeWeights(self.codes, slot)

    def close(self) -> None:
        self.close_calls += 1


class CodeWeights(Mapping[str, Tensor]):
    def __init__(self, codes: list[int], slot: int) -> None:
        self._codes = codes
        self._slot = slot

    def __getitem__(self, name: str) -> Tensor:
        return torch.tensor({"code": self._codes[self._slot]}[name])

    def __iter__(self) -> Iterator[str]:
        return iter(["code"])

    def __len__(self) -> int:
        return 1


class EmptySlots:
    """Slots without weights."""

    def __init__(self, count: int) -> None:
        self.count = count

    def weights(self, slot: int) -> Mapping[str, Tensor]:
        return {}

    def close(self) -> None:
        pass


# ---- an expert pool whose every action is checked


class RecordingLink(EmulatedLink):
    """Link that remembers its copies, and which of them were prioritized."""

    def __init__(self, bytes_per_second: float, clock: Clock) -> None:
        super().__init__(bytes_per_second, clock)
        self.prefetches: list[Any] = []  # copies that were not urgent when they entered
        self.urgent: list[tuple[Any, list[Any]]] = []  # each urgent copy, and the prefetches it must overtake
        self.prioritized: list[Any] = []

    def enter(self, nbytes: int, urgent: bool) -> Any:
        self.next_event()  # starts every copy that is due
        not_started = [copy for copy in self.prefetches if copy.done_at is None]
        copy = super().enter(nbytes, urgent)
        if urgent:
            self.urgent.append((copy, not_started))
        else:
            self.prefetches.append(copy)
        return copy

    def prioritize(self, copy: Any) -> None:
        super().prioritize(copy)
        self.prioritized.append(copy)

    def change_rate(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second


class HookedClock(VirtualClock):
    """Virtual clock that calls `before_sleep` before every sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.before_sleep: Callable[[], None] = lambda: None

    def sleep(self, seconds: float) -> None:
        self.before_sleep()
        super().sleep(seconds)


class CheckedTransfer(VirtualTransfer):
    """Virtual transfer that has `CheckedExperts` check every submission before it starts."""

    def __init__(self, checked: CheckedExperts, clock: Clock, rate: float, depth: int) -> None:
        super().__init__(clock, BLOB, rate, depth, on_start=checked.on_copy_start, on_done=checked.on_copy_done)
        self.link: RecordingLink = RecordingLink(rate, clock)
        self.latest_copies: dict[ExpertKey, Any] = {}  # the latest copy of each expert over the link
        self.close_calls = 0
        self._checked = checked

    @property
    def submitted_keys(self) -> list[ExpertKey]:
        """Every expert submitted so far, in order."""
        return [job.key for jobs in self.submissions for job in jobs]

    def copy(self, jobs: Sequence[CopyJob], *, urgent: bool) -> list[CopyHandle]:
        self._checked.on_submit(jobs, urgent)
        handles = super().copy(jobs, urgent=urgent)
        entered = [copy for copy, _ in self.link.urgent] if urgent else self.link.prefetches
        self.latest_copies.update(zip((job.key for job in jobs), entered[-len(jobs) :], strict=True))
        return handles

    def close(self) -> None:
        assert not self._checked.slots.close_calls, "a copy may still write into a slot"
        super().close()
        self.close_calls += 1


@dataclass
class ActiveUse:
    """A call of `ExpertAccess.use` that has begun and not ended."""

    needed: list[ExpertKey]
    batches: Generator[ExpertBatch, None, None]
    retried: set[ExpertKey]  # their prefetch had failed before the use began, and had not been settled
    late: list[Any]  # link copies that were in flight when the use began
    not_started: list[Any]  # link copies of other prefetch requests that had not started by then
    demanded: int  # experts that were ABSENT when the use began
    delivered: list[ExpertKey] = field(default_factory=list)
    failed: set[ExpertKey] = field(default_factory=set)
    submitted: int = 0
    batch: ExpertBatch | None = None


class CheckedExperts:
    """`Experts` on virtual time beside a reference model; every action is checked against the model.

    The model never reads the scheduler's queue or the counters to decide what is right. `auto_pump`: prefetch requests
    are submitted at the end of every copy, as a worker thread would do; else only when a test calls `pump`.
    """

    def __init__(
        self,
        eviction: str,
        slots: int,
        depth: int,
        experts_per_layer: Sequence[int],
        copy_seconds: float,
        *,
        auto_pump: bool,
    ) -> None:
        self.experts_per_layer = tuple(experts_per_layer)
        self.clock = HookedClock()
        self.slots = MarkedSlots(slots)
        self.transfer = CheckedTransfer(self, self.clock, BLOB / copy_seconds, depth)
        policy = make_eviction(eviction, experts_per_layer)
        self.experts = Experts.build(self.slots, self.transfer, policy, BLOB, self.clock, threaded=False)
        self.cache = cache_of(self.experts)
        self.counters = self.experts.ledger.counters
        if auto_pump:
            self.clock.add_event_source(self.transfer.link.next_event, self.experts.scheduler.pump)
        self.active: ActiveUse | None = None
        self.closed = False
        self.refuse_submissions = False
        self.broken: set[ExpertKey] = set()  # copies of these experts fail
        # the reference model
        self.writing: dict[int, CopyJob] = {}  # by slot
        self.failing_slots: set[int] = set()  # slots whose copy will fail
        self.unused_prefetches: set[ExpertKey] = set()  # prefetched, in a slot or in flight, never used
        self.pending: dict[ExpertKey, int] = {}  # live prefetch requests: the latest deadline of each expert
        self.layer = -1  # that runs
        self.issued_in_step = 0  # bytes
        self.expected = Counters()

    # ---- actions of a test

    def begin_step(self) -> None:
        self.pending.clear()
        self.layer = -1
        self.issued_in_step = 0
        self.experts.step.begin()

    def end_step(self) -> None:
        self.pending.clear()
        self.experts.step.end()

    def prefetch(self, requests: Iterable[PrefetchRequest]) -> None:
        """Request prefetches; the last request for an expert counts."""
        requests = list({request.key: request for request in requests}.values())
        for request in requests:
            if not self.closed:
                self.expected.prefetches_requested += 1
                if request.fetch and request.deadline > self.layer:
                    self.pending[request.key] = max(request.deadline, self.pending.get(request.key, -1))
        self.experts.scheduler.request(PrefetchRequests.of(requests))

    def pump(self) -> None:
        handle = self.experts.scheduler.pump()
        if handle is not None:
            assert not handle.ready(), "a worker would spin on a copy that has ended"
            assert self.pending, "no request could follow that copy"
            assert len(self.writing) >= min(self.transfer.depth, max(1, self.slots.count - 1)), (
                "the transfer is not full"
            )

    def use(self, layer: int, experts: Sequence[int]) -> None:
        """Begin a use and take its first batch."""
        assert self.active is None
        needed = [ExpertKey(layer, expert) for expert in dict.fromkeys(experts)]
        ended = self._unsettled_ends()
        retried = {key for key in needed if ended.get(key) is False}
        ready: set[ExpertKey] = set()
        late: list[Any] = []
        for key in needed:
            residency = self.experts.pool.residency(key)
            if residency is Residency.ABSENT or key in retried:
                continue
            if residency is Residency.READY or key in ended:
                ready.add(key)
            else:
                self.expected.late += 1
                late.append(self.transfer.latest_copies[key])
                if key in self.unused_prefetches:
                    self.expected.late_bytes += BLOB
            if key in self.unused_prefetches:
                self.unused_prefetches.remove(key)
                self.expected.used_bytes += BLOB
        demanded = len(needed) - len(ready) - len(late)
        self.expected.hits += len(ready)
        self.expected.demand_loads += demanded
        self.expected.demand_bytes += BLOB * demanded
        link = self.transfer.link
        link.next_event()
        not_started = [
            copy
            for copy in link.prefetches
            if copy.done_at is None and copy not in late and copy not in link.prioritized
        ]
        batches = self.experts.access.use(layer, experts)
        self.active = ActiveUse(needed, batches, retried, late, not_started, demanded)
        self.layer = layer
        self.pending = {key: deadline for key, deadline in self.pending.items() if deadline > layer}
        self.next_batch()
        if self.active is not None and ready:
            assert set(self.active.delivered) == ready, "READY experts come first, in one batch"

    def next_batch(self) -> SpmoeError | None:
        """Release the batch and take the next one; return the error if the use ended with one."""
        active = self.active
        assert active is not None
        active.batch = None
        self.clock.before_sleep = self._check_blocked
        try:
            batch, error = next(active.batches, None), None
        except SpmoeError as raised:
            batch, error = None, raised
        finally:
            self.clock.before_sleep = lambda: None
        if batch is None:
            self.active = None
            if error is None:
                self._check_finished(active)
            else:
                self._check_failed(active)
            return error
        active.batch = batch
        assert batch.experts
        assert batch.layer == active.needed[0].layer
        assert len(batch.experts) == len(batch.slots) == len(batch.weights) == len(set(batch.slots))
        active.delivered += [ExpertKey(batch.layer, expert) for expert in batch.experts]
        assert len(set(active.delivered)) == len(active.delivered), "delivered twice"
        assert set(active.delivered) <= set(active.needed)
        self.check_batch()
        return None

    def abandon(self) -> None:
        """Close the use before its last batch, as a consumer does that breaks out of its loop."""
        active, self.active = self.active, None
        assert active is not None
        active.batches.close()

    def raise_in_consumer(self) -> None:
        """End the use by an error of its consumer."""
        active, self.active = self.active, None
        assert active is not None
        with pytest.raises(RuntimeError, match="the consumer failed"):
            active.batches.throw(RuntimeError("the consumer failed"))

    def close(self) -> None:
        self.experts.close()
        self.closed = True
        self.pending.clear()

    # ---- events of the transfer

    def on_submit(self, jobs: Sequence[CopyJob], urgent: bool) -> None:
        assert not self.closed, "a copy after close"
        assert not urgent or self.active is not None, "a demand load without a demand"
        assert len({job.slot for job in jobs}) == len({job.key for job in jobs}) == len(jobs)
        for job in jobs:
            assert 0 <= job.slot < self.slots.count
            assert job.slot not in self.writing, "a slot that is being written is overwritten"
            assert self.active is None or self.active.batch is None or job.slot not in self.active.batch.slots, (
                "a slot in use is overwritten"
            )
            code = self.slots.codes[job.slot]
            if code != GARBAGE:
                self._on_evict(ExpertKey(*divmod(code, 1000)))
            self.slots.codes[job.slot] = GARBAGE
        for job in jobs:
            assert job.key not in [other.key for other in self.writing.values()], "an expert in two slots"
            assert code_of(job.key) not in self.slots.codes, "an expert in two slots"
        if urgent:
            assert self.active is not None
            assert {job.key for job in jobs} <= set(self.active.needed) - set(self.active.delivered)
        else:
            self._on_submit_prefetches(jobs)
        if self.refuse_submissions:
            if not urgent:
                self.expected.failed_bytes += BLOB * len(jobs)
            raise TransferError("refused")
        if self.active is not None and urgent:
            self.active.submitted += len(jobs)
        if not urgent:
            self.unused_prefetches |= {job.key for job in jobs}

    def on_copy_start(self, job: CopyJob) -> None:
        self.writing[job.slot] = job
        if job.key in self.broken:
            self.failing_slots.add(job.slot)

    def on_copy_done(self, job: CopyJob) -> None:
        assert self.writing.pop(job.slot) == job
        if job.slot in self.failing_slots:
            self.failing_slots.remove(job.slot)
            if self.active is not None and job.key in self.active.retried:
                self.active.retried.remove(job.key)
            elif self.active is not None and job.key in self.active.needed:
                self.active.failed.add(job.key)
            if job.key in self.unused_prefetches:
                self.unused_prefetches.remove(job.key)
                self.expected.failed_bytes += BLOB
            raise TransferError(f"{job.key} is broken")
        self.slots.codes[job.slot] = code_of(job.key)

    # ---- checks

    def check(self) -> None:
        """Check everything that holds between any two actions."""
        entries = self.cache.entries()
        assert len({entry.slot for entry in entries}) == len(entries) <= self.slots.count
        assert self.experts.pool.slots_by_key() == {entry.key: entry.slot for entry in entries}
        assert self.experts.pool.peak_slots <= self.slots.count
        for entry in entries:
            if entry.state is Residency.READY:
                assert self.slots.codes[entry.slot] == code_of(entry.key), "READY, but another expert is in the slot"
                assert entry.slot not in self.writing
            else:
                assert entry.state is Residency.LOADING
                assert self.writing[entry.slot].key == entry.key
        assert {entry.key for entry in entries if entry.prefetched} == self.unused_prefetches
        self.check_batch()
        self.check_counters()
        for urgent, overtaken in self.transfer.link.urgent:
            assert_before([urgent], [copy for copy in overtaken if copy not in self.transfer.link.prioritized])

    def check_batch(self) -> None:
        if self.active is not None and self.active.batch is not None:
            batch = self.active.batch
            for expert, slot, weights in zip(batch.experts, batch.slots, batch.weights, strict=True):
                assert weights["code"].item() == self.slots.codes[slot] == code_of(ExpertKey(batch.layer, expert))

    def check_counters(self) -> None:
        counted, expected = self.counters, self.expected
        for name in ("hits", "late", "demand_loads", "demand_bytes", "late_bytes", "used_bytes", "wasted_bytes"):
            assert getattr(counted, name) == getattr(expected, name), name
        assert counted.failed_bytes == expected.failed_bytes
        assert counted.prefetch_loads == expected.prefetch_loads
        assert counted.issued_bytes == BLOB * expected.prefetch_loads
        assert counted.held_bytes == BLOB * len(self.unused_prefetches)
        assert counted.late_bytes <= counted.used_bytes
        assert counted.prefetches_requested == expected.prefetches_requested
        settled = (
            counted.prefetch_loads
            + counted.prefetches_resident
            + counted.prefetches_stale
            + counted.prefetches_over_budget
        )
        assert settled <= counted.prefetches_requested

    def finish(self) -> None:
        """Let everything end, check that no slot and no pin was lost, and close."""
        while self.active is not None:
            self.next_batch()
            self.check()
        self.end_step()
        self.clock.sleep(1000.0)
        self.broken.clear()
        self.failing_slots.clear()
        self.refuse_submissions = False
        if not self.closed:
            layer = len(self.experts_per_layer) - 1
            assert self.experts_per_layer[layer] >= self.slots.count
            hits = self.counters.hits
            self.use(layer, range(self.experts_per_layer[layer]))
            assert self.active is not None
            assert self.counters.hits - hits + self.active.submitted == self.slots.count, "a slot or a pin was lost"
            while self.active is not None:
                assert self.next_batch() is None
                self.check()
        assert open_demands(self.experts) == 0, "a demand that has ended is kept"
        self.close()
        self.close()
        assert self.transfer.close_calls == self.slots.close_calls == 1
        submissions = len(self.transfer.submissions)
        layers = range(len(self.experts_per_layer))
        self.prefetch([PrefetchRequest(ExpertKey(layer, 0), 1.0, layer) for layer in layers])
        assert self.experts.scheduler.pump() is None
        assert len(self.transfer.submissions) == submissions
        self.check()

    def _on_submit_prefetches(self, jobs: Sequence[CopyJob]) -> None:
        for job in jobs:
            assert job.key in self.pending, "a request that is stale, or that was never made, cost bytes"
            del self.pending[job.key]
        if self.active is not None:
            unserved = set(self.active.needed) - set(self.active.delivered) - self.active.failed
            for key in unserved:
                assert self.experts.pool.residency(key) is not Residency.ABSENT, (
                    "a prefetch took a slot that a demand load waits for"
                )
        self.issued_in_step += BLOB * len(jobs)
        self.expected.prefetch_loads += len(jobs)
        budget = self.experts.scheduler.step_budget
        assert budget is None or self.issued_in_step <= budget, "over the step's budget"
        assert len(self.writing) + len(jobs) <= self.transfer.depth, "more copies in flight than the transfer's depth"

    def _on_evict(self, key: ExpertKey) -> None:
        if key in self.unused_prefetches:
            self.unused_prefetches.remove(key)
            self.expected.wasted_bytes += BLOB
        if self.active is not None:
            assert key not in set(self.active.needed) - set(self.active.delivered), (
                "evicted between its claim and its batch"
            )

    def _unsettled_ends(self) -> dict[ExpertKey, bool]:
        """Return the experts whose copy has ended and is not settled yet, and whether it succeeded."""
        return {
            entry.key: entry.slot not in self.failing_slots
            for entry in self.cache.entries()
            if entry.state is Residency.LOADING and entry.handle is not None and entry.handle.ready()
        }

    def _check_blocked(self) -> None:
        """Check that a use that sleeps waits for a copy of its own.

        Only with a single slot may it wait for a prefetch, which has started to write that slot.
        """
        active = self.active
        assert active is not None
        loading = [entry.key for entry in self.cache.entries() if entry.state is Residency.LOADING]
        assert self.slots.count == 1 or set(loading) & set(active.needed), (
            "a demand load waits for the slot of a prefetch"
        )

    def _check_failed(self, active: ActiveUse) -> None:
        assert self.closed or self.refuse_submissions or active.failed, "an error without a cause"
        for key in active.failed:
            entry = self.cache.get(key)
            assert entry is None or entry.prefetched, (
                "the copy failed, so the expert is ABSENT until it is requested again"
            )

    def _check_finished(self, active: ActiveUse) -> None:
        assert set(active.delivered) == set(active.needed)
        assert not active.failed, "a copy failed, yet the use raised no error"
        assert active.submitted == active.demanded, "demand loads and copies differ"
        assert_before(active.late, active.not_started)


def assert_before(first: Iterable[Any], second: Iterable[Any]) -> None:
    """Check that all link copies of `first` end before any of `second` ends."""
    second = list(second)
    for copy in first:
        for other in second:
            if other.done_at is not None:
                assert copy.done_at is not None, "a prefetch started before a copy that compute waits for"
                assert copy.done_at < other.done_at, "a prefetch went before a copy that compute waits for"


# ---- a small expert file with known content

LAYOUT = BlobLayout.of({"up": (8, 16), "down": (16, 8)}, torch.float32)


def spec_of(experts: Sequence[int] = (3, 3), fingerprint: str = "one", layout: BlobLayout = LAYOUT) -> StoreSpec:
    """Describe an expert file of so many experts in each layer."""
    return StoreSpec(fingerprint, layout, tuple(experts))


def weights_of(key: ExpertKey, layout: BlobLayout = LAYOUT) -> dict[str, Tensor]:
    """Return this expert's tensors, which differ from every other expert's."""
    dtype = getattr(torch, layout.dtype)
    generator = torch.Generator().manual_seed(code_of(key))
    return {f.name: torch.randn(f.shape, generator=generator).to(dtype) for f in layout.fields}


def fill(key: ExpertKey, views: dict[str, Tensor]) -> None:
    """Write an expert of `LAYOUT` into views of its blob."""
    for name, tensor in weights_of(key).items():
        views[name].copy_(tensor)


def blob_of(key: ExpertKey, layout: BlobLayout = LAYOUT) -> bytes:
    """Return all bytes of this expert's blob."""
    blob = torch.zeros(layout.nbytes, dtype=torch.uint8)
    views = layout.views(blob)
    for name, tensor in weights_of(key, layout).items():
        views[name].copy_(tensor)
    return blob.numpy().tobytes()


def leftovers(directory: Path) -> list[str]:
    """List the files of a directory except locks, sorted."""
    return sorted(p.name for p in directory.iterdir() if p.suffix != ".lock")


# ---- threads


def within(seconds: float, body: Callable[[], None]) -> None:
    """Run `body` in a thread; fail, and print every thread's stack, if it runs for longer than this."""
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
    """Return the engine's threads that are alive."""
    return {t for t in threading.enumerate() if t.name.startswith("spmoe-")}
