"""MoE experts for 1 to 64 rows, computed from the slots in place: no gather, no sort, no host synchronization.

There is one program per tile of an expert's weights and (row, top-k position) pair. The first pair that names an
expert multiplies its weights with all rows at once and keeps the rows that are routed to it, so every weight is read
once. Each pair has its own rows in `ExpertScratch`, and `reduce_experts` adds them in a fixed order. The result
is therefore bit-equal however the experts are grouped into batches, and whichever other rows (up to 16 in all) are in
the batch.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from spmoe.backends.base import MAX_KERNEL_ROWS
from spmoe.backends.kernels.dense import ACTIVATIONS, activate

_MIN_PROGRAMS = 512  # enough loads in flight to saturate the memory of a large device


class ExpertLayout(NamedTuple):
    """Sizes of an expert and the offsets of its weights in a blob, in elements."""

    hidden: int
    ffn: int
    gate_up_offset: int  # [2 * ffn, hidden], rows of the gate first
    down_offset: int  # [hidden, ffn]


class ExpertTile(NamedTuple):
    """Weight tile of one kernel: `block_n` outputs by `block_k` inputs."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Tiles of the gate-up and the down kernel, and the number of parts that the inputs of `down` are split into."""

    up: ExpertTile
    down: ExpertTile
    splits: int


def select_expert_tiles(rows: int, layout: ExpertLayout, top_k: int, dtype: torch.dtype) -> ExpertTiles:
    """Select tiles by the experts' shape; equal for 1 to 16 rows, which makes the kernels batch-invariant."""
    if not 1 <= rows <= MAX_KERNEL_ROWS:
        raise ValueError(f"expected 1 to {MAX_KERNEL_ROWS} rows, got {rows}")
    hidden, ffn = layout.hidden, layout.ffn
    if dtype.itemsize > 2:  # no tensor cores: small tiles, or registers spill
        up, down = (32, 32, 4, 3), (32, 32, 4, 3)
    elif rows > 16:  # more rows to hold: all stages must fit the 99 KiB of shared memory of a consumer GPU
        up, down = (32, 128, 4, 3), (32, 128, 4, 3)
    elif hidden * ffn >= 1 << 24:  # this and the next: the fastest, over 1 and 5 rows, of a sweep on an H200
        up, down = (32, 256, 4, 3), (32, 128, 4, 4)
    else:
        up, down = (32, 128, 4, 3), (64, 128, 4, 4)
    up_tile = ExpertTile(_fit_block(up[0], ffn), _fit_block(up[1], hidden), *up[2:])
    down_tile = ExpertTile(_fit_block(down[0], hidden), _fit_block(down[1], ffn), *down[2:])
    splits, programs = 1, triton.cdiv(hidden, down_tile.block_n) * top_k
    while splits * programs < _MIN_PROGRAMS and splits < 8 and ffn % (2 * splits * down_tile.block_k) == 0:
        splits *= 2
    return ExpertTiles(up_tile, down_tile, splits)


def _fit_block(block: int, size: int) -> int:
    """Shrink a block to the size, and halve it down to 32 until it divides the size."""
    block = min(block, max(16, triton.next_power_of_2(size)))
    while block > 32 and size % block:
        block //= 2
    return block


@dataclass(frozen=True, slots=True)
class ExpertScratch:
    """Intermediate results of every (row, top-k position) pair; each batch fills the pairs of its experts."""

    up: Tensor  # [rows * top_k, ffn]
    partial_sums: Tensor  # [splits, rows * top_k, hidden] float32
    tiles: ExpertTiles


