"""Activation-aware eviction: what requests like this one go on to use, the sooner its turn the more."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmoe.experts.scored import ScoredEviction, layers_until
from spmoe.observe.activations import Activations
from spmoe.types import PrefetchRequests


class ActivationAware(ScoredEviction):
    """The share of steps that are expected to use it, by matched activation matrices, times how near its turn is.

    What this step has wished for, and not had its turn, is expected at least as much as it was wished for.
    """

    def __init__(self, experts: Sequence[int]) -> None:
        super().__init__(experts)
        self._activations = Activations(experts)
        self._score = np.zeros(self.shape)  # of this step's prefetch requests
        self._untold: tuple[list[int], list[int]] = [], []  # layers and experts: uses that matrices were not told of
        self._expected: np.ndarray | None = None  # valid until they are
        count = self.shape[0]
        near = [(1 - layers_until(count, at) / count)[:, None] for at in range(-1, count)]
        # how near each layer's turn is, by position: each [layers, experts], which multiplies faster than [layers, 1]
        self._near = [np.repeat(to_turn, self.shape[1], axis=1) for to_turn in near]

    def on_use(self, layer: int, experts: Sequence[int]) -> None:
        super().on_use(layer, experts)
        self._untold[0].extend([layer] * len(experts))
        self._untold[1].extend(experts)
        self._worths = None

    def on_prefetches(self, prefetches: PrefetchRequests) -> None:
        places, score = prefetches.numbers(self.shape[1]), self._score.ravel()
        score[places] = np.maximum(score[places], prefetches.scores)
        self._worths = None

    def begin_step(self, sequence_id: int = 0) -> None:
        self._tell()
        self._score[:] = 0.0
        self._activations.begin_step(sequence_id)
        self._expected = None
        super().begin_step(sequence_id)

    def _value(self) -> np.ndarray:
        self._tell()
        if self._expected is None:
            self._expected = self._activations.expected()
        expected, ahead = self._expected, self._position + 1
        if ahead < self.shape[0]:
            expected = expected.copy()
            np.maximum(expected[ahead:], self._score[ahead:], out=expected[ahead:])
        worths: np.ndarray = expected * self._near[ahead]
        return worths

    def _tell(self) -> None:
        layers, experts = self._untold
        if layers:
            self._activations.note(layers, experts)
            self._expected = None
            layers.clear()
            experts.clear()
