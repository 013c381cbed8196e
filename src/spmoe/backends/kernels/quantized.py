"""Experts quantized to four or eight bits, for 1 to 16 rows: codes are dequantized in registers.

Codes are stored as [groups, outputs, words]: a thread reads a group of one output at once, its neighbours read the
next outputs, so all bytes of every memory transaction are used. A code is written to the mantissa of a float between 1
and 2, which needs no integer conversion, and is scaled from there. Rows that are routed to the same expert are
processed two at a time, so that codes are unpacked once for both.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from spmoe.backends.kernels.dense import ACTIVATIONS, activate
from spmoe.backends.kernels.experts import (
    ExpertScratch,
    ExpertTile,
    ExpertTiles,
    reduce_experts,
    reduce_experts_plain,
)

_MIN_PROGRAMS = 512  # enough loads in flight to saturate the memory of a large device
_ONE = 0x3F800000  # bits of 1.0; a kernel argument, since for two constants the compiler would emit two instructions


class QuantizedMatrix(NamedTuple):
    """Shape of a matrix and its offsets in a blob, in 32-bit words."""

    inputs: int
    outputs: int
    codes_offset: int  # [groups, outputs, words]: code i * words + w of a group is the i-th of word w
    scales_offset: int  # [groups, outputs]: each word holds a step and the lowest value as two bfloat16


class QuantizedLayout(NamedTuple):
    """Layout of a quantized expert."""

    bits: int
    group: int  # inputs that share a scale
    gate_up: QuantizedMatrix  # outputs of the gate first
    down: QuantizedMatrix

    @property
    def ffn(self) -> int:
        """Intermediate size."""
        return self.down.inputs

    @property
    def hidden(self) -> int:
        """Hidden size."""
        return self.down.outputs


def select_quantized_tiles(layout: QuantizedLayout, pairs: int) -> ExpertTiles:
    """Select tiles by shape; `block_n` counts outputs and `block_k` counts groups."""
    tile, splits = ExpertTile(32, 4, 2, 3), 1
    groups = triton.cdiv(layout.ffn, layout.group)
    programs = triton.cdiv(layout.hidden, 2 * tile.block_n) * pairs
    while splits * programs < _MIN_PROGRAMS and splits < 4 and groups >= 4 * splits * tile.block_k:
        splits *= 2
    return ExpertTiles(tile, tile, splits)


def run_quantized_experts(
    hidden: Tensor,  # [rows, hidden]
    index: Tensor,  # [rows, top_k] int64, ids of the routed experts, distinct within a row
    weights: Tensor,  # [rows, top_k]
    blobs: Tensor,  # [experts, blob words] int32
    layout: QuantizedLayout,
    activation: str,
    tiles: ExpertTiles | None = None,
) -> Tensor:  # [rows, hidden]
    """Compute the weighted sum of each row's routed experts."""
    (rows, top_k), (bits, group, gate_up, down) = index.shape, layout
    hidden, index, weights = hidden.contiguous(), index.contiguous(), weights.contiguous()
    scratch = _allocate_scratch(hidden, index, layout, tiles)
    tiles, pairs = scratch.tiles, rows * top_k
    sizes = {
        "BITS": bits, "GROUP": group, "WORDS": group * bits // 32, "BLOB": blobs.stride(0), "TOP_K": top_k,
        "PAIRED": rows > 1, "PAIRS": triton.next_power_of_2(pairs),
    }  # fmt: skip
    _up_kernel[pairs, triton.cdiv(layout.ffn, tiles.up.block_n)](
        hidden, index, blobs, scratch.up, pairs, _ONE, **sizes, HIDDEN=gate_up.inputs, FFN=layout.ffn,
        CODES=gate_up.codes_offset, SCALES=gate_up.scales_offset, ACTIVATION=activation, BLOCK_N=tiles.up.block_n,
        BLOCK_G=tiles.up.block_k, num_warps=tiles.up.num_warps, STAGES=tiles.up.num_stages,
    )  # fmt: skip
    _down_kernel[pairs, triton.cdiv(layout.hidden, 2 * tiles.down.block_n), tiles.splits](
        scratch.up, index, weights, blobs, scratch.partial_sums, pairs, _ONE, **sizes, HIDDEN=layout.hidden,
        FFN=layout.ffn, CODES=down.codes_offset, SCALES=down.scales_offset, SPLITS=tiles.splits,
        BLOCK_N=tiles.down.block_n, BLOCK_G=tiles.down.block_k, num_warps=tiles.down.num_warps,
        STAGES=tiles.down.num_stages,
    )  # fmt: skip
    return reduce_experts(scratch, torch.empty_like(hidden))


