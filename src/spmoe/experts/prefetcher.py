"""The prefetcher: the queue of prefetch requests, how they are granted, and the worker thread that sees to it."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable

from spmoe.errors import SpmoeError
from spmoe.experts.cache import Entry, ExpertCache
from spmoe.experts.inflight import InflightLoads
from spmoe.experts.transfer import CopyHandle
from spmoe.observe.ledger import Counters
from spmoe.types import ExpertKey, PrefetchRequest

_CHUNK_BYTES = 16 * 2**20  # small experts share a submission; others wait while one has the lock, not while many do


class PrefetchQueue:
    """Prefetch requests by deadline, then score. Not thread-safe: its owner holds a lock."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._wishes: dict[ExpertKey, PrefetchRequest] = {}
        self._heap: list[tuple[int, float, ExpertKey]] = []  # may hold entries that no longer count

    def __len__(self) -> int:
        return len(self._wishes)

    def put(self, request: PrefetchRequest) -> None:
        """Add a prefetch request; of two for one expert the higher score counts."""
        known = self._wishes.get(request.key)
        if known is None or known.score < request.score:
            self._wishes[request.key] = request
            heapq.heappush(self._heap, _rank(request))

    def first(self) -> PrefetchRequest | None:
        """The prefetch request whose turn it is; it stays in the queue until discarded."""
        while self._heap:
            request = self._wishes.get(self._heap[0][2])
            if request is not None and _rank(request) == self._heap[0]:
                return request
            heapq.heappop(self._heap)
        return None

    def discard(self, key: ExpertKey) -> None:
        """Take a prefetch request out, whether granted or not."""
        self._wishes.pop(key, None)

    def drop_passed(self, layer: int) -> None:
        """Forget prefetch requests for layers up to this one: their experts are there, or asked for, by now."""
        while (request := self.first()) is not None and request.deadline <= layer:
            self.discard(request.key)
            self._counters.prefetches_stale += 1

    def drop_all(self, *, over_budget: bool = False) -> None:
        """Forget everything."""
        if over_budget:
            self._counters.prefetches_over_budget += len(self._wishes)
        else:
            self._counters.prefetches_stale += len(self._wishes)
        self._wishes.clear()
        self._heap.clear()


def _rank(request: PrefetchRequest) -> tuple[int, float, ExpertKey]:
    return (request.deadline, -request.score, request.key)


class PrefetchScheduler:
    """Gives prefetch requests slots and submits them, within a budget per step. Not thread-safe: its owner holds a lock."""

    def __init__(
        self, queue: PrefetchQueue, cache: ExpertCache, loads: InflightLoads, blob_bytes: int, counters: Counters
    ) -> None:
        self.step_budget: int | None = None  # bytes that prefetch requests may move in one step; None: no bound
        self._queue = queue
        self._cache = cache
        self._loads = loads
        self._blob_bytes = blob_bytes
        self._counters = counters
        self._issued = 0  # bytes, in this step

    def begin_step(self) -> None:
        """Prefetch requests of the last step are void."""
        self._queue.drop_all()
        self._issued = 0

    @property
    def depth(self) -> int:
        """Copies outstanding at most, for prefetch requests to be added; one slot is left to demands, which would else wait."""
        return min(self._loads.depth, max(1, self._cache.slot_count - 1))

    def grant(self) -> bool:
        """Submit prefetch requests, as one batch of a chunk's size at most, while the transfer has room; whether there was one."""
        room = self.depth
        batch: list[Entry] = []
        most = max(1, _CHUNK_BYTES // self._blob_bytes)
        while len(batch) < most and (request := self._queue.first()) is not None:
            if len(self._loads) + len(batch) >= room:
                break
            if self._cache.get(request.key) is not None:
                self._counters.prefetches_resident += 1
                self._queue.discard(request.key)
                continue
            if self.step_budget is not None and self._issued + self._blob_bytes > self.step_budget:
                self._queue.drop_all(over_budget=True)
                break
            reservation = self._cache.reserve(request.key)
            if reservation is None:
                break  # every slot is worth more; asked again as the pass proceeds
            self._queue.discard(request.key)
            self._issued += self._blob_bytes
            self._counters.prefetch_loads += 1
            self._counters.issued_bytes += self._blob_bytes
            batch.append(self._loads.begin(reservation))
        self._loads.submit(batch, urgent=False)
        return bool(batch)


class PrefetchWorker:
    """A thread that calls `pump` whenever there may be something to submit.

    `pump` submits what it can; it returns a ticket when more could follow once that ticket's copy has ended.
    """

    def __init__(self, pump: Callable[[], CopyHandle | None]) -> None:
        self._pump = pump
        self._work = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="spmoe-prefetch", daemon=True)
        self._thread.start()

    def poke(self) -> None:
        """Something changed: look again."""
        self._work.set()

    def close(self) -> None:
        """End the thread; returns when it has ended."""
        self._closed = True
        self._work.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._work.wait()
            self._work.clear()
            while not self._closed and (handle := self._pump()) is not None:
                try:
                    handle.wait()
                except SpmoeError:
                    continue  # told where the expert is used, if it ever is
            if self._closed:
                return
