"""Memory: one budget for everything an engine keeps in fast memory, divided before anything large is allocated."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from spmoe.backends.base import kernel_rows
from spmoe.backends.devices import WORKSPACE_BYTES, allocated_memory, free_memory
from spmoe.config import EngineConfig, format_bytes
from spmoe.engine.memory_plan import MemoryPlan
from spmoe.errors import BudgetError, CheckpointError, UsageError
from spmoe.experts.store import StoreSpec
from spmoe.models.rotary import table_bytes
from spmoe.models.runner import ModelRunner, state_capacity

_AUTO_SHARE = 0.95  # of the free memory of a device
_USUAL_CONTEXT = 8192  # positions that memory is set aside for where --max-model-len is not given


def divide_memory(
    config: EngineConfig,
    device: torch.device,
    runners: Sequence[ModelRunner],
    spec: StoreSpec,
    top_k: int,
    limit: int,
    maps: int = 0,
) -> MemoryPlan:
    """Divide a device's memory among weights, attention states, workspace and, with the rest, slots."""
    # limit: positions that a sequence may have; maps: bytes of a fitted predictor
    weights = sum(runner.resident_bytes for runner in runners) + maps
    per_token = sum(runner.inspection.kv_bytes_per_token for runner in runners)
    tables = sum(table_bytes(model, limit, model.dtype) for model in {n.model for n in runners})
    positions = min(n.max_positions for n in runners)
    return plan_memory(config, device, spec, top_k, weights, per_token, positions, tables)


def plan_memory(
    config: EngineConfig,
    device: torch.device,
    spec: StoreSpec,
    top_k: int,
    weights: int,
    kv_bytes_per_token: int,
    positions: int,
    tables: int,
) -> MemoryPlan:
    """The same from sizes alone."""
    # tables: bytes of the rotary embeddings that recorded forwards look up
    context = min(positions, config.max_model_len or _USUAL_CONTEXT)
    kv = kv_bytes_per_token * (state_capacity(context) if device.type == "cuda" else context)
    tables = 0 if config.enforce_eager else tables
    workspace = WORKSPACE_BYTES + _activations(config, spec, top_k) + tables if device.type == "cuda" else 0
    limit, allowed = None, None
    if device.type == "cpu" and config.device_memory is not None:
        raise UsageError("--device-memory divides a CUDA device's memory; on the CPU give --expert-memory")
    if device.type == "cuda" and config.device_memory is not None:
        free = free_memory(device) + _held(device, weights)
        limit = round(_AUTO_SHARE * free) if config.device_memory == "auto" else config.device_memory.of(free)
        allowed = limit - weights - kv - workspace
    slots = slot_count(config, spec, top_k, allowed)
    return MemoryPlan(slots, spec.layout.nbytes, weights, kv, workspace, context, limit)


def _held(device: torch.device, weights: int) -> int:
    """What of the weights is on the device already."""
    return min(weights, allocated_memory(device))


def _activations(config: EngineConfig, spec: StoreSpec, top_k: int) -> int:
    """What reading a chunk of a prompt computes on the way, roughly: a few rows of the widest layer per token.

    And, where experts are run by kernels, what every one that a token is sent to makes of it.
    """
    widest = max(max(field.shape) for field in spec.layout.fields)
    by_kernels = min(config.prefill_chunk, kernel_rows(spec.layout.nbytes))
    return 4 * widest * (12 * config.prefill_chunk + 2 * top_k * by_kernels)


def slot_count(config: EngineConfig, spec: StoreSpec, top_k: int, allowed: int | None = None) -> int:
    """Slots that the expert memory, or what is `allowed` of a device's, pays for; never more than there are experts."""
    blob = spec.layout.nbytes
    if top_k < 1:
        raise CheckpointError(f"config.json of {config.model} sends a token to no expert at all; correct it")
    count = min(spec.count, (config.expert_memory.of(spec.nbytes) if allowed is None else allowed) // blob)
    if count < top_k:
        share = math.ceil(1000 * top_k / spec.count) / 10
        least = f"{math.ceil(top_k * blob / 2**10)}KiB"
        if allowed is not None:
            raise BudgetError(
                f"--device-memory {config.device_memory} leaves {format_bytes(max(0, allowed))} for experts of "
                f"{format_bytes(blob)}, but one token needs {top_k} of a layer at once; give {least} more"
            )
        raise BudgetError(
            f"--expert-memory {config.expert_memory} holds {count} experts of {format_bytes(blob)}, but one token "
            f"needs {top_k} of a layer at once; give at least {least} or {share}%"
        )
    return count
