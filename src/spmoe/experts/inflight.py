"""Loads: what is there, coming or absent when it is asked for, and copies until they have ended, well or badly."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress

import numpy as np

from spmoe.errors import SpmoeError
from spmoe.experts.cache import Entry, ExpertCache, Reservation
from spmoe.experts.eviction import Eviction
from spmoe.experts.link import ThrottledTransfer
from spmoe.experts.transfer import CopyHandle, CopyJob, Transfer
from spmoe.observe.clock import Clock
from spmoe.observe.ledger import Counters
from spmoe.observe.timeline import Activity, Timeline
from spmoe.types import ExpertKey, Residency


class InflightLoads:
    """Entries that are LOADING, oldest first. Not thread-safe: its owner holds a lock."""

    def __init__(
        self,
        transfer: Transfer,
        cache: ExpertCache,
        blob_bytes: int,
        counters: Counters,
        clock: Clock,
        timeline: Timeline,
    ) -> None:
        self.entries: list[Entry] = []
        self._batching = True
        self._transfer = transfer
        self._cache = cache
        self._blob_bytes = blob_bytes
        self._counters = counters
        self._clock = clock
        # an emulated link notes its copies itself, and knows better
        self._timeline = Timeline() if isinstance(transfer, ThrottledTransfer) else timeline
        self._asked: dict[ExpertKey, tuple[Activity, float]] = {}  # while the timeline records: since when, what for

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def depth(self) -> int:
        """How many copies keep the transfer busy."""
        return self._transfer.depth

    @property
    def batching(self) -> bool:
        """Whether copies that are ready to go together are submitted together."""
        return self._batching

    @batching.setter
    def batching(self, batching: bool) -> None:
        self._batching = self._transfer.batched = batching

    @property
    def handles(self) -> list[CopyHandle]:
        """One for each copy under way."""
        return [entry.handle for entry in self.entries if entry.handle is not None]

    def claim(self, keys: list[ExpertKey], eviction: Eviction) -> tuple[list[Entry], list[Entry], list[ExpertKey]]:
        """Pin what has a slot; book every key, which are of one layer, as hit, late or demanded."""
        ready: list[Entry] = []
        waiting: list[Entry] = []
        absent: list[ExpertKey] = []
        there: list[int] = []
        for key in keys:
            entry = self._cache.get(key)
            if entry is None:
                absent.append(key)
                continue
            there.append(key.expert)
            self._cache.pin(entry)
            if entry.state is Residency.READY:
                ready.append(entry)
            else:
                waiting.append(entry)
                if entry.handle is not None:
                    entry.handle.prioritize()
            if entry.prefetched:
                self._book_need(entry)
        if there:
            eviction.on_use(keys[0].layer, there)
        self._counters.hits += len(ready)
        self._counters.late += len(waiting)
        self._counters.demand_loads += len(absent)
        self._counters.demand_bytes += len(absent) * self._blob_bytes
        return ready, waiting, absent

    def book_hits(self, layer: int, experts: Sequence[int], eviction: Eviction) -> None:
        """These were READY when they were needed."""
        self._counters.hits += len(experts)
        if experts:
            eviction.on_use(layer, experts)
        for expert in np.flatnonzero(self._cache.prefetched[layer]).tolist():
            if expert in experts and (entry := self._cache.get(ExpertKey(layer, expert))) is not None:
                self._book_need(entry)

    def _book_need(self, entry: Entry) -> None:
        self._cache.needed(entry)
        self._counters.prefetch_used += 1
        self._counters.used_bytes += self._blob_bytes
        self._counters.late_bytes += self._blob_bytes if entry.state is Residency.LOADING else 0

    def begin(self, reservation: Reservation) -> Entry:
        """The entry of a slot that was had; what had to leave it may have been fetched in vain."""
        if reservation.evicted is not None and reservation.evicted.prefetched:
            self._counters.wasted_bytes += self._blob_bytes
        return reservation.entry

    def submit(self, batch: list[Entry], *, urgent: bool) -> None:
        """Have these copied; where that is refused, they have failed."""
        size = len(batch) if self.batching else 1
        for start in range(0, len(batch), max(1, size)):
            part = batch[start : start + size]
            try:
                handles = self._transfer.copy([CopyJob(e.key, e.slot) for e in part], urgent=urgent)
            except SpmoeError:
                for entry in batch[start:]:
                    self._failed(entry)
                raise
            except BaseException:  # an interrupt: some may be under way, and nobody has a ticket
                for entry in batch[start:]:
                    self._failed(entry)
                    self._cache.retire(entry.slot)
                raise
            for entry, handle in zip(part, handles, strict=True):
                entry.handle = handle
                self.entries.append(entry)
            if self._timeline.recording:
                asked = (Activity.COPY if urgent else Activity.PREFETCH, self._clock.now())
                self._asked.update((entry.key, asked) for entry in part)

    def exchange(self, eviction: Eviction, keys: Collection[ExpertKey]) -> None:
        """Have just these in slots, as `ExpertCache.exchange` does, and begin to copy what lacks."""
        for entry in self._cache.entries():
            if entry.prefetched:
                self._counters.wasted_bytes += self._blob_bytes
                self._cache.needed(entry)  # by nobody any more
        self.submit(self._cache.exchange(eviction, keys), urgent=True)

    def reap(self) -> None:
        """Settle every copy that has ended; who waits for one that failed learns it from the ticket."""
        if not self.entries:
            return
        self._transfer.keep_full()
        for entry in list(self.entries):
            if entry.state is Residency.LOADING and entry.handle is not None:
                if not entry.handle.ready():
                    continue
                try:
                    entry.handle.wait()
                except SpmoeError:
                    self._failed(entry)
                else:
                    self._cache.loaded(entry)
                    self._note(entry.key)
            self.entries.remove(entry)  # not before: an interrupt must leave none that is LOADING for good

    def give_up(self, entry: Entry) -> None:
        """A copy is known to have failed; nothing happens where that has been settled."""
        if entry in self.entries:
            self.entries.remove(entry)
            self._failed(entry)

    def _note(self, key: ExpertKey) -> None:
        if self._asked and (asked := self._asked.pop(key, None)) is not None:
            self._timeline.add(*asked, self._clock.now(), f"{key.layer}.{key.expert}")

    def _failed(self, entry: Entry) -> None:
        if entry.prefetched:
            self._counters.failed_bytes += self._blob_bytes
        self._cache.failed(entry)


def wait_for(handles: list[CopyHandle]) -> None:
    """Wait for copies to end, however they do: a failure is told where the expert is used, if it ever is."""
    for handle in handles:
        with suppress(SpmoeError):
            handle.wait()
