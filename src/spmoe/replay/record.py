"""Recording: what a running engine routes, foretells and takes, noted while it generates."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace

import numpy as np
import torch
from torch import Tensor, nn

from spmoe import __version__
from spmoe.backends.base import ExpertsForward
from spmoe.backends.cuda_transfer import WINDOW, chunk_for
from spmoe.config import SamplingParams
from spmoe.draft.model import DraftModel
from spmoe.engine.engine import Engine
from spmoe.engine.llm import LLM, Completion, Generation
from spmoe.engine.stats import Stats
from spmoe.errors import UsageError
from spmoe.models.experts_seam import attach
from spmoe.predict.policies.base import PrefetchPolicy
from spmoe.predict.policies.draft_gate import DraftGate, layers_by_draft_depth
from spmoe.predict.policies.next_gate import NextGate
from spmoe.replay.notes import Notes
from spmoe.replay.trace import Shape, Trace
from spmoe.types import NO_PREFETCHES, DraftOutcome, LayerChunk, PrefetchRequests, Routing, Stage

AHEAD = 3  # layers ahead for which the target's own states are asked


class TraceRecorder(PrefetchPolicy):
    """Stands between an engine's loop and its policy, and between its target and the experts.

    The policy's prefetch requests are what they were; besides, draft and target are asked about the layers to come, so that every
    policy can be replayed. What that takes is not counted as the layers' time.
    """

    stages = frozenset(Stage)

    def __init__(self, engine: Engine) -> None:
        if engine.room.cuda is not None and engine.room.cuda.all_resident:
            raise UsageError("with every expert in a slot nothing is routed by the host; lower --expert-memory")
        if engine.target.gated and not engine.target.gates_found:
            raise UsageError("some layers' gates cannot be called alone, so a trace would lack their predictions")
        self._engine = engine
        self.source, self.clock, self.synchronize = engine.source, engine.clock, engine.room.backend.synchronize
        self._inner: PrefetchPolicy = engine.loop.policy
        self.name = self._inner.name
        target, drafter = engine.target, engine.loop.drafter
        self._layers = len(target.moe)
        self._draft_gate: PrefetchPolicy | None = self._inner if Stage.DRAFT in self._inner.stages else None
        self._layers_at: list[list[int]] = []
        if isinstance(drafter, DraftModel):
            depth = drafter.runner.depth_count
            self._layers_at = layers_by_draft_depth(target.layer_depths, target.depth_count, depth)
            if self._draft_gate is None and target.gates_found and drafter.runner.has_hidden_states:
                fits = engine.projection is not None or drafter.runner.hidden_size == target.hidden_size
                self._draft_gate = DraftGate(target, depth, self._layers, engine.projection) if fits else None
        asks = target.gates_found and target.has_hidden_states
        self._next = NextGate(target, AHEAD) if asks else None
        self._notes = Notes()
        self._request = 0
        self._mark = self._own = 0.0
        self._spent: dict[int, list[float]] = {}  # on noting, by request and step
        self._at_step = (0, 0)  # chunks and forwards noted when the step began
        self._pass, self._reached = -1, self._layers
        self._before = engine.loop.counters.copy()
        self._forward = -1  # the layer that ran last
        self._tapped = -1  # the decoder layer that was seen last
        self._ports = [moe_layer.experts.spmoe_forward for moe_layer in target.moe]
        for layer, moe_layer in enumerate(target.moe):
            attach(moe_layer.experts, _NotingExperts(self, layer, self._ports[layer]))  # type: ignore[arg-type]
        engine.loop.policy = self

    def detach(self) -> None:
        """Leave the engine as it was."""
        self._engine.loop.policy = self._inner
        for port, moe_layer in zip(self._ports, self._engine.target.moe, strict=True):
            attach(moe_layer.experts, port)  # type: ignore[arg-type]

    # ---- as the loop's policy

    def begin_step(self, request: int) -> PrefetchRequests:
        notes = self._notes
        self._at_step = (len(notes.slab_pass), len(notes.forward_rows))
        self._request = request
        self._pass, self._reached = -1, self._layers
        self._forward = self._tapped = -1
        self._own = 0.0
        prefetches = self._inner.begin_step(request)
        self._spent.setdefault(request, []).append(0.0)
        self._mark = self._now()
        return prefetches

    def on_routed(self, layer: int, experts: Sequence[int]) -> PrefetchRequests:
        return self._inner.on_routed(layer, experts)

    def predict_routing(self, stage: Stage, depths: range, residual: Tensor) -> Routing | None:
        if stage is not Stage.VERIFY:
            return self._draft_gate.predict_routing(stage, depths, residual) if self._draft_gate is not None else None
        if self._next is None:
            return None
        started = self._now()
        routing = self._next.predict_routing(stage, depths, residual)
        self._own += self._now() - started
        self._spend(started)
        return routing

    def on_chunk(self, seen: LayerChunk) -> PrefetchRequests:
        started = self._now()
        if seen.stage is not Stage.VERIFY:
            self._note_slab(seen, started)
        elif seen.routing is not None:
            self._note_ahead(seen.depths, seen.routing)
        prefetches = NO_PREFETCHES
        if seen.stage in self._inner.stages:
            own = seen if seen.stage is not Stage.VERIFY else replace(seen, routing=None)
            prefetches = self._inner.on_chunk(own)
        if seen.stage is Stage.VERIFY:
            self._own += self._now() - started
        else:
            self._mark = self._now()
        self._spend(started)
        return prefetches

    def on_accept(self, accepted: DraftOutcome) -> None:
        self._inner.on_accept(accepted)
        notes = self._notes
        chunks, forwards = self._at_step
        notes.request.append(self._request)
        notes.drafted.append(accepted.drafted)
        notes.accepted.append(accepted.accepted)
        notes.chunks.append(len(notes.slab_pass) - chunks)
        notes.forwards.append(len(notes.forward_rows) - forwards)
        notes.rest.append(max(0.0, self._now() - self._mark))

    # ---- as the target runs

    def routed(self, layer: int, index: Tensor, weights: Tensor) -> None:
        """A router has chosen; what it chose is about to run."""
        notes, started = self._notes, self._now()
        rows = len(index)
        if layer <= self._forward or not notes.forward_rows or len(notes.forward_rows) == self._at_step[1]:
            notes.forward_rows.append(rows)
            notes.front.append(np.zeros(self._layers, dtype=np.float32))
            notes.experts.append(np.zeros(self._layers, dtype=np.float32))
            shape = (rows, self._layers, self._engine.target.top_k)
            notes.chosen.append(np.full(shape, -1, dtype=np.int16))
            notes.weight.append(np.zeros(shape, dtype=np.float16))
            if len(notes.ahead) < len(notes.forward_rows):
                self._new_ahead(rows)
        self._forward = layer
        notes.front[-1][layer] = max(0.0, started - self._mark - self._own)
        self._own = 0.0
        width = index.shape[-1]
        notes.chosen[-1][:, layer, :width] = index.cpu().numpy()
        notes.weight[-1][:, layer, :width] = weights.float().cpu().numpy()
        self._mark = self._now()
        self._spend(started)

    def ran(self, layer: int, seconds: float) -> None:
        """The layer's experts took this long, waiting not included."""
        self._notes.experts[-1][layer] = max(0.0, seconds)
        self._mark = self._now()

    def trace(self, completions: Iterable[Completion]) -> Trace:
        """All that was noted."""
        engine, notes = self._engine, self._notes
        spec, config, target = engine.store, engine.config, engine.target
        drafter = engine.loop.drafter
        if not notes.request:
            raise UsageError("nothing was generated, so there is nothing to record; give another prompt")
        seconds = engine.profile.seconds_per_expert if engine.profile is not None else 0.0
        link = config.link_gbps * 1e9 if config.link_gbps else (spec.layout.nbytes / seconds if seconds else 0.0)
        on_cuda = engine.room.cuda is not None and config.link_gbps is None
        shape = Shape(
            experts=tuple(spec.experts),
            top_k=target.top_k,
            expert_bytes=spec.layout.nbytes,
            draft_layers=drafter.runner.depth_count if isinstance(drafter, DraftModel) else 0,
            draft_tokens=engine.loop.draft_tokens,
            depth=engine.source.grants.depth,
            chunk_bytes=chunk_for(spec.layout.nbytes) if on_cuda else None,
            window=WINDOW,
            slots=engine.slots,
            link_bytes_per_second=link,
        )
        counters = engine.loop.counters.minus(self._before)
        about = {
            "model": config.model,
            "draft": config.draft,
            "options": {
                "prefetch": self._inner.name, "eviction": config.eviction_policy, "cutoff": str(config.cutoff),
                "cutoff_layers": engine.cutoff, "expert_memory": str(config.expert_memory), "dtype": str(engine.dtype),
                "device": str(engine.device), "link_gbps": config.link_gbps, "projection": engine.projection is not None,
            },
            "profile": None if engine.profile is None else asdict(engine.profile),
            "versions": {"spmoe": __version__, "torch": torch.__version__, "python": platform.python_version()},
            "machine": f"{platform.machine()}, {platform.system()}",
            "live": _totals([completion.stats for completion in completions], self._spent),
            "ledger": asdict(counters),
        }  # fmt: skip
        return notes.trace(shape, about)

    # ---- notes

    def _note_slab(self, seen: LayerChunk, now: float) -> None:
        notes = self._notes
        routing = seen.routing if seen.routing is not None else self.predict_routing(seen.stage, seen.depths, seen.residual)
        layers = [layer for depth in seen.depths for layer in self._layers_at[depth]]
        if routing is None or not layers:
            return
        if layers[0] < self._reached:  # the layers begin anew
            self._pass += 1
        self._reached = layers[-1] + 1
        notes.slab_pass.append(self._pass)
        notes.slab_layers.append((layers[0], layers[-1] + 1))
        notes.slab_seconds.append(max(0.0, now - self._mark))
        notes.slab_rows.append(routing.experts.shape[1])
        top_k = self._engine.target.top_k
        notes.foretold.append(routing.experts.cpu().numpy().reshape(-1, top_k).astype(np.int16))
        notes.foretold_score.append(routing.scores.float().cpu().numpy().reshape(-1, top_k).astype(np.float16))

    def _note_ahead(self, depths: range, routing: Routing) -> None:
        notes, target = self._notes, self._engine.target
        rows = routing.experts.shape[1]
        if self._next is None:
            return
        if len(notes.ahead) == len(notes.forward_rows) and (self._tapped == -1 or depths[0] <= self._tapped):
            self._new_ahead(rows)  # another forward begins
        self._tapped = depths[-1]
        at = list(target.layer_depths)
        row = 0
        for depth in depths:
            for ahead, layer in enumerate([layer for layer, where in enumerate(at) if where > depth][:AHEAD]):
                # a layer may follow several decoder layers: the last of them knows best
                notes.ahead[-1][ahead, :, layer] = routing.experts[row].cpu().numpy()
                notes.ahead_score[-1][ahead, :, layer] = routing.scores[row].float().cpu().numpy()
                row += 1

    def _new_ahead(self, rows: int) -> None:
        shape = (AHEAD, rows, self._layers, self._engine.target.top_k)
        self._notes.ahead.append(np.full(shape, -1, dtype=np.int16))
        self._notes.ahead_score.append(np.zeros(shape, dtype=np.float16))

    def _spend(self, started: float) -> None:
        self._spent[self._request][-1] += self._now() - started

    def _now(self) -> float:
        return self._engine.clock.now()


