"""Decode attention of a few new rows over a static KV cache whose length is known to the device only.

Loop bounds come from that length, so one captured graph serves every context up to the cache's capacity. Blocks of the
cache start at fixed positions and are assigned to the splits round-robin, and masked positions contribute exactly zero.
The kernels are therefore batch-invariant: a row's result is bit-equal whichever other rows are in the batch.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import math

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

_MAX_PROGRAMS = 264  # two per multiprocessor of a large device
_MAX_SPLITS = 64
_SHARED_MEMORY = 96 * 1024  # bytes that a program may use; a consumer GPU has 99 KiB per multiprocessor


def append_kv(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, length: Tensor) -> None:
    """Write new rows at position `length` of the cache; drop rows beyond its capacity."""
    # keys, values: [1, kv heads, capacity, dim], new: [1, kv heads, rows, dim] with any strides, length: [1]
    _, heads, rows, dim = new_keys.shape
    value_dim = new_values.shape[-1]
    _append_kernel[(rows, heads)](
        keys, values, new_keys, new_values, length, keys.shape[2],
        *keys.stride()[1:3], *values.stride()[1:3], *new_keys.stride()[1:], *new_values.stride()[1:],
        D=dim, DV=value_dim, PAD=triton.next_power_of_2(max(dim, value_dim)), num_warps=1,
    )  # fmt: skip


def append_kv_plain(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, length: Tensor) -> None:
    """PyTorch reference of `append_kv`."""
    start = int(length)
    keys[:, :, start : start + new_keys.shape[2]] = new_keys
    values[:, :, start : start + new_values.shape[2]] = new_values


def decode_attention(
    query: Tensor,  # [1, heads, rows, dim], any strides
    keys: Tensor,  # [1, kv heads, capacity, dim]
    values: Tensor,  # [1, kv heads, capacity, value dim]
    length: Tensor,  # [1], positions in the cache before these rows
    scaling: float,
    window: int | None = None,
) -> Tensor:  # [1, rows, heads, value dim]
    """Attend from row i to all positions up to length + i, or to the last `window` of them."""
    _, heads, rows, dim = query.shape
    kv_heads, capacity, value_dim = keys.shape[1], keys.shape[2], values.shape[3]
    pad, value_pad = (max(16, triton.next_power_of_2(size)) for size in (dim, value_dim))
    itemsize = query.element_size()
    kv_block = kv_block_size(pad, value_pad, itemsize)
    splits = num_kv_splits(kv_heads, capacity, kv_block)
    queries = rows * heads // kv_heads  # per KV head
    query_block = query_block_size(heads // kv_heads, itemsize)
    fitting = (
        n for n in (3, 2) if _shared_memory(pad, value_pad, itemsize, kv_block, query_block, n) <= _SHARED_MEMORY
    )
    stages = next(fitting, 1)
    sums = query.new_empty(splits, rows * heads, value_dim, dtype=torch.float32)
    stats = query.new_empty(2, splits, rows * heads, dtype=torch.float32)  # maximum score, and sum of weights
    out = query.new_empty(1, rows, heads, value_dim)
    _split_kernel[(kv_heads, triton.cdiv(queries, query_block), splits)](
        query, keys, values, length, sums, stats, scaling * math.log2(math.e), rows,
        *query.stride()[1:], *keys.stride()[1:3], *values.stride()[1:3],
        GROUP=heads // kv_heads, HEADS=heads, WINDOW=window or 0, SPLITS=splits, D=dim, DV=value_dim, D_PAD=pad,
        DV_PAD=value_pad, BLOCK_M=query_block, BLOCK_N=kv_block, num_warps=4, num_stages=stages,
    )  # fmt: skip
    _combine_kernel[(rows * heads,)](sums, stats, out, rows * heads, DV=value_dim, DV_PAD=value_pad, SPLITS=splits)
    return out


def kv_block_size(pad: int, value_pad: int, itemsize: int) -> int:
    """Return the cache positions read at a time: the most that fit in shared memory, by the cache's shape only."""
    candidates = (64, 32) if itemsize <= 2 else (32,)
    return next((n for n in candidates if _shared_memory(pad, value_pad, itemsize, n, 16, 3) <= _SHARED_MEMORY), 16)


def query_block_size(group: int, itemsize: int) -> int:
    """Return the queries of one KV head per program: those of four rows, but 16 to 64, by the heads per KV head."""
    return min(64, max(16, triton.next_power_of_2(4 * group))) if itemsize <= 2 else 16  # more would spill registers


