"""Decode attention of a few new rows over ranges of a KV arena that are known to the device only.

`ranges` has a column per sequence: the start of its range, the positions before its new rows, and the capacity. Loop
bounds come from there, so one captured graph serves all sequences of every length. Each sequence has an equal share of
the rows. Blocks of a sequence start at fixed positions and are assigned to the splits round-robin, and masked positions
contribute exactly zero. The kernels are therefore batch-invariant: a row's result is bit-equal whichever other rows are
in the batch, and wherever its sequence lies.
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


def append_kv(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, ranges: Tensor) -> None:
    """Append new rows to their sequences; drop rows beyond the capacity."""
    # keys, values: [1, kv heads, positions, dim], new: [1, kv heads, rows, dim], any strides, ranges: [3, sequences]
    _, heads, rows, dim = new_keys.shape
    value_dim, sequences = new_values.shape[-1], ranges.shape[1]
    _append_kernel[(rows, heads)](
        keys, values, new_keys, new_values, ranges, sequences, rows // sequences,
        *keys.stride()[1:3], *values.stride()[1:3], *new_keys.stride()[1:], *new_values.stride()[1:],
        D=dim, DV=value_dim, PAD=triton.next_power_of_2(max(dim, value_dim)), num_warps=1,
    )  # fmt: skip


def append_kv_plain(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, ranges: Tensor) -> None:
    """PyTorch reference of `append_kv`."""
    for row, position in enumerate(_row_positions(ranges, new_keys.shape[2])):
        start, _, capacity = ranges[:, row * ranges.shape[1] // new_keys.shape[2]].tolist()
        if position < capacity:
            keys[:, :, start + position] = new_keys[:, :, row]
            values[:, :, start + position] = new_values[:, :, row]


def _row_positions(ranges: Tensor, rows: int) -> list[int]:
    """Return the position of each row in its sequence."""
    share = rows // ranges.shape[1]
    return [length + row for length in ranges[1].tolist() for row in range(share)]


def decode_attention(
    query: Tensor,  # [1, heads, rows, dim], any strides
    keys: Tensor,  # [1, kv heads, positions, dim]
    values: Tensor,  # [1, kv heads, positions, value dim]
    ranges: Tensor,  # [3, sequences] int64
    scaling: float,
    window: int | None = None,
    sinks: Tensor | None = None,  # [heads]
) -> Tensor:  # [1, rows, heads, value dim]
    """Attend from each row to the positions of its sequence up to its own, or to the last `window` of them.

    `sinks`: score of a further position of each head, whose value is zero.
    """
    _, heads, rows, dim = query.shape
    kv_heads, value_dim, sequences = keys.shape[1], values.shape[3], ranges.shape[1]
    pad, value_pad = (max(16, triton.next_power_of_2(size)) for size in (dim, value_dim))
    itemsize = query.element_size()
    kv_block = kv_block_size(pad, value_pad, itemsize)
    splits = num_kv_splits(kv_heads)
    query_block = query_block_size(heads // kv_heads, itemsize)
    share = rows // sequences
    tiles = triton.cdiv(share * heads // kv_heads, query_block)  # of queries of one sequence and KV head
    fitting = (
        n for n in (3, 2) if _shared_memory(pad, value_pad, itemsize, kv_block, query_block, n) <= _SHARED_MEMORY
    )
    stages = next(fitting, 1)
    sums = query.new_empty(splits, rows * heads, value_dim, dtype=torch.float32)
    stats = query.new_empty(2, splits, rows * heads, dtype=torch.float32)  # maximum score, and sum of weights
    out = query.new_empty(1, rows, heads, value_dim)
    _split_kernel[(kv_heads, sequences * tiles, splits)](
        query, keys, values, ranges, sums, stats, scaling * math.log2(math.e), sequences, share, tiles,
        *query.stride()[1:], *keys.stride()[1:3], *values.stride()[1:3],
        GROUP=heads // kv_heads, HEADS=heads, WINDOW=window or 0, SPLITS=splits, D=dim, DV=value_dim, D_PAD=pad,
        DV_PAD=value_pad, BLOCK_M=query_block, BLOCK_N=kv_block, num_warps=4, num_stages=stages,
    )  # fmt: skip
    _combine_kernel[(rows * heads,)](
        sums, stats, sums if sinks is None else sinks, out, rows * heads, HEADS=heads, SINKS=sinks is not None,
        DV=value_dim, DV_PAD=value_pad, SPLITS=splits,
    )  # fmt: skip
    return out


def kv_block_size(pad: int, value_pad: int, itemsize: int) -> int:
    """Return the cache positions read at a time: the most that fit in shared memory, by the cache's shape only."""
    candidates = (64, 32) if itemsize <= 2 else (32,)
    return next((n for n in candidates if _shared_memory(pad, value_pad, itemsize, n, 16, 3) <= _SHARED_MEMORY), 16)


def query_block_size(group: int, itemsize: int) -> int:
    """Return the queries of one KV head per program: those of four rows, but 16 to 64, by the heads per KV head."""
    return min(64, max(16, triton.next_power_of_2(4 * group))) if itemsize <= 2 else 16  # more would spill registers


