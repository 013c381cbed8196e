"""Prefetch scheduling: the queue of prefetch requests, their budget, and their submission.

Requests are queued by deadline, then score. They are submitted a chunk at a time, until enough copies are in flight to
keep the transfer busy. On a CPU, and with an emulated link, a worker thread submits them. With a CUDA device the thread
that launches kernels submits them whenever it would otherwise wait: two threads would compete for the interpreter.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress

import numpy as np

from spmoe.errors import SpmoeError, TransferError, reason
from spmoe.experts.cache import Entry
from spmoe.experts.inflight import wait_for
from spmoe.experts.pool import ExpertPool
from spmoe.experts.transfer import CHUNK_BYTES, CopyHandle, DeviceEvent
from spmoe.experts.workers import Workers
from spmoe.observe.clock import Clock
from spmoe.observe.ledger import Ledger
from spmoe.observe.timeline import Activity, Timeline
from spmoe.types import Admission, ExpertKey, PrefetchRequest, PrefetchRequests, Residency

_LOCK_SECONDS = 5e-5  # between two chunks: another thread takes the lock if it waits for it


class PrefetchQueue:
    """Prefetch requests by deadline, then score. Not thread-safe: its owner holds a lock."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._requests: dict[ExpertKey, PrefetchRequest] = {}
        self._heap: list[tuple[int, float, ExpertKey]] = []  # may hold entries of requests that were replaced

    def __len__(self) -> int:
        return len(self._requests)

    def put(self, request: PrefetchRequest) -> None:
        """Add a request; of two for one expert the higher score counts."""
        known = self._requests.get(request.key)
        if known is None or known.score < request.score:
            self._requests[request.key] = request
            heapq.heappush(self._heap, _rank(request))

    def first(self) -> PrefetchRequest | None:
        """Return the next request; it stays in the queue until discarded."""
        while self._heap:
            request = self._requests.get(self._heap[0][2])
            if request is not None and _rank(request) == self._heap[0]:
                return request
            heapq.heappop(self._heap)
        return None

    def discard(self, key: ExpertKey) -> None:
        """Remove an expert's request."""
        self._requests.pop(key, None)

    def drop_passed(self, layer: int) -> None:
        """Drop requests whose deadline is this layer or an earlier one."""
        while (request := self.first()) is not None and request.deadline <= layer:
            self.discard(request.key)
            self._ledger.stale(1)

    def drop_all(self, *, over_budget: bool = False) -> None:
        """Drop all requests."""
        count = self._ledger.over_budget if over_budget else self._ledger.stale
        count(len(self._requests))
        self._requests.clear()
        self._heap.clear()


def _rank(request: PrefetchRequest) -> tuple[int, float, ExpertKey]:
    return (request.deadline, -request.score, request.key)


