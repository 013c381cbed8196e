"""Norms, linear layers, gated ones, routers, of few rows: one kernel each, bound by the memory that holds its weights.

How a kernel cuts its weights, and so the order in which it adds, follows from their shape alone: a row's result does
not depend, in any bit, on the rows, up to 16, that it came with.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor
from torch.nn import functional

from spmoe.backends.kernels.activations import ACTIVATIONS, activate
from spmoe.backends.kernels.products import dot_tile, fma_tile

MOST_ROWS = 16
MOST_EXPERTS = 512
LONGEST_NORM = 16384
GROUP = 8  # rows that one program of `fma_tile` has registers for
_ONE_KERNEL = 1 << 16  # elements of a router that one multiprocessor reads in less time than another launch takes


class Tile(NamedTuple):
    """How a linear layer is cut: `n` outputs by `k` inputs at a time, which are shared out among the warps."""

    n: int
    k: int
    warps: int
    stages: int
    dot: bool  # by tensor cores, which add 16 inputs at a time; else each of the `k` is added up by itself


def runs_on(device: torch.device) -> bool:
    """Whether the kernels can be run there."""
    return device.type == "cuda" or bool(triton.knobs.runtime.interpret)


def config_for(rows: int, n: int, k: int, dtype: torch.dtype) -> Tile:
    """A tile by shape alone, the same for 1 to 16 rows; those for 16 bits are the fastest of a sweep on an H200."""
    if not 1 <= rows <= MOST_ROWS:
        raise ValueError(f"1 to {MOST_ROWS} rows, not {rows}")
    if dtype.itemsize > 2:  # what tensor cores do to float32 is not float32
        tile = Tile(8, 256, 4, 5, dot=False)
    elif k >= 8192:
        tile = Tile(16, 512, 4, 4, dot=True)
    elif n >= 16384:
        tile = Tile(16, 256, 4, 4, dot=True)
    elif n >= 8192:
        tile = Tile(32, 128, 2, 5, dot=True)
    elif n >= 2048:
        tile = Tile(16, 256, 4, 6 if n >= 4096 else 5, dot=True)
    elif n >= 1024:  # few outputs: small tiles, or multiprocessors are idle
        tile = Tile(8, 256, 4, 8, dot=True)
    else:
        tile = Tile(4, 1024, 8, 6, dot=False)
    return tile._replace(k=max(16 * tile.warps, min(tile.k, triton.next_power_of_2(k))))


def gated_config_for(rows: int, n: int, k: int, dtype: torch.dtype) -> Tile:
    """The same for a gated layer, which reads two tiles at a time."""
    if dtype.itemsize > 2:
        tile = Tile(16, 32, 4, 3, dot=False)
    elif n >= 8192:
        tile = Tile(16, 512, 4, 3, dot=True)
    elif n >= 2048:
        tile = Tile(16, 128, 2, 4, dot=True)
    else:
        tile = Tile(16, 256, 4, 5, dot=True)
    if not 1 <= rows <= MOST_ROWS:
        raise ValueError(f"1 to {MOST_ROWS} rows, not {rows}")
    least = 16 * (tile.warps if tile.dot else 1)
    return tile._replace(k=max(least, min(tile.k, triton.next_power_of_2(k))))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Each row over its root mean square, by float32, rounded and then times the weight."""  # x: [.., n], weight: [n]
    n = x.shape[-1]
    if n > LONGEST_NORM:
        raise ValueError(f"a norm of {n}; at most {LONGEST_NORM}")
    flat = x.reshape(-1, n)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    out = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))
    block = triton.next_power_of_2(n)
    _norm_kernel[(flat.shape[0],)](
        flat, weight, out, flat.stride(0), eps, N=n, BLOCK=block, num_warps=min(16, max(1, block // 256))
    )
    return out


def rms_norm_plain(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """What `rms_norm` computes."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def skinny_linear(
    x: Tensor,  # [rows, k]
    weight: Tensor,  # [n, k], contiguous
    bias: Tensor | None = None,  # [n]
    out: Tensor | None = None,  # [rows, n]
    tile: Tile | None = None,
) -> Tensor:
    """A linear layer of up to 16 rows, added up in float32."""
    (rows, k), n = x.shape, weight.shape[0]
    tile = tile or config_for(rows, n, k, x.dtype)
    out = x.new_empty(rows, n) if out is None else out
    x, sizes = x.contiguous(), {"N": n, "K": k, "BN": tile.n, "STAGES": tile.stages, "num_warps": tile.warps}
    tiles, given = triton.cdiv(n, tile.n), (x, weight, weight if bias is None else bias, out, rows)
    if tile.dot:
        _dot_kernel[(tiles,)](
            *given, **sizes, BIAS=bias is not None, ROWS=8 if rows <= 8 else 16, PARTS=tile.warps,
            BK=tile.k // tile.warps,
        )  # fmt: skip
    else:
        groups = triton.cdiv(rows, GROUP)
        each = triton.cdiv(rows, groups)
        _fma_kernel[(tiles, groups)](*given, **sizes, BIAS=bias is not None, ROWS=each, BK=tile.k)
    return out


def skinny_linear_plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What `skinny_linear` computes."""
    return functional.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


def gated_linear(
    x: Tensor,  # [rows, k]
    gate: Tensor,  # [n, k], contiguous
    up: Tensor,  # [n, k], contiguous
    activation: str,
    tile: Tile | None = None,
) -> Tensor:  # [rows, n]
    """`activation(gate(x)) * up(x)` of up to 16 rows, rounded wherever a tensor of its own would be."""
    (rows, k), n = x.shape, gate.shape[0]
    tile = tile or gated_config_for(rows, n, k, x.dtype)
    out, x = x.new_empty(rows, n), x.contiguous()
    _gated_kernel[(triton.cdiv(n, tile.n),)](
        x, gate, up, out, rows, N=n, K=k, ROWS=8 if rows <= 8 and tile.dot else 16, PARTS=tile.warps if tile.dot else 1,
        BN=tile.n, BK=tile.k // tile.warps if tile.dot else tile.k, STAGES=tile.stages, ACTIVATION=activation,
        num_warps=tile.warps,
    )  # fmt: skip
    return out


def gated_linear_plain(x: Tensor, gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """What `gated_linear` computes."""
    return ACTIVATIONS[activation](skinny_linear_plain(x, gate)) * skinny_linear_plain(x, up)


class Answer(NamedTuple):
    """How a router's answer is to look."""

    logits: torch.dtype  # they are rounded to it before anything is made of them
    weights: torch.dtype = torch.float32
    renormalise: bool = True  # the weights of a row's choice add up to `scale`
    scale: float = 1.0


def route(
    x: Tensor, weight: Tensor, top_k: int, answer: Answer, at_once: bool | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Every expert's logit, and the weights and numbers of the `top_k` that are most likely by softmax, best first.

    Of equals the one with the lower number is taken. Numbers are in range whatever the logits are.
    """
    # x: [rows, k], weight: [experts, k] -> [rows, experts], [rows, top_k], [rows, top_k] int64
    (rows, k), count = x.shape, weight.shape[0]
    if not 1 <= top_k <= count <= MOST_EXPERTS:
        raise ValueError(f"{top_k} of {count} experts; at most {MOST_EXPERTS}")
    wide = triton.next_power_of_2(count)
    logits = x.new_empty(rows, count, dtype=answer.logits)
    weights = x.new_empty(rows, top_k, dtype=answer.weights)
    index = x.new_empty(rows, top_k, dtype=torch.int64)
    how = {"E": count, "WIDE": wide, "TOP_K": top_k, "RENORMALISE": answer.renormalise, "SCALE": answer.scale}
    if count * k <= _ONE_KERNEL if at_once is None else at_once:
        block = min(max(16, 8192 // wide), triton.next_power_of_2(k))
        _route_kernel[(rows,)](
            x.contiguous(), weight, logits, weights, index, **how, K=k, BK=block, STAGES=5, num_warps=4
        )
    else:
        skinny_linear(x, weight, out=logits)
        _choose_kernel[(rows,)](logits, weights, index, **how, num_warps=4 if 32 <= wide <= 128 else 1)
    return logits, weights, index


def route_plain(x: Tensor, weight: Tensor, top_k: int, answer: Answer) -> tuple[Tensor, Tensor, Tensor]:
    """What `route` computes."""
    logits = (x.float() @ weight.float().T).to(answer.logits)
    values, index = logits.float().softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    values, index = values[:, :top_k], index[:, :top_k].contiguous()
    if answer.renormalise:
        values = values / values.sum(dim=-1, keepdim=True)
    return logits, (values * answer.scale).to(answer.weights), index


@triton.jit
def _norm_kernel(x, weight, out, x_row, eps, N: tl.constexpr, BLOCK: tl.constexpr):
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    given = tl.load(x + row * x_row + n, mask=n < N, other=0.0)
    w = tl.load(weight + n, mask=n < N, other=0.0)
    wide = given.to(tl.float32)
    y = (wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / N + eps)).to(given.dtype)
    tl.store(out + row * N + n, (w.to(tl.float32) * y.to(tl.float32)).to(out.dtype.element_ty), mask=n < N)


@triton.jit
def _load(at, n, k, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """A tile of weights, unmasked if all `n` and `k` are inside."""
    return tl.load(at) if N % BN == 0 and K % BK == 0 else tl.load(at, mask=(n < N) & (k < K), other=0.0)


@triton.jit(do_not_specialize=["rows"])
def _fma_kernel(
    x, weight, bias, out, rows, N: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    WHOLE: tl.constexpr = N % BN == 0 and K % BK == 0
    fma_tile(x, weight, bias, out, tl.program_id(0), rows, N, N, WHOLE, K, BIAS, ROWS, BN, BK, STAGES)


@triton.jit(do_not_specialize=["rows"])
def _dot_kernel(
    x, weight, bias, out, rows, N: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    WHOLE: tl.constexpr = N % BN == 0 and K % (PARTS * BK) == 0
    dot_tile(x, weight, bias, out, tl.program_id(0), rows, N, N, WHOLE, K, BIAS, ROWS, PARTS, BN, BK, STAGES)


@triton.jit(do_not_specialize=["rows"])
def _gated_kernel(
    x, gate, up, out, rows, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    first, m = tl.program_id(0).to(tl.int64) * BN, tl.arange(0, ROWS)
    part, j, k = tl.arange(0, PARTS)[:, None, None] * BK, tl.arange(0, BN), tl.arange(0, BK)
    n = first + j
    at = first * K + (part + j[None, :, None] * K + k[None, None, :])  # [PARTS, BN, BK]
    x_at = x + (part + m[None, None, :] * K + k[None, :, None])  # [PARTS, BK, ROWS]
    a = tl.zeros((PARTS, BN, ROWS), tl.float32)
    b = tl.zeros((PARTS, BN, ROWS), tl.float32)
    for start in tl.range(0, K, PARTS * BK, num_stages=STAGES):
        here, where = n[None, :, None], start + part + k[None, None, :]
        v = tl.load(x_at + start, mask=(m[None, None, :] < rows) & (start + part + k[None, :, None] < K), other=0.0)
        a = tl.dot(_load(gate + at + start, here, where, N, K, BN, PARTS * BK), v, a, input_precision="ieee")
        b = tl.dot(_load(up + at + start, here, where, N, K, BN, PARTS * BK), v, b, input_precision="ieee")
    kind = out.dtype.element_ty
    g = activate(tl.sum(a, axis=0).to(kind).to(tl.float32), ACTIVATION).to(kind).to(tl.float32)
    y = g * tl.sum(b, axis=0).to(kind).to(tl.float32)
    tl.store(out + m[None, :] * N + n[:, None], y.to(kind), mask=(m[None, :] < rows) & (n[:, None] < N))


@triton.jit
def _choose(
    z, row, weights, index,
    E: tl.constexpr, WIDE: tl.constexpr, TOP_K: tl.constexpr, RENORMALISE: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Softmax of a row of logits, and each expert's rank: how many others come before it."""
    e = tl.arange(0, WIDE)
    z = tl.where(e < E, z.to(tl.float32), -float("inf"))
    p = tl.exp(z - tl.max(z, axis=0))
    p = tl.where(e < E, p / tl.sum(p, axis=0), 0.0)
    # positive numbers are in order of their bits, and so is what is not a number: ranks are always all different
    key = (p.to(tl.int32, bitcast=True).to(tl.int64) << 32) + (WIDE - e)
    key = tl.where(e < E, key, -(1 << 63))
    if WIDE <= 128:
        rank = tl.sum((key[None, :] > key[:, None]).to(tl.int32), axis=1)
    else:  # too many to compare each with each
        rank = tl.full((WIDE,), TOP_K, tl.int32)
        for i in tl.static_range(TOP_K):
            best = key == tl.max(key, axis=0)
            rank = tl.where(best, i, rank)
            key = tl.where(best, -(1 << 63), key)
    chosen = rank < TOP_K
    if RENORMALISE:
        p = p / tl.sum(tl.where(chosen, p, 0.0), axis=0)
    place = row * TOP_K + rank
    tl.store(weights + place, (p * SCALE).to(weights.dtype.element_ty), mask=chosen)
    tl.store(index + place, e.to(tl.int64), mask=chosen)


@triton.jit
def _route_kernel(
    x, weight, logits, weights, index,
    E: tl.constexpr, WIDE: tl.constexpr, TOP_K: tl.constexpr, RENORMALISE: tl.constexpr, SCALE: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row, e, k = tl.program_id(0), tl.arange(0, WIDE), tl.arange(0, BK)
    sums = tl.zeros((WIDE, BK), tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        w = _load(weight + e[:, None] * K + (start + k)[None, :], e[:, None], (start + k)[None, :], E, K, WIDE, BK)
        v = tl.load(x + row * K + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        sums = tl.fma(w.to(tl.float32), v[None, :], sums)
    z = tl.sum(sums, axis=1).to(logits.dtype.element_ty)
    tl.store(logits + row * E + e, z, mask=e < E)
    _choose(z, row, weights, index, E, WIDE, TOP_K, RENORMALISE, SCALE)


@triton.jit
def _choose_kernel(
    logits, weights, index,
    E: tl.constexpr, WIDE: tl.constexpr, TOP_K: tl.constexpr, RENORMALISE: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    row, e = tl.program_id(0), tl.arange(0, WIDE)
    z = tl.load(logits + row * E + e, mask=e < E)
    _choose(z, row, weights, index, E, WIDE, TOP_K, RENORMALISE, SCALE)
