"""What recorded work is told anew each time: tokens, positions, and which experts are in a batch.

It is read by the device from pinned memory, or from what the device chose itself: a copy would queue behind the
experts that are on their way, a kernel's few reads do not.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

MOST_CHAINED = 64  # tokens
_TOKEN, _LENGTH, _COUNT, _TOKENS = 0, 1, 2, 3  # what is where in a chain


def new_chain(device: torch.device) -> Tensor:
    """Where forwards that follow one another on the device hand on what they chose.

    The last token, the positions held when it comes, how many tokens were chosen, and all of them.
    """
    return torch.zeros(_TOKENS + MOST_CHAINED, dtype=torch.int64, device=device)


def go_on_from(chain: Tensor, length: int) -> None:
    """What is chained next comes after so many positions."""
    chain[_LENGTH] = length


def chosen(chain: Tensor, count: int) -> list[int]:
    """The tokens chosen, from a copy of the chain in host memory."""
    tokens: list[int] = chain[_TOKENS : _TOKENS + count].tolist()
    return tokens


def pending_tokens(count: int) -> list[int]:
    """In an inbox, stands for the tokens that another chain will have chosen by then."""
    return list(range(-1, -1 - count, -1))


def stage(inbox: Tensor, chain: Tensor, other: Tensor, ids: Tensor, positions: Tensor, length: Tensor) -> None:
    """Spread the inbox (tokens, then how many came before them) over a forward's inputs; a chain begins.

    In place of a token it may say that it is the first one that the other chain chose (-1), the second (-2), and so on.
    """
    # inbox: [rows + 1] int64, pinned; ids, positions: [1, rows] int64; length: [1] int64
    rows, pad = ids.shape[1], triton.next_power_of_2(ids.shape[1])
    _stage_kernel[(1,)](inbox, chain, other, ids, positions, length, rows, PAD=pad, num_warps=1)


def stage_plain(inbox: Tensor, chain: Tensor, other: Tensor, ids: Tensor, positions: Tensor, length: Tensor) -> None:
    """What `stage` does."""
    rows = ids.shape[1]
    given = inbox[:rows].to(other.device)
    ids[0] = torch.where(given < 0, other[torch.where(given < 0, _TOKENS - 1 - given, 0)], given)
    length[0] = chain[_LENGTH] = inbox[rows]
    positions[0] = inbox[rows] + torch.arange(rows, device=inbox.device)
    chain[_COUNT] = 0


def stage_chained(chain: Tensor, ids: Tensor, positions: Tensor, length: Tensor) -> None:
    """The inputs of a forward of one row that goes on from the last token chosen."""
    _stage_chained_kernel[(1,)](chain, ids, positions, length, num_warps=1)


def stage_chained_plain(chain: Tensor, ids: Tensor, positions: Tensor, length: Tensor) -> None:
    """What `stage_chained` does."""
    ids[0, 0] = chain[_TOKEN]
    positions[0, 0] = length[0] = chain[_LENGTH]


def go_on(chain: Tensor, token: Tensor, rows: int) -> None:
    """Note a forward's choice, and that its rows are held from now on."""  # token: [] int64
    _go_on_kernel[(1,)](chain, token, ROWS=rows, MOST=MOST_CHAINED, num_warps=1)


def go_on_plain(chain: Tensor, token: Tensor, rows: int) -> None:
    """What `go_on` does."""
    chain[_TOKENS + min(int(chain[_COUNT]), MOST_CHAINED - 1)] = chain[_TOKEN] = token
    chain[_LENGTH] += rows
    chain[_COUNT] += 1


def take_batch(ring: Tensor, cursor: Tensor, table: Tensor) -> None:
    """The next batch out of the ring in pinned memory: the slot of each expert that is in it, else -1."""
    # ring: [places, experts] int32, cursor: [1] int64, how many were taken; table: [experts] int32
    count = len(table)
    _take_wave_kernel[(1,)](
        ring, cursor, table, PLACES=len(ring), COUNT=count, BLOCK=triton.next_power_of_2(count), num_warps=1
    )


def take_batch_plain(ring: Tensor, cursor: Tensor, table: Tensor) -> None:
    """What `take_batch` does."""
    table.copy_(ring[int(cursor) % len(ring)])
    cursor += 1


@triton.jit
def _stage_kernel(inbox, chain, other, ids, positions, length, rows, PAD: tl.constexpr):
    at = tl.arange(0, PAD)
    held = tl.load(inbox + rows)
    given = tl.load(inbox + at, mask=at < rows, other=0)
    chosen = tl.load(other + 2 - given, mask=given < 0, other=0)
    tl.store(ids + at, tl.where(given < 0, chosen, given), mask=at < rows)
    tl.store(positions + at, held + at, mask=at < rows)
    tl.store(length, held)
    tl.store(chain + 1, held)
    tl.store(chain + 2, held * 0)


@triton.jit
def _stage_chained_kernel(chain, ids, positions, length):
    held = tl.load(chain + 1)
    tl.store(ids, tl.load(chain))
    tl.store(positions, held)
    tl.store(length, held)


@triton.jit
def _go_on_kernel(chain, token, ROWS: tl.constexpr, MOST: tl.constexpr):
    count, said = tl.load(chain + 2), tl.load(token)
    tl.store(chain + 3 + tl.minimum(count, MOST - 1), said)
    tl.store(chain, said)
    tl.store(chain + 1, tl.load(chain + 1) + ROWS)
    tl.store(chain + 2, count + 1)


@triton.jit
def _take_wave_kernel(ring, cursor, table, PLACES: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    taken, at = tl.load(cursor), tl.arange(0, BLOCK)
    tl.store(table + at, tl.load(ring + (taken % PLACES) * COUNT + at, mask=at < COUNT), mask=at < COUNT)
    tl.store(cursor, taken + 1)
