"""Prefetch policies of a replay: every registered one, fed with recorded predictions, and a perfect draft.

A live policy predicts by asking the target's gates about hidden states. A trace holds no hidden states but the gates'
answers, so `RecordedGates` stands in for the gates; everything else is the live code.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from spmoe.config import eviction_policy_for, parse_prefetch_policy
from spmoe.errors import UsageError
from spmoe.predict.policies import make_policy
from spmoe.predict.policies.base import PolicyContext, PrefetchPolicy, RecordedRouting
from spmoe.predict.policies.draft_gate import DraftGate
from spmoe.replay.steps import Prediction, StepPlan
from spmoe.replay.trace import Shape
from spmoe.types import LayerChunk, PrefetchRequests, Routing, Stage

PERFECT_DRAFT = "perfect-draft"


def require_policy(name: str) -> None:
    """Raise UsageError if there is no prefetch policy of this name."""
    if name != PERFECT_DRAFT:
        parse_prefetch_policy(name)


def eviction_of(prefetch: str, eviction: str) -> str:
    """Return the eviction policy: the one named or, for `auto`, the one that the prefetch policy declares."""
    require_policy(prefetch)
    return eviction_policy_for(DraftGate.name if prefetch == PERFECT_DRAFT else prefetch, eviction)


class RecordedGates:
    """Gates that answer with the recorded prediction of the current chunk."""

    def __init__(self, layers: int) -> None:
        self.layer_depths: Sequence[int] = range(layers)
        self.depth_count = layers
        self.current: Prediction | None = None

    def route(self, layers: Sequence[int], residual: Tensor) -> Routing:
        if self.current is None:
            raise AssertionError("gates were called on hidden states, which traces do not contain")
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
    """A prefetch policy for one replay of these steps, which is shown their recorded chunks."""

    def __init__(self, name: str, shape: Shape, steps: Sequence[StepPlan]) -> None:
        require_policy(name)
        self._steps = steps
        self._sequence_id = -1
        self._gates = RecordedGates(shape.layers)
        context = PolicyContext(
            experts_per_layer=shape.experts,
            gates=self._gates,
            gated_layers=range(shape.layers),
            drafting=True,
            draft_depth=shape.layers,
            draft_routes=True,  # predictions are recorded, whichever gate or router made them
            recorded_routing=lambda: self._recorded_routing[self._sequence_id],
        )
        self._policy: PrefetchPolicy = (
            PerfectDraft(self._gates, steps) if name == PERFECT_DRAFT else make_policy(name, context)[0]
        )
        self.on_routed = self._policy.on_routed
        self.on_accept = self._policy.on_accept
        self.set_cutoff = self._policy.set_cutoff
        self.uses_cutoff = self._policy.uses_cutoff
        self.admits = self._policy.admits
        self.uses_step_budget = self._policy.uses_step_budget

    def begin_step(self, sequence_id: int) -> PrefetchRequests:
        """Return the policy's requests before anything of a step runs."""
        self._sequence_id = sequence_id
        return self._policy.begin_step(sequence_id)

    def on_prediction(self, prediction: Prediction | None) -> PrefetchRequests | None:
        """Return the policy's requests after a chunk of layers; None where it does not look at such chunks."""
        if prediction is None or prediction.stage not in self._policy.stages:
            return None
        self._gates.current = prediction
        depths = prediction.depths
        residual = torch.empty(len(depths), prediction.routing.experts.shape[1], 0)
        return self._policy.on_chunk(LayerChunk(prediction.stage, depths, residual))

    @cached_property
    def _recorded_routing(self) -> dict[int, RecordedRouting]:
        """Routed experts of every step, by sequence."""
        found: dict[int, RecordedRouting] = {}
        for step in self._steps:
            routing: dict[int, set[int]] = {}
            for forward in step.forwards:
                for layer, experts in enumerate(forward.experts):
                    routing.setdefault(layer, set()).update(experts)
            found.setdefault(step.sequence_id, []).append(routing)
        return found


class PerfectDraft(DraftGate):
    """Request, as a draft pass ends, the experts that its row needs, and with the last pass those of the last row.

    A bound for predictions from the draft: none can know more, or earlier.
    """

    name = PERFECT_DRAFT

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
        layers, experts = np.array(sorted(keys), dtype=np.int64).reshape(-1, 2).T
        return PrefetchRequests(layers, experts, np.ones(len(layers)), layers, layers < self.cutoff)


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
