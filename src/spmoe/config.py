"""User-facing configuration: sizes, cutoffs, sampling and engine options, validated when constructed.

Every value that cannot be used raises `UsageError` in one line: the option, the value seen and the values allowed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import wraps
from numbers import Integral, Real
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, dataclass_transform

from pydantic import BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError, ValidationInfo
from pydantic.dataclasses import dataclass as pydantic_dataclass

from spmoe.errors import UsageError, reason, suggestion
from spmoe.registry import DRAFTERS, EVICTION_POLICIES, PREFETCH_POLICIES, WEIGHT_FORMATS

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
AUTO_DRAFT = "auto"  # the shipped draft for the shipped target, else n-grams
SELF_DRAFTS = ("self:int8", "self:int4")  # the target as its own draft, with experts quantized to these bits
DraftTokens = int | Literal["auto"]  # K
CpuThreads = int | Literal["off", "auto"]  # that compute missing experts
MAX_CPU_THREADS = 1024
DEFAULT_DRAFT_TOKENS: DraftTokens = "auto"
DEFAULT_EXPERT_MEMORY = "25%"  # where `--device-memory` divides nothing: on the CPU
SHIPPED_PAIR = Path(__file__).resolve().parent / "pair"  # directories `target` and `draft`
LOAD_FORMATS = ("auto", "dummy")  # dummy: random weights at the sizes that config.json gives; no weight files
RANDOM_WEIGHTS_NOTE = (
    "random weights (--load-format dummy): the text has no meaning, and routing is random and nearly uniform, so hit "
    "rates, acceptance and predictions are not those of the trained model"
)
VERIFY_EXPERTS = ("once", "sample", "always")  # reads of an expert from disk that are compared with its checksum
RESIDENCY_CHECKS = ("auto", "host", "device")  # who looks up in each layer whether its experts are in slots
GENERATION_CONFIGS = ("auto", "none")  # auto: sampling defaults come from the model's generation_config.json
DEFAULT_MAX_TOKENS = 256  # of a request that says nothing else, in Python and on the command line
MAX_SPECULATIVE_TOKENS = 64  # largest K
MAX_AUTO_DRAFT_TOKENS = 15  # K <= 15 verifies at most 16 rows, which kernels compute in one pass

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_DECIMAL_UNITS = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6))

T = TypeVar("T")


def home() -> Path:
    """Return the cache directory for expert files and profiles: `SPMOE_HOME`, else `spmoe` in the user's cache."""
    if explicit := os.environ.get("SPMOE_HOME"):
        return Path(explicit).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spmoe"


# ---- sizes and cutoffs


@dataclass(frozen=True, slots=True)
class Size:
    """A number of bytes, or a share of a total that is not known yet."""

    bytes: int | None = None
    share: float | None = None  # above 0 and at most 1

    @classmethod
    def parse(cls, text: str | int | Self) -> Self:
        """Read `6GiB`, `512MiB`, `1.5GB`, `25%` or a plain number of bytes."""
        if isinstance(text, cls):
            return text
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%|[a-zA-Z]*)\s*", str(text))
        if match:
            number, unit = float(match[1]), match[2].lower()
            if unit == "%" and 0 < number <= 100:
                return cls(share=number / 100)
            if unit in _UNITS and 1 <= number * _UNITS[unit] < float("inf"):
                return cls(bytes=int(number * _UNITS[unit]))
        raise UsageError(f"{str(text)!r} is not a size; write it as 6GiB, 512MiB or as a share such as 25%")

    def of(self, total: int) -> int:
        """Return the size in bytes; a share is taken of `total` bytes."""
        return self.bytes if self.bytes is not None else round((self.share or 0.0) * total)

    def described(self) -> str:
        """Return the size for an error message: a few bytes are mostly a number whose unit was forgotten."""
        is_few = self.bytes is not None and self.bytes < 1024
        return f"{self} (a number without a unit is in bytes)" if is_few else str(self)

    def __str__(self) -> str:
        """Return the shortest text that `parse` reads back as exactly this size."""
        if self.share is not None:
            candidates = [f"{100 * self.share:{form}}%" for form in ("g", ".12g", ".17g")]
        else:
            count = self.bytes or 0
            decimal = [f"{count / size:g} {unit}" for unit, size in _DECIMAL_UNITS if count >= size]
            candidates = [format_bytes(count), *decimal, f"{count} B"]
        return next((text for text in candidates if self._equals(text)), candidates[-1])

    def _equals(self, text: str) -> bool:
        try:
            return type(self).parse(text) == self
        except UsageError:
            return False


