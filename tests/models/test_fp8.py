"""Checkpoints in 8 bits with scales: the loaded model equals, in every bit, that of the dequantized checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spmoe import LLM, SamplingParams
from spmoe.errors import CheckpointError
from spmoe.models.checkpoint import Checkpoint, read_quantization
from spmoe.models.families import reference_tokens, save, tiny_draft, tiny_model
from spmoe.models.inspection import inspect_model
from spmoe.models.load import ExpertReader, load_dense, load_without_experts, store_spec
from spmoe.models.tensors import dequantize
from spmoe.types import ExpertKey

PROMPT, COUNT = [5, 9, 3, 17, 60, 2], 12
BLOCK = (16, 20)  # neither divides all sizes
FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}


def compressed(strategy: str) -> dict[str, Any]:
    weights = {"type": "float", "num_bits": 8, "strategy": strategy, "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}


def quantize(weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Quantize a weight with scales that are all different."""
    rows, columns = weight.shape
    if kind == "block":
        blocks = [-(-size // step) for size, step in zip(weight.shape, BLOCK, strict=True)]
        scale = torch.rand(blocks) * 0.01 + 0.005
        full_scale = torch.stack(
            [torch.stack([scale[r // BLOCK[0], c // BLOCK[1]] for c in range(columns)]) for r in range(rows)]
        )
    else:
        scale = torch.rand(*((rows, 1) if kind == "channel" else (1,))) * 0.01 + 0.005
        full_scale = scale.expand(rows, columns) if kind == "channel" else scale
    return (weight / full_scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def make_checkpoints(family: str, kind: str, where: Path) -> tuple[Path, Path]:
    """Write a checkpoint in 8 bits, and the same one dequantized."""
    torch.manual_seed(0)
    fp8, dense = where / "fp8", where / "dense"
    save(tiny_model(family), fp8)
    save(tiny_model(family), dense)
    fp8_tensors, dense_tensors = dict[str, Tensor](), dict[str, Tensor]()
    suffix = "_scale_inv" if kind == "block" else "_scale"
    for name, tensor in load_file(fp8 / "model.safetensors").items():
        if not name.endswith(("proj.weight", "w1.weight", "w2.weight", "w3.weight")):
            fp8_tensors[name] = dense_tensors[name] = tensor
            continue
        fp8_tensors[name], fp8_tensors[f"{name}{suffix}"] = quantize(tensor, kind)
        if kind == "tensor":
            fp8_tensors[f"{name.removesuffix('weight')}input_scale"] = torch.ones(1)
        dense_tensors[name] = dequantize(fp8_tensors[name], fp8_tensors[f"{name}{suffix}"], BLOCK)  # type: ignore[assignment]
    assert sum(tensor.dtype.itemsize == 1 for tensor in fp8_tensors.values()) > 20
    save_file(fp8_tensors, fp8 / "model.safetensors", metadata={"format": "pt"})
    save_file(dense_tensors, dense / "model.safetensors", metadata={"format": "pt"})
    declare(fp8, FP8 if kind == "block" else compressed(kind))
    return fp8, dense


def declare(directory: Path, quantization: Any) -> None:
    declared = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**declared, "quantization_config": quantization}))


@pytest.mark.parametrize(
    ("family", "kind"),
    [("deepseek_v3", "block"), ("mixtral", "channel"), ("qwen3_moe", "tensor"), ("mixtral", "block")],
)
def test_loaded_model_equals_dequantized_checkpoint(family: str, kind: str, tmp_path: Path) -> None:
    fp8, dense = make_checkpoints(family, kind, tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        found = []
        for directory in (fp8, dense):
            checkpoint = Checkpoint.find(str(directory))
            model = load_without_experts(checkpoint, dtype)
            paths = [moe_layer.path for moe_layer in inspect_model(model).moe]
            spec, tensors = store_spec(checkpoint, model, paths, dtype), dict(model.state_dict())
            with ExpertReader(checkpoint, model, paths) as reader:
                for layer, count in enumerate(spec.experts):
                    for expert in range(count):
                        views = spec.layout.views(torch.zeros(spec.layout.nbytes, dtype=torch.uint8))
                        reader.fill(ExpertKey(layer, expert), views)
                        tensors |= {f"{layer} {expert} {name}": view for name, view in views.items()}
            found.append(tensors)
        assert found[0].keys() == found[1].keys()
        assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    expected = reference_tokens(dense, PROMPT, COUNT)
    assert len(set(expected)) > 3
    with LLM(str(fp8), None, dtype="float32", device="cpu", expert_memory="50%", progress=False) as llm:
        assert llm.generate(PROMPT, SamplingParams(max_tokens=COUNT, ignore_eos=True))[0].token_ids == expected


def test_draft_in_fp8(tmp_path: Path) -> None:
    save(tiny_draft(32, 96), tmp_path)
    stored, expected = load_file(tmp_path / "model.safetensors"), dict[str, Tensor]()
    for name in [name for name in stored if name.endswith("proj.weight")]:
        stored[name], stored[f"{name}_scale_inv"] = quantize(stored[name], "block")
        expected[name] = dequantize(stored[name], stored[f"{name}_scale_inv"], BLOCK)  # type: ignore[assignment]
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    declare(tmp_path, FP8)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    model = load_dense(Checkpoint.find(str(tmp_path)), torch.float32)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in expected.items())
    assert model.generation_config.eos_token_id == [7, 8]


def test_dequantize_accepts_every_shape_of_scale() -> None:
    weight = torch.randn(2, 5, 7).to(torch.float8_e4m3fn)
    twice = 2 * weight.float()
    for shape in ((), (1,), (1, 1, 1), (2, 5), (2, 5, 1), (2, 5, 7), (2, 2, 2), (2, 1, 1)):
        assert torch.equal(dequantize(weight, torch.full(shape, 2.0), (4, 4)), twice), shape  # type: ignore[arg-type]
    for shape in ((5,), (2, 7), (3, 5, 1), (2, 3, 2), (2, 2, 3), (2, 2, 2, 2)):
        assert dequantize(weight, torch.full(shape, 2.0), (4, 4)) is None, shape
    scale = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    found = dequantize(torch.ones(3, 5).to(torch.float8_e4m3fn), scale, (2, 4))
    assert found is not None
    assert found.tolist() == [[1, 1, 1, 1, 2], [1, 1, 1, 1, 2], [4, 4, 4, 4, 8]]


def with_changes(directory: Path, **tensors: Tensor | None) -> str:
    stored = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor is None:
            del stored[name]
        else:
            stored[name] = tensor
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    return str(directory)


def test_missing_or_wrong_scales_and_dtypes_are_rejected(tmp_path: Path) -> None:
    fp8, _ = make_checkpoints("mixtral", "block", tmp_path)
    stored, dense = load_file(fp8 / "model.safetensors"), "model.layers.0.self_attn.q_proj.weight"
    expert = next(name for name in stored if ".1." in name and "experts.2." in name and name.endswith("weight"))
    for name in (expert, dense):
        scale = stored[f"{name}_scale_inv"]
        for wrong, words in (
            ({f"{name}_scale_inv": None}, "lacks the scale"),
            ({f"{name}_scale_inv": torch.ones(3, 3)}, "its scale"),
            ({name: torch.ones(stored[name].shape, dtype=torch.int8)}, "stored as int8"),
        ):
            with pytest.raises(CheckpointError, match=words):
                LLM(with_changes(fp8, **wrong), dtype="float32", device="cpu", progress=False)
            with_changes(fp8, **{name: stored[name], f"{name}_scale_inv": scale})


@pytest.mark.parametrize(
    ("declared", "method"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq"}, "awq"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "fp8"),
        ({"quant_method": "fp8", "weight_block_size": "128"}, "fp8"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": None}}}, "compressed-tensors"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": 3}}, "compressed-tensors"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"type": "int", "num_bits": 4}}}},
            "compressed-tensors",
        ),
        ({}, "unknown"),
        ("fp8", "unknown"),
    ],
    ids=str,
)
def test_unsupported_quantization_methods_are_rejected(declared: Any, method: str, tmp_path: Path) -> None:
    assert read_quantization(declared) is None
    save(tiny_draft(32, 96), tmp_path)
    declare(tmp_path, declared)
    with pytest.raises(CheckpointError, match=rf"quantized \(by {method}.*16-bit"):
        Checkpoint.find(str(tmp_path))
