"""Clocks: real time, and a virtual clock that lets tests and replays wait for copies in no real time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """Tell the time in seconds, and wait."""

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class RealClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        if seconds > 0:
            time.sleep(seconds)


class VirtualClock:
    """A clock that moves only in `sleep`, and stops on the way at every event of its event sources."""

    def __init__(self) -> None:
        self._now = 0.0
        self._sources: list[tuple[Callable[[], float | None], Callable[[], object]]] = []

    def add_event_source(self, next_event: Callable[[], float | None], on_event: Callable[[], object]) -> None:
        """Call `on_event` at each time that `next_event` returns (None: no event is scheduled)."""
        self._sources.append((next_event, on_event))

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self.sleep_until(self._now + seconds)

    def sleep_until(self, end: float) -> None:
        """Move the clock to `end`, in seconds, exactly; a time in the past only runs events that are due."""
        end = max(end, self._now)
        while True:
            first, callback = end, None
            for next_event, on_event in self._sources:
                at = next_event()
                if at is not None and (at < first or (at == first and callback is None)):
                    first, callback = at, on_event
            if callback is None:
                break
            self._now = max(self._now, first)
            callback()
        self._now = end
