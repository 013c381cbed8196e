"""Plan the steps of a trace for a replay: experts that layers need, predictions of the draft, and times.

Plans depend on the trace and on K only, so they are made once for all configurations of a replay.

A smaller K than recorded splits each recorded step. Rows 0 to `accepted` of a step are tokens that were kept, so a step
with K' drafts may start at any of them: the first takes rows 0 to K' and keeps min(accepted, K') drafts, and the next
starts at the token after those, until all accepted tokens are used. Drafts across the end of a recorded step are not
known, so the last part has fewer. A larger K than recorded cannot be replayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from spmoe.errors import UsageError
from spmoe.interpreter import gc_paused
from spmoe.replay.trace import Trace
from spmoe.types import PROMPT_ROWS, Routing, Stage


@dataclass(frozen=True, slots=True)
class Prediction:
    """Recorded answers of the target's gates to hidden states of one chunk of layers."""

    stage: Stage
    depths: range  # layers whose hidden states predictions were made from, counted in MoE layers of the target
    layers: range  # layers that were predicted
    routing: Routing  # [layers, rows, top_k]


@dataclass(slots=True)
class ChunkPlan:
    """A chunk of layers of a draft pass."""

    seconds: float
    prediction: Prediction


@dataclass(slots=True)
class ForwardPlan:
    """One forward pass of the target."""

    rows: int
    front: list[float]  # by layer, seconds before its experts
    per_expert: list[float]  # by layer, seconds of one of its experts
    experts: list[list[int]]  # by layer, the experts that any row was routed to, sorted
    shares: list[list[float]]  # by layer, share of the rows routed to each of them; empty for few rows
    routed: np.ndarray  # int16 [rows, layers, top_k]; -1: none
    ahead: list[Prediction | None]  # by layer, the prediction from its hidden states for the next layers

    def expert_rows(self, layer: int) -> dict[int, int]:
        """Return the number of rows that are routed to each expert of a layer."""
        found = self.routed[:, layer]
        experts, counts = np.unique(found[found >= 0], return_counts=True)
        return dict(zip(experts.tolist(), counts.tolist(), strict=True))

    @property
    def seconds(self) -> float:
        """Seconds without stalls."""
        experts = zip(self.per_expert, self.experts, strict=True)
        return sum(self.front) + sum(seconds * len(needed) for seconds, needed in experts)


@dataclass(slots=True)
class StepPlan:
    """One step: the chunks of the draft, then the forwards of the target."""

    sequence_id: int
    drafted: int
    accepted: int
    chunks: list[ChunkPlan]
    forwards: list[ForwardPlan]
    rest: float  # seconds outside of chunks and layers

    @property
    def tokens(self) -> int:
        """Tokens that the step produced."""
        return self.accepted + 1


def plan_steps(trace: Trace, draft_tokens: int | None = None) -> list[StepPlan]:
    """Return the steps of a trace, split to at most K draft tokens (None: as recorded)."""
    recorded = trace.shape.draft_tokens
    k = recorded if draft_tokens is None else draft_tokens
    if not 0 <= k <= recorded:
        raise UsageError(
            f"the trace was recorded with {recorded} draft tokens per step, so {k} cannot be replayed; record one with "
            f"--num-speculative-tokens {k}"
        )
    with gc_paused():  # plans are large and have no cycles
        return list(_Planner(trace, k).steps())


