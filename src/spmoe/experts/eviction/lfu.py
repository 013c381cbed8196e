"""Least frequently used."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmoe.experts.eviction._counting import CountingEviction
from spmoe.registry import EVICTION_POLICIES


@EVICTION_POLICIES.register("lfu")
class LeastFrequentlyUsed(CountingEviction):
    """Scores an expert by the decayed share of steps that used it; the running step counts from the first use on."""

    def __init__(self, experts_per_layer: Sequence[int], decay: float = 0.9) -> None:
        super().__init__(experts_per_layer)
        self._decay = decay  # per step
        self._frequency = np.zeros(self.shape)

    def begin_step(self, sequence_id: int = 0) -> None:
        self._frequency = self.count_scores()
        super().begin_step(sequence_id)

    def count_scores(self) -> np.ndarray:
        return self._decay * self._frequency + (1 - self._decay) * self._used
