"""Parts of an engine: fixed parts, and the state that is learned from requests."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spmoe.config import DraftTokens
from spmoe.draft.base import Drafter
from spmoe.engine.memory import MemoryPlan
from spmoe.engine.runtime import ExpertRuntime
from spmoe.engine.threads import IntraOpThreads
from spmoe.experts.eviction import Eviction
from spmoe.experts.experts import Experts
from spmoe.models.checkpoint import Checkpoint
from spmoe.models.kv import KvState
from spmoe.models.load import origin_of
from spmoe.models.loaded import LoadedModels
from spmoe.observe.clock import Clock
from spmoe.observe.ledger import Counters
from spmoe.predict.admission import PrefetchAdmission
from spmoe.predict.costs import Rates
from spmoe.predict.cutoff import Profile
from spmoe.predict.governor import Governor
from spmoe.predict.policies.base import PrefetchPolicy
from spmoe.predict.projection import HiddenStateProjection
from spmoe.system.origin import Origin
from spmoe.types import ExpertKey


@dataclass
class LearnedState:
    """State that is carried from request to request: residents, policies and profiles."""

    evictions: dict[str, Eviction] = field(default_factory=dict)  # by name
    policies: dict[tuple[str, DraftTokens], PrefetchPolicy] = field(default_factory=dict)  # by name and K
    governors: dict[Path, Governor] = field(default_factory=dict)  # by the file that keeps their experience
    rates: dict[Path, Rates] = field(default_factory=dict)  # by the same file
    admissions: dict[Path, PrefetchAdmission] = field(default_factory=dict)  # by the same file
    residents: list[ExpertKey] = field(default_factory=list)  # while another state has the slots
    # by cache file, each with the counts that it was learned from
    profiles: dict[Path, tuple[Profile, Counters]] = field(default_factory=dict)


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
    threads: IntraOpThreads
    all_resident: bool  # every expert has a slot for good, and kernels find it without asking the host

    def load_residents(self) -> None:
        """Load every expert, if all of them have a slot for good."""
        if self.all_resident and self.runtime.cuda is not None:
            self.experts.load_all(self.models.spec.experts)
            self.runtime.backend.synchronize()
            self.runtime.cuda.keep_resident(self.experts.pool.slots_by_key())

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Target and draft checkpoint, to be recorded in files that are measured or made from them."""
        checkpoints = (self.models.checkpoint, self.draft_checkpoint)
        return tuple(origin_of(checkpoint) for checkpoint in checkpoints if checkpoint is not None)
