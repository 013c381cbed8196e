"""Replaying a trace: one configuration at a time, on times that were recorded or are given, and what comes of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

from spmoe.backends.cuda_transfer import WINDOW, chunk_for
from spmoe.config import Cutoff, CutoffMode, Size
from spmoe.errors import UsageError
from spmoe.gc_pause import gc_paused
from spmoe.observe.ledger import Counters
from spmoe.observe.timeline import Activity, Timeline
from spmoe.predict.cutoff import ENOUGH_STEPS, CutoffInputs, Profile, choose_cutoff
from spmoe.replay.evictions import make_rule, require_rule
from spmoe.replay.foresight import make_replay_policy
from spmoe.replay.moving import NEVER, Machine
from spmoe.replay.simulate import Simulation
from spmoe.replay.steps import ForwardPlan, Prediction, StepPlan, plan_steps
from spmoe.replay.trace import Shape, Trace

_ALL_LAYERS = Cutoff(CutoffMode.ALL)
_DRAWN_STEPS = 32


@dataclass(frozen=True, slots=True)
class Setting:
    """What a replay varies."""

    prefetch: str = "draft-gate"
    eviction: str = "draft-informed"
    draft_tokens: int | None = None  # None: as recorded
    cutoff: Cutoff = _ALL_LAYERS
    memory: Size | None = None  # None: as recorded
    link_gbps: float | None = None  # None: as recorded


@dataclass(frozen=True, slots=True)
class Times:
    """What compute takes, where it is not as recorded. Seconds."""

    scale: float = 1.0  # of everything that follows
    draft_pass: float | None = None
    verify_layer: float | None = None  # front and experts, when all that a layer needs is there
    rest: float | None = None  # of a step, outside of passes and layers


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one configuration, steps with a prompt left out."""

    setting: Setting
    draft_tokens: int
    slots: int
    cutoff_layers: int | None
    link_bytes_per_second: float
    expert_bytes: int
    steps: int
    tokens: int
    seconds: float
    compute_seconds: float  # of them that compute did not wait: a step with every expert in a slot
    link_seconds: float  # of them that the link was busy
    counters: Counters  # in experts, not bytes
    ideal_seconds: float  # each step at its own best: its useful loads, or its compute, whichever takes longer
    wall_seconds: float  # that the replay itself took

    @property
    def useful_seconds(self) -> float:
        """What the loads that were used take on the link."""
        return self.counters.useful_loads * self.expert_bytes / self.link_bytes_per_second

    @property
    def efficiency(self) -> float:
        """The pipeline's: the larger of useful loads and compute, over the time taken."""
        return max(self.useful_seconds, self.compute_seconds) / self.seconds if self.seconds else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        c, steps, tokens = self.counters, max(1, self.steps), max(1, self.tokens)
        settled = max(1, c.prefetch_used + c.wasted_bytes)
        return {
            "type": "replay",
            "prefetch": self.setting.prefetch,
            "eviction": self.setting.eviction,
            "num_speculative_tokens": self.draft_tokens,
            "cutoff": str(self.setting.cutoff),
            "cutoff_layers": self.cutoff_layers,
            "slots": self.slots,
            "link_gbps": self.link_bytes_per_second / 1e9,
            "steps": self.steps,
            "tokens": self.tokens,
            "step_ms": 1e3 * self.seconds / steps,
            "tpot_ms": 1e3 * self.seconds / tokens,
            "compute_ms_per_step": 1e3 * self.compute_seconds / steps,
            "stall_ms_per_step": 1e3 * c.stall_seconds / steps,
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
            "wasted_share": c.wasted_bytes / settled,
            "pipeline_efficiency": self.efficiency,
            "step_bound_ms": 1e3 * self.ideal_seconds / steps,
            "link_busy_share": self.link_seconds / self.seconds if self.seconds else 0.0,
            "replayed_steps_per_second": self.steps / self.wall_seconds if self.wall_seconds else None,
        }


