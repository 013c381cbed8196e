"""Replay a trace under one configuration at a time, with recorded or given compute times."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from spmoe.backends.cuda_transfer import WINDOW, chunk_for
from spmoe.config import Cutoff, CutoffMode, Size
from spmoe.errors import UsageError
from spmoe.interpreter import gc_paused
from spmoe.observe.ledger import Counters
from spmoe.observe.timeline import Activity, Timeline
from spmoe.predict.cutoff import ENOUGH_STEPS, CutoffInputs, Profile, choose_cutoff
from spmoe.replay.engine import ReplayEngine
from spmoe.replay.eviction import make_replay_eviction, require_eviction
from spmoe.replay.policies import ReplayPolicy, require_policy
from spmoe.replay.steps import StepPlan, plan_steps
from spmoe.replay.trace import Shape, Trace
from spmoe.types import DraftOutcome

_ALL_LAYERS = Cutoff(CutoffMode.ALL)
_DRAWN_STEPS = 32


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """Options of one replay; None: as recorded."""

    prefetch: str = "draft-gate"
    eviction: str = "draft-informed"
    draft_tokens: int | None = None
    cutoff: Cutoff = _ALL_LAYERS
    memory: Size | None = None
    link_gbps: float | None = None
    cpu_gbps: float | None = None  # at which the CPU computes experts beside a busy link; None: it does not


@dataclass(frozen=True, slots=True)
class ComputeTimes:
    """Compute times in seconds that replace the recorded ones; None: as recorded."""

    scale: float = 1.0  # factor for all times, recorded or given
    draft_pass: float | None = None
    verify_layer: float | None = None  # before and in its experts, all of them resident
    rest: float | None = None  # of a step, outside of passes and layers


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Totals of one replay, without the steps that read a prompt."""

    config: ReplayConfig
    draft_tokens: int
    slots: int
    cutoff_layers: int | None  # None: the policy does not predict from the draft
    link_bytes_per_second: float
    expert_bytes: int
    steps: int
    tokens: int
    seconds: float
    compute_seconds: float  # without stalls: a step with every expert resident
    link_seconds: float  # in which the link was busy
    counters: Counters
    ideal_seconds: float  # sum over steps of the larger of the useful loads' time and compute
    wall_seconds: float  # real time of the replay itself

    @property
    def useful_seconds(self) -> float:
        """Seconds that the loads that were used take on the link."""
        return self.counters.useful_loads * self.expert_bytes / self.link_bytes_per_second

    @property
    def wasted_loads(self) -> int:
        """Prefetched experts that were evicted before use."""
        return self.counters.wasted_bytes // self.expert_bytes

    @property
    def efficiency(self) -> float:
        """Pipeline efficiency: the larger of useful loads and compute, over the time taken."""
        return max(self.useful_seconds, self.compute_seconds) / self.seconds if self.seconds else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        c, steps, tokens = self.counters, max(1, self.steps), max(1, self.tokens)
        settled = max(1, c.prefetch_used + self.wasted_loads)
        return {
            "type": "replay",
            "prefetch": self.config.prefetch,
            "eviction": self.config.eviction,
            "num_speculative_tokens": self.draft_tokens,
            "cutoff": str(self.config.cutoff),
            "cutoff_layers": self.cutoff_layers,
            "slots": self.slots,
            "link_gbps": self.link_bytes_per_second / 1e9,
            "cpu_gbps": self.config.cpu_gbps,
            "steps": self.steps,
            "tokens": self.tokens,
            "step_ms": 1e3 * self.seconds / steps,
            "tpot_ms": 1e3 * self.seconds / tokens,
            "compute_ms_per_step": 1e3 * self.compute_seconds / steps,
            "stall_ms_per_step": 1e3 * c.stall_seconds / steps,
            "cpu_wait_ms_per_step": 1e3 * c.cpu_wait_seconds / steps,
            "cpu_experts_per_step": c.cpu_experts / steps,
            "cpu_experts_per_token": c.cpu_experts / tokens,
            "wrong_path_choices_share": c.wrong_path_choices / c.path_choices if c.path_choices else None,
            "loads_per_step": c.loads / steps,
            "loads_per_token": c.loads / tokens,
            "useful_loads_per_step": c.useful_loads / steps,
            "bytes_per_step": c.loads * self.expert_bytes / steps,
            "bytes_per_token": c.loads * self.expert_bytes / tokens,
            "hit_rate": c.hit_rate,
            "demand_loads_per_step": c.demand_loads / steps,
            "prefetch_loads_per_step": c.prefetch_loads / steps,
            "used_share": c.prefetch_used / settled,
            "late_share": c.late / settled,
            "wasted_share": self.wasted_loads / settled,
            "pipeline_efficiency": self.efficiency,
            "step_bound_ms": 1e3 * self.ideal_seconds / steps,
            "link_busy_share": self.link_seconds / self.seconds if self.seconds else 0.0,
            "replayed_steps_per_second": self.steps / self.wall_seconds if self.wall_seconds else None,
        }


