"""Generations that measure a profile, and those of `spmoe profile --check` that are compared with predictions.

Units are seconds, bytes and experts, unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from spmoe.bench.ceilings import machine
from spmoe.bench.profile import PROFILED_POLICIES, EngineProfile, PolicyStats, Predictor, Subject
from spmoe.bench.runs import IsolatedConfigs
from spmoe.config import Cutoff, CutoffMode, SamplingParams, Size
from spmoe.engine.engine import Engine
from spmoe.engine.llm import LLM, Generation
from spmoe.engine.outputs import RequestOutput
from spmoe.engine.profiling import PartTimes, PredictionCounter, Timer, measure_parts
from spmoe.errors import UsageError
from spmoe.formats.layout import dtype_name
from spmoe.models.shipped import sample_text
from spmoe.observe.progress import Report, progress_bar
from spmoe.predict.cutoff import ENOUGH_STEPS
from spmoe.registry import ON_DEMAND
from spmoe.types import Stage

_SWEPT_POLICY = "draft-gate"  # whose cutoff the check sweeps
_PROMPT_TOKENS = 32
_PROMPT_DISTANCE = 128  # tokens between the starts of two prompts
_TEXT_CHARACTERS = 4096
_EXTRA_STEPS = 4  # steps that a generation may run beyond its length, until it yields text and can be stopped


# ---- measuring


@dataclass(frozen=True)
class Workload:
    """Generations that a profile or a check runs."""

    prompts: Sequence[list[int]]
    output_len: int
    interruptible: Callable[[Generation], AbstractContextManager[None]] = lambda generation: nullcontext()
    notify: Callable[[str], None] = lambda message: None
    progress: Callable[[str], AbstractContextManager[Report]] = lambda title: progress_bar(title, enabled=False)


def make_prompts(engine: Engine, count: int) -> list[list[int]]:
    """Return prompts of 32 tokens from the sample text."""
    text = _text_tokens(engine)
    starts = [number * _PROMPT_DISTANCE % max(1, len(text) - _PROMPT_TOKENS) for number in range(count)]
    return [text[start : start + _PROMPT_TOKENS] for start in starts]


def _text_tokens(engine: Engine) -> list[int]:
    """Return tokens of the sample text, which decide the experts in use; without a tokenizer, the whole vocabulary."""
    found = (
        engine.parts.tokenizer(sample_text()[:_TEXT_CHARACTERS])["input_ids"]
        if engine.parts.tokenizer is not None
        else []
    )
    vocabulary = engine.target.vocab_size
    if (draft := engine.parts.drafter.runner) is not None:
        vocabulary = min(vocabulary, draft.vocab_size)
    return [token for token in found if token < vocabulary] or list(range(vocabulary))


def measure_profile(llm: LLM, draft_tokens: int, workload: Workload) -> EngineProfile:
    """Measure the parts of a step, then generate under each policy with K = `draft_tokens`."""
    engine = llm.engine
    if not engine.target.moe:
        raise UsageError(f"{engine.config.model} has no experts, so there is nothing to profile; choose an MoE model")
    workload.notify("timing passes and loads")
    parts = _measure_parts(engine)
    return EngineProfile(
        machine=machine(engine.device),
        subject=_subject(engine),
        **asdict(parts),
        policies=measure_policies(llm, draft_tokens, workload),
    )


def _measure_parts(engine: Engine) -> PartTimes:
    """Time the parts without prefetching; the engine's options are restored afterwards."""
    before = engine.config
    timer = Timer(engine.experts, engine.parts.clock, engine.parts.runtime.backend.synchronize)
    engine.reconfigure(prefetch=ON_DEMAND, eviction="lru", overlap=True)
    try:
        return measure_parts(
            timer,
            engine.target,
            engine.parts.drafter.runner,
            engine.spec,
            engine.slots,
            before.max_draft_tokens + 1,
            _text_tokens(engine),
        )
    finally:
        engine.reconfigure(prefetch=before.prefetch, eviction=before.eviction, overlap=before.overlap)


def _subject(engine: Engine) -> Subject:
    config, spec, draft = engine.config, engine.spec, engine.parts.drafter.runner
    return Subject(
        model=config.model,
        draft=config.draft,
        dtype=dtype_name(engine.parts.models.dtype),
        device=engine.device.type,
        shape=config.shape,
        layers=len(spec.experts),
        experts_per_layer=max(spec.experts),
        top_k=engine.target.top_k,
        expert_bytes=spec.layout.nbytes,
        draft_layers=draft.depth_count if draft is not None else 0,
        slots=engine.slots,
        eviction=config.eviction_policy,
        emulated_link_gbps=config.link_gbps,
        expert_format=engine.parts.models.expert_format.weight.label,
        lossless=engine.parts.models.lossless,
    )


