"""The plan: what a model is and how the memory would be divided, without loading a weight."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from spmoe.backends.devices import choose_device
from spmoe.config import CutoffMode, DraftTokens, EngineConfig
from spmoe.engine.cutoffs import cutoff_inputs, profile_settings, usual_draft_tokens
from spmoe.engine.loading import quantized_experts
from spmoe.engine.memory import plan_memory
from spmoe.engine.profiling import profile_path, read_profile
from spmoe.models.checkpoint import Checkpoint, load_errors
from spmoe.models.experts_seam import experts_modules, take_over
from spmoe.models.inspection import Inspection, inspect_model
from spmoe.models.load import expert_file_path, load_dense_skeleton, load_skeleton, store_spec
from spmoe.models.predictors import find_predictor
from spmoe.models.rotary import table_bytes
from spmoe.predict.cutoff import Profile, choose_cutoff


@dataclass(frozen=True, slots=True)
class Plan:
    """What `spmoe info` shows."""

    model: str
    architecture: str
    dtype: str
    decoder_layers: int
    moe_layers: int
    experts_per_layer: int
    top_k: int
    context: int
    parameters: int
    resident_bytes: int  # the target's dense weights
    expert_bytes: int  # one expert
    all_experts_bytes: int
    slots: int
    slots_bytes: int
    kv_bytes_per_token: int  # of the target
    device: str
    kv_bytes: int  # of target and draft, at the context planned for
    workspace_bytes: int
    planned_context: int
    device_memory_limit: int | None  # None: not limited
    expert_file: str
    expert_file_built: bool
    draft: str | None
    draft_architecture: str | None
    draft_bytes: int  # with the maps fitted for it
    predictor: str | None  # the file of those maps
    num_speculative_tokens: DraftTokens
    prefetch: str
    emulated_link_gbps: float | None
    profile: Profile | None  # None: not measured yet, or not needed
    cutoff: str  # as asked for
    cutoff_layers: int | None  # None: no prefetching, or not known before a measurement

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"link": "real" if self.emulated_link_gbps is None else "emulated", **asdict(self)}


def make_plan(config: EngineConfig) -> Plan:
    """Read configs and file headers only."""
    checkpoint = Checkpoint.find(config.model)
    dtype = checkpoint.dtype(config.dtype)
    model = load_skeleton(checkpoint)
    inspection = _inspect(checkpoint, model)
    spec = store_spec(checkpoint, model, [moe_layer.path for moe_layer in inspection.moe], dtype)
    top_k = max(moe_layer.top_k for moe_layer in inspection.moe)
    path = expert_file_path(checkpoint, dtype)
    text = checkpoint.config.get_text_config(decoder=True)

    draft = Checkpoint.find(config.draft_model) if config.draft_model else None
    draft_model = load_dense_skeleton(draft) if draft is not None else None
    if draft_model is not None and any(True for _ in experts_modules(draft_model)):
        take_over(draft_model)  # experts cannot run without weights
    draft_tokens = config.most_draft_tokens if config.draft is not None else 0
    runners = [(model, inspection)] + ([(draft_model, _inspect(draft, draft_model))] if draft is not None else [])
    device, weights = choose_device(config.device), sum(_parameters(m) * dtype.itemsize for m, _ in runners)
    per_token = sum(a.kv_bytes_per_token * dtype.itemsize // m.dtype.itemsize for m, a in runners)
    predictor = _predictor(config, checkpoint, draft)
    own = quantized_experts(spec, inspection.moe, config.own_draft).nbytes if config.own_draft else 0
    maps = len(inspection.moe) * (_width(draft) + 1) * text.hidden_size * dtype.itemsize if predictor else 0
    positions: int = text.max_position_embeddings
    context = min(config.max_model_len or positions, positions)
    tables = sum(table_bytes(m, context, dtype) for m, _ in runners)
    memory = plan_memory(config, device, spec, top_k, weights + maps + own, per_token, positions, tables)
    slots = memory.slots
    profile, layers = None, None
    fits = bool(own) or (draft is not None and (predictor is not None or _width(draft) == text.hidden_size))
    if fits and "draft-gate" in config.prefetch:
        inputs = cutoff_inputs(spec, top_k, slots, usual_draft_tokens(config.num_speculative_tokens))
        profile = read_profile(profile_path(profile_settings(config, checkpoint, draft, inputs)))
        if profile is not None or config.cutoff.mode is not CutoffMode.AUTO:
            layers = choose_cutoff(config.cutoff, profile, inputs)
    expert_parameters = spec.nbytes // dtype.itemsize
    return Plan(
        model=config.model,
        architecture=type(model).__name__,
        dtype=str(dtype).removeprefix("torch."),
        decoder_layers=inspection.depth_count,
        moe_layers=len(inspection.moe),
        experts_per_layer=max(spec.experts),
        top_k=top_k,
        context=context,
        parameters=_parameters(model) + expert_parameters,
        resident_bytes=_parameters(model) * dtype.itemsize,
        expert_bytes=spec.layout.nbytes,
        all_experts_bytes=spec.nbytes,
        slots=slots,
        slots_bytes=slots * spec.layout.nbytes,
        device=str(device.type),
        kv_bytes=memory.kv,
        workspace_bytes=memory.workspace,
        planned_context=memory.context,
        device_memory_limit=memory.limit,
        kv_bytes_per_token=inspection.kv_bytes_per_token * dtype.itemsize // model.dtype.itemsize,
        expert_file=str(path),
        expert_file_built=path.exists(),
        draft=config.draft if draft_tokens else None,
        draft_architecture=_kind(draft_model, config) if draft_tokens else None,
        draft_bytes=(_parameters(draft_model) * dtype.itemsize if draft_model is not None else 0) + maps + own,
        predictor=str(predictor) if predictor else None,
        num_speculative_tokens=config.num_speculative_tokens if draft_tokens else 0,
        prefetch=_prefetch(config, fits),
        emulated_link_gbps=config.link_gbps,
        profile=profile,
        cutoff=str(config.cutoff),
        cutoff_layers=layers,
    )


def _prefetch(config: EngineConfig, fits: bool) -> str:
    """What is left of the policy where the draft has nothing to predict from."""
    if fits or "draft-gate" not in config.prefetch:
        return config.prefetch
    own_signals = "next-gate" in config.prefetch or config.draft == "ngram"
    return "next-gate" if own_signals else "on-demand"


def _inspect(checkpoint: Checkpoint, model: Any) -> Inspection:
    with load_errors(checkpoint):
        return inspect_model(model)


def _predictor(config: EngineConfig, checkpoint: Checkpoint, draft: Checkpoint | None) -> Path | None:
    if draft is None or not config.projection or config.shape is not None:
        return None
    return find_predictor(checkpoint, draft)


def _width(checkpoint: Checkpoint | None) -> int:
    return 0 if checkpoint is None else checkpoint.config.get_text_config(decoder=True).hidden_size


def _kind(model: nn.Module | None, config: EngineConfig) -> str:
    if config.own_draft is not None:
        return f"the target with {config.own_draft} experts"
    return "no model" if model is None else type(model).__name__


def _parameters(model: nn.Module) -> int:
    """Weights; tied ones count once, as `parameters` lists them once."""
    return sum(p.numel() for p in model.parameters())