class _NotingExperts:
    """A port that says what was routed and how long it took."""

    def __init__(self, recorder: TraceRecorder, layer: int, inner: ExpertsForward) -> None:
        self._recorder = recorder
        self._layer = layer
        self._inner = inner

    def run(self, experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        recorder = self._recorder
        source, wait, clock = recorder.source, recorder.synchronize, recorder.clock
        wait()
        recorder.routed(self._layer, index, weights)
        source.book_stalls()
        stalled, started = source.counters.stall_seconds, clock.now()
        out = self._inner.run(experts, hidden, index, weights)
        wait()
        source.book_stalls()
        recorder.ran(self._layer, clock.now() - started - (source.counters.stall_seconds - stalled))
        return out


def _totals(requests: list[Stats], spent: dict[int, list[float]]) -> dict[str, float]:
    """What the steps after each request's first one came to, as a replay counts it; noting took no time."""
    parts = [stats.decode_counters for stats in requests]
    names = ("steps", "hits", "late", "demand_loads", "prefetch_loads", "prefetch_used", "stall_seconds")
    return {
        "requests": len(requests),
        "tokens": sum(part.tokens for part in parts),
        "seconds": sum(stats.decode_seconds for stats in requests) - sum(sum(steps[1:]) for steps in spent.values()),
        **{name: sum(getattr(part, name) for part in parts) for name in names},
    }


def record(
    llm: LLM,
    prompts: list[str],
    params: SamplingParams,
    observer: Callable[[Generation], AbstractContextManager[None]] = lambda generation: nullcontext(),
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Trace:
    """Generate from each prompt and note everything.

    `watch` is entered around every generation; where it stops one, what there is so far is the trace. `report` is told
    how many prompts are done.
    """
    generations = [llm.stream(prompt, params) for prompt in prompts]  # a prompt that cannot be read is refused first
    recorder = TraceRecorder(llm.engine)
    completions = []
    try:
        for number, generation in enumerate(generations):
            report(number, len(generations))
            with observer(generation):
                completions.append(generation.run())
            if generation.stopped:
                break
        return recorder.trace(completions)
    finally:
        recorder.detach()
