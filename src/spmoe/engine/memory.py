"""Division of fast memory among weights, KV caches, workspace and expert slots, before anything large is allocated.

`spmoe info` calls the same functions with models on the meta device that the engine calls with loaded ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from spmoe.backends.base import kernel_row_limit
from spmoe.backends.devices import WORKSPACE_BYTES, allocated_memory, free_memory
from spmoe.config import EngineConfig, format_bytes
from spmoe.errors import BudgetError, CheckpointError, UsageError
from spmoe.experts.store import StoreSpec
from spmoe.models.rotary import table_bytes
from spmoe.models.runner import ModelRunner, kv_capacity

_AUTO_SHARE = 0.95  # of a device's free memory, for `--device-memory auto`
_DEFAULT_CONTEXT = 8192  # tokens that KV memory is planned for without --max-model-len


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Division of fast memory; bytes unless said otherwise."""

    slots: int  # a count
    slot_bytes: int
    resident: int  # weights of target and draft, without the target's experts
    kv: int  # KV caches of target and draft, for `context` tokens
    workspace: int
    context: int  # tokens
    limit: int | None  # upper bound of all of it; None: not limited


def max_sequence_length(config: EngineConfig, target: ModelRunner) -> int:
    """Return the longest sequence, prompt and output, in tokens: `max_model_len`, at most what the target supports."""
    return min(config.max_model_len or target.max_positions, target.max_positions)


def divide_memory(
    config: EngineConfig,
    device: torch.device,
    runners: Sequence[ModelRunner],
    spec: StoreSpec,
    top_k: int,
    max_length: int,
    extra_bytes: int = 0,
    dtype: torch.dtype | None = None,
    available: int | None = None,
) -> MemoryPlan:
    """Divide a device's memory; expert slots get the expert memory or, under a device limit, the rest.

    `max_length`: longest sequence in tokens, which sizes RoPE tables. `extra_bytes`: further resident weights, such as
    a fitted projection. `dtype`: the one that runs, for runners on the meta device; default: each model's own.
    `available`: bytes free on a CUDA device that is not here; default: the device is asked.
    """
    if device.type == "cpu" and config.device_memory is not None:
        raise UsageError("--device-memory divides a CUDA device's memory; on the CPU give --expert-memory")
    weights = sum(weight_bytes(runner, dtype) for runner in runners) + extra_bytes
    context = min(min(runner.max_positions for runner in runners), config.max_model_len or _DEFAULT_CONTEXT)
    kv_bytes_per_token = sum(kv_token_bytes(runner, dtype) for runner in runners)
    kv = kv_bytes_per_token * (kv_capacity(context) if device.type == "cuda" else context)
    workspace, limit, allowed = 0, None, None
    if device.type == "cuda":
        models = {runner.model for runner in runners}
        tables = 0 if config.enforce_eager else sum(table_bytes(m, max_length, dtype or m.dtype) for m in models)
        workspace = WORKSPACE_BYTES + _activation_bytes(config, spec, top_k) + tables
        if config.device_memory is not None:
            free = available
            if free is None:  # weights may be loaded already
                free = free_memory(device) + min(weights, allocated_memory(device))
            limit = round(_AUTO_SHARE * free) if config.device_memory == "auto" else config.device_memory.of(free)
            allowed = limit - weights - kv - workspace
    slots = slot_count(config, spec, top_k, allowed)
    return MemoryPlan(slots, spec.layout.nbytes, weights, kv, workspace, context, limit)


def weight_bytes(runner: ModelRunner, dtype: torch.dtype | None = None) -> int:
    """Return the bytes of a model's resident weights; of one on the meta device, as if loaded in `dtype`."""
    if runner.model.device.type != "meta":
        return runner.resident_bytes
    parameters: int = sum(parameter.numel() for parameter in runner.model.parameters())  # tied ones are listed once
    return parameters * (dtype or runner.model.dtype).itemsize


def kv_token_bytes(runner: ModelRunner, dtype: torch.dtype | None = None) -> int:
    """Return the bytes of one token's keys and values in all layers."""
    own: torch.dtype = runner.model.dtype
    return runner.inspection.kv_bytes_per_token * (dtype or own).itemsize // own.itemsize


def slot_count(config: EngineConfig, spec: StoreSpec, top_k: int, allowed: int | None = None) -> int:
    """Return how many experts fit into `allowed` bytes, else into the expert memory; at most all of them.

    Raises BudgetError if one token's experts of a layer do not fit at once.
    """
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


def _activation_bytes(config: EngineConfig, spec: StoreSpec, top_k: int) -> int:
    """Estimate the activations of one prompt chunk: a few rows of the widest layer per token, and kernel buffers.

    The kernels keep one row per token and routed expert.
    """
    widest = max(max(field.shape) for field in spec.layout.fields)
    kernel_tokens = min(config.prefill_chunk, kernel_row_limit(spec.layout.nbytes))
    return 4 * widest * (12 * config.prefill_chunk + 2 * top_k * kernel_tokens)
