"""Experts in codes of four or eight bits, of few rows: codes become numbers in registers, and nothing else is read.

Codes lie as [groups, outputs, words]: a thread reads a group of one output at once, its neighbours those of the next
outputs, so every line of memory is used whole. A code is put into the mantissa of a float between 1 and 2, which takes
no conversion, and scaled from there. Rows that chose the same expert are served two at a time, so that codes are
unpacked once for both.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from spmoe.backends.kernels.activations import ACTIVATIONS, activate
from spmoe.backends.kernels.experts import Scratch, Tile, Tiles, add_up, add_up_plain

_ENOUGH_PROGRAMS = 512  # to keep a large device's memory busy
_ONE = 0x3F800000  # the bits of 1.0; told to kernels as they start, since of two constants the compiler makes two steps


class Codes(NamedTuple):
    """Where a matrix lies in a blob, in words of four bytes."""

    inputs: int
    outputs: int
    codes_at: int  # [groups, outputs, group * bits / 32]; code i * words + w of a group is the i-th of word w
    scales_at: int  # [groups, outputs], each word a step and the lowest value, two bfloat16


class CodedGeometry(NamedTuple):
    """An expert in codes."""

    bits: int
    group: int  # inputs that share a scale
    gate_up: Codes  # outputs of the gate first
    down: Codes

    @property
    def ffn(self) -> int:
        """Outputs of the gate."""
        return self.down.inputs

    @property
    def hidden(self) -> int:
        """Outputs of an expert."""
        return self.down.outputs


def config_for(geometry: CodedGeometry, pairs: int) -> Tiles:
    """Tiles by shape; `n` is outputs and `k` groups at a time."""
    tile, splits = Tile(32, 4, 2, 3), 1
    groups = triton.cdiv(geometry.ffn, geometry.group)
    decode_graphs = triton.cdiv(geometry.hidden, 2 * tile.n) * pairs
    while splits * decode_graphs < _ENOUGH_PROGRAMS and splits < 4 and groups >= 4 * splits * tile.k:
        splits *= 2
    return Tiles(tile, tile, splits)


def run_coded(
    hidden: Tensor,  # [rows, hidden]
    index: Tensor,  # [rows, top_k] int64, expert numbers; a row's choices are distinct
    weights: Tensor,  # [rows, top_k]
    blobs: Tensor,  # [experts, blob words] int32
    geometry: CodedGeometry,
    activation: str,
    tiles: Tiles | None = None,
) -> Tensor:
    """The weighted sum of each row's experts."""  # -> [rows, hidden]
    (rows, top_k), (bits, group, gate_up, down) = index.shape, geometry
    hidden, index, weights = hidden.contiguous(), index.contiguous(), weights.contiguous()
    scratch = _allocate(hidden, index, geometry, tiles)
    tiles, pairs = scratch.tiles, rows * top_k
    sizes = {
        "BITS": bits, "GROUP": group, "WORDS": group * bits // 32, "BLOB": blobs.stride(0), "TOP_K": top_k,
        "PAIRED": rows > 1, "PAIRS": triton.next_power_of_2(pairs),
    }  # fmt: skip
    _up_kernel[pairs, triton.cdiv(geometry.ffn, tiles.up.n)](
        hidden, index, blobs, scratch.up, pairs, _ONE, **sizes, HIDDEN=gate_up.inputs, FFN=geometry.ffn,
        CODES=gate_up.codes_at, SCALES=gate_up.scales_at, ACTIVATION=activation, BN=tiles.up.n, BG=tiles.up.k,
        num_warps=tiles.up.warps, STAGES=tiles.up.stages,
    )  # fmt: skip
    _down_kernel[pairs, triton.cdiv(geometry.hidden, 2 * tiles.down.n), tiles.splits](
        scratch.up, index, weights, blobs, scratch.parts, pairs, _ONE, **sizes, HIDDEN=geometry.hidden,
        FFN=geometry.ffn, CODES=down.codes_at, SCALES=down.scales_at, SPLITS=tiles.splits, BN=tiles.down.n,
        BG=tiles.down.k, num_warps=tiles.down.warps, STAGES=tiles.down.stages,
    )  # fmt: skip
    return add_up(scratch, torch.empty_like(hidden))


