"""Eviction: which resident expert is missed least.

Layers run in a fixed cycle, so when one step's experts outnumber the slots, least-recently-used throws out exactly
what the next layers need. The draft-informed rule asks instead how likely each resident expert is to be used at its
layer's next turn, and how far off that turn is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np

from spmoe.types import ExpertKey, Wish


class Eviction(Protocol):
    """Told of everything that happens to experts; asked for victims. `below` bounds the worth of a victim."""

    def inserted(self, key: ExpertKey) -> None: ...

    def removed(self, key: ExpertKey) -> None: ...

    def used(self, key: ExpertKey) -> None: ...

    def wished(self, wishes: Sequence[Wish]) -> None:
        """What one pass of the draft says of a slab of layers."""
        ...

    def reached(self, layer: int) -> None:
        """The pass is about to run this layer."""
        ...

    def begin_step(self) -> None: ...

    def worth(self, key: ExpertKey) -> float:
        """What a wished key may push out: only residents worth less."""
        ...

    def victims(self, n: int, pinned: Collection[ExpertKey], below: float) -> list[ExpertKey] | None:
        """Exactly n resident keys, none of them pinned and each worth less than `below`, or None; changes nothing."""
        ...


class LeastRecentlyUsed:
    """The classic. A wish never pushes out what was wished for in the same step and has not had its turn."""

    def __init__(self) -> None:
        self._order: OrderedDict[ExpertKey, None] = OrderedDict()
        self._promised: set[ExpertKey] = set()

    def inserted(self, key: ExpertKey) -> None:
        self._order[key] = None

    def removed(self, key: ExpertKey) -> None:
        del self._order[key]

    def used(self, key: ExpertKey) -> None:
        self._order.move_to_end(key)
        self._promised.discard(key)

    def wished(self, wishes: Sequence[Wish]) -> None:
        for wish in wishes:
            self._promised.add(wish.key)
            if wish.key in self._order:
                self._order.move_to_end(wish.key)

    def reached(self, layer: int) -> None:
        self._promised = {key for key in self._promised if key.layer >= layer}

    def begin_step(self) -> None:
        self._promised.clear()

    def worth(self, key: ExpertKey) -> float:
        return 0.0

    def victims(self, n: int, pinned: Collection[ExpertKey], below: float) -> list[ExpertKey] | None:
        spared = self._promised if below < float("inf") else ()
        chosen: list[ExpertKey] = []
        for key in self._order:
            if len(chosen) == n:
                break
            if key not in pinned and key not in spared:
                chosen.append(key)
        return chosen if len(chosen) == n else None


class Reliability:
    """How often the draft's word came true lately, by how often and how strongly it was given; learnt as steps end."""

    _SCORES = np.array([0.25, 0.5, 0.75])  # bounds between weak and strong words
    _MEMORY = 0.95  # of a step, one step later
    _DOUBT = 8.0  # predictions that what is assumed at first counts for

    def __init__(self) -> None:
        strength = np.linspace(0.7, 0.95, len(self._SCORES) + 1)
        self._given = np.full((2, len(strength)), self._DOUBT)  # [named once or more often, strength]
        self._true = self._given * np.stack((strength, np.sqrt(strength)))
        self._habit = self._DOUBT  # uses expected, by habit, of experts that were not named
        self._surprise = self._DOUBT * 0.6  # and those that there were

    @property
    def silence(self) -> float:
        """What remains of a habit where the draft has not named the expert."""
        return min(1.0, self._surprise / self._habit)

    def of(self, named: np.ndarray, score: np.ndarray) -> np.ndarray:
        """The chance that an expert is needed, from how often it was named and the best score it got."""
        chance: np.ndarray = (self._true / self._given)[self._place(named, score)]
        return chance

    def learn(self, named: np.ndarray, score: np.ndarray, used: np.ndarray, habit: np.ndarray) -> None:
        """What a step has shown, in layers that were spoken of."""  # all: [layers, experts]
        said = named > 0
        for table, came in ((self._given, np.ones(said.sum())), (self._true, used[said].astype(float))):
            table *= self._MEMORY
            np.add.at(table, self._place(named[said], score[said]), came)
        self._habit = self._MEMORY * self._habit + habit[~said].sum()
        self._surprise = self._MEMORY * self._surprise + used[~said].sum()

    def _place(self, named: np.ndarray, score: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.clip(named, 1, 2) - 1, np.searchsorted(self._SCORES, score)


class DraftInformed:
    """Expected use at the next turn, discounted by the distance to it.

    The expectation starts from habit, the decayed frequency of use. For a layer that this step has still to run and the
    draft has spoken of, its word counts instead, as much as its words have lately turned out to be true: what it names
    is needed that often, and what it does not name that much less than usual, the more so the more of its passes are
    over. `reluctance` is what a wish must overcome: a swap among two equally likely experts only costs bytes.
    """

    def __init__(
        self, experts: Sequence[int], decay: float = 0.9, discount: float = 0.6, reluctance: float = 0.4
    ) -> None:
        self._shape = (len(experts), max(experts))
        self._decay = decay
        self._discount = discount
        self._reluctance = reluctance
        self._resident = np.zeros(self._shape, dtype=bool)
        self._frequency = np.zeros(self._shape)  # decayed share of steps in which the expert was used
        self._used = np.zeros(self._shape, dtype=bool)  # in this step
        self._named = np.zeros(self._shape, dtype=int)  # how often in this step
        self._score = np.zeros(self._shape)  # the best it was named with
        self._passes = np.zeros(self._shape[0], dtype=int)  # of the draft, in this step, that have spoken of the layer
        self._usual_passes = 1
        self._reliability = Reliability()
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
        self._used[key] = True
        self._touch(key)

    def wished(self, wishes: Sequence[Wish]) -> None:
        if not wishes:
            return
        layers, experts = np.array([wish.key for wish in wishes]).T
        np.add.at(self._named, (layers, experts), 1)
        np.maximum.at(self._score, (layers, experts), [wish.score for wish in wishes])
        self._passes[np.unique(layers)] += 1
        self._worths = None

    def reached(self, layer: int) -> None:
        self._position = layer
        self._worths = None

    def begin_step(self) -> None:
        if len(spoken := np.flatnonzero(self._passes)):
            seen = (self._named, self._score, self._used, self._frequency)
            self._reliability.learn(*(figure[spoken] for figure in seen))
            self._usual_passes = int(self._passes.max())
        self._frequency = self._decay * self._frequency + (1 - self._decay) * self._used
        self._used[:] = False
        self._named[:] = 0
        self._score[:] = 0.0
        self._passes[:] = 0
        self.reached(-1)

    def worth(self, key: ExpertKey) -> float:
        return self._reluctance * float(self._all_worths()[key])

    def victims(self, n: int, pinned: Collection[ExpertKey], below: float) -> list[ExpertKey] | None:
        candidates = self._resident.copy()
        if pinned:
            candidates[tuple(np.array(list(pinned)).T)] = False
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
            count = self._shape[0]
            # what the running layer did not ask for waits a whole cycle, like what has passed
            distance = (np.arange(count) - self._position - 1) % count
            expected = self._frequency.copy()
            told = np.flatnonzero((self._passes > 0) & (np.arange(count) > self._position))
            if len(told):
                spoken = np.minimum(1.0, self._passes[told] / self._usual_passes)
                expected[told] *= (1 - spoken * (1 - self._reliability.silence))[:, None]
                word = self._reliability.of(self._named[told], self._score[told])
                expected[told] = np.where(self._named[told] > 0, np.maximum(word, expected[told]), expected[told])
            self._worths = expected * (self._discount ** (distance / count))[:, None]
        return self._worths


def make_eviction(name: str, experts: Sequence[int]) -> Eviction:
    """The eviction rule of this name, for layers with these numbers of experts."""
    return LeastRecentlyUsed() if name == "lru" else DraftInformed(experts)
