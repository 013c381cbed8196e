"""Benchmark runs: every configuration on every prompt, taken in turns, on engines that are loaded once per budget.

A turn is one prompt run under each configuration of the loaded engine, one right after the other, so that a machine
that drifts is as kind to one as to the next. Each turn begins with another configuration, so that none is always the
one that meets what another prompt has left in the slots. No more is done about that: every run reads its prompt first,
which goes through the slots layer by layer and is not counted.
"""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from spmoe.backends.devices import forget_freed
from spmoe.bench.ceilings import Ceilings, all_experts_fit, measure_ceilings
from spmoe.config import SamplingParams, Size
from spmoe.draft.model import DraftModel
from spmoe.engine.llm import LLM, Completion, Generation
from spmoe.engine.memory import MemoryPlan
from spmoe.errors import BudgetError, PromptError, UsageError
from spmoe.experts.store import StoreSpec
from spmoe.models.shipped import sample_text

if TYPE_CHECKING:
    from spmoe.backends.cuda_memory import HostStore

_SAMPLES, _SAMPLE_LINES = 4, 20  # prompts cut from the sample text
_ALL = Size(share=1.0)

Watch = Callable[[Generation], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Setting:
    """One configuration: a row of the table."""

    memory: Size
    prefetch: str
    draft_tokens: int  # K

    def __str__(self) -> str:
        return f"{self.memory}, {self.prefetch}, K={self.draft_tokens}"


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt, completed once under one configuration."""

    setting: Setting
    prompt: int
    repeat: int
    completion: Completion
    device_seconds: float | None = None  # that recorded forwards took on the device, where every expert is in a slot


@dataclass(frozen=True)
class Job:
    """What is to be run."""

    engine: dict[str, Any]  # options that all configurations share
    settings: list[Setting]
    prompts: list[list[int]]  # token ids
    output_len: int
    repeat: int
    warmup: int  # runs of each configuration that do not count
    resident_known: frozenset[int]  # values of K whose all-resident step need not be measured


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
    as Ctrl-C does.
    """

    def __init__(self, job: Job, tell: Callable[[str], None], watch: Watch = lambda generation: nullcontext()) -> None:
        self.job = job
        self.runs: list[Run] = []
        self.resident: list[Run] = []  # with every expert in a slot
        self.facts: Facts | None = None
        self._tell = tell
        self._watch = watch
        self._told: set[str] = set()
        self._store: HostStore | None = None

    def run(self) -> None:
        """Load one engine after the other, which share the host store, and run everything."""
        try:
            for memory in dict.fromkeys(setting.memory for setting in self.job.settings):
                self._on_engine(self._run_budget, memory)
            self._run_all_resident()
        finally:
            self._close_store()

    def _run_budget(self, llm: LLM, memory: Size) -> None:
        settings = [setting for setting in self.job.settings if setting.memory == memory]
        self._take_turns(llm, settings, self.runs, "run")
        if llm.engine.slots == llm.engine.store.count and llm.engine.config.link_gbps is None:
            self._run_resident(llm, memory)

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
        llm.engine.source.load_all(llm.engine.store.experts)
        settings = [Setting(memory, "on-demand", k) for k in self._unknown()]
        self._take_turns(llm, settings, self.resident, "all experts in slots, run")

    def _unknown(self) -> list[int]:
        """Values of K whose all-resident step is neither given nor measured."""
        known = self.job.resident_known | {run.setting.draft_tokens for run in self.resident}
        return [k for k in dict.fromkeys(setting.draft_tokens for setting in self.job.settings) if k not in known]

    def _on_engine(self, work: Callable[[LLM, Size], None], memory: Size, **options: Any) -> None:
        self._tell(f"loading, {memory} of the experts in slots" if memory.share else f"loading, {memory} of slots")
        self._work_on_engine(work, memory, {**self.job.engine, **options})
        gc.collect()  # the engine is out of scope by now; a closed one still holds what its forwards were recorded over
        if self.facts is not None:
            forget_freed(self.facts.device)

    def _work_on_engine(self, work: Callable[[LLM, Size], None], memory: Size, options: dict[str, Any]) -> None:
        most = max(setting.draft_tokens for setting in self.job.settings)
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
            self._tell("measuring the link and the memory")
            ceilings = measure_ceilings(engine)
            draft = engine.draft.network.resident_bytes if isinstance(engine.draft, DraftModel) else 0
            self.facts = Facts(
                engine.device, engine.dtype, engine.store, engine.target.top_k, engine.memory, ceilings,
                engine.target.resident_bytes, draft,
            )  # fmt: skip

    def _take_turns(self, llm: LLM, settings: list[Setting], runs: list[Run], what: str) -> None:
        job = self.job
        for setting in settings:
            self._tell(f"warming up: {setting}")
            self._warm_up(llm, setting)
        self._tell_notices(llm)
        count = len(job.settings) if runs is self.runs else len(settings)
        total = count * len(job.prompts) * job.repeat
        for turn, (repeat, prompt) in enumerate(product(range(job.repeat), range(len(job.prompts)))):
            first = turn % len(settings)
            for setting in settings[first:] + settings[:first]:
                self._tell(f"{what} {len(runs) + 1} of {total}: {setting}; prompt {prompt + 1}, repeat {repeat + 1}")
                timed = runs is self.resident and llm.engine.room.recorder is not None
                device_seconds = self._start_timing(llm) if timed else None
                completion = self._generate(llm, setting, job.prompts[prompt], job.output_len)
                runs.append(Run(setting, prompt, repeat, completion, device_seconds() if device_seconds else None))

    def _start_timing(self, llm: LLM) -> Callable[[], float]:
        """Time recorded forwards on the device until what is returned is called, which gives the seconds."""
        stopwatch = llm.engine.room.recorder.stopwatch  # type: ignore[union-attr]
        stopwatch.running = True

        def stop() -> float:
            stopwatch.running = False
            return stopwatch.take()

        return stop

    def _warm_up(self, llm: LLM, setting: Setting) -> None:
        """Fill slots and let the cutoff learn; where forwards are recorded, see to it that all have been.

        The longest prompt goes first: forwards are recorded over an attention state, which then fits the others too.
        """
        job = self.job
        prompts = sorted(job.prompts, key=len, reverse=True)
        for number in range(job.warmup):
            self._generate(llm, setting, prompts[number % len(prompts)], job.output_len)
        if job.warmup and llm.engine.room.recorder is not None:
            for tokens in range(2, min(setting.draft_tokens + 2, job.output_len) + 1):  # drafts get shorter at the end
                self._generate(llm, setting, prompts[-1], tokens)

    def _generate(self, llm: LLM, setting: Setting, prompt: list[int], tokens: int) -> Completion:
        llm.engine.reconfigure(prefetch=setting.prefetch, num_speculative_tokens=setting.draft_tokens)
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


def settings_of(memories: list[Size], policies: list[str], draft_tokens: list[int]) -> list[Setting]:
    """The cross product, in the order given. Without a draft it predicts nothing: K = 0 is on demand, and once."""
    every = product(memories, policies, draft_tokens)
    draftless = {policy: "next-gate" if "next-gate" in policy else "on-demand" for policy in policies}
    return list(dict.fromkeys(Setting(memory, policy if k else draftless[policy], k) for memory, policy, k in every))


def require_room(prompts: list[list[int]], output_len: int, context: int) -> None:
    """Refuse prompts that leave too little of the context."""
    for number, prompt in enumerate(prompts):
        if len(prompt) + output_len > context:
            raise PromptError(
                f"prompt {number + 1} has {len(prompt)} tokens, which with --output-len {output_len} is more than the "
                f"context of {context}; lower --output-len or leave that prompt out"
            )


def sample_prompts() -> list[str]:
    """A few pieces of the sample text."""
    lines = sample_text().splitlines(keepends=True)
    starts = [number * len(lines) // _SAMPLES for number in range(_SAMPLES)]
    return ["".join(lines[start : start + _SAMPLE_LINES]) for start in starts]


def parse_prompts(text: str, path: Path) -> list[str]:
    """Prompts from JSON lines, of any of the forms that well-known sets have, or from the paragraphs of plain text."""
    if path.suffix in (".json", ".jsonl") or text.lstrip().startswith("{"):
        lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        prompts = [_prompt_of(line, f"line {number} of {path}") for number, line in lines]
    else:
        prompts = [part.strip("\n") for part in re.split(r"\n(?:[ \t]*\n)+", text) if part.strip()]
    if not prompts:
        raise UsageError(f"{path} holds no prompt; write JSON lines or paragraphs of text")
    return prompts


def _prompt_of(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where} is not JSON; write one object per line, or plain text") from error
    if not isinstance(record, dict):
        raise UsageError(f"{where} is not a JSON object; write one per line, with a prompt")
    turns = record.get("turns")
    first = turns[0] if isinstance(turns, list) and turns else None
    prompt = next((value for value in (record.get("prompt"), record.get("question"), first) if value), None)
    if not isinstance(prompt, str):
        raise UsageError(f"{where} has no text under prompt, question or turns; name it prompt")
    return prompt
