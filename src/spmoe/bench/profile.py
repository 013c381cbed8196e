"""`spmoe profile`: measure a profile, predict whole steps from it, and with `--check` run them and compare.

Units are seconds, bytes and experts, unless a name says otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from spmoe.bench.apart import Apart
from spmoe.bench.ceilings import machine
from spmoe.config import Cutoff, CutoffMode, SamplingParams, Size
from spmoe.draft.model import DraftModel
from spmoe.engine.engine import Engine
from spmoe.engine.llm import LLM, Completion, Generation
from spmoe.engine.profiling import PartTimes, PredictionCounter, Timer, measure_parts
from spmoe.errors import UsageError
from spmoe.files import write_text
from spmoe.models.shipped import sample_text
from spmoe.predict.cutoff import ENOUGH_STEPS
from spmoe.predict.latency import ObservedDemand, PredictionQuality, StepCosts, StepInputs, StepTime, predict_step
from spmoe.types import Stage

FORMAT, VERSION = "spmoe profile", 2
PROFILED_POLICIES = ("on-demand", "next-gate", "draft-gate", "draft-gate+next-gate")
_SWEPT_POLICY = "draft-gate"  # whose cutoff the check sweeps
_PROMPT_TOKENS = 32
_PROMPT_DISTANCE = 128  # tokens between the starts of two prompts
_TEXT_CHARACTERS = 4096
_EXTRA_STEPS = 4  # steps that a generation may run beyond its length, until it yields text and can be stopped


# ---- the file

Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]


class _Record(BaseModel):
    """Immutable record that refuses unknown fields, missing fields and values of another type."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class Subject(_Record):
    """The models and options that a profile was measured with."""

    model: str
    draft: str | None
    dtype: str
    device: str
    shape: str | None  # architecture whose sizes the pair was widened to
    layers: Count  # MoE layers
    experts_per_layer: Annotated[int, Field(ge=1)]
    top_k: Annotated[int, Field(ge=1)]
    expert_bytes: Count
    draft_layers: Count
    slots: Count
    eviction: str
    emulated_link_gbps: Number | None

    def difference(self, other: Mapping[str, Any]) -> tuple[str, str] | None:
        """Return the first value that differs from `other`, as text: this one's and the other's; None if none does."""
        for name, value in other.items():
            if (ours := getattr(self, name)) != value:
                return _describe(name, ours), _describe(name, value)
        return None


def _describe(name: str, value: Any) -> str:
    if name == "emulated_link_gbps":
        return "the machine's own link" if value is None else f"an emulated link of {value:g} GB/s"
    if name == "shape":
        return "a model that is not widened" if value is None else f"the shape {value}"
    if name == "expert_bytes":
        return f"experts of {value} bytes"
    return f"{name.replace('_', ' ')} {value}"


class VerifyTime(_Record):
    """Median time of a verification pass, without stalls."""

    rows: Annotated[int, Field(ge=1)]
    seconds: Number


class LoadTime(_Record):
    """Median time to load experts of one layer that are demanded together."""

    experts: Annotated[int, Field(ge=1)]
    seconds: Number  # for all of them


class PolicyStats(_Record):
    """Means per step of generations under one prefetch policy, every layer prefetched for, without prompts."""

    policy: str
    draft_tokens: Count  # K
    draft_passes: Number
    rows: Number  # verified
    slots: Count
    steps: Count
    tokens_per_step: Number
    step_seconds: Number
    draft_seconds: Number
    verify_seconds: Number  # without stalls
    stall_seconds: Number
    loads: Number
    needed: Number  # experts per layer
    missing: Number  # needed experts per layer that were not resident when the step began
    missing_by_layer: tuple[Number, ...]
    draft_recall: Number  # share of the missing experts that the draft stage predicted
    draft_precision: Number  # share of the draft stage's predictions of absent experts that were needed
    verify_recall: Number  # share of the other missing experts that the target's layers predicted while verifying
    verify_precision: Number


