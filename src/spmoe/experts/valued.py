"""What eviction rules share that give every expert a number: the least goes first, of equals the longest unused."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from spmoe.types import ExpertKey, Wish


class Valued:
    """Keeps who is resident and when each was touched; a rule says, in `_value`, what experts are worth."""

    def __init__(self, experts: Sequence[int]) -> None:
        self._shape = (len(experts), max(experts))
        self._resident = np.zeros(self._shape, dtype=bool)
        self._recency = np.zeros(self._shape)
        self._ticks = 0
        self._position = -1  # the layer that runs; -1 before the first
        self._worths: np.ndarray | None = None  # [layers, experts], valid until something is learnt

    def inserted(self, key: ExpertKey) -> None:
        self._resident[key] = True
        self._touch(key)

    def removed(self, key: ExpertKey) -> None:
        self._resident[key] = False

    def used(self, key: ExpertKey) -> None:
        self._touch(key)

    def wished(self, wishes: Sequence[Wish]) -> None:
        pass

    def reached(self, layer: int) -> None:
        self._position = layer
        self._worths = None

    def foresee(self, layer: int) -> None:
        """Values are worked out when they are asked for."""

    def begin_step(self, request: int = 0) -> None:
        self.reached(-1)

    def worth(self, key: ExpertKey) -> float:
        return float(self._all_worths()[key])

    def victims(
        self, n: int, pinned: Collection[ExpertKey], below: float, layer: int | None = None
    ) -> list[ExpertKey] | None:
        candidates = self._resident.copy()
        for key in pinned:
            candidates[key] = False
        if n == 1:
            return self._one_victim(candidates, below)
        layers, experts = np.nonzero(candidates)
        if len(layers) < n:
            return None
        worths = self._all_worths()[layers, experts]
        least = np.lexsort((self._recency[layers, experts], worths))[:n]
        if (worths[least] >= below).any():
            return None
        return [ExpertKey(int(layers[i]), int(experts[i])) for i in least]

    def _value(self) -> np.ndarray:
        """What every expert is worth now."""  # [layers, experts]
        raise NotImplementedError

    def _distance(self) -> np.ndarray:
        """Layers until each layer's next turn; what the running one did not ask for waits a whole cycle."""  # [layers]
        count = self._shape[0]
        return (np.arange(count) - self._position - 1) % count

    def _one_victim(self, candidates: np.ndarray, below: float) -> list[ExpertKey] | None:
        """The same for one victim, in a third of the time: the least worth and, of equals, the longest untouched."""
        worths = np.where(candidates, self._all_worths(), np.inf)
        least = worths.min()
        if least >= below or least == np.inf:
            return None
        layer, expert = divmod(int(np.where(worths == least, self._recency, np.inf).argmin()), self._shape[1])
        return [ExpertKey(layer, expert)]

    def _touch(self, key: ExpertKey) -> None:
        self._ticks += 1
        self._recency[key] = self._ticks

    def _all_worths(self) -> np.ndarray:
        if self._worths is None:
            self._worths = self._value()
        return self._worths
