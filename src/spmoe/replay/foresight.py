"""Foresight: what each prefetch policy prefetch requests for, and when, from what a trace has recorded.

A policy is asked when a step begins, for every chunk of the draft, and for every layer of the target. New ones are
added to `POLICIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from spmoe.errors import UsageError
from spmoe.predict.policies import activation, adaptive
from spmoe.predict.policies.next_gate import even_share
from spmoe.replay.steps import ChunkPlan, ForwardPlan, Prediction, StepPlan
from spmoe.types import LayerChunk, PrefetchRequests, Routing, Stage


class ReplayPolicy:
    """On demand: prefetch requests for nothing. Others say more."""

    uses_draft = False  # what the draft foretells, which a cutoff bounds
    follows = False  # what routers choose

    def __init__(self, layers: int, width: int) -> None:
        self.layers, self.width = layers, width

    def prepare(self, steps: Sequence[StepPlan]) -> None:
        """Before the first of these steps: note with them what does not depend on how they are replayed."""

    def at_begin(self, step: StepPlan) -> Prediction | None:
        """Before the draft runs."""
        return None

    def at_slab(self, chunk: ChunkPlan) -> Prediction | None:
        """When the draft has run some layers."""
        return None

    def at_layer(self, forward: ForwardPlan, layer: int) -> Prediction | None:
        """When the target has reached a layer's gate."""
        return None

    def at_routed(self, layer: int, needed: list[int]) -> Prediction | None:
        """When a layer's router has chosen, and what is missing has been demanded."""
        return None


class DraftGate(ReplayPolicy):
    """What the draft's states foretell."""

    uses_draft = True

    def at_slab(self, chunk: ChunkPlan) -> Prediction | None:
        return chunk.prefetches


class NextGate(ReplayPolicy):
    """What the target's own states foretell of the next layer."""

    def at_layer(self, forward: ForwardPlan, layer: int) -> Prediction | None:
        return forward.ahead[layer]


class DraftAndNextGate(DraftGate, NextGate):
    """The draft's word first, then the target's own, where that is clear."""

    def at_layer(self, forward: ForwardPlan, layer: int) -> Prediction | None:
        if forward.clear is None:
            forward.clear = [self._clear(told, forward.ahead_experts.shape[-1]) for told in forward.ahead]
        return forward.clear[layer]

    def _clear(self, told: Prediction | None, top_k: int) -> Prediction | None:
        if told is None:
            return None
        return from_wishes(told.prefetches.where(told.prefetches.scores >= even_share(top_k)), self.width)


class Scripted(ReplayPolicy):
    """What a policy says of each step, one time after the other, whatever comes of it: it is asked once, for all."""

    name: str

    def prepare(self, steps: Sequence[StepPlan]) -> None:
        if any(self.name not in step.said for step in steps):
            for step in steps:
                step.said[self.name] = list(self._say(step))

    def at_begin(self, step: StepPlan) -> Prediction | None:
        self._said = iter(step.said[self.name])
        return None

    def _say(self, step: StepPlan) -> Iterator[Prediction | None]:
        """In the order in which it is asked; of steps one after the other."""
        raise NotImplementedError


class Oracle(Scripted):
    """All that a step will need, known when it begins."""

    name = "oracle"

    def at_begin(self, step: StepPlan) -> Prediction | None:
        return step.said[self.name][0]

    def _say(self, step: StepPlan) -> Iterator[Prediction | None]:
        keys = np.array(sorted({key for forward in step.forwards for layer in forward.needed for key in layer}))
        yield Prediction.of(keys, np.ones(len(keys)), self.width)


class PerfectDraft(Scripted):
    """What the draft would foretell if it were never wrong: of a row when its pass is over, at the end of the last too.

    No prediction from the draft can know more, or know it sooner.
    """

    name = "perfect-draft"
    uses_draft = True

    def at_slab(self, chunk: ChunkPlan) -> Prediction | None:
        return next(self._said)

    def _say(self, step: StepPlan) -> Iterator[Prediction | None]:
        if not step.drafted:  # a prompt, which the draft has read too
            yield from (chunk.prefetches for chunk in step.chunks)
            return
        told, chosen, all_told = 0, step.forwards[-1].chosen, step.drafted * self.layers
        if sum(chunk.layers for chunk in step.chunks) != all_told:
            raise UsageError("the trace's draft does not speak of every layer, so perfect-draft cannot be replayed")
        for chunk in step.chunks:
            row, first = divmod(told, self.layers)
            told += chunk.layers
            keys = self._keys(chosen[row, first : first + chunk.layers], first)
            if told == all_told:  # what no pass is made for is known no later
                keys = np.union1d(keys, self._keys(chosen[row + 1 :], 0))
            yield Prediction.of(keys, np.ones(len(keys)), self.width)

    def _keys(self, chosen: np.ndarray, first: int) -> np.ndarray:
        """Expert numbers of what rows chose in layers from this one on."""  # chosen: [.., layers, top_k]
        numbers = chosen + self.width * np.arange(first, first + chosen.shape[-2])[:, None]
        return np.unique(numbers[chosen >= 0])


