"""Emulated links: a slower one before a real transfer, and one that moves nothing and takes only virtual time."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from spmoe.errors import SpmoeError, TransferError
from spmoe.experts.transfer import CopyJob, Event, HostPaced, Ticket, Transfer
from spmoe.observe.clock import Clock
from spmoe.observe.timeline import Activity, Timeline
from spmoe.types import ExpertKey


class _Passage:
    """One copy's way over an emulated link."""

    def __init__(self, nbytes: int, asked_at: float, order: tuple[bool, int]) -> None:
        self.nbytes = nbytes
        self.asked_at = asked_at
        self.order = order  # (can wait, sequence)
        self.done_at: float | None = None  # None until it has started

    def __lt__(self, other: _Passage) -> bool:
        return self.order < other.order


class Link:
    """An emulated link: one copy at a time, at a fixed rate, urgent ones before those not started."""

    def __init__(self, bytes_per_second: float, clock: Clock) -> None:
        self._rate = bytes_per_second
        self._clock = clock
        self._waiting: list[_Passage] = []
        self._free_at = 0.0
        self._sequence = 0
        self._lock = threading.Lock()

    def enter(self, nbytes: int, urgent: bool) -> _Passage:
        """Queue a copy."""
        with self._lock:
            now = self._clock.now()
            self._advance(now)
            self._sequence += 1
            passage = _Passage(nbytes, now, (not urgent, self._sequence))
            heapq.heappush(self._waiting, passage)
            self._advance(now)
            return passage

    def passed(self, passage: _Passage) -> bool:
        """Whether the copy is over."""
        with self._lock:
            now = self._clock.now()
            self._advance(now)
            return passage.done_at is not None and passage.done_at <= now

    def wait(self, passage: _Passage) -> None:
        """Sleep until the copy is over."""
        while not self.passed(passage):
            until = passage.done_at if passage.done_at is not None else self._free_at
            self._clock.sleep(until - self._clock.now())

    def hurry(self, passage: _Passage) -> None:
        """Move a waiting copy before all that are not urgent."""
        with self._lock:
            self._advance(self._clock.now())
            if passage.done_at is None:
                passage.order = (False, passage.order[1])
                heapq.heapify(self._waiting)

    def next_event(self) -> float | None:
        """When the copy now under way ends."""
        with self._lock:
            now = self._clock.now()
            self._advance(now)
            return self._free_at if self._free_at > now else None

    def _advance(self, now: float) -> None:
        while self._waiting and self._free_at <= now:
            passage = heapq.heappop(self._waiting)
            passage.done_at = max(self._free_at, passage.asked_at) + passage.nbytes / self._rate
            self._free_at = passage.done_at


class _LinkTicket:
    """Ready when both the emulated link and the real copy (if there is one) are done."""

    def __init__(self, link: Link, passage: _Passage, finish: Callable[[], None], inner: Ticket | None = None) -> None:
        self._link = link
        self._passage = passage
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

    def hurry(self) -> None:
        self._link.hurry(self._passage)
        if self._inner is not None:
            self._inner.hurry()


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
        self._link = Link(self._rate, clock)
        self._timeline = timeline or Timeline()

    @property
    def batched(self) -> bool:
        return self._inner.batched

    @batched.setter
    def batched(self, batched: bool) -> None:
        self._inner.batched = batched

    def copy(self, jobs: Sequence[CopyJob], *, urgent: bool) -> list[Ticket]:
        tickets = self._inner.copy(jobs, urgent=urgent)
        return [self._over_link(ticket, job.key, urgent) for ticket, job in zip(tickets, jobs, strict=True)]

    def _over_link(self, ticket: Ticket, key: ExpertKey, urgent: bool) -> Ticket:
        passage = self._link.enter(self._blob_bytes, urgent)
        kind = Activity.COPY if urgent else Activity.PREFETCH

        def note() -> None:
            if passage.done_at is not None:
                started = passage.done_at - self._blob_bytes / self._rate
                self._timeline.add(kind, started, passage.done_at, f"{key.layer}.{key.expert}")

        return _LinkTicket(self._link, passage, note, ticket)

    def keep_full(self) -> None:
        self._inner.keep_full()

    def sit_out(self, event: Event) -> None:
        self._inner.sit_out(event)

    def attend(self) -> None:
        self._inner.attend()

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
        self.link = Link(bytes_per_second, clock)
        self.submissions: list[tuple[CopyJob, ...]] = []
        self.closed = False
        self._blob_bytes = blob_bytes
        self._on_start = on_start
        self._on_done = on_done

    def copy(self, jobs: Sequence[CopyJob], *, urgent: bool) -> list[Ticket]:
        if self.closed:
            raise TransferError("the engine is closed")
        self.submissions.append(tuple(jobs))
        tickets: list[Ticket] = []
        for job in jobs:
            self._on_start(job)
            passage = self.link.enter(self._blob_bytes, urgent)
            tickets.append(_LinkTicket(self.link, passage, lambda job=job: self._on_done(job)))  # type: ignore[misc]
        return tickets

    def close(self) -> None:
        self.closed = True
