"""FP8 (e4m3) with one scale per block, per output channel or per matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from spmoe.formats.base import (
    KernelWeights,
    Parts,
    WeightFormat,
    by_group,
    lookup,
    positive_scale,
    scale_suffix,
)
from spmoe.formats.layout import Part, dtype_name
from spmoe.registry import WEIGHT_FORMATS

NAMES = ("fp8-block128", "fp8-channel", "fp8-tensor")

_LARGEST = 448.0  # of e4m3
_ALL = 0  # a block's side that spans the whole matrix


@WEIGHT_FORMATS.register(*NAMES)
@dataclass(frozen=True)
class Fp8(WeightFormat):
    """`weight` e4m3 [out, in] and `scale` [out / rows, in / columns], rounded up; value: weight * scale in float32.

    A joined matrix has blocks of `rows` outputs only if these divide the outputs of both halves; `with_rows` makes
    smaller blocks.
    """

    rows: int = 128  # outputs of a block; 0: all
    columns: int = 128  # inputs of a block; 0: all
    scale_dtype: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        sizes = f"block{self.rows}" if self.rows == self.columns else f"block{self.rows}x{self.columns}"
        stem = {(1, _ALL): "channel", (_ALL, _ALL): "tensor"}.get((self.rows, self.columns), sizes)
        return f"fp8-{stem}{scale_suffix(self.scale_dtype, torch.float32)}"

    @classmethod
    def from_name(cls, name: str) -> Self:
        return {"fp8-block128": cls(), "fp8-channel": cls(1, _ALL), "fp8-tensor": cls(_ALL, _ALL)}[name]

    @property
    def kernel(self) -> KernelWeights:
        return KernelWeights("fp8", self.rows, self.columns, scale_dtype=dtype_name(self.scale_dtype))

    def parts(self, outs: int, ins: int) -> dict[str, Part]:
        rows, columns = self.rows or outs, self.columns or ins
        blocks = (-(-outs // rows), -(-ins // columns))
        return {"weight": Part(torch.float8_e4m3fn, (outs, ins)), "scale": Part(self.scale_dtype, blocks)}

    def quantize(self, weight: Tensor) -> Parts:
        outs, ins = weight.shape
        rows, columns = self.rows or outs, self.columns or ins
        padded = pad(weight.float(), (0, -ins % columns, 0, -outs % rows))
        blocks = padded.reshape(len(padded) // rows, rows, -1, columns)
        scale = positive_scale(blocks.abs().amax(dim=(1, 3)), _LARGEST, self.scale_dtype)
        codes = (weight.float() / self._spread(scale.float(), outs, ins)).clamp(-_LARGEST, _LARGEST)
        return {"weight": codes.to(torch.float8_e4m3fn), "scale": scale}

    def dequantize(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        weight, scale = e4m3_to_float(parts["weight"]), parts["scale"].float()
        outs, ins = weight.shape
        rows = scale.expand(outs, -1) if self.rows == _ALL else scale.repeat_interleave(self.rows, dim=0)[:outs]
        codes, scale = by_group(weight, rows, self.columns or ins)
        codes *= scale
        return weight.to(dtype)

    @property
    def row_block(self) -> int:
        return self.rows or 1

    @property
    def by_rows(self) -> bool:
        return self.rows != _ALL

    def outputs(self, parts: Mapping[str, Tensor], start: int, stop: int) -> Parts:
        blocks = slice(start // self.rows, -(-stop // self.rows)) if self.rows != _ALL else slice(None)
        return {"weight": parts["weight"][start:stop], "scale": parts["scale"][blocks]}

    def check(self, parts: Mapping[str, Tensor], outs: int, ins: int) -> None:
        super().check(parts, outs, ins)
        if not bool(torch.isfinite(parts["scale"]).all()):
            raise ValueError(f"a scale of {self.name} is not a finite number")
        if bool((parts["weight"].view(torch.uint8) & 127 == 127).any()):
            raise ValueError(f"a weight of {self.name} is not a number")

    def join(self, first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> Parts:
        outs = len(first["weight"])
        if self.rows == _ALL or outs % self.rows:
            raise ValueError(
                f"matrices of {outs} outputs cannot be joined in {self.name}: a block would span both; use `with_rows`"
            )
        return super().join(first, second)

    def with_rows(self, parts: Mapping[str, Tensor], rows: int) -> tuple[Fp8, Parts]:
        """Return the same matrix with blocks of fewer outputs; `rows` must divide those of a block."""
        outs, ins = parts["weight"].shape
        columns = self.columns or ins
        if rows < 1 or (self.rows and self.rows % rows):
            raise ValueError(f"blocks of {self.rows} outputs cannot be divided into blocks of {rows}")
        scale = parts["scale"].repeat_interleave(self.rows or outs, dim=0)[:outs:rows]
        return Fp8(rows, columns, self.scale_dtype), {"weight": parts["weight"], "scale": scale.contiguous()}

    def _spread(self, scale: Tensor, outs: int, ins: int) -> Tensor:
        """Repeat each block's scale for its elements."""  # [blocks, blocks] -> [outs, ins] or broadcastable
        if scale.shape[0] > 1 and self.rows != 1:
            scale = scale.repeat_interleave(self.rows, dim=0)[:outs]
        if scale.shape[1] > 1:
            scale = scale.repeat_interleave(self.columns, dim=1)[:, :ins]
        return scale


def e4m3_to_float(numbers: Tensor) -> Tensor:
    """Convert e4m3 to float32; on a CPU, a table is several times faster than PyTorch's conversion."""
    return lookup(_table(numbers.device), numbers.view(torch.uint8)) if numbers.is_cpu else numbers.float()


@cache
def _table(device: torch.device) -> Tensor:
    return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()