def num_kv_splits(kv_heads: int, capacity: int, block: int) -> int:
    """Return the number of splits of the cache: a power of two, by the cache's shape only."""
    splits = min(_MAX_SPLITS, max(1, _MAX_PROGRAMS // kv_heads), -(-capacity // block))
    return 1 << splits.bit_length() - 1


def _shared_memory(pad: int, value_pad: int, itemsize: int, kv_block: int, query_block: int, stages: int) -> int:
    """Estimate the bytes of shared memory of a program: prefetched keys and values, queries, and weights."""
    return (stages - 1) * kv_block * (pad + value_pad) * itemsize + query_block * (pad * itemsize + 6 * kv_block)


def decode_attention_plain(
    query: Tensor, keys: Tensor, values: Tensor, length: Tensor, scaling: float, window: int | None = None
) -> Tensor:
    """PyTorch reference of `decode_attention`, in float32."""
    _, heads, rows, _ = query.shape
    start, end = int(length), int(length) + rows
    key, value = (t[:, :, :end].float().repeat_interleave(heads // t.shape[1], dim=1) for t in (keys, values))
    last = torch.arange(start, end, device=query.device)[:, None]
    position = torch.arange(end, device=query.device)
    visible = position <= last  # [rows, end]
    if window is not None:
        visible &= position > last - window
    scores = (query.float() @ key.transpose(-1, -2) * scaling).masked_fill(~visible, -math.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2).to(query.dtype)


@triton.jit(do_not_specialize=["capacity"])
def _append_kernel(
    keys, values, new_keys, new_values, length, capacity,
    key_head, key_position, value_head, value_position, nk_head, nk_row, nk_dim, nv_head, nv_row, nv_dim,
    D: tl.constexpr, DV: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    position = tl.load(length).to(tl.int64) + row
    d = tl.arange(0, PAD)
    k = tl.load(new_keys + head * nk_head + row * nk_row + d * nk_dim, mask=d < D)
    v = tl.load(new_values + head * nv_head + row * nv_row + d * nv_dim, mask=d < DV)
    tl.store(keys + head * key_head + position * key_position + d, k, mask=(d < D) & (position < capacity))
    tl.store(values + head * value_head + position * value_position + d, v, mask=(d < DV) & (position < capacity))


@triton.jit(do_not_specialize=["rows"])
def _split_kernel(
    query, keys, values, length, sums, stats, scale, rows,
    q_head, q_row, q_dim, key_head, key_position, value_head, value_position,
    GROUP: tl.constexpr, HEADS: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)  # queries of this KV head: row * GROUP + head in the group
    row, head = m // GROUP, kv_head * GROUP + m % GROUP
    d, dv = tl.arange(0, D_PAD), tl.arange(0, DV_PAD)
    kv_length = tl.load(length).to(tl.int32)
    valid = row < rows
    q_ptrs = query + head[:, None] * q_head + row[:, None] * q_row + d[None, :] * q_dim
    q = tl.load(q_ptrs, mask=valid[:, None] & (d[None, :] < D), other=0.0)
    last = kv_length + row  # last position visible to each query
    first = 0  # first block visible to the first row
    if WINDOW > 0:
        first = tl.maximum(kv_length - WINDOW + 1, 0) // BLOCK_N
    start = first + (split + SPLITS - first % SPLITS) % SPLITS
    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    total = tl.zeros((BLOCK_M, DV_PAD), tl.float32)
    for block in range(start, tl.cdiv(kv_length + rows, BLOCK_N), SPLITS):
        j = tl.arange(0, BLOCK_N)
        inside = j < kv_length + rows - block * BLOCK_N
        base = tl.cast(block * BLOCK_N, tl.int64)
        k_ptrs = keys + (kv_head * key_head + base * key_position) + j[None, :] * key_position + d[:, None]
        k = tl.load(k_ptrs, mask=inside[None, :] & (d[:, None] < D), other=0.0)
        position = block * BLOCK_N + j
        visible = position[None, :] <= last[:, None]
        if WINDOW > 0:
            visible &= position[None, :] > last[:, None] - WINDOW
        score = tl.where(visible, tl.dot(q, k, input_precision="ieee") * scale, -float("inf"))
        new_top = tl.maximum(top, tl.max(score, axis=1))
        base_top = tl.where(new_top == -float("inf"), 0.0, new_top)  # nothing visible yet: weights of 0 instead of NaN
        p = tl.exp2(score - base_top[:, None])
        shrink = tl.exp2(top - base_top)
        weight = weight * shrink + tl.sum(p, axis=1)
        v_ptrs = values + (kv_head * value_head + base * value_position) + j[:, None] * value_position + dv[None, :]
        v = tl.load(v_ptrs, mask=inside[:, None] & (dv[None, :] < DV), other=0.0)
        total = tl.dot(p.to(v.dtype), v, total * shrink[:, None], input_precision="ieee")
        top = new_top
    offset = split * rows * HEADS + row * HEADS + head
    tl.store(stats + offset, top, mask=valid)
    tl.store(stats + SPLITS * rows * HEADS + offset, weight, mask=valid)
    nonempty = valid & (weight > 0.0)  # `_combine_kernel` does not read the sums of an empty split
    tl.store(sums + offset[:, None] * DV + dv[None, :], total, mask=nonempty[:, None] & (dv[None, :] < DV))


@triton.jit(do_not_specialize=["queries"])
def _combine_kernel(
    sums, stats, out, queries, DV: tl.constexpr, DV_PAD: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    split, dv = tl.arange(0, SPLITS), tl.arange(0, DV_PAD)
    offset = split * queries + tl.program_id(0)
    weight = tl.load(stats + SPLITS * queries + offset)
    nonempty = weight > 0.0
    top = tl.where(nonempty, tl.load(stats + offset), -float("inf"))
    share = tl.exp2(top - tl.max(top, axis=0))
    ptrs = sums + offset[:, None] * DV + dv[None, :]
    total = tl.sum(tl.load(ptrs, mask=nonempty[:, None] & (dv[None, :] < DV), other=0.0) * share[:, None], axis=0)
    y = total / tl.sum(weight * share, axis=0)
    tl.store(out + tl.program_id(0) * DV + dv, y.to(out.dtype.element_ty), mask=dv < DV)
