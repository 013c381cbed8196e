"""Experts of few rows, straight from the slots they lie in: no gathering, no sorting, nothing for the host to know.

One program per (tile of an expert's weights, pair of row and choice). The first pair that names an expert multiplies
its weights with all rows at once and keeps the rows that chose it, so every weight is read once, however many rows
want it. Each pair has a place of its own in `Scratch`, and `add_up` adds the places in a fixed order: the result does
not depend, in any bit, on which experts came in which batch, nor on the rows, up to 16, that a row came with.
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
from spmoe.backends.kernels.activations import ACTIVATIONS, activate

_ENOUGH_PROGRAMS = 512  # to keep a large device's memory busy


class Geometry(NamedTuple):
    """Sizes of an expert, and where its fields begin in a blob, in elements."""

    hidden: int
    ffn: int
    gate_up_at: int  # [2 * ffn, hidden], rows of the gate first
    down_at: int  # [hidden, ffn]


class Tile(NamedTuple):
    """How one kernel cuts its weights: `n` outputs by `k` inputs at a time."""

    n: int
    k: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """How both kernels cut an expert, and into how many parts the inputs of `down` are split."""

    up: Tile
    down: Tile
    splits: int


def config_for(rows: int, geometry: Geometry, top_k: int, dtype: torch.dtype) -> Tiles:
    """Tiles by shape alone, and the same for 1 to 16 rows, so that a row's bits do not depend on its company."""
    if not 1 <= rows <= MAX_KERNEL_ROWS:
        raise ValueError(f"1 to {MAX_KERNEL_ROWS} rows, not {rows}")
    hidden, ffn = geometry.hidden, geometry.ffn
    if dtype.itemsize > 2:  # no tensor cores: small tiles, or registers spill
        up, down = (32, 32, 4, 3), (32, 32, 4, 3)
    elif rows > 16:  # more of them to be held: all stages still fit the 99 KiB of a consumer's multiprocessor
        up, down = (32, 128, 4, 3), (32, 128, 4, 3)
    elif hidden * ffn >= 1 << 24:  # here and below the fastest, over 1 and 5 rows, of a sweep on an H200
        up, down = (32, 256, 4, 3), (32, 128, 4, 4)
    else:
        up, down = (32, 128, 4, 3), (64, 128, 4, 4)
    up_tile = Tile(_fit(up[0], ffn), _fit(up[1], hidden), *up[2:])
    down_tile = Tile(_fit(down[0], hidden), _fit(down[1], ffn), *down[2:])
    splits, decode_graphs = 1, triton.cdiv(hidden, down_tile.n) * top_k
    while splits * decode_graphs < _ENOUGH_PROGRAMS and splits < 8 and ffn % (2 * splits * down_tile.k) == 0:
        splits *= 2
    return Tiles(up_tile, down_tile, splits)


def _fit(wanted: int, size: int) -> int:
    """A tile no longer than wanted or needed, and one that divides the size if a fair one does."""
    tile: int = min(wanted, max(16, triton.next_power_of_2(size)))
    while tile > 32 and size % tile:
        tile //= 2
    return tile


@dataclass(frozen=True, slots=True)
class Scratch:
    """A place for every pair of row and choice; a batch fills those of its experts."""

    up: Tensor  # [rows * top_k, ffn]
    parts: Tensor  # [splits, rows * top_k, hidden] float32
    tiles: Tiles


class Places:
    """Memory for the scratches of any number of rows, one at a time: it stays where it is, and does not grow."""

    def __init__(self, top_k: int, geometry: Geometry, dtype: torch.dtype, device: torch.device | str) -> None:
        self._shape = (top_k, geometry, dtype)
        tiles = {rows: config_for(rows, geometry, top_k, dtype) for rows in (16, MAX_KERNEL_ROWS)}  # by rows up to these
        sums = max(rows * one.splits for rows, one in tiles.items())
        self._up = torch.empty(MAX_KERNEL_ROWS * top_k * geometry.ffn, dtype=dtype, device=device)
        self._parts = torch.empty(sums * top_k * geometry.hidden, dtype=torch.float32, device=device)

    def scratch(self, rows: int) -> Scratch:
        """Uninitialised places for this many rows."""
        top_k, geometry, dtype = self._shape
        tiles, pairs = config_for(rows, geometry, top_k, dtype), rows * top_k
        up = self._up[: pairs * geometry.ffn].view(pairs, geometry.ffn)
        parts = self._parts[: tiles.splits * pairs * geometry.hidden].view(tiles.splits, pairs, geometry.hidden)
        return Scratch(up, parts, tiles)