class _Planner:
    def __init__(self, trace: Trace, k: int) -> None:
        self._trace = trace
        self._k = k
        self._layers = trace.shape.layers
        self._width = max(trace.shape.experts)
        # experts are numbered layer * width + expert; the number behind the last one stands for no expert
        self._starts = np.arange(self._layers + 1) * self._width
        numbers = trace.routed + self._starts[:-1, None]  # [rows, layers, top_k]
        self._routed = np.where(trace.routed < 0, self._starts[-1], numbers)
        sizes = trace.chunk_rows * (trace.chunk_layers[:, 1] - trace.chunk_layers[:, 0])
        self._chunk_starts = np.concatenate(([0], np.cumsum(sizes)))
        self._forward_starts = np.concatenate(([0], np.cumsum(trace.forward_rows)))

    def steps(self) -> Iterator[StepPlan]:
        trace = self._trace
        chunk = forward = 0
        for step in range(len(trace)):
            chunks = range(chunk, chunk + int(trace.step_chunks[step]))
            forwards = range(forward, forward + int(trace.step_forwards[step]))
            chunk, forward = chunks.stop, forwards.stop
            drafted, accepted = int(trace.step_drafted[step]), int(trace.step_accepted[step])
            sequence_id, rest = int(trace.step_sequence[step]), float(trace.step_rest[step])
            if drafted <= self._k:
                # older traces have one pass more than there are drafts
                kept_chunks = [
                    self._chunk(c, prompt=not drafted) for c in chunks if trace.chunk_pass[c] < drafted or not drafted
                ]
                made = [self._forward(f, None) for f in forwards]
                yield StepPlan(sequence_id, drafted, accepted, kept_chunks, made, rest)
                continue
            start = 0
            while start <= accepted:
                last = min(start + self._k, drafted)  # row of the last draft
                kept = min(accepted - start, last - start)
                yield StepPlan(
                    sequence_id,
                    last - start,
                    kept,
                    [self._chunk(c, last_row=True) for c in chunks if start <= trace.chunk_pass[c] < last],
                    [self._forward(f, (start, last + 1)) for f in forwards[-1:]],
                    rest,
                )
                start += kept + 1

    def _chunk(self, chunk: int, *, prompt: bool = False, last_row: bool = False) -> ChunkPlan:
        """Plan a chunk; of a step that is split, only the last row of a pass counts."""
        trace = self._trace
        low, high = (int(bound) for bound in trace.chunk_layers[chunk])
        rows = int(trace.chunk_rows[chunk])
        part = slice(self._chunk_starts[chunk], self._chunk_starts[chunk + 1])
        experts = trace.predicted[part].reshape(high - low, rows, -1)
        scores = trace.predicted_score[part].reshape(high - low, rows, -1)
        if last_row:
            experts, scores = experts[:, -1:], scores[:, -1:]
        layers, stage = range(low, high), Stage.PREFILL if prompt else Stage.DRAFT
        return ChunkPlan(
            float(trace.chunk_seconds[chunk]), Prediction(stage, layers, layers, as_routing(experts, scores))
        )

    def _forward(self, forward: int, part: tuple[int, int] | None) -> ForwardPlan:
        trace = self._trace
        low, high = int(self._forward_starts[forward]), int(self._forward_starts[forward + 1])
        experts = all_experts = self._experts(low, high)
        if part is not None:
            low, high = low + part[0], low + part[1]
            experts = self._experts(low, high)
        seconds = trace.forward_experts[forward].tolist()
        per_expert = [s / max(1, len(needed)) for s, needed in zip(seconds, all_experts, strict=True)]
        front = trace.forward_front[forward].tolist()
        shares, ahead = self._shares(low, high), self._ahead(low, high)
        return ForwardPlan(high - low, front, per_expert, experts, shares, trace.routed[low:high], ahead)

    def _experts(self, low: int, high: int) -> list[list[int]]:
        """Return, by layer, the experts that these rows were routed to."""
        routed = np.zeros(self._starts[-1] + 1, dtype=bool)
        routed[self._routed[low:high].ravel()] = True
        numbers = np.flatnonzero(routed[:-1])
        bounds = np.searchsorted(numbers, self._starts).tolist()
        experts = (numbers % self._width).tolist()
        return [experts[a:b] for a, b in pairwise(bounds)]

    def _shares(self, low: int, high: int) -> list[list[float]]:
        """Return, by layer, the share of rows routed to each of its experts; empty for fewer than PROMPT_ROWS rows."""
        if high - low < PROMPT_ROWS:
            return [[]] * self._layers
        counts = np.bincount(self._routed[low:high].ravel(), minlength=self._starts[-1] + 1)[:-1]
        by_layer = (counts / (high - low)).reshape(self._layers, self._width)
        return [shares[shares > 0].tolist() for shares in by_layer]

    def _ahead(self, low: int, high: int) -> list[Prediction | None]:
        """Return, by layer, what its hidden states predicted of the layers after it."""
        trace, found = self._trace, list[Prediction | None]()
        for layer in range(self._layers):
            layers = range(layer + 1, min(layer + 1 + len(trace.ahead), self._layers))
            if not layers or high == low or trace.ahead[0, low, layer + 1, 0] < 0:
                found.append(None)
                continue
            at = (np.arange(len(layers)), slice(low, high), np.asarray(layers))
            routing = as_routing(trace.ahead[at], trace.ahead_score[at])
            found.append(Prediction(Stage.VERIFY, range(layer, layer + 1), layers, routing))
        return found


def as_routing(experts: np.ndarray, scores: np.ndarray) -> Routing:
    """Return recorded experts and scores as a policy gets them."""  # both: [layers, rows, top_k]
    return Routing(torch.from_numpy(experts.astype(np.int64)), torch.from_numpy(scores.astype(np.float32)))
