"""Quantized experts: quantization errors, the file on disk, and results."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from spmoe.backends.quantize import QuantizationScheme, QuantizedExperts
from spmoe.errors import StoreError
from spmoe.experts.store import BlobLayout, ExpertFile, StoreSpec, ensure_expert_file
from spmoe.types import ExpertKey

CPU = torch.device("cpu")
HIDDEN, INNER, EXPERTS = 40, 24, 3
SCHEMES = [QuantizationScheme(8), QuantizationScheme(4), QuantizationScheme(4, group=64)]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


MATRICES = {
    "normal": normal(9, 96),
    "not a whole number of groups": normal(5, 33, seed=1),
    "narrow": normal(4, 1, seed=2),
    "one outlier": normal(3, 64, seed=3).index_fill(1, torch.tensor([7]), 100.0),
    "all positive": normal(3, 64, seed=4).abs() + 5,
    "all negative": -normal(3, 64, seed=5).abs() - 5,
    "constant": torch.full((2, 64), -0.3),
    "zero": torch.zeros(2, 64),
    "tiny": 1e-20 * normal(2, 64, seed=6),
    "large": 1e20 * normal(2, 64, seed=7),
}


def within_half_a_step(scheme: QuantizationScheme, weight: Tensor, codes: Tensor, scales: Tensor) -> bool:
    """Return whether every weight is within half a step of its group of its dequantized value."""
    found = scheme.dequantize(codes, scales, weight.shape[1], torch.float32)
    steps = scales[..., 0].float().T.repeat_interleave(scheme.group, dim=1)[:, : weight.shape[1]]
    rounding = 4 * torch.finfo(torch.float32).eps * weight.abs().max()
    return bool(((found - weight).abs() <= steps / 2 + rounding).all())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("name", MATRICES)
def test_quantization_error_is_at_most_half_a_step(scheme: QuantizationScheme, name: str) -> None:
    weight = MATRICES[name]
    codes, scales = scheme.quantize(weight)
    groups = -(-weight.shape[1] // scheme.group)
    assert (codes.dtype, codes.shape) == (torch.uint8, (groups, len(weight), scheme.group * scheme.bits // 8))
    assert (scales.dtype, scales.shape) == (torch.bfloat16, (groups, len(weight), 2))
    assert within_half_a_step(scheme, weight, codes, scales)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("name", ["normal", "not a whole number of groups", "one outlier", "all positive"])
def test_step_is_at_most_the_range_of_a_group_over_the_number_of_codes(scheme: QuantizationScheme, name: str) -> None:
    weight = MATRICES[name]
    _, scales = scheme.quantize(weight)
    for row, parts in zip(weight, scales[..., 0].float().T, strict=True):
        for group, step in zip(row.split(scheme.group), parts, strict=True):
            padded = torch.cat([group, torch.zeros(-len(group) % scheme.group)])
            value_range = float(padded.max() - padded.min()) + 2**-7 * float(padded.abs().max())
            assert float(step) <= 1.02 * value_range / (2**scheme.bits - 1)


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_error_bound_detects_wrong_scales(scheme: QuantizationScheme, part: int) -> None:
    """The bound is tight enough to detect scales that are off by 10 %, or that belong to the next group."""
    weight = MATRICES["normal"] * (1 + torch.arange(96) // 32)
    codes, scales = scheme.quantize(weight)
    for change in (1.1, 0.9):
        wrong = scales.clone()
        wrong[..., part] *= change
        assert not within_half_a_step(scheme, weight, codes, wrong)
    assert not within_half_a_step(scheme, weight, codes, scales.roll(1, dims=0))
    assert not within_half_a_step(scheme, weight, codes, scales.flip(-1))
    assert not within_half_a_step(scheme, weight, codes.roll(1, dims=-1), scales)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_codes_are_packed_in_the_order_that_kernels_read(scheme: QuantizationScheme) -> None:
    weight = torch.arange(float(scheme.group)).repeat(2, 2) % (1 << scheme.bits)  # two outputs, two groups
    weight[:, -1] = scheme.max_code  # groups range from 0 to the largest code: codes equal weights
    weight[:, scheme.group - 1] = scheme.max_code
    codes, _ = scheme.quantize(weight)
    words = codes.view(torch.int32)  # [groups, out, words]
    shifts = torch.arange(0, 32, scheme.bits, dtype=torch.int32)
    for group, row in ((0, 0), (0, 1), (1, 0), (1, 1)):
        found = [
            int(words[group, row, w]) >> int(shift) & scheme.max_code
            for shift in shifts
            for w in range(words.shape[-1])
        ]
        wanted = weight[row].split(scheme.group)[group]
        assert max(abs(a - float(b)) for a, b in zip(found, wanted, strict=True)) <= 0.02 * scheme.max_code
        assert sorted(found) == found or scheme.group > scheme.max_code


def test_error_of_8_bits_is_a_sixteenth_of_that_of_4_bits() -> None:
    weight = MATRICES["normal"]
    errors = [float((s.dequantize(*s.quantize(weight), 96, torch.float32) - weight).norm()) for s in SCHEMES[:2]]
    assert 12 < errors[1] / errors[0] < 20


# ---- all experts of a target


class Gated(SimpleNamespace):
    """Attributes of a gated experts module."""

    has_gate = True

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


def make(tmp_path: Path, bits: int, transposed: bool, bias: bool) -> tuple[QuantizedExperts, ExpertFile]:
    shapes = {name: tuple(t.shape) for name, t in weights_of(ExpertKey(0, 0), transposed, bias).items()}
    spec = StoreSpec("fingerprint", BlobLayout.of(shapes, torch.float32), (EXPERTS, EXPERTS))
    experts = QuantizedExperts(spec, QuantizationScheme(bits), transposed)

    def read(key: ExpertKey, views: dict[str, Tensor]) -> None:
        for name, tensor in weights_of(key, transposed, bias).items():
            views[name].copy_(tensor)

    return experts, ensure_expert_file(tmp_path / "experts.safetensors", experts.spec, experts.filler(read))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [1, 5, 30])
def test_experts_loaded_from_disk_compute_the_weighted_sum(
    tmp_path: Path, bits: int, transposed: bool, bias: bool, rows: int
) -> None:
    experts, file = make(tmp_path, bits, transposed, bias)
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
                    assert float((found[name] - tensor).norm() / tensor.norm()) < (0.01 if bits == 8 else 0.12)
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
        for run in (experts.run, experts._run_dequantized):  # on the CPU, and on a GPU without kernels
            torch.testing.assert_close(run(layer, module, hidden, index, weights), expected, atol=1e-3, rtol=1e-4)


def test_damaged_code_fails_its_checksum(tmp_path: Path) -> None:
    experts, file = make(tmp_path, 4, transposed=False, bias=False)
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


def test_every_scheme_has_its_own_fingerprint(tmp_path: Path) -> None:
    spec = StoreSpec("f", BlobLayout.of({"down_proj": (8, 64)}, torch.float32), (2,))
    made = [
        QuantizedExperts(spec, scheme, transposed=False).spec
        for scheme in (QuantizationScheme(8), QuantizationScheme(4), QuantizationScheme(4, 64))
    ]
    assert len({(one.fingerprint, one.layout) for one in made}) == 3
    assert spec.fingerprint not in {one.fingerprint for one in made}
