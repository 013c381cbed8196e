"""Assembly: from a configuration to a loop that is ready to step, every refusal included."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from spmoe.backends.devices import choose_device, limit_memory
from spmoe.config import Cutoff, CutoffMode, EngineConfig, format_bytes
from spmoe.draft.base import Drafter
from spmoe.draft.model import DraftModel
from spmoe.draft.ngram import NgramDraft
from spmoe.draft.none import NoDraft
from spmoe.draft.self_quantized import SelfDraft, SelfNetwork
from spmoe.engine.loop import Loop
from spmoe.engine.materials import Materials, gather, load_draft, load_self, wide_shape
from spmoe.engine.memory import MemoryPlan, divide_memory, slot_count
from spmoe.engine.profiling import measure, profile_path, read_profile, write_profile
from spmoe.engine.room import Room, make_room
from spmoe.errors import CheckpointError, UsageError
from spmoe.experts.eviction import make_eviction
from spmoe.experts.link import ThrottledTransfer
from spmoe.experts.source import ExpertSource
from spmoe.experts.store import StoreSpec
from spmoe.models.checkpoint import Checkpoint
from spmoe.models.kv import KvState
from spmoe.models.network import Network
from spmoe.models.predictors import read_predictor
from spmoe.models.target import Target
from spmoe.models.tokenizer import load_tokenizer, require_same_tokenizer
from spmoe.observe.clock import Clock, RealClock
from spmoe.observe.ledger import Counters
from spmoe.observe.timeline import Timeline
from spmoe.predict.base import PrefetchPolicy
from spmoe.predict.cutoff import CutoffInputs, Profile, fastest_cutoff, just_in_time_cutoff, last_pass_pays
from spmoe.predict.draft_gate import DraftGate
from spmoe.predict.fitted import Fitted
from spmoe.predict.on_demand import OnDemand

if TYPE_CHECKING:
    from spmoe.backends.cuda_memory import HostStore
    from spmoe.backends.graphs import Recorder

_NO_STATES = "a draft without a model has no hidden states to predict experts from"
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
    device: torch.device
    room: Room
    memory: MemoryPlan
    checkpoint: Checkpoint
    draft_checkpoint: Checkpoint | None
    draft: Drafter | None  # the loop has it while K > 0
    fitted: Fitted | None = None  # maps from the draft's states to the target's
    profile: Profile | None = None
    cutoff: int | None = None  # layers that may be prefetched for; None: no prefetching
    notices: list[str] = field(default_factory=list)  # where the engine does less than was asked, and why
    profile_file: Path | None = None  # where the profile is kept, when the cutoff is computed from one
    learnt: dict[Path, tuple[Profile, Counters]] = field(default_factory=dict)  # by policy and K, and what it is from
    since: Counters = field(default_factory=Counters)  # counters from which on the present policy and K are to learn

    def reconfigure(self, *, prefetch: str, num_speculative_tokens: int) -> None:
        """Change policy and K between two requests, without a reload; what was learnt for either is kept.

        Forwards are recorded for up to the K that the engine was built with; a larger one is slower.
        """
        config = replace(self.config, prefetch=prefetch, num_speculative_tokens=num_speculative_tokens)
        if num_speculative_tokens and self.draft is None:
            raise UsageError(f"{config.model} was loaded without a draft, so nothing can be drafted; give one")
        if config == self.config:
            return
        self._keep_learnt()
        self.config = config
        self.loop.draft_tokens = num_speculative_tokens
        self.loop.drafter = self.draft if self.draft is not None and num_speculative_tokens else NoDraft()
        self.profile = self.profile_file = self.cutoff = self.source.step_budget = None
        self.loop.policy = _make_policy(self)

    def learn_cutoff(self) -> None:
        """Compute an automatic cutoff anew from what requests so far have missed, once they are enough to tell."""
        counters, policy = self.loop.counters.minus(self.since), self.loop.policy
        if self.profile is None or not isinstance(policy, DraftGate) or counters.verified < _ENOUGH_STEPS:
            return
        layers = len(self.target.moe)
        self.profile = replace(self.profile, missing_per_layer=counters.missing / counters.verified / layers)
        inputs = cutoff_inputs(self.store, self.target.top_k, self.slots, self.loop.draft_tokens)
        self.cutoff = policy.cutoff = choose_cutoff(self.config.cutoff, self.profile, inputs)
        policy.last_pass = last_pass_pays(self.profile, inputs)

    def close(self) -> None:
        """Keep what was learnt, and release everything. Idempotent."""
        self._keep_learnt()
        for file, (profile, _) in self.learnt.items():
            write_profile(file, profile)
        self.source.close()
        self.room.close()
        if self.memory.limit is not None:
            limit_memory(self.device, None)

    def _keep_learnt(self) -> None:
        self.learn_cutoff()
        if self.profile_file is not None and self.profile is not None:
            self.learnt[self.profile_file] = (self.profile, self.loop.counters.minus(self.since))


def build(config: EngineConfig, store: HostStore | None = None) -> Engine:
    """Load target, experts and draft, and connect them.

    `store`: the experts, already in host memory, given up by the room of an engine that is closed.
    """
    device = choose_device(config.device)
    checkpoint = Checkpoint.find(config.model)
    draft_checkpoint = Checkpoint.find(config.draft_model) if config.draft_model else None
    tokenizer = load_tokenizer(checkpoint.directory)
    if draft_checkpoint is not None:
        require_same_tokenizer(tokenizer, load_tokenizer(draft_checkpoint.directory), checkpoint, draft_checkpoint)
    wide_shape(config)  # refuses before anything is loaded
    materials, clock, notices = gather(config, checkpoint, device), RealClock(), list[str]()
    target, spec = materials.target, materials.spec
    slot_count(config, spec, target.top_k)  # refuses before the draft is read
    draft = _load_draft(config, draft_checkpoint, materials, notices)
    limit = min(config.max_model_len or target.max_positions, target.max_positions)
    if config.max_model_len is not None and config.max_model_len > limit:
        notices.append(f"the model reads {limit} positions, so --max-model-len {config.max_model_len} is lowered")
    fitted = _find_fitted(config, draft_checkpoint, target, draft, checkpoint, notices)
    networks = [n for n in (target, draft) if n is not None]
    budget = divide_memory(config, device, networks, spec, target.top_k, fitted.nbytes if fitted is not None else 0)
    if budget.limit is not None:
        limit_memory(device, budget.limit)
    room = make_room(config, materials, budget.slots, store)
    notices += room.notices
    timeline, transfer = Timeline(), room.transfer
    if config.link_gbps is not None:
        transfer = ThrottledTransfer(transfer, spec.layout.nbytes, config.link_gbps, clock, timeline)
    eviction = make_eviction(config.eviction, spec.experts)
    source = ExpertSource(room.slots, transfer, eviction, spec.layout.nbytes, clock, Counters(), timeline=timeline)
    try:
        states: dict[int, KvState] = {}
        drafter = _make_drafter(config, target, draft, states)
        k = config.num_speculative_tokens if drafter is not None else 0
        if room.recorder is not None:
            _record(room.recorder, [("target", target, k + 1), ("draft", draft, 2)], notices)
        target.connect(source, room.backend)
        if room.cuda is not None and budget.slots == spec.count and config.link_gbps is None:
            source.load_all(spec.experts)
            room.backend.synchronize()
            room.cuda.all_resident = True
        loop = Loop(target, drafter or NoDraft(), OnDemand(), source, clock, k, config.prefill_chunk, states)
        engine = Engine(
            config, materials.dtype, tokenizer, target, loop, source, spec, budget.slots, clock, limit, device, room,
            budget, checkpoint, draft_checkpoint, drafter, fitted, notices=notices,
        )  # fmt: skip
        loop.policy = _make_policy(engine)
    except BaseException:
        source.close()
        room.close()
        raise
    return engine


def _record(recorder: Recorder, networks: list[tuple[str, Network | None, int]], notices: list[str]) -> None:
    """Let forwards of few rows be recorded where the networks allow it."""
    for name, network, rows in networks:
        if network is not None and (reason := network.record_forwards(recorder, rows)) is not None:
            notices.append(f"forwards of the {name} cannot be recorded ({reason}); they run slower")


def cutoff_inputs(spec: StoreSpec, top_k: int, slots: int, draft_tokens: int) -> CutoffInputs:
    """The fixed part of what the cutoff formula needs."""
    return CutoffInputs(len(spec.experts), max(spec.experts), top_k, slots, draft_tokens)


def profile_settings(
    config: EngineConfig, checkpoint: Checkpoint, draft: Checkpoint | None, inputs: CutoffInputs
) -> Any:
    """Everything a profile depends on besides the machine."""
    return {
        "target": checkpoint.fingerprint,
        "draft": config.draft if draft is None else draft.fingerprint,
        "dtype": config.dtype,
        "link_gbps": config.link_gbps,
        "device": config.device,
        "shape": config.shape,
        "enforce_eager": config.enforce_eager,
        "pageable": config.pageable,
        **asdict(inputs),
    }


def _load_draft(
    config: EngineConfig, checkpoint: Checkpoint | None, materials: Materials, notices: list[str]
) -> Network | None:
    """The draft network; none where the target's state could not be rolled back."""
    target = materials.target
    if config.draft and config.num_speculative_tokens and not target.anatomy.resumes:
        notices.append(f"{config.model} keeps a state that cannot be rolled back yet; it decodes without speculation")
        return None
    if config.own_draft is not None:
        own = load_self(config, materials, config.own_draft)
        size = format_bytes(own.resident_bytes)
        notices.append(f"the draft is the target itself with {config.own_draft} experts, which occupy {size}")
        return own
    if checkpoint is None:
        return None
    network = load_draft(materials, checkpoint)
    if not network.can_rewind:
        raise UsageError(f"the draft {checkpoint.name} keeps a state that cannot be rolled back; choose another draft")
    if network.max_positions < target.max_positions:
        notices.append(
            f"the draft reads {network.max_positions} positions and the target {target.max_positions}; beyond the "
            "former it decodes without speculation"
        )
    return network


