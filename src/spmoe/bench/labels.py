"""Labels: what configurations and cases are called in a report. No two that differ have the same name."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from spmoe.bench.results import Group
from spmoe.bench.settings import ABLATIONS, ALL_ON
from spmoe.config import EngineConfig

Row = dict[str, Any]
PLAIN = "plain decoding (K=0)"
USUAL_CUTOFF = str(EngineConfig.__dataclass_fields__["cutoff"].default)
T = TypeVar("T", bound=Hashable)


class _Way(NamedTuple):
    """All that a configuration is, but for its budget, K and cutoff."""

    base: str
    prefetch: str
    eviction: str
    batching: bool
    overlap: bool
    named: bool
    ablation: str | None

    @classmethod
    def of(cls, row: Row) -> _Way:
        base = PLAIN if is_plain(row) else row["system"] or row["prefetch"]
        return cls(
            base, row["prefetch"], row["eviction"], row["batching"], row["overlap"], row["system"] is not None,
            row["ablation"],
        )  # fmt: skip

    @property
    def part(self) -> tuple[str, str | None]:
        """What it shares a name with: the same with other rules, no other part of it switched off."""
        return self.base, None if self.ablation == ALL_ON else self.ablation


class Labels:
    """The names of the configurations that are shown together: as short as tells them apart."""

    def __init__(self, rows: Sequence[Row]) -> None:
        ways = list(dict.fromkeys(_Way.of(row) for row in rows))
        self._evictions_differ = len({way.eviction for way in ways}) > 1 and not any(way.named for way in ways)
        self._whole = {way for way in ways if way.ablation is None}
        self._rules: dict[tuple[str, str | None], set[tuple[str, str]]] = {}
        for way in ways:
            self._rules.setdefault(way.part, set()).add((way.prefetch, way.eviction))
        self._ways = distinct(ways, self._name)
        systems = dict.fromkeys((_Way.of(row), str(row["cutoff"])) for row in rows)
        self._systems = distinct(systems, lambda one: self._ways[one[0]] + _cutoff(*one))

    def way(self, row: Row) -> str:
        """How a row prefetches and evicts, its cutoff left out."""
        return self._ways[_Way.of(row)]

    def system(self, row: Row) -> str:
        """The same with the cutoff, unless that is the usual one."""
        return self._systems[_Way.of(row), str(row["cutoff"])]

    def label(self, row: Row) -> str:
        """The same with K: all but the budget."""
        return self.system(row) if is_plain(row) else f"{self.system(row)}, K={row['num_speculative_tokens']}"

    def _name(self, way: _Way) -> str:
        name, several = way.base, len(self._rules[way.part]) > 1
        if several and way.named:
            name += f" ({way.prefetch} / {way.eviction})"
        elif several or (self._evictions_differ and way.base != PLAIN):
            name += f" / {way.eviction}"
        off = ABLATIONS.get(way.ablation or ALL_ON, {})  # what its name says already
        name += ", unbatched" * (not way.batching and "batching" not in off)
        name += ", no overlap" * (not way.overlap and "overlap" not in off)
        all_on = way.ablation == ALL_ON and way._replace(ablation=None) not in self._whole
        return name if way.ablation is None or all_on else f"{name}, {way.ablation}"


def is_plain(row: Row) -> bool:
    """Whether a row neither drafts nor fetches anything ahead, and has no name of its own."""
    return not row["num_speculative_tokens"] and row["prefetch"] == "on-demand" and row["system"] is None


def distinct(things: Iterable[T], name: Callable[[T], str]) -> dict[T, str]:
    """A name for each, with a number behind it where another one has it already."""
    found: dict[T, str] = {}
    taken: set[str] = set()
    for thing in things:
        said, number = name(thing), 1
        while said in taken:
            number += 1
            said = f"{name(thing)} ({number})".lstrip()
        taken.add(said)
        found[thing] = said
    return found


def _cutoff(way: _Way, text: str) -> str:
    own = str(ABLATIONS.get(way.ablation or ALL_ON, {}).get("cutoff", USUAL_CUTOFF))
    return "" if text == own else f", cutoff {text}"


def case_names(groups: Sequence[Group]) -> list[str]:
    """What tells each group from the others, as short as can be; nothing where there is one."""
    parts = [_parts(group.machine) for group in groups]
    behind = [_remote_parts(group.machine) for group in groups]
    varying = [name for name in parts[0] if len({one[name] for one in parts}) > 1] if parts else []
    for name in behind[0] if behind else ():
        if len({tuple(one[name] for name in varying) for one in parts}) == len(parts):
            break
        if len({one[name] for one in behind}) > 1:
            varying.append(name)
            for one, more in zip(parts, behind, strict=True):
                one[name] = more[name]
    words = [", ".join(one[name] for name in varying if one[name]) for one in parts]
    return list(distinct(range(len(words)), lambda number: words[number]).values())


def model_name(machine: Row) -> str:
    """The model, without the way to it on somebody's disk."""
    name = str(machine["shape"] or machine["model"])
    return Path(name).name if name.startswith(("/", ".", "~")) else name


def _parts(machine: Row) -> dict[str, str]:
    """What a case may be told by."""
    link, draft, projection = machine["link_gbps"], machine["draft"], (machine.get("asked") or {}).get("projection")
    return {
        "scenario": str(machine.get("scenario") or ""),
        "matrix": str(machine.get("matrix") or ""),
        "model": model_name(machine),
        "draft": "" if draft is None else f"draft {Path(draft).name}",
        "projection": "no fitted maps" if projection is False else "",
        "dtype": str(machine["dtype"]),
        "link": "own link" if link is None else f"{link:g} GB/s",
        "eager": "eager" if machine["enforce_eager"] else "",
        "prompts": f"{machine.get('prompt_set')}",
        "output": f"{machine['output_len']} tokens",
        "device": str(machine["device"]),
    }


def _remote_parts(machine: Row) -> dict[str, str]:
    """The same, of what nobody can remember: taken one by one where the others do not suffice."""
    return {
        "count": f"{machine['prompts']} prompts",
        "warmup": f"{machine['warmup']} to warm up",
        "commit": str(machine["commit"])[:10],
        "torch": f"torch {machine['torch']}",
        "transformers": f"transformers {machine['transformers']}",
        "digest": f"prompts {str(machine.get('prompt_digest'))[:8]}",
    }
