"""Four-bit integers in groups of inputs, symmetric or with a zero point per group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from spmoe.formats.base import (
    KernelWeights,
    Parts,
    WeightFormat,
    by_group,
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
            scale = positive_scale(high / _LARGEST_CODE - low / _LARGEST_CODE, 1, self.scale_dtype)
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

    def check(self, parts: Mapping[str, Tensor], outs: int, ins: int) -> None:
        super().check(parts, outs, ins)
        if not bool(torch.isfinite(parts["scale"]).all()):
            raise ValueError(f"a scale of {self.name} is not a finite number")
        if self.asymmetric and bool((parts["zero"] > _LARGEST_CODE + 1).any()):  # 16 occurs: gptq stores zero - 1
            raise ValueError(f"a zero point of {self.name} is above 16")
