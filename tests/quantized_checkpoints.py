"""Tiny quantized checkpoints in every format that is read, made from dense ones by a plain quantizer of the tests' own.

Every kind stores a matrix W[out, in] as its publishers do, and says by their formula which dense matrix that is.
Nothing here uses the reader or the formats of spmoe.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Stored = dict[str, Tensor]  # tensors of a matrix by the end of their names, such as weight_packed
Quantize = Callable[[Tensor], tuple[Stored, Tensor]]  # W[out, in] float32 -> tensors, dequantized W

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
FP8_BLOCK = (16, 20)  # neither divides all sizes


@dataclass(frozen=True)
class Kind:
    """One way to publish a quantized checkpoint."""

    config: dict[str, Any]
    quantize: Quantize
    format: str | None  # weight format that experts keep; None: they become dense
    modelopt: dict[str, Any] | None = None  # content of hf_quant_config.json
    own_file: tuple[str, dict[str, Any]] | None = None  # name and content of the method's own file
    exact: bool = True  # whether dequantized weights are equal in every bit


# ---- plain arithmetic


def by_group(values: Tensor, group: int, ins: int) -> Tensor:
    """Repeat each group's value for its inputs."""
    return torch.stack([values[:, k // group] for k in range(ins)], dim=1)


def groups_of(weight: Tensor, group: int) -> list[Tensor]:
    return [weight[:, start : start + group] for start in range(0, weight.shape[1], group)]


def symmetric_codes(weight: Tensor, group: int, bits: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return signed codes, scales per group, and the dequantized matrix."""
    top = 2 ** (bits - 1) - 1
    scale = torch.stack([part.abs().amax(1) / top + 1e-4 for part in groups_of(weight, group)], dim=1).to(dtype)
    full = by_group(scale.float(), group, weight.shape[1])
    codes = (weight / full).round().clamp(-top - 1, top)
    return codes, scale, codes * full


def asymmetric_codes(
    weight: Tensor, group: int, bits: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes from 0, scales and zero points per group, and the dequantized matrix."""
    top = 2**bits - 1
    parts = groups_of(weight, group)
    low = torch.stack([part.amin(1).clamp(max=0) for part in parts], dim=1)
    high = torch.stack([part.amax(1).clamp(min=0) for part in parts], dim=1)
    scale = ((high - low) / top + 1e-4).to(dtype)
    zero = (-low / scale.float()).round().clamp(0, top)
    zero[::3] = 0  # the least zero point; negative weights of these outputs become 0
    full, full_zero = (by_group(one.float(), group, weight.shape[1]) for one in (scale, zero))
    codes = ((weight / full).round() + full_zero).clamp(0, top)
    return codes, scale, zero, (codes - full_zero) * full


def pack(codes: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack codes into int32 words along a dimension; `order` lists which of a word's codes each place holds."""
    count = 32 // bits
    codes = codes.long().movedim(dim, 0)
    missing = -len(codes) % count
    codes = torch.cat([codes, codes.new_zeros(missing, *codes.shape[1:])])
    words = torch.zeros(len(codes) // count, *codes.shape[1:], dtype=torch.int64)
    for place, index in enumerate(order or range(count)):
        words |= codes[index::count] << (bits * place)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return words.movedim(0, dim).contiguous()


def e2m1_codes(numbers: Tensor) -> Tensor:
    """Return the index of the nearest value of the table."""
    return (numbers[..., None] - E2M1).abs().argmin(-1)


def pairs(codes: Tensor) -> Tensor:
    """Put two codes into a byte, the first in the low half."""
    return (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8)


# ---- matrices as they are published


def fp8_block(weight: Tensor) -> tuple[Stored, Tensor]:
    rows, columns = FP8_BLOCK
    blocks = [-(-size // step) for size, step in zip(weight.shape, FP8_BLOCK, strict=True)]
    scale = torch.rand(blocks) * 0.01 + 0.005
    full = torch.stack([scale[r // rows] for r in range(weight.shape[0])])
    full = torch.stack([full[:, c // columns] for c in range(weight.shape[1])], dim=1)
    codes = (weight / full).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scale}, codes.float() * full


def fp8_channel(weight: Tensor) -> tuple[Stored, Tensor]:
    scale = (weight.abs().amax(1, keepdim=True) / 448 + 1e-5).to(torch.bfloat16)
    codes = (weight / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale.float()


def fp8_tensor(weight: Tensor) -> tuple[Stored, Tensor]:
    scale = weight.abs().amax() / 448
    codes = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    stored = {"weight": codes, "weight_scale": scale.reshape(1), "input_scale": torch.ones(1)}
    return stored, codes.float() * scale


def fp8_mx(weight: Tensor) -> tuple[Stored, Tensor]:
    """FP8 with a power of two per 32 inputs, as DeepSeek calls it: `.scale` in e8m0."""
    exponents = torch.stack([part.abs().amax(1).log2().ceil() - 8 for part in groups_of(weight, 32)], dim=1)
    full = by_group(torch.exp2(exponents), 32, weight.shape[1])
    codes = (weight / full).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu)
    return {"weight": codes, "scale": scale}, codes.float() * full


def fp8_row(weight: Tensor) -> tuple[Stored, Tensor]:
    """FP8 with one dimension of scales per output, as ModelOpt stores them."""
    stored, dense = fp8_channel(weight)
    return {"weight": stored["weight"], "weight_scale": stored["weight_scale"].float().flatten()}, dense


def fp8_square(weight: Tensor) -> tuple[Stored, Tensor]:
    """FP8 in blocks of 32 x 32 with scales [rows, 1, columns, 1], as ModelOpt stores them."""
    outs, ins = weight.shape
    scale = torch.rand(-(-outs // 32), -(-ins // 32)) * 0.01 + 0.005
    full = torch.stack([torch.stack([scale[r // 32, c // 32] for c in range(ins)]) for r in range(outs)])
    codes = (weight / full).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale[:, None, :, None].contiguous()}, codes.float() * full


def mxfp8(weight: Tensor) -> tuple[Stored, Tensor]:
    """FP8 with a power of two per 32 inputs: `.weight_scale` in bytes."""
    stored, dense = fp8_mx(weight)
    return {"weight": stored["weight"], "weight_scale": stored["scale"].view(torch.uint8)}, dense


def mxfp8_inv(weight: Tensor) -> tuple[Stored, Tensor]:
    stored, dense = mxfp8(weight)
    return {"weight": stored["weight"], "weight_scale_inv": stored["weight_scale"]}, dense


def mxfp4_codes(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, exponents as bytes, and the dequantized matrix."""
    exponents = torch.stack([part.abs().amax(1).log2().floor() - 2 for part in groups_of(weight, 32)], dim=1)
    full = by_group(torch.exp2(exponents), 32, weight.shape[1])
    codes = e2m1_codes(weight / full)
    return codes, (exponents + 127).to(torch.uint8), E2M1[codes] * full


def ct_mxfp4(weight: Tensor) -> tuple[Stored, Tensor]:
    codes, scale, dense = mxfp4_codes(weight)
    return {"weight_packed": pairs(codes), "weight_scale": scale}, dense


def deepseek_fp4(weight: Tensor) -> tuple[Stored, Tensor]:
    codes, scale, dense = mxfp4_codes(weight)
    return {"weight": pairs(codes).view(torch.int8), "scale": scale.view(torch.float8_e8m0fnu)}, dense


def gpt_oss_mxfp4(weight: Tensor) -> tuple[Stored, Tensor]:
    codes, scale, dense = mxfp4_codes(weight)
    return {"blocks": pairs(codes).reshape(len(weight), -1, 16), "scales": scale}, dense


def nvfp4_scales(weight: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 scales, and those scales repeated for each input; `whole` multiplies."""
    scale = torch.stack([part.abs().amax(1) / 6 / whole for part in groups_of(weight, 16)], dim=1)
    scale = scale.clamp(max=448).to(torch.float8_e4m3fn)
    return scale, by_group(scale.float(), 16, weight.shape[1])


def modelopt_nvfp4(weight: Tensor) -> tuple[Stored, Tensor]:
    whole = weight.abs().amax() / (6 * 448)
    scale, full = nvfp4_scales(weight, whole)
    codes = e2m1_codes(weight / (full * whole + 1e-30))
    stored = {"weight": pairs(codes), "weight_scale": scale, "weight_scale_2": whole, "input_scale": torch.ones(())}
    return stored, E2M1[codes] * (full * whole)


def ct_nvfp4(weight: Tensor) -> tuple[Stored, Tensor]:
    whole = (6 * 448) / weight.abs().amax()
    scale, full = nvfp4_scales(weight, 1 / whole)
    codes = e2m1_codes(weight / (full / whole + 1e-30))
    stored = {"weight_packed": pairs(codes), "weight_scale": scale, "weight_global_scale": whole.reshape(1)}
    return {**stored, "input_global_scale": torch.ones(1)}, E2M1[codes] * (full / whole)


def ct_packed(bits: int, group: int | None, symmetric: bool = True) -> Quantize:
    def quantize(weight: Tensor) -> tuple[Stored, Tensor]:
        outs, ins = weight.shape
        shape = torch.tensor([outs, ins])
        if symmetric:
            codes, scale, dense = symmetric_codes(weight, group or ins, bits, torch.bfloat16)
            packed = pack(codes + 2 ** (bits - 1), bits, 1)
            return {"weight_packed": packed, "weight_scale": scale, "weight_shape": shape}, dense
        codes, scale, zero, dense = asymmetric_codes(weight, group or ins, bits, torch.bfloat16)
        stored = {"weight_packed": pack(codes, bits, 1), "weight_scale": scale, "weight_shape": shape}
        return {**stored, "weight_zero_point": pack(zero, bits, 0)}, dense

    return quantize


def ct_int8(group: int | None, symmetric: bool = True) -> Quantize:
    def quantize(weight: Tensor) -> tuple[Stored, Tensor]:
        ins = weight.shape[1]
        if symmetric:
            codes, scale, dense = symmetric_codes(weight, group or ins, 8, torch.bfloat16)
            return {"weight": codes.to(torch.int8), "weight_scale": scale}, dense
        codes, scale, zero, dense = asymmetric_codes(weight, group or ins, 8, torch.bfloat16)
        stored = {"weight": (codes - 128).to(torch.int8), "weight_scale": scale}
        return {**stored, "weight_zero_point": (zero - 128).to(torch.int8)}, dense

    return quantize


def gptq(bits: int, group: int | None, symmetric: bool, version: int) -> Quantize:
    def quantize(weight: Tensor) -> tuple[Stored, Tensor]:
        ins = weight.shape[1]
        size = group or ins
        if symmetric:
            codes, scale, dense = symmetric_codes(weight, size, bits, torch.float16)
            codes, zero = codes + 2 ** (bits - 1), torch.full(scale.shape, 2.0 ** (bits - 1))
        else:
            codes, scale, zero, dense = asymmetric_codes(weight, size, bits, torch.float16)
        ones = sum(1 << place for place in range(0, 32, bits))  # version 1 subtracts from whole words, with borrows
        return {
            "qweight": pack(codes.T, bits, 0),
            "qzeros": pack(zero.T, bits, 1) - ones * int(version == 1),
            "scales": scale.T.contiguous(),
            "g_idx": torch.tensor([k // size for k in range(ins)], dtype=torch.int32),
        }, dense

    return quantize


def awq(group: int) -> Quantize:
    def quantize(weight: Tensor) -> tuple[Stored, Tensor]:
        codes, scale, zero, dense = asymmetric_codes(weight, group, 4, torch.float16)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        stored = {"qweight": pack(codes.T, 4, 1, order), "qzeros": pack(zero.T, 4, 1, order)}
        return {**stored, "scales": scale.T.contiguous()}, dense

    return quantize


# ---- their declarations


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    """Return a compressed-tensors configuration with one group."""
    weights = {"symmetric": True, "dynamic": False, "actorder": None, "block_structure": None, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    status = {"quantization_status": "compressed", "ignore": ["lm_head"], "kv_cache_scheme": None}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups, **status}


def integers(layout: str, bits: int, group: int | None, symmetric: bool = True) -> dict[str, Any]:
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel", "group_size": None}
    return compressed(layout, type="int", num_bits=bits, symmetric=symmetric, **strategy)


def gptq_config(bits: int, group: int, symmetric: bool, layout: str = "gptq") -> dict[str, Any]:
    shared = {"bits": bits, "group_size": group, "sym": symmetric, "desc_act": False, "lm_head": False}
    return {"quant_method": "gptq", "checkpoint_format": layout, **shared}


def auto_round(packing: str, symmetric: bool, **changes: Any) -> dict[str, Any]:
    shared = {"bits": 4, "group_size": 32, "sym": symmetric, "data_type": "int", "iters": 200}
    return {"quant_method": "auto-round", "packing_format": packing, "autoround_version": "0.8.0", **shared, **changes}


def modelopt(algorithm: str, **changes: Any) -> dict[str, Any]:
    """Return the quantization_config of config.json that ModelOpt writes."""
    kv_cache = {"dynamic": False, "num_bits": 8, "type": "float"}
    shared = {"kv_cache_scheme": kv_cache, "producer": {"name": "modelopt"}, "ignore": ["lm_head", "mtp*"]}
    return {"quant_method": "modelopt", "quant_algo": algorithm, **shared, **changes}


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": list(FP8_BLOCK)}
NVFP4 = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["lm_head"]}
FLOAT8: dict[str, Any] = {"type": "float", "num_bits": 8}
FLOAT4: dict[str, Any] = {"type": "float", "num_bits": 4}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}

KINDS: dict[str, Kind] = {
    "fp8-block": Kind(FP8, fp8_block, "fp8-block16x20"),
    "fp8-scale-e8m0": Kind(FP8, fp8_mx, "fp8-block1x32"),
    "mxfp8": Kind({**FP8, "quant_method": "mxfp8", "weight_block_size": [1, 32]}, mxfp8_inv, "fp8-block1x32"),
    "mxfp8-scale": Kind({"quant_method": "mxfp8", "ignored_layers": ["lm_head"]}, mxfp8, "fp8-block1x32"),
    "fp4-deepseek": Kind(FP8, deepseek_fp4, "mxfp4"),
    "ct-fp8-channel": Kind(
        compressed("float-quantized", **FLOAT8, strategy="channel"), fp8_channel, "fp8-channel-bf16"
    ),
    "ct-fp8-tensor": Kind(compressed("float-quantized", **FLOAT8, strategy="tensor"), fp8_tensor, "fp8-channel"),
    "ct-int4": Kind(integers("pack-quantized", 4, 32), ct_packed(4, 32), "int4-g32"),
    "ct-int4-asym": Kind(integers("pack-quantized", 4, 32, False), ct_packed(4, 32, False), "int4-asym-g32"),
    "ct-int4-channel": Kind(integers("pack-quantized", 4, None), ct_packed(4, None), "int4-g128"),
    "ct-int8-packed": Kind(integers("pack-quantized", 8, 32), ct_packed(8, 32), "int8-g32"),
    "ct-int8": Kind(integers("int-quantized", 8, None), ct_int8(None), "int8-channel"),
    "ct-int8-group": Kind(integers("int-quantized", 8, 32), ct_int8(32), "int8-g32"),
    "ct-int8-asym": Kind(integers("int-quantized", 8, None, False), ct_int8(None, False), None),
    "ct-mxfp8": Kind(
        compressed("mxfp8-quantized", **FLOAT8, strategy="group", group_size=32, scale_dtype="torch.uint8"),
        mxfp8,
        "fp8-block1x32",
    ),
    "ct-mxfp4": Kind(compressed("mxfp4-pack-quantized", **FLOAT4, strategy="group", group_size=32), ct_mxfp4, "mxfp4"),
    "ct-nvfp4": Kind(  # the published formula divides by the global scale; its reciprocal is rounded
        compressed("nvfp4-pack-quantized", **FLOAT4, strategy="tensor_group", group_size=16),
        ct_nvfp4,
        "nvfp4",
        exact=False,
    ),
    "gptq": Kind(gptq_config(4, 32, True), gptq(4, 32, True, 1), "int4-g32-f16"),
    "gptq-asym": Kind(gptq_config(4, 32, False), gptq(4, 32, False, 1), "int4-asym-g32-f16"),
    "gptq-channel": Kind(gptq_config(4, -1, True), gptq(4, None, True, 1), "int4-g128-f16"),
    "gptq-act-order-channel": Kind(  # one group of all inputs has no order
        {**gptq_config(4, -1, True), "desc_act": True}, gptq(4, None, True, 1), "int4-g128-f16"
    ),
    "gptq-act-order-static": Kind(  # groups were formed before the inputs were sorted
        {**gptq_config(4, 32, True), "desc_act": True, "static_groups": True}, gptq(4, 32, True, 1), "int4-g32-f16"
    ),
    "gptq-dynamic": Kind(  # names without settings change nothing
        {**gptq_config(4, 32, True), "dynamic": {"lm_head": {}, "model.embed_tokens": {}, "-:.*mtp.*": {}}},
        gptq(4, 32, True, 1),
        "int4-g32-f16",
    ),
    "gptq-own-file": Kind(
        {},
        gptq(4, 32, True, 1),
        "int4-g32-f16",
        own_file=(
            "quantize_config.json",
            {"bits": 4, "group_size": 32, "damp_percent": 0.1, "desc_act": False, "sym": True},
        ),
    ),
    "auto-round": Kind(auto_round("auto_round:auto_gptq", True), gptq(4, 32, True, 1), "int4-g32-f16"),
    "auto-round-gptq-asym": Kind(auto_round("auto_round:auto_gptq", False), gptq(4, 32, False, 1), "int4-asym-g32-f16"),
    "auto-round-asym": Kind(auto_round("auto_round", False), gptq(4, 32, False, 2), "int4-asym-g32-f16"),
    "auto-round-awq": Kind(auto_round("auto_round:auto_awq", False), awq(32), "int4-asym-g32-f16"),
    "gptq-v2-asym": Kind(gptq_config(4, 32, False, "gptq_v2"), gptq(4, 32, False, 2), "int4-asym-g32-f16"),
    "gptq-8bit": Kind(gptq_config(8, 32, True), gptq(8, 32, True, 1), "int8-g32-f16"),
    "gptq-8bit-asym": Kind(gptq_config(8, 32, False), gptq(8, 32, False, 1), None),
    "awq": Kind(AWQ, awq(32), "int4-asym-g32-f16"),
    "awq-own-file": Kind(
        {},
        awq(32),
        "int4-asym-g32-f16",
        own_file=("quant_config.json", {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}),
    ),
    "modelopt-nvfp4": Kind({"quant_method": "modelopt", **NVFP4}, modelopt_nvfp4, "nvfp4"),
    "modelopt-nvfp4-file": Kind({}, modelopt_nvfp4, "nvfp4", modelopt={"quantization": NVFP4}),
    "modelopt-w4a16-nvfp4": Kind(modelopt("W4A16_NVFP4"), modelopt_nvfp4, "nvfp4"),
    "modelopt-fp8-channel": Kind(modelopt("FP8_PER_CHANNEL_PER_TOKEN"), fp8_row, "fp8-channel"),
    "modelopt-fp8-block": Kind(modelopt("fp8_pb_wo", group_size=32), fp8_square, "fp8-block32"),
    "modelopt-mxfp8": Kind(modelopt("MXFP8"), mxfp8, "fp8-block1x32"),
    "modelopt-fp8": Kind({"quant_method": "modelopt", "quant_algo": "FP8"}, fp8_tensor, "fp8-channel"),
    "mxfp4": Kind(
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}, gpt_oss_mxfp4, "mxfp4"
    ),
}


# ---- whole checkpoints


@dataclass
class QuantizedPair:
    """A quantized checkpoint, and the dense one of its dequantized weights."""

    packed: Path
    dense: Path
    quantized: list[str] = field(default_factory=list)  # names of dense tensors


def is_linear(name: str, tensor: Tensor) -> bool:
    """Select the matrices of attention, feed-forwards and experts; not embeddings, routers or the output head."""
    return tensor.ndim >= 2 and name.endswith(
        (
            "proj.weight",
            "w1.weight",
            "w2.weight",
            "w3.weight",
            "gate_up_proj",
            "down_proj",
            "linear.weight",
            "w13_weight",
            "w2_weight",
        )
    )


def is_expert(name: str, tensor: Tensor) -> bool:
    """Select only experts' matrices."""
    return is_linear(name, tensor) and "experts" in name and "shared" not in name


def stored_name(name: str, suffix: str) -> str:
    """Return the name of a tensor of a matrix, beside `x.weight` or the fused parameter `x`."""
    if name.endswith(".weight"):
        return f"{name.removesuffix('weight')}{suffix}"
    return name if suffix == "weight" else f"{name}_{suffix.removeprefix('weight_')}"


def write_pair(
    source: Path,
    where: Path,
    kind: str,
    select: Callable[[str, Tensor], bool] = is_linear,
    transposed: bool = False,
    others: str | None = None,
) -> QuantizedPair:
    """Quantize a dense checkpoint; `transposed`: its fused experts are [experts, in, out].

    `others`: kind of the matrices that are not experts; default: the same.
    """
    torch.manual_seed(7)
    made = QuantizedPair(where / "packed", where / "dense")
    for directory in (made.packed, made.dense):
        shutil.copytree(source, directory)
    packed, dense = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in load_file(source / "model.safetensors").items():
        if not select(name, tensor):
            packed[name] = dense[name] = tensor
            continue
        made.quantized.append(name)
        matrices = tensor.float() if tensor.ndim == 3 else tensor.float()[None]
        quantize = KINDS[kind if others is None or is_expert(name, tensor) else others].quantize
        results = [quantize(one.T if transposed else one) for one in matrices]
        whole = torch.stack([one.T if transposed else one for _, one in results])
        dense[name] = (whole if tensor.ndim == 3 else whole[0]).contiguous()
        for suffix in results[0][0]:
            stored = torch.stack([one[suffix] for one, _ in results])
            packed[stored_name(name, suffix)] = (stored if tensor.ndim == 3 else stored[0]).contiguous()
    assert made.quantized
    save_file(packed, made.packed / "model.safetensors", metadata={"format": "pt"})
    save_file(dense, made.dense / "model.safetensors", metadata={"format": "pt"})
    if KINDS[kind].config:
        declare(made.packed, KINDS[kind].config)
    if (content := KINDS[kind].modelopt) is not None:
        (made.packed / "hf_quant_config.json").write_text(json.dumps(content))
    if (own := KINDS[kind].own_file) is not None:
        (made.packed / own[0]).write_text(json.dumps(own[1]))
    return made


def declare(directory: Path, quantization: Any) -> None:
    """Set `quantization_config`."""
    declared = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**declared, "quantization_config": quantization}))


def change(directory: Path, **tensors: Tensor | None) -> Path:
    """Replace tensors of a checkpoint, or delete them (None)."""
    stored = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        stored.pop(name, None)
        if tensor is not None:
            stored[name] = tensor
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