class Replayer:
    """A trace, its steps planned once per K, and the compute times."""

    def __init__(self, trace: Trace, times: ComputeTimes | None = None) -> None:
        self.trace = trace
        self.times = times or ComputeTimes()
        self._plans: dict[int, list[StepPlan]] = {}  # by K

    def run(self, config: ReplayConfig, timeline: Timeline | None = None) -> ReplayResult:
        """Replay the trace from empty slots; the last steps go to the timeline."""
        with gc_paused():
            return self.start(config, timeline).finish()

    def start(self, config: ReplayConfig, timeline: Timeline | None = None) -> ReplayRun:
        """Return a replay that can be run step by step."""
        return ReplayRun(self, config, timeline)

    def require(self, config: ReplayConfig) -> None:
        """Raise UsageError if the configuration cannot be replayed."""
        shape = self.trace.shape
        self.steps(shape.draft_tokens if config.draft_tokens is None else config.draft_tokens)
        require_policy(config.prefetch)
        require_eviction(config.eviction)
        slot_count(config.memory, shape)
        link_rate(config.link_gbps, shape)
        if config.cpu_gbps is not None and not 0 < config.cpu_gbps < float("inf"):
            raise UsageError(f"the CPU's rate must be above 0 GB/s, not {config.cpu_gbps:g}")

    def steps(self, draft_tokens: int) -> list[StepPlan]:
        """Return the trace's steps for this K, with their compute times."""
        if draft_tokens not in self._plans:
            self._plans[draft_tokens] = self._plan(draft_tokens)
        return self._plans[draft_tokens]

    def _plan(self, draft_tokens: int) -> list[StepPlan]:
        steps, times, layers = plan_steps(self.trace, draft_tokens), self.times, self.trace.shape.layers
        share = _expert_share(self.trace)
        for step in steps:
            for chunk in step.chunks:
                if times.draft_pass is not None:
                    chunk.seconds = times.draft_pass * len(chunk.prediction.layers) / layers
                chunk.seconds *= times.scale
            for forward in step.forwards:
                if times.verify_layer is not None:
                    counts = [max(1, len(experts)) for experts in forward.experts]
                    forward.front = [times.verify_layer * (1 - share)] * layers
                    forward.per_expert = [times.verify_layer * share / count for count in counts]
                forward.front = [times.scale * seconds for seconds in forward.front]
                forward.per_expert = [times.scale * seconds for seconds in forward.per_expert]
            step.rest = times.scale * (step.rest if times.rest is None else times.rest)
        return steps


