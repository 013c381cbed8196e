"""Several linear layers as one kernel against float64 and against each by itself, on CUDA or interpreted."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytest.importorskip("triton", reason="no triton")
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("no CUDA device, and TRITON_INTERPRET is not 1", allow_module_level=True)

from spmoe.backends.kernels.dense import Tile, skinny_linear  # noqa: E402
from spmoe.backends.kernels.fused_qkv import (  # noqa: E402
    siblings_config_for,
    skinny_linears,
    skinny_linears_plain,
)

pytestmark = [pytest.mark.usefixtures("mended_interpreter"), *([] if INTERPRETED else [pytest.mark.gpu])]
needs_cuda = pytest.mark.skipif(INTERPRETED, reason="the interpreter has no graphs and no gigabytes")

DEVICE = "cpu" if INTERPRETED else "cuda"
BOUND = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}  # as a share of the largest true value
FLOATS = list(BOUND)
TILES = [Tile(16, 128, 4, 3, True), Tile(8, 64, 2, 4, True), Tile(8, 64, 4, 3, False), Tile(4, 128, 8, 2, False)]


@pytest.fixture(autouse=True)
def _nothing_starts_as_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel leaves unwritten becomes visible."""
    new_empty = Tensor.new_empty
    monkeypatch.setattr(Tensor, "new_empty", lambda *size, **options: new_empty(*size, **options).fill_(math.nan))


def layers(counts: tuple[int, ...], k: int, dtype: torch.dtype, biased: int = 0) -> tuple[list[Any], list[Any]]:
    """Weights and biases; a bit of `biased` for each layer that has one."""
    torch.manual_seed(sum(counts) + k)
    weights = [(torch.randn(n, k) / math.sqrt(k)).to(DEVICE, dtype) for n in counts]
    return weights, [torch.randn(n).to(DEVICE, dtype) if biased >> i & 1 else None for i, n in enumerate(counts)]


def close(got: Tensor, want: Tensor) -> bool:
    """Whether every element is there and within the bound."""
    error = (got.double() - want.double()).abs().max().item()
    return error <= BOUND[got.dtype] * want.double().abs().max().item()  # a NaN is not


def check(x: Tensor, weights: list[Tensor], biases: list[Tensor | None], tile: Tile | None = None) -> None:
    """Every layer's result is the true one, and has the bits of that layer alone, cut in the same way."""
    (rows, k), counts = x.shape, [len(weight) for weight in weights]
    found = skinny_linears(x, weights, biases, tile)
    plain = skinny_linears_plain(x, weights, biases)
    cut = tile or siblings_config_for(rows, counts, k, x.dtype)
    for y, expected, weight, bias in zip(found, plain, weights, biases, strict=True):
        assert (y.shape, y.dtype, y.is_contiguous()) == ((rows, len(weight)), x.dtype, True)
        exact = x.double() @ weight.double().T
        assert close(y, exact if bias is None else exact + bias.double())
        assert close(y, expected)
        assert torch.equal(y, skinny_linear(x, weight, bias, tile=cut))


@settings(
    max_examples=20 if INTERPRETED else 200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=4).map(tuple),
    k=st.sampled_from([16, 32, 75, 129, 256, 300]),
    rows=st.integers(1, 16),
    dtype=st.sampled_from(FLOATS),
    biased=st.integers(0, 15),
)
def test_layers_of_any_sizes(counts: tuple[int, ...], k: int, rows: int, dtype: torch.dtype, biased: int) -> None:
    weights, biases = layers(counts, k, dtype, biased)
    check(torch.randn(rows, k).to(DEVICE, dtype), weights, biases)


@pytest.mark.parametrize(("counts", "k"), [((1024, 128, 128), 64), ((1000, 520), 40), ((2040, 9, 9, 1), 32)])
def test_layers_of_larger_sizes(counts: tuple[int, ...], k: int) -> None:
    """Cut as real ones are, and with groups of heads that share a key."""
    weights, biases = layers(counts, k, torch.bfloat16, biased=5)
    check(torch.randn(5, k).to(DEVICE, torch.bfloat16), weights, biases)


# those for tensor cores with what they are for
CUTS = [(tile, dtype) for tile in TILES for dtype in FLOATS if not (tile.dot and dtype == torch.float32)]


@pytest.mark.parametrize(("tile", "dtype"), CUTS, ids=str)
@pytest.mark.parametrize(("counts", "k", "rows"), [((32, 16, 16), 256, 3), ((13, 20, 7), 140, 12)])
def test_every_way_to_cut(dtype: torch.dtype, tile: Tile, counts: tuple[int, ...], k: int, rows: int) -> None:
    weights, biases = layers(counts, k, dtype, biased=2)
    check(torch.randn(rows, k).to(DEVICE, dtype), weights, biases, tile)


@pytest.mark.parametrize(("tile", "dtype"), [*((None, dtype) for dtype in FLOATS), *CUTS], ids=str)
def test_a_row_does_not_depend_on_its_company(dtype: torch.dtype, tile: Tile | None) -> None:
    weights, biases = layers((17, 8, 5), 140, dtype, biased=7)
    x = torch.randn(16, 140).to(DEVICE, dtype)
    together = skinny_linears(x, weights, biases, tile)
    for rows in (1, 5, 9):
        for y, all_rows in zip(skinny_linears(x[-rows:], weights, biases, tile), together, strict=True):
            assert torch.equal(y, all_rows[-rows:])


def test_an_input_with_gaps() -> None:
    weights, biases = layers((24, 12), 40, torch.float32)
    check(torch.randn(5, 80, device=DEVICE)[:, ::2], weights, biases)
    check(torch.randn(40, 3, device=DEVICE).T, weights, biases)


def test_tiles_are_those_of_the_shape() -> None:
    for counts, k in [((2048,) * 3, 2048), ((4096, 1024, 1024), 4096), ((32, 16, 16), 32)]:
        for dtype in FLOATS:
            assert len({siblings_config_for(rows, counts, k, dtype) for rows in range(1, 17)}) == 1
    with pytest.raises(ValueError, match="1 to 16 rows"):
        siblings_config_for(17, (16, 16), 16, torch.float32)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("counts", "k"),
    [
        ((2048, 2048, 2048), 2048),
        ((2048, 256, 256), 2048),
        ((4096, 1024, 1024), 4096),
        ((4096, 512, 512), 2880),
        ((3072, 576), 2048),
        ((1536, 576), 7168),
    ],
)
def test_real_sizes(dtype: torch.dtype, counts: tuple[int, ...], k: int) -> None:
    weights, biases = layers(counts, k, dtype, biased=1)
    x = torch.randn(16, k, device="cuda").to(dtype)
    check(x, weights, biases)
    found = skinny_linears(x, weights, biases)
    for rows in range(1, 16):
        for y, all_rows in zip(skinny_linears(x[:rows], weights, biases), found, strict=True):
            assert torch.equal(y, all_rows[:rows])


@needs_cuda
def test_in_a_graph() -> None:
    weights, biases = layers((512, 128, 128), 512, torch.bfloat16, biased=3)
    x = torch.randn(5, 512, device="cuda").bfloat16()
    expected = skinny_linears(x, weights, biases)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = skinny_linears(x, weights, biases)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
