"""FP4 (e2m1) in small groups: MXFP4 with a power of two per 32 weights, NVFP4 with an FP8 scale per 16."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from spmoe.formats.base import (
    KernelWeights,
    Parts,
    WeightFormat,
    by_group,
    cat,
    divide,
    group_count,
    grouped,
    nibble_columns,
    pack_nibbles,
    positive_scale,
    rows_at_a_time,
    spread,
    unpack_nibbles,
)
from spmoe.formats.layout import Part
from spmoe.registry import WEIGHT_FORMATS

NAMES = ("mxfp4", "nvfp4")

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of codes 0 to 7; codes 8 to 15 are the negative ones
_LARGEST = 6.0
_LARGEST_EXPONENT = 2  # of _LARGEST
_E4M3_LARGEST = 448.0
_BIAS = 127  # of e8m0
_NAN_EXPONENT = 255  # of e8m0
_LARGEST_SCALE = _BIAS + 125  # 6 * 2^125 is finite in float32


@WEIGHT_FORMATS.register("mxfp4")
@dataclass(frozen=True)
class Mxfp4(WeightFormat):
    """`codes` uint8 [out, in / 2], `scale` uint8 [out, in / 32]; value: e2m1 * 2^(scale - 127)."""

    group = 32
    name = "mxfp4"

    @classmethod
    def from_name(cls, name: str) -> Self:
        return cls()

    @property
    def kernel(self) -> KernelWeights:
        return KernelWeights("mxfp4", 1, self.group, scale_dtype="uint8")

    def parts(self, outs: int, ins: int) -> dict[str, Part]:
        codes = Part(torch.uint8, (outs, nibble_columns(ins)))
        return {"codes": codes, "scale": Part(torch.uint8, (outs, group_count(ins, self.group)))}

    def quantize(self, weight: Tensor) -> Parts:
        largest = grouped(weight, self.group).abs().amax(dim=-1)
        mantissa, exponent = torch.frexp(largest)  # largest = mantissa * 2^exponent, mantissa from 0.5
        exponent += mantissa >= 0.875  # from 7 times the scale on, twice the scale has the smaller error
        scale = (exponent - 1 - _LARGEST_EXPONENT + _BIAS).clamp(0, _LARGEST_SCALE).to(torch.uint8)
        codes = _encode(weight.float() / spread(_powers(scale), self.group, weight.shape[1]))
        return {"codes": pack_nibbles(codes), "scale": scale}

    def dequantize(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return _dequantize(parts["codes"], _powers(parts["scale"]), self.group, dtype)

    def check(self, parts: Mapping[str, Tensor], outs: int, ins: int) -> None:
        super().check(parts, outs, ins)
        if bool((parts["scale"] == _NAN_EXPONENT).any()):
            raise ValueError("a scale of mxfp4 is 255, which is not a number")


@WEIGHT_FORMATS.register("nvfp4")
@dataclass(frozen=True)
class Nvfp4(WeightFormat):
    """`codes` uint8 [out, in / 2], `scale` e4m3 [out, in / 16], `global_scale` float32 [out, 1].

    Value: e2m1 * (scale * global_scale), in float32. The rows of a joined matrix have the global scales of its halves.
    """

    group = 16
    name = "nvfp4"

    @classmethod
    def from_name(cls, name: str) -> Self:
        return cls()

    @property
    def kernel(self) -> KernelWeights:
        return KernelWeights("nvfp4", 1, self.group, scale_dtype="float8_e4m3fn")

    def parts(self, outs: int, ins: int) -> dict[str, Part]:
        return {
            "codes": Part(torch.uint8, (outs, nibble_columns(ins))),
            "scale": Part(torch.float8_e4m3fn, (outs, group_count(ins, self.group))),
            "global_scale": Part(torch.float32, (outs, 1)),
        }

    def quantize(self, weight: Tensor) -> Parts:
        one = positive_scale(weight.abs().amax(), _LARGEST * _E4M3_LARGEST, torch.float32)
        pieces = [self._quantize(piece, one) for piece in torch.split(weight, rows_at_a_time(weight))]
        return {name: cat([piece[name] for piece in pieces]) for name in pieces[0]}

    @property
    def by_rows(self) -> bool:
        return False  # one scale for all outputs

    def _quantize(self, weight: Tensor, one: Tensor) -> Parts:
        """Convert some outputs, with this scale for the whole matrix."""
        largest = grouped(weight, self.group).abs().amax(dim=-1)
        scale = (divide(largest, _LARGEST) / one).clamp(max=_E4M3_LARGEST).to(torch.float8_e4m3fn)
        steps = spread(scale.float() * one, self.group, weight.shape[1])
        codes = _encode(torch.where(steps == 0, 0.0, weight.float() / steps))
        return {
            "codes": pack_nibbles(codes),
            "scale": scale,
            "global_scale": one.repeat(len(weight), 1),
        }

    def dequantize(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        scale = parts["scale"].float() * parts["global_scale"]
        return _dequantize(parts["codes"], scale, self.group, dtype)

    def check(self, parts: Mapping[str, Tensor], outs: int, ins: int) -> None:
        super().check(parts, outs, ins)
        if not bool(torch.isfinite(parts["scale"].float()).all() & torch.isfinite(parts["global_scale"]).all()):
            raise ValueError("a scale of nvfp4 is not a finite number")


def _powers(scale: Tensor) -> Tensor:
    """Return 2^(scale - 127) in float32, subnormal for 0; not a number for 255."""  # scale: uint8
    bits = scale.int() << 23
    bits = torch.where(scale == 0, 1 << 22, bits)
    return torch.where(scale == _NAN_EXPONENT, 0x7FC00000, bits).view(torch.float32)


@cache
def _table(device: torch.device) -> Tensor:
    """Return the values of all 16 codes in float32; code 8 is -0.0."""
    return torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], device=device)


@cache
def _boundaries(device: torch.device) -> Tensor:
    """Return the largest number that is rounded down to each code from 0 to 6: to nearest, ties to even codes."""
    middles = torch.tensor([(a + b) / 2 for a, b in pairwise(E2M1_VALUES)])
    middles[1::2] = middles[1::2].nextafter(torch.zeros(()))  # a tie above an odd code is rounded up
    return middles.to(device)


def _encode(numbers: Tensor) -> Tensor:
    """Round numbers to e2m1 codes; larger ones become the largest."""  # float32 -> uint8
    codes = torch.bucketize(numbers.abs().contiguous(), _boundaries(numbers.device)).to(torch.uint8)
    return codes | torch.signbit(numbers).to(torch.uint8) << 3


def _dequantize(packed: Tensor, scale: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """Return e2m1 values times the scale of their group, computed in float32."""
    # packed: [out, in / 2] uint8, scale: [out, groups] float32 -> [out, in]
    weight = unpack_nibbles(packed, _table(packed.device))
    codes, scale = by_group(weight, scale, group)
    codes *= scale
    return weight.to(dtype)
