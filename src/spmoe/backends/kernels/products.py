"""A tile of a linear layer's outputs, of few rows: what one program computes, of one layer or of several."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

# weight: [n_count, K], bias: [bias_count], out: [rows, n_count]; `WHOLE` if tiles divide `n_count` and K


@triton.jit
def fma_tile(
    x, weight, bias, out, tile, rows, n_count, bias_count, WHOLE: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each of the `BK` inputs is added up by itself."""
    first, row = tile.to(tl.int64) * BN, tl.program_id(1) * ROWS
    j, k = tl.arange(0, BN), tl.arange(0, BK)
    n = first + j
    at = weight + first * K + (j[:, None] * K + k[None, :])
    sums = ()
    for _ in tl.static_range(ROWS):
        sums += (tl.zeros((BN, BK), tl.float32),)  # type: ignore[assignment]
    for start in tl.range(0, K, BK, num_stages=STAGES):
        w = _load(at + start, n[:, None], start + k[None, :], n_count, K, WHOLE).to(tl.float32)
        new = ()
        for i in tl.static_range(ROWS):
            v = tl.load(x + (row + i) * K + start + k, mask=(row + i < rows) & (start + k < K), other=0.0)
            new += (tl.fma(w, v.to(tl.float32)[None, :], sums[i]),)  # type: ignore[assignment]
        sums = new
    for i in tl.static_range(ROWS):
        y = tl.sum(sums[i], axis=1)
        if BIAS:
            y += tl.load(bias + n, mask=n < bias_count, other=0.0).to(tl.float32)
        here = (n < n_count) & (row + i < rows)
        tl.store(out + (row + i) * n_count + n, y.to(out.dtype.element_ty), mask=here)


@triton.jit
def dot_tile(
    x, weight, bias, out, tile, rows, n_count, bias_count, WHOLE: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """By tensor cores; each warp adds up `BK` inputs at a time, 16 by 16."""
    first, m = tile.to(tl.int64) * BN, tl.arange(0, ROWS)
    part, j, k = tl.arange(0, PARTS)[:, None, None] * BK, tl.arange(0, BN), tl.arange(0, BK)
    n = first + j
    at = weight + first * K + (part + j[None, :, None] * K + k[None, None, :])  # [PARTS, BN, BK]
    x_at = x + (part + m[None, None, :] * K + k[None, :, None])  # [PARTS, BK, ROWS]
    y = tl.zeros((PARTS, BN, ROWS), tl.float32)
    for start in tl.range(0, K, PARTS * BK, num_stages=STAGES):
        w = _load(at + start, n[None, :, None], start + part + k[None, None, :], n_count, K, WHOLE)
        v = tl.load(x_at + start, mask=(m[None, None, :] < rows) & (start + part + k[None, :, None] < K), other=0.0)
        y = tl.dot(w, v, y, input_precision="ieee")
    y = tl.sum(y, axis=0)
    if BIAS:
        y += tl.load(bias + n, mask=n < bias_count, other=0.0).to(tl.float32)[:, None]
    here = (m[None, :] < rows) & (n[:, None] < n_count)
    tl.store(out + m[None, :] * n_count + n[:, None], y.to(out.dtype.element_ty), mask=here)


@triton.jit
def _load(at, n, k, n_count, K: tl.constexpr, WHOLE: tl.constexpr):
    return tl.load(at) if WHOLE else tl.load(at, mask=(n < n_count) & (k < K), other=0.0)
