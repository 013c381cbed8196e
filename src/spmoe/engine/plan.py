"""The plan that `spmoe info` shows: model, memory and prefetching, from configs and file headers alone.

Models are built on the meta device, without weights, and go through the functions that the engine is built with.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spmoe.backends.devices import choose_device
from spmoe.config import CutoffMode, DraftTokens, EngineConfig
from spmoe.engine.cutoffs import cutoff_inputs, profile_settings, usual_draft_tokens
from spmoe.engine.loading import quantized_experts
from spmoe.engine.memory import MemoryPlan, divide_memory, kv_token_bytes, max_sequence_length, weight_bytes
from spmoe.engine.profiling import profile_path, read_profile
from spmoe.models.checkpoint import Checkpoint, building
from spmoe.models.experts_seam import experts_modules, take_over
from spmoe.models.load import expert_file_path, load_dense_skeleton, load_skeleton, store_spec
from spmoe.models.predictors import find_predictor
from spmoe.models.runner import ModelRunner
from spmoe.models.target import Target
from spmoe.predict.cutoff import Profile, choose_cutoff


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
    expert_bytes: int  # one expert
    all_experts_bytes: int
    expert_file: str
    expert_file_exists: bool


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

    policy: str  # the one that will run
    notices: list[str]  # why that is not the one asked for
    cutoff: str | None  # as asked for; None: the policy has no cutoff
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
        memory = {
            "slots": self.memory.slots,
            "slots_bytes": self.memory.slots * self.memory.slot_bytes,
            "resident_bytes": self.memory.resident,
            "kv_bytes": self.memory.kv,
            "workspace_bytes": self.memory.workspace,
            "context": self.memory.context,
            "limit_bytes": self.memory.limit,
        }
        return {"link": "real" if self.emulated_link_gbps is None else "emulated", **asdict(self), "memory": memory}


def make_plan(config: EngineConfig) -> Plan:
    """Plan an engine without loading weights."""
    checkpoint, device = Checkpoint.find(config.model), choose_device(config.device)
    dtype = checkpoint.dtype(config.dtype)
    with building(checkpoint):
        target = Target(load_skeleton(checkpoint))
    spec = store_spec(checkpoint, target.model, [layer.path for layer in target.moe], dtype)
    draft_checkpoint = Checkpoint.find(config.draft_model) if config.draft_model else None
    draft = _draft_runner(draft_checkpoint) if draft_checkpoint is not None else None
    projection_file = _projection_file(config, checkpoint, draft_checkpoint)

    extra_bytes = 0
    if config.self_draft_scheme is not None:
        extra_bytes += quantized_experts(spec, target.moe, config.self_draft_scheme).nbytes
    if draft is not None and projection_file is not None:
        extra_bytes += len(target.moe) * (draft.hidden_size + 1) * target.hidden_size * dtype.itemsize
    runners = [target, draft] if draft is not None else [target]
    max_length = max_sequence_length(config, target)
    memory = divide_memory(config, device, runners, spec, target.top_k, max_length, extra_bytes, dtype)

    policy, notices = resolve_prefetch(config, target, draft, projection_file is not None)
    profile, cutoff_layers = None, None
    uses_cutoff = "draft-gate" in policy.split("+")
    if uses_cutoff:
        usual = usual_draft_tokens(config.num_speculative_tokens)
        inputs = cutoff_inputs(spec, target.top_k, memory.slots, usual)
        profile = read_profile(profile_path(profile_settings(config, checkpoint, draft_checkpoint, inputs)))
        if profile is not None or config.cutoff.mode is not CutoffMode.AUTO:
            cutoff_layers = choose_cutoff(config.cutoff, profile, inputs)

    dense_bytes, expert_file = weight_bytes(target, dtype), expert_file_path(checkpoint, dtype)
    target_facts = TargetFacts(
        name=config.model,
        architecture=type(target.model).__name__,
        dtype=str(dtype).removeprefix("torch."),
        decoder_layers=target.depth_count,
        moe_layers=len(target.moe),
        experts_per_layer=max(spec.experts),
        top_k=target.top_k,
        parameters=(dense_bytes + spec.nbytes) // dtype.itemsize,
        max_length=max_length,
        kv_bytes_per_token=kv_token_bytes(target, dtype),
        resident_bytes=dense_bytes,
        expert_bytes=spec.layout.nbytes,
        all_experts_bytes=spec.nbytes,
        expert_file=str(expert_file),
        expert_file_exists=expert_file.exists(),
    )
    draft_facts = None
    if config.draft is not None and config.max_draft_tokens:
        draft_facts = DraftFacts(
            name=config.draft,
            architecture=_draft_architecture(config, draft),
            num_speculative_tokens=config.num_speculative_tokens,
            resident_bytes=(weight_bytes(draft, dtype) if draft is not None else 0) + extra_bytes,
            projection_file=str(projection_file) if projection_file is not None else None,
        )
    prefetch = PrefetchFacts(policy, notices, str(config.cutoff) if uses_cutoff else None, cutoff_layers, profile)
    return Plan(device.type, config.link_gbps, target_facts, draft_facts, memory, prefetch)


def resolve_prefetch(
    config: EngineConfig, target: Target, draft: ModelRunner | None, has_projection: bool
) -> tuple[str, list[str]]:
    """Return the prefetch policy that can run, and notices on why it is not the one asked for.

    `draft`: runner of a draft model; None for the target itself, n-grams and no draft.
    """
    wanted = config.prefetch.split("+")
    routers_callable = bool(target.gated) and target.has_hidden_states
    policies, notices = [policy for policy in wanted if policy not in ("draft-gate", "next-gate", "adaptive")], []
    if "draft-gate" in wanted and config.draft is not None and config.max_draft_tokens:
        if config.draft == "ngram":
            fallback = (
                "the target's own layers predict the next one's" if routers_callable else "experts load on demand"
            )
            notices.append(f"an n-gram draft has no hidden states to predict experts from; {fallback}")
            wanted = [*wanted, "next-gate"] if routers_callable else wanted
        elif (obstacle := _draft_gate_obstacle(config, target, draft, has_projection)) is not None:
            notices.append(f"{obstacle}; experts are loaded on demand")
        else:
            policies.append("draft-gate")
    for policy in ("next-gate", "adaptive"):
        if policy in wanted and routers_callable:
            policies.append(policy)
        elif policy in wanted:
            notices.append("the target's routers cannot be called alone, so its layers predict nothing")
    return "+".join(policies) or "on-demand", notices


def _draft_gate_obstacle(
    config: EngineConfig, target: Target, draft: ModelRunner | None, has_projection: bool
) -> str | None:
    """Return why the draft's hidden states cannot go through the target's routers; None if they can."""
    if config.self_draft_scheme is not None or draft is None:
        return None  # the target's own routers run in the draft
    if not target.gated:
        return "the target's routers cannot be called alone"
    if not draft.has_hidden_states:
        return "the draft's hidden states cannot be read"
    if draft.hidden_size != target.hidden_size and not has_projection:
        return (
            f"the draft is {draft.hidden_size} wide and the target {target.hidden_size}, so the target's routers "
            "cannot read its hidden states unless `spmoe fit-predictor` fits a projection"
        )
    return None


def _draft_runner(checkpoint: Checkpoint) -> ModelRunner:
    with building(checkpoint):
        model = load_dense_skeleton(checkpoint)
        if any(True for _ in experts_modules(model)):
            take_over(model)  # transformers' own experts cannot run without weights
        return ModelRunner(model)


def _projection_file(config: EngineConfig, checkpoint: Checkpoint, draft: Checkpoint | None) -> Path | None:
    if draft is None or not config.projection or config.shape is not None:
        return None
    return find_predictor(checkpoint, draft)


def _draft_architecture(config: EngineConfig, draft: ModelRunner | None) -> str:
    if config.self_draft_scheme is not None:
        return f"the target with {config.self_draft_scheme} experts"
    return "no model" if draft is None else type(draft.model).__name__
