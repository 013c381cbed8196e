"""Assembly: from a configuration to a loop that is ready to step, every refusal included."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from spmoe.backends.cpu import CpuBackend
from spmoe.config import Cutoff, CutoffMode, EngineConfig, format_bytes
from spmoe.draft.base import Drafter
from spmoe.draft.model import DraftModel
from spmoe.draft.none import NoDraft
from spmoe.engine.loop import Loop
from spmoe.engine.profiling import measure, profile_path, read_profile, write_profile
from spmoe.errors import BudgetError, CheckpointError, SpmoeError, UsageError
from spmoe.experts.eviction import make_eviction
from spmoe.experts.slots import MemorySlots
from spmoe.experts.source import ExpertSource
from spmoe.experts.store import StoreSpec
from spmoe.experts.transfer import FileTransfer, ThrottledTransfer, Transfer
from spmoe.models.checkpoint import Checkpoint, building
from spmoe.models.load import build_expert_file, load_dense, load_without_experts, store_spec
from spmoe.models.network import Network
from spmoe.models.target import Target
from spmoe.models.tokenizer import load_tokenizer, require_same_tokenizer
from spmoe.observe.clock import Clock, RealClock
from spmoe.observe.ledger import Counters
from spmoe.observe.progress import progress_bar
from spmoe.observe.timeline import Timeline
from spmoe.predict.base import PrefetchPolicy
from spmoe.predict.cutoff import CutoffInputs, Profile, cutoff_layer
from spmoe.predict.draft_gate import DraftGate
from spmoe.predict.on_demand import OnDemand

_ENOUGH_STEPS = 16  # verified steps from which the number of missing experts is believed


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
    profile: Profile | None = None
    cutoff: int | None = None  # layers that may be prefetched for; None: no prefetching
    notices: list[str] = field(default_factory=list)  # where the engine does less than was asked, and why
    profile_file: Path | None = None  # where the profile is kept, when the cutoff is computed from one

    def learn_cutoff(self) -> None:
        """Compute an automatic cutoff anew from what requests so far have missed, once they are enough to tell."""
        counters, policy = self.loop.counters, self.loop.policy
        if self.profile is None or not isinstance(policy, DraftGate) or counters.verified < _ENOUGH_STEPS:
            return
        layers = len(self.target.moe)
        self.profile = replace(self.profile, missing_per_layer=counters.missing / counters.verified / layers)
        inputs = cutoff_inputs(self.store, self.target.top_k, self.slots, self.loop.draft_tokens)
        self.cutoff = policy.cutoff = cutoff_layer(self.profile, inputs)

    def close(self) -> None:
        """Keep what was learnt, and release everything. Idempotent."""
        self.learn_cutoff()
        if self.profile_file is not None and self.profile is not None:
            write_profile(self.profile_file, self.profile)
        self.source.close()


def build(config: EngineConfig) -> Engine:
    """Load target, experts and draft, and connect them."""
    checkpoint = Checkpoint.find(config.model)
    draft_checkpoint = Checkpoint.find(config.draft) if config.draft and config.num_speculative_tokens else None
    tokenizer = load_tokenizer(checkpoint.directory)
    if draft_checkpoint is not None:
        require_same_tokenizer(tokenizer, load_tokenizer(draft_checkpoint.directory), checkpoint, draft_checkpoint)
    dtype = checkpoint.dtype(config.dtype)
    model = load_without_experts(checkpoint, dtype)
    with building(checkpoint):
        target = Target(model)
    paths, clock = [site.path for site in target.moe], RealClock()
    spec = store_spec(checkpoint, target.model, paths, dtype)
    count = slot_count(config, spec, target.top_k)  # refuses before the experts are written, which may take long
    with progress_bar("Writing experts to the cache", config.progress) as report:
        file = build_expert_file(checkpoint, target.model, paths, dtype, report)
    try:
        slots = MemorySlots(count, spec.layout)
    except SpmoeError:
        file.close()
        raise
    timeline = Timeline()
    transfer: Transfer = FileTransfer(file, slots)
    if config.link_gbps is not None:
        transfer = ThrottledTransfer(transfer, spec.layout.nbytes, config.link_gbps, clock, timeline)
    eviction = make_eviction(config.eviction, spec.experts)
    source = ExpertSource(slots, transfer, eviction, spec.layout.nbytes, clock, Counters(), timeline=timeline)
    try:
        target.connect(source, CpuBackend())
        notices: list[str] = []
        drafter, k = _make_drafter(config, draft_checkpoint, target, dtype, notices)
        loop = Loop(target, drafter, OnDemand(), source, clock, k, config.prefill_chunk)
        limit = min(config.max_model_len or target.max_positions, target.max_positions)
        if config.max_model_len is not None and config.max_model_len > limit:
            notices.append(f"the model reads {limit} positions, so --max-model-len {config.max_model_len} is lowered")
        engine = Engine(config, dtype, tokenizer, target, loop, source, spec, count, clock, limit, notices=notices)
        loop.policy = _make_policy(engine, checkpoint, draft_checkpoint)
    except BaseException:
        source.close()
        raise
    return engine


def slot_count(config: EngineConfig, spec: StoreSpec, top_k: int) -> int:
    """Slots that the expert memory pays for; never more than there are experts."""
    blob = spec.layout.nbytes
    if top_k < 1:
        raise CheckpointError(f"config.json of {config.model} sends a token to no expert at all; correct it")
    count = min(spec.count, config.expert_memory.of(spec.nbytes) // blob)
    if count < top_k:
        share = math.ceil(1000 * top_k / spec.count) / 10
        raise BudgetError(
            f"--expert-memory {config.expert_memory} holds {count} experts of {format_bytes(blob)}, but one token "
            f"needs {top_k} of a layer at once; give at least {math.ceil(top_k * blob / 2**10)}KiB or {share}%"
        )
    return count


def cutoff_inputs(spec: StoreSpec, top_k: int, slots: int, draft_tokens: int) -> CutoffInputs:
    """The fixed part of what the cutoff formula needs."""
    return CutoffInputs(len(spec.experts), max(spec.experts), top_k, slots, draft_tokens)


def profile_settings(config: EngineConfig, checkpoint: Checkpoint, draft: Checkpoint, inputs: CutoffInputs) -> Any:
    """Everything a profile depends on besides the machine."""
    return {
        "target": checkpoint.fingerprint,
        "draft": draft.fingerprint,
        "dtype": config.dtype,
        "link_gbps": config.link_gbps,
        **asdict(inputs),
    }


def _make_drafter(
    config: EngineConfig, checkpoint: Checkpoint | None, target: Target, dtype: torch.dtype, notices: list[str]
) -> tuple[Drafter, int]:
    """The drafter and K; plain decoding where the target's state could not be rolled back."""
    if checkpoint is None:
        return NoDraft(), 0
    if not target.can_rewind:
        notices.append(f"{config.model} keeps a state that cannot be rolled back yet; it decodes without speculation")
        return NoDraft(), 0
    model = load_dense(checkpoint, dtype)
    with building(checkpoint):
        network = Network(model)
    if not network.can_rewind:
        raise UsageError(f"the draft {checkpoint.name} keeps a state that cannot be rolled back; choose another draft")
    if network.max_positions < target.max_positions:
        notices.append(
            f"the draft reads {network.max_positions} positions and the target {target.max_positions}; beyond the "
            "former it decodes without speculation"
        )
    return DraftModel(network, target.vocab_size, config.prefill_chunk), config.num_speculative_tokens


