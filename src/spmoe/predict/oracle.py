"""The oracle: every step's routing, recorded when the same request ran before. A bound for benchmarks, not a policy.

Greedy decoding takes the same steps every time, so what a step's routers chose in one run they will choose in the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from spmoe.predict.base import PrefetchPolicy
from spmoe.predict.on_demand import OnDemand
from spmoe.types import NO_PREFETCHES, PrefetchRequests

Recording = list[dict[int, set[int]]]  # of each step of a request, every layer's experts


class RoutingRecorder(OnDemand):
    """Notes what the routers choose in one request."""

    def __init__(self) -> None:
        self.recording: Recording = []

    def begin_step(self, sequence_id: int) -> PrefetchRequests:
        self.recording.append({})
        return NO_PREFETCHES

    def on_routed(self, layer: int, experts: Sequence[int]) -> PrefetchRequests:
        self.recording[-1].setdefault(layer, set()).update(experts)
        return NO_PREFETCHES


class Oracle(PrefetchPolicy):
    """Prefetch requests, as a step begins, for all that it will use, in the order of layers; `recorded` gives the recording."""

    name = "oracle"

    def __init__(self, recorded: Callable[[], Recording]) -> None:
        self._recorded = recorded
        self._request: int | None = None
        self._steps = 0

    def begin_step(self, sequence_id: int) -> PrefetchRequests:
        self._steps = self._steps + 1 if sequence_id == self._request else 0
        self._request = sequence_id
        recording = self._recorded()
        step = recording[self._steps] if self._steps < len(recording) else {}
        if not (pairs := sorted((layer, expert) for layer, experts in step.items() for expert in experts)):
            return NO_PREFETCHES
        layers, experts = np.array(pairs).T
        return PrefetchRequests(layers, experts, np.ones(len(pairs)), layers, np.ones(len(pairs), dtype=bool))
