"""Benchmark runs: every configuration on every prompt, in turns, on one engine per memory budget.

In one turn, a prompt runs under every configuration of the loaded engine, one directly after the other, so that a
machine whose speed drifts affects all of them alike. All access of benchmarks to the internals of an engine is here.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from spmoe.backends.devices import empty_device_cache
from spmoe.bench.ceilings import Ceilings, all_experts_fit, machine, measure_ceilings
from spmoe.bench.configs import BenchConfig
from spmoe.bench.step_timeline import StepTimeline
from spmoe.config import ONE_BY_ONE, DraftTokens, SamplingParams, Size, max_draft_tokens
from spmoe.engine.engine import Engine
from spmoe.engine.llm import LLM, Generation
from spmoe.engine.memory import MemoryPlan
from spmoe.engine.outputs import RequestOutput
from spmoe.engine.parts import LearnedState
from spmoe.errors import BudgetError, PromptError, UsageError
from spmoe.experts.store import StoreSpec
from spmoe.observe.progress import Report
from spmoe.predict.policies import needs_recording
from spmoe.predict.policies.base import RecordedRouting
from spmoe.registry import ON_DEMAND

if TYPE_CHECKING:
    from spmoe.backends.cuda_memory import HostStore
    from spmoe.observe.timeline import Span

_ALL_EXPERTS = Size(share=1.0)
_MUST_MATCH = ("device", "processor", "torch", "transformers", "spmoe", "commit")  # between results that are combined

AroundGeneration = Callable[[Generation], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class BenchRun:
    """One prompt, completed once under one configuration."""

    config: BenchConfig
    prompt: int  # index
    repeat: int  # index
    completion: RequestOutput
    graph_seconds: float | None = None  # time in CUDA graphs on the device; only measured with all experts in slots
    timeline: StepTimeline | None = None  # of one step; recorded in the first counted run of each configuration


@dataclass(frozen=True, slots=True)
class ResidentStep:
    """Duration of a step with all experts in slots."""

    seconds: float
    source: str  # "measured", "given" or "estimated"
    host_seconds: float | None = None  # part of it in which no CUDA graph ran on the device


@dataclass(frozen=True)
class BenchJob:
    """A workload and the configurations to run on it."""

    engine: dict[str, Any]  # options that all configurations share
    configs: list[BenchConfig]
    prompts: list[list[int]]  # token ids
    output_len: int
    repeat: int
    warmup: int  # warm-up runs per configuration
    resident: Mapping[DraftTokens, float] = field(
        default_factory=dict
    )  # K -> seconds of an all-resident step, if given
    labels: Mapping[str, Any] = field(default_factory=dict)  # further fields of the machine record

    @property
    def total(self) -> int:
        """Number of runs that count."""
        return len(self.configs) * len(self.prompts) * self.repeat


@dataclass(frozen=True)
class StoredRuns:
    """Results of an earlier benchmark of the same workload."""

    machine: dict[str, Any]
    runs: list[BenchRun]
    resident: dict[DraftTokens, ResidentStep]
    other_rows: list[dict[str, Any]] = field(default_factory=list)  # records of configurations outside the job


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Properties of the machine and model, known once an engine is loaded."""

    device: torch.device
    dtype: torch.dtype
    expert_format: str
    lossless: bool
    store: StoreSpec
    top_k: int
    memory: MemoryPlan
    ceilings: Ceilings
    dense_bytes: int  # weights of the target that every row reads
    draft_bytes: int
    machine: Mapping[str, Any]  # hardware, versions and date

    @property
    def active_bytes(self) -> int:
        """Bytes of the target's weights that one row reads."""
        return self.dense_bytes + len(self.store.experts) * self.top_k * self.store.layout.nbytes


