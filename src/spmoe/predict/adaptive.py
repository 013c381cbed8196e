"""Next-gate prediction as deep as it proves right: several layers ahead, each distance believed by its own record."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from spmoe.predict.base import Gates
from spmoe.predict.draft_gate import prefetches
from spmoe.predict.next_gate import NextGate, merge_prefetches
from spmoe.types import NO_PREFETCHES, LayerChunk, PrefetchRequests, Stage


class Adaptive(NextGate):
    """Prefetch requests for the next layer and, as far as guesses over that distance came true of late, for those behind it.

    The queue serves nearer layers first, so deeper prefetch requests only move while all that is nearer is there or on its way.
    """

    name = "adaptive"
    _DEEPEST = 3  # layers ahead that are guessed at
    _ENOUGH = 0.9  # of the guesses over a distance must have come true
    _MEMORY = 0.98  # of a step, one step later
    _DOUBT = 8.0  # guesses that count as wrong, to begin with

    def __init__(self, gates: Gates, only: Collection[int] | None = None) -> None:
        super().__init__(gates, ahead=self._DEEPEST, only=only)
        self._given = np.full(self._DEEPEST, self._DOUBT)  # guesses, by distance
        self._true = np.zeros(self._DEEPEST)
        self._guessed: dict[int, dict[int, frozenset[int]]] = {}  # by layer and distance, in this step

    @property
    def depth(self) -> int:
        """How many layers ahead are prefetched for; the next one always is."""
        good = self._true / self._given >= self._ENOUGH
        good[0] = True
        return int(np.logical_and.accumulate(good).sum())

    def begin_step(self, sequence_id: int) -> PrefetchRequests:
        self._guessed.clear()
        self._given *= self._MEMORY
        self._true *= self._MEMORY
        return NO_PREFETCHES

    def on_chunk(self, seen: LayerChunk) -> PrefetchRequests:
        if seen.stage is not Stage.VERIFY:
            return NO_PREFETCHES
        routing = seen.routing or self.ask(seen.stage, seen.depths, seen.residual)
        if routing is None:
            return NO_PREFETCHES
        depth, start, found = self.depth, 0, NO_PREFETCHES
        for place in seen.depths:
            layers = self._next[place]
            part = type(routing)(*(answer[start : start + len(layers)] for answer in routing))
            start += len(layers)
            guessed = prefetches(layers, part, fetch_below=len(self._next))
            ends = guessed.layers.searchsorted(layers, side="right").tolist()  # they are named layer after layer
            experts, begin = guessed.experts.tolist(), 0
            for distance, (layer, end) in enumerate(zip(layers, ends, strict=True)):
                known = self._guessed.setdefault(layer, {})
                known[distance] = known.get(distance, frozenset()).union(experts[begin:end])
                begin = end
            found = merge_prefetches(found, guessed.where(slice(0, ends[min(depth, len(ends)) - 1] if ends else 0)))
        return found

    def on_routed(self, layer: int, experts: Sequence[int]) -> PrefetchRequests:
        chosen = frozenset(experts)
        for distance, guess in self._guessed.pop(layer, {}).items():
            self._given[distance] += len(guess)
            self._true[distance] += len(guess & chosen)
        return NO_PREFETCHES