class ScratchBuffer:
    """Fixed allocation that holds one `ExpertScratch` of up to 64 rows; its address never changes."""

    def __init__(self, top_k: int, layout: ExpertLayout, dtype: torch.dtype, device: torch.device | str) -> None:
        self._shape = (top_k, layout, dtype)
        limits = (16, MAX_KERNEL_ROWS)  # tiles, and so splits, are equal for all rows up to each of these
        sums = max(rows * select_expert_tiles(rows, layout, top_k, dtype).splits for rows in limits)
        self._up = torch.empty(MAX_KERNEL_ROWS * top_k * layout.ffn, dtype=dtype, device=device)
        self._partial_sums = torch.empty(sums * top_k * layout.hidden, dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self._up.nbytes + self._partial_sums.nbytes

    def scratch(self, rows: int) -> ExpertScratch:
        """Return uninitialized views for this many rows."""
        top_k, layout, dtype = self._shape
        tiles, pairs = select_expert_tiles(rows, layout, top_k, dtype), rows * top_k
        up = self._up[: pairs * layout.ffn].view(pairs, layout.ffn)
        sums = self._partial_sums[: tiles.splits * pairs * layout.hidden].view(tiles.splits, pairs, layout.hidden)
        return ExpertScratch(up, sums, tiles)


def run_expert_batch(
    hidden: Tensor,  # [rows, hidden]
    index: Tensor,  # [rows, top_k] int64, ids of the routed experts, distinct within a row
    weights: Tensor,  # [rows, top_k]
    table: Tensor,  # [experts] int32, slot of each expert in the batch, -1 for all others
    arena: Tensor,  # [slots, blob elements]
    layout: ExpertLayout,
    activation: str,
    scratch: ExpertScratch,
) -> None:
    """Compute every pair whose expert is in the batch into `scratch`; leave all other pairs untouched."""
    (rows, top_k), (up, down) = index.shape, (scratch.tiles.up, scratch.tiles.down)
    hidden, index, weights = hidden.contiguous(), index.contiguous(), weights.contiguous()
    padded = max(16, triton.next_power_of_2(rows))
    sizes = {
        "HIDDEN": layout.hidden, "FFN": layout.ffn, "BLOB": arena.stride(0), "TOP_K": top_k,
        "ROWS": padded, "PAIRS": triton.next_power_of_2(padded * top_k), "TOP_K_PAD": triton.next_power_of_2(top_k),
    }  # fmt: skip
    _up_kernel[triton.cdiv(layout.ffn, up.block_n), rows * top_k](
        hidden, index, table, arena, scratch.up, rows, **sizes, OFFSET=layout.gate_up_offset,
        ACTIVATION=activation, BLOCK_N=up.block_n, BLOCK_K=up.block_k, num_warps=up.num_warps, num_stages=up.num_stages,
    )  # fmt: skip
    _down_kernel[triton.cdiv(layout.hidden, down.block_n), rows * top_k, scratch.tiles.splits](
        scratch.up, index, weights, table, arena, scratch.partial_sums, rows, **sizes, OFFSET=layout.down_offset,
        SPLITS=scratch.tiles.splits, BLOCK_N=down.block_n, BLOCK_K=down.block_k, num_warps=down.num_warps,
        num_stages=down.num_stages,
    )  # fmt: skip


def reduce_experts(scratch: ExpertScratch, out: Tensor) -> Tensor:
    """Sum each row's pairs, by top-k position and then by split, into `out`."""  # out: [rows, hidden]
    splits, pairs, hidden = scratch.partial_sums.shape
    rows, block = out.shape[0], min(256, triton.next_power_of_2(hidden))
    _reduce_kernel[triton.cdiv(hidden, block), rows](
        scratch.partial_sums, out, pairs, HIDDEN=hidden, TOP_K=pairs // rows, SPLITS=splits, BLOCK_N=block, num_warps=2
    )
    return out


def run_expert_batch_plain(
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    table: Tensor,
    arena: Tensor,
    layout: ExpertLayout,
    activation: str,
    scratch: ExpertScratch,
) -> None:
    """PyTorch reference of `run_expert_batch`: one expert after the other."""
    size, top_k, splits = layout.hidden * layout.ffn, index.shape[1], scratch.partial_sums.shape[0]
    blocks = triton.cdiv(layout.ffn, scratch.tiles.down.block_k)
    split_size = triton.cdiv(blocks, splits) * scratch.tiles.down.block_k
    for expert in index.unique().tolist():
        if table[expert] < 0:
            continue
        blob = arena[table[expert]].float()
        gate, up = blob[layout.gate_up_offset :][: 2 * size].view(2, layout.ffn, layout.hidden)
        down = blob[layout.down_offset :][:size].view(layout.hidden, layout.ffn)
        row, position = torch.where(index == expert)
        pair, x = row * top_k + position, hidden[row].float()
        scratch.up[pair] = (ACTIVATIONS[activation](x @ gate.T) * (x @ up.T)).to(scratch.up.dtype)
        for split in range(splits):
            inputs = slice(split * split_size, (split + 1) * split_size)
            y = scratch.up[pair, inputs].float() @ down[:, inputs].T
            scratch.partial_sums[split, pair] = y * weights[row, position, None].float()


def reduce_experts_plain(scratch: ExpertScratch, out: Tensor) -> Tensor:
    """PyTorch reference of `reduce_experts`."""
    sums = scratch.partial_sums.unflatten(1, (out.shape[0], -1))  # [splits, rows, top_k, hidden]
    total = torch.zeros_like(out, dtype=torch.float32)
    for position in range(sums.shape[2]):
        for split in range(sums.shape[0]):
            total += sums[split, :, position]
    return out.copy_(total)


@triton.jit
def _is_skipped(index, pair, expert, slot, PAIRS: tl.constexpr):
    """Return whether an earlier pair computes this expert, or the expert is not in this batch."""
    i = tl.arange(0, PAIRS)
    earlier = tl.load(index + i, mask=i < pair, other=-1)
    return (tl.sum((earlier == expert).to(tl.int32), axis=0) > 0) | (slot < 0)


@triton.jit
def _top_k_position(index, m, expert, rows, TOP_K: tl.constexpr, TOP_K_PAD: tl.constexpr):
    """Return the expert's top-k position in each row, or -1 for rows that are not routed to it."""
    c = tl.arange(0, TOP_K_PAD)
    in_range = (m[:, None] < rows) & (c[None, :] < TOP_K)
    routed = tl.load(index + m[:, None] * TOP_K + c[None, :], mask=in_range, other=-1)
    return tl.max(tl.where(in_range & (routed == expert), c[None, :], -1), axis=1)


@triton.jit
def _load_tile(ptrs, n, k, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, K_MULTIPLE: tl.constexpr):
    """Load a tile of weights; without a mask if the tiles divide the matrix evenly."""
    if N % BLOCK_N == 0 and K % K_MULTIPLE == 0:
        tile = tl.load(ptrs)
    else:
        tile = tl.load(ptrs, mask=(n[None, :] < N) & (k[:, None] < K), other=0.0)
    return tile


@triton.jit(do_not_specialize=["rows"])
def _up_kernel(
    hidden, index, table, arena, up, rows,
    HIDDEN: tl.constexpr, FFN: tl.constexpr, BLOB: tl.constexpr, OFFSET: tl.constexpr, TOP_K: tl.constexpr,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, TOP_K_PAD: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    expert = tl.load(index + pair)
    slot = tl.load(table + expert).to(tl.int64)
    if _is_skipped(index, pair, expert, slot, PAIRS):
        return
    blob = arena + (slot * BLOB + OFFSET)
    m, k = tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offsets = n[None, :] * HIDDEN + k[:, None]  # [BLOCK_K, BLOCK_N]
    gate = tl.zeros((ROWS, BLOCK_N), tl.float32)
    value = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for start in range(0, HIDDEN, BLOCK_K):
        inputs = start + k
        in_range = (m[:, None] < rows) & (inputs[None, :] < HIDDEN)
        x = tl.load(hidden + m[:, None] * HIDDEN + inputs[None, :], mask=in_range, other=0.0)
        w = _load_tile(blob + offsets + start, n, inputs, FFN, HIDDEN, BLOCK_N, BLOCK_K)
        gate = tl.dot(x, w, gate, input_precision="ieee")
        w = _load_tile(blob + FFN * HIDDEN + offsets + start, n, inputs, FFN, HIDDEN, BLOCK_N, BLOCK_K)
        value = tl.dot(x, w, value, input_precision="ieee")
    position = _top_k_position(index, m, expert, rows, TOP_K, TOP_K_PAD)
    y = activate(gate, ACTIVATION) * value
    out_ptrs = up + (m * TOP_K + position)[:, None] * FFN + n[None, :]
    tl.store(out_ptrs, y.to(up.dtype.element_ty), mask=(position[:, None] >= 0) & (n[None, :] < FFN))


@triton.jit(do_not_specialize=["rows"])
def _down_kernel(
    up, index, weights, table, arena, partial_sums, rows,
    HIDDEN: tl.constexpr, FFN: tl.constexpr, BLOB: tl.constexpr, OFFSET: tl.constexpr, TOP_K: tl.constexpr,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, TOP_K_PAD: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    SPLIT_SIZE: tl.constexpr = (FFN + BLOCK_K * SPLITS - 1) // (BLOCK_K * SPLITS) * BLOCK_K
    pair, split = tl.program_id(1), tl.program_id(2)
    expert = tl.load(index + pair)
    slot = tl.load(table + expert).to(tl.int64)
    if _is_skipped(index, pair, expert, slot, PAIRS):
        return
    blob = arena + (slot * BLOB + OFFSET)
    m, k = tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    position = _top_k_position(index, m, expert, rows, TOP_K, TOP_K_PAD)
    routed, pairs = position[:, None] >= 0, (m * TOP_K + position)[:, None]
    offsets = n[None, :] * FFN + k[:, None]  # [BLOCK_K, BLOCK_N]
    y = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for step in range(0, SPLIT_SIZE, BLOCK_K):
        start = split * SPLIT_SIZE + step
        inputs = start + k
        x = tl.load(up + pairs * FFN + inputs[None, :], mask=routed & (inputs[None, :] < FFN), other=0.0)
        w = _load_tile(blob + offsets + start, n, inputs, HIDDEN, FFN, BLOCK_N, BLOCK_K * SPLITS)
        y = tl.dot(x, w, y, input_precision="ieee")
    y *= tl.load(weights + pairs, mask=routed, other=0.0).to(tl.float32)
    out_ptrs = partial_sums + (split * rows * TOP_K + pairs) * HIDDEN + n[None, :]
    tl.store(out_ptrs, y, mask=routed & (n[None, :] < HIDDEN))


@triton.jit(do_not_specialize=["pairs"])
def _reduce_kernel(
    partial_sums, out, pairs, HIDDEN: tl.constexpr, TOP_K: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    row = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for position in tl.static_range(TOP_K):
        for split in tl.static_range(SPLITS):
            offsets = (split * pairs + row * TOP_K + position) * HIDDEN + n
            total += tl.load(partial_sums + offsets, mask=n < HIDDEN, other=0.0)
    tl.store(out + row * HIDDEN + n, total.to(out.dtype.element_ty), mask=n < HIDDEN)
