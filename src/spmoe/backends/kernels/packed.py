"""Products with expert weights that stay packed in their slots, and their dequantization to dense matrices.

`multiply` loads a tile of weights, dequantizes it in registers to the inputs' dtype and multiplies it. Each weight is
exactly that of `WeightFormat.dequantize`. The order of sums depends on shapes alone; that of `bf16-packed` is the order
of dense weights, so both give equal bits.

A kernel gets up to four parts of a matrix, as typed views of the same slots; of `raw`, the address in each slot:

| kind | weights | scales | zeros | raw |
| --- | --- | --- | --- | --- |
| dense | weight | | | |
| fp8, int8 | weight | scale | | |
| int4 | codes | scale | zero | |
| mxfp4 | codes | scale | | |
| nvfp4 | codes | scale | global_scale | |
| bf16-packed | low | codes | base | raw |
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from spmoe.formats.base import KernelWeights
from spmoe.formats.bf16_packed import BLOCK as PACKED_BLOCK
from spmoe.formats.expert import ExpertFormat, Shapes
from spmoe.formats.layout import BlobLayout, torch_dtype

FOUR_BITS = ("int4", "mxfp4", "nvfp4")

_PARTS: dict[str, tuple[str, ...]] = {  # of each kind, in the order of the kernels' arguments
    "dense": ("weight",),
    "fp8": ("weight", "scale"),
    "int8": ("weight", "scale"),
    "int4": ("codes", "scale", "zero"),
    "mxfp4": ("codes", "scale"),
    "nvfp4": ("codes", "scale", "global_scale"),
    "bf16-packed": ("low", "codes", "base", "raw"),
}
_MIN_GROUP = 16  # inputs that share a scale


class Part(NamedTuple):
    """One part of a matrix in all slots."""

    slots: Tensor  # [slots, blob elements], a view of the slots in the part's dtype
    offset: int  # of the part in a blob, in elements


@dataclass(frozen=True)
class SlotMatrix:
    """One projection of the experts in all slots, as kernels read it."""

    name: str
    format: ExpertFormat
    layout: BlobLayout
    slots: Tensor  # [slots, blob bytes] uint8
    kind: str  # of `KernelWeights`
    outs: int
    ins: int
    tensors: tuple[Tensor, Tensor, Tensor, Tensor]  # weights, scales, zeros, raw; unused ones repeat the first
    constants: dict[str, Any]  # compile-time arguments of kernels
    bias: Part | None


def slot_matrix(slots: Tensor, format: ExpertFormat, shapes: Shapes, name: str) -> SlotMatrix | None:
    """Describe one projection of the experts in these slots; None if kernels cannot read it."""
    # slots: [slots, blob bytes] uint8; shapes: of one expert's tensors in its module
    params = format.kernel(shapes)
    weights, matrix = params.weights, params.matrix(name)
    group = 0 if weights.group >= matrix.ins else weights.group
    if params.transposed or weights.kind not in _PARTS or (group and (group < _MIN_GROUP or group & (group - 1))):
        return None
    if weights.kind in FOUR_BITS and matrix.ins % 4:
        return None
    offsets, dtypes = dict(matrix.offsets), _part_dtypes(weights)
    parts = [_part(slots, offsets[part], dtypes[part]) for part in _PARTS[weights.kind] if part in offsets]
    if weights.kind == "bf16-packed":
        parts[-1] = _part_addresses(slots, offsets["raw"])
    parts += [parts[0]] * (4 - len(parts))
    constants = {
        "KIND": weights.kind,
        "GROUP": group,
        "GROUP_ROWS": weights.rows or matrix.outs,
        "ASYMMETRIC": weights.asymmetric,
        "ASM": not triton.knobs.runtime.interpret,
        "FP8": _has_fp8(),
        "TAIL": (offsets["tail"] - offsets["low"]) // 2 if weights.kind == "bf16-packed" else 0,
    }
    for letter, part in zip("WSZR", parts, strict=True):
        constants[f"{letter}_BLOB"], constants[f"{letter}_OFFSET"] = part.slots.stride(0), part.offset
    first, second, third, fourth = (part.slots for part in parts)
    bias = None if matrix.bias_offset is None else _part(slots, matrix.bias_offset, torch_dtype(params.dtype))
    return SlotMatrix(
        name, format, format.layout(shapes), slots, weights.kind, matrix.outs, matrix.ins,
        (first, second, third, fourth), constants, bias,
    )  # fmt: skip


def dequantize_matrix(matrix: SlotMatrix, slot: int, out: Tensor) -> Tensor:
    """Write the projection of the expert in a slot as a dense matrix W[out, in]."""  # out: [outs, ins]
    block_n, block_k = 32, PACKED_BLOCK
    _dequantize_kernel[triton.cdiv(matrix.outs, block_n), triton.cdiv(matrix.ins, block_k)](
        *matrix.tensors, out, slot, N=matrix.outs, K=matrix.ins, **matrix.constants, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=4,
    )  # fmt: skip
    return out


def dequantize_matrix_plain(matrix: SlotMatrix, slot: int, out: Tensor) -> Tensor:
    """PyTorch reference of `dequantize_matrix`: the definition of the format."""
    parts = matrix.format.parts(matrix.layout.views(matrix.slots[slot]), matrix.name)
    return out.copy_(matrix.format.weight.dequantize(parts, matrix.format.dtype))


def _part_dtypes(weights: KernelWeights) -> dict[str, torch.dtype]:
    """Return the dtypes that kernels read the parts in."""
    if weights.kind == "bf16-packed":
        return dict.fromkeys(_PARTS["bf16-packed"], torch.int32)
    weight = {"fp8": torch.uint8, "int8": torch.int8}.get(weights.kind) or torch_dtype(weights.weight_dtype or "uint8")
    scale = torch.uint8 if weights.kind == "nvfp4" else torch_dtype(weights.scale_dtype or "uint8")
    return {"codes": torch.int16, "zero": torch.uint8, "weight": weight, "scale": scale, "global_scale": torch.float32}


@cache
def _has_fp8() -> bool:
    """Return whether the device converts e4m3 itself."""
    if triton.knobs.runtime.interpret:
        return False
    target = triton.runtime.driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= 89)


def _part_addresses(slots: Tensor, offset: int) -> Part:
    """Return the address of a part in each slot instead of the part."""  # offset: in bytes
    first = slots.data_ptr() + offset
    return Part(first + slots.stride(0) * torch.arange(len(slots), device=slots.device)[:, None], 0)


def _part(slots: Tensor, offset: int, dtype: torch.dtype) -> Part:
    return Part(slots.view(dtype), offset // dtype.itemsize)


# ---- values of codes


@triton.jit
def _e4m3(codes, NATIVE: tl.constexpr):
    """Return the values of e4m3 codes in float32; NATIVE: the device has an instruction for it."""
    if NATIVE:
        value = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        bits = codes.to(tl.int32)
        # the exponent keeps its bias of 7 in a float32, whose bias is 127: subnormal codes become subnormal numbers
        value = (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36
        value = tl.where((bits & 0x7F) == 0x7F, float("nan"), value)
    return value


@triton.jit
def _e8m0(codes, DTYPE: tl.constexpr):
    """Return 2^(code - 127) in float32 or bfloat16, subnormal for code 0; code 255 is not valid in a checkpoint."""
    FRACTION: tl.constexpr = 7 if tl.bfloat16 == DTYPE else 23
    bits = tl.maximum(codes.to(tl.int32) << FRACTION, 1 << (FRACTION - 1))
    if tl.bfloat16 == DTYPE:
        value = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        value = bits.to(tl.float32, bitcast=True)
    return value


@triton.jit
def _nibble(codes, PLACE: tl.constexpr, KIND: tl.constexpr):
    """Return the values of one nibble of each 16-bit word in float32: from 0 to 15, or e2m1."""
    bits = codes.to(tl.int32) >> 4 * PLACE
    if KIND == "int4":
        value = (bits & 0x0F).to(tl.float32)
    else:  # sign, exponent and mantissa move to their places in a float32, whose bias is 126 larger
        value = (((bits << 28) >> 6) & -0x7E400000).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
    return value


# Assembly for 4-bit codes gets two 16-bit words in one register ($4), and writes nibble i of both to $i. So codes need
# no byte permutation: they are in the right halves already.


def _int4_assembly(magic: str) -> str:
    """Return code that writes the nibbles to the mantissas of 16-bit numbers."""
    lines = [f"lop3.b32 $0, $4, 0x000F000F, {magic}, 0xEA;"]  # 0xEA: (a & b) | c
    lines += [f"shr.u32 t, $4, {4 * i}; lop3.b32 ${i}, t, 0x000F000F, {magic}, 0xEA;" for i in range(1, 4)]
    return " ".join(["{ .reg .b32 t;", *lines, "}"])


def _int8_assembly() -> str:
    """Return code that multiplies four int8 codes ($2) with scales in bfloat16 ($3, $4): the weights are in $0, $1.

    A code is 128 + its lower seven bits, minus 128, or minus 256 for a negative one. Devices before sm_90 only have
    `fma` for bfloat16; a product plus -0.0 is the product.
    """
    lines = ["{ .reg .b32 t, u, one, zero; mov.b32 one, 0x3F803F80; mov.b32 zero, 0x80008000;"]
    for number, two_bytes in enumerate(("0x4140", "0x4342")):
        lines += [
            f"prmt.b32 t, $2, 0, {two_bytes}; lop3.b32 u, t, 0x007F007F, 0x43004300, 0xEA;",
            "lop3.b32 t, t, 0x00800080, 0xC300C300, 0xEA; fma.rn.bf16x2 t, u, one, t;",
            f"fma.rn.bf16x2 ${number}, t, ${number + 3}, zero;",
        ]
    return " ".join([*lines, "}"])


def _bf16_packed_assembly() -> str:
    """Return code that computes `_bf16_pair` of the four words of a group, or loads them if the group is raw.

    $0 to $3: words; $4, $5: signs and mantissas; $6: codes; $7: exponents; $8: address of the raw groups.
    """
    lines = ["{ .reg .pred raw; .reg .b32 t, u, v; .reg .b64 place; setp.eq.s32 raw, $6, -1; shr.u32 u, $6, 8;"]
    for number in range(4):
        low, two_bytes = f"${4 + number // 2}", "0x3311" if number % 2 else "0x2200"  # each in both bytes of a half
        code, mask, factor = "u" if number > 1 else "$6", *(("0x00F000F0", 8) if number % 2 else ("0x000F000F", 128))
        lines += [
            f"prmt.b32 t, {low}, 0, {two_bytes}; and.b32 v, {code}, {mask}; mad.lo.s32 v, v, {factor}, $7;",
            f"lop3.b32 ${number}, t, 0x807F807F, v, 0xEA;",
        ]
    lines.append("mad.wide.u32 place, $4, 16, $8; @raw ld.global.v4.b32 {$0, $1, $2, $3}, [place]; }")
    return " ".join(lines)


def _e2m1_bfloat16_assembly() -> str:
    """Return code that moves e2m1 nibbles to the fields of bfloat16 numbers: sign to bit 15, the others to bits 6 to 8.

    A product writes a nibble to two places, from which a mask takes the sign, and exponent and mantissa. Products and
    masks run beside each other on different units. The sign of nibble 3 is in its place.
    """
    lines = ["{ .reg .b32 t, u; shr.u32 u, $4, 6;"]
    sources = (("$4", "0x000F000F", 64 + 4096), ("$4", "0x00F000F0", 4 + 256), ("u", "0x003C003C", 16 + 1024))
    for number, (source, mask, factor) in enumerate(sources):
        lines.append(f"and.b32 t, {source}, {mask}; mul.lo.s32 t, t, {factor}; and.b32 ${number}, t, 0x81C081C0;")
    return " ".join([*lines, "and.b32 t, u, 0x01C001C0; lop3.b32 $3, $4, 0x80008000, t, 0xEA; }"])


def _e2m1_float16_assembly() -> str:
    """Return code that moves e2m1 nibbles to the fields of float16 numbers: sign to bit 15, the others to bits 9 to 11.

    These are so near that the two places of a product would overlap. The sign of nibble 3 is in its place.
    """
    lines = ["{ .reg .b32 t, u;"]
    for number in range(3):
        lines += [
            f"shl.b32 t, $4, {9 - 4 * number}; and.b32 t, t, 0x0E000E00; shl.b32 u, $4, {12 - 4 * number};",
            f"lop3.b32 ${number}, u, 0x80008000, t, 0xEA;",
        ]
    return " ".join([*lines, "shr.u32 t, $4, 3; and.b32 t, t, 0x0E000E00; lop3.b32 $3, $4, 0x80008000, t, 0xEA; }"])


_INT8_BFLOAT16 = tl.constexpr(_int8_assembly())
_INT8_FLOAT16 = tl.constexpr(  # (1024 + code + 128) - 1152
    "{ .reg .b32 t, u, offset; mov.b32 offset, 0xE480E480; xor.b32 u, $2, 0x80808080;"
    " prmt.b32 t, u, 0x64646464, 0x4140; add.rn.f16x2 t, t, offset; mul.rn.f16x2 $0, t, $3;"
    " prmt.b32 t, u, 0x64646464, 0x4342; add.rn.f16x2 t, t, offset; mul.rn.f16x2 $1, t, $4; }"
)
_INT4_BFLOAT16 = tl.constexpr(_int4_assembly("0x43004300"))  # 128 + code
_INT4_FLOAT16 = tl.constexpr(_int4_assembly("0x64006400"))  # 1024 + code
_BF16_PACKED = tl.constexpr(_bf16_packed_assembly())
_E2M1_BFLOAT16 = tl.constexpr(_e2m1_bfloat16_assembly())  # value / 2^126
_E2M1_FLOAT16 = tl.constexpr(_e2m1_float16_assembly())  # value / 2^14
_BFLOAT16_FACTOR = tl.constexpr(2.0**126)  # of e2m1 values to the numbers with their fields
_FLOAT16_FACTOR = tl.constexpr(2.0**14)
_WIDEN = tl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;")  # two bfloat16 numbers to float32
_UNZIP_QUADS = tl.constexpr(
    "{ .reg .b32 a, b, c, d; mov.b64 {a, b}, $4; mov.b64 {c, d}, $5;"
    " prmt.b32 $0, a, c, 0x5410; prmt.b32 $1, a, c, 0x7632; prmt.b32 $2, b, d, 0x5410; prmt.b32 $3, b, d, 0x7632; }"
)


@triton.jit
def _dequantize_int8(codes, scale):
    """Multiply int8 codes with scales of a 16-bit dtype, two per instruction."""
    if scale.dtype == tl.bfloat16:
        tile = tl.inline_asm_elementwise(
            _INT8_BFLOAT16, "=&r,=&r,r,r,r", [codes, scale], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        tile = tl.inline_asm_elementwise(
            _INT8_FLOAT16, "=&r,=&r,r,r,r", [codes, scale], dtype=tl.float16, is_pure=True, pack=4
        )
    return tile


@triton.jit
def _nibbles(codes, KIND: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """Return the four nibbles of each 16-bit word.

    In a 16-bit dtype, two nibbles per instruction; then `int4` codes have an offset of 128 or 1024, and e2m1 values are
    divided by `_BFLOAT16_FACTOR` or `_FLOAT16_FACTOR`. Without assembly, values in float32.
    """
    if ASM and tl.bfloat16 == DTYPE:
        TEXT: tl.constexpr = _INT4_BFLOAT16 if KIND == "int4" else _E2M1_BFLOAT16
        n_0, n_1, n_2, n_3 = tl.inline_asm_elementwise(
            TEXT, "=&r,=&r,=&r,=&r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=2,
        )  # fmt: skip
    elif ASM and tl.float16 == DTYPE:
        CODE: tl.constexpr = _INT4_FLOAT16 if KIND == "int4" else _E2M1_FLOAT16
        n_0, n_1, n_2, n_3 = tl.inline_asm_elementwise(
            CODE, "=&r,=&r,=&r,=&r,r", [codes], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True,
            pack=2,
        )  # fmt: skip
    else:
        n_0, n_1 = _nibble(codes, 0, KIND), _nibble(codes, 1, KIND)
        n_2, n_3 = _nibble(codes, 2, KIND), _nibble(codes, 3, KIND)
    return n_0, n_1, n_2, n_3


@triton.jit
def _dequantize_nibble(
    value, scale, zero, KIND: tl.constexpr, ASYMMETRIC: tl.constexpr, FOLDED: tl.constexpr, DTYPE: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Return the weights of one of the `_nibbles`.

    `scale` is float32, or already of DTYPE if a product in DTYPE is rounded as one in float32 would be. FOLDED: it
    includes the factor of `_nibbles`.
    """
    HALF: tl.constexpr = ASM and tl.float32 != DTYPE
    if KIND == "int4":  # small integers: exact in 16 bits
        OFFSET: tl.constexpr = 0.0 if not HALF else 128.0 if tl.bfloat16 == DTYPE else 1024.0
        value = value - ((zero + OFFSET).to(value.dtype) if ASYMMETRIC else OFFSET + 8.0)
    elif HALF and not FOLDED:
        value = value * (_BFLOAT16_FACTOR if tl.bfloat16 == DTYPE else _FLOAT16_FACTOR)
    if scale.dtype == DTYPE:
        weight = value * scale
    else:
        if HALF and tl.bfloat16 == DTYPE:
            value = tl.inline_asm_elementwise(_WIDEN, "=&r,=r,r", [value], dtype=tl.float32, is_pure=True, pack=2)
        weight = (value.to(tl.float32) * scale).to(DTYPE)
    return weight


