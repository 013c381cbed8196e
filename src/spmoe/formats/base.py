"""The contract of a weight format: one matrix W[out, in] as named tensors, its parts.

`dequantize` is the definition of a format; kernels and operators compute with the weights that it returns. Every module
of this package with a tuple `NAMES` is a family of formats, and its class is registered under these names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from spmoe.formats.layout import Part, dtype_name, round_up
from spmoe.registry import WEIGHT_FORMATS

Parts = dict[str, Tensor]
OPERATOR_ROWS = 64  # with more, CPU operators are slower than dequantizing and a dense product
_CACHED_BYTES = 2**18  # of packed weights that are dequantized at a time on a CPU
_CACHED_WEIGHTS = 2**18  # that are quantized at a time on a CPU
_KERNEL_WEIGHTS = 2**22  # on other devices, where many small kernels would take longer


@dataclass(frozen=True, slots=True)
class KernelWeights:
    """Numbers that select and parametrize a kernel's way to load weights."""

    kind: str  # dense, bf16-packed, fp8, mxfp4, nvfp4, int4 or int8
    rows: int = 1  # outputs that share a scale; 0: all
    group: int = 0  # inputs that share a scale; 0: all
    asymmetric: bool = False
    scale_dtype: str = ""  # a torch dtype's name
    weight_dtype: str = ""  # of dense weights, a torch dtype's name


