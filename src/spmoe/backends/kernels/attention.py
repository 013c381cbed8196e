"""Attention of few new rows over a static cache, whose length only the device knows.

Loop bounds come from that length, so one captured graph serves every context up to the capacity. Blocks of the cache
lie at fixed positions and go to the splits in turn, and what a row does not see adds exactly nothing: a row's result
does not depend, in any bit, on the rows it came with.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import math

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

_PROGRAMS = 264  # two for each multiprocessor of a large device
_MOST_SPLITS = 64
_SHARED = 96 * 1024  # bytes of a multiprocessor's memory that a program may take: a consumer's card has 99 KiB


def append(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, length: Tensor) -> None:
    """Write new rows behind the `length` that the cache holds; what would pass its end is dropped."""
    # keys, values: [1, kv heads, capacity, dim], new: [1, kv heads, rows, dim] of any strides, length: [1]
    _, heads, rows, dim = new_keys.shape
    value_dim = new_values.shape[-1]
    _append_kernel[(rows, heads)](
        keys, values, new_keys, new_values, length, keys.shape[2],
        *keys.stride()[1:3], *values.stride()[1:3], *new_keys.stride()[1:], *new_values.stride()[1:],
        D=dim, DV=value_dim, PAD=triton.next_power_of_2(max(dim, value_dim)), num_warps=1,
    )  # fmt: skip


def append_plain(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, length: Tensor) -> None:
    """What `append` does."""
    start = int(length)
    keys[:, :, start : start + new_keys.shape[2]] = new_keys
    values[:, :, start : start + new_values.shape[2]] = new_values


def decode_attention(
    query: Tensor,  # [1, heads, rows, dim], any strides
    keys: Tensor,  # [1, kv heads, capacity, dim]
    values: Tensor,  # [1, kv heads, capacity, value dim]
    length: Tensor,  # [1], positions held before these rows
    scaling: float,
    window: int | None = None,
) -> Tensor:  # [1, rows, heads, value dim]
    """Row i attends to positions up to length + i, or to the last `window` of them."""
    _, heads, rows, dim = query.shape
    kv_heads, capacity, value_dim = keys.shape[1], keys.shape[2], values.shape[3]
    pad, value_pad = (max(16, triton.next_power_of_2(size)) for size in (dim, value_dim))
    size = query.element_size()
    block = block_for(pad, value_pad, size)
    splits = splits_for(kv_heads, capacity, block)
    queries = rows * heads // kv_heads  # of one head of the cache
    tile = tile_for(heads // kv_heads, size)
    stages = next((n for n in (3, 2) if _shared(pad, value_pad, size, block, tile, n) <= _SHARED), 1)
    sums = query.new_empty(splits, rows * heads, value_dim, dtype=torch.float32)
    stats = query.new_empty(2, splits, rows * heads, dtype=torch.float32)  # largest score, and sum of weights
    out = query.new_empty(1, rows, heads, value_dim)
    _split_kernel[(kv_heads, triton.cdiv(queries, tile), splits)](
        query, keys, values, length, sums, stats, scaling * math.log2(math.e), rows,
        *query.stride()[1:], *keys.stride()[1:3], *values.stride()[1:3],
        GROUP=heads // kv_heads, HEADS=heads, WINDOW=window or 0, SPLITS=splits,
        D=dim, DV=value_dim, D_PAD=pad, DV_PAD=value_pad, BM=tile, BN=block, num_warps=4, num_stages=stages,
    )  # fmt: skip
    _combine_kernel[(rows * heads,)](sums, stats, out, rows * heads, DV=value_dim, DV_PAD=value_pad, SPLITS=splits)
    return out


def block_for(pad: int, value_pad: int, size: int) -> int:
    """Positions read at a time, by the cache's shape alone: as many as a multiprocessor has room for."""
    wanted = (64, 32) if size <= 2 else (32,)
    return next((block for block in wanted if _shared(pad, value_pad, size, block, 16, 3) <= _SHARED), 16)


def tile_for(group: int, size: int) -> int:
    """Queries of one head of the cache at a time, by the heads that share it: of four rows, or of less than that."""
    return min(64, max(16, triton.next_power_of_2(4 * group))) if size <= 2 else 16  # else registers would spill


def _shared(pad: int, value_pad: int, size: int, block: int, tile: int, stages: int) -> int:
    """Bytes that a program takes, about: keys and values under way, queries, and weights."""
    return (stages - 1) * block * (pad + value_pad) * size + tile * (pad * size + 6 * block)


