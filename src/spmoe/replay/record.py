"""Record a trace while an engine generates: its routing, its predictions and its times."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spmoe import __version__
from spmoe.backends.base import ExpertsForward
from spmoe.backends.cuda_transfer import WINDOW, chunk_for
from spmoe.config import SamplingParams
from spmoe.engine.engine import Engine
from spmoe.engine.llm import LLM, Generation
from spmoe.engine.outputs import RequestOutput
from spmoe.engine.stats import Stats
from spmoe.errors import UsageError
from spmoe.models.experts_seam import attach
from spmoe.predict.policies._combined import CombinedPolicy
from spmoe.predict.policies.base import PrefetchPolicy
from spmoe.predict.policies.draft_gate import DraftGate, layers_by_draft_depth
from spmoe.predict.policies.next_gate import NextGate
from spmoe.replay.trace import Shape, Trace
from spmoe.types import NO_PREFETCHES, DraftOutcome, LayerChunk, PrefetchRequests, Routing, Stage

AHEAD = 3  # layers ahead that are predicted from the target's own hidden states


def record(
    llm: LLM,
    prompts: list[str],
    params: SamplingParams,
    around: Callable[[Generation], AbstractContextManager[None]] = lambda generation: nullcontext(),
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Trace:
    """Generate from each prompt and return the trace.

    Each generation runs inside the context manager `around(generation)`; if it stops one, the trace ends there.
    `report` is called with the number of finished prompts and of all prompts.
    """
    generations = [llm.stream(prompt, params) for prompt in prompts]  # raises for a bad prompt before any is run
    recorder = TraceRecorder(llm.engine)
    completions = []
    with recorder.attached():
        for number, generation in enumerate(generations):
            report(number, len(generations))
            with around(generation):
                completions.append(generation.run())
            if generation.stopped:
                break
        return recorder.trace(completions)


class TraceRecorder(PrefetchPolicy):
    """Record an engine's steps, from between the loop and its prefetch policy and between the target and its experts.

    The policy's own requests stay the same. In addition, the gates are called on the draft's and the target's hidden
    states, so that every policy can be replayed. Times of layers do not include that.
    """

    stages = frozenset(Stage)

    def __init__(self, engine: Engine) -> None:
        if engine.parts.runtime.cuda is not None and engine.parts.runtime.cuda.all_resident:
            raise UsageError("with every expert resident, routing is never read by the host; lower --expert-memory")
        if engine.target.gated and not engine.target.gates_found:
            raise UsageError(
                "the gates of some layers cannot be called alone, so their predictions cannot be recorded; choose "
                "another model"
            )
        self._engine = engine
        self.experts, self.clock = engine.experts, engine.parts.clock
        self.synchronize = engine.parts.runtime.backend.synchronize
        self._inner: PrefetchPolicy = engine.loop.policy
        self.name = self._inner.name
        target, draft = engine.target, engine.loop.drafter.runner
        self._layers = len(target.moe)
        self._draft_gate: DraftGate | None = _draft_gate_of(self._inner)
        self._layers_at: list[list[int]] = []
        if draft is not None:
            depth = draft.depth_count
            self._layers_at = layers_by_draft_depth(target.layer_depths, target.depth_count, depth)
            if self._draft_gate is None and target.gates_found and draft.has_hidden_states:
                fits = engine.parts.projection is not None or draft.hidden_size == target.hidden_size
                self._draft_gate = DraftGate(target, depth, self._layers, engine.parts.projection) if fits else None
        can_ask = target.gates_found and target.has_hidden_states
        self._next_gate = NextGate(target, AHEAD) if can_ask else None
        self._records = _Records()
        self._sequence_id = 0
        self._last_end = 0.0  # when the last recorded chunk or layer ended
        self._asking = 0.0  # seconds of the recorder's own predictions since then
        self._overhead: dict[int, list[float]] = {}  # seconds of recording, by sequence and step
        self._step_start = (0, 0)  # chunks and forwards recorded when the step began
        self._pass, self._next_layer = -1, self._layers
        self._before = engine.counters.copy()
        self._last_layer = -1  # the MoE layer that ran last
        self._last_depth = -1  # the decoder layer whose hidden states were read last
        self._forwards = [moe_layer.experts.spmoe_forward for moe_layer in target.moe]

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Record the requests that run inside; restore the engine's own policy and experts afterwards."""
        moe_layers = self._engine.target.moe
        try:
            for layer, moe_layer in enumerate(moe_layers):
                attach(moe_layer.experts, _RecordingForward(self, layer, self._forwards[layer]))  # type: ignore[arg-type]
            with self._engine.using_policy(self):
                yield
        finally:
            for forward, moe_layer in zip(self._forwards, moe_layers, strict=True):
                attach(moe_layer.experts, forward)  # type: ignore[arg-type]

    # ---- the loop's policy

    def begin_step(self, sequence_id: int) -> PrefetchRequests:
        records = self._records
        self._step_start = (len(records.chunk_pass), len(records.forward_rows))
        self._sequence_id = sequence_id
        self._pass, self._next_layer = -1, self._layers
        self._last_layer = self._last_depth = -1
        self._asking = 0.0
        prefetches = self._inner.begin_step(sequence_id)
        self._overhead.setdefault(sequence_id, []).append(0.0)
        self._last_end = self._now()
        return prefetches

    def on_routed(self, layer: int, experts: Sequence[int]) -> PrefetchRequests:
        return self._inner.on_routed(layer, experts)

    def predict_routing(self, stage: Stage, depths: range, residual: Tensor) -> Routing | None:
        if stage is not Stage.VERIFY:
            return self._draft_gate.predict_routing(stage, depths, residual) if self._draft_gate is not None else None
        if self._next_gate is None:
            return None
        started = self._now()
        routing = self._next_gate.predict_routing(stage, depths, residual)
        self._asking += self._now() - started
        self._add_overhead(started)
        return routing

    def on_chunk(self, chunk: LayerChunk) -> PrefetchRequests:
        started = self._now()
        if chunk.stage is not Stage.VERIFY:
            self._record_chunk(chunk, started)
        elif chunk.routing is not None:
            self._record_ahead(chunk.depths, chunk.routing)
        prefetches = NO_PREFETCHES
        if chunk.stage in self._inner.stages:
            own = chunk if chunk.stage is not Stage.VERIFY else replace(chunk, routing=None)
            prefetches = self._inner.on_chunk(own)
        if chunk.stage is Stage.VERIFY:
            self._asking += self._now() - started
        else:
            self._last_end = self._now()
        self._add_overhead(started)
        return prefetches

    def on_accept(self, outcome: DraftOutcome) -> None:
        self._inner.on_accept(outcome)
        records = self._records
        chunks, forwards = self._step_start
        records.sequence.append(self._sequence_id)
        records.drafted.append(outcome.drafted)
        records.accepted.append(outcome.accepted)
        records.chunks.append(len(records.chunk_pass) - chunks)
        records.forwards.append(len(records.forward_rows) - forwards)
        records.rest.append(max(0.0, self._now() - self._last_end))

    # ---- while the target runs

    def before_experts(self, layer: int, index: Tensor, weights: Tensor) -> None:
        """Record a layer's routing; its experts are about to run."""  # index, weights: [rows, top_k]
        records, started = self._records, self._now()
        rows = len(index)
        if layer <= self._last_layer or not records.forward_rows or len(records.forward_rows) == self._step_start[1]:
            records.forward_rows.append(rows)
            records.front.append(np.zeros(self._layers, dtype=np.float32))
            records.experts.append(np.zeros(self._layers, dtype=np.float32))
            shape = (rows, self._layers, self._engine.target.top_k)
            records.routed.append(np.full(shape, -1, dtype=np.int16))
            records.routed_weight.append(np.zeros(shape, dtype=np.float16))
            if len(records.ahead) < len(records.forward_rows):
                self._add_ahead(rows)
        self._last_layer = layer
        records.front[-1][layer] = max(0.0, started - self._last_end - self._asking)
        self._asking = 0.0
        top_k = index.shape[-1]
        records.routed[-1][:, layer, :top_k] = index.cpu().numpy()
        records.routed_weight[-1][:, layer, :top_k] = weights.float().cpu().numpy()
        self._last_end = self._now()
        self._add_overhead(started)

    def after_experts(self, layer: int, seconds: float) -> None:
        """Record the time of a layer's experts, stalls excluded."""
        self._records.experts[-1][layer] = max(0.0, seconds)
        self._last_end = self._now()

    def trace(self, completions: Iterable[RequestOutput]) -> Trace:
        """Return everything recorded so far."""
        engine, records = self._engine, self._records
        spec, config, target = engine.spec, engine.config, engine.target
        draft = engine.loop.drafter.runner
        if not records.sequence:
            raise UsageError("nothing was generated, so there is nothing to record; give another prompt")
        seconds = engine.prefetching.profile.seconds_per_expert if engine.prefetching.profile is not None else 0.0
        link = config.link_gbps * 1e9 if config.link_gbps else (spec.layout.nbytes / seconds if seconds else 0.0)
        on_cuda = engine.parts.runtime.cuda is not None and config.link_gbps is None
        shape = Shape(
            experts=tuple(spec.experts),
            top_k=target.top_k,
            expert_bytes=spec.layout.nbytes,
            draft_layers=draft.depth_count if draft is not None else 0,
            draft_tokens=engine.loop.max_draft_tokens,
            depth=engine.experts.pool.prefetch_depth,
            chunk_bytes=chunk_for(spec.layout.nbytes) if on_cuda else None,
            window=WINDOW,
            slots=engine.slots,
            link_bytes_per_second=link,
        )
        counters = engine.counters.minus(self._before)
        about = {
            "model": config.model,
            "draft": config.resolved_draft,
            "options": {
                "prefetch": self._inner.name, "eviction": config.eviction_policy, "cutoff": str(config.cutoff),
                "cutoff_layers": engine.prefetching.cutoff,
                "expert_memory": str(config.expert_memory or f"{engine.slots} slots"),
                "dtype": str(engine.parts.models.dtype),
                "expert_format": engine.parts.models.expert_format.weight.label,
                "lossless": engine.parts.models.lossless,
                "weights": "random" if engine.config.random_weights else "checkpoint",
                "device": str(engine.device), "link_gbps": config.link_gbps,
                "projection": engine.parts.projection is not None,
            },
            "profile": None if engine.prefetching.profile is None else asdict(engine.prefetching.profile),
            "versions": {"spmoe": __version__, "torch": torch.__version__, "python": platform.python_version()},
            "machine": f"{platform.machine()}, {platform.system()}",
            "live": _totals([completion.stats for completion in completions], self._overhead),
            "ledger": asdict(counters),
        }  # fmt: skip
        return records.trace(shape, about)

    def _record_chunk(self, chunk: LayerChunk, now: float) -> None:
        """Record what the draft's hidden states predict."""
        records = self._records
        routing = self.routing_of(chunk)
        layers = [layer for depth in chunk.depths for layer in self._layers_at[depth]]
        if routing is None or not layers:
            return
        if layers[0] < self._next_layer:  # the next pass has begun
            self._pass += 1
        self._next_layer = layers[-1] + 1
        records.chunk_pass.append(self._pass)
        records.chunk_layers.append((layers[0], layers[-1] + 1))
        records.chunk_seconds.append(max(0.0, now - self._last_end))
        records.chunk_rows.append(routing.experts.shape[1])
        top_k = self._engine.target.top_k
        records.predicted.append(routing.experts.cpu().numpy().reshape(-1, top_k).astype(np.int16))
        records.predicted_score.append(routing.scores.float().cpu().numpy().reshape(-1, top_k).astype(np.float16))

    def _record_ahead(self, depths: range, routing: Routing) -> None:
        """Record what the target's own hidden states predict of the next layers."""
        records, target = self._records, self._engine.target
        rows = routing.experts.shape[1]
        if self._next_gate is None:
            return
        if len(records.ahead) == len(records.forward_rows) and (
            self._last_depth == -1 or depths[0] <= self._last_depth
        ):
            self._add_ahead(rows)  # the next forward has begun
        self._last_depth = depths[-1]
        layer_depths = list(target.layer_depths)
        row = 0
        for depth in depths:
            for distance, layer in enumerate([layer for layer, at in enumerate(layer_depths) if at > depth][:AHEAD]):
                # several decoder layers may come before an MoE layer; the prediction of the last one stays
                records.ahead[-1][distance, :, layer] = routing.experts[row].cpu().numpy()
                records.ahead_score[-1][distance, :, layer] = routing.scores[row].float().cpu().numpy()
                row += 1

    def _add_ahead(self, rows: int) -> None:
        shape = (AHEAD, rows, self._layers, self._engine.target.top_k)
        self._records.ahead.append(np.full(shape, -1, dtype=np.int16))
        self._records.ahead_score.append(np.zeros(shape, dtype=np.float16))

    def _add_overhead(self, started: float) -> None:
        self._overhead[self._sequence_id][-1] += self._now() - started

    def _now(self) -> float:
        return self._engine.parts.clock.now()


