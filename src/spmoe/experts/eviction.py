"""Eviction: which resident expert is missed least. The contract, and the rules by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from spmoe.experts.activation_aware import ActivationAware
from spmoe.experts.draft_informed import DraftInformed
from spmoe.experts.frequency import FrequencyOverRecency, LeastFrequentlyUsed
from spmoe.experts.lru import LeastRecentlyUsed
from spmoe.experts.quotas import AdaptiveQuotas, EqualQuotas
from spmoe.types import ExpertKey, PrefetchRequests


class Eviction(Protocol):
    """Told of everything that happens to experts; asked for victims. `below` bounds the worth of a victim."""

    shape: tuple[int, int]  # layers, and experts of the layer that has most

    def on_insert(self, key: ExpertKey) -> None: ...

    def on_remove(self, key: ExpertKey) -> None: ...

    def on_use(self, layer: int, experts: Sequence[int]) -> None:
        """These of a layer, one at least, which have slots, are needed."""
        ...

    def on_prompt(self, layer: int, experts: Sequence[int], shares: Sequence[float]) -> None:
        """These of a layer were chosen by such shares of many rows, a prompt or a part of it."""
        ...

    def on_prefetches(self, prefetches: PrefetchRequests) -> None:
        """What one pass of the draft says of a chunk of layers."""
        ...

    def on_layer(self, layer: int) -> None:
        """The pass is about to run this layer."""
        ...

    def begin_step(self, sequence_id: int = 0) -> None:
        """A step of this request begins; its first one reads the prompt."""
        ...

    def worth(self, key: ExpertKey) -> float:
        """What a wished key may push out: only residents worth less."""
        ...

    def victims(self, n: int, held: np.ndarray, below: float, layer: int | None = None) -> list[ExpertKey] | None:
        """Exactly n resident keys, none of them held and each worth less than `below`, or None; changes nothing.

        `layer` is the one whose experts want the slots. Without a bound there is always an answer if there are n keys.
        """
        # held: bool [layers, experts]
        ...

    # ---- the same for several at once, by their numbers: expert e of layer l is l * experts + e

    def demanded(self, layer: int, experts: Sequence[int]) -> None:
        """These of a layer were `inserted`, one after the other, and are `used`."""
        ...

    def gone(self, numbers: Sequence[int]) -> None:
        """All of these were `removed`."""
        ...

    def leaving(self, n: int, free: np.ndarray, below: float, layer: int | None = None) -> list[int] | None:
        """As `victims`, of those that are free: resident, and not held. What is free may be changed."""
        # free: bool [layers, experts]
        ...


_RULES: dict[str, Callable[[Sequence[int]], Eviction]] = {
    "activation": ActivationAware,
    "adaptive": AdaptiveQuotas,
    "draft-informed": DraftInformed,
    "lfru": FrequencyOverRecency,
    "lfu": LeastFrequentlyUsed,
    "lru": LeastRecentlyUsed,
    "lru-per-layer": EqualQuotas,
}


def make_eviction(name: str, experts: Sequence[int]) -> Eviction:
    """The eviction rule of this name, for layers with these numbers of experts."""
    return _RULES[name](experts)
