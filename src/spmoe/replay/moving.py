"""The link of a replay: one copy moves at a time, demands before prefetch requests, and prefetch requests pause or are cut for them."""

from __future__ import annotations

from dataclasses import dataclass

NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Machine:
    """What a replay takes place on. Times are seconds."""

    slots: int
    seconds_per_expert: float  # over the link
    depth: int = 2  # copies outstanding, at most, for prefetch requests
    chunk_seconds: float | None = None  # pieces in which prefetch requests move; None: whole
    window: int = 2  # such pieces that a demand waits for
    demands_first: bool = False  # a layer's demands are submitted before what it foretells of later ones


class EmulatedLink:
    """What moves and what waits to. Who derives from it says what becomes of a copy that has ended."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._seconds = machine.seconds_per_expert
        self.now = 0.0
        self._loading: list[int] = []  # in order of submission
        self._urgent: list[tuple[int, int, float]] = []  # (number, key, seconds left)
        self._calm: list[tuple[int, int, float]] = []
        self._number = self._flight_number = 0
        self._flight = -1  # the expert that moves
        self._flight_calm = False
        self._flight_start = 0.0
        self._flight_end = NEVER
        self._left = 0.0  # of it, when it is cut at the end of a chunk
        self._run_start = 0.0  # since when only prefetch requests have moved, without a gap
        self._committed = 0.0  # until when chunks of prefetch requests are on the stream, whatever comes

    def _prioritize(self, key: int) -> None:
        """Somebody waits for this copy now."""
        if self._flight == key:
            self._flight_calm = False
            return
        for place, copy in enumerate(self._calm):
            if copy[1] == key:
                del self._calm[place]
                self._urgent.append(copy)
                self._urgent.sort()
                self._cut_short()
                return

    def _cut_short(self) -> None:
        """Let what is urgent begin when the chunks of prefetch requests that are on the stream have moved."""
        chunk = self.machine.chunk_seconds
        if chunk is None or not self._flight_calm:
            return
        if self._committed <= self.now:
            done = int((self.now - self._run_start) / chunk + 1e-9)
            self._committed = self._run_start + (done + self.machine.window) * chunk
        if self._committed < self._flight_end:
            self._left += self._flight_end - self._committed
            self._flight_end = self._committed

    def _start_next(self) -> None:
        now = self.now
        if self._urgent and not (self._calm and now < self._committed):
            number, key, seconds = self._urgent.pop(0)
            self._flight_calm = False
        elif self._calm:
            number, key, seconds = self._calm.pop(0)
            if not self._flight_calm or self._flight_end < now:
                self._run_start = now
            self._flight_calm = True
        else:
            self._flight, self._flight_end, self._flight_calm = -1, NEVER, False
            return
        self._flight, self._flight_number, self._flight_start = key, number, now
        self._flight_end = now + seconds
        self._left = 0.0
        if self._flight_calm and self._urgent and self._committed < self._flight_end:
            self._left, self._flight_end = self._flight_end - self._committed, self._committed
