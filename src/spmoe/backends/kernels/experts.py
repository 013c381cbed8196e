"""MoE experts for 1 to 64 rows, computed from the slots in place: no gather, no sort, no host synchronization.

There is one program per tile of an expert's weights and (row, top-k position) pair. The first pair that names an
expert multiplies its weights with all rows at once and keeps the rows that are routed to it, so every weight is read
once. Each pair has its own rows in `ExpertScratch`, and `reduce_experts` adds them in a fixed order. The result
is therefore bit-equal however the experts are grouped into batches, and whichever other rows (up to 16 in all) are in
the batch. Weights may be dense or packed; `packed.py` loads them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from spmoe.backends.base import INVARIANT_ROWS, MAX_KERNEL_ROWS, Gate
from spmoe.backends.kernels.dense import ACTIVATIONS, activate
from spmoe.backends.kernels.packed import FOUR_BITS, SlotMatrix, multiply, slot_matrix
from spmoe.formats.bf16_packed import BLOCK as PACKED_BLOCK
from spmoe.formats.expert import ExpertFormat, Shapes

_MIN_PROGRAMS = 512  # enough loads in flight to saturate the memory of a large device
_MIN_SPLIT = 512  # inputs of a split; fewer are read in less time than a program takes to start
_BFLOAT16_SUMS = ("dense", "bf16-packed")  # kinds whose sums have the same order


class ExpertShape(NamedTuple):
    """Sizes and storage of an expert, which select the kernels' tiles."""

    hidden: int
    ffn: int
    kind: str  # of `KernelWeights`
    dtype: torch.dtype  # that weights are dequantized to


class SlotExperts(NamedTuple):
    """The experts in all slots, as kernels read them."""

    shape: ExpertShape
    gate_up: SlotMatrix  # [2 * ffn, hidden]; rows of gate and up as `Gate` says
    down: SlotMatrix  # [hidden, ffn]


def slot_experts(matrices: Mapping[str, SlotMatrix | None], shapes: Shapes) -> SlotExperts | None:
    """Describe the experts with these projections; None if kernels cannot run them."""
    # matrices: by name; shapes: of one expert's tensors in its module
    gate_up, down = matrices.get("gate_up_proj"), matrices.get("down_proj")
    if gate_up is None or down is None:
        return None
    biases = {f"{matrix.name}_bias" for matrix in (gate_up, down) if matrix.bias is not None}
    if shapes.keys() != {gate_up.name, down.name} | biases:
        return None
    return SlotExperts(ExpertShape(down.outs, down.ins, down.kind, down.format.dtype), gate_up, down)


def slot_matrices(slots: Tensor, format: ExpertFormat, shapes: Shapes) -> dict[str, SlotMatrix | None]:
    """Describe the projections of the experts in these slots; None for those that kernels cannot read."""
    # slots: [slots, blob bytes] uint8
    return {name: slot_matrix(slots, format, shapes, name) for name, shape in shapes.items() if len(shape) == 2}


class ExpertTile(NamedTuple):
    """Weight tile of one kernel: `block_n` outputs (of gate and of up) by `block_k` inputs."""

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


