"""Eviction rules of a replay by name: those of the live engine, with the same victims, and two that see ahead.

The rules that matter most are kept over flat arrays, for speed; tests compare them with the live ones. The others are
the live ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from spmoe.config import EVICTIONS
from spmoe.errors import UsageError
from spmoe.experts.eviction import make_eviction
from spmoe.replay.clairvoyant import Belady, OneStepPerfect
from spmoe.replay.counted import FrequencyOverRecency, LeastFrequentlyUsed, LeastRecentlyUsed
from spmoe.replay.informed import DraftInformed
from spmoe.replay.rule import NEVER, Rule
from spmoe.replay.steps import Foretold, StepPlan
from spmoe.types import ExpertKey, Wish


class LiveRule(Rule):
    """Any live rule as it is, one expert at a time: slower, and the same by construction."""

    def __init__(self, name: str, layers: int, width: int, steps: Sequence[StepPlan]) -> None:
        super().__init__(layers, width, steps)
        self._live = make_eviction(name, (width,) * layers)
        self._resident = np.zeros(layers * width, dtype=bool)

    def inserted(self, key: int) -> None:
        self._resident[key] = True
        self._live.inserted(self._key(key))

    def removed(self, key: int) -> None:
        self._resident[key] = False
        self._live.removed(self._key(key))

    def used(self, keys: list[int]) -> None:
        for key in keys:
            self._live.used(self._key(key))

    def wished(self, wishes: Foretold, keys: np.ndarray, scores: np.ndarray, layers: np.ndarray) -> None:
        pairs = zip(keys.tolist(), scores.tolist(), strict=True)
        self._live.wished([Wish(self._key(key), score, key // self.width) for key, score in pairs])

    def reached(self, layer: int) -> None:
        self._live.reached(layer)

    def begin_step(self, step: int) -> None:
        self._live.begin_step(self.steps[step].request)

    def worth(self, key: int) -> float:
        return self._live.worth(self._key(key))

    def victim(self, candidates: np.ndarray, below: float, layer: int) -> int:
        found = self._live.victims(1, self._pinned(candidates), below, layer)
        return found[0].layer * self.width + found[0].expert if found else -1

    def victims(self, count: int, candidates: np.ndarray, layer: int) -> list[int]:
        found = self._live.victims(count, self._pinned(candidates), NEVER, layer)
        return [key.layer * self.width + key.expert for key in found or ()]

    def _pinned(self, candidates: np.ndarray) -> set[ExpertKey]:
        return {self._key(int(key)) for key in np.flatnonzero(self._resident & ~candidates)}

    def _key(self, key: int) -> ExpertKey:
        return ExpertKey(*divmod(key, self.width))


Maker = Callable[[int, int, Sequence[StepPlan]], Rule]

FAST: dict[str, Maker] = {
    "draft-informed": DraftInformed,
    "lru": LeastRecentlyUsed,
    "lfu": LeastFrequentlyUsed,
    "lfru": FrequencyOverRecency,
}
LIVE_RULES = tuple(name for name in EVICTIONS if name != "auto")
RULES: dict[str, Maker] = {
    **{name: partial(LiveRule, name) for name in LIVE_RULES},
    **FAST,
    "one-step-perfect": OneStepPerfect,
    "belady": Belady,
}


def require_rule(name: str) -> None:
    """Refuse a name that no rule has."""
    if name not in RULES:
        raise UsageError(f"eviction must be one of {', '.join(RULES)}, not {name!r}")


def make_rule(name: str, layers: int, width: int, steps: Sequence[StepPlan]) -> Rule:
    """The rule of this name."""
    require_rule(name)
    return RULES[name](layers, width, steps)
