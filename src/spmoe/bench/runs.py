"""Benchmark runs: every configuration on every prompt, taken in turns, on engines that are loaded once per budget.

A turn is one prompt run under each configuration of the loaded engine, one right after the other, so that a machine
that drifts is as kind to one as to the next. Each finds the slots as its own last run left them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from spmoe.backends.devices import empty_device_cache
from spmoe.bench.apart import Apart
from spmoe.bench.ceilings import Ceilings, all_experts_fit, machine, measure_ceilings
from spmoe.bench.rehearsal import Rehearsals
from spmoe.bench.settings import Setting
from spmoe.config import DraftTokens, SamplingParams, Size, max_draft_tokens
from spmoe.draft.model import DraftModel
from spmoe.engine.llm import LLM, Completion, Generation
from spmoe.engine.memory import MemoryPlan
from spmoe.errors import BudgetError, PromptError, UsageError
from spmoe.experts.filling import load_all
from spmoe.experts.store import StoreSpec

if TYPE_CHECKING:
    from spmoe.backends.cuda_memory import HostStore

_ALL = Size(share=1.0)
_SAME_MACHINE = ("device", "processor", "torch", "transformers", "spmoe", "commit")  # or figures do not belong together

LayerObserver = Callable[[Generation], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt, completed once under one configuration."""

    setting: Setting
    prompt: int
    repeat: int
    completion: Completion
    device_seconds: float | None = None  # that recorded forwards took on the device, where every expert is in a slot


@dataclass(frozen=True, slots=True)
class ResidentStep:
    """What a step takes with every expert in a slot."""

    seconds: float
    source: str  # "measured", "given" or "estimated"
    host_seconds: float | None = None  # of them in which the device ran no recorded forward


@dataclass(frozen=True)
class Job:
    """What is to be run."""

    engine: dict[str, Any]  # options that all configurations share
    settings: list[Setting]
    prompts: list[list[int]]  # token ids
    output_len: int
    repeat: int
    warmup: int  # runs of each configuration that do not count
    resident: Mapping[DraftTokens, float] = field(default_factory=dict)  # seconds of an all-resident step, where known
    labels: Mapping[str, Any] = field(default_factory=dict)  # what a record says besides: scenario, prompt set, command

    @property
    def total(self) -> int:
        """How many runs there are."""
        return len(self.settings) * len(self.prompts) * self.repeat


