"""Packed integers of checkpoints, rearranged into the parts of spmoe's weight formats, in plain tensor operations.

GPTQ, AWQ and compressed-tensors store 4- or 8-bit codes in int32 words. A weight format has one byte per pair of 4-bit
codes, [out, in / 2] with the even input in the low nibble, or one int8 per weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD_BITS = 32
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # nibble of a word that holds output 0, 1, ... of eight
_MIDDLE = {4: 8, 8: 128}  # code of zero in symmetric checkpoints, by bits


def unpack_words(words: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Return the codes of int32 words that were packed along `dim`, the first code in the lowest bits.

    `order` gives the place in a word of each of its codes, if it is another one.
    """  # words: [..., n, ...] int32 -> [..., n * 32 / bits, ...] uint8
    dim %= words.ndim
    places = range(WORD_BITS // bits) if order is None else order
    mask = (1 << bits) - 1
    codes = [((words >> (bits * place)) & mask).to(torch.uint8) for place in places]
    return torch.stack(codes, dim=dim + 1).flatten(dim, dim + 1)


def signed(codes: Tensor) -> Tensor:
    """Return 8-bit codes minus 128."""  # uint8 -> int8
    return (codes ^ 128).view(torch.int8)


def words_as_bytes(words: Tensor) -> Tensor:
    """Return the bytes of int32 words, lowest first: packed pairs of 4-bit codes."""  # [out, n] -> [out, 4 n] uint8
    # through one dimension: a contiguous tensor may have any stride where a size is 1
    return words.contiguous().view(-1).view(torch.uint8).view(*words.shape[:-1], -1)


def zeros_are_middle(zeros: Tensor, bits: int) -> bool:
    """Return whether every zero point is the middle of the codes, so that the weights are symmetric."""
    return bool((zeros == _MIDDLE[bits]).all())


def is_contiguous_grouping(index: Tensor, group: int) -> bool:
    """Return whether input k belongs to group k // `group`; otherwise the weights are in act-order."""  # index: [in]
    return bool(torch.equal(index.long(), torch.arange(len(index)) // group))


def regroup(values: Tensor, group: int, finer: int, ins: int) -> Tensor:
    """Repeat the values of groups of inputs for smaller groups; one group may also be all inputs."""
    # values: [out, ceil(ins / group)] -> [out, ceil(ins / finer)]
    if group == finer:
        return values
    return values[:, torch.arange(0, ins, finer) // group].contiguous()
