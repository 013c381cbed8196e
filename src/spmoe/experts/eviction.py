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

    def wished(self, wish: Wish) -> None: ...

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

    def wished(self, wish: Wish) -> None:
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


class DraftInformed:
    """Expected use at the next turn, discounted by the distance to it.

    The expectation starts from habit, the decayed frequency of use. For a layer that this step has still to run and
    the draft has spoken of, its word is evidence on top: an expert it names is needed unless both habit and draft are
    wrong, one it does not name is a little less likely than usual. `reluctance` is what a wish must overcome: a swap
    among two equally likely experts only costs bytes.
    """

    def __init__(
        self,
        experts: Sequence[int],
        decay: float = 0.9,
        discount: float = 0.6,
        trust: float = 0.8,
        silence: float = 0.9,
        reluctance: float = 0.7,
    ) -> None:
        self._shape = (len(experts), max(experts))
        self._decay = decay
        self._discount = discount
        self._trust = trust  # that an expert is needed, because the draft says so
        self._silence = silence  # what remains of habit where the draft does not name an expert
        self._reluctance = reluctance
        self._resident = np.zeros(self._shape, dtype=bool)
        self._frequency = np.zeros(self._shape)  # decayed share of steps in which the expert was used
        self._used = np.zeros(self._shape, dtype=bool)  # in this step
        self._predicted = np.zeros(self._shape)  # this step's scores
        self._spoken = np.zeros(self._shape[0], dtype=bool)  # layers the draft has predicted in this step
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

    def wished(self, wish: Wish) -> None:
        self._spoken[wish.key.layer] = True
        self._predicted[wish.key] = max(self._predicted[wish.key], wish.score)
        self._worths = None

    def reached(self, layer: int) -> None:
        self._position = layer
        self._worths = None

    def begin_step(self) -> None:
        self._frequency = self._decay * self._frequency + (1 - self._decay) * self._used
        self._used[:] = False
        self._predicted[:] = 0.0
        self._spoken[:] = False
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
            habit = self._frequency
            told = self._spoken & (np.arange(count) > self._position)
            sure = self._trust * (0.8 + 0.2 * self._predicted)
            word = np.where(self._predicted > 0, 1 - (1 - habit) * (1 - sure), self._silence * habit)
            expected = np.where(told[:, None], word, habit)
            self._worths = expected * (self._discount ** (distance / count))[:, None]
        return self._worths


def make_eviction(name: str, experts: Sequence[int]) -> Eviction:
    """The eviction rule of this name, for layers with these numbers of experts."""
    return LeastRecentlyUsed() if name == "lru" else DraftInformed(experts)
