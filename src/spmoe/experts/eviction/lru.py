"""Least recently used, regardless of the layers that run next."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmoe.experts.eviction.base import ScoredEviction
from spmoe.registry import EVICTION_POLICIES
from spmoe.types import PrefetchRequests


@EVICTION_POLICIES.register("lru")
class LeastRecentlyUsed(ScoredEviction):
    """Evicts the expert used or predicted least recently.

    A prefetch never evicts an expert that was predicted in the same step and whose layer is still to run.
    """

    def __init__(self, experts_per_layer: Sequence[int]) -> None:
        super().__init__(experts_per_layer)
        self._protected_bytes = bytearray(self._last_touch.size)
        self._protected = np.frombuffer(self._protected_bytes, dtype=bool).reshape(self.shape)  # shares memory
        self._scores = self._last_touch  # the same array, so the scores are always valid

    def on_use(self, layer: int, experts: Sequence[int]) -> None:
        super().on_use(layer, experts)
        protected, start = self._protected_bytes, layer * self.shape[1]
        for expert in experts:
            protected[start + expert] = False

    def on_prefetches(self, prefetches: PrefetchRequests) -> None:
        numbers = prefetches.numbers(self.shape[1])
        self._protected.ravel()[numbers] = True
        self._touch(numbers)

    def on_layer(self, layer: int) -> None:
        self._protected[: max(0, layer)] = False

    def begin_step(self, sequence_id: int = 0) -> None:
        self._protected[:] = False

    def _select(self, n: int, free: np.ndarray, below: float, layer: int | None) -> list[int] | None:
        if below < np.inf:
            free = free > self._protected
        return super()._select(n, free, np.inf, layer)
