"""The contract of prefetch policies: which experts to load before a router asks for them.

A policy is a class registered by name (see `spmoe.registry`). It declares its needs as class attributes,
and turns hidden states and routing into prefetch requests. It touches no device, stream or cache.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, Self

from torch import Tensor

from spmoe.predict.projection import HiddenStateProjection
from spmoe.registry import ON_DEMAND
from spmoe.types import NO_PREFETCHES, DraftOutcome, LayerChunk, PrefetchRequests, Routing, Stage

NO_RECORDING = (
    "it needs the routing recorded in an earlier run of the same request, which only `spmoe bench` has; choose another "
    "policy"
)

RecordedRouting = list[dict[int, set[int]]]  # for each step of a request, the routed experts of every MoE layer


class Need(Enum):
    """Input that a policy cannot work without."""

    DRAFT_STATES = "the draft's hidden states, which the target's gates accept, or the draft's own routing"
    TARGET_STATES = "the target's hidden states, and gates that can be called alone"
    ROUTING = "the routed experts of every layer, as the target runs"
    RECORDED_ROUTING = "the routed experts of every step, recorded in an earlier run of the same request"


class Gates(Protocol):
    """The target's own pre-FFN norms and routers, callable on any hidden states of its width."""

    layer_depths: Sequence[int]  # the decoder layer of each MoE layer
    depth_count: int  # decoder layers in all

    def route(self, layers: Sequence[int], residual: Tensor) -> Routing:
        """Return the experts that each layer's gate selects for these states."""  # residual: [layers, rows, hidden]
        ...


@dataclass(frozen=True)
class PolicyContext:
    """Everything that a policy may be built from."""

    experts_per_layer: Sequence[int]  # for each MoE layer of the target
    gates: Gates | None = None
    gated_layers: Collection[int] = ()  # MoE layers whose gate can be called alone
    drafting: bool = False  # whether tokens are drafted at all
    draft_depth: int | None = None  # decoder layers of the draft model; None: no model drafts
    draft_routes: bool = False  # whether the draft's own routers predict every layer, so that no gate is called
    projection: HiddenStateProjection | None = None  # from the draft's hidden states to the target's
    cutoff: int | None = None  # layers, counted from the first, that may be prefetched for; None: all
    copies_per_layer: float | None = None  # experts that can be copied while a layer runs; None: not known
    recorded_routing: Callable[[], RecordedRouting] | None = None  # of the request that runs
    unmet: Mapping[Need, str] = field(default_factory=dict)  # needs that cannot be met: reason, or "" for no notice
    secondary: bool = False  # whether the policy supplements another one, and should request only likely experts


class PrefetchPolicy:
    """Turns hidden states and routing into prefetch requests; this base class requests nothing."""

    name: str  # set by the registry
    summary: str = ""  # a clause that completes notices, such as "experts are loaded on demand"
    needs: frozenset[Need] = frozenset()
    stages: frozenset[Stage] = frozenset()  # the stages whose hidden states it is shown
    uses_cutoff: bool = False  # whether it heeds `PolicyContext.cutoff` and `set_cutoff`
    uses_step_budget: bool = True  # whether prefetches of one step may not exceed the slots
    admits: bool = False  # whether its requests are loaded only if that is expected to save time
    learns: bool = False  # whether it learns from requests; the engine then keeps it when it is reconfigured
    eviction: str = "draft-informed"  # the eviction policy that `--eviction auto` pairs with it

    @classmethod
    def build(cls, context: PolicyContext) -> Self:
        """Make the policy; its needs are met."""
        return cls()

    @classmethod
    def fallback(cls, context: PolicyContext) -> str | None:
        """Return the policy to use where a need is unmet; None refuses to run."""
        return ON_DEMAND

    @classmethod
    def sources(cls, context: PolicyContext) -> tuple[str, ...]:
        """Return the names of the policies that predict: this one, or those that it chooses in this context."""
        return (cls.name,)

    def begin_step(self, sequence_id: int) -> PrefetchRequests:
        """Request experts before anything of a step runs; a sequence's first step reads its prompt."""
        return NO_PREFETCHES

    def predict_routing(self, stage: Stage, depths: range, residual: Tensor) -> Routing | None:
        """Compute routing from hidden states: the tensor work of `on_chunk`, run on the states' device.

        It must launch the same kernels every time, so that it can be part of a CUDA graph.
        """
        # residual: [depths, rows, hidden]
        return None

    def routing_of(self, chunk: LayerChunk) -> Routing | None:
        """Return the routing that the forward has computed for a chunk; compute it if it has not."""
        if chunk.routing is not None:
            return chunk.routing
        return self.predict_routing(chunk.stage, chunk.depths, chunk.residual)

    def on_chunk(self, chunk: LayerChunk) -> PrefetchRequests:
        """Request experts after a chunk of decoder layers ran; chunks come in order. See `routing_of`."""
        return NO_PREFETCHES

    def on_routed(self, layer: int, experts: Sequence[int]) -> PrefetchRequests:
        """Request experts after a layer of the target was routed to `experts`; missing ones are being loaded."""
        return NO_PREFETCHES

    def on_accept(self, outcome: DraftOutcome) -> None:
        """Take note of how many draft tokens the target accepted; ends a step."""

    def set_cutoff(self, layers: int) -> None:
        """Prefetch only for layers below this one from now on."""
