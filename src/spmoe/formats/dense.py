"""Dense weights in 32 or 16 bits, as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from spmoe.formats.base import KernelWeights, Parts, WeightFormat
from spmoe.formats.layout import Part, dtype_name, torch_dtype
from spmoe.registry import WEIGHT_FORMATS

NAMES = ("float32", "float16", "bfloat16")


@WEIGHT_FORMATS.register(*NAMES)
@dataclass(frozen=True)
class Dense(WeightFormat):
    """`weight` [out, in]."""

    dtype: torch.dtype

    lossless = True  # in the weights' own dtype; `ExpertFormat.lossless_from` knows the others

    @property
    def name(self) -> str:
        return dtype_name(self.dtype)

    @classmethod
    def from_name(cls, name: str) -> Self:
        return cls(torch_dtype(name))

    @property
    def kernel(self) -> KernelWeights:
        return KernelWeights("dense", weight_dtype=self.name)

    def parts(self, outs: int, ins: int) -> dict[str, Part]:
        return {"weight": Part(self.dtype, (outs, ins))}

    def quantize(self, weight: Tensor) -> Parts:
        return {"weight": weight.to(self.dtype)}

    def dequantize(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return parts["weight"].to(dtype)