class PrefetchScheduler:
    """Decides which prefetch requests are submitted, and when. Thread-safe."""

    def __init__(
        self, pool: ExpertPool, lock: threading.RLock, ledger: Ledger, clock: Clock, timeline: Timeline, threaded: bool
    ) -> None:
        self.step_budget: int | None = None  # bytes that may be prefetched in one step; None: no bound
        self.overlap = True  # False, for measuring: compute waits for every prefetch
        self._pool = pool
        self._lock = lock
        self._ledger = ledger
        self._clock = clock
        self._timeline = timeline
        self._queue = PrefetchQueue(ledger)
        self._issued_bytes = 0  # in this step
        self._layer = -1  # the target's layer that runs; -1 during the draft
        self._held = False
        self._worker = PrefetchWorker(self.pump) if threaded else None

    def __len__(self) -> int:
        """Return the number of queued requests."""
        return len(self._queue)

    def begin_step(self) -> None:
        """Drop the requests of the last step. Raise the error that has ended the worker, if there is one."""
        if self._worker is not None:
            self._worker.check()
        with self._lock:
            self._queue.drop_all()
            self._issued_bytes = 0
            self._layer = -1

    def reach_layer(self, layer: int) -> None:
        """Drop requests for layers up to this one, which runs now: their experts are loaded on demand."""
        if self._worker is not None:
            self._worker.check()
        with self._lock:
            self._layer = layer
            self._queue.drop_passed(layer)

    def end_step(self) -> None:
        """Drop all requests."""
        with self._lock:
            self._queue.drop_all()

    def request(self, requests: PrefetchRequests, admission: Admission | None = None) -> None:
        """Queue prefetch requests, those that are admitted, and start to submit them."""
        if not len(requests):
            return
        count, started = len(requests), self._clock.now() if self._timeline.recording else None
        with self._lock:
            if self._pool.closed:
                return
            self._ledger.requested(count)
            if not (timely := requests.deadlines > self._layer).all():
                self._ledger.stale(int(np.count_nonzero(~timely)))
                requests = requests.where(timely)
            resident = self._pool.note_prefetches(requests)
            self._ledger.resident(int(np.count_nonzero(resident)))
            absent = requests.fetch & ~resident
            admitted = requests.where(absent) if admission is None else admission.admit(requests, absent, self._layer)
            for request in admitted:
                self._queue.put(request)
            drafting = self._layer < 0
        if started is not None:
            self._timeline.add(Activity.REQUEST, started, self._clock.now(), f"{count}")
        if not len(self._queue):
            return
        if not self.overlap and not drafting:
            self._fetch_all()
        elif not self._held:
            self.submit()

    def finish_draft(self) -> None:
        """Without overlap, copy the experts that the draft predicted, before verification starts."""
        if not self.overlap:
            self._fetch_all()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Queue requests inside without submitting them. Has no effect with a worker thread."""
        before, self._held = self._held, self._worker is None
        try:
            yield
        finally:
            self._held = before

    @property
    def has_work(self) -> bool:
        """Whether requests are queued, or copies in flight."""
        return len(self._queue) > 0 or self._pool.loads_in_flight > 0

    def submit(self, until: DeviceEvent | None = None) -> None:
        """Wake the worker to submit requests; without a worker, submit them here until the event has passed."""
        if not self.overlap:
            return  # `request` waits for its own copies
        if self._worker is not None:
            self._worker.wake()
        else:
            self.pump(until)

    def pump(self, until: DeviceEvent | None = None) -> CopyHandle | None:
        """Submit requests until the event has passed; return the handle to wait for if the transfer is full."""
        if not len(self._queue) and not self._pool.loads_in_flight:
            return None
        submitted = True
        while submitted:
            with self._lock:
                self._pool.reap()
                if self._pool.closed or not len(self._queue) or self._pool.has_unplaced_demand:
                    return None
                try:
                    submitted = self._submit_chunk(until)
                except SpmoeError:
                    return None  # counted as failed; the error is raised where the expert is used
            if self._worker is not None:
                time.sleep(_LOCK_SECONDS)
            submitted = submitted and (until is None or not until.query())
        with self._lock:  # the oldest copy may be settled by another thread
            full = self._pool.loads_in_flight >= self._pool.prefetch_depth
            return self._pool.oldest_handle() if full and len(self._queue) else None

    def reset(self) -> None:
        """Drop all requests, whatever an error has left of them, and replace the worker."""
        with self._lock:
            self._queue = PrefetchQueue(self._ledger)
            self._issued_bytes = 0
            self._layer = -1
            self._held = False
        if self._worker is not None:
            self._worker.close()
            self._worker = PrefetchWorker(self.pump)

    def close(self) -> None:
        """Drop all requests and end the worker. Idempotent."""
        self.end_step()
        if self._worker is not None:
            self._worker.close()

    def _submit_chunk(self, until: DeviceEvent | None) -> bool:
        """Reserve slots for a chunk of requests and submit their copies together; return whether there was one.

        The chunk is smaller if the event passes meanwhile.
        """
        entries: list[Entry] = []
        depth, blob_bytes = self._pool.prefetch_depth, self._pool.blob_bytes
        limit = max(1, CHUNK_BYTES // blob_bytes)
        while len(entries) < limit and (request := self._queue.first()) is not None:
            if self._pool.loads_in_flight + len(entries) >= depth:
                break
            if entries and until is not None and until.query():
                break
            if self._pool.residency(request.key) is not Residency.ABSENT:
                self._ledger.resident(1)
                self._queue.discard(request.key)
                continue
            if self.step_budget is not None and self._issued_bytes + blob_bytes > self.step_budget:
                self._queue.drop_all(over_budget=True)
                break
            if (entry := self._pool.reserve(request.key, request.worth)) is None:
                break  # every resident scores higher; tried again as layers run
            self._queue.discard(request.key)
            self._issued_bytes += blob_bytes
            self._ledger.prefetch_issued()
            entries.append(entry)
        self._pool.submit(entries)
        return bool(entries)

    def _fetch_all(self) -> None:
        """Copy everything requested, as far as slots can be taken, and wait for it."""
        started, full = self._clock.now(), True
        while full:
            full = self.pump() is not None
            wait_for(self._pool.handles())
        now = self._clock.now()
        self._ledger.stalled(now - started)
        self._timeline.add(Activity.STALL, started, now)


class PrefetchWorker:
    """Thread that calls `pump` whenever it is woken, and again as long as `pump` returns a handle to wait for."""

    def __init__(self, pump: Callable[[], CopyHandle | None]) -> None:
        self._pump = pump
        self._thread = Workers(1, "spmoe-prefetch")
        self._woken = False  # a call is queued that has not begun
        self._closed = False
        self._error: BaseException | None = None

    def wake(self) -> None:
        """Have the thread call `pump`."""
        if not self._woken and not self._closed:
            self._woken = True
            with suppress(TransferError):  # another thread has closed it meanwhile
                self._thread.submit(self._run).add_done_callback(self._keep_error)

    def check(self) -> None:
        """Raise an error if a call has failed: the bookkeeping of experts may be inconsistent."""
        if self._error is not None:
            raise RuntimeError(f"prefetching failed ({reason(self._error)})") from self._error

    def close(self) -> None:
        """End the thread; return when it has ended."""
        self._closed = True
        self._thread.close()

    def _run(self) -> None:
        self._woken = False
        while not self._closed and (handle := self._pump()) is not None:
            with suppress(SpmoeError):  # raised where the expert is used
                handle.wait()

    def _keep_error(self, call: Future[None]) -> None:
        if not call.cancelled():
            self._error = self._error or call.exception()
