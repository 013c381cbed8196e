"""Least recently used: the classic, blind to what layers come next."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmoe.experts.scored import ScoredEviction
from spmoe.types import PrefetchRequests


class LeastRecentlyUsed(ScoredEviction):
    """The classic. A prefetch request never pushes out what was wished for in the same step and has not had its turn."""

    def __init__(self, experts: Sequence[int]) -> None:
        super().__init__(experts)
        self._promises = bytearray(self._recency.size)
        self._promised = np.frombuffer(self._promises, dtype=bool).reshape(self.shape)  # the same memory
        self._worths = self._recency  # the same table, so for good

    def on_use(self, layer: int, experts: Sequence[int]) -> None:
        super().on_use(layer, experts)
        promises, start = self._promises, layer * self.shape[1]
        for expert in experts:
            promises[start + expert] = False

    def on_prefetches(self, prefetches: PrefetchRequests) -> None:
        places = prefetches.numbers(self.shape[1])
        self._promised.ravel()[places] = True
        self._touch(places)

    def on_layer(self, layer: int) -> None:
        self._promised[: max(0, layer)] = False

    def begin_step(self, sequence_id: int = 0) -> None:
        self._promised[:] = False

    def leaving(self, n: int, free: np.ndarray, below: float, layer: int | None = None) -> list[int] | None:
        if below < np.inf:
            free = free > self._promised
        return super().leaving(n, free, np.inf, layer)
