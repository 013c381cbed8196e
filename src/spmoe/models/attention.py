"""Attention over a cache whose length the device knows, plugged into transformers' attention interface.

Registered without a mask function, so models make no masks: causality and windows are this function's own.
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
_KNOWN = {"position_ids", "cache_position"}
_length: Tensor | None = None  # while a forward is recorded: positions its caches hold, on the device


@contextmanager
def device_length(length: Tensor) -> Iterator[None]:
    """Inside, caches append at, and attention reads up to, a length that only the device knows."""  # [1] int64
    global _length
    _length = length
    try:
        yield
    finally:
        _length = None


def current_length() -> Tensor | None:
    """The device's length, inside `device_length`."""
    return _length


def quick_to_start() -> Any:
    """A context without cuDNN's attention, which takes milliseconds to get ready for every new length."""
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def use(model: Any) -> None:
    """Let a model attend through this file."""
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
    unknown = {k for k, v in kwargs.items() if isinstance(v, (Tensor, float)) and k not in _KNOWN}
    if attention_mask is not None or unknown:
        raise NotImplementedError(f"its attention also takes {', '.join(unknown or ['a mask'])}")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if _length is not None:
        from spmoe.backends.kernels.attention import decode_attention

        return decode_attention(query, key, value, _length, scaling, sliding_window), None
    rows, held = query.shape[2], key.shape[2]
    mask, cut = None, sliding_window is not None and held > sliding_window
    if cut or (rows > 1 and held > rows):
        mask = _mask(rows, held, sliding_window, query.device)
    out = scaled_dot_product_attention(
        query, key, value, mask, scale=scaling, is_causal=mask is None and rows > 1, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


def _mask(rows: int, held: int, window: int | None, device: torch.device) -> Tensor:
    """Which of the held positions each of the last rows sees."""  # [rows, held] bool
    row = torch.arange(held - rows, held, device=device)[:, None]
    position = torch.arange(held, device=device)
    seen = position <= row
    return seen if window is None else seen & (position > row - window)
