"""Tiny checkpoints as quantized uploads have them, for checks of whole families.

A dense checkpoint is rewritten in one of the published layouts, and a second time as the dense checkpoint of its
dequantized weights, which transformers can run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spmoe.formats.base import Parts, WeightFormat
from spmoe.formats.fp4 import Mxfp4, Nvfp4
from spmoe.formats.fp8 import Fp8
from spmoe.formats.int4 import Int4
from spmoe.formats.int8 import Int8
from spmoe.models.checkpoint import Checkpoint
from spmoe.models.expert_reader import ExpertReader
from spmoe.models.experts_seam import experts_modules
from spmoe.models.load import load_skeleton
from spmoe.models.repacking import AWQ_ORDER

_GROUP = 32
_WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class UploadFormat:
    """One published layout: how its weights are quantized, stored and declared."""

    weight: WeightFormat
    store: Callable[[Parts], dict[str, Tensor]]  # parts of W[out, in] -> tensors by the end of their names
    config: Mapping[str, Any]  # quantization_config


def _codes(packed: Tensor) -> Tensor:
    """Return packed 4-bit codes, one by one."""  # [out, in / 2] uint8 -> [out, in] uint8
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def _words(codes: Tensor, places: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Pack eight 4-bit codes of a row into an int32 word; `places` is where each of them goes."""  # [n, 8 m] -> [n, m]
    codes = codes.long().reshape(len(codes), -1, 8)
    words = sum(codes[..., index] << (4 * place) for index, place in enumerate(places))
    return (words & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)  # type: ignore[union-attr]