class IsolatedConfigs:
    """Gives every configuration its own state (slots, eviction, learned values) on one shared engine.

    A configuration starts with empty slots and finds its state again when it is selected next. Otherwise it would be
    measured on experts that another configuration loaded for the same prompt. With slots for all experts there is
    nothing to isolate.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._all_fit = engine.slots >= engine.spec.count
        self._selected: Hashable = None
        self._states: dict[Hashable, LearnedState] = {}

    def select(self, key: Hashable, options: dict[str, Any]) -> None:
        """Reconfigure the engine with the state kept under `key`; copies made for that are not counted."""
        if self._all_fit or key == self._selected:
            self._engine.reconfigure(**options)
            return
        self._selected = key
        self._engine.reconfigure(learned=self._states.setdefault(key, LearnedState()), **options)


class BenchRunner:
    """Runs a job. Results so far are available at any time, also after an interrupt.

    `notify` receives messages, `on_progress` the number of runs made, of all runs, and the configuration that runs.
    `around_generation` is entered around every generation and may stop it, which ends the benchmark like Ctrl-C.
    `stored` runs are not repeated. `on_run` is called after every run that counts.
    """

    def __init__(
        self,
        job: BenchJob,
        notify: Callable[[str], None],
        around_generation: AroundGeneration = lambda generation: nullcontext(),
        stored: StoredRuns | None = None,
        on_run: Callable[[], None] = lambda: None,
        on_progress: Report = lambda done, total, detail="": None,
    ) -> None:
        self.job = job
        self.stored = stored
        self.runs: list[BenchRun] = list(stored.runs) if stored is not None else []
        self.resident_runs: list[BenchRun] = []  # with all experts in slots
        self.facts: EngineFacts | None = None
        self._notify = notify
        self._around_generation = around_generation
        self._on_run = on_run
        self._on_progress = on_progress
        self._notices: set[str] = set()  # shown already
        self._host_store: HostStore | None = None  # passed from one engine to the next
        self._recordings: dict[tuple[object, ...], RecordedRouting] = {}  # of requests that the oracle runs again

    def run(self) -> None:
        """Load one engine per memory budget and run everything that is missing."""
        memories = list(dict.fromkeys(config.memory for config in self.job.configs))
        try:
            for memory in memories:
                if any(self._missing(config) for config in self.job.configs if config.memory == memory):
                    self._on_engine(self._run_budget, memory)
            if self.facts is None and self._unknown_resident_steps():
                self._on_engine(lambda llm, memory: None, memories[0])
            self._run_all_resident()
        finally:
            if self._host_store is not None:
                self._host_store.close()
                self._host_store = None

    def _run_budget(self, llm: LLM, memory: Size) -> None:
        configs = [config for config in self.job.configs if config.memory == memory and self._missing(config)]
        self._take_turns(llm, configs, self.runs)
        if llm.engine.slots == llm.engine.spec.count and llm.engine.config.link_gbps is None:
            self._run_resident(llm, memory)

    def _missing(self, config: BenchConfig) -> list[tuple[int, int]]:
        """Return (repeat, prompt) of every run of a configuration that is still to be made, in order."""
        done = {(run.repeat, run.prompt) for run in self.runs if run.config == config}
        every = product(range(self.job.repeat), range(len(self.job.prompts)))
        return [one for one in every if one not in done]

    def _run_all_resident(self) -> None:
        """Measure steps with all experts in slots, if an engine with that many slots fits."""
        if self.facts is None or not self._unknown_resident_steps():
            return
        if all_experts_fit(self.facts.device, self.facts.memory, self.facts.store.nbytes):
            try:
                self._on_engine(self._run_resident, _ALL_EXPERTS, link_gbps=None)
                return
            except BudgetError as error:
                self._notify(f"note: {error}")
        self._notify("note: not all experts fit in slots at once; the time of a step with all of them is an estimate")

    def _run_resident(self, llm: LLM, memory: Size) -> None:
        configs = [BenchConfig(memory, ON_DEMAND, k) for k in self._unknown_resident_steps()]
        if not configs:
            return
        llm.engine.experts.load_all(llm.engine.spec.experts)
        self._take_turns(llm, configs, self.resident_runs)

    def _unknown_resident_steps(self) -> list[int]:
        """Return values of K whose all-resident step is neither given nor measured.

        `auto` is left out: its steps have many lengths.
        """
        known = {*self.job.resident, *(run.config.draft_tokens for run in self.resident_runs)}
        known |= self.stored.resident.keys() if self.stored is not None else set()
        every = dict.fromkeys(config.draft_tokens for config in self.job.configs)
        return [k for k in every if k != "auto" and k not in known]

    def _on_engine(self, work: Callable[[LLM, Size], None], memory: Size, **options: Any) -> None:
        """Load an engine, do `work` on it, close it and free its memory."""
        self._notify(f"loading, {memory} of the experts in slots" if memory.share else f"loading, {memory} of slots")
        self._work_on_engine(work, memory, {**self.job.engine, **options})
        gc.collect()  # the engine is out of scope by now; a closed one keeps its captured graphs' memory
        if self.facts is not None:
            empty_device_cache(self.facts.device)

    def _work_on_engine(self, work: Callable[[LLM, Size], None], memory: Size, options: dict[str, Any]) -> None:
        most = max(max_draft_tokens(config.draft_tokens) for config in self.job.configs)
        store, self._host_store = self._host_store, None
        try:
            options = {**options, **ONE_BY_ONE}
            llm = LLM(**options, expert_memory=memory, prefetch=ON_DEMAND, num_speculative_tokens=most, store=store)
        except BaseException:
            if store is not None:
                store.close()
            raise
        with llm:
            try:
                self._inspect(llm)
                work(llm, memory)
            finally:
                self._host_store = llm.engine.parts.runtime.take_store()

    def _inspect(self, llm: LLM) -> None:
        """Check that prompts fit, and collect facts about the first engine."""
        engine, job = llm.engine, self.job
        draft = engine.parts.drafter.runner
        self._show_notices(llm)
        require_context(job.prompts, job.output_len, engine.parts.max_model_len)
        if self.facts is None:
            described = machine(engine.device)
            if self.stored is not None:
                _require_same_machine(self.stored.machine, described)
            self._notify("measuring the link and the memory")
            self.facts = EngineFacts(
                device=engine.device,
                dtype=engine.parts.models.dtype,
                expert_format=engine.parts.models.expert_format.weight.label,
                lossless=engine.parts.models.lossless,
                store=engine.spec,
                top_k=engine.target.top_k,
                memory=engine.parts.memory,
                ceilings=measure_ceilings(engine),
                dense_bytes=engine.target.resident_bytes,
                draft_bytes=draft.resident_bytes if draft is not None else 0,
                machine=described,
            )

    def _report(self, doing: str) -> None:
        """Report progress over the runs that count and those with all experts in slots."""
        runs_per_config = len(self.job.prompts) * self.job.repeat
        done = len(self.runs) + len(self.resident_runs)
        resident = {run.config.draft_tokens for run in self.resident_runs} | set(self._unknown_resident_steps())
        self._on_progress(done, self.job.total + len(resident) * runs_per_config, doing)

    def _take_turns(self, llm: LLM, configs: list[BenchConfig], runs: list[BenchRun]) -> None:
        job, counted, isolated = self.job, runs is self.runs, IsolatedConfigs(llm.engine)
        if job.warmup and llm.engine.device.type == "cuda":  # kernels are compiled per number of rows
            self._report("warm-up: prompt lengths")
            isolated.select("prompt lengths", {**configs[0].engine_options, "prefetch": ON_DEMAND})
            for tokens in sorted(job.prompts, key=len, reverse=True):
                self._complete(llm, tokens, 1)
        for config in configs:
            self._report(f"warm-up: {config}")
            self._warm_up(llm, isolated, config)
        self._show_notices(llm)
        for turn, (repeat, prompt) in enumerate(product(range(job.repeat), range(len(job.prompts)))):
            first = turn % len(configs)
            for config in configs[first:] + configs[:first]:
                if counted and (repeat, prompt) not in self._missing(config):
                    continue
                self._report(f"{config}; prompt {prompt + 1}, repeat {repeat + 1}")
                timed = runs is self.resident_runs and llm.engine.parts.runtime.recorder is not None
                stop_timing = self._start_timing(llm) if timed else None
                spans: list[Span] | None = [] if counted and repeat == prompt == 0 else None
                completion = self._generate(llm, isolated, config, job.prompts[prompt], job.output_len, spans)
                graph_seconds = stop_timing() if stop_timing else None
                timeline = StepTimeline.of_median_step(spans) if spans else None
                runs.append(BenchRun(config, prompt, repeat, completion, graph_seconds, timeline))
                self._on_run()
        self._report("")

    def _start_timing(self, llm: LLM) -> Callable[[], float]:
        """Start to time CUDA graphs on the device; return a function that stops and returns the seconds."""
        stopwatch = llm.engine.parts.runtime.recorder.stopwatch  # type: ignore[union-attr]
        stopwatch.running = True

        def stop() -> float:
            stopwatch.running = False
            return stopwatch.take()

        return stop

    def _warm_up(self, llm: LLM, isolated: IsolatedConfigs, config: BenchConfig) -> None:
        """Fill slots, let the cutoff learn and capture every CUDA graph.

        The longest prompt goes first: graphs are captured over its KV cache, which then fits the other prompts too.
        """
        job = self.job
        prompts = sorted(job.prompts, key=len, reverse=True)
        for number in range(job.warmup):
            self._generate(llm, isolated, config, prompts[number % len(prompts)], job.output_len)
        llm.engine.loop.prepare()

    def _generate(
        self,
        llm: LLM,
        isolated: IsolatedConfigs,
        config: BenchConfig,
        prompt: list[int],
        tokens: int,
        spans: list[Span] | None = None,
    ) -> RequestOutput:
        """Complete a prompt under a configuration; add the timeline of the generation to `spans`, if given."""
        if needs_recording(config.prefetch):
            self._provide_recording(llm, isolated, config, prompt, tokens)
        isolated.select(config, config.engine_options)
        if spans is None:
            return self._complete(llm, prompt, tokens)
        with llm.engine.experts.timeline.record() as recorded:
            completion = self._complete(llm, prompt, tokens)
        spans += recorded
        return completion

    def _provide_recording(
        self, llm: LLM, isolated: IsolatedConfigs, config: BenchConfig, prompt: list[int], tokens: int
    ) -> None:
        """Give the engine the routing of its next request, recorded once in an on-demand run.

        Greedy decoding takes the same steps again.
        """
        key = (config.memory, config.draft_tokens, tuple(prompt), tokens)
        if key not in self._recordings:
            isolated.select(("recording", config.eviction), {**config.engine_options, "prefetch": ON_DEMAND})
            with llm.engine.record() as recording:
                self._complete(llm, prompt, tokens)
            self._recordings[key] = recording
        llm.engine.recording = self._recordings[key]

    def _complete(self, llm: LLM, prompt: list[int], tokens: int) -> RequestOutput:
        generation = llm.stream(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True))
        with self._around_generation(generation):
            completion = generation.run()
        if generation.stopped:
            raise KeyboardInterrupt
        return completion

    def _show_notices(self, llm: LLM) -> None:
        for notice in llm.notices:
            if notice not in self._notices:
                self._notices.add(notice)
                self._notify(f"note: {notice}")


def generate_with_timeline(
    llm: LLM, prompt: str, params: SamplingParams, on_token: Callable[[int], None]
) -> tuple[RequestOutput, list[Span]]:
    """Complete a prompt; return the completion and the timeline of its last steps."""
    timeline = llm.engine.experts.timeline
    timeline.recording = True
    generation = llm.stream(prompt, params)
    for _ in generation:
        on_token(len(generation.token_ids))
    return generation.completion, timeline.spans


def _require_same_machine(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name in _MUST_MATCH:
        if before.get(name) != now[name]:
            raise UsageError(
                f"the stored results were measured with {name} {before.get(name)}; here it is {now[name]}; resume "
                "there, or use --json with a new file"
            )


def require_context(prompts: list[list[int]], output_len: int, context: int) -> None:
    """Raise PromptError unless every prompt and its output fit in the context."""
    for number, prompt in enumerate(prompts):
        if len(prompt) + output_len > context:
            raise PromptError(
                f"prompt {number + 1} has {len(prompt)} tokens, which with --output-len {output_len} exceeds the "
                f"context of {context}; lower --output-len or leave that prompt out"
            )