class WeightFormat(ABC):
    """One way to store a matrix. Formats are values: equal parameters make equal formats."""

    version = 1  # raise it when the bytes that `quantize` writes, or their meaning, change
    lossless = False  # whether `dequantize` returns exactly the 16-bit weights that `quantize` was given

    @property
    @abstractmethod
    def name(self) -> str:
        """Full name, with parameters, such as `int4-g128`."""

    @property
    def label(self) -> str:
        """Name as users write it, without parameters that only reserve space."""
        return self.name

    @classmethod
    @abstractmethod
    def from_name(cls, name: str) -> Self:
        """Return the format of a registered name."""

    @property
    @abstractmethod
    def kernel(self) -> KernelWeights:
        """Parameters for kernels."""

    @abstractmethod
    def parts(self, outs: int, ins: int) -> dict[str, Part]:
        """Return the dtypes and shapes of the parts of a matrix [outs, ins], in the order in which a blob has them."""

    @abstractmethod
    def quantize(self, weight: Tensor) -> Parts:
        """Convert a finite dense matrix."""  # weight: [out, in], any floating dtype

    @abstractmethod
    def dequantize(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Return the matrix: the definition of the format."""  # -> [out, in] in dtype

    @property
    def row_block(self) -> int:
        """Number of outputs whose multiples `outputs` can start at."""
        return 1

    @property
    def by_rows(self) -> bool:
        """Whether groups of `row_block` outputs are quantized independently of each other."""
        return True

    def outputs(self, parts: Mapping[str, Tensor], start: int, stop: int) -> Parts:
        """Return the parts of some outputs, as views."""
        return {name: part[start:stop] for name, part in parts.items()}

    def quantize_by_rows(self, weight: Tensor) -> Parts:
        """Return `quantize`, some outputs at a time if they are independent: it needs less memory."""
        step = round_up(rows_at_a_time(weight), self.row_block)
        if step >= len(weight) or not self.by_rows:
            return self.quantize(weight)
        pieces = [self.quantize(piece) for piece in torch.split(weight, step)]
        return {name: cat([piece[name] for piece in pieces]) for name in pieces[0]}

    def dequantize_by_rows(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Return `dequantize`, some outputs at a time: intermediate results stay in a processor's caches."""
        first = next(iter(parts.values()))  # [out, ...]
        outs, step = len(first), round_up(max(1, _CACHED_BYTES // max(1, first[0].nbytes)), self.row_block)
        if step >= outs:
            return self.dequantize(parts, dtype)
        pieces = (self.dequantize(self.outputs(parts, at, min(at + step, outs)), dtype) for at in range(0, outs, step))
        piece = next(pieces)
        found = piece.new_empty(outs, piece.shape[1])
        found[:step] = piece
        for number, piece in enumerate(pieces, 1):
            found[number * step : number * step + step] = piece
        return found

    def has_operator(self, x: Tensor) -> bool:
        """Return whether `linear` is there for these rows, and faster than `dequantize` and a dense product."""
        return False

    def linear(self, parts: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Multiply rows with the packed matrix by a CPU operator of PyTorch."""  # x: [rows, in] -> [rows, out]
        raise NotImplementedError

    def repacked_parts(self, outs: int, ins: int, dtype: torch.dtype) -> dict[str, Part] | None:
        """Return the dtypes and shapes of the parts that `repack` makes of a matrix [outs, ins].

        None: PyTorch has no CPU operator with a layout of its own that is fast for this shape and dtype of rows.
        """
        return None

    def repack(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Parts:
        """Return the matrix in the layout of PyTorch's CPU operator, for rows of a dtype."""
        raise NotImplementedError

    def repacked_linear(self, repacked: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Multiply rows with a matrix of `repack`."""  # x: [rows, in] -> [rows, out]
        raise NotImplementedError

    def check(self, parts: Mapping[str, Tensor], outs: int, ins: int) -> None:
        """Raise ValueError, with a sentence, if the parts cannot be those of a matrix [outs, ins]."""
        expected = self.parts(outs, ins)
        if missing := [name for name in expected if name not in parts]:
            raise ValueError(f"{self.name} needs {', '.join(expected)}, and {', '.join(missing)} is missing")
        for name, part in expected.items():
            found = parts[name]
            if tuple(found.shape) != part.shape:
                raise ValueError(
                    f"{name} is {list(found.shape)}, but {self.name} needs {list(part.shape)} for a matrix "
                    f"[{outs}, {ins}]"
                )
            if found.dtype != part.dtype:
                raise ValueError(f"{name} is {dtype_name(found.dtype)}, but {self.name} needs {dtype_name(part.dtype)}")

    def join(self, first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> Parts:
        """Stack two matrices along their outputs: gate and up become gate_up."""
        return {name: cat((first[name], second[name])) for name in first}


@cache
def weight_format(name: str) -> WeightFormat:
    """Return the format of a registered name, also with further parameters; raise UsageError if there is none."""
    registered = (known for known in WEIGHT_FORMATS.names() if f"{name}-".startswith(f"{known}-"))
    found: WeightFormat = WEIGHT_FORMATS.load(max(registered, key=len, default=name)).from_name(name)
    return found


def rows_at_a_time(weight: Tensor) -> int:
    """Return how many rows of a matrix to work on at a time."""
    return max(1, (_CACHED_WEIGHTS if weight.is_cpu else _KERNEL_WEIGHTS) // weight.shape[1])


def cat(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors of any dtype along their first dimension."""
    bits = torch.uint8 if tensors[0].dtype == torch.float8_e4m3fn else tensors[0].dtype  # not every device has `cat`
    return torch.cat([tensor.view(bits) for tensor in tensors]).view(tensors[0].dtype)


def nibble_columns(ins: int) -> int:
    """Return the bytes of a row of 4-bit codes; raise ValueError for an odd number of inputs."""
    if ins % 2:
        raise ValueError(f"a matrix with {ins} inputs cannot be stored in 4 bits; the number must be even")
    return ins // 2


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack codes from 0 to 15 in pairs, the even element in the low nibble."""
    # codes: [out, in] uint8 -> [out, in / 2] uint8
    nibble_columns(codes.shape[-1])
    return codes[..., 0::2] | codes[..., 1::2] << 4


def lookup(table: Tensor, codes: Tensor) -> Tensor:
    """Return the entry of a table for each code."""  # table: [256], codes: uint8 of any shape
    return table.index_select(0, codes.reshape(-1).int()).view(codes.shape)  # several times faster than indexing


def unpack_nibbles(packed: Tensor, values: Tensor) -> Tensor:
    """Return the value of each 4-bit code."""
    # packed: [out, in / 2] uint8, values: [16], 2 or 4 bytes each -> [out, in], of the dtype of the values
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=-1)  # of all bytes
    wide = torch.int64 if values.dtype.itemsize == 4 else torch.int32
    return lookup(pairs.view(wide)[:, 0], packed).view(values.dtype)


def group_count(ins: int, group: int) -> int:
    """Return the number of groups of a row; the last one may be short."""
    return -(-ins // group)


def grouped(weight: Tensor, group: int) -> Tensor:
    """Return a matrix in groups of columns, in float32, padded with zeros."""  # [out, in] -> [out, groups, group]
    outs, ins = weight.shape
    return pad(weight.float(), (0, -ins % group)).view(outs, -1, group)


def spread(scale: Tensor, group: int, ins: int) -> Tensor:
    """Repeat each group's value for its columns."""  # scale: [out, groups] -> [out, in]
    return scale.repeat_interleave(group, dim=-1)[..., :ins]


def by_group(weight: Tensor, scale: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return a matrix and a value for each group of its columns in shapes that can be combined element by element."""
    # weight: [out, in], scale: [out, groups] -> [out, groups, group], [out, groups, 1], or [out, in] both
    if weight.shape[1] % group:  # the last group is short
        return weight, spread(scale, group, weight.shape[1])
    return weight.view(*scale.shape, group), scale[..., None]


def divide(numbers: Tensor, divisor: float) -> Tensor:
    """Divide by a number with the same rounding on every device: CUDA multiplies by the reciprocal of a scalar."""
    return numbers / numbers.new_full((), divisor)


def positive_scale(largest: Tensor, steps: float, dtype: torch.dtype) -> Tensor:
    """Return `largest / steps` in a dtype, at least its smallest normal number and finite; 1 for zeros."""
    limits = torch.finfo(dtype)
    scale = divide(largest.float(), steps).clamp(limits.tiny, limits.max)
    return torch.where(largest == 0, 1.0, scale).to(dtype)


_SCALE_SUFFIXES = {torch.bfloat16: "-bf16", torch.float16: "-f16", torch.float32: "-f32"}


def scale_suffix(dtype: torch.dtype, default: torch.dtype = torch.bfloat16) -> str:
    """Return the part of a name that says the dtype of scales; empty for the default."""
    return "" if dtype == default else _SCALE_SUFFIXES[dtype]


def split_scale_suffix(name: str) -> tuple[str, torch.dtype]:
    """Split a name into the part before `scale_suffix` and the dtype of scales."""
    suffixed = ((dtype, suffix) for dtype, suffix in _SCALE_SUFFIXES.items() if name.endswith(suffix))
    dtype, suffix = next(suffixed, (torch.bfloat16, ""))
    return name.removesuffix(suffix), dtype
