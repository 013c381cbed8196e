"""The source: all that a model sees of the experts room. It puts cache, slots, queue and transfer together.

One lock guards the bookkeeping; nobody waits for bytes while holding it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from spmoe.errors import SpmoeError, TransferError
from spmoe.experts.batches import ExpertBatch, PinnedLayer
from spmoe.experts.cache import Entry, ExpertCache
from spmoe.experts.eviction import Eviction
from spmoe.experts.inflight import InflightLoads, wait_for
from spmoe.experts.prefetcher import PrefetchQueue, PrefetchScheduler, PrefetchWorker
from spmoe.experts.slots import Slots
from spmoe.experts.transfer import CopyHandle, Event, Transfer
from spmoe.observe.clock import Clock
from spmoe.observe.ledger import Counters
from spmoe.observe.timeline import Activity, Timeline
from spmoe.types import ExpertKey, PrefetchRequests, Residency

OnRouted = Callable[[int, Sequence[int]], PrefetchRequests]  # layer, experts that its router has chosen


class ExpertSource:
    """Experts on demand and ahead of demand, in a fixed number of slots.

    A worker submits prefetch requests while compute keeps the calling thread busy. With `threaded=False` the caller does, when it
    prefetch requests and with `pump` when it would else wait: beside a device, two threads take the interpreter from each other.
    """

    def __init__(
        self,
        slots: Slots,
        transfer: Transfer,
        eviction: Eviction,
        blob_bytes: int,
        clock: Clock,
        counters: Counters,
        *,
        threaded: bool = True,
        timeline: Timeline | None = None,
    ) -> None:
        self.blob_bytes = blob_bytes
        self.timeline = timeline or Timeline()
        self.counters = counters
        self.overlap = True  # else copies of prefetch requests are waited for: nothing overlaps with them
        self.patient = False  # what is wished for waits until `see_to_wishes` is called, or a layer runs
        self.cache = ExpertCache(slots.count, eviction)
        self._slots, self._clock = slots, clock
        self.transfer = transfer
        self._queue = PrefetchQueue(counters)
        self.lock = threading.RLock()
        self.loads = InflightLoads(transfer, self.cache, blob_bytes, counters, clock, self.timeline)
        self.grants = PrefetchScheduler(self._queue, self.cache, self.loads, blob_bytes, counters)
        self._unplaced = 0  # demanded experts that no slot could be had for yet
        self._position = -1  # the layer that runs; -1 while the draft does
        self._on_routed: OnRouted | None = None
        self._unbooked: tuple[PinnedLayer, Sequence[int]] | None = None
        self._closed = False
        self._worker = PrefetchWorker(self.pump) if threaded else None

    # ---- the step, as the loop tells it

    def begin_step(self, sequence_id: int = 0, on_routed: OnRouted | None = None) -> None:
        """A draft is about to start. `on_routed` will be told what each layer's router chose, once that is demanded."""
        self.book()
        self.transfer.bind_compute_stream()
        with self.lock:
            self.grants.begin_step()
            self._on_routed = on_routed
            self.cache.eviction.begin_step(sequence_id)
            self._position = -1

    def prefetch(self, prefetches: PrefetchRequests) -> None:
        """Take note of guesses; they start to move as soon as the transfer has room."""
        if not len(prefetches):
            return
        with self.lock:
            if self._closed:
                return
            self.counters.prefetches_requested += len(prefetches)
            if not (timely := prefetches.deadlines > self._position).all():
                self.counters.prefetches_stale += int(np.count_nonzero(~timely))
                prefetches = prefetches.where(timely)
            self.cache.eviction.on_prefetches(prefetches)
            there = self.cache.present[prefetches.layers, prefetches.experts]
            self.counters.prefetches_resident += int(np.count_nonzero(there))
            for request in prefetches.where(prefetches.fetch & ~there):
                self._queue.put(request)
            drafting = self._position < 0
        if len(self._queue) and not self.overlap and not drafting:
            self._fetch_all()
        elif len(self._queue) and not self.patient:
            self.see_to_wishes()

    def draft_is_over(self) -> None:
        """Verification is about to start: where nothing may overlap with copies, the draft's are made now."""
        if not self.overlap:
            self._fetch_all()

    def change_eviction(self, eviction: Eviction) -> None:
        """Another rule decides from now on; what it has learnt while it decided before still counts."""
        with self.lock:
            self.cache.change_eviction(eviction)

    def open(self, layer: int) -> PinnedLayer:
        """Keep what a layer has READY. Compute may be given it at once; `use`, `book` or `shut` lets go of it.

        Whoever uses it knows the router's choice by then: all that compute was given before the opening is over.
        """
        with self.lock:
            if self._closed:
                raise TransferError("the engine was closed")
            self.loads.reap()
            pinned = self.cache.open(layer)
            pinned.since = self.transfer.mark()
            return pinned

    def shut(self, pinned: PinnedLayer) -> None:
        """Let go of what was opened. Idempotent."""
        with self.lock:
            self.cache.shut(pinned)

    def use_pinned(self, pinned: PinnedLayer, experts: Sequence[int]) -> bool:
        """Whether these are all among what was opened; then they are booked later, before anything else is."""
        self.transfer.passed(pinned.since)
        if (pinned.slots[list(experts)] < 0).any():
            return False
        self.book()
        self._unbooked = (pinned, experts)
        return True

    def book(self) -> None:
        """Account for what `use_pinned` has put off."""
        if self._unbooked is None:
            return
        (pinned, experts), self._unbooked = self._unbooked, None
        with self.lock:
            self.loads.reap()
            self._reach(pinned.layer)
            self._commit_pinned(pinned, experts)
        if self._on_routed is not None:
            self.prefetch(self._on_routed(pinned.layer, experts))

    def use(
        self, layer: int, experts: Sequence[int], pinned: PinnedLayer | None = None, shares: Sequence[float] = ()
    ) -> Iterator[ExpertBatch]:
        """Yield all these experts, batch by batch: those READY first, the others as they arrive.

        Those of `opened`, which compute has, are booked and not yielded. `shares`: of many rows, that chose each.
        """
        self.book()
        held, absent, started = list[Entry](), list[ExpertKey](), self._clock.now()
        try:
            with self.lock:
                self.loads.reap()
                self._reach(layer)
                if shares:
                    self.cache.eviction.on_prompt(layer, experts, shares)
                rest = list(dict.fromkeys(experts))
                if pinned is not None:
                    given = np.flatnonzero(pinned.slots >= 0).tolist()
                    self._commit_pinned(pinned, [expert for expert in rest if expert in given])
                    rest = [expert for expert in rest if expert not in given]
                ready, waiting, absent = self.loads.claim([ExpertKey(layer, e) for e in rest], self.cache.eviction)
                held += ready + waiting
                self._unplaced += len(absent)
                self._demand(absent, waiting, held)
            if self._on_routed is not None:
                self.prefetch(self._on_routed(layer, experts))
            if ready:
                yield self._batch(layer, ready)
                self._release(ready, held)
            while waiting or absent:
                arrived = self._arrivals(waiting, absent, held)
                if arrived:
                    yield self._batch(layer, arrived)
                    self._release(arrived, held)
        finally:
            self._release(list(held), held)
            self.timeline.add(Activity.LAYER, started, self._clock.now(), f"experts of layer {layer}")
            with self.lock:
                self._unplaced -= len(absent)
                if pinned is not None:
                    self.cache.shut(pinned)

    def computed(self) -> None:
        """All that compute has been given so far is over."""
        self.transfer.passed(self.transfer.mark())

    def end_step(self) -> None:
        """The step is over: what is still wished for is void."""
        self.book()
        with self.lock:
            self._queue.drop_all()
            self._on_routed = None
        self.book_stalls()

    def book_stalls(self) -> None:
        """Count what compute has waited on its own device, as far as that is known by now."""
        with self.lock:
            self.counters.stall_seconds += self.transfer.stalled_seconds()

    def pump(self, until: Event | None = None) -> CopyHandle | None:
        """Submit prefetch requests, until an event is over; the ticket to wait for where the transfer's depth holds some back."""
        if not len(self._queue) and not self.loads.entries:
            return None
        granted = True
        while granted:
            with self.lock:
                self.loads.reap()
                if self._closed:
                    return None
                try:
                    granted = not self._unplaced and self.grants.grant()
                except SpmoeError:
                    return None  # booked as failed; the error is raised where an expert is used
                full = len(self.loads) >= self.grants.depth
                handle = self.loads.entries[0].handle if full and len(self._queue) else None
            if self._worker is not None:
                time.sleep(0)  # whoever waits for the lock may have it
            granted = granted and (until is None or not until.query())
        return handle

    def see_to_wishes(self, until: Event | None = None) -> None:
        """Something may be submitted: by the worker, or else now, until an event is over."""
        if self._worker is not None and self.overlap:
            self._worker.poke()
        elif self.overlap:  # where nothing overlaps, whoever prefetch requests waits for it
            self.pump(until)

    def close(self) -> None:
        """End the worker and every copy, and let go of the slots. Idempotent."""
        with self.lock:
            if self._closed:
                return
            self._closed = True
            self._queue.drop_all()
        if self._worker is not None:
            self._worker.close()
        self.transfer.close()
        with self.lock:
            self._slots.close()

    # ---- under the lock

    def _reach(self, layer: int) -> None:
        self._position = layer
        self._queue.drop_passed(layer)
        self.cache.eviction.on_layer(layer)

    def _commit_pinned(self, pinned: PinnedLayer, experts: Sequence[int]) -> None:
        """These of what was opened are needed, and compute has them; nothing is kept any more but by a fence."""
        self.loads.book_hits(pinned.layer, experts, self.cache.eviction)
        self.transfer.fence(pinned.slots[list(experts)].tolist(), pinned.since)
        self.cache.shut(pinned)

    def _demand(self, absent: list[ExpertKey], waiting: list[Entry], held: list[Entry]) -> None:
        """Submit demand loads for as many absent keys as slots can be had for; the rest stay absent."""
        if not absent:
            return
        if self._closed:
            raise TransferError("the engine was closed")
        batch: list[Entry] = []
        for reservation in self.cache.reserve_for_demand(tuple(absent)):
            batch.append(self.loads.begin(reservation))
            self.cache.pin(batch[-1])
            held.append(batch[-1])
            del absent[0]
            self._unplaced -= 1
            if len(batch) == 1:  # the link need not wait for the others' slots
                self.loads.submit(batch, urgent=True)
        self.loads.submit(batch[1:], urgent=True)
        if batch:
            self.cache.eviction.on_use(batch[0].key.layer, [entry.key.expert for entry in batch])
        waiting += batch

    # ---- the compute thread, outside the lock

    def _arrivals(self, waiting: list[Entry], absent: list[ExpertKey], held: list[Entry]) -> list[Entry]:
        """Those of `waiting` that are READY, after waiting for at least one; taken out of it.

        With nothing of its own under way, it waits for whatever copy holds the slot that is needed next.
        """
        with self.lock:
            self.loads.reap()
            self._demand(absent, waiting, held)
            arrived = [e for e in waiting if e.state is Residency.READY]
            own = [e for e in self.loads.entries if e in waiting] or waiting  # the next, else one that failed
            blocking = next(iter(own or self.loads.entries), None)
            handle = blocking.handle if blocking is not None else None
        if not arrived:
            if blocking is None or handle is None:
                raise AssertionError("every slot is pinned by a batch that was never given back")
            started = self._clock.now()
            try:
                handle.order()
            except SpmoeError:
                with self.lock:
                    self.loads.give_up(blocking)
                if blocking in waiting:
                    raise
            finally:
                now = self._clock.now()
                self.counters.stall_seconds += now - started
                self.timeline.add(Activity.STALL, started, now)
            with self.lock:
                self.loads.reap()
                arrived = [e for e in waiting if e.state is Residency.READY]
        for entry in arrived:
            waiting.remove(entry)
        return arrived

    def _fetch_all(self) -> None:
        """Copy what is wished for, as far as slots can be had, and wait for it."""
        started, full = self._clock.now(), True
        while full:
            full = self.pump() is not None
            with self.lock:
                handles = self.loads.handles
            wait_for(handles)
        now = self._clock.now()
        self.counters.stall_seconds += now - started
        self.timeline.add(Activity.STALL, started, now)

    def _batch(self, layer: int, entries: list[Entry]) -> ExpertBatch:
        if len(self._queue):
            self.see_to_wishes()
        slots = tuple(e.slot for e in entries)
        with self.lock:
            if self._closed:
                raise TransferError("the engine was closed")
            weights = tuple(self._slots.weights(slot) for slot in slots)
        return ExpertBatch(layer, tuple(e.key.expert for e in entries), slots, weights)

    def _release(self, entries: list[Entry], held: list[Entry]) -> None:
        if not entries:
            return
        self.transfer.fence([entry.slot for entry in entries])
        with self.lock:
            for entry in entries:
                held.remove(entry)
                if entry.state is not Residency.ABSENT:
                    self.cache.unpin(entry)