class EngineProfile(_Record):
    """The profile file (`spmoe profile -o FILE`), stored as JSON."""

    format: Literal["spmoe profile"] = "spmoe profile"
    version: Literal[2] = 2
    machine: dict[str, Any]
    subject: Subject
    draft_pass_seconds: Number | None  # one row; None: no draft model
    verify: Annotated[tuple[VerifyTime, ...], Field(min_length=1)]  # by rows, ascending
    expert_share: Number  # share of a verified layer that comes after its router
    loads: tuple[LoadTime, ...]  # by number of experts, ascending; empty: every expert is resident
    policies: tuple[PolicyStats, ...]

    @field_validator("policies")
    @classmethod
    def _require_on_demand(cls, policies: tuple[PolicyStats, ...]) -> tuple[PolicyStats, ...]:
        if not any(one.policy == "on-demand" for one in policies):
            raise ValueError("on-demand is missing")
        return policies

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return self.model_dump(mode="json")

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        write_text(path, json.dumps(self.to_dict(), indent=1) + "\n")

    def stats(self, policy: str) -> PolicyStats:
        """Return the statistics of a policy; those of on-demand if the policy was not profiled."""
        by_name = {one.policy: one for one in self.policies}
        return by_name.get(policy) or by_name["on-demand"]


def read_engine_profile(path: Path) -> EngineProfile:
    """Read a profile file; raise UsageError that names the field if anything is wrong with it."""
    advice = "make one with `spmoe profile -o FILE`"
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text)
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror}); check the path") from error
    except ValueError as error:
        raise UsageError(f"{path} is not a profile: it is not JSON; {advice}") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise UsageError(f"{path} is not a profile: its field format is not {FORMAT!r}; {advice}")
    if values.get("version") != VERSION:
        raise UsageError(f"{path} is a profile of version {values.get('version')}, not {VERSION}; measure it again")
    try:
        return EngineProfile.model_validate_json(text)
    except ValidationError as error:
        raise UsageError(f"{path} is damaged: {_first_error(error)}; measure it again") from error


def _first_error(error: ValidationError) -> str:
    found = error.errors(include_url=False)[0]
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in found["loc"]).lstrip(".")
    message = found["msg"].removeprefix("Value error, ")
    value = "" if isinstance(found["input"], (dict, list, tuple)) else f", not {str(found['input'])[:40]!r}"
    return f"{field}: {message[0].lower()}{message[1:]}{value}"


# ---- measuring


@dataclass(frozen=True)
class Workload:
    """Generations that a profile or a check runs."""

    prompts: Sequence[list[int]]
    output_len: int
    interruptible: Callable[[Generation], AbstractContextManager[None]] = lambda generation: nullcontext()
    progress: Callable[[str], None] = lambda message: None


def make_prompts(engine: Engine, count: int) -> list[list[int]]:
    """Return prompts of 32 tokens from the sample text."""
    text = _text_tokens(engine)
    starts = [number * _PROMPT_DISTANCE % max(1, len(text) - _PROMPT_TOKENS) for number in range(count)]
    return [text[start : start + _PROMPT_TOKENS] for start in starts]


def _text_tokens(engine: Engine) -> list[int]:
    """Return tokens of the sample text, which decide the experts in use; without a tokenizer, the whole vocabulary."""
    found = engine.tokenizer(sample_text()[:_TEXT_CHARACTERS])["input_ids"] if engine.tokenizer is not None else []
    vocabulary = engine.target.vocab_size
    if isinstance(engine.draft, DraftModel):
        vocabulary = min(vocabulary, engine.draft.runner.vocab_size)
    return [token for token in found if token < vocabulary] or list(range(vocabulary))


def measure_profile(llm: LLM, draft_tokens: int, workload: Workload) -> EngineProfile:
    """Measure the parts of a step, then generate under each policy with K = `draft_tokens`."""
    engine = llm.engine
    if not engine.target.moe:
        raise UsageError(f"{engine.config.model} has no experts, so there is nothing to profile; choose an MoE model")
    workload.progress("timing passes and loads")
    parts = _measure_parts(engine)
    workload.progress("generating")
    return EngineProfile(
        machine=machine(engine.device),
        subject=_subject(engine),
        draft_pass_seconds=parts.draft_pass_seconds,
        verify=tuple(VerifyTime(rows=rows, seconds=seconds) for rows, seconds in parts.verify_seconds.items()),
        expert_share=parts.expert_share,
        loads=tuple(LoadTime(experts=count, seconds=seconds) for count, seconds in parts.load_seconds.items()),
        policies=measure_policies(llm, draft_tokens, workload),
    )


