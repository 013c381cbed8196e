"""Division of fast memory among weights, KV caches, workspace and expert slots, before anything large is allocated.

`spmoe info` calls the same functions with models on the meta device that the engine calls with loaded ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from spmoe.backends.base import kernel_row_limit
from spmoe.backends.cpu import expert_shapes
from spmoe.backends.cpu_copies import CopyLayout, needs_copies
from spmoe.backends.devices import WORKSPACE_BYTES, allocated_memory, free_memory
from spmoe.config import DEFAULT_EXPERT_MEMORY, EngineConfig, Size, drafter_name, format_bytes
from spmoe.errors import BudgetError, CheckpointError, UsageError
from spmoe.experts.store import StoreSpec
from spmoe.formats.expert import ExpertFormat
from spmoe.formats.layout import torch_dtype
from spmoe.models.kv_pool import SCRATCH_POSITIONS
from spmoe.models.loaded import quantized_experts
from spmoe.models.ragged import batch_rows_up_to
from spmoe.models.rotary import table_bytes
from spmoe.models.runner import ModelRunner
from spmoe.predict.governor import usual_draft_tokens
from spmoe.predict.latency import expected_experts

_AUTO_SHARE = 0.95  # of a device's free memory, for `--device-memory auto`
_DEFAULT_CONTEXT = 8192  # tokens that KV memory is planned for without --max-model-len
_OTHERS_CONTEXT = 1024  # tokens that are planned for each sequence beside the longest
_MIN_CONTEXT = 2048  # fewer are only planned for on request, or if the model reads fewer
_COPY_SHARE = 0.5  # of the host memory that experts leave free, for copies that the CPU computes faster
_INT4_BITS = 4.75  # bits per weight of `--draft self:int4`, with scales


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Division of fast memory; bytes unless said otherwise."""

    slots: int  # a count
    slot_bytes: int
    resident: int  # weights of target and draft, without the target's experts
    kv: int  # KV caches of target and draft, for `kv_positions`
    workspace: int
    context: int  # tokens of one sequence
    kv_positions: int  # tokens of all sequences
    limit: int | None  # upper bound of all of it; None: not limited
    notices: tuple[str, ...] = ()  # for the user: compromises
    cpu_copies: int = 0  # host memory for copies of experts that the CPU computes; not part of `limit`


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
    """Divide a device's memory; expert slots get the expert memory or, on CUDA without it, the rest.

    `runners`: the target and, if there is one, the draft. `max_length`: longest sequence in tokens, which sizes RoPE
    tables. `extra_bytes`: further resident weights of the draft, such as a fitted projection. `dtype`: the one that
    runs, for runners on the meta device; default: each model's own. `available`: bytes free on the CUDA device before
    anything is loaded; default: the device is asked.
    """
    if top_k < 1:
        raise CheckpointError(f"config.json of {config.model} sends a token to no expert at all; correct it")
    weights = [weight_bytes(runner, dtype) for runner in runners]
    resident = sum(weights) + extra_bytes
    longest = min(min(runner.max_positions for runner in runners), config.max_model_len or _DEFAULT_CONTEXT)
    kv_bytes_per_token = sum(kv_token_bytes(runner, dtype) for runner in runners)
    if device.type == "cpu":
        if isinstance(config.device_memory, Size):
            raise UsageError("--device-memory divides a CUDA device's memory; on the CPU give --expert-memory")
        slots = slot_count(config, spec, top_k)
        kv = kv_bytes_per_token * longest
        return MemoryPlan(slots, spec.layout.nbytes, resident, kv, 0, longest, longest, None)
    models = {runner.model for runner in runners}
    tables = 0 if config.enforce_eager else sum(table_bytes(m, max_length, dtype or m.dtype) for m in models)
    buffers = _activation_bytes(config, spec, top_k) + _dense_matrix_bytes(runners[0], spec)
    buffers += _captured_logits_bytes(config, runners[0], dtype)
    workspace = WORKSPACE_BYTES + buffers + tables
    if available is None:
        loaded = sum(size for runner, size in zip(runners, weights, strict=True) if runner.model.device == device)
        available = free_memory(device) + min(loaded, allocated_memory(device))
    limit = round(_AUTO_SHARE * available) if config.device_memory == "auto" else config.device_memory.of(available)
    contexts = [longest] if config.max_model_len is not None else [*_contexts(longest)]
    blob, asked = spec.layout.nbytes, None if config.expert_memory is None else slot_count(config, spec, top_k)
    enough = _enough_slots(config, spec, top_k) if asked is None else asked
    for context, sequences in product(contexts, _sequence_counts(config.max_num_seqs)):
        positions = kv_positions(context, sequences)
        kv = kv_bytes_per_token * (positions + SCRATCH_POSITIONS)
        left = limit - resident - workspace - kv
        slots = min(spec.count, max(0, left) // blob)
        if slots >= enough:
            break
    least = top_k if asked is None else asked
    if slots < least:
        draft = sum(weights[1:]) + extra_bytes
        parts = {
            f"the target {config.model} without its experts": weights[0],
            f"the draft {config.resolved_draft}": draft,
            f"KV caches for {positions} tokens": kv,
            "workspace": workspace,
            f"{least} expert slots": least * blob,
        }
        item_bytes = (dtype or runners[0].model.dtype).itemsize
        remedies = _remedies(config, spec, draft, item_bytes, sum(parts.values()), limit, slots * blob)
        raise BudgetError(_does_not_fit(parts, limit, config, available, remedies))
    notices = []
    if context < longest:
        notices.append(
            f"memory is short, so KV caches are planned for {context} tokens instead of {longest}; --max-model-len "
            "sets another number"
        )
    if asked is None and slots < enough:
        notices.append(
            f"memory is short: {slots} expert slots are left, and steps run well from {enough}; use a smaller draft, "
            "--draft ngram or a device with more memory"
        )
    slots = slots if asked is None else asked
    return MemoryPlan(slots, blob, resident, kv, workspace, context, positions, limit, tuple(notices))


def with_cpu_copies(
    memory: MemoryPlan,
    config: EngineConfig,
    device: torch.device,
    target: ModelRunner,
    spec: StoreSpec,
    format: ExpertFormat,
    available: int,
) -> MemoryPlan:
    """Return a plan with host memory for copies of experts that the CPU computes, if it computes any beside a device.

    `available`: bytes of host memory for all experts and the copies.
    """
    if device.type != "cuda" or config.cpu_experts == "off":
        return memory
    return replace(memory, cpu_copies=cpu_copy_budget(target, spec, format, available - spec.nbytes))


def extra_draft_bytes(
    config: EngineConfig,
    target: ModelRunner,
    draft: ModelRunner | None,
    spec: StoreSpec,
    dtype: torch.dtype,
    *,
    is_projected: bool,
) -> int:
    """Return the bytes of the draft beside its model: quantized experts of the target, or a fitted projection."""
    moe, scheme = target.inspection.moe, config.self_draft_scheme
    experts = 0 if scheme is None else quantized_experts(spec, moe, scheme).nbytes
    if draft is None or not is_projected:
        return experts
    return experts + len(moe) * (draft.hidden_size + 1) * target.hidden_size * dtype.itemsize


def cpu_copy_budget(target: ModelRunner, spec: StoreSpec, format: ExpertFormat, free: int) -> int:
    """Return the bytes of host memory for copies of experts that the CPU computes; 0: it needs none, or none fits.

    `free`: bytes of host memory that are free beside all experts.
    """
    if not needs_copies(format):
        return 0
    size = expert_copy_bytes(target, format)
    budget = min(spec.count * size, math.floor(_COPY_SHARE * max(0, free)))
    return budget if budget >= size else 0


def expert_copy_bytes(target: ModelRunner, format: ExpertFormat) -> int:
    """Return the bytes of the copy of one expert, of the largest ones if layers differ."""
    shapes = {tuple(expert_shapes(layer.experts).items()) for layer in target.inspection.moe}
    return max(CopyLayout.of(format, dict(layer)).nbytes for layer in shapes)


def _sequence_counts(most: int) -> Iterator[int]:
    """Yield the numbers of sequences to plan KV caches for, the preferred one first; others wait for their place."""
    while most:
        yield most
        most //= 2


def kv_positions(context: int, max_num_seqs: int) -> int:
    """Return the positions of all KV caches on a device: one sequence of `context` tokens, and short ones beside it.

    Sequences for which there is no place wait.
    """
    return context + (max_num_seqs - 1) * min(_OTHERS_CONTEXT, context)


def _contexts(longest: int) -> Iterator[int]:
    """Yield the numbers of tokens to plan KV caches for, the preferred one first."""
    yield longest
    context = 1 << (longest - 1).bit_length() - 1
    while context >= _MIN_CONTEXT:
        yield context
        context //= 2


def _enough_slots(config: EngineConfig, spec: StoreSpec, top_k: int) -> int:
    """Return how many slots a step runs well with: one layer computes while the experts of the next one arrive."""
    k = usual_draft_tokens(config.num_speculative_tokens)
    rows = 1 + (k if config.resolved_draft is not None else 0)
    needed = expected_experts(max(spec.experts), min(top_k, max(spec.experts)), rows)
    return min(spec.count, max(top_k, 2 * math.ceil(needed)))


def _does_not_fit(
    parts: dict[str, int], limit: int, config: EngineConfig, available: int, remedies: Sequence[str]
) -> str:
    """Return the message about parts that exceed the limit, the largest first."""
    listed = ", ".join(
        f"{name} {format_bytes(size)}" for name, size in sorted(parts.items(), key=lambda one: -one[1]) if size
    )
    total = sum(parts.values())
    if isinstance(config.device_memory, Size):
        allowed = f"--device-memory {config.device_memory.described()} allows {format_bytes(limit)}"
    else:
        allowed = f"{format_bytes(limit)} of the {format_bytes(available)} that are free can be used"
    return (
        f"{format_bytes(total)} of device memory are needed ({listed}), but {allowed}, {format_bytes(total - limit)} "
        f"too little; {', or '.join(remedies)}"
    )


def _remedies(
    config: EngineConfig, spec: StoreSpec, draft_bytes: int, item_bytes: int, needed: int, limit: int, fitting: int
) -> list[str]:
    """Return what the user can change; `needed`: bytes of everything, `fitting`: bytes of slots that would fit."""
    found = []
    kind, _ = drafter_name(config.resolved_draft if config.num_speculative_tokens else None)
    is_dense = spec.layout.format == spec.layout.dtype  # packed experts have about as many bytes as a draft in 4 bits
    int4_bytes = spec.nbytes * (_INT4_BITS / (8 * item_bytes) if is_dense else 1)
    if draft_bytes and kind == "model":
        int4_fits = needed - draft_bytes + int4_bytes <= limit
        found.append(f"use a smaller draft, {'--draft self:int4, ' if int4_fits else ''}--draft ngram")
    elif draft_bytes and kind == "self":
        found.append("use --draft ngram" if config.self_draft_scheme == "int4" else "use --draft self:int4 or ngram")
    if item_bytes > 2:
        found.append("run in --dtype bfloat16")
    if config.max_model_len is not None and config.max_model_len > _MIN_CONTEXT:
        found.append("lower --max-model-len")
    if config.expert_memory is not None and fitting:
        found.append(f"lower --expert-memory to {math.floor(fitting / 2**20)}MiB")
    if isinstance(config.device_memory, Size):
        found.append(f"raise --device-memory to {math.ceil(needed / 2**20)}MiB")
    return found or ["free memory on the device, or use a larger one"]


def all_resident(config: EngineConfig, device: torch.device, slots: int, spec: StoreSpec) -> bool:
    """Return whether every expert is loaded at start and stays in a slot; kernels then find it without the host."""
    return device.type == "cuda" and slots == spec.count and config.link_gbps is None


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


def slot_count(config: EngineConfig, spec: StoreSpec, top_k: int) -> int:
    """Return how many experts fit into the expert memory (default: a share); at most all of them.

    Raises BudgetError if one token's experts of a layer do not fit at once.
    """
    blob = spec.layout.nbytes
    if top_k < 1:
        raise CheckpointError(f"config.json of {config.model} sends a token to no expert at all; correct it")
    memory = config.expert_memory or Size.parse(DEFAULT_EXPERT_MEMORY)
    count = min(spec.count, memory.of(spec.nbytes) // blob)
    if count < top_k:
        share = math.ceil(1000 * top_k / spec.count) / 10
        least = f"{math.ceil(top_k * blob / 2**10)}KiB"
        raise BudgetError(
            f"--expert-memory {memory.described()} holds {count} expert{'s' * (count != 1)} of {format_bytes(blob)}, "
            f"but one token needs {top_k} of a layer at once; give at least {least} or {share}%"
        )
    return count


def _dense_matrix_bytes(target: ModelRunner, spec: StoreSpec) -> int:
    """Return the size of the largest projection of an expert, which is dequantized for prompts if it is packed."""
    if spec.layout.format == spec.layout.dtype:
        return 0
    shapes = [shape for layer in target.inspection.moe for shape in expert_shapes(layer.experts).values()]
    return torch_dtype(spec.layout.dtype).itemsize * max(math.prod(shape) for shape in shapes)


def _captured_logits_bytes(config: EngineConfig, target: ModelRunner, dtype: torch.dtype | None) -> int:
    """Return the bytes of the logits that captured forwards of several sequences keep."""
    if config.enforce_eager or config.max_num_seqs == 1:
        return 0
    most = config.max_num_seqs * (config.max_draft_tokens + 1)
    return sum(batch_rows_up_to(most)) * target.vocab_size * (dtype or target.model.dtype).itemsize


def _activation_bytes(config: EngineConfig, spec: StoreSpec, top_k: int) -> int:
    """Estimate the activations of one prompt chunk: a few rows of the widest layer per token, and kernel buffers.

    The kernels keep one row per token and routed expert.
    """
    kernel_tokens = min(config.prefill_chunk, kernel_row_limit(spec.layout.nbytes))
    return 4 * spec.layout.widest * (12 * config.prefill_chunk + 2 * top_k * kernel_tokens)
