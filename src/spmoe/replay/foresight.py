"""Foresight: what each prefetch policy wishes for, and when, from what a trace has recorded.

A policy is asked when a step begins, for every slab of the draft, and for every layer of the target. New ones are
added to `POLICIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from spmoe.errors import UsageError
from spmoe.predict import activation, adaptive
from spmoe.predict.next_gate import even_share
from spmoe.replay.steps import Foretold, ForwardPlan, SlabPlan, StepPlan
from spmoe.types import Routing, Seen, Stage, Wishes


class Foresight:
    """On demand: wishes for nothing. Others say more."""

    uses_draft = False  # what the draft foretells, which a cutoff bounds

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

    def at_routed(self, layer: int, needed: list[int]) -> Foretold | None:
        """When a layer's router has chosen, and what is missing has been demanded."""
        return None


class DraftGate(Foresight):
    """What the draft's states foretell."""

    uses_draft = True

    def at_slab(self, slab: SlabPlan) -> Foretold | None:
        return slab.wishes


class NextGate(Foresight):
    """What the target's own states foretell of the next layer."""

    def at_layer(self, forward: ForwardPlan, layer: int) -> Foretold | None:
        return forward.ahead[layer]


class DraftAndNextGate(DraftGate, NextGate):
    """The draft's word first, then the target's own, where that is clear."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__(layers, width)
        self._clear: dict[int, Foretold | None] = {}  # of what was foretold, by its identity: plans stay

    def at_layer(self, forward: ForwardPlan, layer: int) -> Foretold | None:
        if (told := forward.ahead[layer]) is None:
            return None
        if id(told) not in self._clear:
            clear = told.wishes.scores >= even_share(forward.ahead_experts.shape[-1])
            self._clear[id(told)] = from_wishes(told.wishes.where(clear), self.width)
        return self._clear[id(told)]


class Oracle(Foresight):
    """All that a step will need, known when it begins."""

    def at_begin(self, step: StepPlan) -> Foretold | None:
        keys = np.array(sorted({key for forward in step.forwards for layer in forward.needed for key in layer}))
        return Foretold.of(keys, np.ones(len(keys)), self.width)


class Activation(Foresight):
    """The live policy: what requests like this one went on to use, by what it has used so far."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__(layers, width)
        self._live = activation.Activation((width,) * layers)

    def at_begin(self, step: StepPlan) -> Foretold | None:
        return from_wishes(self._live.begin_step(step.request), self.width)

    def at_routed(self, layer: int, needed: list[int]) -> Foretold | None:
        return from_wishes(self._live.on_routed(layer, [key % self.width for key in needed]), self.width)


class Adaptive(Foresight):
    """The live policy: as many layers ahead as such guesses have come true of late."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__(layers, width)
        self._live = adaptive.Adaptive(_NoGates(layers))

    def at_begin(self, step: StepPlan) -> Foretold | None:
        return from_wishes(self._live.begin_step(step.request), self.width)

    def at_layer(self, forward: ForwardPlan, layer: int) -> Foretold | None:
        deepest = self._live._DEEPEST
        if forward.ahead_experts.shape[1] < deepest:
            raise UsageError(f"the trace looks fewer than {deepest} layers ahead, as adaptive does; record it anew")
        later = min(deepest, self.layers - layer - 1)
        experts, scores = forward.ahead_experts[layer, :later], forward.ahead_scores[layer, :later]
        if not later or experts[0, 0, 0] < 0:
            return None
        routing = Routing(torch.from_numpy(experts.astype(np.int64)), torch.from_numpy(scores.astype(np.float32)))
        seen = Seen(Stage.VERIFY, range(layer, layer + 1), self.layers, routing.scores, routing)
        return from_wishes(self._live.on_seen(seen), self.width)

    def at_routed(self, layer: int, needed: list[int]) -> Foretold | None:
        return from_wishes(self._live.on_routed(layer, [key % self.width for key in needed]), self.width)


class _NoGates:
    """Where layers are; nobody asks them anything."""

    hidden_size = 0

    def __init__(self, layers: int) -> None:
        self.layer_depths: Sequence[int] = range(layers)
        self.depth_count = layers

    def route(self, layers: Sequence[int], residual: torch.Tensor) -> Routing:
        raise NotImplementedError("everything was asked when the trace was recorded")


def from_wishes(wishes: Wishes, width: int) -> Foretold | None:
    """A live policy's wishes as a replay takes them."""
    return Foretold.told(wishes, width) if len(wishes) else None


Maker = Callable[[int, int], Foresight]

POLICIES: dict[str, Maker] = {
    "on-demand": Foresight,
    "draft-gate": DraftGate,
    "next-gate": NextGate,
    "draft-gate+next-gate": DraftAndNextGate,
    "activation": Activation,
    "adaptive": Adaptive,
    "oracle": Oracle,
}


def make_foresight(name: str, layers: int, width: int) -> Foresight:
    """The policy of this name."""
    if name not in POLICIES:
        raise UsageError(f"prefetch must be one of {', '.join(POLICIES)}, not {name!r}")
    return POLICIES[name](layers, width)