def measure_policies(
    llm: LLM, draft_tokens: int, workload: Workload, policies: Sequence[str] = PROFILED_POLICIES
) -> tuple[PolicyStats, ...]:
    """Generate every prompt under each policy in turns, after one warm-up turn; skip unavailable policies."""
    engine, runs = llm.engine, dict[str, list[tuple[PredictionCounter, RequestOutput]]]()
    isolated = IsolatedConfigs(engine)
    turns = list(product(enumerate([workload.prompts[0], *workload.prompts]), policies))
    with workload.progress("Generating") as report:
        for done, ((turn, prompt), policy) in enumerate(turns):
            report(done, len(turns), policy if turn else f"warm-up: {policy}")
            changes = {"prefetch": policy, "num_speculative_tokens": draft_tokens, "cutoff": Cutoff(CutoffMode.ALL)}
            isolated.select(policy, changes)
            if engine.loop.policy.name != policy:
                continue
            if turn == 0:
                generate(llm, prompt, workload)
                engine.loop.prepare()
                continue
            with counted_predictions(engine) as counter:
                runs.setdefault(policy, []).append((counter, generate(llm, prompt, workload)))
        report(len(turns), len(turns))
    return tuple(_policy_stats(engine, policy, draft_tokens, found) for policy, found in runs.items())


@contextmanager
def counted_predictions(engine: Engine) -> Iterator[PredictionCounter]:
    """Count the predictions of the engine's policy while the context is open."""
    counter = PredictionCounter(engine.loop.policy, engine.experts, len(engine.spec.experts))
    with engine.using_policy(counter):
        yield counter


def generate(llm: LLM, prompt: list[int], workload: Workload) -> RequestOutput:
    """Generate greedily, a few tokens beyond the length: a draft that is cut short by the limit has another K."""
    engine, length = llm.engine, workload.output_len
    limit = min(length + _EXTRA_STEPS * (engine.loop.max_draft_tokens + 1), engine.parts.max_model_len - len(prompt))
    generation = llm.stream(prompt, SamplingParams(max_tokens=limit, ignore_eos=True))
    complete = False
    with workload.interruptible(generation):
        for _ in generation:
            if not complete and len(generation.token_ids) >= length and not generation.stopped:
                complete = True
                generation.stop()
    if generation.stopped and not complete:
        raise KeyboardInterrupt
    return generation.completion


@dataclass(frozen=True, slots=True)
class _StepMeans:
    """Means per step of several generations, without their prompts."""

    steps: int
    tokens: float
    draft_passes: float
    draft_seconds: float
    verify_seconds: float  # without stalls
    stall_seconds: float

    @classmethod
    def of(cls, runs: Iterable[RequestOutput]) -> _StepMeans:
        counters = [run.stats.decode_counters for run in runs]
        steps = max(1, sum(one.steps for one in counters))

        def mean(name: str) -> float:
            return float(sum(getattr(one, name) for one in counters) / steps)

        verifying, stalled = mean("verify_seconds"), mean("stall_seconds")
        return cls(
            steps=steps,
            tokens=mean("tokens"),
            draft_passes=mean("drafted"),
            draft_seconds=mean("draft_seconds"),
            verify_seconds=max(0.0, verifying - stalled),
            stall_seconds=min(verifying, stalled),
        )


def _policy_stats(
    engine: Engine, policy: str, draft_tokens: int, runs: Sequence[tuple[PredictionCounter, RequestOutput]]
) -> PolicyStats:
    means, counters = _StepMeans.of(run for _, run in runs), [counter for counter, _ in runs]
    missing_by_layer = [sum(counts) for counts in zip(*(one.missing for one in counters), strict=True)]
    missing, layers = sum(missing_by_layer), len(missing_by_layer)
    predicted, correct = (
        {stage: sum(getattr(one, name)[stage] for one in counters) for stage in (Stage.DRAFT, Stage.VERIFY)}
        for name in ("predicted", "correct")
    )
    return PolicyStats(
        policy=policy,
        draft_tokens=draft_tokens,
        slots=engine.slots,
        **asdict(means),
        needed=sum(one.needed for one in counters) / means.steps / layers,
        missing=missing / means.steps / layers,
        missing_by_layer=tuple(count / means.steps for count in missing_by_layer),
        draft_recall=_share(correct[Stage.DRAFT], missing),
        draft_precision=_share(correct[Stage.DRAFT], predicted[Stage.DRAFT]),
        verify_recall=_share(correct[Stage.VERIFY], missing - correct[Stage.DRAFT]),
        verify_precision=_share(correct[Stage.VERIFY], predicted[Stage.VERIFY]),
    )


