"""Eviction by quota: every layer has slots of its own, and least recently used decides within them.

A quota is a right, not a wall: a layer that needs more at once than its own borrows from what others have least
recently used, and gives back when they ask. What was wished for in this step goes last, and never for another prefetch request.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmoe.experts.allocation import best_quotas, equal_quotas
from spmoe.experts.lru import LeastRecentlyUsed
from spmoe.types import ExpertKey, PrefetchRequests


class EqualQuotas(LeastRecentlyUsed):
    """As many slots for each layer; all the slots there are, which is as many experts as were ever resident at once."""

    def __init__(self, experts: Sequence[int]) -> None:
        super().__init__(experts)
        self._experts = tuple(experts)
        self._total = 0  # resident
        self._over = [0] * len(experts)  # resident beyond the quota, by layer
        self._slots = 0
        self.quotas = [0] * len(experts)

    def on_insert(self, key: ExpertKey) -> None:
        layer, expert = key
        number = layer * self.shape[1] + expert
        self._there[number] = True
        self._ticks += 1
        self._ages[number] = self._ticks
        self._over[layer] += 1
        self._total += 1
        if self._total > self._slots:
            self._grow()

    def on_remove(self, key: ExpertKey) -> None:
        layer, expert = key
        self._there[layer * self.shape[1] + expert] = False
        self._over[layer] -= 1
        self._total -= 1

    def demanded(self, layer: int, experts: Sequence[int]) -> None:
        self._over[layer] += len(experts)
        self._total += len(experts)
        if self._total > self._slots:
            self._grow()
        super().demanded(layer, experts)

    def gone(self, numbers: Sequence[int]) -> None:
        super().gone(numbers)
        for number in numbers:
            self._over[number // self.shape[1]] -= 1
        self._total -= len(numbers)

    def worth(self, key: ExpertKey) -> float:
        return 0.0

    def leaving(self, n: int, free: np.ndarray, below: float, layer: int | None = None) -> list[int] | None:
        if n == 0:
            return []
        over = self._over.copy()
        if layer is not None:
            over[layer] += n  # what is to come counts
        borrow = below == np.inf
        chosen = self._oldest(n, over, free > self._promised, borrow=borrow)
        if borrow and len(chosen) < n:
            free.ravel()[chosen] = False
            chosen += self._oldest(n - len(chosen), over, free, borrow=True)
        return chosen if len(chosen) == n else None

    def _oldest(self, n: int, over: list[int], free: np.ndarray, *, borrow: bool) -> list[int]:
        """Up to n of the free, the least recently used of layers over their quota and then, to borrow, of others."""
        # free: bool [layers, experts], which is changed
        width, recency = self.shape[1], self._recency.ravel()
        rich = [layer for layer, excess in enumerate(over) if excess > 0]
        if len(rich) == 1:
            places = rich[0] * width + free[rich[0]].nonzero()[0]
        else:
            places = (free & (np.array(over) > 0)[:, None]).ravel().nonzero()[0]
        if n == 1 and len(places):
            return [int(places[recency[places].argmin()])]
        chosen: list[int] = []
        for place in places[recency[places].argsort()].tolist():
            if over[place // width] > 0:
                over[place // width] -= 1
                chosen.append(place)
                if len(chosen) == n:
                    return chosen
        if borrow:
            free.ravel()[chosen] = False
            places = free.ravel().nonzero()[0]
            chosen += places[recency[places].argsort()[: n - len(chosen)]].tolist()
        return chosen

    def _grow(self) -> None:
        self._slots = self._total
        self._share_out()

    def _share_out(self) -> None:
        before, self.quotas = self.quotas, self._best_quotas()
        self._over = [over + old - new for over, old, new in zip(self._over, before, self.quotas, strict=True)]

    def _best_quotas(self) -> list[int]:
        return equal_quotas(self._experts, self._slots)


class AdaptiveQuotas(EqualQuotas):
    """More slots for layers that make more of them, found by dynamic programming from what was measured.

    With c slots a layer hits what its last c experts were, so the reuse distances of its uses say what each further
    slot saves. A load that was foretold is hidden in part, though it still takes the link: what a layer saves counts
    the less the more of its uses were. Quotas are equal until enough steps were seen, and set anew from time to time.
    """

    _FIRST, _OFTEN = 16, 256  # steps until quotas are set, at first and, twice as many each time, in the end
    _MEMORY = 0.99  # of a step, one step later
    _HIDDEN = 0.5  # of a load that was foretold
    _HABIT = 0.01  # uses at every distance, the fewer the farther, that stand for what was not seen

    def __init__(self, experts: Sequence[int]) -> None:
        super().__init__(experts)
        # a layer's experts, the last used first; bytes are searched faster
        self._stacks = [list(range(count)) if count > 256 else bytearray(range(count)) for count in experts]
        self._distances = np.zeros(self.shape)  # uses by place in the stack
        self._by_place = self._distances.reshape(-1).data  # the same memory
        self._uses = np.zeros(len(experts))
        self._foretold = np.zeros(len(experts))  # uses that were wished for in the same step
        self._names = bytearray(self._distances.size)
        self._named = np.frombuffer(self._names, dtype=bool).reshape(self.shape)  # in this step; the same memory
        self._steps = 0
        self._next = self._FIRST

    def on_use(self, layer: int, experts: Sequence[int]) -> None:
        super().on_use(layer, experts)
        stack, start = self._stacks[layer], layer * self.shape[1]
        by_place, names, foretold = self._by_place, self._names, self._foretold.item(layer)
        for expert in experts:
            place = stack.index(expert)
            del stack[place]
            stack.insert(0, expert)
            by_place[start + place] += 1
            if names[start + expert]:
                foretold += 1
        self._foretold[layer] = foretold
        self._uses[layer] += len(experts)

    def on_prefetches(self, prefetches: PrefetchRequests) -> None:
        super().on_prefetches(prefetches)
        self._named.ravel()[prefetches.numbers(self.shape[1])] = True

    def begin_step(self, sequence_id: int = 0) -> None:
        super().begin_step(sequence_id)
        self._named[:] = False
        self._steps += 1
        if self._steps >= self._next:
            self._next += min(self._steps, self._OFTEN)
            self._share_out()
        self._uses *= self._MEMORY
        self._foretold *= self._MEMORY
        self._distances *= self._MEMORY

    def gains(self) -> list[np.ndarray]:
        """For each layer, the loads that no slot, one, two and so on would have saved it, of late."""
        shown = 1 - self._HIDDEN * self._foretold / np.maximum(self._uses, 1)
        found = []
        for share, all_uses, count in zip(shown, self._distances, self._experts, strict=True):
            uses = all_uses[:count]
            unseen = self._HABIT / np.arange(1, len(uses) + 1)
            found.append(np.concatenate(([0.0], (share * uses + unseen).cumsum())))
        return found

    def _best_quotas(self) -> list[int]:
        enough = self._steps >= self._FIRST
        return best_quotas(self.gains(), self._slots) if enough else super()._best_quotas()