# ---- tiles of weights


@triton.jit
def _to_float32(scale):
    """Convert scales to float32.

    bfloat16 is extended by its bits: of a product that is rounded to float16, LLVM would round the factors instead, and
    a bfloat16 may be too large for that.
    """
    if scale.dtype == tl.bfloat16:
        wide = (scale.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = scale.to(tl.float32)
    return wide


@triton.jit
def _spread(scale, GROUPS: tl.constexpr, SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Repeat each group's value SIZE times: [outputs, groups] -> [outputs, groups * SIZE]."""
    return tl.reshape(tl.broadcast_to(scale[:, :, None], (BLOCK_N, GROUPS, SIZE)), (BLOCK_N, GROUPS * SIZE))


@triton.jit
def _load_scale(
    scales, n, start, exists, K: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUPS: tl.constexpr,
    MASKED: tl.constexpr, GUARDED: tl.constexpr,
):  # fmt: skip
    """Load the codes of the scales of outputs `n` and of the groups from input `start` on; GUARDED: if `exists`."""
    # -> [outputs, groups]
    COLUMNS: tl.constexpr = (K + GROUP - 1) // GROUP if GROUP else 1
    g = tl.arange(0, GROUPS)[None, :]
    offsets = (n // GROUP_ROWS)[:, None] * COLUMNS + g
    if GROUP:
        offsets += start // GROUP
    if MASKED and GROUP:  # also a tile of one group: all of its inputs may lie after the last one
        scale = tl.load(scales + offsets, mask=exists & (start // GROUP + g < COLUMNS), other=0)
    else:
        scale = tl.load(scales + offsets, mask=exists, other=0) if GUARDED else tl.load(scales + offsets)
    return scale


@triton.jit
def _decode_scale(
    scale, zeros, n, KIND: tl.constexpr, FOLDED: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    """Return the scales of these codes; FOLDED: times the factor of `_nibbles`, for scales of which none is large."""
    # in 16 bits where products are rounded as in float32: those with powers of two in bfloat16, and those of integers
    # with scales of the same dtype, since 8 bits and 8 or 11 bits make exact products in float32
    if KIND == "mxfp4" and FOLDED and tl.bfloat16 == DTYPE:
        scale = (scale.to(tl.int32) * 128 + 0x3F00).to(tl.uint16).to(tl.bfloat16, bitcast=True)  # 2^(code - 1)
    elif KIND == "mxfp4":
        scale = _e8m0(scale, DTYPE if ASM else tl.float32)
    elif KIND == "nvfp4":
        scale = _e4m3(scale, FP8) * tl.load(zeros + n)[:, None]
    elif not ((KIND == "int4" or KIND == "int8") and scale.dtype == DTYPE and ASM):
        scale = _to_float32(scale)
    if FOLDED and not (KIND == "mxfp4" and tl.bfloat16 == DTYPE):
        scale = scale.to(tl.float32) * (_BFLOAT16_FACTOR if tl.bfloat16 == DTYPE else _FLOAT16_FACTOR)
    return scale


@triton.jit
def _load_zero(zeros, n, start, K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """Load the zero points of outputs `n` and of the groups from input `start` on: [outputs, groups] float32."""
    COLUMNS: tl.constexpr = (K + GROUP - 1) // GROUP if GROUP else 1
    column = tl.arange(0, GROUPS)[None, :] + (start // GROUP if GROUP else 0)
    return tl.load(zeros + n[:, None] * COLUMNS + column, mask=column < COLUMNS, other=0).to(tl.float32)


# Between the load of codes and the product, every operation is element by element, in two dimensions: then Triton
# copies codes to shared memory in a layout without bank conflicts, and dequantizes them where the product needs them.


@triton.jit
def _load_tile(
    weights, scales, zeros, n, start, KIND: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr, DTYPE: tl.constexpr,
    ASM: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Load dense or 8-bit weights of outputs `n` and BLOCK_K inputs from `start` on; MASKED: K may end before."""
    # -> [BLOCK_N, BLOCK_K]
    GROUPS: tl.constexpr = 1 if GROUP == 0 or GROUP >= BLOCK_K else BLOCK_K // GROUP
    k = start + tl.arange(0, BLOCK_K)
    ptrs = weights + n[:, None] * K + k[None, :]
    codes = tl.load(ptrs, mask=(k < K)[None, :], other=0) if MASKED else tl.load(ptrs)
    if KIND == "dense":
        tile = codes.to(DTYPE)
    else:
        scale = _load_scale(scales, n, start, True, K, GROUP, GROUP_ROWS, GROUPS, MASKED, False)
        scale = _decode_scale(scale, zeros, n, KIND, False, DTYPE, ASM, FP8)
        scale = _spread(scale, GROUPS, BLOCK_K // GROUPS, BLOCK_N)
        if KIND == "fp8":
            tile = (_e4m3(codes, FP8) * scale).to(DTYPE)
        elif scale.dtype == DTYPE and tl.float32 != DTYPE:
            tile = _dequantize_int8(codes, scale)
        else:
            tile = (codes.to(tl.float32) * scale).to(DTYPE)
    return tile


@triton.jit
def _load_codes(weights, n, start, K: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr):
    """Load 4-bit codes of outputs `n` and BLOCK_K inputs from `start` on, four in a word."""
    # -> [BLOCK_N, BLOCK_K // 4] int16
    quad = start // 4 + tl.arange(0, BLOCK_K // 4)
    ptrs = weights + n[:, None] * (K // 4) + quad[None, :]
    return tl.load(ptrs, mask=(quad < K // 4)[None, :], other=0) if MASKED else tl.load(ptrs)


@triton.jit
def _dequantize_codes(
    codes, scale, zero, KIND: tl.constexpr, ASYMMETRIC: tl.constexpr, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr,
    SIZE: tl.constexpr, FOLDED: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Return the weights of these codes, whose groups have SIZE words: those of every fourth input."""
    # codes: [BLOCK_N, GROUPS * SIZE] int16, scale, zero: [BLOCK_N, GROUPS] -> 4 x [BLOCK_N, GROUPS * SIZE]
    scale, zero = _spread(scale, GROUPS, SIZE, BLOCK_N), _spread(zero, GROUPS, SIZE, BLOCK_N)
    n_0, n_1, n_2, n_3 = _nibbles(codes, KIND, DTYPE, ASM)
    return (
        _dequantize_nibble(n_0, scale, zero, KIND, ASYMMETRIC, FOLDED, DTYPE, ASM),
        _dequantize_nibble(n_1, scale, zero, KIND, ASYMMETRIC, FOLDED, DTYPE, ASM),
        _dequantize_nibble(n_2, scale, zero, KIND, ASYMMETRIC, FOLDED, DTYPE, ASM),
        _dequantize_nibble(n_3, scale, zero, KIND, ASYMMETRIC, FOLDED, DTYPE, ASM),
    )


@triton.jit
def _load_pairs(low, codes, exponent, raw, n, block, KB: tl.constexpr, ASM: tl.constexpr):
    """Load one block of bf16-packed weights of outputs `n`: four words, each with the bits of two weights.

    `raw` points to the address of the raw groups.
    """
    # -> 4 x [16, outputs] int32; the halves of word i belong to planes 2 * i and 2 * i + 1 of the block
    j = tl.arange(0, 16)[:, None]
    first = (n * KB)[None, :] + block
    low_0 = tl.load(low + first * 32 + j)
    low_1 = tl.load(low + first * 32 + 16 + j)
    code = tl.load(codes + first * 16 + j)
    if ASM:
        address = tl.load(raw + tl.zeros((1, 1), tl.int32))  # a tensor, which is laid out as `code` is
        word_0, word_1, word_2, word_3 = tl.inline_asm_elementwise(
            _BF16_PACKED, "=&r,=&r,=&r,=&r,r,r,r,r,l", [low_0, low_1, code, exponent, address],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        is_raw = code == -1
        raws = tl.load(raw).to(tl.pointer_type(tl.int32)) + low_0 * 4
        word_0, word_1 = _bf16_pair(low_0, code, exponent), _bf16_pair(low_0 >> 8, code >> 4, exponent)
        word_2, word_3 = _bf16_pair(low_1, code >> 8, exponent), _bf16_pair(low_1 >> 8, code >> 12, exponent)
        word_0 = tl.where(is_raw, tl.load(raws, mask=is_raw, other=0), word_0)
        word_1 = tl.where(is_raw, tl.load(raws + 1, mask=is_raw, other=0), word_1)
        word_2 = tl.where(is_raw, tl.load(raws + 2, mask=is_raw, other=0), word_2)
        word_3 = tl.where(is_raw, tl.load(raws + 3, mask=is_raw, other=0), word_3)
    return word_0, word_1, word_2, word_3


@triton.jit
def _load_exponent(base, n):
    """Load the exponents of code 0, at their places in the halves of a word: [1, outputs]."""
    return tl.load(base + n)[None, :] * 0x00800080


@triton.jit
def _load_tail(low, n, K: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr):
    """Load the weights of outputs `n` after the last whole block; TAIL: their distance from `low` in weights."""
    SIZE: tl.constexpr = K % BLOCK
    k = tl.arange(0, BLOCK)
    ptrs = low.to(tl.pointer_type(tl.bfloat16)) + TAIL + (n * SIZE)[None, :] + k[:, None]
    return tl.load(ptrs, mask=(k < SIZE)[:, None], other=0.0).to(DTYPE)  # [BLOCK, outputs]


@triton.jit
def _bf16_pair(low, code, exponent):
    """Return the bits of two weights: signs and mantissas in bytes 0 and 2 of `low`, codes in nibbles 0 and 4."""
    low &= 0x00FF00FF
    # a sign moves from bit 7 to bit 15: subtract 2^7 and add 2^15
    return low + (low & 0x00800080) * 255 + (code & 0x000F000F) * 128 + exponent


@triton.jit
def _half(word, HIGH: tl.constexpr, DTYPE: tl.constexpr):
    """Return the lower or the higher half of words as numbers of a 16-bit dtype."""
    bits = (word >> 16) if HIGH else word
    return (bits & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True)


@triton.jit
def _load_inputs(x, rows, valid, k, K: tl.constexpr, MASKED: tl.constexpr):
    """Load inputs `k` of all rows, zero for rows that are not valid: [rows, inputs]."""
    mask = valid[:, None]
    if MASKED:
        mask = mask & (k < K)[None, :]
    return tl.load(x + rows[:, None] + k[None, :], mask=mask, other=0.0)


@triton.jit
def _load_input_columns(x, rows, valid, k, K: tl.constexpr, MASKED: tl.constexpr):
    """Load inputs `k` of all rows, zero for rows that are not valid: [inputs, rows]."""
    mask = valid[None, :]
    if MASKED:
        mask = mask & (k < K)[:, None]
    return tl.load(x + rows[None, :] + k[:, None], mask=mask, other=0.0)


@triton.jit
def _load_input_quads(x, rows, valid, quad, K: tl.constexpr, MASKED: tl.constexpr, ASM: tl.constexpr):
    """Load the four inputs of each of these quads, of all rows: 4 x [quads, rows]."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    if tl.float32 == DTYPE:
        x_0 = _load_input_columns(x, rows, valid, 4 * quad, K, MASKED)
        x_1 = _load_input_columns(x, rows, valid, 4 * quad + 1, K, MASKED)
        x_2 = _load_input_columns(x, rows, valid, 4 * quad + 2, K, MASKED)
        x_3 = _load_input_columns(x, rows, valid, 4 * quad + 3, K, MASKED)
    else:  # words of four inputs: neighbours are copied together
        words = _load_input_columns(x.to(tl.pointer_type(tl.int64)), rows // 4, valid, quad, K // 4, MASKED)
        if ASM:
            x_0, x_1, x_2, x_3 = tl.inline_asm_elementwise(
                _UNZIP_QUADS, "=&r,=&r,=&r,=&r,l,l", [words], dtype=(tl.int16, tl.int16, tl.int16, tl.int16),
                is_pure=True, pack=2,
            )  # fmt: skip
            x_0, x_1 = x_0.to(DTYPE, bitcast=True), x_1.to(DTYPE, bitcast=True)
            x_2, x_3 = x_2.to(DTYPE, bitcast=True), x_3.to(DTYPE, bitcast=True)
        else:
            x_0, x_1 = _half(words, False, DTYPE), _half(words, True, DTYPE)
            x_2, x_3 = _half(words >> 32, False, DTYPE), _half(words >> 32, True, DTYPE)
    return x_0, x_1, x_2, x_3


@triton.jit
def _multiply_codes(
    x, rows, valid, weights, scales, zeros, n, first,
    KIND: tl.constexpr, K: tl.constexpr, SIZE: tl.constexpr, MASKED: tl.constexpr, GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr, ASYMMETRIC: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, FOLDED: tl.constexpr, ASM: tl.constexpr, FP8: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Multiply 4-bit weights with rows of `x`; FOLDED: with the factor of `_nibbles` in scales.

    Also return the bits that any code of a scale has, if FOLDED for `mxfp4`. STAGES: of the loop; None: of the launch.
    """
    # -> [BLOCK_N, ROWS] float32, [BLOCK_N, groups] int32
    DTYPE: tl.constexpr = x.dtype.element_ty
    GROUPS: tl.constexpr = 1 if GROUP == 0 or GROUP >= BLOCK_K else BLOCK_K // GROUP
    columns, seen = tl.zeros((BLOCK_N, ROWS), tl.float32), tl.zeros((BLOCK_N, GROUPS), tl.int32)
    code = _load_scale(scales, n, first, True, K, GROUP, GROUP_ROWS, GROUPS, MASKED, False)
    scale = _decode_scale(code, zeros, n, KIND, FOLDED, DTYPE, ASM, FP8)
    for step in tl.range(0, SIZE, BLOCK_K, num_stages=STAGES):
        start = first + step
        if FOLDED and KIND == "mxfp4":
            seen |= code.to(tl.int32)
        # Triton copies scales to shared memory ahead only if rows of them have multiples of four bytes. So those of the
        # next step are loaded to registers here, and used after the products.
        code = _load_scale(
            scales, n, start + BLOCK_K, step + BLOCK_K < SIZE, K, GROUP, GROUP_ROWS, GROUPS, MASKED, True
        )
        zero = _load_zero(zeros, n, start, K, GROUP, GROUPS) if ASYMMETRIC else scale
        quad = start // 4 + tl.arange(0, BLOCK_K // 4)
        x_0, x_1, x_2, x_3 = _load_input_quads(x, rows, valid, quad, K, MASKED, ASM)
        codes = _load_codes(weights, n, start, K, BLOCK_K, MASKED)
        w_0, w_1, w_2, w_3 = _dequantize_codes(
            codes, scale, zero, KIND, ASYMMETRIC, BLOCK_N, GROUPS, BLOCK_K // 4 // GROUPS, FOLDED, DTYPE, ASM
        )
        columns = tl.dot(w_0, x_0, columns, input_precision="ieee")
        columns = tl.dot(w_1, x_1, columns, input_precision="ieee")
        columns = tl.dot(w_2, x_2, columns, input_precision="ieee")
        columns = tl.dot(w_3, x_3, columns, input_precision="ieee")
        scale = _decode_scale(code, zeros, n, KIND, FOLDED, DTYPE, ASM, FP8)
    return columns, seen


@triton.jit
def _multiply_planes(
    total, x, rows, valid, start, word, PLANE: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """Add the products of the two planes of 16 inputs that a word holds."""
    k = start + PLANE * 16 + tl.arange(0, 16)
    inputs = _load_inputs(x, rows, valid, k, K, False)
    total = tl.dot(inputs, _half(word, False, tl.bfloat16).to(inputs.dtype), total, input_precision="ieee")
    inputs = _load_inputs(x, rows, valid, k + 16, K, False)
    return tl.dot(inputs, _half(word, True, tl.bfloat16).to(inputs.dtype), total, input_precision="ieee")


@triton.jit
def multiply(
    x, rows, valid, weights, scales, zeros, raw, n, first,
    KIND: tl.constexpr, K: tl.constexpr, SIZE: tl.constexpr, MASKED: tl.constexpr, GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr, ASYMMETRIC: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, ASM: tl.constexpr, FP8: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Multiply rows of `x` with the weights of outputs `n`, over SIZE inputs from `first` on."""
    # rows: [ROWS] offsets of rows in x, valid: [ROWS], n: [BLOCK_N] -> [ROWS, BLOCK_N] float32
    DTYPE: tl.constexpr = x.dtype.element_ty
    if KIND == "dense":
        total = tl.zeros((ROWS, BLOCK_N), tl.float32)
        for step in range(0, SIZE, BLOCK_K):
            k = first + step + tl.arange(0, BLOCK_K)
            ptrs = weights + n[None, :] * K + k[:, None]
            tile = tl.load(ptrs, mask=(k < K)[:, None], other=0.0) if MASKED else tl.load(ptrs)
            inputs = _load_inputs(x, rows, valid, k, K, MASKED)
            total = tl.dot(inputs, tile.to(DTYPE), total, input_precision="ieee")
    elif KIND == "bf16-packed":
        total, exponent = tl.zeros((ROWS, BLOCK_N), tl.float32), _load_exponent(zeros, n)
        KB: tl.constexpr = K // BLOCK_K  # whole blocks; a matrix with further inputs is not split
        for step in range(0, min(SIZE, KB * BLOCK_K), BLOCK_K):
            start = first + step
            word_0, word_1, word_2, word_3 = _load_pairs(weights, scales, exponent, raw, n, start // BLOCK_K, KB, ASM)
            total = _multiply_planes(total, x, rows, valid, start, word_0, 0, K)
            total = _multiply_planes(total, x, rows, valid, start, word_1, 2, K)
            total = _multiply_planes(total, x, rows, valid, start, word_2, 4, K)
            total = _multiply_planes(total, x, rows, valid, start, word_3, 6, K)
        if K % BLOCK_K != 0:
            inputs = _load_inputs(x, rows, valid, KB * BLOCK_K + tl.arange(0, BLOCK_K), K, True)
            tile = _load_tail(weights, n, K, TAIL, BLOCK_K, inputs.dtype)
            total = tl.dot(inputs, tile, total, input_precision="ieee")
    elif KIND == "int4" or KIND == "mxfp4" or KIND == "nvfp4":  # weights first: eight rows are enough for a product
        # e2m1 weights are cheaper if a factor is part of their scales. It is, unless scales are found to be so large
        # that the factor overflows, which no real model has; then the tile is computed again.
        FOLDED: tl.constexpr = KIND != "int4" and ASM and tl.float32 != DTYPE
        columns, seen = _multiply_codes(
            x, rows, valid, weights, scales, zeros, n, first, KIND, K, SIZE, MASKED, GROUP, GROUP_ROWS, ASYMMETRIC,
            ROWS, BLOCK_N, BLOCK_K, FOLDED, ASM, FP8, None,
        )  # fmt: skip
        if FOLDED:
            # scales of 2 and more; one of nvfp4 is at most 448 times its global scale
            is_large = tl.max(seen) >= 128 if KIND == "mxfp4" else tl.max(tl.abs(tl.load(zeros + n))) >= 0.00390625
            if is_large:
                columns, seen = _multiply_codes(
                    x, rows, valid, weights, scales, zeros, n, first, KIND, K, SIZE, MASKED, GROUP, GROUP_ROWS,
                    ASYMMETRIC, ROWS, BLOCK_N, BLOCK_K, False, ASM, FP8, 1,
                )  # fmt: skip
        total = tl.trans(columns)
    else:
        columns = tl.zeros((BLOCK_N, ROWS), tl.float32)
        for step in range(0, SIZE, BLOCK_K):
            start = first + step
            inputs = _load_input_columns(x, rows, valid, start + tl.arange(0, BLOCK_K), K, MASKED)
            tile = _load_tile(
                weights, scales, zeros, n, start, KIND, K, GROUP, GROUP_ROWS, BLOCK_N, BLOCK_K, MASKED, DTYPE, ASM, FP8,
            )  # fmt: skip
            columns = tl.dot(tile, inputs, columns, input_precision="ieee")
        total = tl.trans(columns)
    return total


@triton.jit
def _store_planes(out, word, n, start, PLANE: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    k = start + PLANE * 16 + tl.arange(0, 16)[:, None]
    ptrs, inside = out + n[None, :] * K + k, n[None, :] < N
    tl.store(ptrs, _half(word, False, tl.bfloat16).to(out.dtype.element_ty), mask=inside & (k < K))
    tl.store(ptrs + 16, _half(word, True, tl.bfloat16).to(out.dtype.element_ty), mask=inside & (k + 16 < K))


@triton.jit(do_not_specialize=["slot"])
def _dequantize_kernel(
    weights, scales, zeros, raw, out, slot,
    N: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr,
    ASYMMETRIC: tl.constexpr, ASM: tl.constexpr, FP8: tl.constexpr, W_BLOB: tl.constexpr, W_OFFSET: tl.constexpr,
    S_BLOB: tl.constexpr, S_OFFSET: tl.constexpr, Z_BLOB: tl.constexpr, Z_OFFSET: tl.constexpr, R_BLOB: tl.constexpr,
    R_OFFSET: tl.constexpr, TAIL: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    start, inside = tl.program_id(1) * BLOCK_K, tl.minimum(n, N - 1)
    slot = slot.to(tl.int64)
    weights, scales = weights + (slot * W_BLOB + W_OFFSET), scales + (slot * S_BLOB + S_OFFSET)
    zeros, raw = zeros + (slot * Z_BLOB + Z_OFFSET), raw + (slot * R_BLOB + R_OFFSET)
    k = start + tl.arange(0, BLOCK_K)
    ptrs, mask = out + n[:, None] * K + k[None, :], (n < N)[:, None] & (k < K)[None, :]
    DTYPE: tl.constexpr = out.dtype.element_ty
    if KIND == "bf16-packed" and K % BLOCK_K != 0 and tl.program_id(1) == K // BLOCK_K:
        tl.store(ptrs, tl.trans(_load_tail(weights, inside, K, TAIL, BLOCK_K, DTYPE)), mask=mask)
    elif KIND == "bf16-packed":
        KB: tl.constexpr = K // BLOCK_K
        exponent = _load_exponent(zeros, inside)
        word_0, word_1, word_2, word_3 = _load_pairs(
            weights, scales, exponent, raw, inside, tl.program_id(1), KB, ASM
        )  # fmt: skip
        _store_planes(out, word_0, n, start, 0, N, K)
        _store_planes(out, word_1, n, start, 2, N, K)
        _store_planes(out, word_2, n, start, 4, N, K)
        _store_planes(out, word_3, n, start, 6, N, K)
    elif KIND == "int4" or KIND == "mxfp4" or KIND == "nvfp4":
        MASKED: tl.constexpr = K % BLOCK_K != 0
        GROUPS: tl.constexpr = 1 if GROUP == 0 or GROUP >= BLOCK_K else BLOCK_K // GROUP
        codes = _load_codes(weights, inside, start, K, BLOCK_K, MASKED)
        scale = _load_scale(scales, inside, start, True, K, GROUP, GROUP_ROWS, GROUPS, MASKED, False)
        scale = _decode_scale(scale, zeros, inside, KIND, False, DTYPE, ASM, FP8)
        zero = _load_zero(zeros, inside, start, K, GROUP, GROUPS) if ASYMMETRIC else scale
        w_0, w_1, w_2, w_3 = _dequantize_codes(
            codes, scale, zero, KIND, ASYMMETRIC, BLOCK_N, GROUPS, BLOCK_K // 4 // GROUPS, False, DTYPE, ASM
        )
        tl.store(ptrs, tl.interleave(tl.interleave(w_0, w_2), tl.interleave(w_1, w_3)), mask=mask)
    else:
        tile = _load_tile(
            weights, scales, zeros, inside, start, KIND, K, GROUP, GROUP_ROWS, BLOCK_N, BLOCK_K, K % BLOCK_K != 0,
            DTYPE, ASM, FP8,
        )  # fmt: skip
        tl.store(ptrs, tile, mask=mask)
