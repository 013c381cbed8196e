"""The norms and routers of several layers, each on states of its own, in one kernel: what predictions are made of."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from spmoe.backends.kernels.dense import MOST_EXPERTS, Answer, _choose, _load, rms_norm_plain, route_plain


def route_layers(
    x: Tensor,  # [layers, rows, k]
    norms: Tensor,  # [layers, k]
    eps: float,
    routers: Tensor,  # [layers, experts, k]
    top_k: int,
) -> tuple[Tensor, Tensor]:  # [layers, rows, top_k] int64 and float32
    """The experts that each layer's router picks for its rows, best first, and weights of them that add up to one."""
    (layers, rows, k), count = x.shape, routers.shape[1]
    if not 1 <= top_k <= count <= MOST_EXPERTS:
        raise ValueError(f"{top_k} of {count} experts; at most {MOST_EXPERTS}")
    wide = triton.next_power_of_2(count)
    index = x.new_empty(layers, rows, top_k, dtype=torch.int64)
    weights = x.new_empty(layers, rows, top_k, dtype=torch.float32)
    block = min(max(16, 8192 // wide), triton.next_power_of_2(k))
    _gates_kernel[layers, rows](
        x.contiguous(), norms, routers, weights, index, eps, rows, E=count, WIDE=wide, TOP_K=top_k, K=k, BK=block,
        STAGES=4, num_warps=4,
    )  # fmt: skip
    return index, weights


def route_layers_plain(x: Tensor, norms: Tensor, eps: float, routers: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """What `route_layers` computes."""
    answers = [
        route_plain(rms_norm_plain(states, norm, eps), router, top_k, Answer(x.dtype))
        for states, norm, router in zip(x, norms, routers, strict=True)
    ]
    return torch.stack([index for _, _, index in answers]), torch.stack([weights for _, weights, _ in answers])


@triton.jit(do_not_specialize=["rows"])
def _gates_kernel(
    x, norms, routers, weights, index, eps, rows,
    E: tl.constexpr, WIDE: tl.constexpr, TOP_K: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    layer = tl.program_id(0).to(tl.int64)
    row = layer * rows + tl.program_id(1)
    e, k = tl.arange(0, WIDE), tl.arange(0, BK)
    squares = tl.zeros((BK,), tl.float32)
    for start in range(0, K, BK):
        v = tl.load(x + row * K + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        squares += v * v
    scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    kind = x.dtype.element_ty
    router = routers + layer * E * K
    sums = tl.zeros((WIDE, BK), tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        w = _load(router + e[:, None] * K + (start + k)[None, :], e[:, None], (start + k)[None, :], E, K, WIDE, BK)
        v = tl.load(x + row * K + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        g = tl.load(norms + layer * K + start + k, mask=start + k < K, other=0.0).to(tl.float32)
        y = (g * (v * scale).to(kind).to(tl.float32)).to(kind).to(tl.float32)
        sums = tl.fma(w.to(tl.float32), y[None, :], sums)
    z = tl.sum(sums, axis=1).to(kind)
    _choose(z, row, weights, index, E, WIDE, TOP_K, True, 1.0)
