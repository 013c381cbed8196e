"""Scenarios: files that say what a benchmark compares, read strictly.

A scenario is TOML. Keys at the top are for every `[[matrix]]`, whose own keys win; what the command line says wins over
both. Every key that may hold a list may hold one value alone. See docs/benchmarking.md.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from spmoe.bench.prompts import SAMPLE
from spmoe.bench.settings import System
from spmoe.config import (
    BUILTIN_DRAFTS,
    DEVICES,
    DTYPES,
    Cutoff,
    DraftTokens,
    EngineConfig,
    Size,
)
from spmoe.errors import UsageError
from spmoe.registry import EVICTION_POLICIES, PREFETCH_POLICIES

EVERY = "every"  # as a cutoff: each number of layers there is
SHIPPED = "shipped"  # as a model or draft: that of the pair that ships
_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(EngineConfig)}


@dataclass(frozen=True)
class Matrix:
    """What is combined with what."""

    name: str | None = None
    # one machine record for each combination of these
    models: tuple[str | None, ...] = (None,)  # None: the pair that ships
    drafts: tuple[str | None, ...] = (None,)
    shapes: tuple[str | None, ...] = (None,)
    links: tuple[float | None, ...] = (None,)  # GB/s to emulate
    prompts: tuple[str, ...] = (SAMPLE,)
    # and on each of those, one configuration for each combination of these
    budgets: tuple[Size, ...] = (Size(share=0.25),)
    systems: tuple[System, ...] = (System("draft-gate"), System("on-demand"))
    draft_tokens: tuple[DraftTokens, ...] = (0, 4)
    cutoffs: tuple[Cutoff | str, ...] = (_DEFAULTS["cutoff"],)  # or `EVERY`
    ablation: bool = False
    # measured so
    max_prompts: int | None = None
    output_len: int = 100
    repeat: int = 3
    warmup: int = 1
    dtype: str = "auto"
    device: str = "auto"
    projection: bool = True
    enforce_eager: bool = False


@dataclass(frozen=True)
class Scenario:
    """A file, read: its matrices as tables that are still to be combined with what the command line says."""

    name: str
    text: str
    where: str
    tables: tuple[dict[str, Any], ...]

    def matrices(self, overrides: Mapping[str, Any]) -> list[Matrix]:
        """What it asks for, with some keys replaced."""
        several = len(self.tables) > 1
        places = [f"{self.where}, matrix {n}" if several else self.where for n in range(1, len(self.tables) + 1)]
        return [
            make_matrix(_merged(table, overrides), where)
            for table, where in zip(self.tables, places, strict=True)
        ]  # fmt: skip


def read_scenario(path: Path) -> Scenario:
    """Read a file and check its keys."""
    try:
        text = path.read_text(encoding="utf-8")
        data = tomllib.loads(text)
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text; convert it to UTF-8") from error
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror}); check the path") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not TOML: {error}") from error
    blocks = data.pop("matrix", [{}])
    if not isinstance(blocks, list) or not blocks or not all(isinstance(block, dict) for block in blocks):
        raise UsageError(f"{path}: write each matrix under [[matrix]], with two brackets")
    data.pop("description", None)
    name = data.pop("name", path.stem)
    if not isinstance(name, str):
        raise UsageError(f"{path}: name must be text, not {name!r}")
    top = _checked(data, str(path), path.parent)
    tables = tuple(
        _merged(top, _checked(block, f"{path}, matrix {number}", path.parent)) for number, block in enumerate(blocks, 1)
    )
    return Scenario(name, text, str(path), tables)


def make_matrix(table: Mapping[str, Any], where: str) -> Matrix:
    """Convert every value of a table, or say which cannot be."""
    given = {key: convert(key, value, f"{where}: {key}") for key, value in table.items()}
    policies, evictions = given.pop("policies", None), given.pop("evictions", None)
    if policies is not None or evictions is not None:
        if "systems" in given:
            raise UsageError(f"{where}: give systems, or policies and evictions, not both")
        policies = policies or tuple(system.prefetch for system in Matrix.systems)
        pairs = [(policy, rule) for policy in policies for rule in evictions or (_DEFAULTS["eviction"],)]
        given["systems"] = tuple(System(policy, rule) for policy, rule in pairs)
    return Matrix(**given)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """One table over another; policies or evictions replace systems, and systems replace them."""
    systems, parts = "systems", ("policies", "evictions")
    hidden = {systems} if any(part in above for part in parts) else set(parts) if systems in above else set()
    return {**{key: value for key, value in below.items() if key not in hidden}, **above}


def _checked(table: Mapping[str, Any], where: str, base: Path) -> dict[str, Any]:
    """A table whose keys are known, with its paths made whole."""
    for key in table:
        if key not in _KEYS:
            near = get_close_matches(key, _KEYS, 1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(_KEYS)}"
            raise UsageError(f"{where}: unknown key {key}; {hint}")
    for key, value in table.items():
        convert(key, value, f"{where}: {key}")
    return {key: _located(key, value, where, base) if key in _PATHS else value for key, value in table.items()}


def _located(key: str, value: Any, where: str, base: Path) -> list[str]:
    found = []
    for word in _listed(value):
        path = base / Path(word).expanduser()
        if word not in (*BUILTIN_DRAFTS, "none", SHIPPED, SAMPLE) and path.exists():
            word = str(path.resolve())
        elif word.startswith((".", "/", "~")):
            raise UsageError(f"{where}: {key}: there is no {path}; paths are from where the scenario is")
        found.append(word)
    return found


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def convert(key: str, value: Any, where: str) -> Any:
    """What a key's value means; where it means nothing, that is told of `where`."""
    try:
        return _KEYS[key](value)
    except (UsageError, ValueError) as error:
        raise UsageError(f"{where}: {error}") from error


