"""Plain implementations of every weight format, one element at a time, from the published descriptions.

They share no code with `spmoe.formats`: bytes go in, numpy scalars come out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from spmoe.formats.base import WeightFormat

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def e4m3(code: int) -> float:
    """Return the number of an e4m3 byte: 1 sign, 4 exponent (bias 7) and 3 mantissa bits, no infinity."""
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    if (exponent, mantissa) == (15, 7):
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def e8m0(code: int) -> float:
    """Return the number of an e8m0 byte: a power of two."""
    return math.nan if code == 255 else 2.0 ** (code - 127)


def nibble(packed: np.ndarray, row: int, column: int) -> int:
    """Return a 4-bit code; the even column is in the low nibble."""
    return int(packed[row, column // 2]) >> 4 * (column % 2) & 15


def decode(format: WeightFormat, parts: Mapping[str, Tensor], outs: int, ins: int) -> np.ndarray:
    """Return the float32 matrix of some parts."""  # [outs, ins]
    kind = format.name.split("-")[0]
    data = {name: numpy_of(part) for name, part in parts.items()}
    result = np.empty((outs, ins), np.float32)
    for row in range(outs):
        for column in range(ins):
            result[row, column] = DECODERS[kind](format, data, row, column)
    return result


def numpy_of(part: Tensor) -> np.ndarray:
    """Return a part as numpy: FP8 as bytes, 16-bit floats as float32."""
    if part.dtype == torch.float8_e4m3fn:
        return part.view(torch.uint8).numpy()
    return (part.float() if part.dtype in (torch.bfloat16, torch.float16) else part).numpy()


def _fp8(format: WeightFormat, data: Mapping[str, np.ndarray], row: int, column: int) -> np.float32:
    scale = data["scale"]
    block = {"fp8-channel": (1, 1 << 30), "fp8-tensor": (1 << 30, 1 << 30)}.get(format.name, (128, 128))
    with np.errstate(over="ignore"):
        return np.float32(e4m3(int(data["weight"][row, column]))) * scale[row // block[0], column // block[1]]


def _mxfp4(format: WeightFormat, data: Mapping[str, np.ndarray], row: int, column: int) -> float:
    return E2M1[nibble(data["codes"], row, column)] * e8m0(int(data["scale"][row, column // 32]))


def _nvfp4(format: WeightFormat, data: Mapping[str, np.ndarray], row: int, column: int) -> np.float32:
    with np.errstate(over="ignore", invalid="ignore"):
        scale = np.float32(e4m3(int(data["scale"][row, column // 16]))) * data["global_scale"][row, 0]
        return np.float32(E2M1[nibble(data["codes"], row, column)]) * scale


def _int4(format: WeightFormat, data: Mapping[str, np.ndarray], row: int, column: int) -> np.float32:
    group = column // int(format.name.split("-g")[1].split("-")[0])
    zero = int(data["zero"][row, group]) if "asym" in format.name else 8
    with np.errstate(over="ignore"):
        return np.float32(nibble(data["codes"], row, column) - zero) * data["scale"][row, group]


def _int8(format: WeightFormat, data: Mapping[str, np.ndarray], row: int, column: int) -> np.float32:
    group = 0 if "channel" in format.name else column // int(format.name.split("-g")[1].split("-")[0])
    with np.errstate(over="ignore"):
        return np.float32(data["weight"][row, column]) * data["scale"][row, group]


def _bf16(format: WeightFormat, data: Mapping[str, np.ndarray], row: int, column: int) -> np.float32:
    block, plane, lane = column // 128, column % 128 // 16, column % 16
    if block == data["low"].shape[1]:
        return data["tail"][row, column % 128]
    words = [int(word) & 0xFFFFFFFF for word in data["low"][row, block, :, lane]]
    codes = int(data["codes"][row, block, lane]) & 0xFFFFFFFF
    pair, half = plane // 2, plane % 2
    if codes == 0xFFFFFFFF:
        bits = int(data["raw"][words[0], pair]) >> 16 * half & 0xFFFF
    else:
        low = words[pair // 2] >> 8 * (pair % 2 + 2 * half) & 0xFF
        exponent = int(data["base"][row, 0]) + (codes >> 4 * (pair + 4 * half) & 15)
        bits = (low & 0x80) << 8 | exponent << 7 | low & 0x7F
    return np.array(bits << 16, np.uint32).view(np.float32)[()]


DECODERS = {"fp8": _fp8, "mxfp4": _mxfp4, "nvfp4": _nvfp4, "int4": _int4, "int8": _int8, "bf16": _bf16}


def round_to_bfloat16(numbers: np.ndarray) -> np.ndarray:
    """Round float32 numbers to bfloat16, to nearest with ties to even; the result is float32 again."""
    bits = np.ascontiguousarray(numbers).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return np.where(np.isnan(numbers), numbers, rounded)
