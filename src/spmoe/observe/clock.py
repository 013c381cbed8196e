"""Time, so that what waits on a copy can be tested in no real time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """Seconds, and how to let them pass."""

    def now(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class RealClock:
    """The machine's own clock."""

    def now(self) -> float:
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        if seconds > 0:
            time.sleep(seconds)


class VirtualClock:
    """A clock that moves only when asked, stopping on the way at every event of what it watches."""

    def __init__(self) -> None:
        self._now = 0.0
        self._watched: list[tuple[Callable[[], float | None], Callable[[], object]]] = []

    def observer(self, next_event: Callable[[], float | None], on_event: Callable[[], object]) -> None:
        """Call `on_event` at each time that `next_event` announces (None: nothing is coming)."""
        self._watched.append((next_event, on_event))

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        end = self._now + max(seconds, 0.0)
        while True:
            coming = [(at, index) for index, (event, _) in enumerate(self._watched) if (at := event()) is not None]
            at, index = min(coming, default=(float("inf"), -1))
            if at > end:
                break
            self._now = max(self._now, at)
            self._watched[index][1]()
        self._now = end
