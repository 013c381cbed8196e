"""Prefetching from whatever predicts experts and pays; every prefetch is admitted only if it is worth its copy.

The draft's layers predict early, so they are used wherever there is a draft model that the target's gates understand.
The target's own layers predict one layer ahead: that pays only if a copy is faster than a layer.
"""

from __future__ import annotations

from typing import Self

from spmoe.predict.policies._combined import CombinedPolicy
from spmoe.predict.policies.base import Need, PolicyContext, PrefetchPolicy
from spmoe.predict.policies.draft_gate import DraftGate
from spmoe.predict.policies.next_gate import NextGate
from spmoe.registry import ON_DEMAND, PREFETCH_POLICIES
from spmoe.types import Stage

_MIN_COPIES_PER_LAYER = 1.0  # that fit in a layer's time, for predictions one layer ahead


@PREFETCH_POLICIES.register("auto")
class Auto(CombinedPolicy):
    """Predicts with draft-gate, next-gate or not at all."""

    summary = "predictions from what is there; experts are prefetched only if that is expected to save time"
    needs = frozenset[Need]()
    stages = frozenset[Stage]()
    uses_cutoff = True
    admits = True

    @classmethod
    def build(cls, context: PolicyContext) -> Self:
        return cls([part.build(context) for part in choose_sources(context)])

    @classmethod
    def sources(cls, context: PolicyContext) -> tuple[str, ...]:
        return tuple(part.name for part in choose_sources(context)) or (ON_DEMAND,)


def choose_sources(context: PolicyContext) -> list[type[PrefetchPolicy]]:
    """Return the policies whose predictions are there and pay."""
    if Need.DRAFT_STATES not in context.unmet:
        return [DraftGate]  # beside it, next-gate has changed the time of steps by less than 1 %, either way
    copies = context.copies_per_layer
    if Need.TARGET_STATES not in context.unmet and copies is not None and copies >= _MIN_COPIES_PER_LAYER:
        return [NextGate]
    return []