def _measure_parts(engine: Engine) -> PartTimes:
    """Time the parts without prefetching; the engine's options are restored afterwards."""
    before = engine.config
    draft = engine.draft.runner if isinstance(engine.draft, DraftModel) else None
    timer = Timer(engine.source, engine.clock, engine.room.backend.synchronize)
    engine.reconfigure(prefetch="on-demand", eviction="lru", overlap=True)
    try:
        return measure_parts(
            timer, engine.target, draft, engine.store, engine.slots, before.max_draft_tokens + 1, _text_tokens(engine)
        )
    finally:
        engine.reconfigure(prefetch=before.prefetch, eviction=before.eviction, overlap=before.overlap)


def _subject(engine: Engine) -> Subject:
    config, spec = engine.config, engine.store
    return Subject(
        model=config.model,
        draft=config.draft,
        dtype=str(engine.dtype).removeprefix("torch."),
        device=engine.device.type,
        shape=config.shape,
        layers=len(spec.experts),
        experts_per_layer=max(spec.experts),
        top_k=engine.target.top_k,
        expert_bytes=spec.layout.nbytes,
        draft_layers=engine.draft.runner.depth_count if isinstance(engine.draft, DraftModel) else 0,
        slots=engine.slots,
        eviction=config.eviction_policy,
        emulated_link_gbps=config.link_gbps,
    )


def measure_policies(
    llm: LLM, draft_tokens: int, workload: Workload, policies: Sequence[str] = PROFILED_POLICIES
) -> tuple[PolicyStats, ...]:
    """Generate every prompt under each policy in turns, after one warm-up turn; skip unavailable policies."""
    engine, runs = llm.engine, dict[str, list[tuple[PredictionCounter, Completion]]]()
    apart = Apart(engine)
    for turn, prompt in enumerate([workload.prompts[0], *workload.prompts]):
        for policy in policies:
            changes = {"prefetch": policy, "num_speculative_tokens": draft_tokens, "cutoff": Cutoff(CutoffMode.ALL)}
            apart.enter(policy, changes)
            if engine.loop.policy.name != policy:
                continue
            if turn == 0:
                generate(llm, prompt, workload)
                engine.loop.prepare()
                continue
            with counted_predictions(engine) as counter:
                runs.setdefault(policy, []).append((counter, generate(llm, prompt, workload)))
    return tuple(_policy_stats(engine, policy, draft_tokens, found) for policy, found in runs.items())


@contextmanager
def counted_predictions(engine: Engine) -> Iterator[PredictionCounter]:
    """Count the predictions of the engine's policy while the context is open."""
    policy = engine.loop.policy
    engine.loop.policy = counter = PredictionCounter(policy, engine.source, len(engine.store.experts))
    try:
        yield counter
    finally:
        engine.loop.policy = policy


def generate(llm: LLM, prompt: list[int], workload: Workload) -> Completion:
    """Generate greedily, a few tokens beyond the length: a draft that is cut short by the limit has another K."""
    engine, length = llm.engine, workload.output_len
    limit = min(length + _EXTRA_STEPS * (engine.loop.draft_tokens + 1), engine.max_model_len - len(prompt))
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
    loads: float
    useful_loads: float

    @property
    def seconds(self) -> float:
        return self.draft_seconds + self.verify_seconds + self.stall_seconds

    @classmethod
    def of(cls, runs: Iterable[Completion]) -> _StepMeans:
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
            loads=mean("loads"),
            useful_loads=mean("useful_loads"),
        )


