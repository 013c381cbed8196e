"""Eviction that sees what is to come: all of it, or the step that runs. Bounds for rules that cannot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmoe.experts.eviction.base import ScoredEviction
from spmoe.experts.eviction.draft_informed import DraftInformed, chance_of_any_use
from spmoe.replay.steps import StepPlan
from spmoe.types import ExpertKey, PrefetchRequests


class OneStepPerfect(DraftInformed):
    """Knows, of each step, all that it will need when it begins, and of later ones only habit."""

    def __init__(self, experts: Sequence[int], steps: Sequence[StepPlan]) -> None:
        super().__init__(experts, swap_margin=1.0)
        self._steps = iter(steps)
        self._needed = np.zeros(self.shape, dtype=bool)

    def begin_step(self, request: int = 0) -> None:
        super().begin_step(request)
        self._needed[:] = False
        for forward in next(self._steps).forwards:
            for keys in forward.needed:
                self._needed.ravel()[keys] = True

    def on_prefetches(self, prefetches: PrefetchRequests) -> None:
        """It knows better."""

    def compute_scores(self) -> np.ndarray:
        to_come = np.arange(self.shape[0]) > self._position
        expected = np.where(to_come[:, None], self._needed, self._frequency)
        worths: np.ndarray = chance_of_any_use(expected, self._later) * self._nearness[self._position + 1]
        return worths


class Belady(ScoredEviction):
    """Knows everything to come: what is needed last leaves."""

    def __init__(self, experts: Sequence[int], steps: Sequence[StepPlan]) -> None:
        super().__init__(experts)
        self._uses: list[list[float]] = [[] for _ in range(self.shape[0] * self.shape[1])]
        time = 0
        for step in steps:
            for forward in step.forwards:
                for keys in forward.needed:
                    for key in keys:
                        self._uses[key].append(time)
                    time += 1
        for uses in self._uses:
            uses.append(np.inf)
            uses.reverse()
        self._next = np.array([uses[-1] for uses in self._uses], dtype=float).reshape(self.shape)

    def on_insert(self, key: ExpertKey) -> None:
        self._resident[key] = True

    def on_use(self, layer: int, experts: Sequence[int]) -> None:
        for expert in experts:
            uses = self._uses[layer * self.shape[1] + expert]
            uses.pop()
            self._next[layer, expert] = uses[-1]
        self.invalidate()

    def score(self, key: ExpertKey) -> float:
        return -float(self._next[key])

    def compute_scores(self) -> np.ndarray:
        return -self._next