# ---- what values may be


def _each(kind: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def listed(value: Any) -> tuple[Any, ...]:
        found = tuple(dict.fromkeys(kind(one) for one in _listed(value)))
        if not found:
            raise ValueError("the list is empty; leave the key out, or give a value")
        return found

    return listed


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is not text; put it in quotes")
    return value


def _no_or_text(value: Any) -> str | None:
    return None if _text(value) == "none" else str(value)


def _whole(least: int, most: int | None = None) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if (
            not isinstance(value, int)
            or isinstance(value, bool)
            or value < least
            or (most is not None and value > most)
        ):
            bounds = f"from {least} on" if most is None else f"from {least} to {most}"
            raise ValueError(f"{value!r} is not a whole number {bounds}")
        return value

    return read


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def _one_of(*choices: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in choices:
            near = get_close_matches(str(value), choices, 1)
            hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(choices)}"
            raise ValueError(f"there is no {value!r}; {hint}")
        return str(value)

    return read


def _prefetch(value: Any) -> str:
    return "+".join(map(_one_of(*PREFETCH_POLICIES.names()), str(value).split("+")))


def _eviction(value: Any) -> str:
    return _one_of("auto", *EVICTION_POLICIES.names())(value)


def _link(value: Any) -> float | None:
    if value == "own":
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ValueError(f"{value!r} is not a speed in GB/s; write a number above 0, or own for the machine's own link")
    return float(value)


def _cutoff(value: Any) -> Cutoff | str:
    return EVERY if value == EVERY else Cutoff.parse(value)


def _draft_tokens(value: Any) -> DraftTokens:
    if isinstance(value, str) and value.strip().lower() == "auto":
        return "auto"
    try:
        return _whole(0, 64)(value)
    except ValueError as error:
        raise ValueError(f"{error}, or auto") from error


def _system(value: Any) -> System:
    if not isinstance(value, dict) or "prefetch" not in value:
        raise ValueError(f"{value!r} is no system; write {{ name = ..., prefetch = ..., eviction = ... }}")
    if unknown := sorted(value.keys() - {"name", "prefetch", "eviction", "draft_tokens"}):
        raise ValueError(f"unknown key {unknown[0]}; a system has name, prefetch, eviction and draft_tokens")
    eviction = _eviction(value.get("eviction", _DEFAULTS["eviction"]))
    name, own = value.get("name"), value.get("draft_tokens")
    return System(
        _prefetch(value["prefetch"]),
        eviction,
        None if name is None else _text(name),
        None if own is None else _each(_draft_tokens)(own),
    )


_PATHS = ("models", "drafts", "prompts")
_KEYS: dict[str, Callable[[Any], Any]] = {
    "name": _text,
    "models": _each(_text),
    "drafts": _each(_text),
    "shapes": _each(_no_or_text),
    "links": _each(_link),
    "prompts": _each(_text),
    "budgets": _each(Size.parse),
    "policies": _each(_prefetch),
    "evictions": _each(_eviction),
    "systems": _each(_system),
    "draft_tokens": _each(_draft_tokens),
    "cutoffs": _each(_cutoff),
    "ablation": _flag,
    "max_prompts": _whole(1),
    "output_len": _whole(2),
    "repeat": _whole(1),
    "warmup": _whole(0),
    "dtype": _one_of(*DTYPES),
    "device": _one_of(*DEVICES),
    "projection": _flag,
    "enforce_eager": _flag,
}
