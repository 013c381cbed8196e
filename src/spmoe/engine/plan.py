"""The plan that `spmoe info` shows: model, memory and prefetching, from configs and file headers alone.

Models are built on the meta device, without weights, and go through the functions that the engine is built with.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spmoe.backends.devices import choose_device
from spmoe.config import AUTO_DRAFT, RANDOM_WEIGHTS_NOTE, CutoffMode, DraftTokens, EngineConfig
from spmoe.engine.memory import (
    MemoryPlan,
    divide_memory,
    extra_draft_bytes,
    kv_token_bytes,
    max_sequence_length,
    weight_bytes,
    with_cpu_copies,
)
from spmoe.engine.prefetching import DraftSide, default_draft_notice, policy_context, policy_name
from spmoe.engine.profiling import cutoff_inputs, profile_path, profile_settings, read_profile
from spmoe.formats.layout import dtype_name
from spmoe.models.checkpoint import Checkpoint, load_errors
from spmoe.models.expert_formats import choose_format, expert_parameters, is_lossless, own_format
from spmoe.models.expert_shards import reads_in_place
from spmoe.models.load import expert_file_path, load_skeleton, store_spec
from spmoe.models.loaded import draft_skeleton
from spmoe.models.predictors import find_predictor
from spmoe.models.runner import ModelRunner
from spmoe.models.target import Target
from spmoe.predict.cutoff import Profile, choose_cutoff
from spmoe.predict.governor import usual_draft_tokens
from spmoe.predict.policies import plan_policy
from spmoe.system.host import available_memory


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """The target model."""

    name: str
    architecture: str
    dtype: str
    decoder_layers: int
    moe_layers: int
    experts_per_layer: int
    top_k: int
    parameters: int
    max_length: int  # tokens of prompt and output together
    kv_bytes_per_token: int
    resident_bytes: int  # weights without experts
    expert_format: str
    lossless: bool  # whether experts have the checkpoint's weights, in the run's dtype
    expert_bytes: int  # one expert
    all_experts_bytes: int
    expert_file: str
    expert_file_exists: bool
    experts_in_place: bool  # read from the checkpoint's own files, on the CPU; no expert file is written
    download_bytes: int  # of files that are still on the hub; 0: everything is here
    weights: str  # "checkpoint", or "random" with --load-format dummy


@dataclass(frozen=True, slots=True)
class DraftFacts:
    """The draft."""

    name: str
    architecture: str
    num_speculative_tokens: DraftTokens
    resident_bytes: int  # weights, with those of the fitted projection
    projection_file: str | None  # None: no projection is fitted for this pair


@dataclass(frozen=True, slots=True)
class PrefetchFacts:
    """The prefetch policy and its cutoff."""

    policy: str  # that runs, after fallbacks
    notices: list[str]  # why another policy runs than the configured one
    cutoff: str | None  # as configured; None: the policy has no cutoff
    cutoff_layers: int | None  # None: no cutoff, or not known before a profile is measured
    profile: Profile | None  # None: not measured yet, or not needed


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that `spmoe info` shows."""

    device: str
    emulated_link_gbps: float | None
    target: TargetFacts
    draft: DraftFacts | None
    memory: MemoryPlan
    prefetch: PrefetchFacts

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        link = "real" if self.emulated_link_gbps is None else "emulated"
        return {"link": link, **asdict(self), "memory": memory_dict(self.memory)}


def memory_dict(memory: MemoryPlan) -> dict[str, Any]:
    """Return a division of memory as plain values, for JSON."""
    return {
        "slots": memory.slots,
        "slots_bytes": memory.slots * memory.slot_bytes,
        "resident_bytes": memory.resident,
        "kv_bytes": memory.kv,
        "workspace_bytes": memory.workspace,
        "context": memory.context,
        "limit_bytes": memory.limit,
        "cpu_copies_bytes": memory.cpu_copies,
    }


