"""How deep an engine may prefetch: the inputs of the latency model, and which of its forms was asked for."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from spmoe.config import DraftTokens, EngineConfig
from spmoe.experts.store import StoreSpec
from spmoe.models.checkpoint import Checkpoint
from spmoe.predict.cutoff import CutoffInputs
from spmoe.predict.draft_length import FIRST


def cutoff_inputs(spec: StoreSpec, top_k: int, slots: int, draft_tokens: int) -> CutoffInputs:
    """The fixed part of what the cutoff formula needs."""
    return CutoffInputs(len(spec.experts), max(spec.experts), top_k, slots, draft_tokens)


def usual_draft_tokens(draft_tokens: DraftTokens) -> int:
    """K or, where that is left open, what it begins with: how long a step's draft is until requests have shown it."""
    return FIRST if draft_tokens == "auto" else draft_tokens


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
        "pin_memory": config.pin_memory,
        "prefetch": config.prefetch,  # what is missing, which is learnt, depends on it and on what follows
        "eviction": config.eviction_policy,
        "batching": config.batching,
        "overlap": config.overlap,
        **asdict(inputs),
        **({"lengths": "auto"} if config.num_speculative_tokens == "auto" else {}),
    }
