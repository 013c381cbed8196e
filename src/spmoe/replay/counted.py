"""Eviction by recency and frequency, as the live rules `lru`, `lfu` and `lfru` do it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmoe.experts import frequency
from spmoe.replay.rule import NEVER, Rule, Valued, live_default
from spmoe.replay.steps import Foretold, StepPlan

_ANY = float(np.finfo(float).max)  # above whatever counts come to


class LeastRecentlyUsed(Rule):
    """As the live rule: a wish spares what was wished for in the same step and has not had its turn."""

    def __init__(self, layers: int, width: int, steps: Sequence[StepPlan]) -> None:
        super().__init__(layers, width, steps)
        self.promised = np.zeros(layers * width, dtype=bool)

    def used(self, keys: list[int]) -> None:
        super().used(keys)
        self.promised[keys] = False

    def wished(self, wishes: Foretold, keys: np.ndarray, scores: np.ndarray, layers: np.ndarray) -> None:
        self.promised[keys] = True
        self.recency[keys] = range(self.ticks + 1, self.ticks + len(keys) + 1)
        self.ticks += len(keys)

    def reached(self, layer: int) -> None:
        super().reached(layer)
        self.promised[: layer * self.width] = False

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        self.promised[:] = False

    def victim(self, candidates: np.ndarray, below: float, layer: int) -> int:
        if below < NEVER:
            candidates = candidates & ~self.promised
        ages = np.where(candidates, self.recency, NEVER)
        least = int(ages.argmin())
        return least if candidates[least] else -1

    def victims(self, count: int, candidates: np.ndarray, layer: int) -> list[int]:
        found = np.flatnonzero(candidates)
        order = np.argsort(self.recency[found], kind="stable")[:count]
        return [int(key) for key in found[order]]


class Counting(Valued):
    """Counts the steps that used each expert; what was wished for stays until its turn, if anything else can go."""

    def __init__(self, layers: int, width: int, steps: Sequence[StepPlan]) -> None:
        super().__init__(layers, width, steps)
        self.seen = np.zeros(layers * width, dtype=bool)  # in this step
        self.promised = np.zeros(layers * width, dtype=bool)
        self._worths: np.ndarray | None = None

    def used(self, keys: list[int]) -> None:
        super().used(keys)
        self.seen[keys] = True
        self.promised[keys] = False
        self._worths = None

    def wished(self, wishes: Foretold, keys: np.ndarray, scores: np.ndarray, layers: np.ndarray) -> None:
        self.promised[keys] = True
        self._worths = None

    def reached(self, layer: int) -> None:
        super().reached(layer)
        self.promised[: layer * self.width] = False
        self._worths = None

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        self.seen[:] = False
        self.promised[:] = False
        self._worths = None

    def worth(self, key: int) -> float:
        return _ANY

    def worths(self) -> np.ndarray:
        if self._worths is None:
            self._worths = np.where(self.promised, _ANY, self.count())
        return self._worths

    def count(self) -> np.ndarray:
        """What use alone makes of every expert."""
        raise NotImplementedError


class LeastFrequentlyUsed(Counting):
    """The share of recent steps that used it, decayed; the running step counts from the first use on."""

    decay = live_default(frequency.LeastFrequentlyUsed, "decay")

    def __init__(self, layers: int, width: int, steps: Sequence[StepPlan]) -> None:
        super().__init__(layers, width, steps)
        self.frequency = np.zeros(layers * width)

    def begin_step(self, step: int) -> None:
        self.frequency = self.count()
        super().begin_step(step)

    def count(self) -> np.ndarray:
        return self.decay * self.frequency + (1 - self.decay) * self.seen


class FrequencyOverRecency(Counting):
    """Steps that used it, over the steps since the last that did."""

    def __init__(self, layers: int, width: int, steps: Sequence[StepPlan]) -> None:
        super().__init__(layers, width, steps)
        self.uses = np.zeros(layers * width)
        self.last = np.zeros(layers * width)
        self.steps_begun = 0

    def begin_step(self, step: int) -> None:
        self.uses += self.seen
        self.last[self.seen] = self.steps_begun
        self.steps_begun += 1
        super().begin_step(step)

    def count(self) -> np.ndarray:
        age = np.where(self.seen, 0, self.steps_begun - self.last)
        worths: np.ndarray = (self.uses + self.seen) / (1 + age)
        return worths
