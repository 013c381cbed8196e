"""Four-bit integers in groups of inputs, symmetric or with a zero point per group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Self

import torch
from torch import Tensor

from spmoe.formats.base import (
    KernelWeights,
    Parts,
    WeightFormat,
    by_group,
    divide,
    group_count,
    grouped,
    nibble_columns,
    pack_nibbles,
    positive_scale,
    scale_suffix,
    split_scale_suffix,
    spread,
    unpack_nibbles,
)
from spmoe.formats.layout import Part, dtype_name
from spmoe.registry import WEIGHT_FORMATS

NAMES = ("int4-g32", "int4-g64", "int4-g128", "int4-asym-g32", "int4-asym-g64", "int4-asym-g128")

_MIDDLE = 8  # the zero point of symmetric codes
_LARGEST_CODE = 15
_OPERATOR_GROUPS = (32, 64, 128)
_OPERATOR_OUTPUTS = 16  # must divide the outputs of a matrix
_REPACKED_ROWS = 256  # repacked at a time; a multiple of the operator's blocks of 16, 32 or 64 outputs
_OPERATOR_ERROR = 0.01  # most that results may differ by, relative to the largest; rounding to bfloat16 is 0.002


@WEIGHT_FORMATS.register(*NAMES)
@dataclass(frozen=True)
class Int4(WeightFormat):
    """`codes` uint8 [out, in / 2], `scale` [out, in / group] and, if asymmetric, `zero` uint8 [out, in / group].

    Value: (code - zero) * scale in float32, where zero is 8 for symmetric codes. The last group of a row may be short.
    """

    group: int
    asymmetric: bool = False
    scale_dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        return f"int4{'-asym' * self.asymmetric}-g{self.group}{scale_suffix(self.scale_dtype)}"

    @classmethod
    def from_name(cls, name: str) -> Self:
        stem, scale_dtype = split_scale_suffix(name)
        return cls(int(stem.rpartition("-g")[2]), "-asym-" in stem, scale_dtype)

    @property
    def kernel(self) -> KernelWeights:
        return KernelWeights("int4", 1, self.group, self.asymmetric, dtype_name(self.scale_dtype))

    def parts(self, outs: int, ins: int) -> dict[str, Part]:
        groups = (outs, group_count(ins, self.group))
        parts = {"codes": Part(torch.uint8, (outs, nibble_columns(ins))), "scale": Part(self.scale_dtype, groups)}
        return {**parts, "zero": Part(torch.uint8, groups)} if self.asymmetric else parts

    def quantize(self, weight: Tensor) -> Parts:
        groups, ins = grouped(weight, self.group), weight.shape[1]
        if self.asymmetric:
            low, high = groups.amin(dim=-1).clamp(max=0), groups.amax(dim=-1).clamp(min=0)
            scale = positive_scale(divide(high, _LARGEST_CODE) - divide(low, _LARGEST_CODE), 1, self.scale_dtype)
            zero = (-low / scale.float()).round().clamp(0, _LARGEST_CODE)
            spread_zero: Tensor | int = spread(zero, self.group, ins)
        else:
            scale = positive_scale(groups.abs().amax(dim=-1), _MIDDLE - 1, self.scale_dtype)
            zero, spread_zero = None, _MIDDLE
        codes = (weight.float() / spread(scale.float(), self.group, ins)).round() + spread_zero
        parts = {"codes": pack_nibbles(codes.clamp(0, _LARGEST_CODE).to(torch.uint8)), "scale": scale}
        return parts if zero is None else {**parts, "zero": zero.to(torch.uint8)}

    def dequantize(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        weight = unpack_nibbles(parts["codes"], torch.arange(16.0, device=parts["codes"].device))
        if self.asymmetric:
            codes, zero = by_group(weight, parts["zero"].float(), self.group)
            codes -= zero
        else:
            weight -= _MIDDLE
        codes, scale = by_group(weight, parts["scale"].float(), self.group)
        codes *= scale
        return weight.to(dtype)

    def repacked_parts(self, outs: int, ins: int, dtype: torch.dtype) -> dict[str, Part] | None:
        # in float32 and float16 the operator is not vectorized, and slower than a dense product
        divisible = self.group in _OPERATOR_GROUPS and not ins % self.group and not outs % _OPERATOR_OUTPUTS
        if dtype != torch.bfloat16 or not divisible or not _operator_works(self):
            return None
        return {
            "codes": Part(torch.uint8, (outs, ins // 2)),
            "scale_and_zero": Part(dtype, (ins // self.group, outs, 2)),
        }

    def repack(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Parts:
        codes, scale = torch.empty_like(parts["codes"]), parts["scale"].float()
        values = torch.arange(16, dtype=torch.int32)
        for at in range(0, len(codes), _REPACKED_ROWS):
            wide = unpack_nibbles(parts["codes"][at : at + _REPACKED_ROWS], values)
            codes[at : at + _REPACKED_ROWS] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(wide, 1)
        # the operator computes (code - 8) * scale + zero
        zero = (_MIDDLE - parts["zero"].float()) * scale if self.asymmetric else torch.zeros_like(scale)
        return {"codes": codes, "scale_and_zero": torch.stack((scale.T, zero.T), dim=-1).to(dtype).contiguous()}

    def repacked_linear(self, repacked: Mapping[str, Tensor], x: Tensor) -> Tensor:
        codes, scale_and_zero = repacked["codes"], repacked["scale_and_zero"]
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        found: Tensor = multiply(x.contiguous(), codes, self.group, scale_and_zero)
        return found

    def check(self, parts: Mapping[str, Tensor], outs: int, ins: int) -> None:
        super().check(parts, outs, ins)
        if not bool(torch.isfinite(parts["scale"]).all()):
            raise ValueError(f"a scale of {self.name} is not a finite number")
        if self.asymmetric and bool((parts["zero"] > _LARGEST_CODE).any()):
            raise ValueError(f"a zero point of {self.name} is above {_LARGEST_CODE}")


@cache
def _operator_works(format: Int4) -> bool:
    """Return whether this PyTorch has the CPU operator for 4-bit weights, and it agrees with `dequantize`."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(80, 2 * format.group, generator=generator)  # 80 outputs: a whole block and a smaller one
    x = torch.randn(3, weight.shape[1], generator=generator).bfloat16()
    parts = format.quantize(weight)
    expected = x.float() @ format.dequantize(parts, torch.float32).T
    try:
        found = format.repacked_linear(format.repack(parts, torch.bfloat16), x).float()
    except (AttributeError, RuntimeError):  # no such operator; not for this processor
        return False
    return bool(((found - expected).abs() <= _OPERATOR_ERROR * expected.abs().max()).all())