class Replayer:
    """A trace, its steps worked out once per K, and the times that compute takes."""

    def __init__(self, trace: Trace, times: Times | None = None) -> None:
        self.trace = trace
        self.times = times or Times()
        self.width = max(trace.shape.experts)
        self._plans = lru_cache(maxsize=None)(self._plan)

    def run(self, setting: Setting, timeline: Timeline | None = None) -> Outcome:
        """Replay the trace, from empty slots, under one configuration; the last steps go to the timeline."""
        with gc_paused():
            return self.start(setting, timeline).all()

    def start(self, setting: Setting, timeline: Timeline | None = None) -> Run:
        """A run that has not begun."""
        return Run(self, setting, timeline)

    def require(self, setting: Setting) -> None:
        """Refuse what cannot be replayed, before anything else is."""
        shape = self.trace.shape
        self.steps(shape.draft_tokens if setting.draft_tokens is None else setting.draft_tokens)
        make_replay_policy(setting.prefetch, shape.layers, self.width)
        require_rule(setting.eviction)
        _slots(setting.memory, shape)
        _rate(setting.link_gbps, shape)

    def steps(self, draft_tokens: int) -> list[StepPlan]:
        """The trace's steps for this K, with the times that compute takes."""
        return self._plans(draft_tokens)

    def _plan(self, draft_tokens: int) -> list[StepPlan]:
        steps, times, layers = plan_steps(self.trace, draft_tokens), self.times, self.trace.shape.layers
        share = _expert_share(self.trace)
        for step in steps:
            for chunk in step.chunks:
                if times.draft_pass is not None:
                    chunk.seconds = times.draft_pass * chunk.layers / layers
                chunk.seconds *= times.scale
            for forward in step.forwards:
                if times.verify_layer is not None:
                    counts = [max(1, len(needed)) for needed in forward.needed]
                    forward.front = [times.verify_layer * (1 - share)] * layers
                    forward.per_expert = [times.verify_layer * share / count for count in counts]
                forward.front = [times.scale * seconds for seconds in forward.front]
                forward.per_expert = [times.scale * seconds for seconds in forward.per_expert]
            step.rest = times.scale * (step.rest if times.rest is None else times.rest)
        return steps


class Run:
    """A trace under one configuration, step by step."""

    def __init__(self, replayer: Replayer, setting: Setting, timeline: Timeline | None) -> None:
        shape = replayer.trace.shape
        self.setting = setting
        self.k = shape.draft_tokens if setting.draft_tokens is None else setting.draft_tokens
        self.plan = replayer.steps(self.k)
        self.shape, self.expert_bytes = shape, shape.expert_bytes
        self.slots = _slots(setting.memory, shape)
        self.rate = rate = _rate(setting.link_gbps, shape)
        chunk = None if shape.chunk_bytes is None else shape.chunk_bytes / rate
        machine = Machine(
            self.slots, self.expert_bytes / rate, shape.depth, chunk, shape.window, demands_first=chunk is not None
        )
        rule = make_rule(setting.eviction, shape.experts, self.plan)
        self.foresight = make_replay_policy(setting.prefetch, shape.layers, replayer.width)
        self.foresight.prepare(self.plan)
        self.sim = Simulation(machine, rule, timeline)
        self.timeline = timeline
        # as in the live engine: who knows what comes is not bounded
        self.sim.step_budget = NEVER if setting.prefetch == "oracle" else self.slots
        self.inputs = CutoffInputs(shape.layers, replayer.width, shape.top_k, self.slots, self.k)
        self.profile = self._first_profile()
        self.missing = self.verified = 0
        self.cutoff = shape.layers
        self._choose_depth()

    def all(self) -> Outcome:
        """Every step, one after the other."""
        began, sim = time.perf_counter(), self.sim
        seconds = compute = link = ideal = 0.0
        total, since, tokens, steps = Counters(), None, 0, 0
        counters, t_io = sim.counters, sim.machine.seconds_per_expert
        request = -1
        for number, step in enumerate(self.plan):
            first = step.request != request
            if first:
                request = step.request
                self._learn()
            if first and since is not None:  # what a prompt takes is not counted
                total, since = _add(total, counters.minus(since)), None
            elif not first and since is None:
                since = counters.copy()
            if self.timeline is not None:
                self.timeline.recording = number >= len(self.plan) - _DRAWN_STEPS
            started, busy, stalled, useful = sim.now, sim.link_seconds, counters.stall_seconds, counters.useful_loads
            self.step(number, step)
            useful = counters.useful_loads - useful
            if step.drafted:
                self.verified += 1
                self.missing += useful
            if not first:
                took, waited = sim.now - started, counters.stall_seconds - stalled
                seconds += took
                compute += took - waited
                link += sim.link_seconds - busy
                ideal += max(took - waited, useful * t_io)
                tokens += step.tokens
                steps += 1
        if since is not None:
            total = _add(total, counters.minus(since))
        if not steps:
            raise UsageError("the trace has no step after the prompts; record longer generations")
        shown = self.cutoff if self.foresight.uses_draft else None
        return Outcome(
            self.setting, self.k, self.slots, shown, self.rate, self.expert_bytes, steps, tokens,
            seconds, compute, link, total, ideal, time.perf_counter() - began,
        )  # fmt: skip

    def step(self, number: int, step: StepPlan) -> None:
        """Replay one step."""
        sim, foresight = self.sim, self.foresight
        sim.begin_step(step.request)
        began = sim.now
        if (told := foresight.at_begin(step)) is not None:
            sim.prefetch(told, self.shape.layers)
        for chunk in step.chunks:
            sim.compute(chunk.seconds)
            if (told := foresight.at_slab(chunk)) is not None:
                sim.prefetch(told, self.cutoff)
        drafted = sim.now
        for forward in step.forwards:
            self._forward(forward)
        sim.compute(step.rest)
        if self.timeline is not None:
            self.timeline.add(Activity.DRAFT, began, drafted, f"step {number}")
            self.timeline.add(Activity.VERIFY, drafted, sim.now, f"step {number}")
        sim.end_step()

    def _forward(self, forward: ForwardPlan) -> None:
        sim, foresight, layers = self.sim, self.foresight, self.shape.layers
        for layer, needed in enumerate(forward.needed):
            began = sim.now
            sim.compute(forward.front[layer])
            if forward.shares[layer]:
                sim.rule.on_prompt(layer, [key - layer * sim.width for key in needed], forward.shares[layer])
            told = foresight.at_layer(forward, layer)
            if told is not None and not sim.machine.demands_first:
                sim.prefetch(told, layers)
                told = None
            heard = told is not None or foresight.follows
            then = partial(self._after_demands, layer, needed, told) if heard else None
            sim.use(layer, needed, forward.per_expert[layer], then)
            if self.timeline is not None:
                self.timeline.add(Activity.LAYER, began, sim.now, f"layer {layer}")

    def _after_demands(self, layer: int, needed: list[int], told: Prediction | None) -> None:
        for prefetches in (self.foresight.at_routed(layer, needed), told):
            if prefetches is not None:
                self.sim.prefetch(prefetches, self.shape.layers)

    # ---- the cutoff, as the live engine chooses it

    def _first_profile(self) -> Profile:
        drafted = [step for step in self.plan if step.drafted]
        passes = sum(step.drafted for step in drafted if step.chunks)
        draft = sum(chunk.seconds for step in drafted for chunk in step.chunks) / max(1, passes)
        forwards = [forward for step in drafted or self.plan for forward in step.forwards]
        verify = sum(forward.seconds for forward in forwards)
        depth, per_layer = max(1, self.shape.draft_layers), verify / max(1, len(forwards)) / self.shape.layers
        share = max(0.0, 1 - sum(sum(f.front) for f in forwards) / verify) if verify else 0.0
        return Profile(
            draft / depth,
            depth,
            per_layer,
            self.sim.machine.seconds_per_expert,
            self.inputs.free_slots,
            expert_share=share,
        )

    def _choose_depth(self) -> None:
        if self.foresight.uses_draft:
            self.cutoff = choose_cutoff(self.setting.cutoff, self.profile, self.inputs)

    def _learn(self) -> None:
        if self.verified >= ENOUGH_STEPS:
            found = self.missing / self.verified / self.shape.layers
            self.profile = replace(self.profile, missing_per_layer=found)
            self._choose_depth()


