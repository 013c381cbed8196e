"""Attention over KV caches whose ranges are stored on the device, registered with transformers' attention interface.

A captured CUDA graph cannot change shapes or addresses, so it reads from device memory where the keys and values of
each sequence lie, and how many there are. No mask function is registered, so models build no masks: this module applies
causality and sliding windows itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

IMPLEMENTATION = "spmoe"
_SUPPORTED_ARGUMENTS = {"position_ids", "cache_position"}
_SINK_DIMENSIONS = 8  # two are used; fast implementations need multiples of eight
_ranges: Tensor | None = None  # set while a forward is captured


@contextmanager
def device_ranges(ranges: Tensor) -> Iterator[None]:
    """Let KV caches append to, and attention read, the ranges of sequences in device memory.

    Each sequence has an equal share of a forward's rows, in order.
    """
    # ranges: [3, sequences] int64: start in the arena, positions before the new rows, capacity
    global _ranges
    _ranges = ranges
    try:
        yield
    finally:
        _ranges = None


def current_ranges() -> Tensor | None:
    """Return the ranges in device memory inside `device_ranges`, else None."""
    return _ranges


def without_cudnn() -> Any:
    """Return a context that disables cuDNN attention, which needs milliseconds of set-up for every new length."""
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def use(model: Any) -> None:
    """Switch a model to this attention implementation."""
    AttentionInterface.register(IMPLEMENTATION, _attend)
    model.set_attn_implementation(IMPLEMENTATION)


def _attend(
    module: Any,
    query: Tensor,  # [1, heads, rows, dim]
    key: Tensor,  # [1, kv heads, positions, dim]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,  # [heads], scores of attention sinks
    **kwargs: Any,
) -> tuple[Tensor, None]:  # [1, rows, heads, value dim]
    unsupported = {k for k, v in kwargs.items() if isinstance(v, (Tensor, float)) and k not in _SUPPORTED_ARGUMENTS}
    if attention_mask is not None or unsupported:
        raise NotImplementedError(f"its attention needs {', '.join(unsupported or ['a mask'])}, which is unsupported")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if _ranges is not None:
        from spmoe.backends.kernels.attention import decode_attention

        return decode_attention(query, key, value, _ranges, scaling, sliding_window, s_aux), None
    rows, positions = query.shape[2], key.shape[2]
    mask, beyond_window = None, sliding_window is not None and positions > sliding_window
    if beyond_window or (rows > 1 and positions > rows):
        mask = _mask(rows, positions, sliding_window, query.device)
    if s_aux is not None:
        return _attend_with_sinks(query, key, value, mask, scaling, s_aux), None
    out = scaled_dot_product_attention(
        query, key, value, mask, scale=scaling, is_causal=mask is None and rows > 1, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


def _attend_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, sinks: Tensor
) -> Tensor:  # [1, rows, heads, value dim]
    """Attend also to a position before all others, whose score is that of the head's sink, and whose value is zero.

    Further dimensions make its score: the query holds the sink there, and the key is 1 at this position, 0 elsewhere.
    """
    rows, dim, value_dim = query.shape[2], query.shape[3], value.shape[3]
    is_causal = mask is None and rows > 1
    width = max(dim, value_dim) + _SINK_DIMENSIONS
    exact = sinks.float() / scaling
    rounded = exact.to(query.dtype)
    query = pad(query, (0, width - dim, 1 if is_causal else 0, 0))  # the first of causal rows sees one position only
    query[..., dim] = rounded[:, None]
    query[..., dim + 1] = (exact - rounded.float()).to(query.dtype)[:, None]
    key, value = pad(key, (0, width - dim, 1, 0)), pad(value, (0, width - value_dim, 1, 0))
    key[:, :, 0, dim : dim + 2] = 1.0
    if mask is not None:
        mask = pad(mask, (1, 0), value=True)
    out = scaled_dot_product_attention(query, key, value, mask, scale=scaling, is_causal=is_causal, enable_gqa=True)
    return out[:, :, -rows:, :value_dim].transpose(1, 2).contiguous()


def _mask(rows: int, positions: int, window: int | None, device: torch.device) -> Tensor:
    """Build a causal, optionally windowed mask for the last rows; True means visible."""  # [rows, positions] bool
    row = torch.arange(positions - rows, positions, device=device)[:, None]
    position = torch.arange(positions, device=device)
    visible = position <= row
    return visible if window is None else visible & (position > row - window)
