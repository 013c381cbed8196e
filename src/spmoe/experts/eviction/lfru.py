"""Frequency over recency: LFU and LRU mixed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmoe.experts.eviction._counting import CountingEviction
from spmoe.registry import EVICTION_POLICIES


@EVICTION_POLICIES.register("lfru")
class FrequencyOverRecency(CountingEviction):
    """Scores an expert by the number of steps that used it, divided by one plus the steps since the last of them."""

    def __init__(self, experts_per_layer: Sequence[int]) -> None:
        super().__init__(experts_per_layer)
        self._uses = np.zeros(self.shape)  # in steps
        self._last = np.zeros(self.shape)  # the step of the last use
        self._step = 0

    def begin_step(self, sequence_id: int = 0) -> None:
        self._uses += self._used
        self._last[self._used] = self._step
        self._step += 1
        super().begin_step(sequence_id)

    def count_scores(self) -> np.ndarray:
        age = np.where(self._used, 0, self._step - self._last)
        scores: np.ndarray = (self._uses + self._used) / (1 + age)
        return scores