def _expert_share(trace: Trace) -> float:
    verifying = trace.forward_rows <= trace.shape.draft_tokens + 1
    front, experts = float(trace.forward_front[verifying].sum()), float(trace.forward_experts[verifying].sum())
    return experts / (front + experts) if front + experts else 0.5


def _rate(link_gbps: float | None, shape: Shape) -> float:
    rate = shape.link_bytes_per_second if link_gbps is None else link_gbps * 1e9
    if rate <= 0:
        raise UsageError("the trace does not say how fast its link was; give --link-gbps")
    return rate


def _slots(memory: Size | None, shape: Shape) -> int:
    if memory is None:
        return shape.slots
    experts = sum(shape.experts)
    slots = min(experts, memory.of(experts * shape.expert_bytes) // shape.expert_bytes)
    if slots < shape.top_k:
        raise UsageError(f"{memory} holds {slots} experts, fewer than the {shape.top_k} of one token; give more")
    return int(slots)


def _add(a: Counters, b: Counters) -> Counters:
    return a.minus(Counters().minus(b))


def as_cuda(trace: Trace) -> Trace:
    """The trace as if its copies had moved as they do on CUDA: prefetch requests in chunks, which demands overtake."""
    size = trace.shape.expert_bytes
    chunk = chunk_for(size)
    depth = 1 + max(1, -(-2 * WINDOW * chunk // size))
    return replace(trace, shape=replace(trace.shape, chunk_bytes=chunk, window=WINDOW, depth=depth))


def rank(outcomes: Sequence[Outcome]) -> list[int]:
    """The place of each, by time per token, from 1."""
    order = sorted(range(len(outcomes)), key=lambda i: outcomes[i].seconds / max(1, outcomes[i].tokens))
    places = [0] * len(outcomes)
    for place, i in enumerate(order, start=1):
        places[i] = place
    return places
