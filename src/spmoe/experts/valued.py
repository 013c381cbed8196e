"""What eviction rules share that give every expert a number: the least goes first, of equals the longest unused."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmoe.types import ExpertKey, Wishes


class Valued:
    """Keeps who is resident and when each was touched; a rule says, in `_value`, what experts are worth."""

    def __init__(self, experts: Sequence[int]) -> None:
        self.shape = (len(experts), max(experts))
        self._resident = np.zeros(self.shape, dtype=bool)
        self._recency = np.zeros(self.shape)
        self._ticks = 0
        self._position = -1  # the layer that runs; -1 before the first
        self._worths: np.ndarray | None = None  # [layers, experts], valid until something is learnt
        self._keys = [ExpertKey(*place) for place in np.ndindex(self.shape)]

    def inserted(self, key: ExpertKey) -> None:
        self._resident[key] = True
        self._ticks += 1
        self._recency[key] = self._ticks

    def removed(self, key: ExpertKey) -> None:
        self._resident[key] = False

    def used(self, layer: int, experts: Sequence[int]) -> None:
        self._touch(layer * self.shape[1] + np.array(experts))

    def read(self, layer: int, experts: Sequence[int], shares: Sequence[float]) -> None:
        pass

    def wished(self, wishes: Wishes) -> None:
        pass

    def reached(self, layer: int) -> None:
        self._position = layer
        self._worths = None

    def begin_step(self, request: int = 0) -> None:
        self.reached(-1)

    def worth(self, key: ExpertKey) -> float:
        return float(self._all_worths()[key])

    def victims(self, n: int, held: np.ndarray, below: float, layer: int | None = None) -> list[ExpertKey] | None:
        if n == 0:
            return []
        places = (self._resident > held).ravel().nonzero()[0]
        if n > len(places):
            return None
        worths = self._all_worths().ravel()[places]
        last = worths[worths.argmin()] if n == 1 else np.partition(worths, n - 1)[n - 1]
        if last >= below:
            return None
        found = (worths <= last).nonzero()[0]
        places = places[found]
        if len(found) > 1:
            places = places[np.lexsort((self._recency.ravel()[places], worths[found]))[:n]]
        return [self._keys[place] for place in places.tolist()]

    def _value(self) -> np.ndarray:
        """What every expert is worth now."""  # [layers, experts]
        raise NotImplementedError

    def _distance(self) -> np.ndarray:
        """Layers until each layer's next turn; what the running one did not ask for waits a whole cycle."""  # [layers]
        count = self.shape[0]
        return (np.arange(count) - self._position - 1) % count

    def _touch(self, places: np.ndarray) -> None:
        """The last of them is the most recent."""  # places, among experts of all layers: int64 [touched]
        count = len(places)
        self._recency.ravel()[places] = np.arange(self._ticks + 1, self._ticks + count + 1)
        self._ticks += count

    def _all_worths(self) -> np.ndarray:
        if self._worths is None:
            self._worths = self._value()
        return self._worths