def run_quantized_experts_plain(
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    blobs: Tensor,
    layout: QuantizedLayout,
    activation: str,
    tiles: ExpertTiles | None = None,
) -> Tensor:
    """PyTorch reference of `run_quantized_experts`: one (row, top-k position) pair after the other."""
    scratch = _allocate_scratch(hidden, index, layout, tiles)
    sums, groups = scratch.partial_sums.zero_(), triton.cdiv(layout.ffn, layout.group)
    split_size = _groups_per_split(groups, scratch.tiles.down.block_k, scratch.tiles.splits) * layout.group
    for pair, expert in enumerate(index.flatten().tolist()):
        gate, up = dequantize_matrix(blobs[expert], layout, layout.gate_up).chunk(2)
        x = hidden[pair // index.shape[1]].float()
        scratch.up[pair] = ACTIVATIONS[activation](gate @ x) * (up @ x)
        down = dequantize_matrix(blobs[expert], layout, layout.down)
        for split in range(scratch.tiles.splits):
            inputs = slice(split * split_size, (split + 1) * split_size)
            sums[split, pair] = (down[:, inputs] @ scratch.up[pair, inputs]) * weights.flatten()[pair].float()
    return reduce_experts_plain(scratch, torch.empty_like(hidden))


def dequantize_matrix(blob: Tensor, layout: QuantizedLayout, matrix: QuantizedMatrix) -> Tensor:
    """Dequantize one matrix of a blob."""  # blob: [words] int32 -> [outputs, inputs] float32
    (bits, group), groups = layout[:2], triton.cdiv(matrix.inputs, layout.group)
    words = group * bits // 32
    packed = blob[matrix.codes_offset :][: groups * matrix.outputs * words].view(groups, matrix.outputs, 1, words)
    scales = blob[matrix.scales_offset :][: groups * matrix.outputs].view(groups, matrix.outputs, 1)
    shifts = torch.arange(0, 32, bits, device=blob.device, dtype=torch.int32)[:, None]
    codes = (packed >> shifts & (1 << bits) - 1).flatten(-2)  # [groups, outputs, group]
    step, low = (scales << 16).view(torch.float32), (scales & -65536).view(torch.float32)
    return (low + step * codes).transpose(0, 1).flatten(1)[:, : matrix.inputs]


def _allocate_scratch(
    hidden: Tensor, index: Tensor, layout: QuantizedLayout, tiles: ExpertTiles | None
) -> ExpertScratch:
    pairs, tiles = index.numel(), tiles or select_quantized_tiles(layout, index.numel())
    up = torch.empty(pairs, layout.ffn, dtype=torch.float32, device=hidden.device)
    sums = torch.empty(tiles.splits, pairs, layout.hidden, dtype=torch.float32, device=hidden.device)
    return ExpertScratch(up, sums, tiles)


def _groups_per_split(groups: int, block: int, splits: int) -> int:
    size: int = triton.cdiv(groups, block * splits) * block
    return size


@triton.jit
def _find_partner(index, pair, expert, pairs, PAIRS: tl.constexpr):
    """Return whether an earlier pair computes this one, and the later pair that this one also computes (or itself)."""
    i = tl.arange(0, PAIRS)
    same = tl.load(index + i, mask=i < pairs, other=-1) == expert
    before = tl.sum((same & (i < pair)).to(tl.int32), axis=0)
    after = tl.min(tl.where(same & (i > pair), i, PAIRS), axis=0)
    return before % 2 == 1, tl.where(after < PAIRS, after, pair)


@triton.jit
def _decode(words, one, i: tl.constexpr, BITS: tl.constexpr):
    """Return the i-th code of each word as 1 + code / 256, or as 1 + code / 16 for four bits and odd i."""
    # with four bits, an odd code and the even one before it need the same shift
    SHIFT: tl.constexpr = 19 - 4 * (i | 1) if BITS == 4 else 15 - 8 * i
    MASK: tl.constexpr = (0x780000 if i % 2 else 0x78000) if BITS == 4 else 0x7F8000
    moved = words << SHIFT if SHIFT > 0 else words >> -SHIFT
    return ((moved & MASK) | one).to(tl.float32, bitcast=True)


@triton.jit
def _load_inputs(x, g, last, i: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, WORDS: tl.constexpr):
    """Load the inputs that belong to the i-th codes of the words of groups `g`."""  # [groups, words]
    k = g[:, None] * GROUP + (i * WORDS + tl.arange(0, WORDS))[None, :]
    return tl.load(x + k, mask=(g[:, None] < last) & (k < K), other=0.0).to(tl.float32)


@triton.jit
def _load_codes(
    blob, g, last, n, N: tl.constexpr, OUT: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Load words and scales of groups `g` and outputs `n`."""  # [groups, outputs, words], [groups, outputs]
    offsets = g[:, None] * OUT + n[None, :]
    in_range = (g[:, None] < last) & (n[None, :] < N)
    words = blob + CODES + offsets[:, :, None] * WORDS + tl.arange(0, WORDS)[None, None, :]
    return tl.load(words, mask=in_range[:, :, None], other=0), tl.load(blob + SCALES + offsets, mask=in_range, other=0)


@triton.jit
def _dequantize(words, scales, one, i: tl.constexpr, BITS: tl.constexpr):
    """Return the weights of the i-th codes of the words."""  # [groups, outputs, words]
    UNIT: tl.constexpr = 16.0 if BITS == 4 and i % 2 else 256.0  # `_decode` returns 1 + code / unit
    step = UNIT * (scales << 16).to(tl.float32, bitcast=True)
    low = (scales & -65536).to(tl.float32, bitcast=True)
    return _decode(words, one, i, BITS) * step[:, :, None] + (low - step)[:, :, None]


@triton.jit
def _matmul(
    x, y, blob, n, m, first, last, one, K: tl.constexpr, OUT: tl.constexpr, N: tl.constexpr, CODES: tl.constexpr,
    SCALES: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, WORDS: tl.constexpr, PAIRED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Multiply the weights of outputs `n` and `m` (below `N`) with row `x`, and if PAIRED with `y`: 4 x [BLOCK_N]."""
    xn = tl.zeros((BLOCK_G, BLOCK_N, WORDS), tl.float32)
    xm = tl.zeros((BLOCK_G, BLOCK_N, WORDS), tl.float32)
    yn = tl.zeros((BLOCK_G, BLOCK_N, WORDS), tl.float32)
    ym = tl.zeros((BLOCK_G, BLOCK_N, WORDS), tl.float32)
    for start in tl.range(first, last, BLOCK_G, num_stages=STAGES):
        g = start + tl.arange(0, BLOCK_G)
        words_n, scales_n = _load_codes(blob, g, last, n, N, OUT, CODES, SCALES, WORDS)
        words_m, scales_m = _load_codes(blob, g, last, m, N, OUT, CODES, SCALES, WORDS)
        for i in tl.static_range(32 // BITS):
            weights_n = _dequantize(words_n, scales_n, one, i, BITS)
            weights_m = _dequantize(words_m, scales_m, one, i, BITS)
            xi = _load_inputs(x, g, last, i, K, GROUP, WORDS)[:, None, :]
            xn += weights_n * xi
            xm += weights_m * xi
            if PAIRED:
                yi = _load_inputs(y, g, last, i, K, GROUP, WORDS)[:, None, :]
                yn += weights_n * yi
                ym += weights_m * yi
    return _sum_outputs(xn), _sum_outputs(xm), _sum_outputs(yn), _sum_outputs(ym)


@triton.jit
def _sum_outputs(products):
    """Sum over words, then over groups."""  # [groups, outputs, words] -> [outputs]
    return tl.sum(tl.sum(products, axis=2), axis=0)


@triton.jit(do_not_specialize=["pairs", "one"])
def _up_kernel(
    hidden, index, blobs, up, pairs, one,
    HIDDEN: tl.constexpr, FFN: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, WORDS: tl.constexpr, BLOB: tl.constexpr, TOP_K: tl.constexpr, PAIRED: tl.constexpr,
    PAIRS: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    GROUPS: tl.constexpr = (HIDDEN + GROUP - 1) // GROUP
    pair = tl.program_id(0)
    expert, partner = tl.load(index + pair), pair
    if PAIRED:
        done, partner = _find_partner(index, pair, expert, pairs, PAIRS)
        if done:
            return
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_range = n < FFN
    # a partial last tile of the gate reads on into the outputs of `up`; the mask keeps these from being stored
    gate, value, gate_2, value_2 = _matmul(
        hidden + pair // TOP_K * HIDDEN, hidden + partner // TOP_K * HIDDEN, blobs + expert * BLOB, n, FFN + n, 0,
        GROUPS, one, HIDDEN, 2 * FFN, 2 * FFN, CODES, SCALES, BITS, GROUP, WORDS, PAIRED, BLOCK_N, BLOCK_G, STAGES,
    )  # fmt: skip
    tl.store(up + pair * FFN + n, activate(gate, ACTIVATION) * value, mask=in_range)
    if PAIRED:
        tl.store(up + partner * FFN + n, activate(gate_2, ACTIVATION) * value_2, mask=in_range & (partner != pair))


@triton.jit(do_not_specialize=["pairs", "one"])
def _down_kernel(
    up, index, weights, blobs, partial_sums, pairs, one,
    HIDDEN: tl.constexpr, FFN: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, WORDS: tl.constexpr, BLOB: tl.constexpr, TOP_K: tl.constexpr, PAIRED: tl.constexpr,
    PAIRS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    GROUPS: tl.constexpr = (FFN + GROUP - 1) // GROUP
    SPLIT_GROUPS: tl.constexpr = (GROUPS + BLOCK_G * SPLITS - 1) // (BLOCK_G * SPLITS) * BLOCK_G
    pair, split = tl.program_id(0), tl.program_id(2)
    expert, partner = tl.load(index + pair), pair
    if PAIRED:
        done, partner = _find_partner(index, pair, expert, pairs, PAIRS)
        if done:
            return
    n = tl.program_id(1) * 2 * BLOCK_N + tl.arange(0, BLOCK_N)
    m = n + BLOCK_N
    first = split * SPLIT_GROUPS
    xn, xm, yn, ym = _matmul(
        up + pair * FFN, up + partner * FFN, blobs + expert * BLOB, n, m, first,
        tl.minimum(first + SPLIT_GROUPS, GROUPS), one, FFN, HIDDEN, HIDDEN, CODES, SCALES, BITS, GROUP, WORDS, PAIRED,
        BLOCK_N, BLOCK_G, STAGES,
    )  # fmt: skip
    weight = tl.load(weights + pair).to(tl.float32)
    sums = partial_sums + (split * pairs + pair) * HIDDEN
    tl.store(sums + n, xn * weight, mask=n < HIDDEN)
    tl.store(sums + m, xm * weight, mask=m < HIDDEN)
    if PAIRED:
        weight = tl.load(weights + partner).to(tl.float32)
        sums, separate = partial_sums + (split * pairs + partner) * HIDDEN, partner != pair
        tl.store(sums + n, yn * weight, mask=separate & (n < HIDDEN))
        tl.store(sums + m, ym * weight, mask=separate & (m < HIDDEN))
