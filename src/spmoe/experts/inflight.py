"""Loads in flight: copies from their submission until they have ended, successfully or not."""

from __future__ import annotations

from contextlib import suppress

from spmoe.errors import SpmoeError
from spmoe.experts.cache import Entry, ExpertCache
from spmoe.experts.transfer import CopyHandle, CopyJob, Transfer
from spmoe.observe.clock import Clock
from spmoe.observe.ledger import Ledger
from spmoe.observe.timeline import Activity, Timeline
from spmoe.types import ExpertKey, Residency


class InflightLoads:
    """Entries that are LOADING, oldest first. Not thread-safe: its owner holds a lock."""

    def __init__(
        self, transfer: Transfer, cache: ExpertCache, ledger: Ledger, clock: Clock, timeline: Timeline
    ) -> None:
        self.entries: list[Entry] = []
        self.batching = True  # copies that are ready together are submitted in one call
        self._transfer = transfer
        self._cache = cache
        self._ledger = ledger
        self._clock = clock
        self._timeline = Timeline() if transfer.draws_timeline else timeline
        self._submitted: dict[ExpertKey, tuple[Activity, float]] = {}  # while the timeline is on: kind and start

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def handles(self) -> list[CopyHandle]:
        """One handle for each copy in flight."""
        return [entry.handle for entry in self.entries if entry.handle is not None]

    def set_batching(self, batching: bool) -> None:
        """Submit copies that are ready together in one call, or one by one."""
        self.batching = batching
        self._transfer.set_batching(batching)

    def submit(self, entries: list[Entry], *, urgent: bool) -> None:
        """Start the copies of these entries; if the transfer raises an error, mark them failed and raise it."""
        size = len(entries) if self.batching else 1
        for start in range(0, len(entries), max(1, size)):
            part = entries[start : start + size]
            try:
                handles = self._transfer.copy([CopyJob(e.key, e.slot) for e in part], urgent=urgent)
            except SpmoeError:
                for entry in entries[start:]:
                    self._fail(entry)
                raise
            for entry, handle in zip(part, handles, strict=True):
                entry.handle = handle
                self.entries.append(entry)
            if self._timeline.recording:
                begun = (Activity.COPY if urgent else Activity.PREFETCH, self._clock.now())
                self._submitted.update((entry.key, begun) for entry in part)

    def reap(self) -> None:
        """Settle every copy that has ended. Waiters learn of a failure from its handle."""
        if not self.entries:
            return
        self._transfer.pump()
        for entry in list(self.entries):
            if entry.state is Residency.LOADING and entry.handle is not None:
                if not entry.handle.ready():
                    continue
                try:
                    entry.handle.wait()
                except SpmoeError:
                    self._fail(entry)
                else:
                    self._cache.mark_ready(entry)
                    self._draw(entry.key)
            self.entries.remove(entry)  # not before: an interrupt must leave no entry LOADING for good

    def give_up(self, entry: Entry) -> None:
        """Settle a copy that is known to have failed; do nothing if it has been settled."""
        if entry in self.entries:
            self.entries.remove(entry)
            self._fail(entry)

    def _draw(self, key: ExpertKey) -> None:
        if self._submitted and (begun := self._submitted.pop(key, None)) is not None:
            self._timeline.add(*begun, self._clock.now(), f"{key.layer}.{key.expert}")

    def _fail(self, entry: Entry) -> None:
        if entry.prefetched:
            self._ledger.prefetch_failed()
        self._cache.mark_failed(entry)


def wait_for(handles: list[CopyHandle]) -> None:
    """Wait for copies to end. A failure is raised later, if the expert is used."""
    for handle in handles:
        with suppress(SpmoeError):
            handle.wait()
