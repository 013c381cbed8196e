"""Assembly: from a configuration to a loop that is ready to step, every refusal included."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from spmoe.backends.devices import choose_device, limit_memory
from spmoe.config import EngineConfig, format_bytes
from spmoe.draft.base import Drafter
from spmoe.draft.model import DraftModel
from spmoe.draft.ngram import NgramDraft
from spmoe.draft.none import NoDraft
from spmoe.draft.self_quantized import QuantizedSelfRunner, SelfDraft
from spmoe.engine.engine import Engine, LearnedState
from spmoe.engine.loading import LoadedModels, load_draft, load_self, load_target, wide_shape
from spmoe.engine.loop import Loop
from spmoe.engine.memory import divide_memory, slot_count
from spmoe.engine.prefetching import make_policy
from spmoe.engine.runtime import make_runtime
from spmoe.errors import CheckpointError, UsageError
from spmoe.experts.eviction import make_eviction
from spmoe.experts.filling import load_all
from spmoe.experts.link import ThrottledTransfer
from spmoe.experts.source import ExpertSource
from spmoe.models.checkpoint import Checkpoint
from spmoe.models.kv import KvState
from spmoe.models.predictors import read_predictor
from spmoe.models.runner import ModelRunner
from spmoe.models.target import Target
from spmoe.models.tokenizer import load_tokenizer, require_same_tokenizer
from spmoe.observe.clock import RealClock
from spmoe.observe.ledger import Counters
from spmoe.observe.timeline import Timeline
from spmoe.predict.policies import require_no_recording
from spmoe.predict.policies.on_demand import OnDemand
from spmoe.predict.projection import HiddenStateProjection

if TYPE_CHECKING:
    from spmoe.backends.cuda_memory import HostStore
    from spmoe.backends.graphs import GraphRecorder


def build(config: EngineConfig, store: HostStore | None = None) -> Engine:
    """Load target, experts and draft, and connect them.

    `store`: the experts, already in host memory, given up by the room of an engine that is closed.
    """
    require_no_recording(config.prefetch)
    device = choose_device(config.device)
    checkpoint = Checkpoint.find(config.model)
    draft_checkpoint = Checkpoint.find(config.draft_model) if config.draft_model else None
    tokenizer = load_tokenizer(checkpoint.directory)
    if draft_checkpoint is not None:
        require_same_tokenizer(tokenizer, load_tokenizer(draft_checkpoint.directory), checkpoint, draft_checkpoint)
    wide_shape(config, device)  # refuses before anything is loaded
    models, clock, notices = load_target(config, checkpoint, device), RealClock(), list[str]()
    target, spec = models.target, models.spec
    slot_count(config, spec, target.top_k)  # refuses before the draft is read
    draft = _load_draft(config, draft_checkpoint, models, notices)
    limit = min(config.max_model_len or target.max_positions, target.max_positions)
    if config.max_model_len is not None and config.max_model_len > limit:
        notices.append(f"the model reads {limit} positions, so --max-model-len {config.max_model_len} is lowered")
    projection = _find_projection(config, draft_checkpoint, target, draft, checkpoint, notices)
    runners = [n for n in (target, draft) if n is not None]
    maps = projection.nbytes if projection is not None else 0
    budget = divide_memory(config, device, runners, spec, target.top_k, limit, maps)
    if budget.limit is not None:
        limit_memory(device, budget.limit)
    room = make_runtime(config, models, budget.slots, store)
    notices += room.notices
    timeline, transfer = Timeline(), room.transfer
    if config.link_gbps is not None:
        transfer = ThrottledTransfer(transfer, spec.layout.nbytes, config.link_gbps, clock, timeline)
    eviction = make_eviction(config.eviction_policy, spec.experts)
    threaded = room.cuda is None or config.link_gbps is not None  # an emulated link is waited for on the host
    source = ExpertSource(
        room.slots, transfer, eviction, spec.layout.nbytes, clock, Counters(), threaded=threaded, timeline=timeline
    )
    source.loads.batching = config.batching
    source.overlap = config.overlap
    try:
        states: dict[int, KvState] = {}
        drafter = _make_drafter(config, target, draft, states)
        k = config.most_draft_tokens if drafter is not None else 0
        if room.recorder is not None:
            _record(room.recorder, [("target", target, k + 1), ("draft", draft, 2)], limit, notices)
            if draft is not None:
                target.follow(draft)
            room.recorder.while_waiting = source.see_to_wishes
            room.recorder.wait_and_pump = transfer.wait_and_pump
            if not threaded:
                room.recorder.be_patient = partial(setattr, source, "patient")
        target.connect(source, room.backend)
        if room.cuda is not None and budget.slots == spec.count and config.link_gbps is None:
            load_all(source, spec.experts)
            room.backend.synchronize()
            room.cuda.stay_resident({entry.key: entry.slot for entry in source.cache.entries()})
        loop = Loop(target, drafter or NoDraft(), OnDemand(), source, clock, k, config.prefill_chunk, states)
        engine = Engine(
            config, models.dtype, tokenizer, target, loop, source, spec, budget.slots, clock, limit, device, room,
            budget, checkpoint, draft_checkpoint, drafter, make_policy,
            LearnedState({config.eviction_policy: eviction}), projection, notices=notices,
        )  # fmt: skip
        loop.length = engine.draft_length(config)
        loop.policy = make_policy(engine)
    except BaseException:
        source.close()
        room.close()
        raise
    return engine


def _record(
    recorder: GraphRecorder, runners: list[tuple[str, ModelRunner | None, int]], limit: int, notices: list[str]
) -> None:
    """Let forwards of few rows be recorded where the networks allow it."""
    for name, runner, rows in runners:
        if runner is not None and (reason := runner.capture_forwards(recorder, rows, limit)) is not None:
            notices.append(f"forwards of the {name} cannot be recorded ({reason}); they run slower")


def _load_draft(
    config: EngineConfig, checkpoint: Checkpoint | None, models: LoadedModels, notices: list[str]
) -> ModelRunner | None:
    """The draft network; none where the target's state could not be rolled back."""
    target = models.target
    if config.draft and config.num_speculative_tokens and not target.inspection.resumes:
        notices.append(
            f"{config.model} keeps a state that does not take several tokens at once, or cannot be rolled back; it "
            "decodes without speculation"
        )
        return None
    if config.own_draft is not None:
        own = load_self(config, models, config.own_draft)
        size = format_bytes(own.resident_bytes)
        notices.append(f"the draft is the target itself with {config.own_draft} experts, which occupy {size}")
        return own
    if checkpoint is None:
        return None
    runner = load_draft(models, checkpoint)
    if not runner.can_rewind:
        raise UsageError(f"the draft {checkpoint.name} keeps a state that cannot be rolled back; choose another draft")
    if runner.max_positions < target.max_positions:
        notices.append(
            f"the draft reads {runner.max_positions} positions and the target {target.max_positions}; beyond the "
            "former it decodes without speculation"
        )
    return runner


def _find_projection(
    config: EngineConfig,
    draft_checkpoint: Checkpoint | None,
    target: Target,
    draft: ModelRunner | None,
    checkpoint: Checkpoint,
    notices: list[str],
) -> HiddenStateProjection | None:
    """The maps fitted for this pair, if they are wanted and there."""
    if not config.projection or config.shape is not None or draft is None or draft_checkpoint is None:
        return None
    try:
        return read_predictor(checkpoint, draft_checkpoint, target, draft)
    except CheckpointError as error:
        notices.append(str(error))
        return None


def _make_drafter(
    config: EngineConfig, target: Target, runner: ModelRunner | None, states: dict[int, KvState]
) -> Drafter | None:
    if isinstance(runner, QuantizedSelfRunner):
        return SelfDraft(runner, config.prefill_chunk, states)
    if runner is not None:
        return DraftModel(runner, target.vocab_size, config.prefill_chunk)
    if config.draft == "ngram" and config.num_speculative_tokens and target.inspection.resumes:
        return NgramDraft(target.vocab_size, target.model.device)
    return None
