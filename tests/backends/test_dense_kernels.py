"""Norms, linear layers, gated or not, and routers against their twins and float64, on CUDA or interpreted."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytest.importorskip("triton", reason="no triton")
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("no CUDA device, and TRITON_INTERPRET is not 1", allow_module_level=True)

from spmoe.backends.kernels import dense  # noqa: E402
from spmoe.backends.kernels.dense import Answer, Tile, gated_linear, rms_norm, route, skinny_linear  # noqa: E402

pytestmark = [pytest.mark.usefixtures("mended_interpreter"), *([] if INTERPRETED else [pytest.mark.gpu])]
needs_cuda = pytest.mark.skipif(INTERPRETED, reason="the interpreter has no graphs and no gigabytes")

BOUND = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}  # as a share of the largest true value
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)


@pytest.fixture
def device() -> str:
    return "cpu" if INTERPRETED else "cuda"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nothing_starts_as_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel leaves unwritten becomes visible."""
    new_empty = Tensor.new_empty

    def unset(*size: Any, **options: Any) -> Tensor:
        tensor = new_empty(*size, **options)
        return tensor.fill_(math.nan if tensor.is_floating_point() else -(1 << 40))

    monkeypatch.setattr(Tensor, "new_empty", unset)


def close(got: Tensor, want: Tensor, dtype: torch.dtype) -> bool:
    """Whether every element is there and within the bound."""
    error = (got.double() - want.double()).abs().max().item()
    return error <= BOUND[dtype] * want.double().abs().max().item()  # a NaN is not


# ---- norms


