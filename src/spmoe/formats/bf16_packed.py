"""bfloat16 without loss in about 12 bits: exponents are 4-bit codes, and weights with rare exponents are stored whole.

A bfloat16 has a sign, 8 bits of exponent and 7 of mantissa. A row has codes for 16 exponents that follow each other.
Eight weights share a word of codes; if one of them has another exponent, all eight are stored raw, in a list beside.

Weights are arranged so that kernels unpack two at once and add products in the order of dense weights. A row is divided
into blocks of 128 inputs, and a block into 8 planes of 16. Weights at the same place of the 8 planes make a group. Word
i of a group holds planes 2 * i and 2 * i + 1 in its lower and higher half, when it is unpacked. Inputs after the last
whole block are stored as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from spmoe.errors import SpmoeError
from spmoe.formats.base import KernelWeights, Parts, WeightFormat, rows_at_a_time
from spmoe.formats.layout import Part, dtype_name
from spmoe.registry import WEIGHT_FORMATS

NAMES = ("bf16-packed",)

BLOCK = 128  # inputs
DEFAULT_ESCAPES = 32  # per _UNIT weights: raw groups take 0.06 bits per weight
_PLANES, _LANES = 8, 16
_UNIT = 2**16
MAX_ESCAPES = _UNIT // 64  # of 16 bytes each: 14 bits per weight; more would hardly be smaller than bfloat16
_MIN_CAPACITY = 16
_WINDOW = 16  # exponents that have a code
_SAMPLE = 256  # weights of a row that select its exponents
_RAW = -1  # all bits of a word of codes set: the group is raw


class EscapeOverflow(SpmoeError):
    """A matrix has more raw groups than its blob has place for; `escapes` per 65536 weights would suffice."""

    def __init__(self, found: int, capacity: int, escapes: int) -> None:
        super().__init__(
            f"bf16-packed: {found} groups of weights of a matrix have rare exponents, and there is place for "
            f"{capacity}; use --expert-format bfloat16"
        )
        self.escapes = escapes


@WEIGHT_FORMATS.register(*NAMES)
@dataclass(frozen=True)
class Bf16Packed(WeightFormat):
    """Bit-identical bfloat16, also for infinities, NaN, subnormal numbers and -0.0.

    Parts are int32, but for the last. `low` [out, blocks, 2, 16]: the signs (highest bit) and mantissas of a group in
    8 bytes; the halves of word i of the group are bytes i % 2 and i % 2 + 2 of word i // 2 here. `codes` [out, blocks,
    16]: the halves of word i have nibbles i and i + 4. `base` [out, 1]: the exponent of code 0. `raw` [capacity, 4]:
    words of raw groups; such a group's codes are -1, and its first word in `low` is its place in this list. `tail`
    bfloat16 [out, in % 128]: the inputs after the last whole block.
    """

    escapes: int = DEFAULT_ESCAPES  # place for raw groups, per 65536 weights

    lossless = True

    @property
    def name(self) -> str:
        return "bf16-packed" if self.escapes == DEFAULT_ESCAPES else f"bf16-packed-e{self.escapes}"

    @property
    def label(self) -> str:
        return NAMES[0]

    @classmethod
    def from_name(cls, name: str) -> Self:
        _, _, escapes = name.partition("-e")
        return cls(int(escapes or DEFAULT_ESCAPES))

    def capacity(self, outs: int, ins: int) -> int:
        """Return how many raw groups a matrix has place for."""
        return max(_MIN_CAPACITY, -(-outs * ins * self.escapes // _UNIT))

    @property
    def kernel(self) -> KernelWeights:
        return KernelWeights("bf16-packed")

    def parts(self, outs: int, ins: int) -> dict[str, Part]:
        blocks, tail = divmod(ins, BLOCK)
        return {
            "low": Part(torch.int32, (outs, blocks, 2, _LANES)),
            "codes": Part(torch.int32, (outs, blocks, _LANES)),
            "base": Part(torch.int32, (outs, 1)),
            "raw": Part(torch.int32, (self.capacity(outs, ins), 4)),
            "tail": Part(torch.bfloat16, (outs, tail)),
        }

    @property
    def by_rows(self) -> bool:
        return False  # one list of raw groups for all outputs

    def quantize(self, weight: Tensor) -> Parts:
        """Pack a matrix of bfloat16, or of numbers that bfloat16 holds exactly."""
        (outs, ins), bits = weight.shape, _bits(weight)
        parts = {
            name: torch.empty(p.shape, dtype=p.dtype, device=bits.device) for name, p in self.parts(outs, ins).items()
        }
        low, codes, base, raw = (parts[name] for name in ("low", "codes", "base", "raw"))
        base.copy_(_bases(bits))
        raw.zero_()
        whole = ins - ins % BLOCK
        parts["tail"].copy_(bits[:, whole:].view(torch.bfloat16))
        found, step = 0, rows_at_a_time(weight)
        for at in range(0, outs, step):
            some = slice(at, min(at + step, outs))
            groups = _pack(bits[some, :whole], base[some], low[some], codes[some])
            kept = max(0, min(len(groups), len(raw) - found))
            raw[found : found + kept] = groups[:kept]
            low[some][:, :, 0][codes[some] == _RAW] += found
            found += len(groups)
        if found > len(raw):
            raise EscapeOverflow(found, len(raw), -(-found * _UNIT // weight.numel()))
        return parts

    def dequantize(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        low, codes, base = parts["low"], parts["codes"], parts["base"].view(-1, 1, 1) * 0x00800080
        words = low.new_empty(*codes.shape, 4)
        for i in range(4):
            pair = low[:, :, i // 2] >> i % 2 * 8 & 0x00FF00FF
            words[..., i] = pair + (pair & 0x00800080) * 255 + ((codes >> 4 * i & 0x000F000F) * 128 + base)
        is_raw = codes == _RAW
        words[is_raw] = parts["raw"][low[:, :, 0][is_raw].long()]
        weights = words.view(torch.bfloat16).mT.flatten(1)
        return torch.cat((weights, parts["tail"]), dim=1).to(dtype)

    def outputs(self, parts: Mapping[str, Tensor], start: int, stop: int) -> Parts:
        return {name: part if name == "raw" else part[start:stop] for name, part in parts.items()}

    def check(self, parts: Mapping[str, Tensor], outs: int, ins: int) -> None:
        super().check(parts, outs, ins)
        places = parts["low"][:, :, 0][parts["codes"] == _RAW]
        if len(places) and not 0 <= int(places.min()) <= int(places.max()) < len(parts["raw"]):
            raise ValueError("a raw group of bf16-packed has a place outside of the list")
        if not 0 <= int(parts["base"].min()) <= int(parts["base"].max()) <= 256 - _WINDOW:
            raise ValueError(f"a base of bf16-packed is not from 0 to {256 - _WINDOW}")

    def join(self, first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> Parts:
        """Pack both matrices anew: they share a list of raw groups."""
        return self.quantize(torch.cat([self.dequantize(half, torch.bfloat16) for half in (first, second)]))


def _bits(weight: Tensor) -> Tensor:
    """Return the bits of bfloat16 numbers; raise ValueError for numbers that bfloat16 does not hold."""  # int16
    if weight.dtype != torch.bfloat16:
        rounded = weight.to(torch.bfloat16)
        if not torch.equal(rounded.to(weight.dtype), weight):
            raise ValueError(f"bf16-packed holds bfloat16, which rounds these {dtype_name(weight.dtype)} weights")
        weight = rounded
    return weight.contiguous().view(torch.int16)


def _pack(bits: Tensor, base: Tensor, low: Tensor, codes: Tensor) -> Tensor:
    """Write `low` and `codes` of some rows, with places of raw groups from 0 on, and return the words of these."""
    # bits: [out, in] int16, whole blocks, base: [out, 1] -> [raw groups, 4] int32
    planes, first = bits.reshape(len(bits), codes.shape[1], _PLANES, _LANES), base.view(-1, 1, 1) * 0x00010001
    words, all_codes = [], torch.zeros_like(codes)
    codes.zero_()
    for i in range(4):
        word = planes[:, :, 2 * i].int() & 0xFFFF | planes[:, :, 2 * i + 1].int() << 16
        code = (word >> 7 & 0x00FF00FF) - first  # a negative half spoils the other one, and the group is raw
        all_codes |= code
        codes |= (code & 0x000F000F) << 4 * i
        pair = word >> 8 & 0x00800080 | word & 0x007F007F
        if i % 2:
            low[:, :, i // 2] |= pair << 8
        else:
            low[:, :, i // 2] = pair
        words.append(word)
    is_raw = (all_codes & ~0x000F000F != 0).logical_or_(codes == _RAW)
    row, block, lane = is_raw.nonzero(as_tuple=True)
    raw = torch.stack([word[row, block, lane] for word in words], dim=-1)
    codes[row, block, lane] = _RAW
    low[row, block, 0, lane] = torch.arange(len(raw), dtype=torch.int32, device=raw.device)
    low[row, block, 1, lane] = 0
    return raw


def _bases(bits: Tensor) -> Tensor:
    """Choose 16 exponents that cover most of each row, by a sample, and return the lowest."""
    # bits: [out, in] int16 -> [out, 1] int32
    exponent = (bits[:, :: max(1, bits.shape[1] // _SAMPLE)] >> 7 & 0xFF).long()
    counts = torch.zeros(len(bits), 256, dtype=torch.int32, device=bits.device)
    counts.scatter_add_(1, exponent, torch.ones_like(exponent, dtype=torch.int32))
    total = pad(counts.cumsum(dim=1), (1, 0))
    covered = total[:, _WINDOW:] - total[:, :-_WINDOW]  # by each window
    first = covered.argmax(dim=1, keepdim=True)
    last = covered.shape[1] - 1 - covered.flip(1).argmax(dim=1, keepdim=True)
    # of equal windows, one with room for an exponent above those of the sample; the others are for the many small ones
    return torch.minimum(first + 1, last).int()
