"""RMSNorm, linear layers, gated MLP layers and routers for 1 to 64 rows: memory-bound Triton kernels.

Every kernel is batch-invariant: tiles, and so the order of additions, depend on the weights' shape only. A row's result
is bit-equal whichever other rows (up to 64 in all) are in the batch. A program computes a tile of outputs for up to 16
rows; programs that share a tile of weights are neighbours, so it is read from memory once. Each `*_plain` function is
the PyTorch reference of the kernel of that name.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor
from torch.nn import functional

MAX_ROWS = 64
_DOT_ROWS = 16  # rows that one program multiplies with tensor cores
MAX_EXPERTS = 512
MAX_NORM_SIZE = 16384
_FMA_ROWS = 8  # rows that one program of `_fma_tile` has registers for
_ONE_KERNEL_ELEMENTS = 1 << 16  # one multiprocessor reads a router of this size faster than a second launch takes

# ---- activations

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Apply one of `ACTIVATIONS` in float32."""
    if ACTIVATION == "silu":
        y = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(z)) / 2 is the sigmoid of 2z
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        tl.static_assert(ACTIVATION == "relu", "unknown activation")
        y = tl.maximum(x, 0.0)
    return y


# ---- devices and tile sizes


class LinearTile(NamedTuple):
    """Tile of a weight matrix: `block_n` outputs by `block_k` inputs, with the inputs divided among the warps."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    use_dot: bool  # tensor cores, which add 16 inputs at a time; otherwise FMA with one accumulator per input


def supports_device(device: torch.device) -> bool:
    """Return whether Triton kernels can run on the device (CUDA, or anything in Triton's interpreter)."""
    return device.type == "cuda" or bool(triton.knobs.runtime.interpret)


def select_linear_tile(rows: int, n: int, k: int, dtype: torch.dtype) -> LinearTile:
    """Select the tile of a linear layer by its shape; equal for any number of rows.

    The tiles for 16-bit types are the fastest of a sweep on an H200.
    """
    _check_rows(rows)
    if dtype.itemsize > 2:  # tensor cores would round float32 to TF32
        tile = LinearTile(8, 256, 4, 5, use_dot=False)
    elif k >= 8192:
        tile = LinearTile(16, 512, 4, 4, use_dot=True)
    elif n >= 16384:
        tile = LinearTile(16, 256, 4, 4, use_dot=True)
    elif n >= 8192:
        tile = LinearTile(32, 128, 2, 5, use_dot=True)
    elif n >= 2048:
        tile = LinearTile(16, 256, 4, 6 if n >= 4096 else 5, use_dot=True)
    elif n >= 1024:  # few outputs: small tiles, so that no multiprocessor is idle
        tile = LinearTile(8, 256, 4, 8, use_dot=True)
    else:
        tile = LinearTile(4, 1024, 8, 6, use_dot=False)
    return _clamp_block_k(tile, k, 16 * tile.num_warps)


def select_fused_tile(rows: int, counts: Sequence[int], k: int, dtype: torch.dtype) -> LinearTile:
    """Select the tile of `fused_linears`; `small_batch_linear` with this tile returns bit-equal results per layer."""
    if dtype.itemsize > 2:
        return select_linear_tile(rows, sum(counts), k, dtype)
    if k > 5120:  # the fastest of a sweep on an H200, or within 3 % of it
        tile = LinearTile(16, 256, 4, 6, use_dot=True)
    elif sum(counts) >= 7168:
        tile = LinearTile(32, 128, 2, 5, use_dot=True)
    else:
        tile = LinearTile(16, 128, 2, 6, use_dot=True)
    return _clamp_block_k(tile, k, 16 * tile.num_warps)


def select_gated_tile(rows: int, n: int, k: int, dtype: torch.dtype) -> LinearTile:
    """Select the tile of a gated layer, which holds two weight tiles at a time."""
    if dtype.itemsize > 2:
        tile = LinearTile(16, 32, 4, 3, use_dot=False)
    elif n >= 8192:
        tile = LinearTile(16, 512, 4, 3, use_dot=True)
    elif n >= 2048:
        tile = LinearTile(16, 128, 2, 4, use_dot=True)
    else:
        tile = LinearTile(16, 256, 4, 5, use_dot=True)
    _check_rows(rows)
    return _clamp_block_k(tile, k, 16 * (tile.num_warps if tile.use_dot else 1))


def _check_rows(rows: int) -> None:
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"expected 1 to {MAX_ROWS} rows, got {rows}")