def format_bytes(count: float) -> str:
    """Format a number of bytes with a binary unit: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


class CutoffMode(Enum):
    """Ways to choose the cutoff, the number of layers that the draft stage prefetches for."""

    AUTO = "auto"
    JUST_IN_TIME = "just-in-time"
    FIXED = "fixed"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Cutoff:
    """The `--cutoff` option: how many MoE layers, counted from the first, the draft stage prefetches for."""

    mode: CutoffMode
    layers: int = 0  # with FIXED

    @classmethod
    def parse(cls, text: str | int | Self | None) -> Self:
        """Read `auto`, `just-in-time`, `all` (also None) or a number of layers."""
        if isinstance(text, cls):
            return text
        word = "all" if text is None else str(text).strip().lower()
        if word in ("auto", "just-in-time", "all"):
            return cls(CutoffMode(word))
        if word.isdecimal():
            return cls(CutoffMode.FIXED, int(word))
        raise UsageError(f"{str(text)!r} is not a cutoff; write auto, just-in-time, all or a number of layers")

    def __str__(self) -> str:
        return str(self.layers) if self.mode is CutoffMode.FIXED else self.mode.value


# ---- draft tokens and policies


def parse_num_speculative_tokens(value: Any) -> DraftTokens:
    """Read K: a whole number from 0 to 64, also as text, or `auto`."""
    name, number = "num_speculative_tokens", value
    if isinstance(value, str):
        word = value.strip().lower()
        if word == "auto":
            return "auto"
        if not word.removeprefix("-").isdecimal():
            raise UsageError(f"{name} must be a whole number or auto, not {value!r}")
        number = int(word)
    if not _is_whole(number):
        raise UsageError(f"{name} must be a whole number, not {value!r}")
    if not 0 <= number <= MAX_SPECULATIVE_TOKENS:
        raise UsageError(f"{name} must be from 0 to {MAX_SPECULATIVE_TOKENS}, not {number}")
    return int(number)


def max_draft_tokens(num_speculative_tokens: DraftTokens) -> int:
    """Return the largest number of tokens that a step may draft; also the sort key of several values of K."""
    return MAX_AUTO_DRAFT_TOKENS if num_speculative_tokens == "auto" else num_speculative_tokens


def eviction_policy_for(prefetch: str, eviction: str) -> str:
    """Return the eviction policy named or, for `auto`, the one that the (first) prefetch policy declares."""
    if eviction != "auto":
        return eviction
    own: str = PREFETCH_POLICIES.load(prefetch.split("+")[0]).eviction
    return own


def parse_prefetch_policy(value: object) -> str:
    """Return the name of a registered prefetch policy, or of several joined by +; raise UsageError for any other."""
    parts = str(value).split("+")
    if len({*parts}) < len(parts) or any(part not in PREFETCH_POLICIES for part in parts):
        names = PREFETCH_POLICIES.names()
        hint = next((found for part in parts if part not in names and (found := suggestion(part, names))), "")
        raise UsageError(
            f"prefetch must be one of {', '.join(names)}, or several of them joined by +, not {str(value)!r}{hint}"
        )
    return str(value)


def parse_eviction_policy(value: object) -> str:
    """Return `auto` or the name of a registered eviction policy; raise UsageError for any other."""
    if value != "auto" and value not in EVICTION_POLICIES:
        names = ("auto", *EVICTION_POLICIES.names())
        raise UsageError(f"eviction must be one of {', '.join(names)}, not {str(value)!r}{suggestion(value, names)}")
    return str(value)


def drafter_name(draft: str | None) -> tuple[str, str]:
    """Split `--draft` into a drafter's registered name and its argument; any other text is a checkpoint.

    `auto` stays `auto`, which is no drafter; `default_draft` says what it stands for.
    """
    if draft is None or draft == AUTO_DRAFT:
        return draft or "none", ""
    name, _, argument = draft.partition(":")
    return (name, argument) if name in DRAFTERS and name != "model" else ("model", draft)


def draft_names() -> tuple[str, ...]:
    """Return the values of `--draft` that are no checkpoint."""
    names = {AUTO_DRAFT, *DRAFTERS.names(), *SELF_DRAFTS} - {"model", "self"}  # these two take an argument
    return tuple(sorted(names))


def default_draft(model: str) -> str:
    """Return what `--draft auto` stands for: the shipped draft for the shipped target, else `ngram`."""
    try:
        shipped = Path(model).expanduser().resolve() == SHIPPED_PAIR / "target"
    except (OSError, RuntimeError, ValueError):  # not a path
        shipped = False
    return str(SHIPPED_PAIR / "draft") if shipped else "ngram"


def expert_formats() -> tuple[str, ...]:
    """Return the values of `--expert-format`."""
    return ("auto", *WEIGHT_FORMATS.names())


# ---- validation of options


def _is_whole(value: object) -> bool:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def _whole(value: Any, info: ValidationInfo) -> int:
    if not _is_whole(value):
        raise UsageError(f"{info.field_name} must be a whole number, not {value!r}")
    return int(value)


def _number(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float, Real)):
        raise UsageError(f"{info.field_name} must be a number, not {value!r}")
    return value if isinstance(value, (int, float)) else float(value)


def _switch(value: Any, info: ValidationInfo) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{info.field_name} must be true or false, not {value!r}")
    return value


def _one_of(names: Callable[[], tuple[str, ...]]) -> PlainValidator:
    def choose(value: Any, info: ValidationInfo) -> str:
        if value not in names():
            found = f"{str(value)!r}{suggestion(value, names())}"
            raise UsageError(f"{info.field_name} must be one of {', '.join(names())}, not {found}")
        return str(value)

    return PlainValidator(choose)


def _stop_strings(value: Any) -> tuple[str, ...]:
    value = () if value is None else value
    texts = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, (tuple, list)) else None
    if texts is None or not all(isinstance(text, str) for text in texts):
        raise UsageError(f"stop must be text or a list of texts, not {value!r}")
    if not all(texts):
        raise UsageError("stop must not contain an empty string")
    return texts


def _stop_tokens(value: Any) -> tuple[int, ...]:
    value = () if value is None else value
    if not isinstance(value, (tuple, list)) or not all(_is_whole(token) and token >= 0 for token in value):
        raise UsageError(f"stop_token_ids must be a list of token ids, not {value!r}")
    return tuple(int(token) for token in value)


def _logit_bias(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise UsageError(f"logit_bias must be a mapping from token ids to numbers, not {value!r}")
    biases = {}
    for token, bias in value.items():
        if not (_is_whole(token) or (isinstance(token, str) and re.fullmatch("[0-9]{1,18}", token))) or int(token) < 0:
            raise UsageError(f"logit_bias must be a mapping from token ids to numbers; {token!r} is not a token id")
        if isinstance(bias, bool) or not isinstance(bias, (int, float, Real)) or not -100 <= float(bias) <= 100:
            raise UsageError(f"logit_bias must be from -100 to 100, not {bias!r} for token {token}")
        biases[int(token)] = float(bias)
    return biases


def _json_schema(value: Any) -> str | None:
    """Return a JSON schema as text; it may be given as text or as a mapping."""
    if value is None:
        return None
    try:
        found = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(found, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"structured_outputs.json is not JSON ({reason(error)}); give a JSON schema") from error
    if not isinstance(found, Mapping):
        raise UsageError("structured_outputs.json must be a JSON schema: a mapping, or its JSON text")
    return text


def _choices(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, (tuple, list)) or not value or not all(isinstance(text, str) and text for text in value):
        raise UsageError("structured_outputs.choice must be a list of texts that are not empty")
    return tuple(value)


def _json_object(value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise UsageError(f"structured_outputs.json_object must be true or false, not {value!r}")
    return bool(value)


def _constraint_text(value: Any, info: ValidationInfo) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise UsageError(f"structured_outputs.{info.field_name} must be text that is not empty, not {value!r}")
    return value


def _structured_outputs(value: Any) -> StructuredOutputsParams | None:
    if value is not None and not isinstance(value, StructuredOutputsParams):
        raise UsageError(f"structured_outputs must be a StructuredOutputsParams, not {type(value).__name__}")
    return value


def _path_or_name(value: Any) -> Any:
    return str(value) if isinstance(value, os.PathLike) else value


def _draft_name(value: Any) -> Any:
    value = _path_or_name(value)
    if value == "none":
        return None
    if isinstance(value, str) and drafter_name(value)[0] == "self" and value not in SELF_DRAFTS:
        raise UsageError(f"draft must be {' or '.join(SELF_DRAFTS)}, not {value!r}")
    if isinstance(value, str) and drafter_name(value) == ("model", value) and "/" not in value:
        hint = suggestion(value, draft_names(), 0.75)
        if hint and not Path(value).exists():
            raise UsageError(f"draft must be a directory, hub id or name, not {value!r}{hint}")
    return value


def _memory_limit(value: Any) -> Any:
    return "auto" if value is None or str(value).strip().lower() == "auto" else Size.parse(value)


def parse_cpu_experts(value: Any) -> CpuThreads:
    """Read the threads that compute missing experts: off, auto or a number, also as text."""
    word = value.strip().lower() if isinstance(value, str) else value
    if word in ("off", "auto"):
        return "off" if word == "off" else "auto"
    number: Any = int(word) if isinstance(word, str) and word.isdecimal() else word
    if not _is_whole(number) or not 1 <= number <= MAX_CPU_THREADS:
        raise UsageError(f"cpu_experts must be off, auto or a number of threads from 1 to 1024, not {value!r}")
    return int(number)


def _optional_size(value: Any) -> Size | None:
    return None if value is None else Size.parse(value)


Whole = Annotated[int, BeforeValidator(_whole)]
Number = Annotated[float, BeforeValidator(_number)]
Switch = Annotated[bool, PlainValidator(_switch)]


@dataclass_transform(frozen_default=True)
def _validated(cls: type[T]) -> type[T]:
    """Make a frozen pydantic dataclass whose constructor raises UsageError.

    A field's description says which values are allowed: "NAME must be DESCRIPTION, not VALUE".
    """
    made: Any = pydantic_dataclass(frozen=True, slots=True, config=ConfigDict(strict=True))(cls)
    names = [field.name for field in fields(made)]
    validate = made.__init__

    @wraps(validate)
    def init(self: Any, *values: Any, **options: Any) -> None:
        if unknown := sorted(set(options) - set(names)):
            raise UsageError(f"unknown option {', '.join(unknown)}; the options are {', '.join(sorted(names))}")
        try:
            validate(self, *values, **options)
        except ValidationError as error:
            raise UsageError(_explain(made, names, error)) from None

    made.__init__ = init
    return made  # type: ignore[no-any-return]


def _explain(cls: Any, names: list[str], error: ValidationError) -> str:
    """Return the first problem that pydantic found as one line."""
    first = error.errors()[0]
    place = first["loc"][0]
    if isinstance(place, int):  # a positional argument
        if place >= len(names):
            return f"there are {len(names)} options, and more values were given: {', '.join(names)}"
        place = names[place]
    name = str(place)
    if first["type"] == "missing":
        return f"{name} is missing; give it"
    field = cls.__pydantic_fields__.get(name)
    allowed = field.description if field is not None and field.description else "text"
    return f"{name} must be {allowed}, not {first['input']!r}"


# ---- options


@_validated
class StructuredOutputsParams:
    """A constraint on the output, with the names of vLLM's; exactly one field is set. It needs `spmoe[guidance]`."""

    json: Annotated[str | Mapping[str, Any] | None, PlainValidator(_json_schema)] = None  # a JSON schema
    regex: Annotated[str | None, PlainValidator(_constraint_text)] = None  # matches the whole output
    choice: Annotated[tuple[str, ...] | list[str] | None, PlainValidator(_choices)] = None  # the output is one of these
    grammar: Annotated[str | None, PlainValidator(_constraint_text)] = None  # Lark, or GBNF of llama.cpp
    json_object: Annotated[bool | None, PlainValidator(_json_object)] = False  # any JSON object

    def __post_init__(self) -> None:
        names = [field.name for field in fields(type(self))]
        given = [name for name in names if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            raise UsageError(f"structured_outputs must have exactly one of {', '.join(names)}, not {found}")

    @property
    def kind(self) -> str:
        """Name of the field that is set."""
        return next(name for name in ("json", "regex", "choice", "grammar", "json_object") if getattr(self, name))


@_validated
class SamplingParams:
    """Sampling and stop options, with the names and meanings of vLLM's. `temperature=0` is greedy."""

    max_tokens: Annotated[Whole, Field(ge=1, description="at least 1")] = DEFAULT_MAX_TOKENS
    temperature: Annotated[Number, Field(ge=0, allow_inf_nan=False, description="0 or more")] = 0.0
    top_k: Annotated[Whole, Field(ge=-1, description="-1 or 0 (off) or more")] = 0
    top_p: Annotated[Number, Field(gt=0, le=1, description="above 0 and at most 1")] = 1.0
    min_p: Annotated[Number, Field(ge=0, le=1, description="between 0 and 1")] = 0.0
    seed: Annotated[Annotated[Whole, Field(ge=0, lt=2**63)] | None, Field(description="from 0 to 2**63-1")] = None
    stop: Annotated[str | tuple[str, ...] | list[str] | None, PlainValidator(_stop_strings)] = ()
    ignore_eos: Switch = False
    n: Annotated[Whole, Field(ge=1, description="at least 1")] = 1  # completions of one prompt
    # log-probabilities per token: of the chosen one and of this many most likely ones; -1: of all
    logprobs: Annotated[Annotated[Whole, Field(ge=-1)] | None, Field(description="-1 (all) or more")] = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2, description="from -2 to 2")] = 0.0
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2, description="from -2 to 2")] = 0.0
    repetition_penalty: Annotated[Number, Field(gt=0, allow_inf_nan=False, description="above 0")] = 1.0
    stop_token_ids: Annotated[tuple[int, ...] | list[int] | None, PlainValidator(_stop_tokens)] = ()
    min_tokens: Annotated[Whole, Field(ge=0, description="0 or more")] = 0
    logit_bias: Annotated[Mapping[int, float] | None, PlainValidator(_logit_bias)] = field(default=None, hash=False)
    structured_outputs: Annotated[StructuredOutputsParams | None, PlainValidator(_structured_outputs)] = None

    def __post_init__(self) -> None:
        if self.min_tokens > self.max_tokens:
            raise UsageError(f"min_tokens must be at most max_tokens, {self.max_tokens}, not {self.min_tokens}")
        if self.n > 1 and self.greedy:
            raise UsageError(
                f"n must be 1 with temperature 0, not {self.n}: all completions would be equal; raise the temperature"
            )

        if self.structured_outputs is not None and self.ignore_eos:
            raise UsageError(
                "structured_outputs needs ignore_eos false: only the end-of-text token may follow a complete output"
            )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Stop strings, always a tuple."""
        return _stop_strings(self.stop)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


# options of engines that measure or compare: one request at a time, each read from its start
ONE_BY_ONE: dict[str, Any] = {"max_num_seqs": 1, "enable_prefix_caching": False}


@_validated
class EngineConfig:
    """All options of an engine."""

    model: Annotated[str, BeforeValidator(_path_or_name), Field(description="a directory or hub id")]
    draft: Annotated[str | None, BeforeValidator(_draft_name), Field(description="a directory, hub id or name")] = (
        AUTO_DRAFT  # None: no draft
    )
    num_speculative_tokens: Annotated[DraftTokens, PlainValidator(parse_num_speculative_tokens)] = DEFAULT_DRAFT_TOKENS
    prefetch: Annotated[str, PlainValidator(parse_prefetch_policy)] = "auto"
    cutoff: Annotated[Cutoff, PlainValidator(Cutoff.parse)] = Cutoff(CutoffMode.AUTO)
    projection: Switch = True  # use the linear maps fitted for the pair, if there are any
    eviction: Annotated[str, PlainValidator(parse_eviction_policy)] = "auto"
    # for expert slots; None: what `device_memory` leaves on CUDA, and DEFAULT_EXPERT_MEMORY on the CPU
    expert_memory: Annotated[Size | None, PlainValidator(_optional_size)] = None
    dtype: Annotated[str, _one_of(lambda: DTYPES)] = "auto"
    expert_format: Annotated[str, _one_of(expert_formats)] = "auto"  # auto: the checkpoint's own
    max_model_len: Annotated[Annotated[Whole, Field(ge=2)] | None, Field(description="at least 2")] = None
    prefill_chunk: Annotated[Whole, Field(ge=1, description="at least 1")] = 512
    max_num_seqs: Annotated[Whole, Field(ge=1, description="at least 1")] = 8  # sequences that run together
    enable_prefix_caching: Switch = True  # start from KV caches of earlier sequences with the same first tokens
    link_gbps: Annotated[
        Annotated[Number, Field(gt=0, allow_inf_nan=False)] | None, Field(description="a speed above 0")
    ] = None
    device: Annotated[str, _one_of(lambda: DEVICES)] = "auto"
    # CUDA: one limit for weights, KV caches, workspace and slots; auto: what is free, less a margin
    device_memory: Annotated[Size | Literal["auto"], PlainValidator(_memory_limit)] = "auto"
    pin_memory: Switch = True  # keep experts in pinned host memory
    verify_experts: Annotated[str, _one_of(lambda: VERIFY_EXPERTS)] = "once"  # CPU: checksums of experts read from disk
    # CUDA: threads that compute missing experts on the CPU while others move; auto: of most cores
    cpu_experts: Annotated[CpuThreads, PlainValidator(parse_cpu_experts)] = "off"
    # CUDA: who looks up in each layer whether its experts are in slots: the host, or the device inside one graph
    residency_check: Annotated[str, _one_of(lambda: RESIDENCY_CHECKS)] = "auto"
    batching: Switch = True  # submit copies that are ready together in one call; off for measuring
    overlap: Switch = True  # overlap copies with compute; off for measuring
    enforce_eager: Switch = False  # no CUDA graphs
    shape: str | None = None  # widen the pair to the sizes of this architecture, for benchmarks
    progress: Switch = True
    generation_config: Annotated[str, _one_of(lambda: GENERATION_CONFIGS)] = "auto"  # source of sampling defaults
    load_format: Annotated[str, _one_of(lambda: LOAD_FORMATS)] = "auto"  # of target and draft

    def require_runnable(self) -> None:
        """Raise UsageError if an engine of these options could be planned but not run."""
        if self.random_weights and self.shape is not None:
            raise UsageError(f"shape {self.shape!r} widens a trained pair; leave it or load_format 'dummy' out")

    @classmethod
    def make(cls, **options: Any) -> Self:
        """Build from loosely typed options, as Python users and the command line write them.

        Without a number of draft tokens (or with None) it is the default, or 0 if there is no draft.
        """
        if options.get("num_speculative_tokens") is None:
            no_draft = "draft" in options and options["draft"] in (None, "none")
            options["num_speculative_tokens"] = 0 if no_draft else DEFAULT_DRAFT_TOKENS
        return cls(**options)

    @property
    def random_weights(self) -> bool:
        """Whether target and draft have random weights instead of those of a checkpoint."""
        return self.load_format == "dummy"

    @property
    def resolved_draft(self) -> str | None:
        """`draft`, with `auto` resolved; None: no draft."""
        return default_draft(self.model) if self.draft == AUTO_DRAFT else self.draft

    @property
    def eviction_policy(self) -> str:
        """Name of the eviction policy, with `auto` resolved."""
        return eviction_policy_for(self.prefetch, self.eviction)

    @property
    def max_draft_tokens(self) -> int:
        """Largest number of tokens that a step may draft."""
        return max_draft_tokens(self.num_speculative_tokens)

    @property
    def self_draft_scheme(self) -> str | None:
        """`int8` or `int4` if the target drafts for itself with quantized experts, else None."""
        name, scheme = drafter_name(self.resolved_draft)
        return scheme if name == "self" and self.num_speculative_tokens else None

    @property
    def draft_model(self) -> str | None:
        """Checkpoint of the draft model; None without a draft, and for drafts that need no checkpoint."""
        draft = self.resolved_draft
        return draft if self.num_speculative_tokens and drafter_name(draft)[0] == "model" else None