def _share(part: int, whole: int) -> float:
    return min(1.0, part / whole) if whole > 0 else 0.0


# ---- checking


@dataclass(frozen=True, slots=True)
class CheckedStep:
    """Measured and predicted step of one configuration, in seconds per step and experts per layer."""

    expert_memory: str
    policy: str
    draft_tokens: int
    cutoff: int | None  # layers; None: the policy does not prefetch from the draft
    steps: int
    measured: float
    predicted: float
    predicted_from_run: float  # from this run's own compute times and missing experts: tests only the overlap
    missing: float
    predicted_missing: float

    @property
    def error(self) -> float:
        """Relative error of `predicted`."""
        return self.predicted / self.measured - 1

    @property
    def error_from_run(self) -> float:
        """Relative error of `predicted_from_run`."""
        return self.predicted_from_run / self.measured - 1


@dataclass(frozen=True, slots=True)
class CutoffSweep:
    """Seconds per step by cutoff, for one budget and K."""

    expert_memory: str
    draft_tokens: int
    measured: Mapping[int, float]  # cutoffs that were run
    predicted: Mapping[int, float]  # every cutoff
    auto: int  # the cutoff that `--cutoff auto` chose
    just_in_time: int

    @property
    def best(self) -> int:
        """The fastest cutoff that was run."""
        return min(self.measured, key=lambda depth: (self.measured[depth], depth))

    def slowdown(self, depth: int) -> float:
        """Return the relative difference between the measured step at `depth` and the fastest one."""
        return self.measured[depth] / self.measured[self.best] - 1

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            **asdict(self),
            "best": self.best,
            "auto_slowdown": self.slowdown(self.auto),
            "just_in_time_slowdown": self.slowdown(self.just_in_time),
        }


@dataclass(frozen=True, slots=True)
class Errors:
    """Mean and maximum of absolute relative errors."""

    mean: float
    worst: float

    @classmethod
    def of(cls, errors: Iterable[float]) -> Errors:
        """Summarize errors; zeros if there are none."""
        found = [abs(one) for one in errors]
        return cls(sum(found) / len(found), max(found)) if found else cls(0.0, 0.0)


@dataclass(frozen=True)
class Check:
    """Results of `--check`."""

    steps: list[CheckedStep]
    sweeps: list[CutoffSweep]

    @property
    def errors(self) -> dict[str, Errors]:
        """Errors of: whole steps; steps from the run's own parts; the ratio to the on-demand step run beside it."""
        return {
            "step": Errors.of(one.error for one in self.steps),
            "from_run": Errors.of(one.error_from_run for one in self.steps),
            "ratio": Errors.of(self._ratio_errors()),
        }

    def _ratio_errors(self) -> Iterator[float]:
        on_demand = {(one.expert_memory, one.draft_tokens): one for one in self.steps if one.policy == ON_DEMAND}
        for one in self.steps:
            base = on_demand.get((one.expert_memory, one.draft_tokens))
            if base is not None and base is not one:
                yield (one.predicted / base.predicted) / (one.measured / base.measured) - 1

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "steps": [{**asdict(one), "error": one.error, "error_from_run": one.error_from_run} for one in self.steps],
            "sweeps": [sweep.to_dict() for sweep in self.sweeps],
            "errors": {name: asdict(one) for name, one in self.errors.items()},
        }


def require_same_subject(profile: EngineProfile, engine: Engine) -> None:
    """Raise UsageError unless the profile was measured with this engine's models, device and link."""
    here = _subject(engine)
    names = ("dtype", "device", "shape", "layers", "expert_bytes", "emulated_link_gbps")
    if (found := profile.subject.difference({name: getattr(here, name) for name in names})) is not None:
        raise UsageError(
            f"the profile is of {found[0]}, and this engine of {found[1]}; leave out --from to measure a new profile"
        )


def check_engine(
    llm: LLM,
    predictor: Predictor,
    expert_memory: Size,
    draft_tokens: Sequence[int],
    depths: Sequence[int] | None,
    repeat: int,
    workload: Workload,
) -> Check:
    """Run policies and cutoffs on one engine and compare each with its prediction; `depths` None: every cutoff."""
    found = Check([], [])
    engine, isolated = llm.engine, IsolatedConfigs(llm.engine)
    layers, memory = len(engine.spec.experts), str(expert_memory)
    for k in draft_tokens:
        chosen = _automatic_cutoffs(llm, isolated, k, workload) if k else None
        runs = [_Run(policy, k, None) for policy in (ON_DEMAND, "next-gate") if _is_available(engine, policy, k)]
        if chosen is not None:
            swept = range(layers + 1) if depths is None else [min(depth, layers) for depth in depths]
            runs += [_Run(_SWEPT_POLICY, k, depth) for depth in sorted({*swept, *chosen})]
        completions = _take_turns(llm, isolated, runs, repeat, workload, f"Checking {memory}, K={k}")
        steps = [_checked_step(engine, predictor, memory, run, completions[run]) for run in runs]
        found.steps.extend(steps)
        if chosen is not None:
            measured = {one.cutoff: one.measured for one in steps if one.cutoff is not None}
            predicted = {
                depth: predictor.step(_SWEPT_POLICY, k, depth, engine.slots).seconds for depth in range(layers + 1)
            }
            found.sweeps.append(CutoffSweep(memory, k, measured, predicted, *chosen))
    return found


