"""Tokens, chains and batches against their plain twins, on CUDA or, with TRITON_INTERPRET=1, on the CPU."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytest.importorskip("triton", reason="no triton")
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("no CUDA device, and TRITON_INTERPRET is not 1", allow_module_level=True)

from spmoe.backends.kernels import inputs  # noqa: E402

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def host(values: list[int] | list[list[int]], dtype: torch.dtype = torch.int64) -> Tensor:
    """Memory that the device can read where it is."""
    tensor = torch.tensor(values, dtype=dtype)
    return tensor if INTERPRETED else tensor.pin_memory()


def blank(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """ids, positions and length, all nonsense."""
    return tuple(torch.full(size, -7, device=DEVICE) for size in ((1, rows), (1, rows), (1,)))  # type: ignore[return-value]


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_stage_spreads_the_inbox_and_begins_a_chain(rows: int) -> None:
    inbox = host([*range(100, 100 + rows), 4000])
    chains = [inputs.new_chain(DEVICE).fill_(9) for _ in range(2)]
    found, expected = blank(rows), blank(rows)
    other = inputs.new_chain(DEVICE).fill_(8)
    inputs.stage(inbox, chains[0], other, *found)
    inputs.stage_plain(inbox, chains[1], other, *expected)
    for ours, theirs in zip((*found, chains[0]), (*expected, chains[1]), strict=True):
        assert torch.equal(ours, theirs)
    assert found[0].tolist() == [list(range(100, 100 + rows))]
    assert found[1].tolist() == [list(range(4000, 4000 + rows))]


@pytest.mark.parametrize("following", [1, 4, 15])
def test_an_inbox_may_leave_tokens_to_another_chain(following: int) -> None:
    other, chain = inputs.new_chain(DEVICE).fill_(9), inputs.new_chain(DEVICE)
    inputs.stage(host([5, 30]), other, other, *blank(1))
    said = [50 + 7 * place for place in range(following)]
    for token in said:
        inputs.go_on(other, torch.tensor(token, device=DEVICE), rows=1)
    inbox = host([77, *inputs.pending_tokens(following), 31])
    found, expected = blank(1 + following), blank(1 + following)
    inputs.stage(inbox, chain, other, *found)
    inputs.stage_plain(inbox, inputs.new_chain(DEVICE), other, *expected)
    assert found[0].tolist() == expected[0].tolist() == [[77, *said]]
    assert found[1].tolist() == expected[1].tolist() == [list(range(31, 32 + following))]
    assert int(found[2]) == int(chain[1]) == 31
    assert inputs.chosen(other.cpu(), following) == said, "the other chain stays as it is"


def test_a_chain_hands_tokens_and_lengths_on() -> None:
    chain = inputs.new_chain(DEVICE).fill_(9)
    ids, positions, length = blank(2)
    inputs.stage(host([5, 6, 30]), chain, chain, ids, positions, length)
    said = [11, 3, 70]
    inputs.go_on(chain, torch.tensor(said[0], device=DEVICE), rows=2)
    for place, token in enumerate(said[1:]):
        one = blank(1)
        inputs.stage_chained(chain, *one)
        assert [t.flatten().tolist() for t in one] == [[said[place]], [32 + place], [32 + place]]
        inputs.go_on(chain, torch.tensor(token, device=DEVICE), rows=1)
    assert inputs.chosen(chain.cpu(), 3) == said


def test_a_chain_goes_on_as_its_twin_does() -> None:
    ours, twin = inputs.new_chain(DEVICE), inputs.new_chain(DEVICE)
    for token in range(inputs.MOST_CHAINED + 3):  # more than are kept: the last place is overwritten, nothing else
        inputs.go_on(ours, torch.tensor(token, device=DEVICE), rows=1 + token % 2)
        inputs.go_on_plain(twin, torch.tensor(token, device=DEVICE), rows=1 + token % 2)
        assert torch.equal(ours, twin)
        after, twins = blank(1), blank(1)
        inputs.stage_chained(ours, *after)
        inputs.stage_chained_plain(twin, *twins)
        assert all(torch.equal(a, b) for a, b in zip(after, twins, strict=True))


@pytest.mark.parametrize("count", [1, 8, 60, 130])
def test_waves_are_taken_in_turn_around_the_ring(count: int) -> None:
    rows = [
        [-1 if (place + expert) % 3 == 0 else 1000 * place + expert for expert in range(count)] for place in range(3)
    ]
    ring = host(rows, torch.int32)
    cursors = [torch.zeros(1, dtype=torch.int64, device=DEVICE) for _ in range(2)]
    around = [torch.full((count + 8,), -7, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    tables = [whole[4:-4] for whole in around]  # as aligned as the real one
    for turn in range(7):
        inputs.take_batch(ring, cursors[0], tables[0])
        inputs.take_batch_plain(ring, cursors[1], tables[1])
        assert torch.equal(around[0], around[1])
        assert around[0].tolist() == [*[-7] * 4, *rows[turn % 3], *[-7] * 4], "the batch, and nothing beside it"
        assert cursors[0].tolist() == cursors[1].tolist() == [turn + 1]
    assert ring.tolist() == rows
