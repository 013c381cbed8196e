"""Kernels of quantized experts against their PyTorch references and float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_helpers import DEVICE, KERNEL_MARKS, needs_cuda, prepare_kernel_test
from torch import Tensor, nn

from spmoe.backends import quantize
from spmoe.backends.base import gated_activation
from spmoe.backends.kernels import quantized
from spmoe.backends.kernels.dense import ACTIVATIONS
from spmoe.backends.kernels.experts import ExpertTile, ExpertTiles
from spmoe.backends.kernels.quantized import (
    dequantize_matrix,
    run_quantized_experts,
    run_quantized_experts_plain,
    select_quantized_tiles,
)
from spmoe.backends.quantize import QuantizationScheme, QuantizedExperts
from spmoe.experts.store import BlobLayout, StoreSpec, ensure_expert_file
from spmoe.types import ExpertKey

pytestmark = KERNEL_MARKS

# largest error against float64 on the same codes, relative to the largest exact value
BOUND = {torch.float32: 2e-5, torch.float16: 2**-9, torch.bfloat16: 2**-7}


@pytest.fixture(autouse=True)
def _prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_kernel_test(monkeypatch)


class Gated(nn.Module):
    """Experts module without weights."""

    has_gate, has_bias, is_transposed = True, False, False

    def __init__(self, act_fn: nn.Module | None = None, limit: float = math.inf) -> None:
        super().__init__()
        self.act_fn = act_fn or nn.SiLU()
        self.limit = limit

    def _apply_gate(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return self.act_fn(gate.clamp(max=self.limit)) * up


class Layer:
    """Random quantized experts, and rows that are routed to them."""

    def __init__(
        self, path: Path, bits: int, hidden: int, ffn: int, count: int = 4, seed: int = 0, group: int = 32
    ) -> None:
        self.rng = torch.Generator().manual_seed(seed)
        self.hidden, self.count = hidden, count
        shapes = {"gate_up_proj": (2 * ffn, hidden), "down_proj": (hidden, ffn)}
        spec = StoreSpec("fingerprint", BlobLayout.of(shapes, torch.float32), (count, count))
        self.experts = QuantizedExperts(spec, QuantizationScheme(bits, group), transposed=False)

        def read(key: ExpertKey, views: dict[str, Tensor]) -> None:
            for view in views.values():
                view.copy_(torch.randn(view.shape, generator=self.rng) / math.sqrt(view.shape[1]) + 0.02)

        file = ensure_expert_file(path / "codes.safetensors", self.experts.spec, self.experts.filler(read))
        self.experts.load(file, DEVICE)
        file.close()

    def rows(self, rows: int, top_k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return random hidden states, routed experts and weights."""
        hidden = torch.randn(rows, self.hidden, generator=self.rng) + 0.5
        index = torch.rand(rows, self.count, generator=self.rng).topk(top_k).indices
        weights = torch.rand(rows, top_k, generator=self.rng)
        return hidden.to(DEVICE, dtype), index.to(DEVICE), weights.to(DEVICE)

    def blobs(self, layer: int) -> Tensor:
        return self.experts._blobs[layer].view(torch.int32)

    def reference(self, layer: int, rows: tuple[Tensor, Tensor, Tensor], activation: str) -> Tensor:
        """Compute the layer's output in float64, row by row, with the weights of `QuantizedExperts.tensors`."""
        hidden, index, weights = rows
        out = torch.zeros_like(hidden, dtype=torch.float64)
        for row, routed in enumerate(index.tolist()):
            for expert, weight in zip(routed, weights[row].double(), strict=True):
                tensors = self.experts.tensors(layer, expert)
                gate, up = (tensors["gate_up_proj"].double() @ hidden[row].double()).chunk(2)
                out[row] += weight * (tensors["down_proj"].double() @ (ACTIVATIONS[activation](gate) * up))
        return out


