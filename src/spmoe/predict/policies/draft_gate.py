"""Speculative expert prefetching: the draft's hidden states through the target's own gates.

The draft's residual stream after attention goes through the *target's* pre-FFN norm and gate of the layer at the same
relative depth, and first through a map fitted for that layer, if there is one. The experts that the gate selects are
requested, with the gate's weights as scores. Experts of layers beyond the cutoff are not fetched, but the predictions
still tell the eviction policy which residents to keep.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Self

import torch
from torch import Tensor

from spmoe.predict.policies._requests import requests_from_routing
from spmoe.predict.policies.base import Gates, Need, PolicyContext, PrefetchPolicy
from spmoe.predict.projection import HiddenStateProjection
from spmoe.registry import ON_DEMAND, PREFETCH_POLICIES
from spmoe.types import NO_PREFETCHES, LayerChunk, PrefetchRequests, Routing, Stage


@PREFETCH_POLICIES.register("draft-gate")
class DraftGate(PrefetchPolicy):
    """Requests the experts that the target's gates select for the draft's hidden states."""

    summary = "the draft's layers predict the experts of the target's layers"
    needs = frozenset({Need.DRAFT_STATES})
    stages = frozenset({Stage.PREFILL, Stage.DRAFT})
    uses_cutoff = True

    def __init__(
        self,
        gates: Gates,
        draft_depth: int,
        cutoff: int,
        projection: HiddenStateProjection | None = None,
        only: Collection[int] | None = None,
    ) -> None:
        """Predict the layers in `only`, or all; fetch for layers below `cutoff`."""
        self.cutoff = cutoff
        self._gates = gates
        self._projection = projection
        by_depth = layers_by_draft_depth(gates.layer_depths, gates.depth_count, draft_depth)
        self._layers_at = [[layer for layer in layers if only is None or layer in only] for layers in by_depth]

    @classmethod
    def build(cls, context: PolicyContext) -> Self:
        assert context.gates is not None
        assert context.draft_depth is not None
        cutoff = len(context.experts_per_layer) if context.cutoff is None else context.cutoff
        only = None if context.draft_routes else context.gated_layers
        return cls(context.gates, context.draft_depth, cutoff, context.projection, only)

    @classmethod
    def fallback(cls, context: PolicyContext) -> str | None:
        # n-grams, for example, have no hidden states: predict from the target's instead. In plain decoding that costs
        # more than it saves where most experts are resident
        return "next-gate" if context.drafting else ON_DEMAND

    def set_cutoff(self, layers: int) -> None:
        self.cutoff = layers

    def predict_routing(self, stage: Stage, depths: range, residual: Tensor) -> Routing | None:
        layers = [layer for depth in depths for layer in self._layers_at[depth]]
        if not layers:
            return None
        rows = [row for row, depth in enumerate(depths) for _ in self._layers_at[depth]]
        if rows != list(range(len(depths))):
            residual = torch.stack([residual[row] for row in rows])
        return self._gates.route(layers, residual if self._projection is None else self._projection(layers, residual))

    def on_chunk(self, chunk: LayerChunk) -> PrefetchRequests:
        layers = [layer for depth in chunk.depths for layer in self._layers_at[depth]]
        routing = self.routing_of(chunk)
        return NO_PREFETCHES if routing is None else requests_from_routing(layers, routing, self.cutoff)


def layers_by_draft_depth(layer_depths: Iterable[int], depth_count: int, draft_depth: int) -> list[list[int]]:
    """For each decoder layer of the draft, list the target's MoE layers nearest to it in relative depth."""
    layers: list[list[int]] = [[] for _ in range(draft_depth)]
    for layer, depth in enumerate(layer_depths):
        middle = (depth + 0.5) / depth_count
        layers[min(int(middle * draft_depth), draft_depth - 1)].append(layer)
    return layers
