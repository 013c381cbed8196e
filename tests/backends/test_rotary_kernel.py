"""Rotary positions in one kernel: every bit of what the plain form gives, on CUDA or in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytest.importorskip("triton", reason="no triton")
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("no CUDA device, and TRITON_INTERPRET is not 1", allow_module_level=True)

from spmoe.backends.kernels.rotary import rotate, rotate_plain  # noqa: E402

pytestmark = [pytest.mark.usefixtures("mended_interpreter"), *([] if INTERPRETED else [pytest.mark.gpu])]
DEVICE = "cpu" if INTERPRETED else "cuda"


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("batch", "angles", "rows", "heads", "kv_heads", "dim"),
    [(1, 1, 1, 4, 2, 16), (1, 1, 5, 3, 3, 12), (2, 2, 7, 2, 1, 64), (3, 1, 2, 1, 1, 2)],
)
def test_every_bit_is_the_plain_form_s(
    dtype: torch.dtype, batch: int, angles: int, rows: int, heads: int, kv_heads: int, dim: int
) -> None:
    torch.manual_seed(0)
    cos, sin = (random(angles, rows, dim, dtype=dtype) for _ in range(2))
    for turned in (True, False):  # as projections leave them, and as a norm between does
        query = random(batch, rows, heads, dim, dtype=dtype).transpose(1, 2)
        key = random(batch, rows, kv_heads, dim, dtype=dtype).transpose(1, 2)
        if not turned:
            query, key = query.contiguous(), key.contiguous()
        for found, expected, given in zip(
            rotate(query, key, cos, sin), rotate_plain(query, key, cos, sin), (query, key), strict=True
        ):
            assert torch.equal(found, expected)
            assert found.stride() == given.stride()