class ReplayRun:
    """One configuration, step by step."""

    def __init__(self, replayer: Replayer, config: ReplayConfig, timeline: Timeline | None) -> None:
        shape = replayer.trace.shape
        self.config, self.timeline, self._shape = config, timeline, shape
        self.draft_tokens = shape.draft_tokens if config.draft_tokens is None else config.draft_tokens
        self.plan = replayer.steps(self.draft_tokens)
        self.slots, self.rate = slot_count(config.memory, shape), link_rate(config.link_gbps, shape)
        self.policy = ReplayPolicy(config.prefetch, shape, self.plan)
        eviction = make_replay_eviction(config.eviction, shape.experts, self.plan)
        budget = self.slots if self.policy.uses_step_budget else None
        self.engine = ReplayEngine(
            shape, self.slots, self.rate, eviction, budget, timeline, admits=self.policy.admits,
            cpu_bytes_per_second=None if config.cpu_gbps is None else config.cpu_gbps * 1e9,
        )  # fmt: skip
        self._cutoff_inputs = CutoffInputs(shape.layers, max(shape.experts), shape.top_k, self.slots, self.draft_tokens)
        self._profile = self._first_profile()
        self._missing = self._verified = 0  # experts that verified steps had to load, and those steps
        self.cutoff = shape.layers
        self._choose_cutoff()

    def finish(self) -> ReplayResult:
        """Run every step and return the totals."""
        began, engine = time.perf_counter(), self.engine
        seconds = compute = link = ideal = 0.0
        total, since, tokens, steps = Counters(), None, 0, 0
        counters = engine.counters
        sequence_id = -1
        for number, step in enumerate(self.plan):
            reads_prompt = step.sequence_id != sequence_id
            if reads_prompt:
                sequence_id = step.sequence_id
                self._learn()
            if reads_prompt and since is not None:  # steps that read a prompt are not counted
                total, since = total.plus(counters.minus(since)), None
            elif not reads_prompt and since is None:
                since = counters.copy()
            if self.timeline is not None:
                self.timeline.recording = number >= len(self.plan) - _DRAWN_STEPS
            started, busy = engine.now, engine.link_seconds
            stalled, useful = counters.stall_seconds + counters.cpu_wait_seconds, counters.useful_loads
            self.step(number, step)
            useful = counters.useful_loads - useful
            if step.drafted:
                self._verified += 1
                self._missing += useful
            if not reads_prompt:
                took = engine.now - started
                waited = counters.stall_seconds + counters.cpu_wait_seconds - stalled
                seconds += took
                compute += took - waited
                link += engine.link_seconds - busy
                ideal += max(took - waited, useful * engine.seconds_per_expert)
                tokens += step.tokens
                steps += 1
        if since is not None:
            total = total.plus(counters.minus(since))
        engine.close()
        if not steps:
            raise UsageError("the trace has no step after the prompts; record longer generations")
        cutoff = self.cutoff if self.policy.uses_cutoff else None
        return ReplayResult(
            self.config, self.draft_tokens, self.slots, cutoff, self.rate, self._shape.expert_bytes, steps, tokens,
            seconds, compute, link, total, ideal, time.perf_counter() - began,
        )  # fmt: skip

    def step(self, number: int, step: StepPlan) -> None:
        """Replay one step: draft, predict, prefetch, verify."""
        began = self.engine.now
        drafted = replay_step(self.engine, self.policy, step)
        self.policy.on_accept(DraftOutcome(step.drafted, step.accepted))
        if self.timeline is not None:
            self.timeline.add(Activity.DRAFT, began, drafted, f"step {number}")
            self.timeline.add(Activity.VERIFY, drafted, self.engine.now, f"step {number}")

    # ---- the cutoff, chosen as in the live engine

    def _first_profile(self) -> Profile:
        drafted = [step for step in self.plan if step.drafted]
        passes = sum(step.drafted for step in drafted if step.chunks)
        draft = sum(chunk.seconds for step in drafted for chunk in step.chunks) / max(1, passes)
        forwards = [forward for step in drafted or self.plan for forward in step.forwards]
        verify = sum(forward.seconds for forward in forwards)
        depth, per_layer = max(1, self._shape.draft_layers), verify / max(1, len(forwards)) / self._shape.layers
        share = max(0.0, 1 - sum(sum(f.front) for f in forwards) / verify) if verify else 0.0
        return Profile(
            draft / depth,
            depth,
            per_layer,
            self.engine.seconds_per_expert,
            self._cutoff_inputs.free_slots,
            expert_share=share,
        )

    def _choose_cutoff(self) -> None:
        if self.policy.uses_cutoff:
            self.cutoff = choose_cutoff(self.config.cutoff, self._profile, self._cutoff_inputs)
            self.policy.set_cutoff(self.cutoff)

    def _learn(self) -> None:
        """Choose the cutoff again from the number of experts that verified steps had to load."""
        if self._verified >= ENOUGH_STEPS:
            found = self._missing / self._verified / self._shape.layers
            self._profile = replace(self._profile, missing_per_layer=found)
            self._choose_cutoff()