def _dot_groups(rows: int) -> tuple[int, int]:
    """Divide rows among programs that use tensor cores; return the number of groups and the rows of each."""
    return triton.cdiv(rows, _DOT_ROWS), 8 if rows <= 8 else _DOT_ROWS


def _fma_groups(rows: int) -> tuple[int, int]:
    """Divide rows among programs that use FMA; return the number of groups and the rows of each.

    More rows than captured forwards of one sequence have share one kernel, so that no prompt compiles another.
    """
    groups = triton.cdiv(rows, _FMA_ROWS)
    return groups, _FMA_ROWS if rows > _DOT_ROWS else triton.cdiv(rows, groups)


def _clamp_block_k(tile: LinearTile, k: int, minimum: int) -> LinearTile:
    """Shrink `block_k` to the input size, but not below `minimum`."""
    return tile._replace(block_k=max(minimum, min(tile.block_k, triton.next_power_of_2(k))))


# ---- RMSNorm


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize the last dimension in float32, round to x's dtype, then multiply by the weight."""
    # x: [..., n], weight: [n] -> [..., n]
    n = x.shape[-1]
    if n > MAX_NORM_SIZE:
        raise ValueError(f"cannot normalize {n} elements; at most {MAX_NORM_SIZE}")
    flat = x.reshape(-1, n)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    out = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype))
    block = triton.next_power_of_2(n)
    _norm_kernel[(flat.shape[0],)](
        flat, weight, out, flat.stride(0), eps, N=n, BLOCK=block, num_warps=min(16, max(1, block // 256))
    )
    return out


def rms_norm_plain(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """PyTorch reference of `rms_norm`."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


@triton.jit
def _norm_kernel(x, weight, out, x_row_stride, eps, N: tl.constexpr, BLOCK: tl.constexpr):
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    v = tl.load(x + row * x_row_stride + n, mask=n < N, other=0.0)
    w = tl.load(weight + n, mask=n < N, other=0.0)
    wide = v.to(tl.float32)
    y = (wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / N + eps)).to(v.dtype)
    tl.store(out + row * N + n, (w.to(tl.float32) * y.to(tl.float32)).to(out.dtype.element_ty), mask=n < N)


# ---- linear layers


def small_batch_linear(
    x: Tensor,  # [rows, k]
    weight: Tensor,  # [n, k], contiguous
    bias: Tensor | None = None,  # [n]
    out: Tensor | None = None,  # [rows, n]
    tile: LinearTile | None = None,
) -> Tensor:
    """Apply a linear layer to up to 64 rows with float32 accumulation."""
    (rows, k), n = x.shape, weight.shape[0]
    tile = tile or select_linear_tile(rows, n, k, x.dtype)
    out = x.new_empty(rows, n) if out is None else out
    sizes = {
        "N": n, "K": k, "BIAS": bias is not None, "BLOCK_N": tile.block_n, "STAGES": tile.num_stages,
        "num_warps": tile.num_warps,
    }  # fmt: skip
    tiles, args = triton.cdiv(n, tile.block_n), (x.contiguous(), weight, weight if bias is None else bias, out, rows)
    if tile.use_dot:
        groups, each = _dot_groups(rows)
        _dot_kernel[(tiles * groups,)](
            *args, groups, **sizes, ROWS=each, K_PARTS=tile.num_warps, BLOCK_K=tile.block_k // tile.num_warps
        )
    else:
        groups, each = _fma_groups(rows)
        _fma_kernel[(tiles * groups,)](*args, groups, **sizes, ROWS=each, BLOCK_K=tile.block_k)
    return out


def small_batch_linear_plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """PyTorch reference of `small_batch_linear`."""
    return functional.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


@triton.jit(do_not_specialize=["rows"])
def _fma_kernel(
    x, weight, bias, out, rows, groups, N: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    EVEN: tl.constexpr = N % BLOCK_N == 0 and K % BLOCK_K == 0
    tile, row = tl.program_id(0) // groups, tl.program_id(0) % groups * ROWS
    _fma_tile(x, weight, bias, out, tile, row, rows, N, N, EVEN, K, BIAS, ROWS, BLOCK_N, BLOCK_K, STAGES)


@triton.jit(do_not_specialize=["rows"])
def _dot_kernel(
    x, weight, bias, out, rows, groups, N: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr,
    K_PARTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    EVEN: tl.constexpr = N % BLOCK_N == 0 and K % (K_PARTS * BLOCK_K) == 0
    tile, row = tl.program_id(0) // groups, tl.program_id(0) % groups * ROWS
    _dot_tile(x, weight, bias, out, tile, row, rows, N, N, EVEN, K, BIAS, ROWS, K_PARTS, BLOCK_N, BLOCK_K, STAGES)


# `_fma_tile` and `_dot_tile` compute one tile of outputs for `ROWS` rows from `row` on.
# weight: [n_count, K], bias: [bias_count], out: [rows, n_count]; EVEN: tiles divide `n_count` and K without remainder


@triton.jit
def _fma_tile(
    x, weight, bias, out, tile, row, rows, n_count, bias_count, EVEN: tl.constexpr, K: tl.constexpr,
    BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Accumulate each of the `BLOCK_K` inputs separately with FMA; add the accumulators once, at the end."""
    first = tile.to(tl.int64) * BLOCK_N
    j, k = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    n = first + j
    weight_ptrs = weight + first * K + (j[:, None] * K + k[None, :])
    sums = ()
    for _ in tl.static_range(ROWS):
        sums += (tl.zeros((BLOCK_N, BLOCK_K), tl.float32),)  # type: ignore[assignment]
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        w = _load_tile(weight_ptrs + start, n[:, None], start + k[None, :], n_count, K, EVEN).to(tl.float32)
        new_sums = ()
        for i in tl.static_range(ROWS):
            v = tl.load(x + (row + i) * K + start + k, mask=(row + i < rows) & (start + k < K), other=0.0)
            new_sums += (tl.fma(w, v.to(tl.float32)[None, :], sums[i]),)  # type: ignore[assignment]
        sums = new_sums
    for i in tl.static_range(ROWS):
        y = tl.sum(sums[i], axis=1)
        if BIAS:
            y += tl.load(bias + n, mask=n < bias_count, other=0.0).to(tl.float32)
        in_range = (n < n_count) & (row + i < rows)
        tl.store(out + (row + i) * n_count + n, y.to(out.dtype.element_ty), mask=in_range)


@triton.jit
def _dot_tile(
    x, weight, bias, out, tile, row, rows, n_count, bias_count, EVEN: tl.constexpr, K: tl.constexpr,
    BIAS: tl.constexpr, ROWS: tl.constexpr, K_PARTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Multiply with tensor cores; each of the `K_PARTS` warps accumulates its own `BLOCK_K` inputs per iteration."""
    first, m = tile.to(tl.int64) * BLOCK_N, row + tl.arange(0, ROWS)
    part, j, k = tl.arange(0, K_PARTS)[:, None, None] * BLOCK_K, tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    n = first + j
    weight_ptrs = weight + first * K + (part + j[None, :, None] * K + k[None, None, :])  # [K_PARTS, BLOCK_N, BLOCK_K]
    x_ptrs = x + (part + m[None, None, :] * K + k[None, :, None])  # [K_PARTS, BLOCK_K, ROWS]
    y = tl.zeros((K_PARTS, BLOCK_N, ROWS), tl.float32)
    for start in tl.range(0, K, K_PARTS * BLOCK_K, num_stages=STAGES):
        w = _load_tile(weight_ptrs + start, n[None, :, None], start + part + k[None, None, :], n_count, K, EVEN)
        v = tl.load(x_ptrs + start, mask=(m[None, None, :] < rows) & (start + part + k[None, :, None] < K), other=0.0)
        y = tl.dot(w, v, y, input_precision="ieee")
    y = tl.sum(y, axis=0)
    if BIAS:
        y += tl.load(bias + n, mask=n < bias_count, other=0.0).to(tl.float32)[:, None]
    in_range = (m[None, :] < rows) & (n[:, None] < n_count)
    tl.store(out + m[None, :] * n_count + n[:, None], y.to(out.dtype.element_ty), mask=in_range)


@triton.jit
def _load_tile(ptrs, n, k, n_count, K: tl.constexpr, EVEN: tl.constexpr):
    """Load a tile of weights; without a mask if the tiles divide the matrix evenly."""
    return tl.load(ptrs) if EVEN else tl.load(ptrs, mask=(n < n_count) & (k < K), other=0.0)


# ---- several linear layers of the same input in one launch, such as the Q, K and V projections


def fused_linears(
    x: Tensor,  # [rows, k]
    weights: Sequence[Tensor],  # per layer [n, k], contiguous
    biases: Sequence[Tensor | None],  # per layer [n]
    tile: LinearTile | None = None,
) -> list[Tensor]:  # per layer [rows, n]
    """Apply several linear layers to up to 64 rows in one launch, where each alone would not fill the device."""
    (rows, k), counts = x.shape, tuple(len(weight) for weight in weights)
    tile = tile or select_fused_tile(rows, counts, k, x.dtype)
    outs = [x.new_empty(rows, n) for n in counts]
    bias_pointers = [weight if bias is None else bias for weight, bias in zip(weights, biases, strict=True)]
    bias_counts = tuple(n if bias is not None else 0 for bias, n in zip(biases, counts, strict=True))
    sizes = {
        "COUNTS": counts, "BIAS_COUNTS": bias_counts, "K": k, "BIAS": any(bias_counts),
        "EVEN": all(n % tile.block_n == 0 for n in counts) and k % tile.block_k == 0,
        "BLOCK_N": tile.block_n, "STAGES": tile.num_stages, "num_warps": tile.num_warps,
    }  # fmt: skip
    tiles, pointers = (
        sum(triton.cdiv(n, tile.block_n) for n in counts),
        (tuple(weights), tuple(bias_pointers), tuple(outs)),
    )
    if tile.use_dot:
        groups, each = _dot_groups(rows)
        _fused_dot_kernel[(tiles * groups,)](
            x.contiguous(), *pointers, rows, groups, **sizes, ROWS=each, K_PARTS=tile.num_warps,
            BLOCK_K=tile.block_k // tile.num_warps,
        )  # fmt: skip
    else:
        groups, each = _fma_groups(rows)
        _fused_fma_kernel[(tiles * groups,)](
            x.contiguous(), *pointers, rows, groups, **sizes, ROWS=each, BLOCK_K=tile.block_k
        )
    return outs


def fused_linears_plain(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    """PyTorch reference of `fused_linears`."""
    return [small_batch_linear_plain(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


@triton.jit
def _layer_of_tile(
    tile, weights, biases, outs, COUNTS: tl.constexpr, BIAS_COUNTS: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Find the layer that a tile belongs to, and the tile's number within that layer."""
    weight, bias, out, n_count, bias_count, first = weights[0], biases[0], outs[0], COUNTS[0], BIAS_COUNTS[0], 0
    start = 0
    for i in tl.static_range(1, len(COUNTS)):
        start += (COUNTS[i - 1] + BLOCK_N - 1) // BLOCK_N
        later = tile >= start
        weight, bias = tl.where(later, weights[i], weight), tl.where(later, biases[i], bias)
        out, first = tl.where(later, outs[i], out), tl.where(later, start, first)
        n_count, bias_count = tl.where(later, COUNTS[i], n_count), tl.where(later, BIAS_COUNTS[i], bias_count)
    return weight, bias, out, tile - first, n_count, bias_count


@triton.jit(do_not_specialize=["rows"])
def _fused_fma_kernel(
    x, weights, biases, outs, rows, groups, COUNTS: tl.constexpr, BIAS_COUNTS: tl.constexpr, EVEN: tl.constexpr,
    K: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    weight, bias, out, tile, n, b = _layer_of_tile(
        tl.program_id(0) // groups, weights, biases, outs, COUNTS, BIAS_COUNTS, BLOCK_N
    )
    row = tl.program_id(0) % groups * ROWS
    _fma_tile(x, weight, bias, out, tile, row, rows, n, b, EVEN, K, BIAS, ROWS, BLOCK_N, BLOCK_K, STAGES)


@triton.jit(do_not_specialize=["rows"])
def _fused_dot_kernel(
    x, weights, biases, outs, rows, groups, COUNTS: tl.constexpr, BIAS_COUNTS: tl.constexpr, EVEN: tl.constexpr,
    K: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, K_PARTS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    weight, bias, out, tile, n, b = _layer_of_tile(
        tl.program_id(0) // groups, weights, biases, outs, COUNTS, BIAS_COUNTS, BLOCK_N
    )
    row = tl.program_id(0) % groups * ROWS
    _dot_tile(x, weight, bias, out, tile, row, rows, n, b, EVEN, K, BIAS, ROWS, K_PARTS, BLOCK_N, BLOCK_K, STAGES)


# ---- gated MLP layers


def gated_linear(
    x: Tensor,  # [rows, k]
    gate: Tensor,  # [n, k], contiguous
    up: Tensor,  # [n, k], contiguous
    activation: str,
    tile: LinearTile | None = None,
) -> Tensor:  # [rows, n]
    """Compute `activation(gate(x)) * up(x)` of up to 64 rows, with the roundings of separate PyTorch operations."""
    (rows, k), n = x.shape, gate.shape[0]
    tile = tile or select_gated_tile(rows, n, k, x.dtype)
    out, x = x.new_empty(rows, n), x.contiguous()
    k_parts = tile.num_warps if tile.use_dot else 1
    groups, each = _dot_groups(rows)
    _gated_kernel[(triton.cdiv(n, tile.block_n) * groups,)](
        x, gate, up, out, rows, groups, N=n, K=k, ROWS=each if tile.use_dot else _DOT_ROWS, K_PARTS=k_parts,
        BLOCK_N=tile.block_n, BLOCK_K=tile.block_k // k_parts, STAGES=tile.num_stages, ACTIVATION=activation,
        num_warps=tile.num_warps,
    )  # fmt: skip
    return out


def gated_linear_plain(x: Tensor, gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """PyTorch reference of `gated_linear`."""
    return ACTIVATIONS[activation](small_batch_linear_plain(x, gate)) * small_batch_linear_plain(x, up)


@triton.jit(do_not_specialize=["rows"])
def _gated_kernel(
    x, gate, up, out, rows, groups, N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, K_PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    EVEN: tl.constexpr = N % BLOCK_N == 0 and K % (K_PARTS * BLOCK_K) == 0
    first = (tl.program_id(0) // groups).to(tl.int64) * BLOCK_N
    m = tl.program_id(0) % groups * ROWS + tl.arange(0, ROWS)
    part, j, k = tl.arange(0, K_PARTS)[:, None, None] * BLOCK_K, tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    n = first + j
    offsets = first * K + (part + j[None, :, None] * K + k[None, None, :])  # [K_PARTS, BLOCK_N, BLOCK_K]
    x_ptrs = x + (part + m[None, None, :] * K + k[None, :, None])  # [K_PARTS, BLOCK_K, ROWS]
    a = tl.zeros((K_PARTS, BLOCK_N, ROWS), tl.float32)
    b = tl.zeros((K_PARTS, BLOCK_N, ROWS), tl.float32)
    for start in tl.range(0, K, K_PARTS * BLOCK_K, num_stages=STAGES):
        outputs, inputs = n[None, :, None], start + part + k[None, None, :]
        v = tl.load(x_ptrs + start, mask=(m[None, None, :] < rows) & (start + part + k[None, :, None] < K), other=0.0)
        a = tl.dot(_load_tile(gate + offsets + start, outputs, inputs, N, K, EVEN), v, a, input_precision="ieee")
        b = tl.dot(_load_tile(up + offsets + start, outputs, inputs, N, K, EVEN), v, b, input_precision="ieee")
    dtype = out.dtype.element_ty
    g = activate(tl.sum(a, axis=0).to(dtype).to(tl.float32), ACTIVATION).to(dtype).to(tl.float32)
    y = g * tl.sum(b, axis=0).to(dtype).to(tl.float32)
    tl.store(out + m[None, :] * N + n[:, None], y.to(dtype), mask=(m[None, :] < rows) & (n[:, None] < N))


# ---- routers


class RouterOutputFormat(NamedTuple):
    """Types and scaling of a router's outputs."""

    logits: torch.dtype  # logits are rounded to it before the softmax
    weights: torch.dtype = torch.float32
    renormalize: bool = True  # the top-k weights of a row sum to `scale`
    scale: float = 1.0


def route(
    x: Tensor,  # [rows, k]
    weight: Tensor,  # [experts, k]
    top_k: int,
    output: RouterOutputFormat,
    one_kernel: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # [rows, experts], [rows, top_k], [rows, top_k] int64
    """Return all logits, and the softmax weights and ids of each row's top-k experts, best first.

    The lower id wins a tie. Ids are distinct and in range even if logits are NaN or infinite. `one_kernel` overrides
    the choice between one launch (small routers) and two.
    """
    (rows, k), count = x.shape, weight.shape[0]
    _check_top_k(top_k, count)
    padded = triton.next_power_of_2(count)
    logits = x.new_empty(rows, count, dtype=output.logits)
    weights = x.new_empty(rows, top_k, dtype=output.weights)
    index = x.new_empty(rows, top_k, dtype=torch.int64)
    sizes = {"E": count, "E_PAD": padded, "TOP_K": top_k, "RENORMALIZE": output.renormalize, "SCALE": output.scale}
    if count * k <= _ONE_KERNEL_ELEMENTS if one_kernel is None else one_kernel:
        _route_kernel[(rows,)](
            x.contiguous(), weight, logits, weights, index, **sizes, K=k, BLOCK_K=_router_block(padded, k), STAGES=5,
            num_warps=4,
        )  # fmt: skip
    else:
        small_batch_linear(x, weight, out=logits)
        _top_k_kernel[(rows,)](logits, weights, index, **sizes, num_warps=4 if 32 <= padded <= 128 else 1)
    return logits, weights, index


def route_plain(x: Tensor, weight: Tensor, top_k: int, output: RouterOutputFormat) -> tuple[Tensor, Tensor, Tensor]:
    """PyTorch reference of `route`."""
    logits = (x.float() @ weight.float().T).to(output.logits)
    values, index = logits.float().softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    values, index = values[:, :top_k], index[:, :top_k].contiguous()
    if output.renormalize:
        values = values / values.sum(dim=-1, keepdim=True)
    return logits, (values * output.scale).to(output.weights), index


def norm_and_route_layers(
    x: Tensor,  # [layers, rows, k]
    norms: Tensor,  # [layers, k]
    eps: float,
    routers: Tensor,  # [layers, experts, k]
    top_k: int,
) -> tuple[Tensor, Tensor]:  # [layers, rows, top_k] int64 and float32
    """Run the norm and the router of several layers, each on its own hidden states, in one launch.

    Returns the ids of each row's top-k experts, best first, and their weights, which sum to one. Predictions use it.
    """
    (layers, rows, k), count = x.shape, routers.shape[1]
    _check_top_k(top_k, count)
    padded = triton.next_power_of_2(count)
    index = x.new_empty(layers, rows, top_k, dtype=torch.int64)
    weights = x.new_empty(layers, rows, top_k, dtype=torch.float32)
    _route_layers_kernel[layers, rows](
        x.contiguous(), norms, routers, weights, index, eps, rows, E=count, E_PAD=padded, TOP_K=top_k, K=k,
        BLOCK_K=_router_block(padded, k), STAGES=4, num_warps=4,
    )  # fmt: skip
    return index, weights


def norm_and_route_layers_plain(
    x: Tensor, norms: Tensor, eps: float, routers: Tensor, top_k: int
) -> tuple[Tensor, Tensor]:
    """PyTorch reference of `norm_and_route_layers`."""
    outputs = [
        route_plain(rms_norm_plain(states, norm, eps), router, top_k, RouterOutputFormat(x.dtype))
        for states, norm, router in zip(x, norms, routers, strict=True)
    ]
    return torch.stack([index for _, _, index in outputs]), torch.stack([weights for _, weights, _ in outputs])


def _check_top_k(top_k: int, count: int) -> None:
    if not 1 <= top_k <= count <= MAX_EXPERTS:
        raise ValueError(f"cannot select {top_k} of {count} experts; at most {MAX_EXPERTS} experts are supported")


def _router_block(padded: int, k: int) -> int:
    """Return the inputs that a program reads at a time for all (padded) experts."""
    block: int = min(max(16, 8192 // padded), triton.next_power_of_2(k))
    return block


@triton.jit
def _store_top_k(
    z, row, weights, index,
    E: tl.constexpr, E_PAD: tl.constexpr, TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Apply softmax to a row of logits and store the experts of rank below `TOP_K`."""
    e = tl.arange(0, E_PAD)
    z = tl.where(e < E, z.to(tl.float32), -float("inf"))
    p = tl.exp(z - tl.max(z, axis=0))
    p = tl.where(e < E, p / tl.sum(p, axis=0), 0.0)
    # the bits of non-negative floats, and of NaN, sort as integers; with the id below them all keys are distinct
    key = (p.to(tl.int32, bitcast=True).to(tl.int64) << 32) + (E_PAD - e)
    key = tl.where(e < E, key, -(1 << 63))
    if E_PAD <= 128:
        rank = tl.sum((key[None, :] > key[:, None]).to(tl.int32), axis=1)
    else:  # too many for all pairs of comparisons
        rank = tl.full((E_PAD,), TOP_K, tl.int32)
        for i in tl.static_range(TOP_K):
            best = key == tl.max(key, axis=0)
            rank = tl.where(best, i, rank)
            key = tl.where(best, -(1 << 63), key)
    selected = rank < TOP_K
    if RENORMALIZE:
        p = p / tl.sum(tl.where(selected, p, 0.0), axis=0)
    offset = row * TOP_K + rank
    tl.store(weights + offset, (p * SCALE).to(weights.dtype.element_ty), mask=selected)
    tl.store(index + offset, e.to(tl.int64), mask=selected)


@triton.jit
def _load_router(router, e, k, E: tl.constexpr, K: tl.constexpr, E_PAD: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load a block of inputs of all experts' router weights."""  # [E_PAD, BLOCK_K]
    EVEN: tl.constexpr = E % E_PAD == 0 and K % BLOCK_K == 0
    return _load_tile(router + e[:, None] * K + k[None, :], e[:, None], k[None, :], E, K, EVEN)


@triton.jit
def _route_kernel(
    x, weight, logits, weights, index,
    E: tl.constexpr, E_PAD: tl.constexpr, TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, SCALE: tl.constexpr,
    K: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row, e, k = tl.program_id(0), tl.arange(0, E_PAD), tl.arange(0, BLOCK_K)
    sums = tl.zeros((E_PAD, BLOCK_K), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        w = _load_router(weight, e, start + k, E, K, E_PAD, BLOCK_K)
        v = tl.load(x + row * K + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        sums = tl.fma(w.to(tl.float32), v[None, :], sums)
    z = tl.sum(sums, axis=1).to(logits.dtype.element_ty)
    tl.store(logits + row * E + e, z, mask=e < E)
    _store_top_k(z, row, weights, index, E, E_PAD, TOP_K, RENORMALIZE, SCALE)


@triton.jit
def _top_k_kernel(
    logits, weights, index,
    E: tl.constexpr, E_PAD: tl.constexpr, TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    row, e = tl.program_id(0), tl.arange(0, E_PAD)
    z = tl.load(logits + row * E + e, mask=e < E)
    _store_top_k(z, row, weights, index, E, E_PAD, TOP_K, RENORMALIZE, SCALE)


@triton.jit(do_not_specialize=["rows"])
def _route_layers_kernel(
    x, norms, routers, weights, index, eps, rows,
    E: tl.constexpr, E_PAD: tl.constexpr, TOP_K: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    layer = tl.program_id(0).to(tl.int64)
    row = layer * rows + tl.program_id(1)
    e, k = tl.arange(0, E_PAD), tl.arange(0, BLOCK_K)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    for start in range(0, K, BLOCK_K):
        v = tl.load(x + row * K + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        squares += v * v
    scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    dtype = x.dtype.element_ty
    router = routers + layer * E * K
    sums = tl.zeros((E_PAD, BLOCK_K), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        w = _load_router(router, e, start + k, E, K, E_PAD, BLOCK_K)
        v = tl.load(x + row * K + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        g = tl.load(norms + layer * K + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        y = (g * (v * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        sums = tl.fma(w.to(tl.float32), y[None, :], sums)
    z = tl.sum(sums, axis=1).to(dtype)
    _store_top_k(z, row, weights, index, E, E_PAD, TOP_K, True, 1.0)
