"""Next-gate prediction several layers ahead, as deep as its predictions have lately been right."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Self

import numpy as np

from spmoe.predict.policies._requests import merge_requests, requests_from_routing
from spmoe.predict.policies.base import Gates, Need, PolicyContext
from spmoe.predict.policies.next_gate import NextGate
from spmoe.registry import PREFETCH_POLICIES
from spmoe.types import NO_PREFETCHES, LayerChunk, PrefetchRequests, Stage


@PREFETCH_POLICIES.register("adaptive")
class Adaptive(NextGate):
    """Requests experts of the next layer and of deeper layers whose predictions have lately been right.

    The queue serves nearer layers first, so requests for deeper layers only move once all nearer ones are loaded or
    being loaded.
    """

    summary = "the target's own layers predict the experts of up to three next layers"
    needs = frozenset({Need.TARGET_STATES, Need.ROUTING})
    learns = True
    eviction = "adaptive"
    MAX_DISTANCE = 3  # layers ahead that are predicted
    _MIN_PRECISION = 0.9  # share of right predictions that a distance needs
    _STEP_DECAY = 0.98  # weight of a step's predictions, one step later
    _PRIOR = 8.0  # predictions that count as wrong, to begin with

    def __init__(self, gates: Gates, only: Collection[int] | None = None) -> None:
        super().__init__(gates, ahead=self.MAX_DISTANCE, only=only)
        self._predicted = np.full(self.MAX_DISTANCE, self._PRIOR)  # experts, by distance
        self._right = np.zeros(self.MAX_DISTANCE)
        self._pending: dict[int, dict[int, frozenset[int]]] = {}  # this step's predictions, by layer and distance

    @classmethod
    def build(cls, context: PolicyContext) -> Self:
        assert context.gates is not None
        return cls(context.gates, context.gated_layers)

    @property
    def depth(self) -> int:
        """Number of layers ahead that are prefetched for; at least 1."""
        good = self._right / self._predicted >= self._MIN_PRECISION
        good[0] = True
        return int(np.logical_and.accumulate(good).sum())

    def begin_step(self, sequence_id: int) -> PrefetchRequests:
        self._pending.clear()
        self._predicted *= self._STEP_DECAY
        self._right *= self._STEP_DECAY
        return NO_PREFETCHES

    def on_chunk(self, chunk: LayerChunk) -> PrefetchRequests:
        if chunk.stage is not Stage.VERIFY or (routing := self.routing_of(chunk)) is None:
            return NO_PREFETCHES
        depth, start, found = self.depth, 0, NO_PREFETCHES
        for decoder_layer in chunk.depths:
            layers = self._next[decoder_layer]
            part = type(routing)(*(tensor[start : start + len(layers)] for tensor in routing))
            start += len(layers)
            requests = requests_from_routing(layers, part, fetch_below=len(self._next))
            ends = requests.layers.searchsorted(layers, side="right").tolist()  # requests come layer after layer
            experts, begin = requests.experts.tolist(), 0
            for distance, (layer, end) in enumerate(zip(layers, ends, strict=True)):
                known = self._pending.setdefault(layer, {})
                known[distance] = known.get(distance, frozenset()).union(experts[begin:end])
                begin = end
            found = merge_requests(found, requests.where(slice(0, ends[min(depth, len(ends)) - 1] if ends else 0)))
        return found

    def on_routed(self, layer: int, experts: Sequence[int]) -> PrefetchRequests:
        routed = frozenset(experts)
        for distance, predicted in self._pending.pop(layer, {}).items():
            self._predicted[distance] += len(predicted)
            self._right[distance] += len(predicted & routed)
        return NO_PREFETCHES
