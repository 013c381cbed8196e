"""Repacking of int32 words: against plain loops, over shapes with sides of one word."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quantized_checkpoints import pack
from spmoe.models.repacking import AWQ_ORDER, is_contiguous_grouping, regroup, signed, unpack_words, words_as_bytes


def random_codes(*shape: int, bits: int = 4) -> Tensor:
    return torch.randint(2**bits, shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(8, 8), (8, 24), (40, 8), (16, 32)])
@pytest.mark.parametrize("dim", [0, 1])
def test_words_are_unpacked_along_both_dimensions(bits: int, shape: tuple[int, int], dim: int) -> None:
    codes = random_codes(*shape, bits=bits)
    assert unpack_words(pack(codes, bits, dim), bits, dim).tolist() == codes.tolist()


@pytest.mark.parametrize(("outs", "ins"), [(8, 8), (1, 16), (24, 40)])
def test_words_along_inputs_are_packed_pairs(outs: int, ins: int) -> None:
    codes = random_codes(outs, ins)
    words = pack(codes.T, 4, 0)  # [in / 8, out], as gptq has them
    packed = words_as_bytes(words.T)
    assert torch.equal(packed & 15, codes[:, 0::2])
    assert torch.equal(packed >> 4, codes[:, 1::2])


def test_order_of_awq() -> None:
    codes = random_codes(5, 16)
    words = pack(codes, 4, 1, (0, 2, 4, 6, 1, 3, 5, 7))  # which output each place of a word holds
    assert unpack_words(words, 4, 1, AWQ_ORDER).tolist() == codes.tolist()


def test_codes_become_signed() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert signed(codes).tolist() == [code - 128 for code in range(256)]


@pytest.mark.parametrize(("group", "finer", "ins"), [(256, 128, 512), (256, 128, 300), (300, 128, 300), (64, 64, 100)])
def test_scales_of_large_groups_are_repeated(group: int, finer: int, ins: int) -> None:
    scale = torch.rand(3, -(-ins // group))
    found = regroup(scale, group, finer, ins)
    assert found.shape == (3, -(-ins // finer))
    for column in range(ins):
        assert torch.equal(found[:, column // finer], scale[:, column // group])


def test_act_order_is_recognized() -> None:
    assert is_contiguous_grouping(torch.tensor([0, 0, 1, 1, 2], dtype=torch.int32), 2)
    assert not is_contiguous_grouping(torch.tensor([0, 1, 0, 1, 2], dtype=torch.int32), 2)
