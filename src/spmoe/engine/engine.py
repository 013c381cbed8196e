"""A running engine: its parts, what had to be decided to put them together, and what it learns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from spmoe.backends.devices import limit_memory
from spmoe.config import DraftTokens, EngineConfig
from spmoe.draft.base import Drafter
from spmoe.draft.none import NoDraft
from spmoe.engine.cutoffs import cutoff_inputs
from spmoe.engine.loop import Loop
from spmoe.engine.memory_plan import MemoryPlan
from spmoe.engine.profiling import write_profile
from spmoe.engine.runtime import ExpertRuntime
from spmoe.errors import UsageError
from spmoe.experts.eviction import Eviction, make_eviction
from spmoe.experts.filling import exchange, residents
from spmoe.experts.source import ExpertSource
from spmoe.experts.store import StoreSpec
from spmoe.models.checkpoint import Checkpoint
from spmoe.models.target import Target
from spmoe.observe.clock import Clock
from spmoe.observe.ledger import Counters
from spmoe.predict.cutoff import ENOUGH_STEPS, Profile, choose_cutoff
from spmoe.predict.draft_length import DraftLength
from spmoe.predict.policies import require_no_recording
from spmoe.predict.policies.base import PrefetchPolicy, RecordedRouting
from spmoe.predict.policies.oracle import RoutingRecorder
from spmoe.predict.projection import HiddenStateProjection
from spmoe.types import ExpertKey

CHANGEABLE = frozenset({"prefetch", "num_speculative_tokens", "cutoff", "eviction", "batching", "overlap"})


@dataclass
class LearnedState:
    """What requests leave to the next: experts in slots, and what rules and policies have learnt."""

    evictions: dict[str, Eviction] = field(default_factory=dict)  # by name, those that have been used
    policies: dict[tuple[str, DraftTokens], PrefetchPolicy] = field(default_factory=dict)  # those that learn, and K
    lengths: dict[str, DraftLength] = field(default_factory=dict)  # by policy, where how many are drafted is learnt
    residents: list[ExpertKey] = field(default_factory=list)  # while another has the slots
    learnt: dict[Path, tuple[Profile, Counters]] = field(default_factory=dict)  # by its file, and what it is from


@dataclass
class Engine:
    """The parts of a running engine, and what had to be decided to put them together."""

    config: EngineConfig
    dtype: torch.dtype
    tokenizer: Any
    target: Target
    loop: Loop
    source: ExpertSource
    store: StoreSpec
    slots: int
    clock: Clock
    max_model_len: int
    device: torch.device
    room: ExpertRuntime
    memory: MemoryPlan
    checkpoint: Checkpoint
    draft_checkpoint: Checkpoint | None
    draft: Drafter | None  # the loop has it while K > 0
    make_policy: Callable[[Engine], PrefetchPolicy]
    learned: LearnedState
    projection: HiddenStateProjection | None = None  # maps from the draft's states to the target's
    profile: Profile | None = None
    cutoff: int | None = None  # layers that may be prefetched for; None: no prefetching
    notices: list[str] = field(default_factory=list)  # where the engine does less than was asked, and why
    profile_file: Path | None = None  # where the profile is kept, when the cutoff is computed from one
    learnt: dict[Path, Profile] = field(default_factory=dict)  # by the file in which it will be kept
    recording: RecordedRouting | None = None  # what the oracle knows: the routing of the request that runs next
    since: Counters = field(default_factory=Counters)  # counters from which on the present policy and K are to learn

    def reconfigure(self, learned: LearnedState | None = None, **changes: Any) -> None:
        """Change any of `CHANGEABLE` between two requests, without a reload; what was learnt for either is kept.

        With the experience of other requests, of this eviction rule, go on as if those had been the last.
        Forwards are recorded for up to the K that the engine was built with; a larger one is slower.
        """
        if unknown := sorted(set(changes) - CHANGEABLE):
            raise UsageError(f"{', '.join(unknown)} cannot be changed while an engine runs; build another")
        config = replace(self.config, **changes)
        k = config.most_draft_tokens
        if k and self.draft is None:
            raise UsageError(f"{config.model} was loaded without a draft, so nothing can be drafted; give one")
        if self.recording is None:
            require_no_recording(config.prefetch)
        if config == self.config and learned is None:
            return
        self._keep_learnt()
        rule, known = config.eviction_policy, (learned or self.learned).evictions
        if new := rule not in known:
            known[rule] = make_eviction(rule, self.store.experts)
        if learned is not None:
            self.learned.residents, self.learned = residents(self.source), learned
            exchange(self.source, known[rule], [] if new else learned.residents)  # a new rule knows of nobody there
        elif rule != self.config.eviction_policy:
            self.source.change_eviction(known[rule])
        self.config = config
        self.source.loads.batching = config.batching
        self.source.overlap = config.overlap
        self.loop.draft_tokens = k
        self.loop.length = self.draft_length(config)
        self.loop.drafter = self.draft if self.draft is not None and k else NoDraft()
        self.profile = self.profile_file = self.cutoff = self.source.grants.step_budget = None
        self.loop.policy = self.make_policy(self)

    @contextmanager
    def record(self) -> Iterator[RecordedRouting]:
        """Run one request inside, on demand, to have its routing recorded; set it as `recording` for the oracle."""
        policy, recorder = self.loop.policy, RoutingRecorder()
        self.loop.policy = recorder
        try:
            yield recorder.recording
        finally:
            self.loop.policy = policy

    def learn_cutoff(self) -> None:
        """Compute an automatic cutoff anew from what requests so far have missed, once they are enough to tell."""
        counters = self.loop.counters.minus(self.since)
        if self.profile is None or not self.loop.policy.uses_cutoff or counters.verified < ENOUGH_STEPS:
            return
        layers = len(self.target.moe)
        self.profile = replace(self.profile, missing_per_layer=counters.missing / counters.verified / layers)
        usual = self.loop.draft_tokens if self.loop.length is None else round(counters.drafted / counters.verified)
        inputs = cutoff_inputs(self.store, self.target.top_k, self.slots, usual)
        self.cutoff = choose_cutoff(self.config.cutoff, self.profile, inputs)
        self.loop.policy.set_cutoff(self.cutoff)

    def draft_length(self, config: EngineConfig) -> DraftLength | None:
        """Who chooses how many tokens are drafted, with what it has learnt, where that is left open."""
        if config.num_speculative_tokens != "auto" or self.draft is None:
            return None
        known, name = self.learned.lengths, config.prefetch
        if name not in known:
            known[name] = DraftLength(max(self.store.experts), self.target.top_k, config.most_draft_tokens)
        return known[name]

    def close(self) -> None:
        """Keep what was learnt, and release everything. Idempotent."""
        self._keep_learnt()
        for file, profile in self.learnt.items():
            write_profile(file, profile)
        with suppress(RuntimeError):  # a device that is broken
            self.room.backend.synchronize()  # a draft that was begun may still run over what is about to be freed
        self.source.close()
        self.room.close()
        if self.memory.limit is not None:
            limit_memory(self.device, None)

    def _keep_learnt(self) -> None:
        self.learn_cutoff()
        if self.profile_file is not None and self.profile is not None:
            self.learnt[self.profile_file] = self.profile
            self.learned.learnt[self.profile_file] = (self.profile, self.loop.counters.minus(self.since))
