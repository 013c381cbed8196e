"""The kernel over codes against its twin and float64, on CUDA or, with TRITON_INTERPRET=1, on the CPU."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytest.importorskip("triton", reason="no triton")
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("no CUDA device, and TRITON_INTERPRET is not 1", allow_module_level=True)

from spmoe.backends import quantize  # noqa: E402
from spmoe.backends.base import gated_activation  # noqa: E402
from spmoe.backends.kernels import quantized  # noqa: E402
from spmoe.backends.kernels.experts import Tile, Tiles  # noqa: E402
from spmoe.backends.kernels.quantized import config_for, run_coded, run_coded_plain, weights_of  # noqa: E402
from spmoe.backends.quantize import QuantizedExperts, Scheme  # noqa: E402
from spmoe.experts.store import BlobLayout, StoreSpec, ensure_expert_file  # noqa: E402
from spmoe.types import ExpertKey  # noqa: E402

pytestmark = [pytest.mark.usefixtures("mended_interpreter"), *([] if INTERPRETED else [pytest.mark.gpu])]
needs_cuda = pytest.mark.skipif(INTERPRETED, reason="the interpreter has no graphs and no gigabytes")

# largest error against float64 on the same codes, as a share of the largest true value
BOUND = {torch.float32: 2e-5, torch.float16: 2**-9, torch.bfloat16: 2**-7}
ACTIVATIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(autouse=True)
def _nothing_starts_as_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel leaves unwritten, and another reads, becomes visible."""
    empty, empty_like = torch.empty, torch.empty_like

    def unset(tensor: Tensor) -> Tensor:
        return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(quantized.torch, "empty", lambda *size, **options: unset(empty(*size, **options)))
    monkeypatch.setattr(quantized.torch, "empty_like", lambda *size, **options: unset(empty_like(*size, **options)))