def select_expert_tiles(rows: int, shape: ExpertShape, top_k: int) -> ExpertTiles:
    """Select tiles by the experts' shape; equal for 1 to 16 rows, which makes the kernels batch-invariant.

    `bf16-packed` gets the splits of bfloat16: sums in the same order give equal bits. Quantized kinds have two warps:
    with four, Triton uses warp-group instructions for some numbers of rows, which sum in another order.
    """
    if not 1 <= rows <= MAX_KERNEL_ROWS:
        raise ValueError(f"expected 1 to {MAX_KERNEL_ROWS} rows, got {rows}")
    hidden, ffn, kind, dtype = shape
    if dtype.itemsize > 2:  # no tensor cores: small tiles, or registers spill
        up = down = (32, 64 if kind in FOUR_BITS else 32, 4, 3)
    elif rows > INVARIANT_ROWS:  # more rows to hold: all stages must fit the 99 KiB of shared memory of a consumer GPU
        up = down = (32, 128, 4 if kind in _BFLOAT16_SUMS else 2, 3)
    elif kind in FOUR_BITS:  # with two rows of gate and up, an e2m1 tile of 32 outputs leaves too few registers
        up, down = (32 if kind == "int4" else 16, 256, 2, 3), (64, 256, 2, 3)
    elif kind not in _BFLOAT16_SUMS:
        up, down = (16, 256, 2, 3), (64, 128, 2, 4)
    elif hidden * ffn >= 1 << 24:  # this and the next: the fastest, over 1 and 5 rows, of a sweep on an H200
        up, down = (32, 256, 4, 3), (32, 128, 4, 4)
    else:
        up, down = (32, 128, 4, 3), (64, 128, 4, 4)
    splits, programs = 1, triton.cdiv(hidden, _fit_block(down[0], hidden)) * top_k
    while splits * programs < _MIN_PROGRAMS and splits < 8 and _can_split(ffn, 2 * splits, kind):
        splits *= 2
    if kind == "bf16-packed":
        up_k = down_k = PACKED_BLOCK
        if rows <= INVARIANT_ROWS and dtype.itemsize == 2:
            up, down = (16, up_k, 2, 3), (32, down_k, 2, 3)
        else:
            up, down = (32, up_k, 4, 4), (32, down_k, 4, 4)
    elif kind == "dense" or (dtype.itemsize > 2 and kind not in FOUR_BITS):
        up_k, down_k = _fit_block(up[1], hidden), _fit_block(down[1], ffn)
    else:
        up_k, down_k = _cover_block(up[1], hidden, 1), _cover_block(down[1], ffn, splits)
    return ExpertTiles(
        ExpertTile(_fit_block(up[0], ffn), up_k, *up[2:]),
        ExpertTile(_fit_block(down[0], hidden), down_k, *down[2:]),
        splits,
    )


def _can_split(ffn: int, splits: int, kind: str) -> bool:
    """Return whether the inputs of `down` can be split into so many parts.

    Those of dense weights are split evenly, whatever their tile: sums of `bf16-packed` weights have the same order.
    """
    return ffn % (splits * PACKED_BLOCK) == 0 if kind in _BFLOAT16_SUMS else ffn >= splits * _MIN_SPLIT


def _fit_block(block: int, size: int) -> int:
    """Shrink a block to the size, and halve it down to 32 until it divides the size."""
    block = min(block, max(16, triton.next_power_of_2(size)))
    while block > 32 and size % block:
        block //= 2
    return block


def _cover_block(block: int, size: int, splits: int) -> int:
    """Shrink a block to the size, and halve it down to 64 until the last one of each split is nearly full.

    Packed weights need long rows of a tile: a masked last block costs less than blocks that divide the size. Four
    products of 4-bit weights need 16 inputs each.
    """
    block = min(block, max(64, triton.next_power_of_2(size)))
    while block > 64 and triton.cdiv(size, block * splits) * block * splits > 1.1 * size:
        block //= 2
    return block


@dataclass(frozen=True, slots=True)
class ExpertScratch:
    """Intermediate results of every (row, top-k position) pair; each batch fills the pairs of its experts."""

    up: Tensor  # [rows * top_k, ffn]
    partial_sums: Tensor  # [splits, rows * top_k, hidden] float32
    tiles: ExpertTiles


