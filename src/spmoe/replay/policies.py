"""Prefetch policies of a replay: the live classes, fed with recorded predictions, and two bounds that know the future.

A live policy predicts by asking the target's gates about hidden states. A trace holds no hidden states but the gates'
answers, so `RecordedGates` stands in for the gates; everything else is the live code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from spmoe.errors import UsageError
from spmoe.predict.activation import Activation
from spmoe.predict.adaptive import Adaptive
from spmoe.predict.base import PrefetchPolicy
from spmoe.predict.draft_gate import DraftGate
from spmoe.predict.next_gate import CombinedPolicy, NextGate
from spmoe.predict.on_demand import OnDemand
from spmoe.replay.steps import Prediction, StepPlan
from spmoe.replay.trace import Shape
from spmoe.types import LayerChunk, PrefetchRequests, Routing, Stage


class RecordedGates:
    """Gates that answer with the recorded prediction of the current chunk."""

    hidden_size = 0

    def __init__(self, layers: int) -> None:
        self.layer_depths: Sequence[int] = range(layers)
        self.depth_count = layers
        self.current: Prediction | None = None

    def route(self, layers: Sequence[int], residual: Tensor) -> Routing:
        if self.current is None:
            raise AssertionError("gates were asked about hidden states that no trace records")
        known, routing = self.current.layers, self.current.routing
        if len(layers) > len(known) or layers[0] not in known or layers[-1] not in known:
            raise UsageError(
                f"the trace holds no prediction of layer {layers[-1]} from layer {self.current.depths[0]}, which the "
                "prefetch policy asks for; record it again"
            )
        start = layers[0] - known.start
        if list(layers) == list(known[start : start + len(layers)]):
            rows: slice | list[int] = slice(start, start + len(layers))
        else:
            rows = [layer - known.start for layer in layers]
        return Routing(routing.experts[rows], routing.scores[rows])


class ReplayPolicy:
    """A prefetch policy that is shown the recorded chunks of a trace."""

    def __init__(self, policy: PrefetchPolicy, gates: RecordedGates) -> None:
        self._policy = policy
        self._gates = gates
        self.begin_step = policy.begin_step
        self.on_routed = policy.on_routed
        self.on_accept = policy.on_accept
        self.uses_draft = Stage.DRAFT in policy.stages  # then a cutoff bounds the layers to prefetch for
        self.bounded = not isinstance(policy, Oracle)  # whether a step's prefetches are limited to the slots

    def on_prediction(self, prediction: Prediction | None) -> PrefetchRequests | None:
        """Return the policy's requests after a chunk of layers; None where it does not look at such chunks."""
        if prediction is None or prediction.stage not in self._policy.stages:
            return None
        self._gates.current = prediction
        depths = prediction.depths
        residual = torch.empty(len(depths), prediction.routing.experts.shape[1], 0)
        return self._policy.on_chunk(LayerChunk(prediction.stage, depths, self._gates.depth_count, residual))


class Oracle(PrefetchPolicy):
    """Request, when a step begins, every expert that the step needs. A bound for all policies."""

    name = "oracle"

    def __init__(self, steps: Sequence[StepPlan]) -> None:
        self._steps = iter(steps)

    def begin_step(self, sequence_id: int) -> PrefetchRequests:
        return _certain(
            {
                (layer, expert)
                for forward in next(self._steps).forwards
                for layer, experts in enumerate(forward.experts)
                for expert in experts
            }
        )


class PerfectDraft(DraftGate):
    """Request, as a draft pass ends, the experts that its row needs, and with the last pass those of the last row.

    A bound for predictions from the draft: none can know more, or earlier.
    """

    name = "perfect-draft"

    def __init__(self, gates: RecordedGates, steps: Sequence[StepPlan]) -> None:
        super().__init__(gates, gates.depth_count, gates.depth_count)
        self._layers = gates.depth_count
        for step in steps:
            if step.drafted and _predicted_layers(step) != step.drafted * self._layers:
                raise UsageError(
                    "the trace has draft passes without predictions for every layer, so perfect-draft cannot be "
                    "replayed; choose another policy"
                )
        self._steps = iter(steps)

    def begin_step(self, sequence_id: int) -> PrefetchRequests:
        self._step, self._done = next(self._steps), 0
        return super().begin_step(sequence_id)

    def on_chunk(self, chunk: LayerChunk) -> PrefetchRequests:
        if chunk.stage is Stage.PREFILL:
            return super().on_chunk(chunk)  # the draft reads the prompt as well
        routed = self._step.forwards[-1].routed  # [rows, layers, top_k]
        row, first = divmod(self._done, self._layers)
        self._done += len(chunk.depths)
        keys = _keys(routed[row, first : first + len(chunk.depths)], first)
        if self._done == self._step.drafted * self._layers:
            for later in routed[row + 1 :]:  # the last row has no draft pass of its own
                keys |= _keys(later, 0)
        return _certain(keys)


def _predicted_layers(step: StepPlan) -> int:
    return sum(len(chunk.prediction.layers) for chunk in step.chunks)


def _keys(routed: np.ndarray, first: int) -> set[tuple[int, int]]:
    """Return layer and expert of all that one row was routed to, in layers from `first` on."""
    # routed: [layers, top_k]
    return {
        (layer, expert)
        for layer, experts in enumerate(routed.tolist(), start=first)
        for expert in experts
        if expert >= 0
    }


def _certain(keys: set[tuple[int, int]]) -> PrefetchRequests:
    """Request these experts, given as layer and expert, with the highest score."""
    layers, experts = np.array(sorted(keys), dtype=np.int64).reshape(-1, 2).T
    return PrefetchRequests(layers, experts, np.ones(len(layers)), layers, np.ones(len(layers), dtype=bool))


Maker = Callable[[Shape, RecordedGates, Sequence[StepPlan]], PrefetchPolicy]


def _draft_gate(gates: RecordedGates) -> DraftGate:
    return DraftGate(gates, gates.depth_count, gates.depth_count)  # the replay applies the cutoff


POLICIES: dict[str, Maker] = {
    "on-demand": lambda shape, gates, steps: OnDemand(),
    "draft-gate": lambda shape, gates, steps: _draft_gate(gates),
    "next-gate": lambda shape, gates, steps: NextGate(gates),
    "draft-gate+next-gate": lambda shape, gates, steps: CombinedPolicy(_draft_gate(gates), NextGate(gates, sure=True)),
    "activation": lambda shape, gates, steps: Activation(shape.experts),
    "adaptive": lambda shape, gates, steps: Adaptive(gates),
    "perfect-draft": lambda shape, gates, steps: PerfectDraft(gates, steps),
    "oracle": lambda shape, gates, steps: Oracle(steps),
}


def require_policy(name: str) -> None:
    """Raise UsageError if there is no prefetch policy of this name."""
    if name not in POLICIES:
        raise UsageError(f"prefetch must be one of {', '.join(POLICIES)}, not {name!r}")


def make_policy(name: str, shape: Shape, steps: Sequence[StepPlan]) -> ReplayPolicy:
    """Return the prefetch policy of this name for one replay of these steps."""
    require_policy(name)
    gates = RecordedGates(shape.layers)
    return ReplayPolicy(POLICIES[name](shape, gates, steps), gates)
