"""Scenario files: TOML that says which configurations a benchmark compares, validated by pydantic.

Keys at the top apply to every `[[matrix]]`. Keys of a matrix override them, and options of the command line override
both. A key that takes a list also takes a single value. See docs/benchmarking.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import ErrorDetails

from spmoe.bench.prompts import SAMPLE
from spmoe.config import (
    DEVICES,
    DTYPES,
    LOAD_FORMATS,
    MAX_SPECULATIVE_TOKENS,
    RESIDENCY_CHECKS,
    CpuThreads,
    Cutoff,
    DraftTokens,
    EngineConfig,
    Size,
    drafter_name,
    expert_formats,
    parse_cpu_experts,
)
from spmoe.errors import UsageError
from spmoe.files import decode_toml, read_text_file
from spmoe.registry import EVICTION_POLICIES, PREFETCH_POLICIES

EVERY = "every"  # as a cutoff: every number of layers that the model has
PACKAGED = Path(__file__).parents[1] / "scenarios"  # scenario files that ship with the package
SHIPPED = "shipped"  # as a model or draft: the one of the shipped pair
_DEFAULTS = EngineConfig.make(model="")
DEFAULT_EVICTION, DEFAULT_CUTOFF = _DEFAULTS.eviction, _DEFAULTS.cutoff

# ---- types of values


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _without_duplicates(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if not values:
        raise ValueError("the list is empty; give at least one value, or leave the key out")
    return tuple(dict.fromkeys(values))


def _choice(kind: str, list_names: Callable[[], Sequence[str]], *, combined: bool = False) -> AfterValidator:
    def check(value: str) -> str:
        names = list_names()
        for part in value.split("+") if combined else [value]:
            if part not in names:
                close = get_close_matches(part, names, 1)
                hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(names)}"
                raise ValueError(f"unknown {kind} {part!r}; {hint}")
        return value

    return AfterValidator(check)


def _parsed_by(parse: Callable[[Any], Any]) -> PlainValidator:
    def check(value: Any) -> Any:
        try:
            return parse(value)
        except UsageError as error:
            raise ValueError(str(error)) from error

    return PlainValidator(check)


def _parse_link(value: Any) -> float | None:
    if value == "own":
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ValueError(f"{value!r} is not a speed; write GB/s as a number above 0, or own for the machine's own link")
    return float(value)


def _parse_draft_tokens(value: Any) -> DraftTokens:
    if isinstance(value, str) and value.strip().lower() == "auto":
        return "auto"
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_SPECULATIVE_TOKENS:
        raise ValueError(
            f"{value!r} is not a number of draft tokens; write a whole number from 0 to {MAX_SPECULATIVE_TOKENS}, or "
            "auto"
        )
    return value


def _resolve_path(value: str, info: ValidationInfo) -> str:
    """Make the path absolute if it exists beside the scenario file (validation context); hub ids stay as they are."""
    if info.context is None or drafter_name(value)[0] != "model" or value in (SHIPPED, SAMPLE):
        return value
    try:
        path = info.context / Path(value).expanduser()
    except RuntimeError as error:  # "~somebody"
        raise ValueError(f"{value!r} is not a path ({error}); write it in full") from error
    if path.exists():
        return str(path.resolve())
    if value.startswith((".", "/", "~")):
        hint = (
            "run it from a clone, which has it"
            if info.context.samefile(PACKAGED)
            else "paths are relative to the scenario file"
        )
        raise ValueError(f"{path.resolve()} does not exist; {hint}")
    return value


T = TypeVar("T")
OneOrMore = Annotated[tuple[T, ...], BeforeValidator(_as_tuple), AfterValidator(_without_duplicates)]
Text = Annotated[StrictStr, Field(min_length=1)]
Located = Annotated[Text, AfterValidator(_resolve_path)]
OptionalText = Annotated[Text | None, BeforeValidator(lambda value: None if value == "none" else value)]
Policy = Annotated[Text, _choice("prefetch policy", PREFETCH_POLICIES.names, combined=True)]
Eviction = Annotated[Text, _choice("eviction policy", lambda: ("auto", *EVICTION_POLICIES.names()))]
Format = Annotated[Text, _choice("expert format", expert_formats)]
ResidencyCheck = Annotated[Text, _choice("residency check", lambda: RESIDENCY_CHECKS)]
CpuExperts = Annotated[CpuThreads, _parsed_by(parse_cpu_experts)]
Budget = Annotated[Size, _parsed_by(Size.parse)]
Link = Annotated[float | None, PlainValidator(_parse_link)]
NumDraftTokens = Annotated[DraftTokens, PlainValidator(_parse_draft_tokens)]
CutoffOrEvery = Annotated[Cutoff | str, _parsed_by(lambda value: EVERY if value == EVERY else Cutoff.parse(value))]
AtLeastOne = Annotated[StrictInt, Field(ge=1)]


class PolicyPair(BaseModel):
    """A prefetch policy with an eviction policy, optionally under a name: an entry of `systems`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prefetch: Policy
    eviction: Eviction = DEFAULT_EVICTION
    name: Text | None = None
    draft_tokens: OneOrMore[NumDraftTokens] | None = None  # overrides those of the matrix


