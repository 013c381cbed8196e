"""Products with expert weights that stay packed in their slots, and their dequantization to dense matrices.

`multiply` loads a tile of weights, dequantizes it in registers to the inputs' dtype and multiplies it. Each weight is
exactly that of `WeightFormat.dequantize`. The order of sums depends on shapes alone; that of `bf16-packed` is the order
of dense weights, so both give equal bits.

A kernel gets up to four parts of a matrix, as typed views of the same slots:

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
    offsets, dtypes = dict(matrix.offsets), _part_dtypes(weights)
    parts = [_part(slots, offsets[part], dtypes[part]) for part in _PARTS[weights.kind] if part in offsets]
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
    codes = {"codes": torch.uint8, "zero": torch.uint8}
    return {**codes, "weight": weight, "scale": scale, "global_scale": torch.float32}


@cache
def _has_fp8() -> bool:
    """Return whether the device converts e4m3 itself."""
    if triton.knobs.runtime.interpret:
        return False
    target = triton.runtime.driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= 89)


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
def _nibbles(codes, KIND: tl.constexpr):
    """Return the values of the low and of the high nibbles in float32: from 0 to 15, or e2m1."""
    bits = codes.to(tl.int32) & 0xFF
    if KIND == "int4":
        low = ((bits & 0x0F) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
        high = ((bits & 0xF0) | 0x4B000000).to(tl.float32, bitcast=True) * 0.0625 - 524288.0
    else:  # sign, exponent and mantissa move to their places in a float32, whose bias is 126 larger
        low = (((bits << 28) >> 6) & -0x7E400000).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
        high = (((bits << 24) >> 6) & -0x7E400000).to(tl.float32, bitcast=True) * 8.507059173023462e37
    return low, high


def _int4_assembly(magic: str) -> str:
    """Return code that writes the nibbles of four bytes ($4) to the mantissas of 16-bit numbers: low ones to $0, $1."""
    lines = ["{ .reg .b32 t, u;"]
    for number, two_bytes in enumerate(("0x4140", "0x4342")):  # bytes become the lower bytes of halves
        lines += [
            f"prmt.b32 t, $4, 0, {two_bytes}; shr.u32 u, t, 4;",
            f"lop3.b32 ${number}, t, 0x000F000F, {magic}, 0xEA; lop3.b32 ${number + 2}, u, 0x000F000F, {magic}, 0xEA;",
        ]  # 0xEA: (a & b) | c
    return " ".join([*lines, "}"])


def _e2m1_assembly(fraction: int) -> str:
    """Return code that moves the e2m1 nibbles of four bytes ($4) to the fields of 16-bit numbers: low ones to $0, $1.

    `fraction`: bits of the numbers' mantissas.
    """
    mask = f"0x{0x00010001 * (7 << (fraction - 1)):08X}"
    lines = ["{ .reg .b32 t, u, v;"]
    for number, two_bytes in enumerate(("0x1404", "0x3424")):  # bytes become the higher bytes of halves
        lines += [
            f"prmt.b32 t, $4, 0, {two_bytes};",
            f"shl.b32 u, t, 4; and.b32 u, u, 0x80008000; {_shift_right('t', 9 - fraction)}",
            f"lop3.b32 ${number}, v, {mask}, u, 0xEA;",
            f"and.b32 u, t, 0x80008000; {_shift_right('t', 13 - fraction)}",
            f"lop3.b32 ${number + 2}, v, {mask}, u, 0xEA;",
        ]
    return " ".join([*lines, "}"])


def _shift_right(register: str, bits: int) -> str:
    return f"shr.u32 v, {register}, {bits};" if bits >= 0 else f"shl.b32 v, {register}, {-bits};"


_INT4_BFLOAT16 = tl.constexpr(_int4_assembly("0x43004300"))  # 128 + code
_INT4_FLOAT16 = tl.constexpr(_int4_assembly("0x64006400"))  # 1024 + code
_E2M1_BFLOAT16 = tl.constexpr(_e2m1_assembly(7))  # value / 2^126
_E2M1_FLOAT16 = tl.constexpr(_e2m1_assembly(10))  # value / 2^14


@triton.jit
def _nibbles_16(codes, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Compute `_nibbles` in a 16-bit dtype, two nibbles per instruction; `int4` codes get an offset of 128 or 1024."""
    if tl.bfloat16 == DTYPE:
        TEXT: tl.constexpr = _INT4_BFLOAT16 if KIND == "int4" else _E2M1_BFLOAT16
        low, high = tl.inline_asm_elementwise(
            TEXT, "=r,=r,=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
        if KIND != "int4":
            low, high = low * 8.507059173023462e37, high * 8.507059173023462e37  # 2^126
    else:
        CODE: tl.constexpr = _INT4_FLOAT16 if KIND == "int4" else _E2M1_FLOAT16
        low, high = tl.inline_asm_elementwise(
            CODE, "=r,=r,=r,=r,r", [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
        if KIND != "int4":
            low, high = low * 16384.0, high * 16384.0  # 2^14
    return low, high


@triton.jit
def _dequantize_nibbles(
    codes, scale, zero, KIND: tl.constexpr, ASYMMETRIC: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr
):
    """Return the weights of the low and of the high nibbles.

    `scale` is float32, or already of DTYPE if a product in DTYPE is rounded as one in float32 would be.
    """
    if ASM and tl.float32 != DTYPE:
        low, high = _nibbles_16(codes, KIND, DTYPE)
        OFFSET: tl.constexpr = 128.0 if tl.bfloat16 == DTYPE else 1024.0
        if KIND == "int4":  # small integers: exact in 16 bits
            if ASYMMETRIC:
                offset = (zero + OFFSET).to(DTYPE)
                low, high = low - offset, high - offset
            else:
                low, high = low - (OFFSET + 8.0), high - (OFFSET + 8.0)
        if scale.dtype == DTYPE:
            low, high = low * scale, high * scale
        else:
            low, high = (low.to(tl.float32) * scale).to(DTYPE), (high.to(tl.float32) * scale).to(DTYPE)
    else:
        low, high = _nibbles(codes, KIND)
        if KIND == "int4":
            if ASYMMETRIC:
                low, high = low - zero, high - zero
            else:
                low, high = low - 8.0, high - 8.0
        low, high = (low * scale).to(DTYPE), (high * scale).to(DTYPE)
    return low, high


# ---- tiles of weights


@triton.jit
def _load_scale(
    scales, zeros, n, g, start, KIND: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr,
    GROUPS: tl.constexpr, MASKED: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    """Load the scales of outputs `n` and of the groups from input `start` on: [outputs, groups]."""
    COLUMNS: tl.constexpr = (K + GROUP - 1) // GROUP if GROUP else 1
    offsets = (n // GROUP_ROWS)[:, None] * COLUMNS + g[None, :]
    if GROUP:
        offsets += start // GROUP
    if MASKED and GROUP:  # also a tile of one group: all of its inputs may lie after the last one
        scale = tl.load(scales + offsets, mask=(start + g * GROUP < K)[None, :], other=0)
    else:
        scale = tl.load(scales + offsets)
    # in 16 bits where products are rounded as in float32: those with powers of two in bfloat16, and those of int4 codes
    # with scales of the same dtype, since 4 and 8 or 11 bits make exact products in float32
    if KIND == "mxfp4":
        scale = _e8m0(scale, DTYPE if ASM else tl.float32)
    elif KIND == "nvfp4":
        scale = _e4m3(scale, FP8) * tl.load(zeros + n)[:, None]
    elif not (KIND == "int4" and scale.dtype == DTYPE and ASM):
        scale = scale.to(tl.float32)
    return scale


@triton.jit
def _load_tile(
    weights, scales, zeros, n, start, KIND: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr, ASYMMETRIC: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    MASKED: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Load the weights of outputs `n` and BLOCK_K inputs from `start` on; MASKED: K may end before."""
    # -> [BLOCK_K, BLOCK_N]
    if KIND == "dense":
        k = start + tl.arange(0, BLOCK_K)
        ptrs = weights + n[None, :] * K + k[:, None]
        tile = (tl.load(ptrs, mask=(k < K)[:, None], other=0.0) if MASKED else tl.load(ptrs)).to(DTYPE)
    else:
        SHARED: tl.constexpr = GROUP == 0 or GROUP >= BLOCK_K  # a tile has one scale per output
        GROUPS: tl.constexpr = 1 if SHARED else BLOCK_K // GROUP
        PER_BYTE: tl.constexpr = 2 if KIND == "int4" or KIND == "mxfp4" or KIND == "nvfp4" else 1
        SIZE: tl.constexpr = BLOCK_K // GROUPS // PER_BYTE  # bytes of a group in the tile
        g, j = tl.arange(0, GROUPS), tl.arange(0, SIZE)
        byte = (start // PER_BYTE) + g[:, None] * SIZE + j[None, :]
        ptrs = weights + (n * (K // PER_BYTE))[:, None, None] + byte[None, :, :]  # [BLOCK_N, GROUPS, SIZE]
        codes = tl.load(ptrs, mask=(byte < K // PER_BYTE)[None, :, :], other=0) if MASKED else tl.load(ptrs)
        scale = _load_scale(scales, zeros, n, g, start, KIND, K, GROUP, GROUP_ROWS, GROUPS, MASKED, DTYPE, ASM, FP8)
        scale = scale[:, :, None]
        if KIND == "fp8":
            tile = (_e4m3(codes, FP8) * scale).to(DTYPE)
        elif KIND == "int8":
            tile = (codes.to(tl.float32) * scale).to(DTYPE)
        else:
            zero = scale
            if ASYMMETRIC:
                COLUMNS: tl.constexpr = (K + GROUP - 1) // GROUP if GROUP else 1
                column = g + (start // GROUP if GROUP else 0)
                zero_ptrs = zeros + n[:, None] * COLUMNS + column[None, :]
                zero = tl.load(zero_ptrs, mask=(column < COLUMNS)[None, :], other=0).to(tl.float32)[:, :, None]
            low, high = _dequantize_nibbles(codes, scale, zero, KIND, ASYMMETRIC, DTYPE, ASM)
            tile = tl.interleave(low, high)
        tile = tl.trans(tl.reshape(tile, (BLOCK_N, BLOCK_K)))
    return tile


@triton.jit
def _load_pairs(low, codes, base, raw, n, block, KB: tl.constexpr):
    """Load one block of bf16-packed weights of outputs `n`: four words, each with the bits of two weights."""
    # -> 4 x [16, outputs] int32; the halves of word i belong to planes 2 * i and 2 * i + 1 of the block
    j = tl.arange(0, 16)[:, None]
    first = (n * KB)[None, :] + block
    low_0 = tl.load(low + first * 32 + j)
    low_1 = tl.load(low + first * 32 + 16 + j)
    code = tl.load(codes + first * 16 + j)
    exponent = tl.load(base + n)[None, :] * 0x00800080
    is_raw = code == -1
    raws = raw + low_0 * 4
    word_0 = tl.where(is_raw, tl.load(raws, mask=is_raw, other=0), _bf16_pair(low_0, code, exponent))
    word_1 = tl.where(is_raw, tl.load(raws + 1, mask=is_raw, other=0), _bf16_pair(low_0 >> 8, code >> 4, exponent))
    word_2 = tl.where(is_raw, tl.load(raws + 2, mask=is_raw, other=0), _bf16_pair(low_1, code >> 8, exponent))
    word_3 = tl.where(is_raw, tl.load(raws + 3, mask=is_raw, other=0), _bf16_pair(low_1 >> 8, code >> 12, exponent))
    return word_0, word_1, word_2, word_3


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
    """Return the lower or the higher half of words as weights."""
    bits = (word >> 16) if HIGH else word
    return (bits & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True).to(DTYPE)


@triton.jit
def _load_inputs(x, rows, valid, k, K: tl.constexpr, MASKED: tl.constexpr):
    """Load inputs `k` of all rows, zero for rows that are not valid: [rows, inputs]."""
    mask = valid[:, None]
    if MASKED:
        mask = mask & (k < K)[None, :]
    return tl.load(x + rows[:, None] + k[None, :], mask=mask, other=0.0)


@triton.jit
def _multiply_planes(
    total, x, rows, valid, start, word, PLANE: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """Add the products of the two planes of 16 inputs that a word holds."""
    k = start + PLANE * 16 + tl.arange(0, 16)
    inputs = _load_inputs(x, rows, valid, k, K, False)
    total = tl.dot(inputs, _half(word, False, inputs.dtype), total, input_precision="ieee")
    inputs = _load_inputs(x, rows, valid, k + 16, K, False)
    return tl.dot(inputs, _half(word, True, inputs.dtype), total, input_precision="ieee")


@triton.jit
def multiply(
    x, rows, valid, weights, scales, zeros, raw, n, first,
    KIND: tl.constexpr, K: tl.constexpr, SIZE: tl.constexpr, MASKED: tl.constexpr, GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr, ASYMMETRIC: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, ASM: tl.constexpr, FP8: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Multiply rows of `x` with the weights of outputs `n`, over SIZE inputs from `first` on."""
    # rows: [ROWS] offsets of rows in x, valid: [ROWS], n: [BLOCK_N] -> [ROWS, BLOCK_N] float32
    total = tl.zeros((ROWS, BLOCK_N), tl.float32)
    # bf16-packed: whole blocks; a matrix with further inputs is not split
    END: tl.constexpr = min(SIZE, K // BLOCK_K * BLOCK_K) if KIND == "bf16-packed" else SIZE
    for step in range(0, END, BLOCK_K):
        start = first + step
        if KIND == "bf16-packed":
            KB: tl.constexpr = K // BLOCK_K
            word_0, word_1, word_2, word_3 = _load_pairs(weights, scales, zeros, raw, n, start // BLOCK_K, KB)
            total = _multiply_planes(total, x, rows, valid, start, word_0, 0, K)
            total = _multiply_planes(total, x, rows, valid, start, word_1, 2, K)
            total = _multiply_planes(total, x, rows, valid, start, word_2, 4, K)
            total = _multiply_planes(total, x, rows, valid, start, word_3, 6, K)
        else:
            inputs = _load_inputs(x, rows, valid, start + tl.arange(0, BLOCK_K), K, MASKED)
            tile = _load_tile(
                weights, scales, zeros, n, start, KIND, K, GROUP, GROUP_ROWS, ASYMMETRIC, BLOCK_N, BLOCK_K, MASKED,
                inputs.dtype, ASM, FP8,
            )  # fmt: skip
            total = tl.dot(inputs, tile, total, input_precision="ieee")
    if KIND == "bf16-packed" and K % BLOCK_K != 0:
        inputs = _load_inputs(x, rows, valid, K // BLOCK_K * BLOCK_K + tl.arange(0, BLOCK_K), K, True)
        tile = _load_tail(weights, n, K, TAIL, BLOCK_K, inputs.dtype)
        total = tl.dot(inputs, tile, total, input_precision="ieee")
    return total


@triton.jit
def _store_planes(out, word, n, start, PLANE: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    k = start + PLANE * 16 + tl.arange(0, 16)[:, None]
    ptrs, inside = out + n[None, :] * K + k, n[None, :] < N
    tl.store(ptrs, _half(word, False, out.dtype.element_ty), mask=inside & (k < K))
    tl.store(ptrs + 16, _half(word, True, out.dtype.element_ty), mask=inside & (k + 16 < K))


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
    ptrs, mask = out + n[None, :] * K + k[:, None], (n < N)[None, :] & (k < K)[:, None]
    if KIND == "bf16-packed" and K % BLOCK_K != 0 and tl.program_id(1) == K // BLOCK_K:
        tl.store(ptrs, _load_tail(weights, inside, K, TAIL, BLOCK_K, out.dtype.element_ty), mask=mask)
    elif KIND == "bf16-packed":
        KB: tl.constexpr = K // BLOCK_K
        word_0, word_1, word_2, word_3 = _load_pairs(weights, scales, zeros, raw, inside, tl.program_id(1), KB)
        _store_planes(out, word_0, n, start, 0, N, K)
        _store_planes(out, word_1, n, start, 2, N, K)
        _store_planes(out, word_2, n, start, 4, N, K)
        _store_planes(out, word_3, n, start, 6, N, K)
    else:
        tile = _load_tile(
            weights, scales, zeros, inside, start, KIND, K, GROUP, GROUP_ROWS, ASYMMETRIC, BLOCK_N, BLOCK_K,
            K % BLOCK_K != 0, out.dtype.element_ty, ASM, FP8,
        )  # fmt: skip
        tl.store(ptrs, tile, mask=mask)