class ScratchBuffer:
    """Fixed allocation that holds one `ExpertScratch` of up to so many rows; its address never changes."""

    def __init__(
        self, top_k: int, shape: ExpertShape, device: torch.device | str, max_rows: int = MAX_KERNEL_ROWS
    ) -> None:
        self._top_k = top_k
        self._shape = shape
        limits = (min(INVARIANT_ROWS, max_rows), max_rows)  # tiles, and so splits, are equal up to the first, and above
        sums = max(rows * select_expert_tiles(rows, shape, top_k).splits for rows in limits)
        self._up = torch.empty(max_rows * top_k * shape.ffn, dtype=shape.dtype, device=device)
        self._partial_sums = torch.empty(sums * top_k * shape.hidden, dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self._up.nbytes + self._partial_sums.nbytes

    def scratch(self, rows: int) -> ExpertScratch:
        """Return uninitialized views for this many rows."""
        shape = self._shape
        tiles, pairs = select_expert_tiles(rows, shape, self._top_k), rows * self._top_k
        up = self._up[: pairs * shape.ffn].view(pairs, shape.ffn)
        sums = self._partial_sums[: tiles.splits * pairs * shape.hidden].view(tiles.splits, pairs, shape.hidden)
        return ExpertScratch(up, sums, tiles)


def run_expert_batch(
    hidden: Tensor,  # [rows, hidden]
    index: Tensor,  # [rows, top_k] int64, ids of the routed experts, distinct within a row
    weights: Tensor,  # [rows, top_k]
    table: Tensor,  # [experts] int32, slot of each expert in the batch, -1 for all others
    experts: SlotExperts,
    gate: Gate,
    scratch: ExpertScratch,
) -> None:
    """Compute every pair whose expert is in the batch into `scratch`; leave all other pairs untouched."""
    (rows, top_k), (up, down), splits = index.shape, (scratch.tiles.up, scratch.tiles.down), scratch.tiles.splits
    hidden, index, weights = hidden.contiguous(), index.contiguous(), weights.contiguous()
    padded = max(_least_rows(experts.shape), triton.next_power_of_2(rows))
    sizes = {
        "HIDDEN": experts.shape.hidden, "FFN": experts.shape.ffn, "TOP_K": top_k, "ROWS": padded,
        "PAIRS": triton.next_power_of_2(padded * top_k), "TOP_K_PAD": triton.next_power_of_2(top_k),
    }  # fmt: skip
    matrix = experts.gate_up
    _up_kernel[triton.cdiv(experts.shape.ffn, up.block_n), rows * top_k](
        hidden, index, table, *matrix.tensors, _bias(matrix), scratch.up, rows, **sizes, **matrix.constants,
        **_bias_constants(matrix), MASKED=matrix.ins % up.block_k != 0, ACTIVATION=gate.activation, ALPHA=gate.alpha,
        LIMIT=gate.limit, UP_OFFSET=gate.up_offset, INTERLEAVED=gate.interleaved, BLOCK_N=up.block_n,
        BLOCK_K=up.block_k, num_warps=up.num_warps, num_stages=up.num_stages,
    )  # fmt: skip
    matrix = experts.down
    _down_kernel[triton.cdiv(experts.shape.hidden, down.block_n), rows * top_k, splits](
        scratch.up, index, weights, table, *matrix.tensors, _bias(matrix), scratch.partial_sums, rows, **sizes,
        **matrix.constants, **_bias_constants(matrix), MASKED=matrix.ins % (down.block_k * splits) != 0, SPLITS=splits,
        BLOCK_N=down.block_n, BLOCK_K=down.block_k, num_warps=down.num_warps, num_stages=down.num_stages,
    )  # fmt: skip


def _least_rows(shape: ExpertShape) -> int:
    """Return the number of rows that fewer ones are padded to: what tensor cores multiply at a time."""
    return 16 if shape.kind in _BFLOAT16_SUMS or shape.dtype.itemsize > 2 else 8


def _bias(matrix: SlotMatrix) -> Tensor:
    return matrix.tensors[0] if matrix.bias is None else matrix.bias.slots


def _bias_constants(matrix: SlotMatrix) -> dict[str, object]:
    stride, offset = (0, 0) if matrix.bias is None else (matrix.bias.slots.stride(0), matrix.bias.offset)
    return {"HAS_BIAS": matrix.bias is not None, "B_BLOB": stride, "B_OFFSET": offset}


def reduce_experts(scratch: ExpertScratch, out: Tensor) -> Tensor:
    """Sum each row's pairs, by top-k position and then by split, into `out`."""  # out: [rows, hidden]
    splits, pairs, hidden = scratch.partial_sums.shape
    rows, block = out.shape[0], min(256, triton.next_power_of_2(hidden))
    _reduce_kernel[triton.cdiv(hidden, block), rows](
        scratch.partial_sums, out, pairs, HIDDEN=hidden, TOP_K=pairs // rows, SPLITS=splits, BLOCK_N=block, num_warps=2
    )
    return out


def place_results(values: Tensor, pairs: Tensor, first: int, sums: Tensor, limit: Tensor | None = None) -> None:
    """Copy results that the CPU has computed, in pinned memory, to the rows of their pairs.

    A result of pair p goes to row p - first, if there is such a row: `sums` is that of one pass. `limit`: number of
    results that there are, on the device; None: all.
    """
    # values: [results, hidden] float32, pairs: [results] int64, sums: [splits, pairs, hidden] float32, limit: [1] int64
    splits, count, hidden = sums.shape
    block = min(1024, triton.next_power_of_2(hidden))
    _place_kernel[triton.cdiv(hidden, block), len(pairs)](
        values,
        pairs,
        sums,
        limit,
        first,
        count,
        HIDDEN=hidden,
        SPLITS=splits,
        BLOCK_N=block,
        num_warps=4,
    )


def place_results_plain(values: Tensor, pairs: Tensor, first: int, sums: Tensor, limit: Tensor | None = None) -> None:
    """PyTorch reference of `place_results`."""
    values, pairs = (one[: len(pairs) if limit is None else int(limit)] for one in (values, pairs))
    inside = (pairs >= first) & (pairs < first + sums.shape[1])
    rows = (pairs[inside] - first).to(sums.device)
    sums[:, rows] = 0.0
    sums[0, rows] = values[inside].to(sums.device)


def run_expert_batch_plain(
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    table: Tensor,
    experts: SlotExperts,
    gate: Gate,
    scratch: ExpertScratch,
) -> None:
    """PyTorch reference of `run_expert_batch`: one dequantized expert after the other."""
    top_k, splits, block = index.shape[1], scratch.partial_sums.shape[0], scratch.tiles.down.block_k
    split_size = triton.cdiv(experts.shape.ffn, block * splits) * block
    for expert in index.unique().tolist():
        if table[expert] < 0:
            continue
        matrix = experts.gate_up
        tensors = matrix.format.dequantize(matrix.layout.views(matrix.slots[table[expert]]))
        gate_up, down = (
            (t.T if matrix.format.transposed else t).float() for t in (tensors["gate_up_proj"], tensors["down_proj"])
        )
        row, position = torch.where(index == expert)
        pair = row * top_k + position
        both = hidden[row].float() @ gate_up.T + tensors.get("gate_up_proj_bias", torch.zeros(())).float()
        scratch.up[pair] = gate.apply(both, ACTIVATIONS[gate.activation]).to(scratch.up.dtype)
        for split in range(splits):
            inputs = slice(split * split_size, (split + 1) * split_size)
            y = scratch.up[pair, inputs].float() @ down[:, inputs].T
            if split == 0 and "down_proj_bias" in tensors:
                y += tensors["down_proj_bias"].float()
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
def _apply_gate(
    both, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
):  # fmt: skip
    """Apply `Gate` to alternating columns of gate and up."""  # [ROWS, 2 * BLOCK_N] -> [ROWS, BLOCK_N]
    gate, value = tl.split(tl.reshape(both, (ROWS, BLOCK_N, 2)))
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT)
        value = tl.minimum(tl.maximum(value, -LIMIT), LIMIT)
    if ALPHA == 1:
        gate = activate(gate, ACTIVATION)
    else:
        tl.static_assert(ACTIVATION == "silu", "only silu has a factor")
        gate = gate * tl.sigmoid(gate * ALPHA)
    return gate * (value + UP_OFFSET)


