"""Emulated links: a slower one before a real transfer, and one that moves nothing and takes only virtual time."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from spmoe.errors import SpmoeError, TransferError
from spmoe.experts.transfer import CopyHandle, CopyJob, Event, HostPaced, Transfer
from spmoe.observe.clock import Clock
from spmoe.observe.timeline import Activity, Timeline
from spmoe.types import ExpertKey


class _LinkCopy:
    """One copy's way over an emulated link."""

    def __init__(self, nbytes: int, asked_at: float, order: tuple[bool, int]) -> None:
        self.nbytes = nbytes
        self.asked_at = asked_at
        self.order = order  # (can wait, sequence)
        self.done_at: float | None = None  # None until it has started

    def __lt__(self, other: _LinkCopy) -> bool:
        return self.order < other.order


class EmulatedLink:
    """An emulated link: one copy at a time, at a fixed rate, urgent ones before those not started."""

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
            link_copy = _LinkCopy(nbytes, now, (not urgent, self._sequence))
            heapq.heappush(self._waiting, link_copy)
            self._advance(now)
            return link_copy

    def passed(self, link_copy: _LinkCopy) -> bool:
        """Whether the copy is over."""
        with self._lock:
            now = self._clock.now()
            self._advance(now)
            return link_copy.done_at is not None and link_copy.done_at <= now

    def wait(self, link_copy: _LinkCopy) -> None:
        """Sleep until the copy is over."""
        while not self.passed(link_copy):
            until = link_copy.done_at if link_copy.done_at is not None else self._free_at
            self._clock.sleep(until - self._clock.now())

    def prioritize(self, link_copy: _LinkCopy) -> None:
        """Move a waiting copy before all that are not urgent."""
        with self._lock:
            self._advance(self._clock.now())
            if link_copy.done_at is None:
                link_copy.order = (False, link_copy.order[1])
                heapq.heapify(self._waiting)

    def next_event(self) -> float | None:
        """When the copy now under way ends."""
        with self._lock:
            now = self._clock.now()
            self._advance(now)
            return self._free_at if self._free_at > now else None

    def _advance(self, now: float) -> None:
        while self._waiting and self._free_at <= now:
            link_copy = heapq.heappop(self._waiting)
            link_copy.done_at = max(self._free_at, link_copy.asked_at) + link_copy.nbytes / self._rate
            self._free_at = link_copy.done_at


class _LinkHandle:
    """Ready when both the emulated link and the real copy (if there is one) are done."""

    def __init__(
        self, link: EmulatedLink, link_copy: _LinkCopy, finish: Callable[[], None], inner: CopyHandle | None = None
    ) -> None:
        self._link = link
        self._passage = link_copy
        self._finish = finish
        self._inner = inner
        self._lock = threading.Lock()
        self._outcome: Future[None] = Future()

    def ready(self) -> bool:
        return self._link.passed(self._passage) and (self._inner is None or self._inner.ready())

    def wait(self) -> None:
        self._link.wait(self._passage)
        if self._inner is not None:
            self._inner.wait()
        with self._lock:
            if not self._outcome.done():
                try:
                    self._outcome.set_result(self._finish())
                except SpmoeError as error:
                    self._outcome.set_exception(error)
        self._outcome.result()

    def order(self) -> None:
        self.wait()
        if self._inner is not None:
            self._inner.order()

    def prioritize(self) -> None:
        self._link.prioritize(self._passage)
        if self._inner is not None:
            self._inner.prioritize()


class ThrottledTransfer:
    """Another transfer behind an emulated, slower link."""

    depth = 2  # one on the link and one behind it, so that the link never idles between two

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

    @property
    def batched(self) -> bool:
        return self._inner.batched

    @batched.setter
    def batched(self, batched: bool) -> None:
        self._inner.batched = batched

    def copy(self, jobs: Sequence[CopyJob], *, urgent: bool) -> list[CopyHandle]:
        handles = self._inner.copy(jobs, urgent=urgent)
        return [self._over_link(handle, job.key, urgent) for handle, job in zip(handles, jobs, strict=True)]

    def _over_link(self, handle: CopyHandle, key: ExpertKey, urgent: bool) -> CopyHandle:
        link_copy = self._link.enter(self._blob_bytes, urgent)
        kind = Activity.COPY if urgent else Activity.PREFETCH

        def note() -> None:
            if link_copy.done_at is not None:
                started = link_copy.done_at - self._blob_bytes / self._rate
                self._timeline.add(kind, started, link_copy.done_at, f"{key.layer}.{key.expert}")

        return _LinkHandle(self._link, link_copy, note, handle)

    def keep_full(self) -> None:
        self._inner.keep_full()

    def wait_and_pump(self, event: Event) -> None:
        self._inner.wait_and_pump(event)

    def bind_compute_stream(self) -> None:
        self._inner.bind_compute_stream()

    def mark(self) -> int:
        return self._inner.mark()

    def passed(self, mark: int) -> None:
        self._inner.passed(mark)

    def fence(self, slots: Iterable[int], mark: int | None = None) -> None:
        self._inner.fence(slots, mark)

    def stalled_seconds(self) -> float:
        return self._inner.stalled_seconds()

    def close(self) -> None:
        self._inner.close()


class VirtualTransfer(HostPaced):
    """A double for tests and replays: takes time on a virtual clock, and does what it is told at start and end.

    `on_done` may raise a TransferError: that is how a failing copy is played. With no callbacks it moves nothing.
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
        self._on_start = on_start
        self._on_done = on_done

    def copy(self, jobs: Sequence[CopyJob], *, urgent: bool) -> list[CopyHandle]:
        if self.closed:
            raise TransferError("the engine is closed")
        self.submissions.append(tuple(jobs))
        handles: list[CopyHandle] = []
        for job in jobs:
            self._on_start(job)
            link_copy = self.link.enter(self._blob_bytes, urgent)
            handles.append(_LinkHandle(self.link, link_copy, lambda job=job: self._on_done(job)))  # type: ignore[misc]
        return handles

    def close(self) -> None:
        self.closed = True
