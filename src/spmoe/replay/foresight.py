"""Foresight: what each prefetch policy wishes for, and when, from what a trace has recorded.

A policy is asked when a step begins, for every slab of the draft, and for every layer of the target. New ones are
added to `POLICIES`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from spmoe.errors import UsageError
from spmoe.replay.steps import Foretold, ForwardPlan, SlabPlan, StepPlan


class Foresight:
    """On demand: wishes for nothing. Others say more."""

    uses_draft = False  # what the draft foretells, which a cutoff bounds and one more pass completes

    def __init__(self, layers: int, width: int) -> None:
        self.layers, self.width = layers, width

    def at_begin(self, step: StepPlan) -> Foretold | None:
        """Before the draft runs."""
        return None

    def at_slab(self, slab: SlabPlan) -> Foretold | None:
        """When the draft has run some layers."""
        return None

    def at_layer(self, forward: ForwardPlan, layer: int) -> Foretold | None:
        """When the target has reached a layer's gate."""
        return None

    def at_end(self, step: StepPlan) -> None:
        """The step is over."""


class DraftGate(Foresight):
    """What the draft's states foretell."""

    uses_draft = True

    def at_slab(self, slab: SlabPlan) -> Foretold | None:
        return slab.wishes


class NextGate(Foresight):
    """What the target's own states foretell of the next layer."""

    def at_layer(self, forward: ForwardPlan, layer: int) -> Foretold | None:
        return forward.ahead[0][layer] if forward.ahead else None


class DraftAndNextGate(DraftGate, NextGate):
    """The draft's word first, then the target's own."""


class Oracle(Foresight):
    """All that a step will need, known when it begins."""

    def at_begin(self, step: StepPlan) -> Foretold | None:
        keys = sorted({key for forward in step.forwards for layer in forward.needed for key in layer})
        layers = np.unique(np.array(keys) // self.width)
        return Foretold(np.array(keys), np.ones(len(keys)), layers, [(key // self.width, -1.0, key) for key in keys])


Maker = Callable[[int, int], Foresight]

POLICIES: dict[str, Maker] = {
    "on-demand": Foresight,
    "draft-gate": DraftGate,
    "next-gate": NextGate,
    "draft-gate+next-gate": DraftAndNextGate,
    "oracle": Oracle,
}


def make_foresight(name: str, layers: int, width: int) -> Foresight:
    """The policy of this name."""
    if name not in POLICIES:
        raise UsageError(f"prefetch must be one of {', '.join(POLICIES)}, not {name!r}")
    return POLICIES[name](layers, width)