class Gated(nn.Module):
    """An experts module without its weights."""

    has_gate, has_bias, is_transposed = True, False, False

    def __init__(self, act_fn: nn.Module | None = None, most: float = math.inf) -> None:
        super().__init__()
        self.act_fn = act_fn or nn.SiLU()
        self.most = most

    def _apply_gate(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return self.act_fn(gate.clamp(max=self.most)) * up


class Layer:
    """Random experts as codes, and rows that chose among them."""

    def __init__(
        self, where: Path, device: torch.device, bits: int, hidden: int, ffn: int, count: int = 4, seed: int = 0,
        group: int = 32,
    ) -> None:  # fmt: skip
        self.rng = torch.Generator().manual_seed(seed)
        self.hidden, self.count, self.device = hidden, count, device
        shapes = {"gate_up_proj": (2 * ffn, hidden), "down_proj": (hidden, ffn)}
        spec = StoreSpec("fingerprint", BlobLayout.of(shapes, torch.float32), (count, count))
        self.experts = QuantizedExperts(spec, Scheme(bits, group), transposed=False)

        def read(key: ExpertKey, views: dict[str, Tensor]) -> None:
            for view in views.values():
                view.copy_(torch.randn(view.shape, generator=self.rng) / math.sqrt(view.shape[1]) + 0.02)

        file = ensure_expert_file(where / "codes.safetensors", self.experts.spec, self.experts.filler(read))
        self.experts.load(file, device)
        file.close()

    def rows(self, rows: int, top_k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.randn(rows, self.hidden, generator=self.rng) + 0.5
        index = torch.rand(rows, self.count, generator=self.rng).topk(top_k).indices
        weights = torch.rand(rows, top_k, generator=self.rng)
        return hidden.to(self.device, dtype), index.to(self.device), weights.to(self.device)

    def blobs(self, layer: int) -> Tensor:
        return self.experts._blobs[layer].view(torch.int32)

    def reference(self, layer: int, given: tuple[Tensor, Tensor, Tensor], activation: str) -> Tensor:
        """The layer's output in float64, row by row, from the weights that the store says its codes are."""
        hidden, index, weights = given
        out = torch.zeros_like(hidden, dtype=torch.float64)
        for row, chosen in enumerate(index.tolist()):
            for expert, weight in zip(chosen, weights[row].double(), strict=True):
                tensors = self.experts.tensors(layer, expert)
                gate, up = (tensors["gate_up_proj"].double() @ hidden[row].double()).chunk(2)
                out[row] += weight * (tensors["down_proj"].double() @ (ACTIVATIONS[activation](gate) * up))
        return out


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    error = (found.double() - wanted.double()).abs().max().item()
    return found.dtype == dtype and error <= BOUND[dtype] * wanted.double().abs().max().item()  # a NaN is not


@pytest.mark.parametrize(
    ("rows", "top_k", "hidden", "ffn", "dtype", "activation"),
    [
        (1, 2, 64, 96, torch.bfloat16, "silu"),
        (1, 1, 32, 32, torch.float32, "gelu"),
        (2, 2, 64, 40, torch.float32, "relu"),  # neither whole groups nor whole tiles
        (3, 2, 33, 17, torch.float16, "gelu_tanh"),
        (5, 1, 40, 16, torch.bfloat16, "silu"),
    ],
)
@pytest.mark.parametrize("bits", [4, 8])
def test_it_agrees_with_its_twin_and_with_float64(
    tmp_path: Path, device: torch.device, bits: int, rows: int, top_k: int, hidden: int, ffn: int, dtype: torch.dtype,
    activation: str,
) -> None:  # fmt: skip
    layer = Layer(tmp_path, device, bits, hidden, ffn, count=3, seed=rows)  # so few that rows share some of them
    given = layer.rows(rows, top_k, dtype)
    asked = (*given, layer.blobs(1), layer.experts.geometry(), activation)
    wanted = layer.reference(1, given, activation)
    assert close(run_coded(*asked), wanted, dtype)
    assert close(run_coded_plain(*asked), wanted, dtype)


NARROW = Tiles(Tile(32, 1, 1, 1), Tile(16, 2, 1, 1), 1)
WIDE = Tiles(Tile(16, 4, 4, 3), Tile(64, 1, 4, 2), 3)


@pytest.mark.parametrize(
    ("bits", "group", "tiles"), [(4, 32, NARROW), (4, 64, WIDE), (8, 32, WIDE), (8, 16, NARROW)], ids=str
)
def test_however_it_is_cut(tmp_path: Path, device: torch.device, bits: int, group: int, tiles: Tiles) -> None:
    layer = Layer(tmp_path, device, bits, 72, 70, count=1, group=group)
    given = layer.rows(3, 1, torch.float32)
    asked = (*given, layer.blobs(1), layer.experts.geometry(), "silu", tiles)
    wanted = layer.reference(1, given, "silu")
    assert close(run_coded(*asked), wanted, torch.float32)
    assert close(run_coded_plain(*asked), wanted, torch.float32)


def test_tiles_suit_the_shape(tmp_path: Path, device: torch.device) -> None:
    geometry = Layer(tmp_path, device, 4, 64, 64).experts.geometry()
    mixtral = geometry._replace(
        gate_up=geometry.gate_up._replace(inputs=4096, outputs=28672),
        down=geometry.down._replace(inputs=14336, outputs=4096),
    )
    for shape, pairs in ((geometry, 1), (geometry, 32), (mixtral, 2), (mixtral, 10)):
        tiles = config_for(shape, pairs)
        groups = -(-shape.ffn // shape.group)
        assert quantized._part(groups, tiles.down.k, tiles.splits) * (tiles.splits - 1) < groups, "every split has work"
    assert config_for(mixtral, 2).splits > 1
    assert config_for(geometry, 1).splits == 1


@pytest.mark.parametrize("bits", [4, 8])
def test_the_twins_weights_are_those_that_the_store_speaks_of(tmp_path: Path, device: torch.device, bits: int) -> None:
    layer = Layer(tmp_path, device, bits, 40, 56)
    geometry = layer.experts.geometry()
    for expert in range(layer.count):
        tensors = layer.experts.tensors(1, expert)
        for name, codes in (("gate_up_proj", geometry.gate_up), ("down_proj", geometry.down)):
            torch.testing.assert_close(weights_of(layer.blobs(1)[expert], geometry, codes), tensors[name])


def test_experts_use_it_where_it_runs_and_knows_them(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize, "kernels_run_on", lambda device: True)
    layer, used, sound = Layer(tmp_path, device, 4, 32, 16), [], quantized.run_coded

    def run(*args: Any) -> Tensor:
        used.append(True)
        return sound(*args)

    monkeypatch.setattr(quantized, "run_coded", run)
    given = layer.rows(1, 2, torch.float32)
    found = layer.experts.run(0, Gated(), *given)
    assert close(found, layer.reference(0, given, "silu"), torch.float32)
    assert used == [True]
    for experts in (Gated(most=1.0), Gated(nn.Mish())):  # made of their weights, all at once
        other = layer.experts.run(1, experts, *given)
        plain = layer.experts._run_at_once(1, experts, *given)
        assert torch.equal(other, plain)
        layer.experts._activations.clear()
    layer.experts.run(0, Gated(), *layer.rows(40, 2, torch.float32))
    assert used == [True]


def test_what_bounds_its_gate_is_no_plain_gate() -> None:
    assert gated_activation(Gated()) == "silu"
    assert gated_activation(Gated(nn.ReLU())) == "relu"
    assert gated_activation(Gated(most=10.0)) is None
    assert gated_activation(Gated(nn.Mish())) is None
    biased = Gated()
    biased.has_bias = True
    assert gated_activation(biased) is None


@needs_cuda
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_it_can_be_recorded_and_needs_no_host(tmp_path: Path, device: torch.device, bits: int, rows: int) -> None:
    layer = Layer(tmp_path, device, bits, 512, 1056, count=8)
    hidden, index, weights = layer.rows(rows, 2, torch.bfloat16)
    blobs, geometry = layer.blobs(0), layer.experts.geometry()
    run_coded(hidden, index, weights, blobs, geometry, "silu")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run_coded(hidden, index, weights, blobs, geometry, "silu")
    for _ in range(3):
        given = layer.rows(rows, 2, torch.bfloat16)
        for kept, new in zip((hidden, index, weights), given, strict=True):
            kept.copy_(new)
        graph.replay()
        assert close(out, layer.reference(0, given, "silu"), torch.bfloat16)
