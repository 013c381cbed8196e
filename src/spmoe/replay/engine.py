"""The live expert cache, prefetch scheduler and transfer on a virtual clock, driven step by step.

This is the only module of a replay that builds and calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing

from torch import Tensor

from spmoe.experts.cpu_path import CpuPath
from spmoe.experts.eviction import Eviction
from spmoe.experts.experts import Experts
from spmoe.observe.clock import VirtualClock
from spmoe.observe.ledger import Counters
from spmoe.observe.timeline import Timeline
from spmoe.predict.admission import PrefetchAdmission
from spmoe.predict.costs import Rates, StepReport
from spmoe.replay.trace import Shape
from spmoe.replay.virtual_cpu import VirtualCpu, VirtualRows
from spmoe.replay.virtual_link import make_link
from spmoe.types import NO_PREFETCHES, PrefetchRequests

OnRouted = Callable[[int, Sequence[int]], PrefetchRequests]  # layer, routed experts


def _no_requests(layer: int, experts: Sequence[int]) -> PrefetchRequests:
    return NO_PREFETCHES


class NoWeights:
    """Slots that hold nothing."""

    def __init__(self, count: int) -> None:
        self.count = count

    def weights(self, slot: int) -> Mapping[str, Tensor]:
        return {}

    def close(self) -> None:
        pass


class ReplayEngine:
    """Experts on demand and ahead of demand, in `slots` slots over a virtual link."""

    def __init__(
        self,
        shape: Shape,
        slots: int,
        bytes_per_second: float,
        eviction: Eviction,
        step_budget: int | None = None,  # experts that prefetch requests may load per step; None: no limit
        timeline: Timeline | None = None,
        *,
        admits: bool = False,  # whether prefetches are admitted one by one
        cpu_bytes_per_second: float | None = None,  # at which the CPU computes missing experts; None: it does not
    ) -> None:
        self._clock = VirtualClock()
        self.uses_cpu = cpu_bytes_per_second is not None
        cpu_path = None
        if cpu_bytes_per_second is not None:
            cpu_path = CpuPath(VirtualCpu(self._clock, shape.expert_bytes / cpu_bytes_per_second))
        self.seconds_per_expert = shape.expert_bytes / bytes_per_second
        # where the device runs behind the host, a layer's hidden states are read after its demand loads were submitted
        self._demands_first = shape.chunk_bytes is not None
        self._deferred = NO_PREFETCHES  # predictions of the current layer, submitted after its demand loads
        self._on_routed: OnRouted = _no_requests
        self._rates, self._layers = Rates(load=self.seconds_per_expert), shape.layers
        self._admission = (
            PrefetchAdmission(shape.layers, max(shape.experts), shape.top_k, self._rates) if admits else None
        )
        self._k: int | None = None  # of the step; None: it reads a prompt
        self._began = self._drafted = 0.0
        self._before = Counters()  # when the step began
        self._link = make_link(self._clock, shape, bytes_per_second)
        blob_bytes = shape.expert_bytes
        self._experts = Experts.build(
            NoWeights(slots), self._link.transfer, eviction, blob_bytes, self._clock, threaded=False,
            timeline=timeline, cpu_path=cpu_path,
        )  # fmt: skip
        self._experts.scheduler.step_budget = None if step_budget is None else step_budget * blob_bytes
        self._clock.add_event_source(self._link.next_event, self._on_link_event)

    @property
    def counters(self) -> Counters:
        """Counts of the replay so far."""
        return self._experts.ledger.counters

    @property
    def now(self) -> float:
        """Virtual time, in seconds."""
        return self._clock.now()

    @property
    def link_seconds(self) -> float:
        """Seconds in which the link was busy."""
        return self._link.busy_seconds()

    def begin_step(self, sequence_id: int, on_routed: OnRouted = _no_requests, k: int | None = None) -> None:
        """Begin a step of a sequence that drafts K tokens, or one that reads a prompt.

        `on_routed` is called with the routed experts of each layer.
        """
        self._on_routed, self._k = on_routed, k
        if self._admission is not None:
            self._admission.begin_step(k)
            self._began, self._before = self.now, self.counters.copy()
        self._experts.step.begin(sequence_id, self._after_demands)

    def compute(self, seconds: float) -> None:
        """Let compute run for this long; copies go on meanwhile."""
        self._clock.sleep(seconds)

    def prefetch(self, requests: PrefetchRequests) -> None:
        """Queue prefetch requests."""
        self._experts.scheduler.request(requests, self._admission)

    def end_draft(self) -> None:
        """Take note that the draft is complete."""
        self._drafted = self.now

    def run_layer(
        self,
        layer: int,
        experts: Sequence[int],
        seconds: float,
        shares: Sequence[float],
        predicted: PrefetchRequests | None = None,
        rows: Mapping[int, int] | None = None,
    ) -> None:
        """Run a layer's experts, `seconds` each, batch by batch as they become ready.

        `shares` are the shares of a prompt's rows routed to each expert, or empty; `predicted` are requests that follow
        from the layer's own hidden states. `rows`: those routed to each expert; with them, the CPU may compute some.
        """
        if predicted is not None:
            if self._demands_first:
                self._deferred = predicted
            else:
                self._experts.scheduler.request(predicted, self._admission)
        on_cpu = None if rows is None else VirtualRows(rows)
        with closing(self._experts.access.use(layer, experts, shares=shares, on_cpu=on_cpu)) as batches:
            for batch in batches:
                self._clock.sleep(seconds * len(batch.slots))

    def end_step(self) -> None:
        """End the step; requests that still wait are dropped."""
        self._experts.step.end()
        if self._admission is not None and self._k is not None:
            counts, verified = self.counters.minus(self._before), self.now - self._drafted
            self._rates.learn(
                StepReport(
                    self._k, self._k, 0, self.now - self._began, counts.asked, counts.missed,
                    verify_seconds=verified, stall_seconds=counts.stall_seconds + counts.cpu_wait_seconds,
                    demanded=counts.demand_loads, computed=counts.cpu_experts,
                ),
                self._layers,
            )  # fmt: skip

    def close(self) -> None:
        """Release the live classes."""
        self._experts.close()

    def _on_link_event(self) -> None:
        if self._link.on_event():
            self._experts.scheduler.pump()

    def _after_demands(self, layer: int, experts: Sequence[int]) -> PrefetchRequests:
        """Submit what routing lets the policy predict, then what the layer's hidden states predicted before."""
        if self._admission is not None:
            self._admission.on_routed(layer, experts)
        self._experts.scheduler.request(self._on_routed(layer, experts))
        deferred, self._deferred = self._deferred, NO_PREFETCHES
        self._experts.scheduler.request(deferred, self._admission)
        return NO_PREFETCHES
