"""A base class of eviction policies that count the steps that used each expert."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmoe.experts.eviction.base import ScoredEviction
from spmoe.types import ExpertKey, PrefetchRequests

_HIGHEST = float(np.finfo(float).max)  # above every count


class CountingEviction(ScoredEviction):
    """Keeps experts that were predicted in this step until their layer runs; else evicts by `count_scores`.

    A prefetch may evict any expert that was not predicted.
    """

    def __init__(self, experts_per_layer: Sequence[int]) -> None:
        super().__init__(experts_per_layer)
        self._used = np.zeros(self.shape, dtype=bool)  # in this step
        self._protected = np.zeros(self.shape, dtype=bool)  # predicted in this step, and the layer is still to run

    def on_use(self, layer: int, experts: Sequence[int]) -> None:
        super().on_use(layer, experts)
        self._used[layer, experts] = True
        self._protected[layer, experts] = False
        self.invalidate()

    def on_prefetches(self, prefetches: PrefetchRequests) -> None:
        self._protected[prefetches.layers, prefetches.experts] = True
        self.invalidate()

    def on_layer(self, layer: int) -> None:
        self._protected[: max(0, layer)] = False
        super().on_layer(layer)

    def begin_step(self, sequence_id: int = 0) -> None:
        self._used[:] = False
        self._protected[:] = False
        super().begin_step(sequence_id)

    def score(self, key: ExpertKey) -> float:
        return _HIGHEST

    def compute_scores(self) -> np.ndarray:
        return np.where(self._protected, _HIGHEST, self.count_scores())

    def count_scores(self) -> np.ndarray:
        """Compute scores from uses alone."""  # float [layers, experts]
        raise NotImplementedError
