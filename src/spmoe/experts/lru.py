"""Least recently used: the classic, blind to what layers come next."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmoe.experts.valued import Valued
from spmoe.types import ExpertKey, Wishes


class LeastRecentlyUsed(Valued):
    """The classic. A wish never pushes out what was wished for in the same step and has not had its turn."""

    def __init__(self, experts: Sequence[int]) -> None:
        super().__init__(experts)
        self._promised = np.zeros(self.shape, dtype=bool)
        self._worths = self._recency  # the same table, so for good

    def used(self, layer: int, experts: Sequence[int]) -> None:
        super().used(layer, experts)
        self._promised[layer, experts] = False

    def wished(self, wishes: Wishes) -> None:
        self._promised[wishes.layers, wishes.experts] = True
        self._touch(wishes.layers * self.shape[1] + wishes.experts)

    def reached(self, layer: int) -> None:
        self._promised[: max(0, layer)] = False

    def begin_step(self, request: int = 0) -> None:
        self._promised[:] = False

    def victims(self, n: int, held: np.ndarray, below: float, layer: int | None = None) -> list[ExpertKey] | None:
        if below < np.inf:
            held = held | self._promised
        return super().victims(n, held, np.inf, layer)
