"""Attention of eager forwards, with and without sinks, against the attention of transformers' own gpt-oss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from spmoe.models.attention import _attend

HEADS, KV_HEADS, DIM = 6, 2, 20


def reference(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, scaling: float, window: int | None
) -> Tensor:  # [1, rows, heads, dim]
    rows, positions = query.shape[2], key.shape[2]
    last = torch.arange(positions - rows, positions)[:, None]
    position = torch.arange(positions)
    visible = position <= last
    if window is not None:
        visible &= position > last - window
    mask = torch.zeros(1, 1, rows, positions, dtype=query.dtype).masked_fill(~visible, torch.finfo(query.dtype).min)
    module: Any = SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, sinks=sinks, training=False)
    found: Tensor = eager_attention_forward(module, query, key, value, mask, scaling)[0]
    return found


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("rows", "positions"), [(1, 1), (1, 9), (7, 7), (4, 11)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_sinks(dtype: torch.dtype, rows: int, positions: int, window: int | None, scale: float) -> None:
    torch.manual_seed(rows)
    query = torch.randn(1, HEADS, rows, DIM).to(dtype)
    key, value = (torch.randn(1, KV_HEADS, positions, DIM).to(dtype) for _ in range(2))
    sinks, module = (torch.randn(HEADS) * scale).to(dtype), SimpleNamespace()
    wide = [t.double() for t in (query, key, value, sinks)]
    expected = reference(*wide, 0.3, window)
    found, _ = _attend(module, query, key, value, None, scaling=0.3, sliding_window=window, s_aux=sinks)
    assert found.shape == expected.shape == (1, rows, HEADS, DIM)
    assert found.is_contiguous()
    assert found.double() == pytest.approx(expected, abs=8 * torch.finfo(dtype).eps)
    without, _ = _attend(module, query, key, value, None, scaling=0.3, sliding_window=window)
    assert not torch.allclose(without, found, atol=0.05), "sinks take a share of all weights"