def replay_step(engine: ReplayEngine, policy: ReplayPolicy, step: StepPlan) -> float:
    """Draft, predict, prefetch and verify; return the virtual time at which the draft was complete."""
    reads_prompt = sum(forward.rows for forward in step.forwards) > step.drafted + 1
    engine.begin_step(step.sequence_id, policy.on_routed, None if reads_prompt else step.drafted)
    engine.prefetch(policy.begin_step(step.sequence_id))
    for chunk in step.chunks:
        engine.compute(chunk.seconds)
        if (requests := policy.on_prediction(chunk.prediction)) is not None:
            engine.prefetch(requests)
    drafted = engine.now
    engine.end_draft()
    for forward in step.forwards:
        for layer, experts in enumerate(forward.experts):
            engine.compute(forward.front[layer])
            predicted = policy.on_prediction(forward.ahead[layer])
            rows = forward.expert_rows(layer) if engine.uses_cpu else None
            engine.run_layer(layer, experts, forward.per_expert[layer], forward.shares[layer], predicted, rows)
    engine.compute(step.rest)
    engine.end_step()
    return drafted


def _expert_share(trace: Trace) -> float:
    """Return the share of a verified layer's compute time that its experts take."""
    verifying = trace.forward_rows <= trace.shape.draft_tokens + 1
    front, experts = float(trace.forward_front[verifying].sum()), float(trace.forward_experts[verifying].sum())
    return experts / (front + experts) if front + experts else 0.5


def link_rate(link_gbps: float | None, shape: Shape) -> float:
    """Return the link's bytes per second: those given or, for None, those recorded."""
    rate = shape.link_bytes_per_second if link_gbps is None else link_gbps * 1e9
    if rate <= 0:
        raise UsageError("the trace does not say how fast its link was; give --link-gbps")
    return rate


def slot_count(memory: Size | None, shape: Shape) -> int:
    """Return the number of slots that the memory holds; for None, the recorded number."""
    if memory is None:
        return shape.slots
    experts = sum(shape.experts)
    slots = min(experts, memory.of(experts * shape.expert_bytes) // shape.expert_bytes)
    if slots < shape.top_k:
        count = f"{slots} expert{'s' * (slots != 1)}"
        raise UsageError(f"{memory} holds {count}, fewer than the {shape.top_k} of one token; give more")
    return int(slots)


def as_cuda(trace: Trace) -> Trace:
    """Return the trace as if recorded with the CUDA transfer: prefetches in chunks, which demand loads overtake."""
    chunk = chunk_for(trace.shape.expert_bytes)
    return replace(trace, shape=replace(trace.shape, chunk_bytes=chunk, window=WINDOW))


def rank(results: Sequence[ReplayResult]) -> list[int]:
    """Return the rank of each result by time per token; 1 is the fastest."""
    order = sorted(range(len(results)), key=lambda i: results[i].seconds / max(1, results[i].tokens))
    ranks = [0] * len(results)
    for place, i in enumerate(order, start=1):
        ranks[i] = place
    return ranks
