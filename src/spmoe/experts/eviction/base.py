"""The contract of eviction policies, and a base class for policies that give every expert a score.

A policy is a class registered by name (see `spmoe.registry`) and made from the number of experts of each MoE layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from spmoe.types import ExpertKey, PrefetchRequests


class Eviction(Protocol):
    """Observes everything that happens to experts, and chooses victims."""

    shape: tuple[int, int]  # MoE layers, and experts of the layer that has most
    scores_are_chances: bool  # whether a score is the chance, from 0 to 1, that the expert is used soon

    def on_insert(self, key: ExpertKey) -> None:
        """Record that an expert got a slot; its copy begins."""
        ...

    def on_remove(self, key: ExpertKey) -> None:
        """Record that an expert lost its slot."""
        ...

    def on_use(self, layer: int, experts: Sequence[int]) -> None:
        """Record that these experts of a layer, at least one, are about to run, in slots or on the CPU."""
        ...

    def on_prompt(self, layer: int, experts: Sequence[int], shares: Sequence[float]) -> None:
        """Record that a prompt, or a chunk of it, was routed to these experts, each by this share of its rows."""
        ...

    def on_prefetches(self, prefetches: PrefetchRequests) -> None:
        """Record predictions for one chunk of layers."""
        ...

    def on_layer(self, layer: int) -> None:
        """Record that the target is about to run this layer."""
        ...

    def begin_step(self, sequence_id: int = 0) -> None:
        """Begin a step of this sequence; a sequence's first step reads its prompt."""
        ...

    def score(self, key: ExpertKey) -> float:
        """Return the bound below which residents may be evicted to prefetch this expert."""
        ...

    def chance(self, key: ExpertKey) -> float:
        """Return the chance that an expert, resident or not, is used soon; only if `scores_are_chances`."""
        ...

    def victims(self, n: int, held: np.ndarray, below: float, layer: int | None = None) -> list[ExpertKey] | None:
        """Return exactly n resident experts to evict, or None if there are not so many; change nothing.

        None of them is held, and each scores below `below`. `layer` is the layer that needs the slots. With an
        infinite bound there is an answer whenever n residents are not held.
        """
        # held: bool [layers, experts]
        ...


class ScoredEviction:
    """Evicts the expert with the lowest score; of equal ones, the one that was not touched for longest.

    A subclass computes the scores in `compute_scores` and calls `invalidate` when they change. Inside, experts are
    numbered: expert e of layer l is `l * shape[1] + e`.
    """

    scores_are_chances = False
    _swap_margin = 1.0  # share of an expert's score that a resident must score below to be evicted for its prefetch

    def __init__(self, experts_per_layer: Sequence[int]) -> None:
        self.shape = (len(experts_per_layer), max(experts_per_layer))
        # single elements of a bytearray or memoryview are written faster than those of an array
        self._resident_bytes = bytearray(self.shape[0] * self.shape[1])
        self._resident = np.frombuffer(self._resident_bytes, dtype=bool).reshape(self.shape)  # shares memory
        self._last_touch = np.zeros(self.shape)  # in ticks
        self._last_touch_view = self._last_touch.reshape(-1).data  # shares memory
        self._ticks = 0
        self._position = -1  # the layer that runs; -1 before the first
        self._scores: np.ndarray | None = None  # [layers, experts]; None: to be computed
        self._keys = [ExpertKey(*index) for index in np.ndindex(self.shape)]

    def on_insert(self, key: ExpertKey) -> None:
        self._resident[key] = True
        self._ticks += 1
        self._last_touch[key] = self._ticks

    def on_remove(self, key: ExpertKey) -> None:
        self._resident[key] = False

    def on_use(self, layer: int, experts: Sequence[int]) -> None:
        last_touch, start = self._last_touch_view, layer * self.shape[1]
        for tick, expert in enumerate(experts, start=self._ticks + 1):  # few experts: faster than array operations
            last_touch[start + expert] = tick
        self._ticks += len(experts)

    def on_prompt(self, layer: int, experts: Sequence[int], shares: Sequence[float]) -> None:
        pass

    def on_prefetches(self, prefetches: PrefetchRequests) -> None:
        pass

    def on_layer(self, layer: int) -> None:
        self._position = layer
        self._scores = None

    def begin_step(self, sequence_id: int = 0) -> None:
        self.on_layer(-1)

    def score(self, key: ExpertKey) -> float:
        return self._swap_margin * float(self.scores()[key])

    def chance(self, key: ExpertKey) -> float:
        return float(self.scores()[key])

    def victims(self, n: int, held: np.ndarray, below: float, layer: int | None = None) -> list[ExpertKey] | None:
        numbers = self._select(n, self._resident > held, below, layer)
        return None if numbers is None else [self._keys[number] for number in numbers]

    def compute_scores(self) -> np.ndarray:
        """Compute the score of every expert, resident or not."""  # float [layers, experts]
        raise NotImplementedError

    def invalidate(self) -> None:
        """Discard the scores; they are computed again when they are needed."""
        self._scores = None

    def scores(self) -> np.ndarray:
        """Return the score of every expert; compute the scores if they are not valid."""  # float [layers, experts]
        if self._scores is None:
            self._scores = self.compute_scores()
        return self._scores

    def _select(self, n: int, free: np.ndarray, below: float, layer: int | None) -> list[int] | None:
        """Choose victims, as `victims` does, among free experts: resident and not held."""
        # free: bool [layers, experts], which may be changed
        if n == 0:
            return []
        if n == 1:
            return self._lowest(np.where(free, self.scores(), np.inf).ravel(), below)
        numbers = free.ravel().nonzero()[0]
        if n > len(numbers):
            return None
        scores = self.scores().ravel()[numbers]
        ranked = scores.copy()
        ranked.partition(n - 1)
        highest = ranked[n - 1]  # of the n lowest scores
        if highest >= below:
            return None
        among = (scores <= highest).nonzero()[0]
        numbers = numbers[among]
        victims: list[int] = numbers[np.lexsort((self._last_touch.ravel()[numbers], scores[among]))[:n]].tolist()
        return victims

    def _lowest(self, scores: np.ndarray, below: float) -> list[int] | None:
        """Return the first victim by these scores, which are infinite for experts that must stay."""
        # scores: [experts of all layers], which is changed
        at = int(scores.argmin())
        lowest = scores.item(at)
        if lowest >= below:
            return None
        scores[at] = np.inf
        if scores.item(scores.argmin()) > lowest:
            return [at]
        scores[at] = lowest
        numbers = (scores == lowest).nonzero()[0]
        return [numbers.item(self._last_touch.ravel()[numbers].argmin())]

    def _touch(self, numbers: np.ndarray) -> None:
        """Mark experts as touched, the last of them most recently."""  # numbers: int64 [touched]
        count = len(numbers)
        self._last_touch.ravel()[numbers] = np.arange(self._ticks + 1.0, self._ticks + count + 1.0)
        self._ticks += count


def layers_until(count: int, position: int) -> np.ndarray:
    """Return, for each layer, how many layers run before it does; the running layer waits a whole cycle."""  # [layers]
    return (np.arange(count) - position - 1) % count
