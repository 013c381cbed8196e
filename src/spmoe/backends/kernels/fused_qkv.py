"""Several linear layers of the same few rows as one kernel, where each alone would leave much of a device idle."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from spmoe.backends.kernels.dense import GROUP, Tile, config_for, skinny_linear_plain
from spmoe.backends.kernels.products import dot_tile, fma_tile


def siblings_config_for(rows: int, counts: Sequence[int], k: int, dtype: torch.dtype) -> Tile:
    """How all of them are cut; `skinny_linear` with this tile gives each one's result in every bit."""
    if dtype.itemsize > 2:
        return config_for(rows, sum(counts), k, dtype)
    if k > 5120:  # here and below the fastest of a sweep on an H200, or within 3 % of it
        tile = Tile(16, 256, 4, 6, dot=True)
    elif sum(counts) >= 7168:
        tile = Tile(32, 128, 2, 5, dot=True)
    else:
        tile = Tile(16, 128, 2, 6, dot=True)
    return tile._replace(k=max(16 * tile.warps, min(tile.k, triton.next_power_of_2(k))))


def skinny_linears(
    x: Tensor,  # [rows, k]
    weights: Sequence[Tensor],  # of each layer [n, k], contiguous
    biases: Sequence[Tensor | None],  # of each layer [n]
    tile: Tile | None = None,
) -> list[Tensor]:  # of each layer [rows, n]
    """Linear layers of up to 16 rows, added up in float32."""
    (rows, k), counts = x.shape, tuple(len(weight) for weight in weights)
    tile = tile or siblings_config_for(rows, counts, k, x.dtype)
    outs = [x.new_empty(rows, n) for n in counts]
    given = [weight if bias is None else bias for weight, bias in zip(weights, biases, strict=True)]
    has_bias = [n if bias is not None else 0 for bias, n in zip(biases, counts, strict=True)]
    sizes = {
        "COUNTS": counts, "BIASES": tuple(has_bias), "WHOLE": all(n % tile.n == 0 for n in counts) and k % tile.k == 0,
        "K": k, "BIAS": any(has_bias), "BN": tile.n, "STAGES": tile.stages, "num_warps": tile.warps,
    }  # fmt: skip
    tiles, pointers = sum(triton.cdiv(n, tile.n) for n in counts), (tuple(weights), tuple(given), tuple(outs))
    if tile.dot:
        _dots_kernel[(tiles,)](
            x.contiguous(), *pointers, rows, **sizes, ROWS=8 if rows <= 8 else 16, PARTS=tile.warps,
            BK=tile.k // tile.warps,
        )  # fmt: skip
    else:
        groups = triton.cdiv(rows, GROUP)
        each = triton.cdiv(rows, groups)
        _fmas_kernel[(tiles, groups)](x.contiguous(), *pointers, rows, **sizes, ROWS=each, BK=tile.k)
    return outs


def skinny_linears_plain(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """What `skinny_linears` computes."""
    return [skinny_linear_plain(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


@triton.jit
def _of(tile, weights, biases, outs, COUNTS: tl.constexpr, BIASES: tl.constexpr, BN: tl.constexpr):
    """The layer that a tile is of, and which of its tiles it is."""
    weight, bias, out, n_count, bias_count, first = weights[0], biases[0], outs[0], COUNTS[0], BIASES[0], 0
    start = 0
    for i in tl.static_range(1, len(COUNTS)):
        start += (COUNTS[i - 1] + BN - 1) // BN
        later = tile >= start
        weight, bias = tl.where(later, weights[i], weight), tl.where(later, biases[i], bias)
        out, first = tl.where(later, outs[i], out), tl.where(later, start, first)
        n_count, bias_count = tl.where(later, COUNTS[i], n_count), tl.where(later, BIASES[i], bias_count)
    return weight, bias, out, tile - first, n_count, bias_count


@triton.jit(do_not_specialize=["rows"])
def _fmas_kernel(
    x, weights, biases, outs, rows, COUNTS: tl.constexpr, BIASES: tl.constexpr, WHOLE: tl.constexpr, K: tl.constexpr,
    BIAS: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    weight, bias, out, tile, n, b = _of(tl.program_id(0), weights, biases, outs, COUNTS, BIASES, BN)
    fma_tile(x, weight, bias, out, tile, rows, n, b, WHOLE, K, BIAS, ROWS, BN, BK, STAGES)


@triton.jit(do_not_specialize=["rows"])
def _dots_kernel(
    x, weights, biases, outs, rows, COUNTS: tl.constexpr, BIASES: tl.constexpr, WHOLE: tl.constexpr, K: tl.constexpr,
    BIAS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    weight, bias, out, tile, n, b = _of(tl.program_id(0), weights, biases, outs, COUNTS, BIASES, BN)
    dot_tile(x, weight, bias, out, tile, rows, n, b, WHOLE, K, BIAS, ROWS, PARTS, BN, BK, STAGES)
