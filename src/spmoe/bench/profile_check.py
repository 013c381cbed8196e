"""The latency model against measurement: short generations over a sweep, predicted and measured step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypedDict

from spmoe.bench.profile_behaviour import LayerObserver, generate
from spmoe.bench.profile_predict import Predictor
from spmoe.bench.runs import IsolatedConfigs
from spmoe.config import Cutoff, CutoffMode, Size
from spmoe.engine.llm import LLM, Completion
from spmoe.predict.cutoff import ENOUGH_STEPS
from spmoe.predict.latency import Costs
from spmoe.predict.next_gate import draft_gate_part

_DRAFTED = "draft-gate"


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration of the sweep, on one engine."""

    policy: str
    draft_tokens: int
    cutoff: int | None  # None: the draft does not prefetch


@dataclass(frozen=True, slots=True)
class Checked:
    """What one configuration took, and what it was predicted to. Seconds per step, experts per layer."""

    memory: str
    slots: int
    case: Case
    steps: int
    tokens_per_step: float
    measured: float
    predicted: float
    given_parts: float  # predicted from the run's own compute and missing experts: what is left is how they overlap
    missing: float
    predicted_missing: float

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.predicted / self.measured - 1

    @property
    def error_given_parts(self) -> float:
        """What is left of it where compute and loads are known."""
        return self.given_parts / self.measured - 1


@dataclass(frozen=True, slots=True)
class Sweep:
    """Step time over the cutoff, for one budget and K."""

    memory: str
    draft_tokens: int
    measured: Mapping[int, float]  # by depth
    predicted: Mapping[int, float]  # every depth
    analytic: int  # what --cutoff auto chose
    just_in_time: int

    @property
    def best(self) -> int:
        """The fastest of those that were run."""
        return min(self.measured, key=lambda depth: (self.measured[depth], depth))

    def slower(self, depth: int) -> float:
        """How much slower a depth was than the best."""
        return self.measured[depth] / self.measured[self.best] - 1

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            **asdict(self),
            "best": self.best,
            "analytic_slower": self.slower(self.analytic),
            "just_in_time_slower": self.slower(self.just_in_time),
        }


@dataclass(frozen=True, slots=True)
class Errors:
    """Absolute errors, as shares."""

    mean: float
    worst: float

    @classmethod
    def of(cls, errors: Iterable[float]) -> Errors:
        """Of some."""
        found = [abs(one) for one in errors]
        return cls(sum(found) / len(found), max(found)) if found else cls(0.0, 0.0)


@dataclass(frozen=True)
class Check:
    """All of it."""

    rows: list[Checked]
    sweeps: list[Sweep]

    @property
    def errors(self) -> dict[str, Errors]:
        """By what is predicted: steps; steps whose parts are known; steps against those on demand, run beside them."""
        return {
            "step": Errors.of(row.error for row in self.rows),
            "given_parts": Errors.of(row.error_given_parts for row in self.rows),
            "ratio": Errors.of(self._ratio_errors()),
        }

    def _ratio_errors(self) -> Iterable[float]:
        plain = {(row.memory, row.case.draft_tokens): row for row in self.rows if row.case.policy == "on-demand"}
        for row in self.rows:
            beside = plain.get((row.memory, row.case.draft_tokens))
            if beside is not None and beside is not row:
                yield (row.predicted / beside.predicted) / (row.measured / beside.measured) - 1

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "rows": [
                {**asdict(row), "error": row.error, "error_given_parts": row.error_given_parts} for row in self.rows
            ],
            "sweeps": [sweep.to_dict() for sweep in self.sweeps],
            "errors": {name: asdict(one) for name, one in self.errors.items()},
        }


def check_engine(
    llm: LLM,
    predictor: Predictor,
    memory: Size,
    draft_tokens: Sequence[int],
    depths: Sequence[int] | None,
    prompts: Sequence[list[int]],
    output_len: int,
    repeat: int,
    tell: Callable[[str], None],
    observer: LayerObserver,
) -> Check:
    """Run an engine's part of the sweep; `depths` None is every one."""
    found = Check([], [])
    layers, apart = len(llm.engine.store.experts), IsolatedConfigs(llm.engine)
    for k in draft_tokens:
        chosen = _choices(llm, apart, k, prompts, output_len, observer) if k else None
        wanted = range(layers + 1) if depths is None else [min(depth, layers) for depth in depths]
        cases = [Case(policy, k, None) for policy in ("on-demand", "next-gate") if _can(llm, policy, k)]
        if chosen is not None:
            cases += [Case(_DRAFTED, k, depth) for depth in sorted({*wanted, *chosen})]
        say = lambda words: tell(f"{memory}, {words}")  # noqa: E731
        runs = _take_turns(llm, apart, cases, prompts, output_len, repeat, observer, say)
        rows = [_checked(llm, predictor, memory, case, runs[case]) for case in cases]
        found.rows.extend(rows)
        if chosen is not None:
            drafted = {row.case.cutoff: row.measured for row in rows if row.case.cutoff is not None}
            slots = llm.engine.slots
            every = {depth: predictor.step(_DRAFTED, k, depth, slots).seconds for depth in range(layers + 1)}
            found.sweeps.append(Sweep(str(memory), k, drafted, every, *chosen))
    return found


