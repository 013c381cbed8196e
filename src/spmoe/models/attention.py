"""Attention over a KV cache whose length is stored on the device, registered with transformers' attention interface.

A captured CUDA graph cannot change shapes, so it attends up to a length that it reads from device memory. No mask
function is registered, so models build no masks: this module applies causality and sliding windows itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

IMPLEMENTATION = "spmoe"
_SUPPORTED_ARGUMENTS = {"position_ids", "cache_position"}
_length: Tensor | None = None  # [1] int64, number of cached positions; set while a forward is captured


@contextmanager
def device_length(length: Tensor) -> Iterator[None]:
    """Make KV caches append at, and attention read up to, a length in device memory ([1] int64)."""
    global _length
    _length = length
    try:
        yield
    finally:
        _length = None


def current_length() -> Tensor | None:
    """Return the length in device memory inside `device_length`, else None."""
    return _length


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
    **kwargs: Any,
) -> tuple[Tensor, None]:  # [1, rows, heads, value dim]
    unsupported = {k for k, v in kwargs.items() if isinstance(v, (Tensor, float)) and k not in _SUPPORTED_ARGUMENTS}
    if attention_mask is not None or unsupported:
        raise NotImplementedError(f"its attention needs {', '.join(unsupported or ['a mask'])}, which is unsupported")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if _length is not None:
        from spmoe.backends.kernels.attention import decode_attention

        return decode_attention(query, key, value, _length, scaling, sliding_window), None
    rows, positions = query.shape[2], key.shape[2]
    mask, beyond_window = None, sliding_window is not None and positions > sliding_window
    if beyond_window or (rows > 1 and positions > rows):
        mask = _mask(rows, positions, sliding_window, query.device)
    out = scaled_dot_product_attention(
        query, key, value, mask, scale=scaling, is_causal=mask is None and rows > 1, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


def _mask(rows: int, positions: int, window: int | None, device: torch.device) -> Tensor:
    """Build a causal, optionally windowed mask for the last rows; True means visible."""  # [rows, positions] bool
    row = torch.arange(positions - rows, positions, device=device)[:, None]
    position = torch.arange(positions, device=device)
    visible = position <= row
    return visible if window is None else visible & (position > row - window)
