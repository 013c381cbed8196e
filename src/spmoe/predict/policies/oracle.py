"""The oracle: every step's routing, recorded in an earlier run of the same request. An upper bound for benchmarks.

Greedy decoding takes the same steps every time, so the experts routed to in one run are those of the next run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

import numpy as np

from spmoe.predict.policies.base import Need, PolicyContext, PrefetchPolicy, RecordedRouting
from spmoe.predict.policies.on_demand import OnDemand
from spmoe.registry import PREFETCH_POLICIES
from spmoe.types import NO_PREFETCHES, PrefetchRequests


class RoutingRecorder(OnDemand):
    """Records the routed experts of one request, and prefetches nothing."""

    def __init__(self) -> None:
        self.recording: RecordedRouting = []

    def begin_step(self, sequence_id: int) -> PrefetchRequests:
        self.recording.append({})
        return NO_PREFETCHES

    def on_routed(self, layer: int, experts: Sequence[int]) -> PrefetchRequests:
        self.recording[-1].setdefault(layer, set()).update(experts)
        return NO_PREFETCHES


@PREFETCH_POLICIES.register("oracle")
class Oracle(PrefetchPolicy):
    """Requests all experts of a step, in the order of layers, before it begins."""

    summary = "recorded routing predicts every expert"
    needs = frozenset({Need.RECORDED_ROUTING})
    uses_step_budget = False  # every expert that it requests is used

    def __init__(self, recorded_routing: Callable[[], RecordedRouting]) -> None:
        self._recorded_routing = recorded_routing
        self._sequence_id: int | None = None
        self._steps = 0

    @classmethod
    def build(cls, context: PolicyContext) -> Self:
        assert context.recorded_routing is not None
        return cls(context.recorded_routing)

    @classmethod
    def fallback(cls, context: PolicyContext) -> None:
        return None

    def begin_step(self, sequence_id: int) -> PrefetchRequests:
        self._steps = self._steps + 1 if sequence_id == self._sequence_id else 0
        self._sequence_id = sequence_id
        recording = self._recorded_routing()
        step = recording[self._steps] if self._steps < len(recording) else {}
        if not (pairs := sorted((layer, expert) for layer, experts in step.items() for expert in experts)):
            return NO_PREFETCHES
        layers, experts = np.array(pairs).T
        return PrefetchRequests(layers, experts, np.ones(len(pairs)), layers, np.ones(len(pairs), dtype=bool))
