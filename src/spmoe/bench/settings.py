"""Configurations of a benchmark: what may differ between two runs on one machine and model, and how they combine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

from spmoe.config import Cutoff, CutoffMode, DraftTokens, EngineConfig, Size
from spmoe.errors import UsageError

_DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(EngineConfig)}
_NEEDS_DRAFT = "draft-gate"  # the policy, alone or with others, that has nothing to go by where nothing is drafted
_NOTHING = "on-demand"

ALL_ON = "all on"
ABLATIONS: dict[str, dict[str, Any]] = {  # by what is switched off
    ALL_ON: {},
    "no cutoff": {"cutoff": Cutoff(CutoffMode.ALL)},
    "no batching": {"batching": False},
    "no asynchrony": {"overlap": False},
    "no prefetch": {"prefetch": _NOTHING},
}


@dataclass(frozen=True, slots=True)
class System:
    """A way to prefetch and evict, under a name of its own where it has one."""

    prefetch: str
    eviction: str = _DEFAULTS["eviction"]
    name: str | None = None
    draft_tokens: tuple[DraftTokens, ...] | None = None  # values of K of its own


@dataclass(frozen=True, slots=True)
class Setting:
    """One configuration: a row of the table."""

    memory: Size
    prefetch: str
    draft_tokens: DraftTokens  # K
    eviction: str = _DEFAULTS["eviction"]
    cutoff: Cutoff = _DEFAULTS["cutoff"]
    batching: bool = True
    overlap: bool = True
    system: str | None = None  # the name of policy and eviction together
    ablation: str | None = None  # which part was switched off, of `ABLATIONS`

    def __str__(self) -> str:
        parts = [str(self.memory), self.prefetch, f"K={self.draft_tokens}"]
        parts += [self.eviction] * (self.eviction != _DEFAULTS["eviction"])
        parts += [f"cutoff {self.cutoff}"] * (self.cutoff != _DEFAULTS["cutoff"])
        parts += ["no batching"] * (not self.batching) + ["no overlap"] * (not self.overlap)
        return ", ".join(parts)

    @property
    def changes(self) -> dict[str, Any]:
        """What an engine has to be told to run it."""
        return {
            "prefetch": self.prefetch,
            "num_speculative_tokens": self.draft_tokens,
            "eviction": self.eviction,
            "cutoff": self.cutoff,
            "batching": self.batching,
            "overlap": self.overlap,
        }

    @property
    def record(self) -> dict[str, Any]:
        """Plain values, for JSON; two configurations are the same where these are."""
        return {
            "expert_memory": str(self.memory),
            **{**self.changes, "cutoff": str(self.cutoff)},
            "system": self.system,
            "ablation": self.ablation,
        }

    def is_in(self, record: Mapping[str, Any]) -> bool:
        """Whether a stored record is of this configuration."""
        return all(key in record and record[key] == value for key, value in self.record.items())


def switched_off(record: Mapping[str, Any], ablation: str) -> dict[str, Any]:
    """The configuration of a stored record, as it is recorded with one of its parts switched off."""
    off = {name: str(value) if name == "cutoff" else value for name, value in ABLATIONS[ablation].items()}
    return {**{name: record[name] for name in _RECORDED}, **off, "ablation": ablation}


_RECORDED = tuple(Setting(Size(bytes=1), _NOTHING, 0).record)


def settings_of(
    memories: Iterable[Size],
    systems: Iterable[System],
    draft_tokens: Sequence[DraftTokens],
    cutoffs: Iterable[Cutoff] = (_DEFAULTS["cutoff"],),
    ablation: bool = False,
) -> list[Setting]:
    """The cross product, in the order given. Without a draft it predicts nothing: K = 0 is on demand, and once.

    Cutoffs multiply what the draft prefetches for alone; with an ablation, so do the switches.
    """
    found: list[Setting] = []
    by_system = [(system, k) for system in systems for k in system.draft_tokens or draft_tokens]
    for memory, (system, k), cutoff in product(memories, by_system, cutoffs):
        if k == "auto" and system.prefetch == "oracle":
            raise UsageError("the oracle knows steps that are taken again, and auto takes others; give it a number")
        prefetch = system.prefetch if k else _draftless(system.prefetch)
        drafted = _NEEDS_DRAFT in prefetch.split("+")
        one = Setting(
            memory, prefetch, k, system.eviction, cutoff if drafted else _DEFAULTS["cutoff"],
            system=system.name if prefetch == system.prefetch else None,
        )  # fmt: skip
        if ablation and drafted:
            found += [replace(one, ablation=name, **off) for name, off in ABLATIONS.items()]
        else:
            found.append(one)
    return list(dict.fromkeys(found))


def _draftless(policy: str) -> str:
    """What is left of a policy where nothing is drafted."""
    return "+".join(part for part in policy.split("+") if part != _NEEDS_DRAFT) or _NOTHING
