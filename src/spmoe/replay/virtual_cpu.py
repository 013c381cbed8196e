"""The CPU path on the virtual clock: experts take time, and nothing is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from spmoe.experts.cpu_path import ComputedRows, CpuJob, CpuWork
from spmoe.observe.clock import VirtualClock

FREE_ROWS = 4  # that take the time of one: reading the weights takes longer than computing with them


class VirtualCpu:
    """A CPU that computes one expert after the other; implements `CpuWorker`."""

    def __init__(self, clock: VirtualClock, seconds_per_expert: float) -> None:
        self._clock = clock
        self._seconds = seconds_per_expert  # of few rows, beside a link that is busy
        self._free_at = 0.0

    def submit(self, work: CpuWork, rows: int) -> CpuJob:
        seconds = self._seconds * max(1.0, rows / FREE_ROWS)
        self._free_at = max(self._free_at, self._clock.now()) + seconds
        return VirtualJob(self._clock, rows, seconds, self._free_at)

    def cancel(self, jobs: Sequence[CpuJob]) -> None:
        """Do nothing: nothing reads memory."""

    def close(self) -> None:
        """Do nothing: there is no thread."""


class VirtualJob:
    """One expert that ends at a time."""

    error: BaseException | None = None
    copy_seconds = 0.0

    def __init__(self, clock: VirtualClock, rows: int, seconds: float, end: float) -> None:
        self.rows = rows
        self.seconds = seconds
        self._clock = clock
        self._end = end

    def query(self) -> bool:
        return self._end <= self._clock.now()

    def wait(self, pump: Callable[[], None]) -> None:
        self._clock.sleep_until(self._end)


class VirtualRows:
    """A layer's routed experts; implements `CpuLayer`. Copies are not modelled: every expert takes the same time."""

    has_place_for_copy = False

    def __init__(self, rows: Mapping[int, int]) -> None:
        self.rows = rows

    def needs_copy(self, expert: int) -> bool:
        return False

    def begin(self, experts: Sequence[int]) -> None:
        """Do nothing: there are no rows to send."""

    def work(self, expert: int) -> CpuWork:
        return _nothing

    def results(self, experts: Sequence[int]) -> ComputedRows:
        nothing = torch.empty(0)
        return ComputedRows(nothing, nothing, nothing)


def _nothing() -> float:
    """Compute nothing."""
    return 0.0
