"""Rotary positions of queries and keys in one kernel, with every rounding of the dozen that it replaces."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Both turned by their positions; each first half of a head pairs with its second."""
    # query: [batch, heads, rows, dim], key: [batch, kv heads, rows, dim]; cos, sin: [1 or batch, rows, dim]
    batch, heads, rows, dim = query.shape
    turned = torch.empty_like(query), torch.empty_like(key)
    cos, sin = cos.contiguous(), sin.contiguous()
    _rotate_kernel[batch * rows, heads + key.shape[1]](
        query, key, cos, sin, *turned, rows, heads, rows * dim if cos.shape[0] > 1 else 0,
        *query.stride()[:3], *key.stride()[:3], *turned[0].stride()[:3], *turned[1].stride()[:3],
        HALF=dim // 2, BLOCK=triton.next_power_of_2(dim // 2), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return turned


def rotate_plain(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """What `rotate` computes."""
    cos, sin = cos[:, None], sin[:, None]

    def turn(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    return turn(query), turn(key)


@triton.jit
def _turn(x, y, cos, sin, HALF: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    there = at < HALF
    kind = x.dtype.element_ty
    first = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
    second = tl.load(x + HALF + at, mask=there, other=0.0).to(tl.float32)
    c, s = (
        tl.load(cos + at, mask=there, other=0.0).to(tl.float32),
        tl.load(sin + at, mask=there, other=0.0).to(tl.float32),
    )
    d, t = (
        tl.load(cos + HALF + at, mask=there, other=0.0).to(tl.float32),
        tl.load(sin + HALF + at, mask=there, other=0.0).to(tl.float32),
    )
    # products are rounded before they are added, as they are when each is a tensor
    one = (first * c).to(kind).to(tl.float32) + (-second * s).to(kind).to(tl.float32)
    two = (second * d).to(kind).to(tl.float32) + (first * t).to(kind).to(tl.float32)
    tl.store(y + at, one.to(kind), mask=there)
    tl.store(y + HALF + at, two.to(kind), mask=there)


@triton.jit(do_not_specialize=["rows"])
def _rotate_kernel(
    query, key, cos, sin, query_out, key_out, rows, heads, angles_batch,
    q_batch, q_head, q_row, k_batch, k_head, k_row, qo_batch, qo_head, qo_row, ko_batch, ko_head, ko_row,
    HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    batch, row = tl.program_id(0) // rows, tl.program_id(0) % rows
    head = tl.program_id(1)
    angle = batch.to(tl.int64) * angles_batch + row * 2 * HALF
    batch, row = batch.to(tl.int64), row.to(tl.int64)
    if head < heads:
        x, y = (
            query + batch * q_batch + head * q_head + row * q_row,
            query_out + batch * qo_batch + head * qo_head + row * qo_row,
        )
        _turn(x, y, cos + angle, sin + angle, HALF, BLOCK)
    else:
        at = head - heads
        x, y = (
            key + batch * k_batch + at * k_head + row * k_row,
            key_out + batch * ko_batch + at * ko_head + row * ko_row,
        )
        _turn(x, y, cos + angle, sin + angle, HALF, BLOCK)