def _can(llm: LLM, policy: str, k: int) -> bool:
    """Whether a policy comes to itself on this pair."""
    llm.engine.reconfigure(prefetch=policy, num_speculative_tokens=k)
    return llm.engine.loop.policy.name == policy


def _choices(
    llm: LLM, apart: IsolatedConfigs, k: int, prompts: Sequence[list[int]], output_len: int, observer: LayerObserver
) -> tuple[int, int] | None:
    """The depths that the two forms of the cutoff choose, once enough has been seen; None where no draft prefetches."""
    engine = llm.engine
    changes = {"prefetch": _DRAFTED, "num_speculative_tokens": k, "cutoff": Cutoff(CutoffMode.AUTO)}
    apart.select(("choices", k), changes)
    if draft_gate_part(engine.loop.policy) is None:
        return None
    before = engine.loop.counters.verified
    for number in range(ENOUGH_STEPS):
        if engine.loop.counters.verified - before >= ENOUGH_STEPS:
            break
        generate(llm, prompts[number % len(prompts)], output_len, observer)
    engine.learn_cutoff()
    analytic = engine.cutoff
    engine.reconfigure(cutoff=Cutoff(CutoffMode.JUST_IN_TIME))
    just_in_time = engine.cutoff
    return (analytic, just_in_time) if analytic is not None and just_in_time is not None else None


def _changes(case: Case) -> dict[str, Any]:
    cutoff = Cutoff(CutoffMode.AUTO) if case.cutoff is None else Cutoff(CutoffMode.FIXED, case.cutoff)
    return {"prefetch": case.policy, "num_speculative_tokens": case.draft_tokens, "cutoff": cutoff}


def _take_turns(
    llm: LLM,
    apart: IsolatedConfigs,
    cases: Sequence[Case],
    prompts: Sequence[list[int]],
    output_len: int,
    repeat: int,
    observer: LayerObserver,
    tell: Callable[[str], None],
) -> dict[Case, list[Completion]]:
    """Every case on every prompt, one after the other, each turn beginning with another; the first turn warms up."""
    found: dict[Case, list[Completion]] = {case: [] for case in cases}
    turns = [prompts[0], *(prompt for _ in range(repeat) for prompt in prompts)]
    for turn, prompt in enumerate(turns):
        tell(f"K={cases[0].draft_tokens}: turn {turn} of {len(turns) - 1}" + (", which warms up" if turn == 0 else ""))
        first = turn % len(cases)
        for case in [*cases[first:], *cases[:first]]:
            apart.select(case, _changes(case))
            completion = generate(llm, prompt, output_len, observer)
            if turn:
                found[case].append(completion)
            else:
                llm.engine.loop.prepare()
    return found


def _checked(llm: LLM, predictor: Predictor, memory: Size, case: Case, runs: Sequence[Completion]) -> Checked:
    engine, layers, k = llm.engine, len(llm.engine.store.experts), case.draft_tokens
    decoded = [run.stats.decode_counters for run in runs]
    steps = max(1, sum(one.steps for one in decoded))
    missing = sum(one.useful_loads for one in decoded) / steps / layers
    drafting = sum(one.draft_seconds for one in decoded) / steps
    verifying = sum(one.verify_seconds for one in decoded) / steps
    stalled = sum(one.stall_seconds for one in decoded) / steps
    passes = max(1, sum(one.drafted for one in decoded) / steps)
    own = replace(
        predictor.costs(case.policy, k, missing),
        draft_pass=drafting / passes,
        verify_layer=max(0.0, verifying - stalled) / layers,
        compute_slowdown=1.0,
    )
    slots, cutoff = engine.slots, case.cutoff or 0
    predicted, given = (
        predictor.step(case.policy, k, cutoff, slots, **known).seconds
        for known in (_Known(), _Known(missing=missing, costs=own))
    )
    return Checked(
        str(memory), slots, case, steps, sum(one.tokens for one in decoded) / steps, drafting + verifying, predicted,
        given, missing, predictor.needs(case.policy, k, slots).missing,
    )  # fmt: skip


class _Known(TypedDict, total=False):
    missing: float
    costs: Costs