def _policy_stats(
    engine: Engine, policy: str, draft_tokens: int, runs: Sequence[tuple[PredictionCounter, Completion]]
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
        draft_passes=means.draft_passes,
        rows=means.draft_passes + 1,
        slots=engine.slots,
        steps=means.steps,
        tokens_per_step=means.tokens,
        step_seconds=means.seconds,
        draft_seconds=means.draft_seconds,
        verify_seconds=means.verify_seconds,
        stall_seconds=means.stall_seconds,
        loads=means.loads,
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


# ---- predicting


class Predictor:
    """The latency model with the inputs of one profile, scaled to other K, cutoffs and numbers of slots."""

    def __init__(self, profile: EngineProfile) -> None:
        self.profile = profile

    def demand(self, policy: str, draft_tokens: int, slots: int) -> tuple[float, float]:
        """Return needed and missing experts per layer."""
        stats, subject = self.profile.stats(policy), self.profile.subject
        observed = ObservedDemand(
            subject.layers,
            subject.experts_per_layer,
            subject.top_k,
            stats.slots,
            stats.draft_tokens + 1,
            stats.needed,
            stats.missing,
        )
        return observed.needed_for(draft_tokens + 1), observed.missing_for(draft_tokens + 1, slots)

    def costs(self, policy: str, draft_tokens: int, missing: float) -> StepCosts:
        """Return the times of the policy's generations; verification is scaled by rows as single passes are."""
        profile, stats = self.profile, self.profile.stats(policy)
        by_rows = [(float(one.rows), one.seconds) for one in profile.verify]
        scale = _interpolate(by_rows, draft_tokens + 1) / _interpolate(by_rows, stats.rows)
        drafted = stats.draft_seconds / stats.draft_passes if stats.draft_passes else profile.draft_pass_seconds or 0.0
        verify_layer = stats.verify_seconds * scale / profile.subject.layers
        return StepCosts(drafted, verify_layer, self.load_seconds(missing), profile.expert_share)

    def load_seconds(self, together: float) -> float:
        """Return the seconds of one expert's load where `together` experts are demanded at once."""
        loads = self.profile.loads
        if not loads:
            return 0.0
        points = [(float(one.experts), one.seconds / one.experts) for one in loads]
        return _interpolate(points, min(together, loads[-1].experts))

    def step(
        self,
        policy: str,
        draft_tokens: int,
        cutoff: int,
        slots: int,
        *,
        missing: float | None = None,
        costs: StepCosts | None = None,
    ) -> StepTime:
        """Predict a step; `missing` (experts per layer) and `costs` replace the profile's values."""
        stats, subject = self.profile.stats(policy), self.profile.subject
        needed, predicted_missing = self.demand(policy, draft_tokens, slots)
        missing = predicted_missing if missing is None else missing
        return predict_step(
            StepInputs(
                costs=costs or self.costs(policy, draft_tokens, missing),
                layers=subject.layers,
                draft_passes=draft_tokens,
                cutoff=cutoff,
                missing=missing,
                needed=max(needed, missing),
                row_share=subject.top_k / subject.experts_per_layer,
                from_draft=PredictionQuality(stats.draft_recall, stats.draft_precision or 1.0),
                from_previous_layer=PredictionQuality(stats.verify_recall, stats.verify_precision or 1.0),
                slots=slots,
                missing_by_layer=tuple(one / stats.missing for one in stats.missing_by_layer) if stats.missing else (),
            )
        )


def _interpolate(points: Sequence[tuple[float, float]], x: float) -> float:
    """Interpolate linearly; extrapolate beyond the last point, and return the first value before the first."""
    if len(points) == 1 or x <= points[0][0]:
        return points[0][1]
    after = next((i for i, (at, _) in enumerate(points) if at >= x), len(points) - 1)
    (x0, y0), (x1, y1) = points[after - 1], points[after]
    return max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0))


# ---- checking


