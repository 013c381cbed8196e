"""Eight-bit integers with a scale per output channel or per group of inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from spmoe.formats.base import (
    OPERATOR_ROWS,
    KernelWeights,
    Parts,
    WeightFormat,
    by_group,
    group_count,
    grouped,
    positive_scale,
    scale_suffix,
    split_scale_suffix,
    spread,
)
from spmoe.formats.layout import Part, dtype_name
from spmoe.registry import WEIGHT_FORMATS

NAMES = ("int8-channel", "int8-g32", "int8-g64", "int8-g128")

_LARGEST = 127
_OPERATOR_INPUTS = 16  # must divide the inputs: with others, PyTorch's operator reads behind them


@WEIGHT_FORMATS.register(*NAMES)
@dataclass(frozen=True)
class Int8(WeightFormat):
    """`weight` int8 [out, in] and `scale` [out, in / group], or [out, 1]; value: weight * scale in float32."""

    group: int  # 0: all inputs of an output
    scale_dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        return f"int8-{f'g{self.group}' if self.group else 'channel'}{scale_suffix(self.scale_dtype)}"

    @classmethod
    def from_name(cls, name: str) -> Self:
        stem, scale_dtype = split_scale_suffix(name.removeprefix("int8-"))
        return cls(0 if stem == "channel" else int(stem.removeprefix("g")), scale_dtype)

    @property
    def kernel(self) -> KernelWeights:
        return KernelWeights("int8", 1, self.group, scale_dtype=dtype_name(self.scale_dtype))

    def parts(self, outs: int, ins: int) -> dict[str, Part]:
        groups = group_count(ins, self.group or ins)
        return {"weight": Part(torch.int8, (outs, ins)), "scale": Part(self.scale_dtype, (outs, groups))}

    def quantize(self, weight: Tensor) -> Parts:
        ins = weight.shape[1]
        group = self.group or ins
        scale = positive_scale(grouped(weight, group).abs().amax(dim=-1), _LARGEST, self.scale_dtype)
        codes = (weight.float() / spread(scale.float(), group, ins)).round().clamp(-_LARGEST, _LARGEST)
        return {"weight": codes.to(torch.int8), "scale": scale}

    def dequantize(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        weight = parts["weight"].float()
        codes, scale = by_group(weight, parts["scale"].float(), self.group or weight.shape[1])
        codes *= scale
        return weight.to(dtype)

    def has_operator(self, x: Tensor) -> bool:
        dtypes = x.dtype == self.scale_dtype == torch.bfloat16
        sizes = len(x) <= OPERATOR_ROWS and x.shape[-1] % _OPERATOR_INPUTS == 0
        return x.is_cpu and dtypes and sizes and self.group == 0

    def linear(self, parts: Mapping[str, Tensor], x: Tensor) -> Tensor:
        found: Tensor = torch.ops.aten._weight_int8pack_mm(x.contiguous(), parts["weight"], parts["scale"].view(-1))
        return found

    def check(self, parts: Mapping[str, Tensor], outs: int, ins: int) -> None:
        super().check(parts, outs, ins)
        if not bool(torch.isfinite(parts["scale"]).all()):
            raise ValueError(f"a scale of {self.name} is not a finite number")