class Matrix(BaseModel):
    """A `[[matrix]]` table: every combination of its values is measured."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Text | None = None
    # one workload for each combination of these
    models: OneOrMore[Located] | None = None  # None: the shipped pair
    drafts: OneOrMore[Located] | None = None
    shapes: OneOrMore[OptionalText] = (None,)
    expert_formats: OneOrMore[Format] = ("auto",)
    cpu_experts: OneOrMore[CpuExperts] = ("off",)
    residency_checks: OneOrMore[ResidencyCheck] = ("auto",)
    links: OneOrMore[Link] = (None,)  # GB/s to emulate; None: the machine's own link
    prompts: OneOrMore[Located] = (SAMPLE,)
    # one configuration for each combination of these
    budgets: OneOrMore[Budget] = (Size(share=0.25),)
    policies: OneOrMore[Policy] = ("draft-gate", "on-demand")
    evictions: OneOrMore[Eviction] = (DEFAULT_EVICTION,)
    systems: OneOrMore[PolicyPair] | None = None  # instead of policies and evictions
    draft_tokens: OneOrMore[NumDraftTokens] = (0, 4)  # unless set, 0 for workloads without a draft
    cutoffs: OneOrMore[CutoffOrEvery] = (DEFAULT_CUTOFF,)
    ablation: StrictBool = False
    # how each is measured
    max_prompts: AtLeastOne | None = None
    output_len: Annotated[StrictInt, Field(ge=2)] = 100
    repeat: AtLeastOne = 3
    warmup: Annotated[StrictInt, Field(ge=0)] = 1
    dtype: Annotated[Text, _choice("dtype", lambda: DTYPES)] = "auto"
    device: Annotated[Text, _choice("device", lambda: DEVICES)] = "auto"
    projection: StrictBool = True
    enforce_eager: StrictBool = False
    load_format: Annotated[Text, _choice("load format", lambda: LOAD_FORMATS)] = "auto"

    @model_validator(mode="after")
    def _require_one_way_to_name_policies(self) -> Self:
        if self.systems is not None and self.model_fields_set & {"policies", "evictions"}:
            raise ValueError("give either systems, or policies and evictions, not both")
        return self

    @property
    def policy_pairs(self) -> tuple[PolicyPair, ...]:
        """Pairs of policies to compare: `systems`, or every policy with every eviction policy."""
        if self.systems is not None:
            return self.systems
        return tuple(PolicyPair(prefetch=one, eviction=other) for one in self.policies for other in self.evictions)


# ---- files


@dataclass(frozen=True)
class Scenario:
    """A scenario file: validated values of each matrix, to be combined with those of the command line."""

    name: str | None
    text: str | None
    tables: tuple[dict[str, Any], ...]

    def matrices(self, overrides: Mapping[str, Any]) -> list[Matrix]:
        """Return the matrices with some validated values replaced."""
        return [Matrix.model_construct(**_merge(table, overrides)) for table in self.tables]


def read_scenario(path: Path) -> Scenario:
    """Read and validate a file; raise UsageError in one line for the first problem."""
    text = read_text_file(path)
    try:
        data = decode_toml(text)
    except ValueError as error:
        raise UsageError(f"{path} is not TOML: {error}") from error
    blocks = data.pop("matrix", [{}])
    if not isinstance(blocks, list) or not blocks or not all(isinstance(block, dict) for block in blocks):
        raise UsageError(f"{path}: matrix must be a list of tables; write each under [[matrix]], with two brackets")
    data.pop("description", None)
    top = validate(data, str(path), path.parent)
    name = top.pop("name", path.stem)
    tables = [validate(block, f"{path}, matrix {n}", path.parent) for n, block in enumerate(blocks, 1)]
    return Scenario(name, text, tuple(_merge(top, table) for table in tables))


def validate(
    table: Mapping[str, Any], source: str, directory: Path | None = None, options: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the values of a table that are set, converted; raise UsageError in one line for the first problem.

    Paths are resolved in `directory`. `options` maps keys to the names of command-line options, for messages.
    """
    try:
        matrix = Matrix.model_validate(dict(table), context=directory)
    except ValidationError as error:
        raise UsageError(_explain(error.errors()[0], source, options or {})) from error
    return {key: getattr(matrix, key) for key in table}


def _merge(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Combine two tables; policies or evictions of the upper one hide systems of the lower one, and vice versa."""
    pair_keys = {"policies", "evictions"}
    hidden = {"systems"} if pair_keys & upper.keys() else pair_keys if "systems" in upper else set()
    return {**{key: value for key, value in lower.items() if key not in hidden}, **upper}


def _explain(error: ErrorDetails, source: str, options: Mapping[str, str]) -> str:
    """Say in one line which key is wrong, the value seen and what is allowed."""
    keys = [part for part in error["loc"] if isinstance(part, str)]
    value, kind = error["input"], error["type"]
    if kind == "extra_forbidden":
        known = list(PolicyPair.model_fields if keys[0] == "systems" else Matrix.model_fields)
        close = get_close_matches(keys[-1], known, 1, cutoff=0.5)
        hint = f"did you mean {close[0]}?" if close else f"the keys are {', '.join(known)}"
        place = f"{source}: systems" if keys[0] == "systems" else source
        return f"{place}: unknown key {keys[-1]}; {hint}"
    place = options.get(keys[0], f"{source}: {'.'.join(keys)}") if keys else source
    if kind == "value_error":
        return f"{place}: {error['ctx']['error']}"
    if kind == "missing":
        return f"{place}: the key is missing"
    if kind == "model_type":
        return f'{place}: {value!r} is not a system; write {{ name = "mine", prefetch = "draft-gate" }}'
    rule = error["msg"].replace("Input should", "it must").replace("should", "must")
    return f"{place}: {value!r} is not allowed; {rule}"