def _store_gptq(parts: Parts) -> dict[str, Tensor]:
    codes, zero = _codes(parts["codes"]), parts["zero"] - 1
    ins = codes.shape[1]
    return {
        "qweight": _words(codes).T.contiguous(),
        "qzeros": _words(zero.T.contiguous()),
        "scales": parts["scale"].T.contiguous(),
        "g_idx": (torch.arange(ins) // _GROUP).int(),
    }


def _store_awq(parts: Parts) -> dict[str, Tensor]:
    codes, zero = _codes(parts["codes"]).T, parts["zero"].T
    return {
        "qweight": _words(codes, AWQ_ORDER),
        "qzeros": _words(zero, AWQ_ORDER),
        "scales": parts["scale"].T.contiguous(),
    }


def _store_int4(parts: Parts) -> dict[str, Tensor]:
    codes = _codes(parts["codes"])
    shape = torch.tensor(codes.shape)
    return {"weight_packed": _words(codes), "weight_scale": parts["scale"], "weight_shape": shape}


def _store_nvfp4(parts: Parts) -> dict[str, Tensor]:
    whole = parts["global_scale"][0, 0]
    return {"weight": parts["codes"], "weight_scale": parts["scale"], "weight_scale_2": whole}


def _store_blocks(parts: Parts) -> dict[str, Tensor]:
    codes = parts["codes"]
    return {"blocks": codes.view(len(codes), -1, 16), "scales": parts["scale"]}


def _compressed_tensors(layout: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


FORMATS: dict[str, UploadFormat] = {
    "fp8": UploadFormat(
        Fp8(),
        lambda parts: {"weight": parts["weight"], "weight_scale_inv": parts["scale"]},
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    ),
    "int8": UploadFormat(
        Int8(0),
        lambda parts: {"weight": parts["weight"], "weight_scale": parts["scale"]},
        _compressed_tensors("int-quantized", type="int", num_bits=8, strategy="channel"),
    ),
    "int4": UploadFormat(
        Int4(_GROUP),
        _store_int4,
        _compressed_tensors("pack-quantized", type="int", num_bits=4, strategy="group", group_size=_GROUP),
    ),
    "gptq": UploadFormat(
        Int4(_GROUP, True, torch.float16),
        _store_gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "sym": False, "desc_act": False},
    ),
    "awq": UploadFormat(
        Int4(_GROUP, True, torch.float16),
        _store_awq,
        {"quant_method": "awq", "bits": 4, "group_size": _GROUP, "zero_point": True, "version": "gemm"},
    ),
    "mxfp4": UploadFormat(
        Mxfp4(),
        lambda parts: {"weight_packed": parts["codes"], "weight_scale": parts["scale"]},
        _compressed_tensors("mxfp4-pack-quantized", type="float", num_bits=4, strategy="group", group_size=32),
    ),
    "nvfp4": UploadFormat(Nvfp4(), _store_nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
}
_TRANSPOSED = {"mxfp4": UploadFormat(Mxfp4(), _store_blocks, {"quant_method": "mxfp4"})}  # as gpt-oss is published


def write_quantized(source: Path, packed: Path, dense: Path, name: str) -> bool:
    """Quantize a dense checkpoint of one file to `packed`, and write the dense one of the same weights to `dense`.

    Experts are quantized, and projections of attention where the layout has them. Returns False, and writes nothing, if
    there is no such layout for this model's experts: transposed ones are published in mxfp4 only, in whole blocks.
    """
    checkpoint = Checkpoint.find(str(source))
    model = load_skeleton(checkpoint)
    paths = [path for path, _ in experts_modules(model)]
    transposed: Any = model.get_submodule(paths[0]).is_transposed
    chosen = _TRANSPOSED.get(name) if transposed else FORMATS[name]
    if chosen is None:
        return False
    with ExpertReader(checkpoint, model, paths) as reader:
        names = reader.sources.matrices()
    if transposed and any(checkpoint.tensors[name].shape[-2] % _GROUP for name in names):
        return False  # blocks have 32 inputs
    if not transposed:
        whole_words = [name for name, tensor in checkpoint.tensors.items() if not any(n % 8 for n in tensor.shape)]
        names |= {name for name in whole_words if name.endswith("_proj.weight")}
    quantized, expected = dict[str, Tensor](), dict[str, Tensor]()
    for tensor_name, tensor in load_file(source / _WEIGHTS).items():
        if tensor_name not in names:
            quantized[tensor_name] = expected[tensor_name] = tensor
            continue
        fused = tensor.ndim == 3
        matrices = [_quantize(chosen, one.T if transposed else one) for one in (tensor if fused else tensor[None])]
        values = [chosen.weight.dequantize(parts, torch.float32) for parts in matrices]
        whole = torch.stack([one.T if transposed else one for one in values])
        expected[tensor_name] = (whole if fused else whole[0]).to(tensor.dtype).contiguous()
        stored = [chosen.store(parts) for parts in matrices]
        for suffix in stored[0]:
            both = torch.stack([one[suffix] for one in stored])
            quantized[_name(tensor_name, suffix)] = (both if fused else both[0]).contiguous()
    for directory, tensors in ((packed, quantized), (dense, expected)):
        shutil.copytree(source, directory)
        save_file(tensors, directory / _WEIGHTS, metadata={"format": "pt"})
    config = json.loads((packed / "config.json").read_text(encoding="utf-8"))
    text = json.dumps({**config, "quantization_config": dict(chosen.config)})
    (packed / "config.json").write_text(text, encoding="utf-8")
    return True


def _quantize(chosen: UploadFormat, weight: Tensor) -> Parts:
    parts = chosen.weight.quantize(weight)
    if "zero" in parts:
        parts["zero"] = parts["zero"].clamp(min=1)  # gptq stores zero - 1
    return parts


def _name(dense: str, suffix: str) -> str:
    """Return the name of a tensor of a matrix that stands for `x.weight`, or for the fused parameter `x`."""
    if dense.endswith(".weight"):
        return f"{dense.removesuffix('weight')}{suffix}"
    return dense if suffix == "weight" else f"{dense}_{suffix.removeprefix('weight_')}"