@dtypes
@pytest.mark.parametrize(("shape", "scale"), [((1, 3, 64), 1.0), ((2, 3, 4, 48), 1e-3), ((5, 1000), 50.0)])
def test_a_norm_is_its_twin(device: str, dtype: torch.dtype, shape: tuple[int, ...], scale: float) -> None:
    x = (torch.randn(shape) * scale + 0.3 * scale).to(device, dtype)
    weight = (1 + torch.randn(shape[-1]) / 4).to(device, dtype)
    found, expected = rms_norm(x, weight, 1e-6), dense.rms_norm_plain(x, weight, 1e-6)
    assert found.dtype == dtype
    assert torch.allclose(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    assert (found == expected).float().mean() > 0.95 or dtype == torch.float32
    wide = x.double()
    exact = weight.double() * wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    assert close(found, exact, dtype)


def test_a_norm_of_a_part_of_each_row(device: str) -> None:
    rows, weight = torch.randn(2, 3, 40, device=device), torch.rand(24, device=device)
    for x in (rows[..., :24], rows[..., 16:], rows.transpose(0, 1)[..., :24], torch.randn(24, 5, device=device).T):
        assert torch.allclose(rms_norm(x, weight, 1e-6), rms_norm(x.contiguous(), weight, 1e-6), rtol=1e-6)


def test_a_norm_that_is_too_long(device: str) -> None:
    n = dense.LONGEST_NORM
    x, weight = torch.randn(1, n, device=device), torch.ones(n, device=device)
    assert torch.allclose(rms_norm(x, weight, 1e-6), dense.rms_norm_plain(x, weight, 1e-6), rtol=1e-6)
    with pytest.raises(ValueError, match="at most"):
        rms_norm(torch.ones(1, n + 1), torch.ones(n + 1), 1e-6)


# ---- linear layers

SIZES = [(16, 64), (33, 75), (9, 1100)]
TILES = [Tile(16, 128, 4, 3, True), Tile(8, 64, 2, 4, True), Tile(8, 64, 4, 3, False), Tile(4, 128, 8, 2, False)]


@dtypes
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_a_linear_layer_is_its_twin(device: str, dtype: torch.dtype, n: int, k: int) -> None:
    weight = (torch.randn(n, k) / math.sqrt(k)).to(device, dtype)
    for rows, given in [(1, None), (5, torch.randn(n).to(device, dtype)), (16, None)]:
        x = torch.randn(rows, k).to(device, dtype)
        found, exact = skinny_linear(x, weight, given), x.double() @ weight.double().T
        assert found.dtype == dtype
        assert close(found, dense.skinny_linear_plain(x, weight, given), dtype)
        assert close(found, exact if given is None else exact + given.double(), dtype)


def cuts(tiles: list[Tile | None]) -> pytest.MarkDecorator:
    """Tiles with the dtypes they are for."""
    pairs = [(tile, dtype) for tile in tiles for dtype in FLOATS]
    fitting = [(tile, dtype) for tile, dtype in pairs if not (tile and tile.dot and dtype == torch.float32)]
    return pytest.mark.parametrize(("tile", "dtype"), fitting, ids=str)


@cuts([*TILES])
@pytest.mark.parametrize(("n", "k"), [(16, 256), (13, 200)])
def test_every_way_to_cut(device: str, dtype: torch.dtype, tile: Tile, n: int, k: int) -> None:
    weight, bias = (torch.randn(n, k) / math.sqrt(k)).to(device, dtype), torch.randn(n).to(device, dtype)
    for rows in (3, 12):
        x = torch.randn(rows, k).to(device, dtype)
        exact = x.double() @ weight.double().T + bias.double()
        assert close(skinny_linear(x, weight, bias, tile=tile), exact, dtype)


@cuts([None, *TILES])
def test_a_row_does_not_depend_on_its_company(device: str, dtype: torch.dtype, tile: Tile | None) -> None:
    x, weight = torch.randn(16, 200).to(device, dtype), torch.randn(12, 200).to(device, dtype)
    together = skinny_linear(x, weight, tile=tile)
    for rows in (1, 2, 5, 8, 9, 13):
        assert torch.equal(skinny_linear(x[-rows:], weight, tile=tile), together[-rows:])


@dtypes
@pytest.mark.parametrize(("n", "k"), SIZES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_a_gated_layer_is_its_twin(device: str, dtype: torch.dtype, n: int, k: int, activation: str) -> None:
    gate, up = ((torch.randn(n, k) / math.sqrt(k)).to(device, dtype) for _ in range(2))
    x = torch.randn(16, k).to(device, dtype)
    together = gated_linear(x, gate, up, activation)
    exact = dense.ACTIVATIONS[activation](x.double() @ gate.double().T) * (x.double() @ up.double().T)
    assert together.dtype == dtype
    assert close(together, dense.gated_linear_plain(x, gate, up, activation), dtype)
    assert close(together, exact, dtype)
    for rows in (1, 5, 9):
        assert torch.equal(gated_linear(x[:rows], gate, up, activation), together[:rows])


def test_tiles_are_those_of_the_shape() -> None:
    for n, k in [(160, 160), (1024, 4096), (4096, 4096), (14336, 4096), (32000, 64), (8, 16)]:
        for dtype in FLOATS:
            tiles = {dense.config_for(rows, n, k, dtype) for rows in range(1, 17)}
            (tile,) = tiles
            assert tile.k >= 16 * tile.warps
            assert not (tile.dot and dtype == torch.float32)
    with pytest.raises(ValueError, match="1 to 16 rows"):
        dense.config_for(17, 64, 64, torch.float32)


# ---- routers


@dtypes
@pytest.mark.parametrize(("count", "k", "top_k"), [(8, 96, 2), (5, 40, 5), (60, 64, 4), (64, 75, 8), (130, 16, 6)])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_router_is_its_twin(device: str, dtype: torch.dtype, count: int, k: int, top_k: int, at_once: bool) -> None:
    weight = (torch.randn(count, k) / math.sqrt(k)).to(device, dtype)
    for rows, answer in [
        (1, Answer(dtype)),
        (3, Answer(dtype, dtype, renormalise=False)),
        (5, Answer(torch.float32, torch.float32, renormalise=False, scale=2.5)),
    ]:
        x = (torch.randn(rows, k) * torch.logspace(-1, 1, rows)[:, None]).to(device, dtype)
        logits, weights, index = route(x, weight, top_k, answer, at_once)
        assert (logits.dtype, weights.dtype, index.dtype) == (answer.logits, answer.weights, torch.int64)
        assert close(logits, x.double() @ weight.double().T, dtype)
        # the rest follows from these very logits
        values, order = logits.double().softmax(-1).sort(dim=-1, descending=True, stable=True)
        values, order = values[:, :top_k], order[:, :top_k]
        if answer.renormalise:
            values = values / values.sum(-1, keepdim=True)
        assert torch.equal(index, order)
        rtol = torch.finfo(weights.dtype).eps + 1e-5
        assert torch.allclose(weights.double(), values * answer.scale, rtol=rtol, atol=1e-7)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("count", [8, 60, 130])
def test_of_equal_experts_the_first_are_taken(device: str, count: int, at_once: bool) -> None:
    x, weight = torch.ones(2, 16, device=device), torch.zeros(count, 16, device=device)
    weight[[3, 6]] = 1.0
    _, weights, index = route(x, weight, 5, Answer(torch.float32), at_once)
    assert index.tolist() == [[3, 6, 0, 1, 2]] * 2
    assert torch.allclose(weights.sum(-1), torch.ones(2, device=device))
    assert torch.equal(index, dense.route_plain(x, weight, 5, Answer(torch.float32))[2])


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("count", [7, 130])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_are_in_range_whatever_the_logits_are(device: str, count: int, at_once: bool, bad: float) -> None:
    x, weight = torch.randn(3, 16, device=device), torch.randn(count, 16, device=device)
    x[0] = bad
    x[1, 0] = bad
    with np.errstate(all="ignore"):
        _, _, index = route(x, weight, 4, Answer(torch.float32), at_once)
    assert ((index >= 0) & (index < count)).all()
    assert all(len(set(row)) == 4 for row in index.tolist())


def test_more_experts_than_there_are(device: str) -> None:
    x, weight = torch.randn(1, 16, device=device), torch.randn(4, 16, device=device)
    with pytest.raises(ValueError, match="5 of 4 experts"):
        route(x, weight, 5, Answer(torch.float32))


# ---- on a device only


@needs_cuda
def test_all_of_it_in_a_graph() -> None:
    """No host, and no memory but what it returns."""
    x, norm = torch.randn(5, 512, device="cuda").bfloat16(), torch.rand(512, device="cuda").bfloat16()
    linear, gate = (torch.randn(n, 512, device="cuda").bfloat16() / 20 for n in (512, 16))

    def forward() -> tuple[Tensor, ...]:
        return route(skinny_linear(rms_norm(x, norm, 1e-6), linear), gate, 4, Answer(torch.bfloat16))

    expected = [t.clone() for t in forward()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = forward()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("n", "k"), [(4096, 4096), (1024, 4096), (10944, 2048), (2048, 10944), (576, 2048), (32000, 4096)]
)
def test_real_sizes(dtype: torch.dtype, n: int, k: int) -> None:
    x, weight = torch.randn(16, k, device="cuda").to(dtype), (torch.randn(n, k, device="cuda") / 64).to(dtype)
    found = skinny_linear(x, weight)
    assert close(found, x.double() @ weight.double().T, dtype)
    for rows in range(1, 16):
        assert torch.equal(skinny_linear(x[:rows], weight), found[:rows])
