"""Configurations of a benchmark: everything that may differ between two runs of one workload."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from spmoe.bench.scenario import DEFAULT_CUTOFF, DEFAULT_EVICTION, PolicyPair
from spmoe.config import Cutoff, CutoffMode, DraftTokens, Size
from spmoe.errors import UsageError
from spmoe.registry import ON_DEMAND

ALL_ON = "all on"
ABLATIONS: dict[str, dict[str, Any]] = {  # name of an ablation -> options that differ from the full configuration
    ALL_ON: {},
    "no cutoff": {"cutoff": Cutoff(CutoffMode.ALL)},
    "no batching": {"batching": False},
    "no overlap": {"overlap": False},
    "no prefetch": {"prefetch": ON_DEMAND},
}


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """One configuration of the engine: a row of the result table."""

    memory: Size
    prefetch: str
    draft_tokens: DraftTokens  # K
    eviction: str = DEFAULT_EVICTION
    cutoff: Cutoff = DEFAULT_CUTOFF
    batching: bool = True
    overlap: bool = True
    system: str | None = None  # name that the scenario gives to this pair of policies
    ablation: str | None = None  # key of ABLATIONS

    def __str__(self) -> str:
        parts = [str(self.memory), self.prefetch, f"K={self.draft_tokens}"]
        parts += [self.eviction] * (self.eviction != DEFAULT_EVICTION)
        parts += [f"cutoff {self.cutoff}"] * (self.cutoff != DEFAULT_CUTOFF)
        parts += ["no batching"] * (not self.batching) + ["no overlap"] * (not self.overlap)
        return ", ".join(parts)

    @property
    def engine_options(self) -> dict[str, Any]:
        """Options that a loaded engine is reconfigured with."""
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
        """JSON values that identify the configuration."""
        return {
            "expert_memory": str(self.memory),
            **{**self.engine_options, "cutoff": str(self.cutoff)},
            "system": self.system,
            "ablation": self.ablation,
        }

    def matches(self, record: Mapping[str, Any]) -> bool:
        """Return whether a stored record belongs to this configuration."""
        return all(key in record and record[key] == value for key, value in self.record.items())


_RECORD_KEYS = tuple(BenchConfig(Size(bytes=1), ON_DEMAND, 0).record)


def ablated_record(record: Mapping[str, Any], ablation: str) -> dict[str, Any]:
    """Return the identifying values of a stored record's configuration with one part switched off."""
    changes = {name: str(value) if name == "cutoff" else value for name, value in ABLATIONS[ablation].items()}
    return {**{name: record[name] for name in _RECORD_KEYS}, **changes, "ablation": ablation}


def make_configs(
    memories: Iterable[Size],
    policy_pairs: Iterable[PolicyPair],
    draft_tokens: Sequence[DraftTokens],
    cutoffs: Iterable[Cutoff] = (DEFAULT_CUTOFF,),
    ablation: bool = False,
) -> list[BenchConfig]:
    """Return the cross product without duplicates, in the order given.

    With K = 0 policies that predict from the draft become on-demand. Cutoffs and ablations multiply only
    configurations whose policy uses the cutoff.
    """
    from spmoe.predict.policies import needs_recording, policy_classes, without_draft  # imports torch

    found: list[BenchConfig] = []
    pairs_by_k = [(pair, k) for pair in policy_pairs for k in pair.draft_tokens or draft_tokens]
    for memory, (pair, k), cutoff in product(memories, pairs_by_k, cutoffs):
        if k == "auto" and needs_recording(pair.prefetch):
            raise UsageError(
                f"{pair.prefetch} replays recorded steps, which K = auto would change; give a number of draft tokens"
            )
        prefetch = pair.prefetch if k else without_draft(pair.prefetch)
        uses_cutoff = any(cls.uses_cutoff for cls in policy_classes(prefetch))
        config = BenchConfig(
            memory,
            prefetch,
            k,
            pair.eviction,
            cutoff if uses_cutoff else DEFAULT_CUTOFF,
            system=pair.name if prefetch == pair.prefetch else None,
        )
        if ablation and uses_cutoff:
            found += [replace(config, ablation=name, **changes) for name, changes in ABLATIONS.items()]
        else:
            found.append(config)
    return list(dict.fromkeys(found))
