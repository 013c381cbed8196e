"""What eviction rules share that give every expert a number: the least goes first, of equals the longest unused."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmoe.types import ExpertKey, PrefetchRequests


class ScoredEviction:
    """Keeps who is resident and when each was touched; a rule says, in `_value`, what experts are worth."""

    _swap_margin = 1.0  # of what an expert is worth, what a prefetch request for it may push out

    def __init__(self, experts: Sequence[int]) -> None:
        self.shape = (len(experts), max(experts))
        self._there = bytearray(self.shape[0] * self.shape[1])
        self._resident = np.frombuffer(self._there, dtype=bool).reshape(self.shape)  # the same memory
        self._recency = np.zeros(self.shape)
        self._ages = self._recency.reshape(-1).data  # the same memory
        self._ticks = 0
        self._position = -1  # the layer that runs; -1 before the first
        self._worths: np.ndarray | None = None  # [layers, experts], valid until something is learnt
        self._keys = [ExpertKey(*place) for place in np.ndindex(self.shape)]

    def on_insert(self, key: ExpertKey) -> None:
        self._resident[key] = True
        self._ticks += 1
        self._recency[key] = self._ticks

    def on_remove(self, key: ExpertKey) -> None:
        self._resident[key] = False

    def demanded(self, layer: int, experts: Sequence[int]) -> None:
        there, start = self._there, layer * self.shape[1]
        for expert in experts:
            there[start + expert] = True
        self._ticks += len(experts)
        self.on_use(layer, experts)

    def gone(self, numbers: Sequence[int]) -> None:
        there = self._there
        for number in numbers:
            there[number] = False

    def on_use(self, layer: int, experts: Sequence[int]) -> None:
        ages, start = self._ages, layer * self.shape[1]
        for tick, expert in enumerate(experts, start=self._ticks + 1):  # they are few: faster than as arrays
            ages[start + expert] = tick
        self._ticks += len(experts)

    def on_prompt(self, layer: int, experts: Sequence[int], shares: Sequence[float]) -> None:
        pass

    def on_prefetches(self, prefetches: PrefetchRequests) -> None:
        pass

    def on_layer(self, layer: int) -> None:
        self._position = layer
        self._worths = None

    def begin_step(self, sequence_id: int = 0) -> None:
        self.on_layer(-1)

    def worth(self, key: ExpertKey) -> float:
        return self._swap_margin * float(self._all_worths()[key])

    def victims(self, n: int, held: np.ndarray, below: float, layer: int | None = None) -> list[ExpertKey] | None:
        numbers = self.leaving(n, self._resident > held, below, layer)
        return None if numbers is None else [self._keys[number] for number in numbers]

    def leaving(self, n: int, free: np.ndarray, below: float, layer: int | None = None) -> list[int] | None:
        if n == 0:
            return []
        places = free.ravel().nonzero()[0]
        if n > len(places):
            return None
        worths = self._all_worths().ravel()[places]
        if n == 1:
            return self._least(places, worths, below)
        ranked = worths.copy()
        ranked.partition(n - 1)
        last = ranked[n - 1]
        if last >= below:
            return None
        found = (worths <= last).nonzero()[0]
        places = places[found]
        leaving: list[int] = places[np.lexsort((self._recency.ravel()[places], worths[found]))[:n]].tolist()
        return leaving

    def _least(self, places: np.ndarray, worths: np.ndarray, below: float) -> list[int] | None:
        """The one of these places that leaves first."""  # worths: of each place; they are changed
        at = worths.argmin()
        least = worths.item(at)
        if least >= below:
            return None
        worths[at] = np.inf
        if worths.item(worths.argmin()) > least:
            return [places.item(at)]
        worths[at] = least
        places = places[worths == least]
        return [places.item(self._recency.ravel()[places].argmin())]

    def _value(self) -> np.ndarray:
        """What every expert is worth now."""  # [layers, experts]
        raise NotImplementedError

    def _touch(self, places: np.ndarray) -> None:
        """The last of them is the most recent."""  # places, among experts of all layers: int64 [touched]
        count = len(places)
        self._recency.ravel()[places] = np.arange(self._ticks + 1.0, self._ticks + count + 1.0)
        self._ticks += count

    def _all_worths(self) -> np.ndarray:
        if self._worths is None:
            self._worths = self._value()
        return self._worths


def layers_until(count: int, position: int) -> np.ndarray:
    """Until each layer's next turn; what the running one did not ask for waits a whole cycle."""  # [layers]
    return (np.arange(count) - position - 1) % count