def run_expert_batch(
    hidden: Tensor,  # [rows, hidden]
    index: Tensor,  # [rows, top_k] int64, expert numbers; a row's choices are distinct
    weights: Tensor,  # [rows, top_k]
    table: Tensor,  # [experts] int32, the slot of each expert that is in the batch, and -1 of every other
    arena: Tensor,  # [slots, blob elements]
    geometry: Geometry,
    activation: str,
    scratch: Scratch,
) -> None:
    """Fill the places of every pair whose expert is in the batch, and touch no other."""
    (rows, top_k), (up, down) = index.shape, (scratch.tiles.up, scratch.tiles.down)
    hidden, index, weights = hidden.contiguous(), index.contiguous(), weights.contiguous()
    padded = max(16, triton.next_power_of_2(rows))
    sizes = {
        "HIDDEN": geometry.hidden, "FFN": geometry.ffn, "BLOB": arena.stride(0), "TOP_K": top_k,
        "ROWS": padded, "PAIRS": triton.next_power_of_2(padded * top_k),
        "CHOICES": triton.next_power_of_2(top_k),
    }  # fmt: skip
    _up_kernel[triton.cdiv(geometry.ffn, up.n), rows * top_k](
        hidden, index, table, arena, scratch.up, rows, **sizes, FIELD=geometry.gate_up_at,
        ACTIVATION=activation, BN=up.n, BK=up.k, num_warps=up.warps, num_stages=up.stages,
    )  # fmt: skip
    _down_kernel[triton.cdiv(geometry.hidden, down.n), rows * top_k, scratch.tiles.splits](
        scratch.up, index, weights, table, arena, scratch.parts, rows, **sizes, FIELD=geometry.down_at,
        SPLITS=scratch.tiles.splits, BN=down.n, BK=down.k, num_warps=down.warps, num_stages=down.stages,
    )  # fmt: skip


def add_up(scratch: Scratch, out: Tensor) -> Tensor:
    """Sum each row's places, by choice and then by split, into `out`."""  # out: [rows, hidden]
    splits, pairs, hidden = scratch.parts.shape
    rows, block = out.shape[0], min(256, triton.next_power_of_2(hidden))
    _add_kernel[triton.cdiv(hidden, block), rows](
        scratch.parts, out, pairs, HIDDEN=hidden, TOP_K=pairs // rows, SPLITS=splits, BN=block, num_warps=2
    )
    return out


def run_expert_batch_plain(
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    table: Tensor,
    arena: Tensor,
    geometry: Geometry,
    activation: str,
    scratch: Scratch,
) -> None:
    """What `run_expert_batch` computes, one expert after the other."""
    size, top_k, splits = geometry.hidden * geometry.ffn, index.shape[1], scratch.parts.shape[0]
    blocks = triton.cdiv(geometry.ffn, scratch.tiles.down.k)
    part = triton.cdiv(blocks, splits) * scratch.tiles.down.k
    for expert in index.unique().tolist():
        if table[expert] < 0:
            continue
        blob = arena[table[expert]].float()
        gate, up = blob[geometry.gate_up_at :][: 2 * size].view(2, geometry.ffn, geometry.hidden)
        down = blob[geometry.down_at :][:size].view(geometry.hidden, geometry.ffn)
        row, choice = torch.where(index == expert)
        pair, x = row * top_k + choice, hidden[row].float()
        scratch.up[pair] = (ACTIVATIONS[activation](x @ gate.T) * (x @ up.T)).to(scratch.up.dtype)
        for split in range(splits):
            inputs = slice(split * part, (split + 1) * part)
            y = scratch.up[pair, inputs].float() @ down[:, inputs].T
            scratch.parts[split, pair] = y * weights[row, choice, None].float()


def add_up_plain(scratch: Scratch, out: Tensor) -> Tensor:
    """What `add_up` computes."""
    parts = scratch.parts.unflatten(1, (out.shape[0], -1))  # [splits, rows, top_k, hidden]
    total = torch.zeros_like(out, dtype=torch.float32)
    for choice in range(parts.shape[2]):
        for split in range(parts.shape[0]):
            total += parts[split, :, choice]
    return out.copy_(total)


@triton.jit
def _left_out(index, pair, expert, slot, PAIRS: tl.constexpr):
    """Whether another program has this expert: that of an earlier pair, or of another batch."""
    at = tl.arange(0, PAIRS)
    earlier = tl.load(index + at, mask=at < pair, other=-1)
    return (tl.sum((earlier == expert).to(tl.int32), axis=0) > 0) | (slot < 0)


@triton.jit
def _choices(index, m, expert, rows, TOP_K: tl.constexpr, CHOICES: tl.constexpr):
    """Which of its choices the expert is to each row; -1 to those that did not choose it."""
    c = tl.arange(0, CHOICES)
    there = (m[:, None] < rows) & (c[None, :] < TOP_K)
    chosen = tl.load(index + m[:, None] * TOP_K + c[None, :], mask=there, other=-1)
    return tl.max(tl.where(there & (chosen == expert), c[None, :], -1), axis=1)


