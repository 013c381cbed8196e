"""All measuring of the parts of a step: single passes, expert loads, and the predictions of real generations.

Two measurements share the timers. `measure` is short; the automatic cutoff is computed from it, and it is cached on
disk per machine, pair and options. `measure_parts` and `PredictionCounter` are the longer one of `spmoe profile`.
Times are in seconds.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from spmoe.config import EngineConfig, home
from spmoe.engine.threads import engine_threads
from spmoe.experts.experts import Experts
from spmoe.experts.store import StoreSpec
from spmoe.files import decode_json, write_json_cache
from spmoe.models.checkpoint import Checkpoint
from spmoe.models.runner import ModelRunner
from spmoe.models.target import Target
from spmoe.observe.clock import Clock
from spmoe.observe.timeline import Activity
from spmoe.predict.costs import CostPrior
from spmoe.predict.cutoff import CutoffInputs, Profile
from spmoe.predict.governor import Governor
from spmoe.predict.latency import expected_experts
from spmoe.predict.policies.base import PrefetchPolicy
from spmoe.system.origin import Origin, origins_to_json
from spmoe.types import DraftOutcome, ExpertKey, LayerChunk, PrefetchRequests, Residency, Routing, Stage

PASSES = 5  # timed passes of the short measurement, after one warm-up pass
LONG_PASSES = 9  # of the longer one
LOAD_TRIES = 7
VERIFY_ROWS = (1, 2, 3, 5, 9)
_SLOW_DRAFT = 1.25  # draft pass / target pass from which on a warning is given: measurements vary


# ---- the cached profile


def cutoff_inputs(spec: StoreSpec, top_k: int, slots: int, draft_tokens: int) -> CutoffInputs:
    """Return the inputs of the cutoff that come from the model and the options."""
    return CutoffInputs(len(spec.experts), max(spec.experts), top_k, slots, draft_tokens)


def profile_settings(
    config: EngineConfig, checkpoint: Checkpoint, draft: Checkpoint | None, inputs: CutoffInputs
) -> dict[str, Any]:
    """Return everything that a profile depends on besides the machine; part of the cache key."""
    return {
        "target": checkpoint.fingerprint,
        "draft": config.resolved_draft if draft is None else draft.fingerprint,
        "dtype": config.dtype,
        "expert_format": config.expert_format,
        "link_gbps": config.link_gbps,
        "device": config.device,
        "shape": config.shape,
        "enforce_eager": config.enforce_eager,
        "pin_memory": config.pin_memory,
        "prefetch": config.prefetch,  # the learned number of missing experts depends on this and on what follows
        "eviction": config.eviction_policy,
        "batching": config.batching,
        "overlap": config.overlap,
        "threads": engine_threads(config, checkpoint, draft),
        **asdict(inputs),
        **({"cpu_experts": config.cpu_experts} if config.cpu_experts != "off" else {}),
        **({"residency_check": config.residency_check} if config.residency_check != "auto" else {}),
        **({"lengths": "auto"} if config.num_speculative_tokens == "auto" else {}),
    }


def profile_path(settings: Mapping[str, Any]) -> Path:
    """Return the file that caches the profile of these settings on this machine."""
    machine = [platform.node(), platform.machine(), os.cpu_count(), torch.__version__]
    text = json.dumps([machine, dict(settings)], sort_keys=True, default=str)
    return home() / "profiles" / f"{hashlib.sha256(text.encode()).hexdigest()[:20]}.json"


def read_profile(path: Path) -> Profile | None:
    """Read a cached profile; None if there is none or if it is damaged."""
    try:
        values = decode_json(path.read_text())
        values.pop("origin", None)
        learned = values.pop("missing_per_layer", None)
        numbers = values.values() if learned is None else [*values.values(), learned]
        valid = all(type(v) in (int, float) and 0 <= v < math.inf for v in numbers)
        return Profile(**values, missing_per_layer=learned) if valid else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def write_profile(path: Path, profile: Profile, origins: Sequence[Origin]) -> None:
    """Cache a profile and the checkpoints that it was measured with.

    An unwritable directory is ignored, since the profile can be measured again.
    """
    write_json_cache(path, {**asdict(profile), "origin": origins_to_json(origins)})


# ---- the governor's experience


def cost_prior(profile: Profile, inputs: CutoffInputs) -> CostPrior:
    """Return the costs of a step that a profile knows."""
    return CostPrior(
        base=inputs.layers * (profile.layer_seconds or profile.verify_seconds_per_layer),
        load=profile.seconds_per_expert,
        row=profile.draft_layers * profile.draft_seconds_per_layer,
    )


def governor_path(settings: Mapping[str, Any]) -> Path:
    """Return the file that keeps what the governor has learned under these settings on this machine."""
    path = profile_path(settings)
    return path.with_name(f"governor-{path.name}")


def read_governor(path: Path, governor: Governor) -> None:
    """Let a governor start from what earlier runs have learned, if there is a usable file."""
    try:
        state = json.loads(path.read_text())
    except (OSError, ValueError):
        return
    if isinstance(state, dict):
        governor.restore(state)


def write_governor(path: Path, governor: Governor, origins: Sequence[Origin]) -> None:
    """Keep what a governor has learned for later runs; an unwritable directory is ignored."""
    write_json_cache(path, {**governor.state(), "origin": origins_to_json(origins)})


# ---- drafts that cost more than they can gain


def slow_draft_notice(
    draft: str, k: int, draft_seconds: float, verify_seconds: float, plain_seconds: float
) -> str | None:
    """Return a warning if a draft pass takes longer than a pass of the target, with the best case of speculation.

    `verify_seconds`: K + 1 rows; `plain_seconds`: a step without speculation.
    """
    if k < 1 or draft_seconds <= _SLOW_DRAFT * plain_seconds:
        return None
    ratio = (k * draft_seconds + verify_seconds) / ((k + 1) * plain_seconds)
    return (
        f"one pass of the draft {draft} takes {draft_seconds / plain_seconds:.1f} times as long as one of the target "
        f"({1e3 * draft_seconds:.3g} ms, {1e3 * plain_seconds:.3g} ms): even if every draft token is accepted, a token "
        f"takes {ratio:.1f} times as long as with -k 0; use -k 0, --draft ngram or a smaller draft"
    )


# ---- timers


@dataclass(frozen=True, slots=True)
class Timing:
    """Time of one piece of work that uses experts."""

    seconds: float
    stall_seconds: float  # part of `seconds` that compute waited for copies
    expert_seconds: float  # part of `seconds` from routing to the end of a layer's experts, without stalls
    loads: int  # demand loads

    @property
    def compute_seconds(self) -> float:
        """Time without stalls."""
        return self.seconds - self.stall_seconds


class Timer:
    """Timer of work that uses experts. Every measurement begins and ends with an idle device."""

    def __init__(self, experts: Experts, clock: Clock, synchronize: Callable[[], None]) -> None:
        self.experts = experts
        self._clock = clock
        self._synchronize = synchronize

    def time(self, work: Callable[[], object]) -> Timing:
        """Run `work` as a step of its own and time it."""
        timeline = self.experts.timeline
        self.experts.step.begin()
        self._synchronize()
        before, first_span, recording = self.experts.ledger.counters.copy(), len(timeline.spans), timeline.recording
        timeline.recording = True
        try:
            started = self._clock.now()
            work()
            self._synchronize()
            seconds = self._clock.now() - started
            self.experts.step.end()
            spans = timeline.spans[first_span:]
            layers = sum(span.end - span.start for span in spans if span.activity is Activity.LAYER)
        finally:
            timeline.recording = recording
            del timeline.spans[first_span:]
        counted = self.experts.ledger.counters.minus(before)
        return Timing(seconds, counted.stall_seconds, layers - counted.stall_seconds, counted.demand_loads)

    def passes(
        self, runner: ModelRunner, rows: int, text: Sequence[int] | None = None, count: int = PASSES
    ) -> list[Timing]:
        """Time `count` passes of `rows` rows over a text (default: any tokens), after one warm-up pass."""
        text = text or range(runner.vocab_size)
        found = []
        with runner.temporary_kv(rows * (count + 2) + 1) as kv:
            runner.forward([text[0]], kv, 1)  # CUDA graphs only continue a KV cache that is not empty
            for number in range(count + 1):
                tokens = [text[(number * rows + i) % len(text)] for i in range(rows)]
                found.append(self.time(lambda tokens=tokens: runner.forward(tokens, kv, rows)))  # type: ignore[misc]
        return found[1:]

    def load(self, layer: int, experts: Sequence[int]) -> Timing:
        """Time the use of experts of one layer; those that are not resident are demanded together."""
        return self.time(lambda: list(self.experts.access.use(layer, experts)))


def _expert_share(target: Target, verified: Sequence[Timing], expert_bytes: int, needed: float) -> float:
    """Return the share of a layer's time that its experts take: measured on a CPU, estimated on other devices.

    Kernels of a device run asynchronously, so there it is the experts' share of the weights that a layer reads.
    """
    if target.model.device.type == "cpu":
        return median(max(0.0, timing.expert_seconds / timing.compute_seconds) for timing in verified)
    return needed * expert_bytes / (needed * expert_bytes + target.resident_bytes / max(1, target.depth_count))


# ---- the short measurement


def measure(
    target: Target,
    draft: ModelRunner | None,
    experts: Experts,
    inputs: CutoffInputs,
    clock: Clock,
    synchronize: Callable[[], None] = lambda: None,
) -> Profile:
    """Time draft passes of one row, verification passes without their stalls, and loads of a layer's experts.

    `draft` is None if no model drafts. `synchronize` waits for a device that computes and copies asynchronously.
    Passes use the fastest time, since anything above it is other work on the machine.
    """
    timer = Timer(experts, clock, synchronize)
    batch = range(min(inputs.slots, inputs.experts_per_layer))
    loads = [timer.load(layer, batch) for layer in range(min(inputs.layers, PASSES))]
    per_expert = [timing.seconds / timing.loads for timing in loads if timing.loads]
    verified = timer.passes(target, inputs.draft_tokens + 1)
    plain = timer.passes(target, 1, [0])  # one token again and again, so that its experts are resident
    depth = 0 if draft is None else draft.depth_count
    drafted = 0.0 if draft is None else min(timing.compute_seconds for timing in timer.passes(draft, 1)) / depth
    return Profile(
        drafted,
        depth,
        min(timing.compute_seconds for timing in verified) / inputs.layers,
        median(per_expert) if per_expert else 0.0,
        inputs.free_slots,
        expert_share=_expert_share(target, verified, experts.pool.blob_bytes, inputs.needed_per_layer),
        layer_seconds=min(timing.compute_seconds for timing in plain) / inputs.layers,
    )


# ---- the longer measurement


@dataclass(frozen=True, slots=True)
class PartTimes:
    """Median times of the parts of a step."""

    draft_pass_seconds: float | None  # one row; None: no draft model
    verify_seconds: dict[int, float]  # by rows, without stalls
    expert_share: float  # share of a verified layer that comes after its router
    load_seconds: dict[int, float]  # by the number of experts that are demanded together; empty: all are resident


def measure_parts(
    timer: Timer,
    target: Target,
    draft: ModelRunner | None,
    spec: StoreSpec,
    slots: int,
    max_rows: int,
    text: Sequence[int],
) -> PartTimes:
    """Time a draft pass, verification by rows (at most `max_rows`) and loads by batch size."""
    drafted = timer.passes(draft, 1, text, LONG_PASSES) if draft is not None else None
    verified = {rows: timer.passes(target, rows, text, LONG_PASSES) for rows in VERIFY_ROWS if rows <= max(1, max_rows)}
    most = max(verified)
    needed = expected_experts(max(spec.experts), target.top_k, most)
    return PartTimes(
        median(timing.compute_seconds for timing in drafted) if drafted is not None else None,
        {rows: median(timing.compute_seconds for timing in times) for rows, times in verified.items()},
        _expert_share(target, verified[most], spec.layout.nbytes, needed),
        _loads_by_batch(timer, spec, slots),
    )


def _loads_by_batch(timer: Timer, spec: StoreSpec, slots: int) -> dict[int, float]:
    """Return seconds for 1, 2, 4, ... absent experts of one layer, demanded together."""
    if slots >= spec.count:
        return {}
    found, most, size, layer = dict[int, float](), min(slots, *spec.experts), 1, 0
    while size <= most:
        times = []
        for _ in range(LOAD_TRIES):
            layer = (layer + 1) % len(spec.experts)
            timing = timer.load(layer, _evict_experts(timer.experts, spec, slots, layer, size)[:size])
            if timing.loads == size:
                times.append(timing.seconds)
        if times:
            found[size] = median(times)
        size = most if size < most < 2 * size else 2 * size
    return found


def _evict_experts(experts: Experts, spec: StoreSpec, slots: int, layer: int, count: int) -> list[int]:
    """Load experts of other layers until `count` experts of this layer are absent; return the absent ones."""

    def absent() -> list[int]:
        every = range(spec.experts[layer])
        return [expert for expert in every if experts.pool.residency(ExpertKey(layer, expert)) is Residency.ABSENT]

    layers = len(spec.experts)
    for other in (n % layers for n in range(layer + 1, layer + layers)):
        if len(absent()) >= count:
            break
        experts.step.begin()
        for _ in experts.access.use(other, range(min(slots, spec.experts[other]))):
            pass
        experts.step.end()
    return absent()


# ---- predictions of real generations


class PredictionCounter(PrefetchPolicy):
    """Wrapper of a policy that counts predicted, missing and needed experts. Steps that read a prompt do not count.

    Predictions are counted by the stage that made them first: `Stage.DRAFT`, also for those made when a step begins,
    or `Stage.VERIFY`. An expert that is resident when it is predicted does not count.
    """

    def __init__(self, policy: PrefetchPolicy, experts: Experts, layers: int) -> None:
        self._policy, self._experts = policy, experts
        self.name, self.stages = policy.name, policy.stages
        self.needed = 0
        self.missing = [0] * layers  # by layer
        self.predicted = {Stage.DRAFT: 0, Stage.VERIFY: 0}
        self.correct = {Stage.DRAFT: 0, Stage.VERIFY: 0}  # predicted and needed
        self._sequence_id: int | None = None
        self._counting = False
        self._missed = 0  # counter value after the previous layer
        self._step_predicted: dict[ExpertKey, Stage] = {}
        self._step_needed: set[ExpertKey] = set()

    def begin_step(self, sequence_id: int) -> PrefetchRequests:
        self._counting, self._sequence_id = sequence_id == self._sequence_id, sequence_id
        self._missed = self._experts.ledger.counters.missed
        self._step_predicted, self._step_needed = {}, set()
        return self._count(self._policy.begin_step(sequence_id), Stage.DRAFT)

    def predict_routing(self, stage: Stage, depths: range, residual: Tensor) -> Routing | None:
        return self._policy.predict_routing(stage, depths, residual)

    def on_chunk(self, chunk: LayerChunk) -> PrefetchRequests:
        stage = Stage.VERIFY if chunk.stage is Stage.VERIFY else Stage.DRAFT
        return self._count(self._policy.on_chunk(chunk), stage)

    def on_routed(self, layer: int, experts: Sequence[int]) -> PrefetchRequests:
        self._step_needed.update(ExpertKey(layer, expert) for expert in experts)
        before, self._missed = self._missed, self._experts.ledger.counters.missed  # this layer's included
        if self._counting:
            self.missing[layer] += self._missed - before
        return self._count(self._policy.on_routed(layer, experts), Stage.VERIFY)

    def on_accept(self, accepted: DraftOutcome) -> None:
        self._policy.on_accept(accepted)
        if not self._counting:
            return
        self.needed += len(self._step_needed)
        for key, stage in self._step_predicted.items():
            self.predicted[stage] += 1
            self.correct[stage] += key in self._step_needed

    def _count(self, prefetches: PrefetchRequests, stage: Stage) -> PrefetchRequests:
        for key in map(ExpertKey, prefetches.layers.tolist(), prefetches.experts.tolist()):
            if self._experts.pool.residency(key) is Residency.ABSENT and key not in self._step_needed:
                self._step_predicted.setdefault(key, stage)
        return prefetches
