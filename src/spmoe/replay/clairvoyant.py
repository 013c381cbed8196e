"""Eviction that sees what is to come: all of it, or the step that runs. Bounds for rules that cannot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmoe.experts.draft_informed import first_use, later_use
from spmoe.replay.informed import DraftInformed, Habit
from spmoe.replay.rule import NEVER, Rule
from spmoe.replay.steps import StepPlan


class OneStepPerfect(Habit):
    """Knows, of each step, all that it will need when it begins, and of later ones only habit."""

    discount = DraftInformed.discount

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        self._needed = np.zeros((self.layers, self.width), dtype=bool)
        for forward in self.steps[step].forwards:
            for keys in forward.needed:
                self._needed.ravel()[keys] = True
        self._worths: np.ndarray | None = None

    def reached(self, layer: int) -> None:
        super().reached(layer)
        self._worths = None

    def worths(self) -> np.ndarray:
        if self._worths is None:
            layer, habit = np.arange(self.layers), self.frequency.reshape(self.layers, self.width)
            cycles = (layer - self.position - 1) % self.layers / self.layers
            expected = np.where((layer > self.position)[:, None], self._needed, habit)
            later = later_use(habit, self.discount)
            self._worths = first_use(expected, later, self.discount**cycles).ravel()
        return self._worths


class Belady(Rule):
    """Knows everything to come: what is needed last leaves."""

    def __init__(self, layers: int, width: int, steps: Sequence[StepPlan]) -> None:
        super().__init__(layers, width, steps)
        self._uses: list[list[float]] = [[] for _ in range(layers * width)]
        time = 0
        for step in steps:
            for forward in step.forwards:
                for keys in forward.needed:
                    for key in keys:
                        self._uses[key].append(time)
                    time += 1
        for uses in self._uses:
            uses.append(NEVER)
            uses.reverse()
        self._next = np.array([uses[-1] for uses in self._uses], dtype=float)

    def used(self, keys: list[int]) -> None:
        super().used(keys)
        for key in keys:
            self._uses[key].pop()
            self._next[key] = self._uses[key][-1]

    def worth(self, key: int) -> float:
        return -float(self._next[key])

    def victim(self, candidates: np.ndarray, below: float, layer: int) -> int:
        when = np.where(candidates, self._next, -1.0)
        last = int(when.argmax())
        return last if candidates[last] and -when[last] < below else -1

    def victims(self, count: int, candidates: np.ndarray, layer: int) -> list[int]:
        found = np.flatnonzero(candidates)
        order = np.argsort(-self._next[found], kind="stable")[:count]
        return [int(key) for key in found[order]]
