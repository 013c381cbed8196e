"""Parts of an engine: those that stay the same while it runs, and the state that requests leave to the next."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spmoe.config import DraftTokens
from spmoe.draft.base import Drafter
from spmoe.engine.memory import MemoryPlan
from spmoe.engine.runtime import ExpertRuntime
from spmoe.experts.eviction import Eviction
from spmoe.experts.experts import Experts
from spmoe.models.checkpoint import Checkpoint
from spmoe.models.kv import KvState
from spmoe.models.loaded import LoadedModels
from spmoe.observe.clock import Clock
from spmoe.observe.ledger import Counters
from spmoe.predict.cutoff import Profile
from spmoe.predict.draft_length import DraftLength
from spmoe.predict.policies.base import PrefetchPolicy
from spmoe.predict.projection import HiddenStateProjection
from spmoe.types import ExpertKey


@dataclass
class LearnedState:
    """State that requests leave to the next: residents, and what policies have learned."""

    evictions: dict[str, Eviction] = field(default_factory=dict)  # by name, those that have been used
    policies: dict[tuple[str, DraftTokens], PrefetchPolicy] = field(default_factory=dict)  # by name and K
    draft_lengths: dict[str, DraftLength] = field(default_factory=dict)  # by prefetch policy, where K is learned
    residents: list[ExpertKey] = field(default_factory=list)  # while another state has the slots
    profiles: dict[Path, tuple[Profile, Counters]] = field(
        default_factory=dict
    )  # and the counts they were learned from


@dataclass(frozen=True)
class EngineParts:
    """Parts of an engine that stay the same while it runs."""

    models: LoadedModels
    tokenizer: Any
    draft_checkpoint: Checkpoint | None
    drafter: Drafter
    projection: HiddenStateProjection | None  # from the draft's hidden states to the target's
    runtime: ExpertRuntime
    experts: Experts
    memory: MemoryPlan
    max_model_len: int
    clock: Clock
    target_kv: MutableMapping[int, KvState]  # by sequence id
