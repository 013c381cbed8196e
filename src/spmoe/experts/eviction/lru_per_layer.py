"""Least recently used within each layer's quota of slots.

A quota is not a hard limit: a layer that needs more slots at once borrows those that other layers used least recently,
and returns them when the others need them. Experts predicted in this step are evicted last, and never for a prefetch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmoe.experts.eviction.lru import LeastRecentlyUsed
from spmoe.registry import EVICTION_POLICIES
from spmoe.types import ExpertKey


@EVICTION_POLICIES.register("lru-per-layer")
class EqualQuotas(LeastRecentlyUsed):
    """Gives every layer equally many slots.

    The number of slots to share out is the largest number of experts that were ever resident at once.
    """

    def __init__(self, experts_per_layer: Sequence[int]) -> None:
        super().__init__(experts_per_layer)
        self._experts_per_layer = tuple(experts_per_layer)
        self._total = 0  # resident experts
        self._excess = [0] * len(experts_per_layer)  # resident experts beyond the quota, by layer
        self._slots = 0
        self.quotas = [0] * len(experts_per_layer)

    def on_insert(self, key: ExpertKey) -> None:
        layer, expert = key
        number = layer * self.shape[1] + expert
        self._resident_bytes[number] = True
        self._ticks += 1
        self._last_touch_view[number] = self._ticks
        self._excess[layer] += 1
        self._total += 1
        if self._total > self._slots:
            self._grow()

    def on_remove(self, key: ExpertKey) -> None:
        layer, expert = key
        self._resident_bytes[layer * self.shape[1] + expert] = False
        self._excess[layer] -= 1
        self._total -= 1

    def score(self, key: ExpertKey) -> float:
        return 0.0

    def _select(self, n: int, free: np.ndarray, below: float, layer: int | None) -> list[int] | None:
        if n == 0:
            return []
        excess = self._excess.copy()
        if layer is not None:
            excess[layer] += n  # experts that are about to come count
        borrow = below == np.inf
        victims = self._oldest(n, excess, free > self._protected, borrow=borrow)
        if borrow and len(victims) < n:
            free.ravel()[victims] = False
            victims += self._oldest(n - len(victims), excess, free, borrow=True)
        return victims if len(victims) == n else None

    def _oldest(self, n: int, excess: list[int], free: np.ndarray, *, borrow: bool) -> list[int]:
        """Choose up to n free experts of layers over their quota, least recently used first.

        To borrow, choose the missing ones from all layers.
        """
        # free: bool [layers, experts], which is changed
        width, last_touch = self.shape[1], self._last_touch.ravel()
        over_quota = [layer for layer, count in enumerate(excess) if count > 0]
        if len(over_quota) == 1:
            numbers = over_quota[0] * width + free[over_quota[0]].nonzero()[0]
        else:
            numbers = (free & (np.array(excess) > 0)[:, None]).ravel().nonzero()[0]
        if n == 1 and len(numbers):
            return [int(numbers[last_touch[numbers].argmin()])]
        victims: list[int] = []
        for number in numbers[last_touch[numbers].argsort()].tolist():
            if excess[number // width] > 0:
                excess[number // width] -= 1
                victims.append(number)
                if len(victims) == n:
                    return victims
        if borrow:
            free.ravel()[victims] = False
            numbers = free.ravel().nonzero()[0]
            victims += numbers[last_touch[numbers].argsort()[: n - len(victims)]].tolist()
        return victims

    def _grow(self) -> None:
        self._slots = self._total
        self._update_quotas()

    def _update_quotas(self) -> None:
        before, self.quotas = self.quotas, self._compute_quotas()
        self._excess = [count + old - new for count, old, new in zip(self._excess, before, self.quotas, strict=True)]

    def _compute_quotas(self) -> list[int]:
        return equal_quotas(self._experts_per_layer, self._slots)


def equal_quotas(experts_per_layer: Sequence[int], slots: int) -> list[int]:
    """Share out slots equally, at most as many as a layer has experts; the first layers get those left over."""
    quotas = [0] * len(experts_per_layer)
    left = min(slots, sum(experts_per_layer))
    while left:
        growing = [layer for layer, count in enumerate(experts_per_layer) if quotas[layer] < count]
        share = max(1, min(left // len(growing), *(experts_per_layer[layer] - quotas[layer] for layer in growing)))
        for layer in growing[:left]:
            quotas[layer] += share
            left -= share
    return quotas