def _find_fitted(
    config: EngineConfig,
    draft_checkpoint: Checkpoint | None,
    target: Target,
    draft: Network | None,
    checkpoint: Checkpoint,
    notices: list[str],
) -> Fitted | None:
    """The maps fitted for this pair, if they are wanted and there."""
    if not config.fitted or config.shape is not None or draft is None or draft_checkpoint is None:
        return None
    try:
        return read_predictor(checkpoint, draft_checkpoint, target, draft)
    except CheckpointError as error:
        notices.append(str(error))
        return None


def _make_drafter(
    config: EngineConfig, target: Target, network: Network | None, states: dict[int, KvState]
) -> Drafter | None:
    if isinstance(network, SelfNetwork):
        return SelfDraft(network, config.prefill_chunk, states)
    if network is not None:
        return DraftModel(network, target.vocab_size, config.prefill_chunk)
    if config.draft == "ngram" and config.num_speculative_tokens and target.anatomy.resumes:
        return NgramDraft(target.vocab_size, target.model.device)
    return None


def _make_policy(engine: Engine) -> PrefetchPolicy:
    """The prefetch policy with its cutoff; on demand where there is nothing to predict from."""
    config, target, drafter = engine.config, engine.target, engine.loop.drafter
    if config.prefetch == "on-demand" or isinstance(drafter, NoDraft):
        return OnDemand()
    reason = _no_prediction(target, drafter.network, engine.fitted) if isinstance(drafter, DraftModel) else _NO_STATES
    if reason is not None or not isinstance(drafter, DraftModel):
        if (notice := f"{reason}; experts are loaded on demand") not in engine.notices:
            engine.notices.append(notice)
        return OnDemand()
    inputs = cutoff_inputs(engine.store, target.top_k, engine.slots, engine.loop.draft_tokens)
    if config.cutoff.mode is not CutoffMode.FIXED:
        file = profile_path(profile_settings(config, engine.checkpoint, engine.draft_checkpoint, inputs))
        engine.profile_file = file
        engine.profile, steps = engine.learnt.get(file, (read_profile(file), Counters()))
        if engine.profile is None:
            wait = engine.room.backend.synchronize
            engine.profile = measure(target, drafter.network, engine.source, inputs, engine.clock, wait)
            write_profile(file, engine.profile)
        engine.since = engine.loop.counters.minus(steps)
    engine.cutoff = choose_cutoff(config.cutoff, engine.profile, inputs)
    # more than the slots can hold at once would push itself out again within the step
    engine.source.step_budget = engine.slots * engine.store.layout.nbytes
    last_pass = engine.profile is not None and last_pass_pays(engine.profile, inputs)
    return DraftGate(target, drafter.network.depth_count, engine.cutoff, last_pass, engine.fitted)


def choose_cutoff(cutoff: Cutoff, profile: Profile | None, inputs: CutoffInputs) -> int:
    """How many layers may be prefetched for."""
    if cutoff.mode is CutoffMode.AUTO and profile is not None:
        return fastest_cutoff(profile, inputs)
    if cutoff.mode is CutoffMode.JUST_IN_TIME and profile is not None:
        return just_in_time_cutoff(profile, inputs)
    return min(cutoff.layers, inputs.layers) if cutoff.mode is CutoffMode.FIXED else inputs.layers


def _no_prediction(target: Target, draft: Network, fitted: Fitted | None) -> str | None:
    """Why the draft's hidden states cannot go through the target's gates, if they cannot."""
    if isinstance(draft, SelfNetwork):
        return None  # its own routers answer
    if not target.gates_found:
        return "the target's gates cannot be called alone"
    if not draft.has_taps:
        return "the draft's hidden states cannot be tapped"
    if draft.hidden_size != target.hidden_size and fitted is None:
        return (
            f"the draft is {draft.hidden_size} wide and the target {target.hidden_size}, so its states fit no gate "
            "unless `spmoe fit-predictor` fits maps between them"
        )
    return None
