"""Eviction by quota: every layer has slots of its own, and least recently used decides within them.

A quota is a right, not a wall: a layer that needs more at once than its own borrows from what others have least
recently used, and gives back when they ask. What was wished for in this step goes last, and never for another wish.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from spmoe.experts.allocation import best_quotas, equal_quotas
from spmoe.types import ExpertKey, Wishes


class EqualQuotas:
    """As many slots for each layer; all the slots there are, which is as many experts as were ever resident at once."""

    def __init__(self, experts: Sequence[int]) -> None:
        self.shape = (len(experts), max(experts))
        self._experts = tuple(experts)
        self._orders: list[OrderedDict[ExpertKey, int]] = [OrderedDict() for _ in experts]  # last use, oldest first
        self._promised: set[ExpertKey] = set()
        self._ticks = 0
        self._resident = 0
        self._slots = 0
        self.quotas = [0] * len(experts)

    def inserted(self, key: ExpertKey) -> None:
        self._touch(key)
        self._resident += 1
        if self._resident > self._slots:
            self._slots = self._resident
            self._share_out()

    def removed(self, key: ExpertKey) -> None:
        del self._orders[key.layer][key]
        self._resident -= 1

    def used(self, layer: int, experts: Sequence[int]) -> None:
        for expert in experts:
            key = ExpertKey(layer, expert)
            self._promised.discard(key)
            self._touch(key)

    def read(self, layer: int, experts: Sequence[int], shares: Sequence[float]) -> None:
        pass

    def wished(self, wishes: Wishes) -> None:
        for key in map(ExpertKey, wishes.layers.tolist(), wishes.experts.tolist()):
            self._promised.add(key)
            if key in self._orders[key.layer]:
                self._touch(key)

    def reached(self, layer: int) -> None:
        self._promised = {key for key in self._promised if key.layer >= layer}

    def begin_step(self, request: int = 0) -> None:
        self._promised.clear()

    def worth(self, key: ExpertKey) -> float:
        return 0.0

    def victims(self, n: int, held: np.ndarray, below: float, layer: int | None = None) -> list[ExpertKey] | None:
        over = [len(order) - quota for order, quota in zip(self._orders, self.quotas, strict=True)]
        if layer is not None:
            over[layer] += n  # what is to come counts
        chosen: list[ExpertKey] = []
        self._choose(chosen, n, over, held, self._promised, borrow=below == float("inf"))
        if below == float("inf"):
            self._choose(chosen, n, over, held, set(chosen), borrow=True)
        return chosen if len(chosen) == n else None

    def _choose(
        self,
        chosen: list[ExpertKey],
        n: int,
        over: list[int],
        held: np.ndarray,
        spared: set[ExpertKey],
        *,
        borrow: bool,
    ) -> None:
        """Add to the chosen, up to n, the least recently used of layers over their quota and, to borrow, of others."""
        free: dict[int, Iterator[ExpertKey]] = {}
        heads: dict[int, ExpertKey | None] = {}  # of layers that were asked, the next to leave

        def next_of(layers: Iterable[int]) -> list[ExpertKey]:
            for layer in layers:
                if layer not in heads:
                    order = self._orders[layer]
                    free[layer] = (key for key in order if key not in spared and not held[key])
                    heads[layer] = next(free[layer], None)
            return [key for layer in layers if (key := heads[layer]) is not None]

        while len(chosen) < n:
            candidates = next_of([layer for layer, excess in enumerate(over) if excess > 0])
            if not candidates and borrow:
                candidates = next_of(range(len(over)))
            if not candidates:
                return
            oldest = min(candidates, key=lambda key: self._orders[key.layer][key])
            heads[oldest.layer] = next(free[oldest.layer], None)
            over[oldest.layer] -= 1
            chosen.append(oldest)

    def _touch(self, key: ExpertKey) -> None:
        self._ticks += 1
        order = self._orders[key.layer]
        order[key] = self._ticks
        order.move_to_end(key)

    def _share_out(self) -> None:
        self.quotas = equal_quotas(self._experts, self._slots)


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
        self._stacks = [list(range(count)) for count in experts]  # a layer's experts, the last used first
        self._distances = [np.zeros(count) for count in experts]  # uses by place in the stack
        self._uses = np.zeros(len(experts))
        self._foretold = np.zeros(len(experts))  # uses that were wished for in the same step
        self._named: set[tuple[int, int]] = set()
        self._steps = 0
        self._next = self._FIRST

    def used(self, layer: int, experts: Sequence[int]) -> None:
        super().used(layer, experts)
        stack, distances = self._stacks[layer], self._distances[layer]
        for expert in experts:
            place = stack.index(expert)
            distances[place] += 1
            stack.insert(0, stack.pop(place))
            self._foretold[layer] += (layer, expert) in self._named
        self._uses[layer] += len(experts)

    def wished(self, wishes: Wishes) -> None:
        super().wished(wishes)
        self._named.update(zip(wishes.layers.tolist(), wishes.experts.tolist(), strict=True))

    def begin_step(self, request: int = 0) -> None:
        super().begin_step(request)
        self._named.clear()
        self._steps += 1
        if self._steps >= self._next:
            self._next += min(self._steps, self._OFTEN)
            self._share_out()
        self._uses *= self._MEMORY
        self._foretold *= self._MEMORY
        for uses in self._distances:
            uses *= self._MEMORY

    def gains(self) -> list[np.ndarray]:
        """For each layer, the loads that no slot, one, two and so on would have saved it, of late."""
        shown = 1 - self._HIDDEN * self._foretold / np.maximum(self._uses, 1)
        found = []
        for share, uses in zip(shown, self._distances, strict=True):
            unseen = self._HABIT / np.arange(1, len(uses) + 1)
            found.append(np.concatenate(([0.0], (share * uses + unseen).cumsum())))
        return found

    def _share_out(self) -> None:
        enough = self._steps >= self._FIRST
        self.quotas = best_quotas(self.gains(), self._slots) if enough else equal_quotas(self._experts, self._slots)
