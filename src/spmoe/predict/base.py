"""The contract of prediction: guesses are pure functions of what was seen. No devices, no streams, no experts room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from spmoe.types import NO_PREFETCHES, DraftOutcome, LayerChunk, PrefetchRequests, Routing, Stage


class Gates(Protocol):
    """The target's own pre-FFN norms and routers, callable on any hidden state of its width."""

    hidden_size: int
    layer_depths: Sequence[int]  # the decoder layer of each MoE layer
    depth_count: int  # decoder layers in all

    def route(self, layers: Sequence[int], residual: Tensor) -> Routing:
        """Which experts each layer's gate picks for these states."""  # residual: [layers, rows, hidden]
        ...


class PrefetchPolicy:
    """Turns what has been seen into prefetch requests. As it stands it looks at nothing and prefetch requests for nothing."""

    name: str  # as options and reports call it
    stages: frozenset[Stage] = frozenset()  # the stages it wants to see; nothing is tapped for the others

    def begin_step(self, sequence_id: int) -> PrefetchRequests:
        """Called before anything of a step runs; a request's first step reads its prompt."""
        return NO_PREFETCHES

    def ask(self, stage: Stage, depths: range, residual: Tensor) -> Routing | None:
        """The tensor work behind `on_chunk`, apart from it so that it can run where the states are."""
        # residual: [depths, rows, hidden]
        return None

    def on_chunk(self, seen: LayerChunk) -> PrefetchRequests:
        """Called for every chunk of layers, in order."""
        return NO_PREFETCHES

    def on_routed(self, layer: int, experts: Sequence[int]) -> PrefetchRequests:
        """Called as the target runs: its own router has chosen these experts, and what is missing is on its way."""
        return NO_PREFETCHES

    def on_accept(self, accepted: DraftOutcome) -> None:
        """Called when a step has been judged."""
