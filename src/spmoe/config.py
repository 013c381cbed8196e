"""Settings, frozen and checked when made. Sizes and cutoffs are parsed here and nowhere else."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields
from enum import Enum
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, Self

from spmoe.errors import UsageError
from spmoe.registry import EVICTION_POLICIES, PREFETCH_POLICIES

DEVICES = ("auto", "cpu", "cuda")
DRAFTS = ("ngram", "self:int8", "self:int4")  # drafts that are no checkpoint of their own
DraftTokens = int | Literal["auto"]
MOST_DRAFT_TOKENS = 15  # where how many is left open: 16 rows are verified, the most that kernels round alike
DTYPES = ("auto", "float32", "bfloat16", "float16")

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_DECIMAL = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6))
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def home() -> Path:
    """Where expert files and profiles are cached: `SPMOE_HOME`, else the user's cache directory."""
    if explicit := os.environ.get("SPMOE_HOME"):
        return Path(explicit).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spmoe"


@dataclass(frozen=True, slots=True)
class Size:
    """A number of bytes, or a share of something whose size is not known yet."""

    bytes: int | None = None
    share: float | None = None

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
        """The size in bytes, where a share is taken of `total`."""
        return self.bytes if self.bytes is not None else round((self.share or 0.0) * total)

    def __str__(self) -> str:
        """The shortest of a few forms that no other size has: it names configurations, in messages and in results."""
        if self.share is not None:
            found = [f"{100 * self.share:{form}}%" for form in ("g", ".12g", ".17g")]
        else:
            count = self.bytes or 0
            found = [format_bytes(count), *(f"{count / size:g} {unit}" for unit, size in _DECIMAL if count >= size)]
            found.append(f"{count} B")
        return next((text for text in found if self._is_read_from(text)), found[-1])

    def _is_read_from(self, text: str) -> bool:
        try:
            return type(self).parse(text) == self
        except UsageError:
            return False


