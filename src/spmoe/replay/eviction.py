"""Eviction policies of a replay: the live ones by name, and two bounds that know the future."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from spmoe.errors import UsageError, suggestion
from spmoe.experts.eviction import Eviction, ScoredEviction, make_eviction
from spmoe.experts.eviction.draft_informed import DraftInformed, chance_of_any_use
from spmoe.registry import EVICTION_POLICIES
from spmoe.replay.steps import StepPlan
from spmoe.types import ExpertKey, PrefetchRequests


class OneStepPerfect(DraftInformed):
    """Know every expert that the current step needs; judge later steps by past frequency."""

    def __init__(self, experts: Sequence[int], steps: Sequence[StepPlan]) -> None:
        super().__init__(experts, swap_margin=1.0)
        self._steps = iter(steps)
        self._needed = np.zeros(self.shape, dtype=bool)

    def begin_step(self, sequence_id: int = 0) -> None:
        super().begin_step(sequence_id)
        self._needed[:] = False
        for forward in next(self._steps).forwards:
            for layer, experts in enumerate(forward.experts):
                self._needed[layer, experts] = True

    def on_prefetches(self, prefetches: PrefetchRequests) -> None:
        """Ignore predictions."""

    def compute_scores(self) -> np.ndarray:
        to_come = np.arange(self.shape[0]) > self._position
        expected = np.where(to_come[:, None], self._needed, self._frequency)
        scores: np.ndarray = chance_of_any_use(expected, self._later) * self._nearness[self._position + 1]
        return scores


class Belady(ScoredEviction):
    """Evict the expert whose next use is farthest in the future."""

    def __init__(self, experts: Sequence[int], steps: Sequence[StepPlan]) -> None:
        super().__init__(experts)
        self._uses: dict[ExpertKey, list[float]] = {key: [] for key in self._keys}  # later uses, the next one last
        time = 0
        for step in steps:
            for forward in step.forwards:
                for layer, needed in enumerate(forward.experts):
                    for expert in needed:
                        self._uses[ExpertKey(layer, expert)].append(time)
                    time += 1
        self._next = np.zeros(self.shape)  # time of the next use
        for key, uses in self._uses.items():
            uses.append(np.inf)
            uses.reverse()
            self._next[key] = uses[-1]

    def on_insert(self, key: ExpertKey) -> None:
        self._resident[key] = True

    def on_use(self, layer: int, experts: Sequence[int]) -> None:
        for expert in experts:
            uses = self._uses[ExpertKey(layer, expert)]
            uses.pop()
            self._next[layer, expert] = uses[-1]
        self.invalidate()

    def score(self, key: ExpertKey) -> float:
        return -float(self._next[key])

    def compute_scores(self) -> np.ndarray:
        return -self._next


BOUNDS: dict[str, Callable[[Sequence[int], Sequence[StepPlan]], Eviction]] = {
    "one-step-perfect": OneStepPerfect,
    "belady": Belady,
}


def require_eviction(name: str) -> None:
    """Raise UsageError if there is no eviction policy of this name."""
    if name not in EVICTION_POLICIES and name not in BOUNDS:
        names = (*EVICTION_POLICIES.names(), *BOUNDS)
        raise UsageError(f"eviction must be one of {', '.join(names)}, not {name!r}{suggestion(name, names)}")


def make_replay_eviction(name: str, experts: Sequence[int], steps: Sequence[StepPlan]) -> Eviction:
    """Return the eviction policy of this name, for layers with these numbers of experts, for these steps."""
    require_eviction(name)
    return BOUNDS[name](experts, steps) if name in BOUNDS else make_eviction(name, experts)