@dataclass(frozen=True, slots=True)
class _Run:
    """One configuration of the check, on one engine."""

    policy: str
    draft_tokens: int
    cutoff: int | None

    def __str__(self) -> str:
        return self.policy if self.cutoff is None else f"{self.policy}, cutoff {self.cutoff}"

    @property
    def options(self) -> dict[str, Any]:
        cutoff = Cutoff(CutoffMode.AUTO) if self.cutoff is None else Cutoff(CutoffMode.FIXED, self.cutoff)
        return {"prefetch": self.policy, "num_speculative_tokens": self.draft_tokens, "cutoff": cutoff}


def _is_available(engine: Engine, policy: str, draft_tokens: int) -> bool:
    """Return whether the engine can run this policy with its pair; otherwise it runs another one instead."""
    engine.reconfigure(prefetch=policy, num_speculative_tokens=draft_tokens)
    return engine.loop.policy.name == policy


def _automatic_cutoffs(
    llm: LLM, isolated: IsolatedConfigs, draft_tokens: int, workload: Workload
) -> tuple[int, int] | None:
    """Return the cutoffs of `auto` and `just-in-time`, once learned; None if the draft does not prefetch."""
    engine, prompts = llm.engine, workload.prompts
    changes = _Run(_SWEPT_POLICY, draft_tokens, None).options
    isolated.select(("automatic cutoffs", draft_tokens), changes)
    if engine.prefetching.cutoff is None:
        return None
    before = engine.counters.verified
    for number in range(ENOUGH_STEPS):
        if engine.counters.verified - before >= ENOUGH_STEPS:
            break
        generate(llm, prompts[number % len(prompts)], workload)
    engine.learn_cutoff()
    auto = engine.prefetching.cutoff
    engine.reconfigure(cutoff=Cutoff(CutoffMode.JUST_IN_TIME))
    return auto, engine.prefetching.cutoff


def _take_turns(
    llm: LLM, isolated: IsolatedConfigs, runs: Sequence[_Run], repeat: int, workload: Workload, title: str
) -> dict[_Run, list[RequestOutput]]:
    """Run every configuration on every prompt, each turn starting with another one, after one warm-up turn."""
    found: dict[_Run, list[RequestOutput]] = {run: [] for run in runs}
    turns = [workload.prompts[0], *(prompt for _ in range(repeat) for prompt in workload.prompts)]
    done, total = 0, len(turns) * len(runs)
    with workload.progress(title) as report:
        for turn, prompt in enumerate(turns):
            first = turn % len(runs)
            for run in [*runs[first:], *runs[:first]]:
                report(done, total, str(run) if turn else f"warm-up: {run}")
                isolated.select(run, run.options)
                completion = generate(llm, prompt, workload)
                done += 1
                if turn:
                    found[run].append(completion)
                else:
                    llm.engine.loop.prepare()
        report(done, total)
    return found


def _checked_step(
    engine: Engine, predictor: Predictor, memory: str, run: _Run, completions: Sequence[RequestOutput]
) -> CheckedStep:
    means, layers, k = _StepMeans.of(completions), len(engine.spec.experts), run.draft_tokens
    slots, cutoff = engine.slots, run.cutoff or 0
    missing = sum(one.stats.decode_counters.useful_loads for one in completions) / means.steps / layers
    costs = replace(
        predictor.costs(run.policy, k, missing),
        draft_pass=means.draft_seconds / max(1, means.draft_passes),
        verify_layer=means.verify_seconds / layers,
    )
    return CheckedStep(
        expert_memory=memory,
        policy=run.policy,
        draft_tokens=k,
        cutoff=run.cutoff,
        steps=means.steps,
        measured=means.draft_seconds + means.verify_seconds + means.stall_seconds,
        predicted=predictor.step(run.policy, k, cutoff, slots).seconds,
        predicted_from_run=predictor.step(run.policy, k, cutoff, slots, missing=missing, costs=costs).seconds,
        missing=missing,
        predicted_missing=predictor.demand(run.policy, k, slots)[1],
    )
