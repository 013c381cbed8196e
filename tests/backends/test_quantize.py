"""Quantized experts of self-drafting models: the file on disk, and results."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from spmoe.backends import quantize
from spmoe.backends.quantize import QuantizedExperts
from spmoe.errors import StoreError
from spmoe.experts.store import ExpertFile, StoreSpec, ensure_expert_file
from spmoe.formats.layout import BlobLayout
from spmoe.types import ExpertKey

CPU = torch.device("cpu")
HIDDEN, INNER, EXPERTS = 40, 24, 3


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Gated(SimpleNamespace):
    """Attributes of a gated experts module."""

    has_gate = True
    act_fn = staticmethod(silu)

    def _apply_gate(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return silu(gate) * up


def weights_of(key: ExpertKey, transposed: bool, bias: bool) -> dict[str, Tensor]:
    seed = 10 * key.layer + key.expert
    found = {"gate_up_proj": normal(2 * INNER, HIDDEN, seed=seed), "down_proj": normal(HIDDEN, INNER, seed=seed + 100)}
    if transposed:
        found = {name: weight.T.contiguous() for name, weight in found.items()}
    if bias:
        found["gate_up_proj_bias"] = normal(2 * INNER, seed=seed + 200)
        found["down_proj_bias"] = normal(HIDDEN, seed=seed + 300)
    return found


def make(tmp_path: Path, scheme: str, transposed: bool, bias: bool) -> tuple[QuantizedExperts, ExpertFile]:
    shapes = {name: tuple(t.shape) for name, t in weights_of(ExpertKey(0, 0), transposed, bias).items()}
    spec = StoreSpec("fingerprint", BlobLayout.of(shapes, torch.float32), (EXPERTS, EXPERTS))
    experts = QuantizedExperts.of(spec, scheme, torch.float32, transposed, [shapes, shapes])

    def fill(key: ExpertKey, views: dict[str, Tensor]) -> None:
        experts.format.convert(weights_of(key, transposed, bias), views)

    return experts, ensure_expert_file(tmp_path / "experts.safetensors", experts.spec, fill)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("rows", [1, 5, 30])
def test_experts_loaded_from_disk_compute_the_weighted_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, transposed: bool, bias: bool, rows: int
) -> None:
    experts, file = make(tmp_path, scheme, transposed, bias)
    experts.load(file, CPU)
    file.close()
    assert experts.nbytes == experts.spec.count * experts.spec.layout.nbytes
    module: Any = Gated(is_transposed=transposed, has_bias=bias)
    hidden = normal(rows, HIDDEN, seed=77)
    index = normal(rows, EXPERTS, seed=79).topk(2).indices
    weights = normal(rows, 2, seed=78).softmax(-1)
    for layer in range(2):
        plain = [weights_of(ExpertKey(layer, e), transposed, bias) for e in range(EXPERTS)]
        dequantized = [dict(experts.tensors(layer, e)) for e in range(EXPERTS)]
        for found, exact in zip(dequantized, plain, strict=True):
            assert found.keys() == exact.keys()
            for name, tensor in exact.items():
                assert found[name].shape == tensor.shape
                if tensor.ndim == 1:
                    assert torch.equal(found[name], tensor)
                else:
                    assert float((found[name] - tensor).norm() / tensor.norm()) < (0.01 if scheme == "int8" else 0.12)
        expected = torch.zeros(rows, HIDDEN)
        for row in range(rows):
            for position in range(2):
                tensors = {
                    n: t.T if transposed and t.ndim == 2 else t
                    for n, t in dequantized[int(index[row, position])].items()
                }
                inner = module._apply_gate(
                    linear(hidden[row], tensors["gate_up_proj"], tensors.get("gate_up_proj_bias"))
                )
                expected[row] += weights[row, position] * linear(
                    inner, tensors["down_proj"], tensors.get("down_proj_bias")
                )
        for run in (experts.run, experts._run_pairs):  # on the CPU, and on a GPU without kernels
            torch.testing.assert_close(run(layer, module, hidden, index, weights), expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(("rows", "ran"), [(5, ["kernels"]), (65, []), (3, ["kernels"])])
def test_kernels_run_few_rows_of_supported_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, ran: list[str]
) -> None:
    kernels = pytest.importorskip("spmoe.backends.kernels.experts")
    calls = []

    def run(*args: Any) -> None:
        calls.append("kernels")
        kernels.run_expert_batch_plain(*args)

    monkeypatch.setattr(quantize, "kernels_run_on", lambda device: True)
    monkeypatch.setattr(kernels, "run_expert_batch", run)
    monkeypatch.setattr(kernels, "reduce_experts", kernels.reduce_experts_plain)
    experts, file = make(tmp_path, "int4", transposed=True, bias=True)
    experts.load(file, CPU)
    file.close()
    module: Any = Gated(is_transposed=True, has_bias=True, act_fn=torch.nn.SiLU())
    hidden, index = normal(rows, HIDDEN, seed=7), normal(rows, EXPERTS, seed=8).topk(2).indices
    weights = normal(rows, 2, seed=9).softmax(-1)
    expected = experts._run_pairs(1, module, hidden, index, weights)
    torch.testing.assert_close(experts.run(1, module, hidden, index, weights), expected, atol=1e-4, rtol=1e-4)
    assert calls == ran
    unsupported: Any = Gated(is_transposed=True, has_bias=True, act_fn=torch.nn.Mish())
    experts.run(0, unsupported, hidden, index, weights)
    assert calls == ran


def test_damaged_code_fails_its_checksum(tmp_path: Path) -> None:
    experts, file = make(tmp_path, "int4", transposed=False, bias=False)
    offset = file.offset(ExpertKey(1, 1)) + 5
    file.close()
    with file.path.open("r+b") as damaged:
        damaged.seek(offset)
        byte = damaged.read(1)
        damaged.seek(offset)
        damaged.write(bytes([byte[0] ^ 1]))
    reopened = ExpertFile.open(file.path)
    with pytest.raises(StoreError, match=r"expert 1 of layer 1 .* checksum"):
        experts.load(reopened, CPU)
    reopened.close()


def test_every_scheme_has_its_own_fingerprint() -> None:
    shapes = {"gate_up_proj": (8, 64)}
    spec = StoreSpec("f", BlobLayout.of(shapes, torch.float32), (2,))
    made = [QuantizedExperts.of(spec, scheme, torch.float32, False, [shapes]).spec for scheme in ("int8", "int4")]
    assert len({spec.fingerprint, *(one.fingerprint for one in made)}) == 3


def test_layers_may_have_experts_of_different_sizes() -> None:
    layers = [{"gate_up_proj": (8, 64), "down_proj": (64, 4)}, {"gate_up_proj": (16, 64), "down_proj": (64, 8)}]
    spec = StoreSpec("f", BlobLayout.of(layers[1], torch.float32), (1, 1))
    experts = QuantizedExperts.of(spec, "int4", torch.float32, False, layers)
    assert experts.nbytes == 2 * max(experts.format.layout(shapes).nbytes for shapes in layers)
