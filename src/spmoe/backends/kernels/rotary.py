"""Rotary position embedding of queries and keys in one kernel, with the roundings of the PyTorch operations."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor


def apply_rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their positions; the first half of each head is paired with the second half."""
    # query: [batch, heads, rows, dim], key: [batch, kv heads, rows, dim]; cos, sin: [1 or batch, rows, dim]
    batch, heads, rows, dim = query.shape
    rotated = torch.empty_like(query), torch.empty_like(key)
    cos, sin = cos.contiguous(), sin.contiguous()
    _rotary_kernel[batch * rows, heads + key.shape[1]](
        query, key, cos, sin, *rotated, rows, heads, rows * dim if cos.shape[0] > 1 else 0,
        *query.stride()[:3], *key.stride()[:3], *rotated[0].stride()[:3], *rotated[1].stride()[:3],
        HALF=dim // 2, BLOCK=triton.next_power_of_2(dim // 2), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return rotated


def apply_rotary_plain(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """PyTorch reference of `apply_rotary`."""
    cos, sin = cos[:, None], sin[:, None]

    def apply_rotary(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    return apply_rotary(query), apply_rotary(key)


@triton.jit
def _rotate_head(x, y, cos, sin, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Rotate one head `x` of one row into `y`."""
    i = tl.arange(0, BLOCK)
    inside = i < HALF
    dtype = x.dtype.element_ty
    first = tl.load(x + i, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + HALF + i, mask=inside, other=0.0).to(tl.float32)
    cos_1 = tl.load(cos + i, mask=inside, other=0.0).to(tl.float32)
    sin_1 = tl.load(sin + i, mask=inside, other=0.0).to(tl.float32)
    cos_2 = tl.load(cos + HALF + i, mask=inside, other=0.0).to(tl.float32)
    sin_2 = tl.load(sin + HALF + i, mask=inside, other=0.0).to(tl.float32)
    # products are rounded before they are added, as PyTorch does with a tensor for each
    y_1 = (first * cos_1).to(dtype).to(tl.float32) + (-second * sin_1).to(dtype).to(tl.float32)
    y_2 = (second * cos_2).to(dtype).to(tl.float32) + (first * sin_2).to(dtype).to(tl.float32)
    tl.store(y + i, y_1.to(dtype), mask=inside)
    tl.store(y + HALF + i, y_2.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _rotary_kernel(
    query, key, cos, sin, query_out, key_out, rows, heads, angles_batch,
    q_batch, q_head, q_row, k_batch, k_head, k_row, qo_batch, qo_head, qo_row, ko_batch, ko_head, ko_row,
    HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    batch, row = tl.program_id(0) // rows, tl.program_id(0) % rows
    head = tl.program_id(1)
    angle = batch.to(tl.int64) * angles_batch + row * 2 * HALF
    batch, row = batch.to(tl.int64), row.to(tl.int64)
    if head < heads:
        x = query + batch * q_batch + head * q_head + row * q_row
        y = query_out + batch * qo_batch + head * qo_head + row * qo_row
        _rotate_head(x, y, cos + angle, sin + angle, HALF, BLOCK)
    else:
        kv_head = head - heads
        x = key + batch * k_batch + kv_head * k_head + row * k_row
        y = key_out + batch * ko_batch + kv_head * ko_head + row * ko_row
        _rotate_head(x, y, cos + angle, sin + angle, HALF, BLOCK)
