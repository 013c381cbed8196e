"""Activation-aware eviction: keep the experts that similar requests use next."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmoe.experts.eviction.base import ScoredEviction, layers_until
from spmoe.observe.activations import Activations
from spmoe.registry import EVICTION_POLICIES
from spmoe.types import PrefetchRequests


@EVICTION_POLICIES.register("activation")
class ActivationAware(ScoredEviction):
    """Scores an expert by the share of steps expected to use it, discounted by the layers until its layer runs.

    The expectation comes from the activation matrices of similar requests. An expert that was predicted in this step,
    and whose layer is still to run, is expected at least with the score of its prefetch request.
    """

    def __init__(self, experts_per_layer: Sequence[int]) -> None:
        super().__init__(experts_per_layer)
        self._activations = Activations(experts_per_layer)
        self._request_scores = np.zeros(self.shape)  # of this step's prefetch requests
        self._pending: tuple[list[int], list[int]] = [], []  # layers and experts of uses not yet in the matrices
        self._expected: np.ndarray | None = None  # [layers, experts]; None: to be computed
        count = self.shape[0]
        nearness = [(1 - layers_until(count, at) / count)[:, None] for at in range(-1, count)]
        # by position; each is [layers, experts], which multiplies faster than [layers, 1]
        self._nearness = [np.repeat(column, self.shape[1], axis=1) for column in nearness]

    def on_use(self, layer: int, experts: Sequence[int]) -> None:
        super().on_use(layer, experts)
        self._pending[0].extend([layer] * len(experts))
        self._pending[1].extend(experts)
        self.invalidate()

    def on_prefetches(self, prefetches: PrefetchRequests) -> None:
        numbers, scores = prefetches.numbers(self.shape[1]), self._request_scores.ravel()
        scores[numbers] = np.maximum(scores[numbers], prefetches.scores)
        self.invalidate()

    def begin_step(self, sequence_id: int = 0) -> None:
        self._flush()
        self._request_scores[:] = 0.0
        self._activations.begin_step(sequence_id)
        self._expected = None
        super().begin_step(sequence_id)

    def compute_scores(self) -> np.ndarray:
        self._flush()
        if self._expected is None:
            self._expected = self._activations.expected()
        expected, ahead = self._expected, self._position + 1
        if ahead < self.shape[0]:
            expected = expected.copy()
            np.maximum(expected[ahead:], self._request_scores[ahead:], out=expected[ahead:])
        scores: np.ndarray = expected * self._nearness[ahead]
        return scores

    def _flush(self) -> None:
        """Add pending uses to the activation matrices."""
        layers, experts = self._pending
        if layers:
            self._activations.add(layers, experts)
            self._expected = None
            layers.clear()
            experts.clear()