@dataclass(frozen=True, slots=True)
class CheckedStep:
    """Measured and predicted step of one configuration, in seconds per step and experts per layer."""

    expert_memory: str
    slots: int
    policy: str
    draft_tokens: int
    cutoff: int | None  # layers; None: the policy does not prefetch from the draft
    steps: int
    tokens_per_step: float
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
        on_demand = {(one.expert_memory, one.draft_tokens): one for one in self.steps if one.policy == "on-demand"}
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
    engine, apart = llm.engine, Apart(llm.engine)
    layers, memory = len(engine.store.experts), str(expert_memory)
    for k in draft_tokens:
        chosen = _automatic_cutoffs(llm, apart, k, workload) if k else None
        runs = [_Run(policy, k, None) for policy in ("on-demand", "next-gate") if _is_available(engine, policy, k)]
        if chosen is not None:
            swept = range(layers + 1) if depths is None else [min(depth, layers) for depth in depths]
            runs += [_Run(_SWEPT_POLICY, k, depth) for depth in sorted({*swept, *chosen})]
        completions = _take_turns(llm, apart, runs, repeat, workload, f"{memory}, K={k}")
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

    @property
    def options(self) -> dict[str, Any]:
        cutoff = Cutoff(CutoffMode.AUTO) if self.cutoff is None else Cutoff(CutoffMode.FIXED, self.cutoff)
        return {"prefetch": self.policy, "num_speculative_tokens": self.draft_tokens, "cutoff": cutoff}


def _is_available(engine: Engine, policy: str, draft_tokens: int) -> bool:
    """Return whether the engine can run this policy with its pair; otherwise it runs another one instead."""
    engine.reconfigure(prefetch=policy, num_speculative_tokens=draft_tokens)
    return engine.loop.policy.name == policy


def _automatic_cutoffs(llm: LLM, apart: Apart, draft_tokens: int, workload: Workload) -> tuple[int, int] | None:
    """Return the cutoffs of `auto` and `just-in-time`, once learned; None if the draft does not prefetch."""
    engine, prompts = llm.engine, workload.prompts
    changes = _Run(_SWEPT_POLICY, draft_tokens, None).options
    apart.enter(("automatic cutoffs", draft_tokens), changes)
    if engine.cutoff is None:
        return None
    before = engine.loop.counters.verified
    for number in range(ENOUGH_STEPS):
        if engine.loop.counters.verified - before >= ENOUGH_STEPS:
            break
        generate(llm, prompts[number % len(prompts)], workload)
    engine.learn_cutoff()
    auto = engine.cutoff
    engine.reconfigure(cutoff=Cutoff(CutoffMode.JUST_IN_TIME))
    return auto, engine.cutoff


def _take_turns(
    llm: LLM, apart: Apart, runs: Sequence[_Run], repeat: int, workload: Workload, title: str
) -> dict[_Run, list[Completion]]:
    """Run every configuration on every prompt, each turn starting with another one, after one warm-up turn."""
    found: dict[_Run, list[Completion]] = {run: [] for run in runs}
    turns = [workload.prompts[0], *(prompt for _ in range(repeat) for prompt in workload.prompts)]
    for turn, prompt in enumerate(turns):
        workload.progress(f"{title}: " + (f"turn {turn} of {len(turns) - 1}" if turn else "warm-up"))
        first = turn % len(runs)
        for run in [*runs[first:], *runs[:first]]:
            apart.enter(run, run.options)
            completion = generate(llm, prompt, workload)
            if turn:
                found[run].append(completion)
            else:
                llm.engine.loop.prepare()
    return found


def _checked_step(
    engine: Engine, predictor: Predictor, memory: str, run: _Run, completions: Sequence[Completion]
) -> CheckedStep:
    means, layers, k = _StepMeans.of(completions), len(engine.store.experts), run.draft_tokens
    slots, cutoff, missing = engine.slots, run.cutoff or 0, means.useful_loads / layers
    costs = replace(
        predictor.costs(run.policy, k, missing),
        draft_pass=means.draft_seconds / max(1, means.draft_passes),
        verify_layer=means.verify_seconds / layers,
    )
    return CheckedStep(
        expert_memory=memory,
        slots=slots,
        policy=run.policy,
        draft_tokens=k,
        cutoff=run.cutoff,
        steps=means.steps,
        tokens_per_step=means.tokens,
        measured=means.seconds,
        predicted=predictor.step(run.policy, k, cutoff, slots).seconds,
        predicted_from_run=predictor.step(run.policy, k, cutoff, slots, missing=missing, costs=costs).seconds,
        missing=missing,
        predicted_missing=predictor.demand(run.policy, k, slots)[1],
    )
