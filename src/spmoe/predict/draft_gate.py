"""Speculative expert prefetching: the draft's hidden states through the target's own gates.

The draft's residual stream after attention, normalised by the *target's* pre-FFN norm, goes to the target's gate of the
layer at the same relative depth, through a map fitted for that layer where there is one. The experts that gate picks
are wished for, scored by the weight it gives them. For layers beyond the cutoff nothing is fetched, but what is
predicted there is worth keeping if it is resident.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from spmoe.predict.base import Gates, PrefetchPolicy
from spmoe.predict.projection import HiddenStateProjection
from spmoe.types import NO_PREFETCHES, LayerChunk, PrefetchRequests, Routing, Stage


class DraftGate(PrefetchPolicy):
    """Prefetch requests for what the draft's states route to; beyond the cutoff only to be kept, not to be fetched."""

    name = "draft-gate"
    stages = frozenset({Stage.PREFILL, Stage.DRAFT})

    def __init__(
        self,
        gates: Gates,
        draft_depth: int,
        cutoff: int,
        projection: HiddenStateProjection | None = None,
        only: Collection[int] | None = None,  # the layers that are predicted; None: all
    ) -> None:
        self.cutoff = cutoff  # layers, counted from the first, that may be prefetched for
        self._gates = gates
        self._projection = projection
        by_depth = layers_by_draft_depth(gates.layer_depths, gates.depth_count, draft_depth)
        self._layers_at = [[layer for layer in layers if only is None or layer in only] for layers in by_depth]

    def ask(self, stage: Stage, depths: range, residual: Tensor) -> Routing | None:
        layers = [layer for depth in depths for layer in self._layers_at[depth]]
        if not layers:
            return None
        rows = [row for row, depth in enumerate(depths) for _ in self._layers_at[depth]]
        if rows != list(range(len(depths))):
            residual = torch.stack([residual[row] for row in rows])
        return self._gates.route(layers, residual if self._projection is None else self._projection(layers, residual))

    def on_chunk(self, seen: LayerChunk) -> PrefetchRequests:
        layers = [layer for depth in seen.depths for layer in self._layers_at[depth]]
        routing = seen.routing if seen.routing is not None else self.ask(seen.stage, seen.depths, seen.residual)
        return NO_PREFETCHES if routing is None else prefetches(layers, routing, self.cutoff)


def prefetches(layers: Sequence[int], routing: Routing, fetch_below: int) -> PrefetchRequests:
    """One prefetch request per expert that any row is sent to, with the best score; from that layer on only to be kept."""
    experts, scores = routing.experts.numpy(force=True), routing.scores.numpy(force=True)  # [layers, rows, top_k]
    count, rows, top_k = experts.shape
    each = np.repeat(np.asarray(layers, dtype=np.int64), rows * top_k)
    named, score = experts.reshape(-1).astype(np.int64), scores.reshape(-1).astype(np.float64)
    if rows > 1:
        width = int(named.max()) + 1
        places = np.repeat(np.arange(count), rows * top_k) * width + named
        best = np.full(count * width, -1.0)
        np.maximum.at(best, places, score)
        first = np.full(count * width, -1)
        first[places[::-1]] = np.arange(len(places) - 1, -1, -1)  # of several that name an expert the first stays
        first = np.sort(first[first >= 0])  # as they were named
        each, named, score = each[first], named[first], best[places[first]]
    return PrefetchRequests(each, named, score, each, each < fetch_below)


def layers_by_draft_depth(layer_depths: Iterable[int], depth_count: int, draft_depth: int) -> list[list[int]]:
    """For each decoder layer of the draft, the target's MoE layers nearest to it in relative depth."""
    layers: list[list[int]] = [[] for _ in range(draft_depth)]
    for layer, depth in enumerate(layer_depths):
        middle = (depth + 0.5) / depth_count
        layers[min(int(middle * draft_depth), draft_depth - 1)].append(layer)
    return layers
