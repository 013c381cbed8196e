"""The target's own signals: a layer's residual stream through the gates of the layers that come next.

It needs no draft and comes late: one layer ahead, what is predicted has as long to move as that layer takes. With a
draft it corrects, layer by layer, what the draft foretold.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from spmoe.predict.base import Gates, PrefetchPolicy
from spmoe.predict.draft_gate import DraftGate, prefetches
from spmoe.types import NO_PREFETCHES, DraftOutcome, LayerChunk, PrefetchRequests, Routing, Stage


class NextGate(PrefetchPolicy):
    """Prefetch requests for what the next layers' gates make of this layer's states."""

    name = "next-gate"
    stages = frozenset({Stage.VERIFY})

    def __init__(
        self, gates: Gates, ahead: int = 1, only: Collection[int] | None = None, *, sure: bool = False
    ) -> None:
        # only: the layers that are predicted; None: all. sure: without what has less than an even share of every row
        self._gates = gates
        self._sure = sure
        depths = list(gates.layer_depths)
        self._next = [  # of each decoder layer, the MoE layers that come next
            [layer for layer, at in enumerate(depths) if at > depth][:ahead] for depth in range(gates.depth_count)
        ]
        if only is not None:
            self._next = [[layer for layer in layers if layer in only] for layers in self._next]

    def ask(self, stage: Stage, depths: range, residual: Tensor) -> Routing | None:
        rows = [row for row, depth in enumerate(depths) for _ in self._next[depth]]
        if stage is not Stage.VERIFY or not rows:
            return None
        # stacked, not indexed by a list, which would be copied to the device while a forward is recorded
        return self._gates.route(self._layers(depths), torch.stack([residual[row] for row in rows]))

    def on_chunk(self, seen: LayerChunk) -> PrefetchRequests:
        if seen.stage is not Stage.VERIFY:
            return NO_PREFETCHES
        routing = seen.routing or self.ask(seen.stage, seen.depths, seen.residual)
        if routing is None:
            return NO_PREFETCHES
        least = even_share(routing.experts.shape[-1]) if self._sure else -np.inf
        if len(layers := self._layers(seen.depths)) == 1:
            return prefetches_of_one_layer(layers[0], routing, least)
        found = prefetches(layers, routing, fetch_below=len(self._next))
        return found.where(found.scores >= least)

    def _layers(self, depths: range) -> list[int]:
        return [layer for depth in depths for layer in self._next[depth]]


def even_share(top_k: int) -> float:
    """The score of each when a row's experts count alike."""
    return 1 / top_k


def prefetches_of_one_layer(layer: int, routing: Routing, least: float) -> PrefetchRequests:
    """What rows send to one layer's experts with at least this score; for so few, columns from the start are slower."""
    best: dict[int, float] = {}
    for expert, score in zip(routing.experts.reshape(-1).tolist(), routing.scores.reshape(-1).tolist(), strict=True):
        if score >= least and score > best.get(expert, -np.inf):
            best[expert] = score
    count = len(best)
    layers = np.full(count, layer)
    experts, scores = np.fromiter(best.keys(), np.int64, count), np.fromiter(best.values(), np.float64, count)
    return PrefetchRequests(layers, experts, scores, layers, np.ones(count, dtype=bool))


class CombinedPolicy(PrefetchPolicy):
    """The draft's word first, and the target's own signals, where those are clear, as its pass proceeds.

    What they are not sure of comes too late to be worth a copy that others wait behind: with everything they name it
    was up to 5 % slower than without them, with what has an even share at least it is 1 % slower to 1 % faster.
    """

    def __init__(self, first: PrefetchPolicy, second: PrefetchPolicy) -> None:
        self.first, self.second = first, second
        self.name = f"{first.name}+{second.name}"
        self.stages = first.stages | second.stages

    def begin_step(self, sequence_id: int) -> PrefetchRequests:
        return merge_prefetches(self.first.begin_step(sequence_id), self.second.begin_step(sequence_id))

    def ask(self, stage: Stage, depths: range, residual: Tensor) -> Routing | None:
        return self._for(stage).ask(stage, depths, residual)

    def on_chunk(self, seen: LayerChunk) -> PrefetchRequests:
        return self._for(seen.stage).on_chunk(seen)

    def on_routed(self, layer: int, experts: Sequence[int]) -> PrefetchRequests:
        return merge_prefetches(self.first.on_routed(layer, experts), self.second.on_routed(layer, experts))

    def on_accept(self, accepted: DraftOutcome) -> None:
        self.first.on_accept(accepted)
        self.second.on_accept(accepted)

    def _for(self, stage: Stage) -> PrefetchPolicy:
        return self.first if stage in self.first.stages else self.second


def merge_prefetches(one: PrefetchRequests, other: PrefetchRequests) -> PrefetchRequests:
    """The prefetch requests of both."""
    return PrefetchRequests.of([*one, *other]) if len(one) and len(other) else one if len(one) else other


def draft_gate_part(policy: PrefetchPolicy) -> DraftGate | None:
    """The part of a policy that predicts from the draft, if there is one."""
    part = policy.first if isinstance(policy, CombinedPolicy) else policy
    return part if isinstance(part, DraftGate) else None