@dataclass(frozen=True)
class Stored:
    """What an earlier benchmark has measured of a job."""

    machine: dict[str, Any]
    runs: list[Run]
    resident: dict[DraftTokens, ResidentStep]
    others: list[dict[str, Any]] = field(default_factory=list)  # records of configurations that the job does not have


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known once an engine has been loaded."""

    device: torch.device
    dtype: torch.dtype
    store: StoreSpec
    top_k: int
    memory: MemoryPlan
    ceilings: Ceilings
    dense_bytes: int  # of the target's weights that every row reads
    draft_bytes: int

    @property
    def active_bytes(self) -> int:
        """Weights of the target that one row reads."""
        return self.dense_bytes + len(self.store.experts) * self.top_k * self.store.layout.nbytes


class Bench:
    """Runs a job. What has been measured is there at any time, also after an interruption.

    `tell` says what is under way; `watch` is entered around every generation, and may stop it, which ends the benchmark
    as Ctrl-C does. What is `stored` is not run again. `keep` is called after every run.
    """

    def __init__(
        self,
        job: Job,
        tell: Callable[[str], None],
        observer: LayerObserver = lambda generation: nullcontext(),
        stored: Stored | None = None,
        keep: Callable[[], None] = lambda: None,
    ) -> None:
        self.job = job
        self.stored = stored
        self.runs: list[Run] = list(stored.runs) if stored is not None else []
        self.resident: list[Run] = []  # with every expert in a slot
        self.facts: Facts | None = None
        self._tell = tell
        self._watch = observer
        self._keep = keep
        self._told: set[str] = set()
        self._store: HostStore | None = None
        self._rehearsals = Rehearsals(self._complete)
        self._pace = Pace()

    def run(self) -> None:
        """Load one engine after the other, which share the host store, and run everything."""
        memories = list(dict.fromkeys(setting.memory for setting in self.job.settings))
        try:
            for memory in memories:
                if any(self._left(setting) for setting in self.job.settings if setting.memory == memory):
                    self._on_engine(self._run_budget, memory)
            if self.facts is None and self._unknown():
                self._on_engine(lambda llm, memory: None, memories[0])
            self._run_all_resident()
        finally:
            self._close_store()

    def _run_budget(self, llm: LLM, memory: Size) -> None:
        settings = [setting for setting in self.job.settings if setting.memory == memory and self._left(setting)]
        self._take_turns(llm, settings, self.runs, "run")
        if llm.engine.slots == llm.engine.store.count and llm.engine.config.link_gbps is None:
            self._run_resident(llm, memory)

    def _left(self, setting: Setting) -> list[tuple[int, int]]:
        """Repeats and prompts of a configuration that have not been run, in the order in which they would be."""
        done = {(run.repeat, run.prompt) for run in self.runs if run.setting == setting}
        every = product(range(self.job.repeat), range(len(self.job.prompts)))
        return [one for one in every if one not in done]

    def _run_all_resident(self) -> None:
        """Measure what steps take when nothing is missing, in an engine with slots for all experts if one fits."""
        if self.facts is None or not self._unknown():
            return
        if all_experts_fit(self.facts.device, self.facts.memory, self.facts.store.nbytes):
            try:
                self._on_engine(self._run_resident, _ALL, link_gbps=None)
                return
            except BudgetError as error:
                self._tell(f"note: {error}")
        self._tell("note: all experts at once do not fit, so what a step takes with them in slots is an estimate")

    def _run_resident(self, llm: LLM, memory: Size) -> None:
        settings = [Setting(memory, "on-demand", k) for k in self._unknown()]
        if not settings:
            return
        load_all(llm.engine.source, llm.engine.store.experts)
        self._take_turns(llm, settings, self.resident, "all experts in slots, run")

    def _unknown(self) -> list[int]:
        """Values of K whose all-resident step is neither given nor measured."""
        known = {*self.job.resident, *(run.setting.draft_tokens for run in self.resident)}
        known |= self.stored.resident.keys() if self.stored is not None else set()
        every = dict.fromkeys(setting.draft_tokens for setting in self.job.settings)
        return [k for k in every if k != "auto" and k not in known]  # which takes steps of many lengths

    def _on_engine(self, work: Callable[[LLM, Size], None], memory: Size, **options: Any) -> None:
        self._tell(f"loading, {memory} of the experts in slots" if memory.share else f"loading, {memory} of slots")
        self._work_on_engine(work, memory, {**self.job.engine, **options})
        gc.collect()  # the engine is out of scope by now; a closed one still holds what its forwards were recorded over
        if self.facts is not None:
            empty_device_cache(self.facts.device)

    def _work_on_engine(self, work: Callable[[LLM, Size], None], memory: Size, options: dict[str, Any]) -> None:
        most = max(max_draft_tokens(setting.draft_tokens) for setting in self.job.settings)
        store, self._store = self._store, None
        try:
            llm = LLM(
                **options, expert_memory=memory, prefetch="on-demand", num_speculative_tokens=most, store=store
            )  # fmt: skip
        except BaseException:
            if store is not None:
                store.close()
            raise
        with llm:
            try:
                self._look_at(llm)
                work(llm, memory)
            finally:
                self._store = llm.engine.room.give_up_store()

    def _look_at(self, llm: LLM) -> None:
        engine, job = llm.engine, self.job
        self._tell_notices(llm)
        require_room(job.prompts, job.output_len, engine.max_model_len)
        if self.facts is None:
            if self.stored is not None:
                _require_same(self.stored.machine, machine(engine.device))
            self._tell("measuring the link and the memory")
            ceilings = measure_ceilings(engine)
            draft = engine.draft.runner.resident_bytes if isinstance(engine.draft, DraftModel) else 0
            self.facts = Facts(
                engine.device, engine.dtype, engine.store, engine.target.top_k, engine.memory, ceilings,
                engine.target.resident_bytes, draft,
            )  # fmt: skip

    def _take_turns(self, llm: LLM, settings: list[Setting], runs: list[Run], what: str) -> None:
        job, counted, apart = self.job, runs is self.runs, Apart(llm.engine)
        if job.warmup and llm.engine.device.type == "cuda":  # where kernels are chosen, and made, by the number of rows
            apart.enter("first reading", {**settings[0].changes, "prefetch": "on-demand"})
            for tokens in sorted(job.prompts, key=len, reverse=True):
                self._complete(llm, tokens, 1)
        for setting in settings:
            self._tell(f"warming up: {setting}")
            self._warm_up(llm, apart, setting)
        self._tell_notices(llm)
        total = job.total if counted else len(settings) * len(job.prompts) * job.repeat
        for turn, (repeat, prompt) in enumerate(product(range(job.repeat), range(len(job.prompts)))):
            first = turn % len(settings)
            for setting in settings[first:] + settings[:first]:
                if counted and (repeat, prompt) not in self._left(setting):
                    continue
                left = self._pace.left({one: len(self._left(one)) for one in job.settings}) if counted else ""
                where = f"{setting}; prompt {prompt + 1}, repeat {repeat + 1}"
                self._tell(f"{what} {len(runs) + 1} of {total}: {where}{left}")
                timed = runs is self.resident and llm.engine.room.recorder is not None
                device_seconds = self._start_timing(llm) if timed else None
                started = time.perf_counter()
                completion = self._generate(llm, apart, setting, job.prompts[prompt], job.output_len)
                self._pace.took(setting, time.perf_counter() - started)
                runs.append(Run(setting, prompt, repeat, completion, device_seconds() if device_seconds else None))
                self._keep()

    def _start_timing(self, llm: LLM) -> Callable[[], float]:
        """Time recorded forwards on the device until what is returned is called, which gives the seconds."""
        stopwatch = llm.engine.room.recorder.stopwatch  # type: ignore[union-attr]
        stopwatch.running = True

        def stop() -> float:
            stopwatch.running = False
            return stopwatch.take()

        return stop

    def _warm_up(self, llm: LLM, apart: Apart, setting: Setting) -> None:
        """Fill slots and let the cutoff learn; where forwards are recorded, see to it that all have been.

        The longest prompt goes first: forwards are recorded over an attention state, which then fits the others too.
        """
        job = self.job
        prompts = sorted(job.prompts, key=len, reverse=True)
        for number in range(job.warmup):
            self._generate(llm, apart, setting, prompts[number % len(prompts)], job.output_len)
        llm.engine.loop.prepare()

    def _generate(self, llm: LLM, apart: Apart, setting: Setting, prompt: list[int], tokens: int) -> Completion:
        self._rehearsals.prepare(llm, apart, setting, prompt, tokens)
        apart.enter(setting, setting.changes)
        return self._complete(llm, prompt, tokens)

    def _complete(self, llm: LLM, prompt: list[int], tokens: int) -> Completion:
        generation = llm.stream(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True))
        with self._watch(generation):
            completion = generation.run()
        if generation.stopped:
            raise KeyboardInterrupt
        return completion

    def _tell_notices(self, llm: LLM) -> None:
        for notice in llm.notices:
            if notice not in self._told:
                self._told.add(notice)
                self._tell(f"note: {notice}")

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None


class Pace:
    """How long runs take, and so how long is left."""

    def __init__(self) -> None:
        self._took: dict[Setting, list[float]] = {}

    def took(self, setting: Setting, seconds: float) -> None:
        """One run is over."""
        self._took.setdefault(setting, []).append(seconds)

    def left(self, runs: Mapping[Setting, int]) -> str:
        """Words for the time that so many more runs of each configuration take; none before there was one."""
        every = [seconds for one in self._took.values() for seconds in one]
        if not every:
            return ""
        typical = sum(every) / len(every)
        seconds = sum(count * _mean(self._took.get(setting, ()), typical) for setting, count in runs.items())
        minutes = round(seconds / 60)
        return f"; {minutes} min left" if minutes > 1 else f"; {seconds:.0f} s left"


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _require_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name in _SAME_MACHINE:
        if before.get(name) != now[name]:
            raise UsageError(
                f"these results are of {name} {before.get(name)}, and this is {now[name]}; continue them there, or "
                "choose another file"
            )


def require_room(prompts: list[list[int]], output_len: int, context: int) -> None:
    """Refuse prompts that leave too little of the context."""
    for number, prompt in enumerate(prompts):
        if len(prompt) + output_len > context:
            raise PromptError(
                f"prompt {number + 1} has {len(prompt)} tokens, which with --output-len {output_len} is more than the "
                f"context of {context}; lower --output-len or leave that prompt out"
            )