class Activation(Scripted):
    """The live policy: what requests like this one went on to use, by what it has used so far."""

    name = "activation"
    follows = True

    def __init__(self, layers: int, width: int) -> None:
        super().__init__(layers, width)
        self._live = activation.Activation((width,) * layers)

    def at_begin(self, step: StepPlan) -> Prediction | None:
        super().at_begin(step)
        return next(self._said)

    def at_routed(self, layer: int, needed: list[int]) -> Prediction | None:
        return next(self._said)

    def _say(self, step: StepPlan) -> Iterator[Prediction | None]:
        yield from_wishes(self._live.begin_step(step.request), self.width)
        for forward in step.forwards:
            for layer, needed in enumerate(forward.needed):
                yield from_wishes(self._live.on_routed(layer, [key % self.width for key in needed]), self.width)


class Adaptive(Scripted):
    """The live policy: as many layers ahead as such guesses have come true of late."""

    name = "adaptive"

    def __init__(self, layers: int, width: int) -> None:
        super().__init__(layers, width)
        self._live = adaptive.Adaptive(_NoGates(layers))

    def at_layer(self, forward: ForwardPlan, layer: int) -> Prediction | None:
        return next(self._said)

    def _say(self, step: StepPlan) -> Iterator[Prediction | None]:
        self._live.begin_step(step.request)
        for forward in step.forwards:
            for layer, needed in enumerate(forward.needed):
                yield self._ahead(forward, layer)
                self._live.on_routed(layer, [key % self.width for key in needed])

    def _ahead(self, forward: ForwardPlan, layer: int) -> Prediction | None:
        deepest = self._live.MAX_DISTANCE
        if forward.ahead_experts.shape[1] < deepest:
            raise UsageError(f"the trace looks fewer than {deepest} layers ahead, as adaptive does; record it anew")
        later = min(deepest, self.layers - layer - 1)
        experts, scores = forward.ahead_experts[layer, :later], forward.ahead_scores[layer, :later]
        if not later or experts[0, 0, 0] < 0:
            return None
        routing = Routing(torch.from_numpy(experts.astype(np.int64)), torch.from_numpy(scores.astype(np.float32)))
        seen = LayerChunk(Stage.VERIFY, range(layer, layer + 1), self.layers, routing.scores, routing)
        return from_wishes(self._live.on_chunk(seen), self.width)


class _NoGates:
    """Where layers are; nobody asks them anything."""

    hidden_size = 0

    def __init__(self, layers: int) -> None:
        self.layer_depths: Sequence[int] = range(layers)
        self.depth_count = layers

    def route(self, layers: Sequence[int], residual: torch.Tensor) -> Routing:
        raise NotImplementedError("everything was asked when the trace was recorded")


def from_wishes(prefetches: PrefetchRequests, width: int) -> Prediction | None:
    """A live policy's prefetch requests as a replay takes them."""
    return Prediction.told(prefetches, width) if len(prefetches) else None


Maker = Callable[[int, int], ReplayPolicy]

POLICIES: dict[str, Maker] = {
    "on-demand": ReplayPolicy,
    "draft-gate": DraftGate,
    "next-gate": NextGate,
    "draft-gate+next-gate": DraftAndNextGate,
    "activation": Activation,
    "adaptive": Adaptive,
    "perfect-draft": PerfectDraft,
    "oracle": Oracle,
}


def make_replay_policy(name: str, layers: int, width: int) -> ReplayPolicy:
    """The policy of this name."""
    if name not in POLICIES:
        raise UsageError(f"prefetch must be one of {', '.join(POLICIES)}, not {name!r}")
    return POLICIES[name](layers, width)