def num_kv_splits(kv_heads: int) -> int:
    """Return the number of splits of a sequence: a power of two, by the model's shape only."""
    return 1 << min(_MAX_SPLITS, max(1, _MAX_PROGRAMS // kv_heads)).bit_length() - 1


def _shared_memory(pad: int, value_pad: int, itemsize: int, kv_block: int, query_block: int, stages: int) -> int:
    """Estimate the bytes of shared memory of a program: prefetched keys and values, queries, and weights."""
    return (stages - 1) * kv_block * (pad + value_pad) * itemsize + query_block * (pad * itemsize + 6 * kv_block)


def decode_attention_plain(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    ranges: Tensor,
    scaling: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """PyTorch reference of `decode_attention`, in float32."""
    heads, found = query.shape[1], []
    for queries, (start, length, _) in zip(query.chunk(ranges.shape[1], dim=2), ranges.T.tolist(), strict=True):
        end = length + queries.shape[2]
        key, value = (
            t[:, :, start : start + end].float().repeat_interleave(heads // t.shape[1], dim=1) for t in (keys, values)
        )
        last = torch.arange(length, end, device=query.device)[:, None]
        position = torch.arange(end, device=query.device)
        visible = position <= last  # [rows, end]
        if window is not None:
            visible &= position > last - window
        scores = (queries.float() @ key.transpose(-1, -2) * scaling).masked_fill(~visible, -math.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(1, heads, len(last), 1)], dim=-1)
        shares = scores.softmax(-1)[..., :end]
        found.append((shares @ value).transpose(1, 2).to(query.dtype))
    return torch.cat(found, dim=1)


@triton.jit(do_not_specialize=["sequences", "share"])
def _append_kernel(
    keys, values, new_keys, new_values, ranges, sequences, share,
    key_head, key_position, value_head, value_position, nk_head, nk_row, nk_dim, nv_head, nv_row, nv_dim,
    D: tl.constexpr, DV: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    sequence = row // share
    position = tl.load(ranges + sequences + sequence) + row % share
    inside = position < tl.load(ranges + 2 * sequences + sequence)
    position += tl.load(ranges + sequence)
    d = tl.arange(0, PAD)
    k = tl.load(new_keys + head * nk_head + row * nk_row + d * nk_dim, mask=d < D)
    v = tl.load(new_values + head * nv_head + row * nv_row + d * nv_dim, mask=d < DV)
    tl.store(keys + head * key_head + position * key_position + d, k, mask=(d < D) & inside)
    tl.store(values + head * value_head + position * value_position + d, v, mask=(d < DV) & inside)


@triton.jit(do_not_specialize=["sequences", "share", "tiles"])
def _split_kernel(
    query, keys, values, ranges, sums, stats, scale, sequences, share, tiles,
    q_head, q_row, q_dim, key_head, key_position, value_head, value_position,
    GROUP: tl.constexpr, HEADS: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    kv_head, split, rows = tl.program_id(0).to(tl.int64), tl.program_id(2), sequences * share
    sequence = tl.program_id(1) // tiles
    # queries of this sequence and KV head: row * GROUP + head in the group
    m = (tl.program_id(1) % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    own_row, head = m // GROUP, kv_head * GROUP + m % GROUP
    row = sequence * share + own_row
    d, dv = tl.arange(0, D_PAD), tl.arange(0, DV_PAD)
    kv_start = tl.load(ranges + sequence)
    kv_length = tl.load(ranges + sequences + sequence).to(tl.int32)
    valid = own_row < share
    q_ptrs = query + head[:, None] * q_head + row[:, None] * q_row + d[None, :] * q_dim
    q = tl.load(q_ptrs, mask=valid[:, None] & (d[None, :] < D), other=0.0)
    last = kv_length + own_row  # last position visible to each query
    first = 0  # first block visible to the first row
    if WINDOW > 0:
        first = tl.maximum(kv_length - WINDOW + 1, 0) // BLOCK_N
    start = first + (split + SPLITS - first % SPLITS) % SPLITS
    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    total = tl.zeros((BLOCK_M, DV_PAD), tl.float32)
    for block in range(start, tl.cdiv(kv_length + share, BLOCK_N), SPLITS):
        j = tl.arange(0, BLOCK_N)
        inside = j < kv_length + share - block * BLOCK_N
        base = kv_start + block * BLOCK_N
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
    sums, stats, sinks, out, queries, HEADS: tl.constexpr, SINKS: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    split, dv = tl.arange(0, SPLITS), tl.arange(0, DV_PAD)
    offset = split * queries + tl.program_id(0)
    weight = tl.load(stats + SPLITS * queries + offset)
    nonempty = weight > 0.0
    top = tl.where(nonempty, tl.load(stats + offset), -float("inf"))
    highest = tl.max(top, axis=0)
    if SINKS:
        sink = tl.load(sinks + tl.program_id(0) % HEADS).to(tl.float32) * 1.4426950408889634  # log2(e)
        highest = tl.maximum(highest, sink)
    share = tl.exp2(top - highest)
    ptrs = sums + offset[:, None] * DV + dv[None, :]
    total = tl.sum(tl.load(ptrs, mask=nonempty[:, None] & (dv[None, :] < DV), other=0.0) * share[:, None], axis=0)
    weights = tl.sum(weight * share, axis=0)
    if SINKS:
        weights += tl.exp2(sink - highest)
    y = total / weights
    tl.store(out + tl.program_id(0) * DV + dv, y.to(out.dtype.element_ty), mask=dv < DV)
