"""Eviction in a replay: the contract, over flat arrays, and rules that put a number on every expert."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmoe.replay.steps import Foretold, StepPlan

NEVER = float("inf")


def live_default(rule: type[Any], name: str) -> float:
    """A live rule's own constant."""
    return float(inspect.signature(rule).parameters[name].default)


class Rule:
    """What all rules share. `candidates` are the experts that may leave."""

    def __init__(self, layers: int, width: int, steps: Sequence[StepPlan]) -> None:
        self.layers, self.width = layers, width
        self.steps = steps
        self.step = -1
        self.position = -1  # the layer that runs; -1 before the first
        self.recency = np.zeros(layers * width)
        self.ticks = 0

    def inserted(self, key: int) -> None:
        """A slot was taken for this expert."""
        self.ticks += 1
        self.recency[key] = self.ticks

    def removed(self, key: int) -> None:
        """It has left its slot."""

    def used(self, keys: list[int]) -> None:
        """These experts, of one layer, were asked for and have slots."""
        count = len(keys)
        self.recency[keys] = range(self.ticks + 1, self.ticks + count + 1)
        self.ticks += count

    def wished(self, wishes: Foretold, keys: np.ndarray, scores: np.ndarray, layers: np.ndarray) -> None:
        """What one pass of the draft, or a layer of the target, says of layers that are still to come."""

    def reached(self, layer: int) -> None:
        """The pass is about to run this layer."""
        self.position = layer

    def begin_step(self, step: int) -> None:
        """The step with this number is about to start."""
        self.step = step
        self.position = -1

    def worth(self, key: int) -> float:
        """What a wished expert may push out: only residents worth less."""
        return 0.0

    def victim(self, candidates: np.ndarray, below: float, layer: int) -> int:
        """The expert that is missed least, if it is worth less than `below`, for one of `layer`; else -1."""
        raise NotImplementedError

    def victims(self, count: int, candidates: np.ndarray, layer: int) -> list[int]:
        """That many experts that are missed least, for demands."""
        raise NotImplementedError


class Valued(Rule):
    """Rules that put a number on every expert: the least worthy leaves and, of equals, the longest untouched."""

    reluctance = 1.0  # what a wish must overcome

    def worths(self) -> np.ndarray:
        """What every expert is worth."""  # [experts]
        raise NotImplementedError

    def worth(self, key: int) -> float:
        return self.reluctance * float(self.worths()[key])

    def victim(self, candidates: np.ndarray, below: float, layer: int) -> int:
        worths = np.where(candidates, self.worths(), NEVER)
        place = int(worths.argmin())
        least = worths[place]
        if least >= below or least == NEVER:
            return -1
        same = worths == least
        if np.count_nonzero(same) == 1:
            return place
        return int(np.where(same, self.recency, NEVER).argmin())

    def victims(self, count: int, candidates: np.ndarray, layer: int) -> list[int]:
        if count == 1:
            key = self.victim(candidates, NEVER, layer)
            return [key] if key >= 0 else []
        found = np.flatnonzero(candidates)
        order = np.lexsort((self.recency[found], self.worths()[found]))[:count]
        return [int(key) for key in found[order]]
