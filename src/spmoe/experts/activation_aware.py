"""Activation-aware eviction: what requests like this one go on to use, the sooner its turn the more."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmoe.experts.valued import Valued
from spmoe.observe.activations import Activations
from spmoe.types import ExpertKey, Wishes


class ActivationAware(Valued):
    """The share of steps that are expected to use it, by matched activation matrices, times how near its turn is.

    What this step has wished for, and not had its turn, is expected at least as much as it was wished for.
    """

    def __init__(self, experts: Sequence[int]) -> None:
        super().__init__(experts)
        self._activations = Activations(experts)
        self._score = np.zeros(self.shape)  # of this step's wishes
        self._untold: list[ExpertKey] = []  # uses that the matrices have not been told of

    def used(self, layer: int, experts: Sequence[int]) -> None:
        super().used(layer, experts)
        self._untold += [ExpertKey(layer, expert) for expert in experts]
        self._worths = None

    def wished(self, wishes: Wishes) -> None:
        places = (wishes.layers, wishes.experts)
        self._score[places] = np.maximum(self._score[places], wishes.scores)
        self._worths = None

    def begin_step(self, request: int = 0) -> None:
        self._tell()
        self._score[:] = 0.0
        self._activations.begin_step(request)
        super().begin_step(request)

    def _value(self) -> np.ndarray:
        self._tell()
        expected, near = self._activations.expected(), 1 - self._distance() / self.shape[0]
        ahead = self._position + 1
        expected[ahead:] = np.maximum(expected[ahead:], self._score[ahead:])
        worths: np.ndarray = expected * near[:, None]
        return worths

    def _tell(self) -> None:
        self._activations.note(self._untold)
        self._untold.clear()