def format_bytes(count: float) -> str:
    """A byte count for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


class CutoffMode(Enum):
    """How the deepest layer that the draft stage prefetches for is chosen."""

    AUTO = "auto"
    JUST_IN_TIME = "just-in-time"
    FIXED = "fixed"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Cutoff:
    """The `--cutoff` option: how many layers, counted from the first, may be prefetched for."""

    mode: CutoffMode
    layers: int = 0

    @classmethod
    def parse(cls, text: str | int | Self | None) -> Self:
        """Read `auto`, `just-in-time`, `all` or a number of layers."""
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


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop. `temperature=0` is greedy; `top_k=0` and `min_p=0` are off."""

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | tuple[str, ...] | list[str] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _require(isinstance(self.stop, (str, tuple, list)), f"stop must be text or a list of texts, not {self.stop!r}")
        stop = self.stop_strings
        object.__setattr__(self, "stop", stop)
        _whole(max_tokens=self.max_tokens, top_k=self.top_k, seed=0 if self.seed is None else self.seed)
        _number(temperature=self.temperature, top_p=self.top_p, min_p=self.min_p)
        _require(self.max_tokens >= 1, f"max_tokens must be at least 1, not {self.max_tokens}")
        _require(0 <= self.temperature < float("inf"), f"temperature must be 0 or more, not {self.temperature}")
        _require(self.top_k >= 0, f"top_k must be 0 (off) or more, not {self.top_k}")
        _require(0 < self.top_p <= 1, f"top_p must be above 0 and at most 1, not {self.top_p}")
        _require(0 <= self.min_p <= 1, f"min_p must be between 0 and 1, not {self.min_p}")
        _require(self.seed is None or 0 <= self.seed < 2**63, f"seed must be from 0 to 2**63-1, not {self.seed}")
        _require(all(isinstance(s, str) for s in stop), f"stop must be text or a list of texts, not {stop!r}")
        _require(all(stop), "a stop string must not be empty")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, always a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine is built from. Unknown keys raise."""

    model: str
    draft: str | None = None
    num_speculative_tokens: DraftTokens = 4  # auto: as many as pay
    prefetch: str = "draft-gate"
    cutoff: Cutoff = Cutoff(CutoffMode.AUTO)
    projection: bool = True  # use the maps fitted for the pair, where there are such
    eviction: str = "auto"
    expert_memory: Size = Size(share=0.25)
    dtype: str = "auto"
    max_model_len: int | None = None
    prefill_chunk: int = 512
    link_gbps: float | None = None
    device: str = "auto"
    device_memory: Size | Literal["auto"] | None = None  # instead of expert_memory, for everything on the device
    pin_memory: bool = True  # experts in pinned host memory
    batching: bool = True  # copies that can go together are submitted together; off for measuring
    overlap: bool = True  # copies overlap with compute; off for measuring
    enforce_eager: bool = False  # no recorded graphs
    shape: str | None = None  # widen the pair to the sizes of this architecture, for benchmarks
    progress: bool = True

    @classmethod
    def make(cls, **options: Any) -> Self:
        """Build from loosely typed options, as Python users and the command line write them."""
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(options) - known):
            raise UsageError(f"unknown option {', '.join(unknown)}; the options are {', '.join(sorted(known))}")
        if "expert_memory" in options:
            options["expert_memory"] = Size.parse(options["expert_memory"])
        memory = options.get("device_memory")
        if memory is not None:
            options["device_memory"] = "auto" if str(memory).strip().lower() == "auto" else Size.parse(memory)
        if "cutoff" in options:
            options["cutoff"] = Cutoff.parse(options["cutoff"])
        if "num_speculative_tokens" in options:
            options["num_speculative_tokens"] = draft_tokens(options["num_speculative_tokens"])
        draft = options.get("draft")
        options["draft"] = None if draft in (None, "none") else str(draft)
        return cls(**options)

    @property
    def eviction_policy(self) -> str:
        """Name of the eviction policy: the option or, for `auto`, the one that the prefetch policy declares."""
        return eviction_for(self.prefetch, self.eviction)

    @property
    def most_draft_tokens(self) -> int:
        """How many are drafted at most."""
        return most_of(self.num_speculative_tokens)

    @property
    def own_draft(self) -> str | None:
        """`int8` or `int4`, where the target drafts for itself with experts quantized so."""
        kind, _, name = (self.draft or "").partition("self:")
        return name if name and not kind and self.num_speculative_tokens else None

    @property
    def draft_model(self) -> str | None:
        """The checkpoint to draft with; None where nothing is drafted, or not by another model."""
        return self.draft if self.num_speculative_tokens and self.draft not in DRAFTS else None

    def __post_init__(self) -> None:
        for name in ("projection", "pin_memory", "batching", "overlap", "enforce_eager"):
            value = getattr(self, name)
            _require(isinstance(value, bool), f"{name} must be true or false, not {value!r}")
        require_prefetch(self.prefetch)
        require_eviction(self.eviction)
        _choose("dtype", self.dtype, DTYPES)
        _choose("device", self.device, DEVICES)
        own = self.draft is not None and (self.draft == "self" or self.draft.startswith("self:"))
        _require(not own or self.draft in DRAFTS, f"draft must be self:int8 or self:int4, not {self.draft!r}")
        _whole(num_speculative_tokens=self.most_draft_tokens, prefill_chunk=self.prefill_chunk)
        _whole(max_model_len=2 if self.max_model_len is None else self.max_model_len)
        _number(link_gbps=1 if self.link_gbps is None else self.link_gbps)
        k = self.most_draft_tokens
        _require(0 <= k <= 64, f"num_speculative_tokens must be from 0 to 64, not {k}")
        _require(self.prefill_chunk >= 1, f"prefill_chunk must be at least 1, not {self.prefill_chunk}")
        _require(
            self.max_model_len is None or self.max_model_len >= 2,
            f"max_model_len must be at least 2, not {self.max_model_len}",
        )
        _require(
            self.link_gbps is None or 0 < self.link_gbps < float("inf"),
            f"link_gbps must be a speed above 0, not {self.link_gbps}",
        )


def most_of(draft_tokens: DraftTokens) -> int:
    """The number, or the most that may be chosen; also to put several in order."""
    return MOST_DRAFT_TOKENS if draft_tokens == "auto" else draft_tokens


def draft_tokens(given: Any) -> Any:
    """Read a number of tokens, also from text, or `auto`; what else it may not be is refused with the other options."""
    if not isinstance(given, str):
        return given
    if (word := given.strip().lower()) == "auto":
        return word
    _require(
        word.removeprefix("-").isdecimal(), f"num_speculative_tokens must be a whole number or auto, not {given!r}"
    )
    return int(word)


def require_prefetch(name: object) -> str:
    """Return the name of a registered prefetch policy, or of several joined by +; raise UsageError for any other."""
    parts = str(name).split("+")
    if len({*parts}) < len(parts) or any(part not in PREFETCH_POLICIES for part in parts):
        names = ", ".join(PREFETCH_POLICIES.names())
        raise UsageError(f"prefetch must be one of {names}, or several of them joined by +, not {str(name)!r}")
    return str(name)


def require_eviction(name: object) -> str:
    """Return `auto` or the name of a registered eviction policy; raise UsageError for any other."""
    if name != "auto" and name not in EVICTION_POLICIES:
        names = ", ".join(("auto", *EVICTION_POLICIES.names()))
        raise UsageError(f"eviction must be one of {names}, not {str(name)!r}")
    return str(name)


def eviction_for(prefetch: str, eviction: str) -> str:
    """Return the eviction policy: the one named or, for `auto`, the one that the (first) prefetch policy declares."""
    if eviction != "auto":
        return eviction
    own: str = PREFETCH_POLICIES.load(prefetch.split("+")[0]).eviction
    return own


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise UsageError(message)


def _whole(**values: object) -> None:
    for name, value in values.items():
        fits = isinstance(value, Integral) and not isinstance(value, bool)
        _require(fits, f"{name} must be a whole number, not {value!r}")


def _number(**values: object) -> None:
    for name, value in values.items():
        fits = isinstance(value, Real) and not isinstance(value, bool)
        _require(fits, f"{name} must be a number, not {value!r}")


def _choose(name: str, value: str, choices: tuple[str, ...]) -> None:
    _require(value in choices, f"{name} must be one of {', '.join(choices)}, not {str(value)!r}")
