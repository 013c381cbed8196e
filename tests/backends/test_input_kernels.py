"""Kernels of graph inputs against their PyTorch references."""

from __future__ import annotations

import pytest
import torch
from kernel_helpers import DEVICE, INTERPRETED, KERNEL_MARKS
from torch import Tensor

from spmoe.backends.kernels import inputs

pytestmark = KERNEL_MARKS


def host(values: list[int] | list[list[int]], dtype: torch.dtype = torch.int64) -> Tensor:
    """Return values in host memory that the device can read."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor if INTERPRETED else tensor.pin_memory()


def blank(rows: int, sequences: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, positions and ranges with invalid values."""
    return tuple(torch.full(size, -7, device=DEVICE) for size in ((1, rows), (1, rows), (3, sequences)))  # type: ignore[return-value]


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_load_inputs_writes_the_inputs_and_restarts_the_chain(rows: int) -> None:
    host_inputs = host([*range(100, 100 + rows), 70, 4000, 8192])
    chains = [inputs.new_token_chain(DEVICE).fill_(9) for _ in range(2)]
    found, expected = blank(rows), blank(rows)
    other = inputs.new_token_chain(DEVICE).fill_(8)
    inputs.load_inputs(host_inputs, chains[0], other, *found)
    inputs.load_inputs_plain(host_inputs, chains[1], other, *expected)
    for got, want in zip((*found, chains[0]), (*expected, chains[1]), strict=True):
        assert torch.equal(got, want)
    assert found[0].tolist() == [list(range(100, 100 + rows))]
    assert found[1].tolist() == [list(range(4000, 4000 + rows))]
    assert found[2].flatten().tolist() == chains[0][1:4].tolist() == [70, 4000, 8192]


@pytest.mark.parametrize(("rows", "sequences"), [(2, 2), (6, 3), (16, 16)])
def test_load_inputs_of_several_sequences(rows: int, sequences: int) -> None:
    ranges = [[100 * column + line for line in range(sequences)] for column in (1, 2, 3)]
    host_inputs = host([*range(rows), *(value for column in ranges for value in column)])
    found, expected = blank(rows, sequences), blank(rows, sequences)
    chains = [inputs.new_token_chain(DEVICE).fill_(9) for _ in range(2)]
    inputs.load_inputs(host_inputs, chains[0], chains[0], *found)
    inputs.load_inputs_plain(host_inputs, chains[1], chains[1], *expected)
    for got, want in zip((*found, chains[0]), (*expected, chains[1]), strict=True):
        assert torch.equal(got, want)
    share = rows // sequences
    assert found[1].flatten().tolist() == [200 + row // share + row % share for row in range(rows)]
    assert found[2].tolist() == ranges


@pytest.mark.parametrize("count", [1, 4, 15])
def test_pending_tokens_are_read_from_another_chain(count: int) -> None:
    other, chain = inputs.new_token_chain(DEVICE).fill_(9), inputs.new_token_chain(DEVICE)
    inputs.load_inputs(host([5, 0, 30, 90]), other, other, *blank(1))
    tokens = [50 + 7 * i for i in range(count)]
    for token in tokens:
        inputs.append_token(other, torch.tensor(token, device=DEVICE), rows=1)
    host_inputs = host([77, *inputs.pending_tokens(count), 0, 31, 90])
    found, expected = blank(1 + count), blank(1 + count)
    inputs.load_inputs(host_inputs, chain, other, *found)
    inputs.load_inputs_plain(host_inputs, inputs.new_token_chain(DEVICE), other, *expected)
    assert found[0].tolist() == expected[0].tolist() == [[77, *tokens]]
    assert found[1].tolist() == expected[1].tolist() == [list(range(31, 32 + count))]
    assert found[2].flatten().tolist() == chain[1:4].tolist() == [0, 31, 90]
    assert inputs.chain_tokens(other.cpu(), count) == tokens, "the other chain is not changed"


def test_chain_passes_tokens_and_lengths_to_the_next_forward() -> None:
    chain = inputs.new_token_chain(DEVICE).fill_(9)
    inputs.load_inputs(host([5, 6, 70, 30, 90]), chain, chain, *blank(2))
    tokens = [11, 3, 70]
    inputs.append_token(chain, torch.tensor(tokens[0], device=DEVICE), rows=2)
    for i, token in enumerate(tokens[1:]):
        one = blank(1)
        inputs.load_chained_inputs(chain, *one)
        assert [t.flatten().tolist() for t in one] == [[tokens[i]], [32 + i], [70, 32 + i, 90]]
        inputs.append_token(chain, torch.tensor(token, device=DEVICE), rows=1)
    assert inputs.chain_tokens(chain.cpu(), 3) == tokens


def test_append_token_matches_reference() -> None:
    found, expected = inputs.new_token_chain(DEVICE), inputs.new_token_chain(DEVICE)
    for token in range(inputs.MAX_CHAINED_TOKENS + 3):  # beyond the maximum only the last entry is overwritten
        inputs.append_token(found, torch.tensor(token, device=DEVICE), rows=1 + token % 2)
        inputs.append_token_plain(expected, torch.tensor(token, device=DEVICE), rows=1 + token % 2)
        assert torch.equal(found, expected)
        loaded, want = blank(1), blank(1)
        inputs.load_chained_inputs(found, *loaded)
        inputs.load_chained_inputs_plain(expected, *want)
        assert all(torch.equal(a, b) for a, b in zip(loaded, want, strict=True))


@pytest.mark.parametrize("count", [1, 8, 60, 130])
def test_batches_are_taken_from_the_ring_in_order(count: int) -> None:
    rows = [
        [-1 if (entry + expert) % 3 == 0 else 1000 * entry + expert for expert in range(count)] for entry in range(3)
    ]
    ring = host(rows, torch.int32)
    cursors = [torch.zeros(1, dtype=torch.int64, device=DEVICE) for _ in range(2)]
    padded = [torch.full((count + 8,), -7, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    tables = [tensor[4:-4] for tensor in padded]  # aligned as in the engine
    for turn in range(7):
        inputs.take_batch(ring, cursors[0], tables[0])
        inputs.take_batch_plain(ring, cursors[1], tables[1])
        assert torch.equal(padded[0], padded[1])
        assert padded[0].tolist() == [*[-7] * 4, *rows[turn % 3], *[-7] * 4], "writes outside the table"
        assert cursors[0].tolist() == cursors[1].tolist() == [turn + 1]
    assert ring.tolist() == rows
