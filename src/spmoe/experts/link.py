"""Emulated links: a slower link in front of a real transfer, and a transfer that only takes virtual time."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from spmoe.errors import SpmoeError, TransferError
from spmoe.experts.transfer import CopyHandle, CopyJob, DeviceEvent, HostCompute, Transfer
from spmoe.observe.clock import Clock
from spmoe.observe.timeline import Activity, Timeline
from spmoe.types import ExpertKey


class _LinkCopy:
    """One copy over an emulated link."""

    def __init__(self, nbytes: int, requested_at: float, order: tuple[bool, int]) -> None:
        self.nbytes = nbytes
        self.requested_at = requested_at
        self.order = order  # (not urgent, sequence number)
        self.done_at: float | None = None  # None until it has started

    def __lt__(self, other: _LinkCopy) -> bool:
        return self.order < other.order


class EmulatedLink:
    """Moves one copy at a time, at a fixed rate; urgent copies go before others that have not started."""

    def __init__(self, bytes_per_second: float, clock: Clock) -> None:
        self._rate = bytes_per_second
        self._clock = clock
        self._waiting: list[_LinkCopy] = []
        self._free_at = 0.0
        self._sequence = 0
        self._lock = threading.Lock()

    def enter(self, nbytes: int, urgent: bool) -> _LinkCopy:
        """Queue a copy."""
        with self._lock:
            now = self._clock.now()
            self._advance(now)
            self._sequence += 1
            copy = _LinkCopy(nbytes, now, (not urgent, self._sequence))
            heapq.heappush(self._waiting, copy)
            self._advance(now)
            return copy

    def done(self, copy: _LinkCopy) -> bool:
        """Return whether the copy has ended."""
        with self._lock:
            now = self._clock.now()
            self._advance(now)
            return copy.done_at is not None and copy.done_at <= now

    def wait(self, copy: _LinkCopy) -> None:
        """Sleep until the copy has ended."""
        while not self.done(copy):
            until = copy.done_at if copy.done_at is not None else self._free_at
            self._clock.sleep(until - self._clock.now())

    def prioritize(self, copy: _LinkCopy) -> None:
        """Make a waiting copy urgent."""
        with self._lock:
            self._advance(self._clock.now())
            if copy.done_at is None:
                copy.order = (False, copy.order[1])
                heapq.heapify(self._waiting)

    def busy_bytes(self) -> int:
        """Return the bytes that are left of the copy that runs now."""
        with self._lock:
            now = self._clock.now()
            self._advance(now)
            return round(max(0.0, self._free_at - now) * self._rate)

    def next_event(self) -> float | None:
        """Return when the copy that runs now ends; None if the link is idle."""
        with self._lock:
            now = self._clock.now()
            self._advance(now)
            return self._free_at if self._free_at > now else None

    def _advance(self, now: float) -> None:
        while self._waiting and self._free_at <= now:
            copy = heapq.heappop(self._waiting)
            copy.done_at = max(self._free_at, copy.requested_at) + copy.nbytes / self._rate
            self._free_at = copy.done_at


class _LinkHandle:
    """Handle that is ready when the emulated link and the real copy, if there is one, are done."""

    def __init__(
        self, link: EmulatedLink, copy: _LinkCopy, finish: Callable[[], None], inner: CopyHandle | None = None
    ) -> None:
        self._link = link
        self._copy = copy
        self._finish = finish
        self._inner = inner
        self._lock = threading.Lock()
        self._outcome: Future[None] = Future()

    def ready(self) -> bool:
        return self._link.done(self._copy) and (self._inner is None or self._inner.ready())

    def wait(self) -> None:
        self._link.wait(self._copy)
        if self._inner is not None:
            self._inner.wait()
        with self._lock:
            if not self._outcome.done():
                try:
                    self._outcome.set_result(self._finish())
                except SpmoeError as error:
                    self._outcome.set_exception(error)
        self._outcome.result()

    def stream_wait(self) -> None:
        self.wait()
        if self._inner is not None:
            self._inner.stream_wait()

    def prioritize(self) -> None:
        self._link.prioritize(self._copy)
        if self._inner is not None:
            self._inner.prioritize()


class ThrottledTransfer:
    """Another transfer behind an emulated, slower link."""

    depth = 2  # one copy on the link and one behind it, so that the link is never idle between two
    draws_timeline = True

    def __init__(
        self,
        inner: Transfer,
        blob_bytes: int,
        gigabytes_per_second: float,
        clock: Clock,
        timeline: Timeline | None = None,
    ) -> None:
        self._inner = inner
        self._blob_bytes = blob_bytes
        self._rate = gigabytes_per_second * 1e9
        self._link = EmulatedLink(self._rate, clock)
        self._timeline = timeline or Timeline()

    def copy(self, jobs: Sequence[CopyJob], *, urgent: bool) -> list[CopyHandle]:
        handles = self._inner.copy(jobs, urgent=urgent)
        return [self._over_link(handle, job.key, urgent) for handle, job in zip(handles, jobs, strict=True)]

    def _over_link(self, handle: CopyHandle, key: ExpertKey, urgent: bool) -> CopyHandle:
        copy = self._link.enter(self._blob_bytes, urgent)
        kind = Activity.COPY if urgent else Activity.PREFETCH

        def draw() -> None:
            if copy.done_at is not None:
                started = copy.done_at - self._blob_bytes / self._rate
                self._timeline.add(kind, started, copy.done_at, f"{key.layer}.{key.expert}")

        return _LinkHandle(self._link, copy, draw, handle)

    def set_batching(self, batching: bool) -> None:
        self._inner.set_batching(batching)

    def pump(self) -> None:
        self._inner.pump()

    def wait_and_pump(self, event: DeviceEvent) -> None:
        self._inner.wait_and_pump(event)

    def bind_compute_stream(self) -> None:
        self._inner.bind_compute_stream()

    def begin_epoch(self) -> int:
        return self._inner.begin_epoch()

    def finish_epochs(self, epoch: int) -> None:
        self._inner.finish_epochs(epoch)

    def protect_slots(self, slots: Iterable[int], epoch: int | None = None) -> None:
        self._inner.protect_slots(slots, epoch)

    def take_stall_seconds(self) -> float:
        return self._inner.take_stall_seconds()

    def queued_bytes(self) -> int:
        return self._link.busy_bytes()

    def take_copy_times(self) -> list[tuple[int, float]]:
        """Return the time of one copy: it is always the same."""
        return [(self._blob_bytes, self._blob_bytes / self._rate)]

    def drain(self) -> None:
        self._inner.drain()

    def close(self) -> None:
        self._inner.close()


class VirtualTransfer(HostCompute):
    """Transfer for tests and replays: moves nothing, takes time on a virtual clock and calls back at start and end.

    `on_done` may raise a TransferError to simulate a copy that fails.
    """

    def __init__(
        self,
        clock: Clock,
        blob_bytes: int,
        bytes_per_second: float,
        depth: int = 2,
        on_start: Callable[[CopyJob], None] = lambda job: None,
        on_done: Callable[[CopyJob], None] = lambda job: None,
    ) -> None:
        self.depth = depth
        self.link = EmulatedLink(bytes_per_second, clock)
        self.submissions: list[tuple[CopyJob, ...]] = []
        self.closed = False
        self._blob_bytes = blob_bytes
        self._seconds = blob_bytes / bytes_per_second  # of one copy
        self._on_start = on_start
        self._on_done = on_done

    def copy(self, jobs: Sequence[CopyJob], *, urgent: bool) -> list[CopyHandle]:
        if self.closed:
            raise TransferError("the engine is closed")
        self.submissions.append(tuple(jobs))
        handles: list[CopyHandle] = []
        for job in jobs:
            self._on_start(job)
            copy = self.link.enter(self._blob_bytes, urgent)
            handles.append(_LinkHandle(self.link, copy, lambda job=job: self._on_done(job)))  # type: ignore[misc]
        return handles

    def queued_bytes(self) -> int:
        return self.link.busy_bytes()

    def take_copy_times(self) -> list[tuple[int, float]]:
        """Return the time of one copy: it is always the same."""
        return [(self._blob_bytes, self._seconds)]

    def drain(self) -> None:
        """Do nothing: no bytes move."""

    def close(self) -> None:
        self.closed = True
