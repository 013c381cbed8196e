"""Several prefetch policies that run side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from spmoe.predict.policies._requests import merge_requests
from spmoe.predict.policies.base import PrefetchPolicy
from spmoe.types import NO_PREFETCHES, DraftOutcome, LayerChunk, PrefetchRequests, Routing, Stage


class CombinedPolicy(PrefetchPolicy):
    """Shows everything to each of its parts and merges their requests.

    Parts that are shown the same stage must predict equally many experts per row.
    """

    def __init__(self, parts: Sequence[PrefetchPolicy]) -> None:
        self.parts = tuple(parts)
        if type(self) is CombinedPolicy:  # a subclass has a name of its own
            self.name = "+".join(part.name for part in parts)
        self.stages = frozenset().union(*(part.stages for part in parts))
        self.uses_cutoff = any(part.uses_cutoff for part in parts)
        self.admits = self.admits or any(part.admits for part in parts)
        self.uses_step_budget = any(part.uses_step_budget for part in parts)
        self.learns = any(part.learns for part in parts)
        self._shown = {stage: [part for part in parts if stage in part.stages] for stage in Stage}
        self._layer_counts: dict[tuple[Stage, range], list[int]] = {}  # of each part's routing; where several share one

    def begin_step(self, sequence_id: int) -> PrefetchRequests:
        return _merge_all([part.begin_step(sequence_id) for part in self.parts])

    def predict_routing(self, stage: Stage, depths: range, residual: Tensor) -> Routing | None:
        parts = self._shown[stage]
        if len(parts) == 1:
            return parts[0].predict_routing(stage, depths, residual)
        found = [part.predict_routing(stage, depths, residual) for part in parts]
        self._layer_counts[stage, depths] = [0 if routing is None else len(routing.experts) for routing in found]
        present = [routing for routing in found if routing is not None]
        if not present:
            return None
        return Routing(torch.cat([r.experts for r in present]), torch.cat([r.scores for r in present]))

    def on_chunk(self, chunk: LayerChunk) -> PrefetchRequests:
        parts = self._shown[chunk.stage]
        if len(parts) == 1:
            return parts[0].on_chunk(chunk)
        if chunk.routing is None:
            return _merge_all([part.on_chunk(chunk) for part in parts])
        found, start = [], 0
        for part, count in zip(parts, self._layer_counts[chunk.stage, chunk.depths], strict=True):
            if count:
                own = Routing(*(tensor[start : start + count] for tensor in chunk.routing))
                found.append(part.on_chunk(replace(chunk, routing=own)))
                start += count
        return _merge_all(found)

    def on_routed(self, layer: int, experts: Sequence[int]) -> PrefetchRequests:
        return _merge_all([part.on_routed(layer, experts) for part in self.parts])

    def on_accept(self, outcome: DraftOutcome) -> None:
        for part in self.parts:
            part.on_accept(outcome)

    def set_cutoff(self, layers: int) -> None:
        for part in self.parts:
            part.set_cutoff(layers)


def _merge_all(found: list[PrefetchRequests]) -> PrefetchRequests:
    return reduce(merge_requests, found, NO_PREFETCHES)