def splits_for(kv_heads: int, capacity: int, block: int) -> int:
    """Into how many parts the cache is read: by its shape alone, a power of two."""
    wanted = min(_MOST_SPLITS, max(1, _PROGRAMS // kv_heads), -(-capacity // block))
    return 1 << wanted.bit_length() - 1


def decode_attention_plain(
    query: Tensor, keys: Tensor, values: Tensor, length: Tensor, scaling: float, window: int | None = None
) -> Tensor:
    """What `decode_attention` computes, in float32."""
    _, heads, rows, _ = query.shape
    start, end = int(length), int(length) + rows
    key, value = (t[:, :, :end].float().repeat_interleave(heads // t.shape[1], dim=1) for t in (keys, values))
    last = torch.arange(start, end, device=query.device)[:, None]
    position = torch.arange(end, device=query.device)
    seen = position <= last  # [rows, end]
    if window is not None:
        seen &= position > last - window
    scores = (query.float() @ key.transpose(-1, -2) * scaling).masked_fill(~seen, -math.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2).to(query.dtype)


@triton.jit(do_not_specialize=["capacity"])
def _append_kernel(
    keys, values, new_keys, new_values, length, capacity,
    key_head, key_at, value_head, value_at, nk_head, nk_row, nk_dim, nv_head, nv_row, nv_dim,
    D: tl.constexpr, DV: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = tl.load(length).to(tl.int64) + row
    d = tl.arange(0, PAD)
    k = tl.load(new_keys + head * nk_head + row * nk_row + d * nk_dim, mask=d < D)
    v = tl.load(new_values + head * nv_head + row * nv_row + d * nv_dim, mask=d < DV)
    tl.store(keys + head * key_head + at * key_at + d, k, mask=(d < D) & (at < capacity))
    tl.store(values + head * value_head + at * value_at + d, v, mask=(d < DV) & (at < capacity))


@triton.jit(do_not_specialize=["rows"])
def _split_kernel(
    query, keys, values, length, sums, stats, scale, rows,
    q_head, q_row, q_dim, key_head, key_at, value_head, value_at,
    GROUP: tl.constexpr, HEADS: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    m = tl.program_id(1) * BM + tl.arange(0, BM)  # queries of this head: row * GROUP + member
    row, head = m // GROUP, kv_head * GROUP + m % GROUP
    d, dv = tl.arange(0, D_PAD), tl.arange(0, DV_PAD)
    held = tl.load(length).to(tl.int32)
    there = row < rows
    q_at = query + head[:, None] * q_head + row[:, None] * q_row + d[None, :] * q_dim
    q = tl.load(q_at, mask=there[:, None] & (d[None, :] < D), other=0.0)
    last = held + row  # position that each query sees last
    first = 0  # block that the first row sees first
    if WINDOW > 0:
        first = tl.maximum(held - WINDOW + 1, 0) // BN
    start = first + (split + SPLITS - first % SPLITS) % SPLITS
    top = tl.full((BM,), -float("inf"), tl.float32)
    weight = tl.zeros((BM,), tl.float32)
    total = tl.zeros((BM, DV_PAD), tl.float32)
    for block in range(start, tl.cdiv(held + rows, BN), SPLITS):
        j = tl.arange(0, BN)
        inside = j < held + rows - block * BN
        base = tl.cast(block * BN, tl.int64)
        k_at = keys + (kv_head * key_head + base * key_at) + j[None, :] * key_at + d[:, None]
        k = tl.load(k_at, mask=inside[None, :] & (d[:, None] < D), other=0.0)
        position = block * BN + j
        seen = position[None, :] <= last[:, None]
        if WINDOW > 0:
            seen &= position[None, :] > last[:, None] - WINDOW
        score = tl.where(seen, tl.dot(q, k, input_precision="ieee") * scale, -float("inf"))
        new_top = tl.maximum(top, tl.max(score, axis=1))
        base_top = tl.where(new_top == -float("inf"), 0.0, new_top)  # nothing seen yet: weights of 0, not of NaN
        p = tl.exp2(score - base_top[:, None])
        shrink = tl.exp2(top - base_top)
        weight = weight * shrink + tl.sum(p, axis=1)
        v_at = values + (kv_head * value_head + base * value_at) + j[:, None] * value_at + dv[None, :]
        v = tl.load(v_at, mask=inside[:, None] & (dv[None, :] < DV), other=0.0)
        total = tl.dot(p.to(v.dtype), v, total * shrink[:, None], input_precision="ieee")
        top = new_top
    place = split * rows * HEADS + row * HEADS + head
    tl.store(stats + place, top, mask=there)
    tl.store(stats + SPLITS * rows * HEADS + place, weight, mask=there)
    some = there & (weight > 0.0)  # where a split saw nothing, nobody looks
    tl.store(sums + place[:, None] * DV + dv[None, :], total, mask=some[:, None] & (dv[None, :] < DV))


@triton.jit(do_not_specialize=["queries"])
def _combine_kernel(
    sums, stats, out, queries, DV: tl.constexpr, DV_PAD: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    split, dv = tl.arange(0, SPLITS), tl.arange(0, DV_PAD)
    place = split * queries + tl.program_id(0)
    weight = tl.load(stats + SPLITS * queries + place)
    some = weight > 0.0
    top = tl.where(some, tl.load(stats + place), -float("inf"))
    share = tl.exp2(top - tl.max(top, axis=0))
    at = sums + place[:, None] * DV + dv[None, :]
    total = tl.sum(tl.load(at, mask=some[:, None] & (dv[None, :] < DV), other=0.0) * share[:, None], axis=0)
    y = total / tl.sum(weight * share, axis=0)
    tl.store(out + tl.program_id(0) * DV + dv, y.to(out.dtype.element_ty), mask=dv < DV)
