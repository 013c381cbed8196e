"""The profile file: what a machine takes for the parts of a step, for one pair and one set of options, as JSON.

Seconds and bytes throughout. Reading is strict: a field that is missing, unknown or of another kind is named.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from spmoe.engine.memory import MemoryPlan
from spmoe.errors import UsageError
from spmoe.files import write_text

FORMAT, VERSION = "spmoe profile", 1
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Subject:
    """What was measured."""

    model: str
    draft: str | None
    dtype: str
    device: str
    shape: str | None  # what the pair was widened to
    layers: int  # MoE layers
    experts_per_layer: int
    top_k: int
    expert_bytes: int
    draft_layers: int
    slots: int
    eviction: str
    emulated_link_gbps: float | None

    def difference(self, other: Mapping[str, Any]) -> tuple[str, str] | None:
        """The first of these values that is another one here, in words: this one's, and theirs; None: all the same."""
        for name, value in other.items():
            if (own := getattr(self, name)) != value:
                return _in_words(name, own), _in_words(name, value)
        return None


def _in_words(name: str, value: Any) -> str:
    if name == "emulated_link_gbps":
        return "the machine's own link" if value is None else f"an emulated link of {value:g} GB/s"
    if name == "shape":
        return "a model that is not widened" if value is None else f"the shape {value}"
    if name == "expert_bytes":
        return f"experts of {value} bytes"
    return f"{name.replace('_', ' ')} {value}"


@dataclass(frozen=True, slots=True)
class PassTime:
    """Passes of a network over so many rows, waiting for experts taken out."""

    rows: int
    best: float
    median: float
    per_layer: float  # of the median


@dataclass(frozen=True, slots=True)
class CopyTime:
    """Copies from the store, made together."""

    experts: float  # a fraction is a part of one
    bytes: int
    best: float
    median: float

    @property
    def bytes_per_second(self) -> float:
        """By the median."""
        return self.bytes / self.median if self.median else 0.0


@dataclass(frozen=True, slots=True)
class Contention:
    """Copies and compute at the same time."""

    pass_alone: float
    pass_while_copying: float
    load_alone: float  # an expert, wished for
    load_while_computing: float

    @property
    def compute_slowdown(self) -> float:
        """How many times as long compute takes, never less than once: below that it is noise."""
        return max(1.0, self.pass_while_copying / self.pass_alone) if self.pass_alone else 1.0

    @property
    def link_slowdown(self) -> float:
        """The same of copies."""
        return max(1.0, self.load_while_computing / self.load_alone) if self.load_alone else 1.0


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What generations under one policy came to, every layer prefetched for; per step, prompts not counted."""

    policy: str
    draft_tokens: int  # K
    passes: float  # of the draft
    rows: float  # verified
    slots: int
    steps: int
    tokens_per_step: float
    step_seconds: float
    draft_seconds: float
    compute_seconds: float  # of verification, waiting not included
    stall_seconds: float
    loads: float
    needed: float  # experts per layer
    missing: float  # of them, in no slot as the step began
    missing_by_layer: tuple[float, ...]
    draft_recall: float  # of the missing ones, those that the draft named
    draft_precision: float  # of those that it named and that were missing, those that were needed
    own_recall: float  # of those that the draft did not name, those that the layer before did
    own_precision: float


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """All of it."""

    machine: dict[str, Any]
    subject: Subject
    draft: tuple[PassTime, ...]  # by rows
    verify: tuple[PassTime, ...]
    expert_share: float  # of a verified layer, what comes after its router has chosen
    copies: tuple[CopyTime, ...]  # one after the other, by size
    loads: tuple[CopyTime, ...]  # through the engine, by how many are asked for at once
    contention: Contention | None  # None: nothing could be copied, or nothing was there to run meanwhile
    memory: MemoryPlan
    behaviours: tuple[Behaviour, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    def save(self, path: Path) -> None:
        """Write the file; it appears under its name when it is whole."""
        write_text(path, json.dumps(self.to_dict(), indent=1) + "\n")

    def behaviour(self, policy: str) -> Behaviour | None:
        """What generations under this policy showed, if there were such."""
        return next((one for one in self.behaviours if one.policy == policy), None)


def read_engine_profile(path: Path) -> EngineProfile:
    """Read a file that `save` wrote; anything else is refused."""
    hint = "make one with `spmoe profile -o FILE`"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror}); check the path") from error
    except ValueError as error:
        raise UsageError(f"{path} is no profile: it is not JSON; {hint}") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise UsageError(f"{path} is no profile; {hint}")
    if values.get("version") != VERSION:
        raise UsageError(f"{path} is a profile of version {values.get('version')}, not {VERSION}; make it anew")
    values = {name: value for name, value in values.items() if name not in ("format", "version")}
    try:
        found = _as_dataclass(EngineProfile, values, "")
    except ValueError as error:
        raise UsageError(f"{path} is damaged: {error}; make it anew") from error
    if not found.verify:
        raise UsageError(f"{path} is damaged: verify is empty; make it anew")
    return found


def _as(kind: Any, value: Any, where: str) -> Any:
    """A value as a type says it, or a ValueError that names where it is not."""
    if get_origin(kind) is types.UnionType:
        options = [one for one in get_args(kind) if one is not type(None)]
        return None if value is None else _as(options[0], value, where)
    if is_dataclass(kind) and isinstance(kind, type):
        return _as_dataclass(kind, value, where)
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where} is no list")
        return tuple(_as(get_args(kind)[0], one, f"{where}[{number}]") for number, one in enumerate(value))
    if get_origin(kind) is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{where} is no object")
        return value
    if kind is float and type(value) in (int, float) and 0 <= value < math.inf:
        return float(value)
    if kind is int and type(value) is int and value >= 0:
        return value
    if kind is str and isinstance(value, str):
        return value
    raise ValueError(f"{where} cannot be {str(value)[:40]!r}")


def _as_dataclass(kind: type[T], value: Any, where: str) -> T:
    names = [one.name for one in fields(kind)]  # type: ignore[arg-type]
    prefix = f"{where}." if where else ""
    if not isinstance(value, Mapping):
        raise ValueError(f"{where or 'it'} is no object")
    if missing := [name for name in names if name not in value]:
        raise ValueError(f"{prefix}{missing[0]} is missing")
    if unknown := [name for name in value if name not in names]:
        raise ValueError(f"{prefix}{unknown[0]} is not known")
    hints = get_type_hints(kind)
    return kind(**{name: _as(hints[name], value[name], f"{prefix}{name}") for name in names})
