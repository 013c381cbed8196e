"""The contract of prediction: guesses are pure functions of what was seen. No devices, no streams, no experts room."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from spmoe.types import Accepted, Routing, Seen, Stage, Wish


class Gates(Protocol):
    """The target's own pre-FFN norms and routers, callable on any hidden state of its width."""

    hidden_size: int
    layer_depths: Sequence[int]  # the decoder layer of each MoE layer
    depth_count: int  # decoder layers in all

    def route(self, layers: Sequence[int], residual: Tensor) -> Routing:
        """Which experts each layer's gate picks for these states."""  # residual: [layers, rows, hidden]
        ...


class PrefetchPolicy:
    """Turns what has been seen into wishes. As it stands it looks at nothing and wishes for nothing."""

    name: str  # as options and reports call it
    stages: frozenset[Stage] = frozenset()  # the stages it wants to see; nothing is tapped for the others
    last_pass = False  # whether seeing the last draft token too is worth one more pass of the draft

    def begin_step(self, request: int) -> Iterable[Wish]:
        """Called before anything of a step runs; a request's first step reads its prompt."""
        return ()

    def ask(self, stage: Stage, depths: range, residual: Tensor) -> Routing | None:
        """The tensor work behind `on_seen`, apart from it so that it can run where the states are."""
        # residual: [depths, rows, hidden]
        return None

    def on_seen(self, seen: Seen) -> Iterable[Wish]:
        """Called for every slab of layers, in order."""
        return ()

    def on_routed(self, layer: int, experts: Sequence[int]) -> Iterable[Wish]:
        """Called as the target runs: its own router has chosen these experts, and what is missing is on its way."""
        return ()

    def on_accept(self, accepted: Accepted) -> None:
        """Called when a step has been judged."""
