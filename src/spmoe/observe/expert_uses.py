"""Counts of the experts that layers were routed to, for the dashboard."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np


class UseCounts(NamedTuple):
    """Counts since the engine was built. Subtract two snapshots to get the counts between them."""

    forwards: np.ndarray  # int64 [layers]: times that the layer ran
    uses: np.ndarray  # int64 [layers, experts]: times that it was routed to the expert


class ExpertUses:
    """Counts the uses of every expert. One thread adds; any thread may take a snapshot.

    There is no lock: every number is written and read whole, and a snapshot during a step has some layers of it.
    """

    def __init__(self, layers: int, experts: int) -> None:
        self._counts = UseCounts(np.zeros(layers, dtype=np.int64), np.zeros((layers, experts), dtype=np.int64))
        # single elements of a memoryview are written faster than those of an array; they share memory
        self._forwards, self._uses = self._counts.forwards.data, self._counts.uses.reshape(-1).data
        self._width = experts

    def add(self, layer: int, experts: Iterable[int]) -> None:
        """Count one forward of a layer that is routed to these experts."""
        uses, start = self._uses, layer * self._width
        for expert in set(experts):
            uses[start + expert] += 1
        self._forwards[layer] += 1

    def snapshot(self) -> UseCounts:
        """Return a copy of the counts."""
        return UseCounts(self._counts.forwards.copy(), self._counts.uses.copy())