def make_plan(config: EngineConfig) -> Plan:
    """Plan an engine without loading weights."""
    device, load_format = choose_device(config.device), config.load_format
    checkpoint = Checkpoint.find(config.model, weights=False, load_format=load_format)
    dtype = checkpoint.dtype(config.dtype)
    with load_errors(checkpoint):
        target = Target(load_skeleton(checkpoint))
    paths = [layer.path for layer in target.moe]
    own, expanded = own_format(checkpoint, target.model, paths, dtype)
    format = choose_format(config.expert_format, checkpoint, target.model, paths, dtype, own=own)
    lossless = is_lossless(format, own, checkpoint)
    spec = store_spec(checkpoint, target.model, paths, dtype, format)
    draft_checkpoint = None
    if config.draft_model:
        draft_checkpoint = Checkpoint.find(config.draft_model, weights=False, load_format=load_format)
    draft = draft_skeleton(draft_checkpoint) if draft_checkpoint is not None else None
    projection_file = _projection_file(config, checkpoint, draft_checkpoint)

    extra_bytes = extra_draft_bytes(config, target, draft, spec, dtype, is_projected=projection_file is not None)
    runners = [target, draft] if draft is not None else [target]
    max_length = max_sequence_length(config, target)
    memory = divide_memory(config, device, runners, spec, target.top_k, max_length, extra_bytes, dtype)
    memory = with_cpu_copies(memory, config, device, target, spec, format, available_memory())

    drafting = config.resolved_draft is not None and config.max_draft_tokens > 0
    by_default = config.draft == AUTO_DRAFT
    side = DraftSide(drafting, draft, config.self_draft_scheme is not None, by_default)
    context = policy_context(target, spec.experts, side, projection_file is not None)
    policy = plan_policy(policy_name(config, device, memory.slots, spec), context)
    profile, cutoff_layers = None, None
    if policy.uses_cutoff:
        usual = usual_draft_tokens(config.num_speculative_tokens)
        inputs = cutoff_inputs(spec, target.top_k, memory.slots, usual)
        profile = read_profile(profile_path(profile_settings(config, checkpoint, draft_checkpoint, inputs)))
        if profile is not None or config.cutoff.mode is not CutoffMode.AUTO:
            cutoff_layers = choose_cutoff(config.cutoff, profile, inputs)

    dense_bytes, expert_file = weight_bytes(target, dtype), expert_file_path(checkpoint, dtype, format)
    target_facts = TargetFacts(
        name=config.model,
        architecture=type(target.model).__name__,
        dtype=dtype_name(dtype),
        decoder_layers=target.depth_count,
        moe_layers=len(target.moe),
        experts_per_layer=max(spec.experts),
        top_k=target.top_k,
        parameters=dense_bytes // dtype.itemsize + expert_parameters(target.model, paths),
        max_length=max_length,
        kv_bytes_per_token=kv_token_bytes(target, dtype),
        resident_bytes=dense_bytes,
        expert_format=format.weight.label,
        lossless=lossless,
        expert_bytes=spec.layout.nbytes,
        all_experts_bytes=spec.nbytes,
        expert_file=str(expert_file),
        expert_file_exists=expert_file.exists(),
        experts_in_place=device.type == "cpu"
        and config.verify_experts == "once"
        and reads_in_place(checkpoint, target.model, paths, spec, format),
        download_bytes=checkpoint.download_bytes,
        weights="random" if checkpoint.random else "checkpoint",
    )
    draft_facts = None
    if config.resolved_draft is not None and config.max_draft_tokens:
        draft_facts = DraftFacts(
            name=config.resolved_draft,
            architecture=_draft_architecture(config, draft),
            num_speculative_tokens=config.num_speculative_tokens,
            resident_bytes=(weight_bytes(draft, dtype) if draft is not None else 0) + extra_bytes,
            projection_file=str(projection_file) if projection_file is not None else None,
        )
    asked = str(config.cutoff) if policy.uses_cutoff else None
    chosen = default_draft_notice(config, policy.sources(context), device.type) if drafting else None
    about_experts = [expanded] if expanded is not None and format == own else []
    if checkpoint.random:
        about_experts.insert(0, RANDOM_WEIGHTS_NOTE)
    notices = [*about_experts, *([chosen] if chosen is not None else []), *memory.notices, *policy.notices]
    prefetch = PrefetchFacts(policy.label(context), notices, asked, cutoff_layers, profile)
    return Plan(device.type, config.link_gbps, target_facts, draft_facts, memory, prefetch)


def _projection_file(config: EngineConfig, checkpoint: Checkpoint, draft: Checkpoint | None) -> Path | None:
    if draft is None or not config.projection or config.shape is not None:
        return None
    return find_predictor(checkpoint, draft)


def _draft_architecture(config: EngineConfig, draft: ModelRunner | None) -> str:
    if config.self_draft_scheme is not None:
        return f"the target with {config.self_draft_scheme} experts"
    return "no model" if draft is None else type(draft.model).__name__