@triton.jit
def _load(at, n, k, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, WHOLE: tl.constexpr):
    """A tile of weights, unmasked if all `n` and `k` are inside."""
    if N % BN == 0 and K % WHOLE == 0:
        tile = tl.load(at)
    else:
        tile = tl.load(at, mask=(n[None, :] < N) & (k[:, None] < K), other=0.0)
    return tile


@triton.jit(do_not_specialize=["rows"])
def _up_kernel(
    hidden, index, table, arena, up, rows,
    HIDDEN: tl.constexpr, FFN: tl.constexpr, BLOB: tl.constexpr, FIELD: tl.constexpr, TOP_K: tl.constexpr,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, CHOICES: tl.constexpr, ACTIVATION: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    expert = tl.load(index + pair)
    slot = tl.load(table + expert).to(tl.int64)
    if _left_out(index, pair, expert, slot, PAIRS):
        return
    blob = arena + (slot * BLOB + FIELD)
    m, k = tl.arange(0, ROWS), tl.arange(0, BK)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    tile = n[None, :] * HIDDEN + k[:, None]  # [BK, BN]
    gate = tl.zeros((ROWS, BN), tl.float32)
    value = tl.zeros((ROWS, BN), tl.float32)
    for start in range(0, HIDDEN, BK):
        at = start + k
        there = (m[:, None] < rows) & (at[None, :] < HIDDEN)
        x = tl.load(hidden + m[:, None] * HIDDEN + at[None, :], mask=there, other=0.0)
        gate = tl.dot(x, _load(blob + tile + start, n, at, FFN, HIDDEN, BN, BK), gate, input_precision="ieee")
        w = _load(blob + FFN * HIDDEN + tile + start, n, at, FFN, HIDDEN, BN, BK)
        value = tl.dot(x, w, value, input_precision="ieee")
    choice = _choices(index, m, expert, rows, TOP_K, CHOICES)
    y = activate(gate, ACTIVATION) * value
    place = up + (m * TOP_K + choice)[:, None] * FFN + n[None, :]
    tl.store(place, y.to(up.dtype.element_ty), mask=(choice[:, None] >= 0) & (n[None, :] < FFN))


@triton.jit(do_not_specialize=["rows"])
def _down_kernel(
    up, index, weights, table, arena, parts, rows,
    HIDDEN: tl.constexpr, FFN: tl.constexpr, BLOB: tl.constexpr, FIELD: tl.constexpr, TOP_K: tl.constexpr,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, CHOICES: tl.constexpr, SPLITS: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    PART: tl.constexpr = (FFN + BK * SPLITS - 1) // (BK * SPLITS) * BK
    pair, split = tl.program_id(1), tl.program_id(2)
    expert = tl.load(index + pair)
    slot = tl.load(table + expert).to(tl.int64)
    if _left_out(index, pair, expert, slot, PAIRS):
        return
    blob = arena + (slot * BLOB + FIELD)
    m, k = tl.arange(0, ROWS), tl.arange(0, BK)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    choice = _choices(index, m, expert, rows, TOP_K, CHOICES)
    chose, row = choice[:, None] >= 0, (m * TOP_K + choice)[:, None]
    tile = n[None, :] * FFN + k[:, None]  # [BK, BN]
    y = tl.zeros((ROWS, BN), tl.float32)
    for step in range(0, PART, BK):
        start = split * PART + step
        at = start + k
        x = tl.load(up + row * FFN + at[None, :], mask=chose & (at[None, :] < FFN), other=0.0)
        y = tl.dot(x, _load(blob + tile + start, n, at, HIDDEN, FFN, BN, BK * SPLITS), y, input_precision="ieee")
    y *= tl.load(weights + row, mask=chose, other=0.0).to(tl.float32)
    place = parts + (split * rows * TOP_K + row) * HIDDEN + n[None, :]
    tl.store(place, y, mask=chose & (n[None, :] < HIDDEN))


@triton.jit(do_not_specialize=["pairs"])
def _add_kernel(
    parts, out, pairs, HIDDEN: tl.constexpr, TOP_K: tl.constexpr, SPLITS: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    row = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros((BN,), tl.float32)
    for choice in tl.static_range(TOP_K):
        for split in tl.static_range(SPLITS):
            at = (split * pairs + row * TOP_K + choice) * HIDDEN + n
            total += tl.load(parts + at, mask=n < HIDDEN, other=0.0)
    tl.store(out + row * HIDDEN + n, total.to(out.dtype.element_ty), mask=n < HIDDEN)