@triton.jit(do_not_specialize=["rows"])
def _up_kernel(
    hidden, index, table, weights, scales, zeros, raw, bias, up, rows,
    HIDDEN: tl.constexpr, FFN: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
    TOP_K_PAD: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr,
    ASYMMETRIC: tl.constexpr, ASM: tl.constexpr, FP8: tl.constexpr, W_BLOB: tl.constexpr, W_OFFSET: tl.constexpr,
    S_BLOB: tl.constexpr, S_OFFSET: tl.constexpr, Z_BLOB: tl.constexpr, Z_OFFSET: tl.constexpr, R_BLOB: tl.constexpr,
    R_OFFSET: tl.constexpr, TAIL: tl.constexpr, HAS_BIAS: tl.constexpr, B_BLOB: tl.constexpr, B_OFFSET: tl.constexpr,
    MASKED: tl.constexpr, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    expert = tl.load(index + pair)
    slot = tl.load(table + expert).to(tl.int64)
    if _is_skipped(index, pair, expert, slot, PAIRS):
        return
    m, both = tl.arange(0, ROWS), tl.arange(0, 2 * BLOCK_N)
    # columns of the product alternate between gate and up; a partial last tile computes the last output again
    column = tl.minimum(tl.program_id(0) * BLOCK_N + both // 2, FFN - 1)
    matrix_row = 2 * column + both % 2 if INTERLEAVED else column + both % 2 * FFN
    y = multiply(
        hidden, m * HIDDEN, m < rows, weights + (slot * W_BLOB + W_OFFSET), scales + (slot * S_BLOB + S_OFFSET),
        zeros + (slot * Z_BLOB + Z_OFFSET), raw + (slot * R_BLOB + R_OFFSET), matrix_row, 0, KIND, HIDDEN, HIDDEN,
        MASKED, GROUP, GROUP_ROWS, ASYMMETRIC, ROWS, 2 * BLOCK_N, BLOCK_K, ASM, FP8, TAIL,
    )  # fmt: skip
    if HAS_BIAS:
        y += tl.load(bias + (slot * B_BLOB + B_OFFSET) + matrix_row).to(tl.float32)[None, :]
    y = _apply_gate(y, ROWS, BLOCK_N, ACTIVATION, ALPHA, LIMIT, UP_OFFSET)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    position = _top_k_position(index, m, expert, rows, TOP_K, TOP_K_PAD)
    out_ptrs = up + (m * TOP_K + position)[:, None] * FFN + n[None, :]
    tl.store(out_ptrs, y.to(up.dtype.element_ty), mask=(position[:, None] >= 0) & (n[None, :] < FFN))


@triton.jit(do_not_specialize=["rows"])
def _down_kernel(
    up, index, routing_weights, table, weights, scales, zeros, raw, bias, partial_sums, rows,
    HIDDEN: tl.constexpr, FFN: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
    TOP_K_PAD: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr,
    ASYMMETRIC: tl.constexpr, ASM: tl.constexpr, FP8: tl.constexpr, W_BLOB: tl.constexpr, W_OFFSET: tl.constexpr,
    S_BLOB: tl.constexpr, S_OFFSET: tl.constexpr, Z_BLOB: tl.constexpr, Z_OFFSET: tl.constexpr, R_BLOB: tl.constexpr,
    R_OFFSET: tl.constexpr, TAIL: tl.constexpr, HAS_BIAS: tl.constexpr, B_BLOB: tl.constexpr, B_OFFSET: tl.constexpr,
    MASKED: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    SPLIT_SIZE: tl.constexpr = (FFN + BLOCK_K * SPLITS - 1) // (BLOCK_K * SPLITS) * BLOCK_K
    pair, split = tl.program_id(1), tl.program_id(2)
    expert = tl.load(index + pair)
    slot = tl.load(table + expert).to(tl.int64)
    if _is_skipped(index, pair, expert, slot, PAIRS):
        return
    m = tl.arange(0, ROWS)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = tl.minimum(n, HIDDEN - 1)
    position = _top_k_position(index, m, expert, rows, TOP_K, TOP_K_PAD)
    routed, pairs = position >= 0, m * TOP_K + position
    y = multiply(
        up, pairs * FFN, routed, weights + (slot * W_BLOB + W_OFFSET), scales + (slot * S_BLOB + S_OFFSET),
        zeros + (slot * Z_BLOB + Z_OFFSET), raw + (slot * R_BLOB + R_OFFSET), inside, split * SPLIT_SIZE, KIND, FFN,
        SPLIT_SIZE, MASKED, GROUP, GROUP_ROWS, ASYMMETRIC, ROWS, BLOCK_N, BLOCK_K, ASM, FP8, TAIL,
    )  # fmt: skip
    if HAS_BIAS:
        y += tl.load(bias + (slot * B_BLOB + B_OFFSET) + inside, mask=(n >= 0) & (split == 0), other=0.0)[None, :]
    y *= tl.load(routing_weights + pairs, mask=routed, other=0.0).to(tl.float32)[:, None]
    out_ptrs = partial_sums + (split * rows * TOP_K + pairs)[:, None] * HIDDEN + n[None, :]
    tl.store(out_ptrs, y, mask=routed[:, None] & (n[None, :] < HIDDEN))


@triton.jit(do_not_specialize=["first", "count"])
def _place_kernel(
    values, pairs, sums, limit, first, count, HIDDEN: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    result = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = True if limit is None else result < tl.load(limit)
    row = tl.load(pairs + result, mask=exists, other=-1) - first
    inside = (row >= 0) & (row < count) & (n < HIDDEN) & exists
    y = tl.load(values + result * HIDDEN + n, mask=inside, other=0.0)
    for split in tl.static_range(SPLITS):
        tl.store(sums + (split * count + row) * HIDDEN + n, y, mask=inside)
        y = tl.zeros((BLOCK_N,), tl.float32)


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
