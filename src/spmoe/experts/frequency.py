"""Eviction by frequency: least frequently used, and frequency over the time since the last use."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmoe.experts.scored import ScoredEviction
from spmoe.types import ExpertKey, PrefetchRequests

_ANY = float(np.finfo(float).max)  # above whatever counts come to


class Counting(ScoredEviction):
    """Counts the steps that used each expert. What was wished for in this step stays until its turn, if
    anything else can go; a prefetch request may push out anything else.
    """

    def __init__(self, experts: Sequence[int]) -> None:
        super().__init__(experts)
        self._used = np.zeros(self.shape, dtype=bool)  # in this step
        self._promised = np.zeros(self.shape, dtype=bool)  # wished for in this step, and not had its turn

    def on_use(self, layer: int, experts: Sequence[int]) -> None:
        super().on_use(layer, experts)
        self._used[layer, experts] = True
        self._promised[layer, experts] = False
        self._worths = None

    def on_prefetches(self, prefetches: PrefetchRequests) -> None:
        self._promised[prefetches.layers, prefetches.experts] = True
        self._worths = None

    def on_layer(self, layer: int) -> None:
        self._promised[: max(0, layer)] = False
        super().on_layer(layer)

    def begin_step(self, sequence_id: int = 0) -> None:
        self._used[:] = False
        self._promised[:] = False
        super().begin_step(sequence_id)

    def worth(self, key: ExpertKey) -> float:
        return _ANY

    def _value(self) -> np.ndarray:
        return np.where(self._promised, _ANY, self._count())

    def _count(self) -> np.ndarray:
        """What use alone makes of every expert."""  # [layers, experts]
        raise NotImplementedError


class LeastFrequentlyUsed(Counting):
    """The share of recent steps that used it, decayed with every step; this one counts from the first use on."""

    def __init__(self, experts: Sequence[int], decay: float = 0.9) -> None:
        super().__init__(experts)
        self._decay = decay
        self._frequency = np.zeros(self.shape)

    def begin_step(self, sequence_id: int = 0) -> None:
        self._frequency = self._count()
        super().begin_step(sequence_id)

    def _count(self) -> np.ndarray:
        return self._decay * self._frequency + (1 - self._decay) * self._used


class FrequencyOverRecency(Counting):
    """The number of steps that used it, over the steps since the last that did: LFU and LRU mixed."""

    def __init__(self, experts: Sequence[int]) -> None:
        super().__init__(experts)
        self._uses = np.zeros(self.shape)  # steps
        self._last = np.zeros(self.shape)  # the step that used it last
        self._step = 0

    def begin_step(self, sequence_id: int = 0) -> None:
        self._uses += self._used
        self._last[self._used] = self._step
        self._step += 1
        super().begin_step(sequence_id)

    def _count(self) -> np.ndarray:
        age = np.where(self._used, 0, self._step - self._last)
        worths: np.ndarray = (self._uses + self._used) / (1 + age)
        return worths
