"""The prefetcher: the queue of wishes, and the worker thread that turns them into copies."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from contextlib import suppress

from spmoe.errors import SpmoeError
from spmoe.experts.transfer import Ticket
from spmoe.observe.ledger import Counters
from spmoe.types import ExpertKey, Wish


class WishQueue:
    """Wishes by deadline, then score. Not thread-safe: its owner holds a lock."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._wishes: dict[ExpertKey, Wish] = {}
        self._heap: list[tuple[int, float, ExpertKey]] = []  # may hold entries that no longer count

    def __len__(self) -> int:
        return len(self._wishes)

    def put(self, wish: Wish) -> None:
        """Add a wish; of two for one expert the higher score counts."""
        known = self._wishes.get(wish.key)
        if known is None or known.score < wish.score:
            self._wishes[wish.key] = wish
            heapq.heappush(self._heap, _rank(wish))

    def first(self) -> Wish | None:
        """The wish whose turn it is; it stays in the queue until discarded."""
        while self._heap:
            wish = self._wishes.get(self._heap[0][2])
            if wish is not None and _rank(wish) == self._heap[0]:
                return wish
            heapq.heappop(self._heap)
        return None

    def discard(self, key: ExpertKey) -> None:
        """Take a wish out, whether granted or not."""
        self._wishes.pop(key, None)

    def drop_passed(self, layer: int) -> None:
        """Forget wishes for layers up to this one: their experts are there, or asked for, by now."""
        while (wish := self.first()) is not None and wish.deadline <= layer:
            self.discard(wish.key)
            self._counters.wishes_stale += 1

    def drop_all(self, *, over_budget: bool = False) -> None:
        """Forget everything."""
        if over_budget:
            self._counters.wishes_over_budget += len(self._wishes)
        else:
            self._counters.wishes_stale += len(self._wishes)
        self._wishes.clear()
        self._heap.clear()


def _rank(wish: Wish) -> tuple[int, float, ExpertKey]:
    return (wish.deadline, -wish.score, wish.key)


class PrefetchWorker:
    """A thread that calls `pump` when a copy has ended and made room for more.

    `pump` submits what it can; it returns a ticket when more could follow once that ticket's copy has ended.
    """

    def __init__(self, pump: Callable[[], Ticket | None]) -> None:
        self._pump = pump
        self._next: Ticket | None = None
        self._work = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="spmoe-prefetch", daemon=True)
        self._thread.start()

    def go_on_after(self, ticket: Ticket) -> None:
        """Wishes are left that have room once this copy has ended."""
        self._next = ticket
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
            ticket, self._next = self._next, None
            while not self._closed and ticket is not None:
                with suppress(SpmoeError):  # told where the expert is used, if it ever is
                    ticket.wait()
                ticket = None if self._closed else self._pump()
            if self._closed:
                return