class _RecordingForward:
    """An experts forward that records the layer's routing and time around the real one."""

    def __init__(self, recorder: TraceRecorder, layer: int, inner: ExpertsForward) -> None:
        self._recorder = recorder
        self._layer = layer
        self._inner = inner

    def run(self, experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        recorder = self._recorder
        experts_side, synchronize, clock = recorder.experts, recorder.synchronize, recorder.clock
        synchronize()
        recorder.before_experts(self._layer, index, weights)
        experts_side.step.count_stalls()
        stalled, started = experts_side.ledger.counters.stall_seconds, clock.now()
        out = self._inner.run(experts, hidden, index, weights)
        synchronize()
        experts_side.step.count_stalls()
        recorder.after_experts(
            self._layer, clock.now() - started - (experts_side.ledger.counters.stall_seconds - stalled)
        )
        return out


@dataclass
class _Records:
    """Values of the trace's arrays, in the order in which they were recorded."""

    sequence: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    forwards: list[int] = field(default_factory=list)
    rest: list[float] = field(default_factory=list)
    chunk_pass: list[int] = field(default_factory=list)
    chunk_layers: list[tuple[int, int]] = field(default_factory=list)
    chunk_seconds: list[float] = field(default_factory=list)
    chunk_rows: list[int] = field(default_factory=list)
    predicted: list[np.ndarray] = field(default_factory=list)
    predicted_score: list[np.ndarray] = field(default_factory=list)
    forward_rows: list[int] = field(default_factory=list)
    front: list[np.ndarray] = field(default_factory=list)
    experts: list[np.ndarray] = field(default_factory=list)
    routed: list[np.ndarray] = field(default_factory=list)
    routed_weight: list[np.ndarray] = field(default_factory=list)
    ahead: list[np.ndarray] = field(default_factory=list)
    ahead_score: list[np.ndarray] = field(default_factory=list)

    def trace(self, shape: Shape, about: dict[str, Any]) -> Trace:
        """Return a trace of all records."""
        layers, top_k, rows = shape.layers, shape.top_k, sum(self.forward_rows)

        def join(parts: list[np.ndarray], empty: tuple[int, ...], dtype: Any, axis: int = 0) -> np.ndarray:
            return np.concatenate(parts, axis=axis).astype(dtype) if parts else np.zeros(empty, dtype=dtype)

        return Trace(
            shape,
            about,
            step_sequence=np.unique(self.sequence, return_inverse=True)[1].astype(np.int32),
            step_drafted=np.array(self.drafted, dtype=np.int16),
            step_accepted=np.array(self.accepted, dtype=np.int16),
            step_chunks=np.array(self.chunks, dtype=np.int16),
            step_forwards=np.array(self.forwards, dtype=np.int16),
            step_rest=np.array(self.rest, dtype=np.float32),
            chunk_pass=np.array(self.chunk_pass, dtype=np.int16),
            chunk_layers=np.array(self.chunk_layers, dtype=np.int16).reshape(-1, 2),
            chunk_seconds=np.array(self.chunk_seconds, dtype=np.float32),
            chunk_rows=np.array(self.chunk_rows, dtype=np.int32),
            predicted=join(self.predicted, (0, top_k), np.int16),
            predicted_score=join(self.predicted_score, (0, top_k), np.float16),
            forward_rows=np.array(self.forward_rows, dtype=np.int32),
            forward_front=np.stack(self.front),
            forward_experts=np.stack(self.experts),
            routed=join(self.routed, (0, layers, top_k), np.int16),
            routed_weight=join(self.routed_weight, (0, layers, top_k), np.float16),
            ahead=join(self.ahead, (0, rows, layers, top_k), np.int16, axis=1),
            ahead_score=join(self.ahead_score, (0, rows, layers, top_k), np.float16, axis=1),
        )


def _totals(stats: list[Stats], overhead: dict[int, list[float]]) -> dict[str, float]:
    """Sum up the steps after each sequence's first one, as a replay counts them, without the time of recording."""
    parts = [each.decode_counters for each in stats]
    names = ("steps", "hits", "late", "demand_loads", "prefetch_loads", "prefetch_used", "stall_seconds")
    return {
        "requests": len(stats),
        "tokens": sum(part.tokens for part in parts),
        "seconds": sum(each.decode_seconds for each in stats) - sum(sum(steps[1:]) for steps in overhead.values()),
        **{name: sum(getattr(part, name) for part in parts) for name in names},
    }


def _draft_gate_of(policy: PrefetchPolicy) -> DraftGate | None:
    """Return the part of a policy that predicts from the draft, if there is one."""
    parts = policy.parts if isinstance(policy, CombinedPolicy) else (policy,)
    return next((part for part in parts if isinstance(part, DraftGate)), None)