def run_coded_plain(
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    blobs: Tensor,
    geometry: CodedGeometry,
    activation: str,
    tiles: Tiles | None = None,
) -> Tensor:
    """What `run_coded` computes, one pair of row and choice after the other."""
    scratch = _allocate(hidden, index, geometry, tiles)
    parts, groups = scratch.parts.zero_(), triton.cdiv(geometry.ffn, geometry.group)
    part = _part(groups, scratch.tiles.down.k, scratch.tiles.splits) * geometry.group
    for pair, expert in enumerate(index.flatten().tolist()):
        gate, up = weights_of(blobs[expert], geometry, geometry.gate_up).chunk(2)
        x = hidden[pair // index.shape[1]].float()
        scratch.up[pair] = ACTIVATIONS[activation](gate @ x) * (up @ x)
        down = weights_of(blobs[expert], geometry, geometry.down)
        for split in range(scratch.tiles.splits):
            inputs = slice(split * part, (split + 1) * part)
            parts[split, pair] = (down[:, inputs] @ scratch.up[pair, inputs]) * weights.flatten()[pair].float()
    return add_up_plain(scratch, torch.empty_like(hidden))


def weights_of(blob: Tensor, geometry: CodedGeometry, codes: Codes) -> Tensor:
    """The matrix that codes stand for."""  # blob: [words] int32 -> [outputs, inputs] float32
    (bits, group), groups = geometry[:2], triton.cdiv(codes.inputs, geometry.group)
    words = group * bits // 32
    packed = blob[codes.codes_at :][: groups * codes.outputs * words].view(groups, codes.outputs, 1, words)
    scales = blob[codes.scales_at :][: groups * codes.outputs].view(groups, codes.outputs, 1)
    shifts = torch.arange(0, 32, bits, device=blob.device, dtype=torch.int32)[:, None]
    levels = (packed >> shifts & (1 << bits) - 1).flatten(-2)  # [groups, outputs, group]
    step, low = (scales << 16).view(torch.float32), (scales & -65536).view(torch.float32)
    return (low + step * levels).transpose(0, 1).flatten(1)[:, : codes.inputs]


def _allocate(hidden: Tensor, index: Tensor, geometry: CodedGeometry, tiles: Tiles | None) -> Scratch:
    """A place for every pair of row and choice."""
    pairs, tiles = index.numel(), tiles or config_for(geometry, index.numel())
    up = torch.empty(pairs, geometry.ffn, dtype=torch.float32, device=hidden.device)
    parts = torch.empty(tiles.splits, pairs, geometry.hidden, dtype=torch.float32, device=hidden.device)
    return Scratch(up, parts, tiles)


def _part(groups: int, block: int, splits: int) -> int:
    """Groups of one split."""
    part: int = triton.cdiv(groups, block * splits) * block
    return part


@triton.jit
def _partner(index, pair, expert, pairs, PAIRS: tl.constexpr):
    """Whether an earlier pair serves this one, and the later pair that this one serves: itself if there is none."""
    at = tl.arange(0, PAIRS)
    same = tl.load(index + at, mask=at < pairs, other=-1) == expert
    before = tl.sum((same & (at < pair)).to(tl.int32), axis=0)
    after = tl.min(tl.where(same & (at > pair), at, PAIRS), axis=0)
    return before % 2 == 1, tl.where(after < PAIRS, after, pair)


@triton.jit
def _code(words, one, i: tl.constexpr, BITS: tl.constexpr):
    """The i-th code of each word as 1 + code / 256; coarser, as 1 + code / 16, if it is of four bits and i is odd."""
    # of four bits, an odd one and that before it need the same shift
    SHIFT: tl.constexpr = 19 - 4 * (i | 1) if BITS == 4 else 15 - 8 * i
    MASK: tl.constexpr = (0x780000 if i % 2 else 0x78000) if BITS == 4 else 0x7F8000
    moved = words << SHIFT if SHIFT > 0 else words >> -SHIFT
    return ((moved & MASK) | one).to(tl.float32, bitcast=True)


@triton.jit
def _inputs(x, at, last, i: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, WORDS: tl.constexpr):
    """What the i-th codes of the words of some groups are multiplied with."""  # [groups, words]
    k = at[:, None] * GROUP + (i * WORDS + tl.arange(0, WORDS))[None, :]
    return tl.load(x + k, mask=(at[:, None] < last) & (k < K), other=0.0).to(tl.float32)


@triton.jit
def _fetch(
    blob, at, last, n, N: tl.constexpr, OUT: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Words and scales of some groups of some outputs."""  # [groups, outputs, words], [groups, outputs]
    place = at[:, None] * OUT + n[None, :]
    there = (at[:, None] < last) & (n[None, :] < N)
    words = blob + CODES + place[:, :, None] * WORDS + tl.arange(0, WORDS)[None, None, :]
    return tl.load(words, mask=there[:, :, None], other=0), tl.load(blob + SCALES + place, mask=there, other=0)


@triton.jit
def _weights(words, scales, one, i: tl.constexpr, BITS: tl.constexpr):
    """What the i-th codes of the words stand for."""  # [groups, outputs, words]
    UNIT: tl.constexpr = 16.0 if BITS == 4 and i % 2 else 256.0  # a code was made into 1 + code / unit
    step = UNIT * (scales << 16).to(tl.float32, bitcast=True)
    low = (scales & -65536).to(tl.float32, bitcast=True)
    return _code(words, one, i, BITS) * step[:, :, None] + (low - step)[:, :, None]


@triton.jit
def _products(
    x, y, blob, n, m, first, last, one, K: tl.constexpr, OUT: tl.constexpr, N: tl.constexpr, CODES: tl.constexpr,
    SCALES: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, WORDS: tl.constexpr, PAIRED: tl.constexpr,
    BN: tl.constexpr, BG: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Two tiles of outputs, `n` and `m`, below `N`, of one row `x` or of two: 4 x [BN]."""
    xn = tl.zeros((BG, BN, WORDS), tl.float32)
    xm = tl.zeros((BG, BN, WORDS), tl.float32)
    yn = tl.zeros((BG, BN, WORDS), tl.float32)
    ym = tl.zeros((BG, BN, WORDS), tl.float32)
    for start in tl.range(first, last, BG, num_stages=STAGES):
        at = start + tl.arange(0, BG)
        words_n, scales_n = _fetch(blob, at, last, n, N, OUT, CODES, SCALES, WORDS)
        words_m, scales_m = _fetch(blob, at, last, m, N, OUT, CODES, SCALES, WORDS)
        for i in tl.static_range(32 // BITS):
            weights_n, weights_m = _weights(words_n, scales_n, one, i, BITS), _weights(words_m, scales_m, one, i, BITS)
            xi = _inputs(x, at, last, i, K, GROUP, WORDS)[:, None, :]
            xn += weights_n * xi
            xm += weights_m * xi
            if PAIRED:
                yi = _inputs(y, at, last, i, K, GROUP, WORDS)[:, None, :]
                yn += weights_n * yi
                ym += weights_m * yi
    return _total(xn), _total(xm), _total(yn), _total(ym)


@triton.jit
def _total(parts):
    return tl.sum(tl.sum(parts, axis=2), axis=0)


@triton.jit(do_not_specialize=["pairs", "one"])
def _up_kernel(
    hidden, index, blobs, up, pairs, one,
    HIDDEN: tl.constexpr, FFN: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, WORDS: tl.constexpr, BLOB: tl.constexpr, TOP_K: tl.constexpr, PAIRED: tl.constexpr,
    PAIRS: tl.constexpr, ACTIVATION: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    GROUPS: tl.constexpr = (HIDDEN + GROUP - 1) // GROUP
    pair = tl.program_id(0)
    expert, other = tl.load(index + pair), pair
    if PAIRED:
        served, other = _partner(index, pair, expert, pairs, PAIRS)
        if served:
            return
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    there = n < FFN
    # a last tile that is not whole reads on, from the gate's outputs into the others, and stores none of that
    gate, value, gate_2, value_2 = _products(
        hidden + pair // TOP_K * HIDDEN, hidden + other // TOP_K * HIDDEN, blobs + expert * BLOB, n, FFN + n, 0,
        GROUPS, one, HIDDEN, 2 * FFN, 2 * FFN, CODES, SCALES, BITS, GROUP, WORDS, PAIRED, BN, BG, STAGES,
    )  # fmt: skip
    tl.store(up + pair * FFN + n, activate(gate, ACTIVATION) * value, mask=there)
    if PAIRED:
        tl.store(up + other * FFN + n, activate(gate_2, ACTIVATION) * value_2, mask=there & (other != pair))


@triton.jit(do_not_specialize=["pairs", "one"])
def _down_kernel(
    up, index, weights, blobs, parts, pairs, one,
    HIDDEN: tl.constexpr, FFN: tl.constexpr, CODES: tl.constexpr, SCALES: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, WORDS: tl.constexpr, BLOB: tl.constexpr, TOP_K: tl.constexpr, PAIRED: tl.constexpr,
    PAIRS: tl.constexpr, SPLITS: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    GROUPS: tl.constexpr = (FFN + GROUP - 1) // GROUP
    PART: tl.constexpr = (GROUPS + BG * SPLITS - 1) // (BG * SPLITS) * BG
    pair, split = tl.program_id(0), tl.program_id(2)
    expert, other = tl.load(index + pair), pair
    if PAIRED:
        served, other = _partner(index, pair, expert, pairs, PAIRS)
        if served:
            return
    n = tl.program_id(1) * 2 * BN + tl.arange(0, BN)
    m = n + BN
    first = split * PART
    xn, xm, yn, ym = _products(
        up + pair * FFN, up + other * FFN, blobs + expert * BLOB, n, m, first, tl.minimum(first + PART, GROUPS),
        one, FFN, HIDDEN, HIDDEN, CODES, SCALES, BITS, GROUP, WORDS, PAIRED, BN, BG, STAGES,
    )  # fmt: skip
    weight = tl.load(weights + pair).to(tl.float32)
    place = parts + (split * pairs + pair) * HIDDEN
    tl.store(place + n, xn * weight, mask=n < HIDDEN)
    tl.store(place + m, xm * weight, mask=m < HIDDEN)
    if PAIRED:
        weight = tl.load(weights + other).to(tl.float32)
        place, there = parts + (split * pairs + other) * HIDDEN, other != pair
        tl.store(place + n, yn * weight, mask=there & (n < HIDDEN))
        tl.store(place + m, ym * weight, mask=there & (m < HIDDEN))