def close(found: Tensor, exact: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the result has this dtype and all elements are within its bound; False for any NaN."""
    error = (found.double() - exact.double()).abs().max().item()
    return found.dtype == dtype and error <= BOUND[dtype] * exact.double().abs().max().item()


@pytest.mark.parametrize(
    ("rows", "top_k", "hidden", "ffn", "dtype", "activation"),
    [
        (1, 2, 64, 96, torch.bfloat16, "silu"),
        (1, 1, 32, 32, torch.float32, "gelu"),
        (2, 2, 64, 40, torch.float32, "relu"),  # neither groups nor tiles divide the sizes
        (3, 2, 33, 17, torch.float16, "gelu_tanh"),
        (5, 1, 40, 16, torch.bfloat16, "silu"),
    ],
)
@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_experts_match_reference(
    tmp_path: Path, bits: int, rows: int, top_k: int, hidden: int, ffn: int, dtype: torch.dtype, activation: str
) -> None:
    layer = Layer(tmp_path, bits, hidden, ffn, count=3, seed=rows)  # few experts, so that rows share some
    inputs = layer.rows(rows, top_k, dtype)
    args = (*inputs, layer.blobs(1), layer.experts.kernel_layout(), activation)
    exact = layer.reference(1, inputs, activation)
    assert close(run_quantized_experts(*args), exact, dtype)
    assert close(run_quantized_experts_plain(*args), exact, dtype)


NARROW = ExpertTiles(ExpertTile(32, 1, 1, 1), ExpertTile(16, 2, 1, 1), 1)
WIDE = ExpertTiles(ExpertTile(16, 4, 4, 3), ExpertTile(64, 1, 4, 2), 3)


@pytest.mark.parametrize(
    ("bits", "group", "tiles"), [(4, 32, NARROW), (4, 64, WIDE), (8, 32, WIDE), (8, 16, NARROW)], ids=str
)
def test_quantized_experts_with_other_tiles_and_groups(
    tmp_path: Path, bits: int, group: int, tiles: ExpertTiles
) -> None:
    layer = Layer(tmp_path, bits, 72, 70, count=1, group=group)
    inputs = layer.rows(3, 1, torch.float32)
    args = (*inputs, layer.blobs(1), layer.experts.kernel_layout(), "silu", tiles)
    exact = layer.reference(1, inputs, "silu")
    assert close(run_quantized_experts(*args), exact, torch.float32)
    assert close(run_quantized_experts_plain(*args), exact, torch.float32)


def test_no_split_is_empty(tmp_path: Path) -> None:
    small = Layer(tmp_path, 4, 64, 64).experts.kernel_layout()
    mixtral = small._replace(
        gate_up=small.gate_up._replace(inputs=4096, outputs=28672),
        down=small.down._replace(inputs=14336, outputs=4096),
    )
    for layout, pairs in ((small, 1), (small, 32), (mixtral, 2), (mixtral, 10)):
        tiles = select_quantized_tiles(layout, pairs)
        groups = -(-layout.ffn // layout.group)
        assert quantized._groups_per_split(groups, tiles.down.block_k, tiles.splits) * (tiles.splits - 1) < groups
    assert select_quantized_tiles(mixtral, 2).splits > 1
    assert select_quantized_tiles(small, 1).splits == 1


@pytest.mark.parametrize("bits", [4, 8])
def test_kernel_layout_and_store_dequantize_to_equal_weights(tmp_path: Path, bits: int) -> None:
    layer = Layer(tmp_path, bits, 40, 56)
    layout = layer.experts.kernel_layout()
    for expert in range(layer.count):
        tensors = layer.experts.tensors(1, expert)
        for name, matrix in (("gate_up_proj", layout.gate_up), ("down_proj", layout.down)):
            torch.testing.assert_close(dequantize_matrix(layer.blobs(1)[expert], layout, matrix), tensors[name])


def test_kernels_run_supported_experts_of_few_rows_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "kernels_run_on", lambda device: True)
    layer, calls = Layer(tmp_path, 4, 32, 16), []

    def run(*args: Any) -> Tensor:
        calls.append(True)
        return run_quantized_experts(*args)

    monkeypatch.setattr(quantized, "run_quantized_experts", run)
    inputs = layer.rows(1, 2, torch.float32)
    found = layer.experts.run(0, Gated(), *inputs)
    assert close(found, layer.reference(0, inputs, "silu"), torch.float32)
    assert calls == [True]
    for experts in (Gated(limit=1.0), Gated(nn.Mish())):  # unsupported: dequantized, and run with PyTorch
        found = layer.experts.run(1, experts, *inputs)
        assert torch.equal(found, layer.experts._run_dequantized(1, experts, *inputs))
        layer.experts._activations.clear()
    layer.experts.run(0, Gated(), *layer.rows(40, 2, torch.float32))
    assert calls == [True]


def test_gate_activation_is_none_for_experts_that_kernels_cannot_run() -> None:
    assert gated_activation(Gated()) == "silu"
    assert gated_activation(Gated(nn.ReLU())) == "relu"
    assert gated_activation(Gated(limit=10.0)) is None
    assert gated_activation(Gated(nn.Mish())) is None
    biased = Gated()
    biased.has_bias = True
    assert gated_activation(biased) is None


@needs_cuda
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_quantized_experts_in_a_cuda_graph(tmp_path: Path, bits: int, rows: int) -> None:
    layer = Layer(tmp_path, bits, 512, 1056, count=8)
    hidden, index, weights = layer.rows(rows, 2, torch.bfloat16)
    blobs, layout = layer.blobs(0), layer.experts.kernel_layout()
    run_quantized_experts(hidden, index, weights, blobs, layout, "silu")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run_quantized_experts(hidden, index, weights, blobs, layout, "silu")
    for _ in range(3):
        inputs = layer.rows(rows, 2, torch.bfloat16)
        for captured, new in zip((hidden, index, weights), inputs, strict=True):
            captured.copy_(new)
        graph.replay()
        assert close(out, layer.reference(0, inputs, "silu"), torch.bfloat16)