def _make_policy(engine: Engine, checkpoint: Checkpoint, draft_checkpoint: Checkpoint | None) -> PrefetchPolicy:
    """The prefetch policy with its cutoff; on demand where there is nothing to predict from."""
    config, target, drafter = engine.config, engine.target, engine.loop.drafter
    if config.prefetch == "on-demand" or not isinstance(drafter, DraftModel) or draft_checkpoint is None:
        return OnDemand()
    if reason := _no_prediction(target, drafter.network):
        engine.notices.append(f"{reason}; experts are loaded on demand")
        return OnDemand()
    inputs = cutoff_inputs(engine.store, target.top_k, engine.slots, engine.loop.draft_tokens)
    if config.cutoff.mode is CutoffMode.AUTO:
        engine.profile_file = profile_path(profile_settings(config, checkpoint, draft_checkpoint, inputs))
        engine.profile = read_profile(engine.profile_file)
        if engine.profile is None:
            engine.profile = measure(target, drafter.network, engine.source, inputs, engine.clock)
            write_profile(engine.profile_file, engine.profile)
    engine.cutoff = choose_cutoff(config.cutoff, engine.profile, inputs)
    # more than the slots can hold at once would push itself out again within the step
    engine.source.step_budget = engine.slots * engine.store.layout.nbytes
    return DraftGate(target, drafter.network.depth_count, engine.cutoff)


def choose_cutoff(cutoff: Cutoff, profile: Profile | None, inputs: CutoffInputs) -> int:
    """How many layers may be prefetched for."""
    if cutoff.mode is CutoffMode.AUTO and profile is not None:
        return cutoff_layer(profile, inputs)
    return min(cutoff.layers, inputs.layers) if cutoff.mode is CutoffMode.FIXED else inputs.layers


def _no_prediction(target: Target, draft: Network) -> str | None:
    """Why the draft's hidden states cannot go through the target's gates, if they cannot."""
    if not target.gates_found:
        return "the target's gates cannot be called alone"
    if not draft.has_taps:
        return "the draft's hidden states cannot be tapped"
    if draft.hidden_size != target.hidden_size:
        return f"the draft is {draft.hidden_size} wide and the target {target.hidden_size}, so its states fit no gate"
    return None
