"""Inputs of captured graphs: tokens, positions, and the slots of the experts in a batch.

Kernels read them from pinned host memory, or from a token chain on the device. A copy would queue behind the experts
that are being transferred; the few reads of a kernel do not.

A token chain passes tokens from one forward to the next on the device. It is an int64 tensor that holds the last token,
the range of its sequence in the KV arena (start, length when that token is appended, capacity), the number of tokens
selected so far, and those tokens.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

MAX_CHAINED_TOKENS = 64
# offsets in a token chain; the kernels below repeat the numbers
_LAST_TOKEN, _RANGE, _LENGTH, _COUNT, _TOKENS = 0, 1, 2, 4, 5


def new_token_chain(device: torch.device) -> Tensor:
    """Allocate an empty token chain."""
    return torch.zeros(_TOKENS + MAX_CHAINED_TOKENS, dtype=torch.int64, device=device)


def set_chain_range(chain: Tensor, start: int, length: int, capacity: int) -> None:
    """Set the range, and the length, at which the next chained forward appends its token."""
    chain[_RANGE:_COUNT] = torch.tensor([start, length, capacity])


def chain_tokens(chain: Tensor, count: int) -> list[int]:
    """Return the first `count` tokens of a chain that was copied to host memory."""
    tokens: list[int] = chain[_TOKENS : _TOKENS + count].tolist()
    return tokens


def pending_tokens(count: int) -> list[int]:
    """Return placeholders (-1, -2, ...) that `load_inputs` replaces by the first `count` tokens of another chain."""
    return list(range(-1, -1 - count, -1))


def load_inputs(
    host_inputs: Tensor,  # [rows + 3 * sequences] int64 in pinned memory: tokens or placeholders, then the ranges
    chain: Tensor,
    other: Tensor,
    ids: Tensor,  # [1, rows] int64
    positions: Tensor,  # [1, rows] int64
    ranges: Tensor,  # [3, sequences] int64: start in the KV arena, length before these rows, capacity
) -> None:
    """Write a forward's token ids, positions and ranges, and restart `chain` at the first range.

    Each sequence has an equal share of the rows. A placeholder -i stands for the i-th token of the chain `other`; see
    `pending_tokens`.
    """
    rows, sequences = ids.shape[1], ranges.shape[1]
    pad = triton.next_power_of_2(max(rows, 3 * sequences))
    _load_inputs_kernel[(1,)](
        host_inputs, chain, other, ids, positions, ranges, rows, sequences, rows // sequences, PAD=pad, num_warps=1
    )


def load_inputs_plain(
    host_inputs: Tensor, chain: Tensor, other: Tensor, ids: Tensor, positions: Tensor, ranges: Tensor
) -> None:
    """PyTorch reference of `load_inputs`."""
    rows, sequences = ids.shape[1], ranges.shape[1]
    tokens = host_inputs[:rows].to(other.device)
    ids[0] = torch.where(tokens < 0, other[torch.where(tokens < 0, _TOKENS - 1 - tokens, 0)], tokens)
    ranges.copy_(host_inputs[rows:].view(3, sequences))
    positions[0] = (ranges[1][:, None] + torch.arange(rows // sequences, device=ranges.device)).flatten()
    chain[_RANGE:_COUNT] = ranges[:, 0]
    chain[_COUNT] = 0


def load_chained_inputs(chain: Tensor, ids: Tensor, positions: Tensor, ranges: Tensor) -> None:
    """Write the inputs of a one-row forward that appends the chain's last token."""
    _load_chained_inputs_kernel[(1,)](chain, ids, positions, ranges, num_warps=1)


def load_chained_inputs_plain(chain: Tensor, ids: Tensor, positions: Tensor, ranges: Tensor) -> None:
    """PyTorch reference of `load_chained_inputs`."""
    ids[0, 0] = chain[_LAST_TOKEN]
    positions[0, 0] = chain[_LENGTH]
    ranges[:, 0] = chain[_RANGE:_COUNT]


def append_token(chain: Tensor, token: Tensor, rows: int) -> None:
    """Append the token that a forward selected, and add the forward's rows to the KV length."""  # token: [] int64
    _append_token_kernel[(1,)](chain, token, rows, MAX=MAX_CHAINED_TOKENS, num_warps=1)


def append_token_plain(chain: Tensor, token: Tensor, rows: int) -> None:
    """PyTorch reference of `append_token`."""
    chain[_TOKENS + min(int(chain[_COUNT]), MAX_CHAINED_TOKENS - 1)] = chain[_LAST_TOKEN] = token
    chain[_LENGTH] += rows
    chain[_COUNT] += 1


def take_batch(ring: Tensor, cursor: Tensor, table: Tensor) -> None:
    """Copy the next entry of a ring in pinned memory into `table`, and advance the cursor.

    An entry holds the slot of each expert in a batch, and -1 for all others.
    """
    # ring: [entries, experts] int32, cursor: [1] int64 number of entries taken, table: [experts] int32
    count = len(table)
    _take_batch_kernel[(1,)](
        ring, cursor, table, ENTRIES=len(ring), COUNT=count, BLOCK=triton.next_power_of_2(count), num_warps=1
    )


def take_batch_plain(ring: Tensor, cursor: Tensor, table: Tensor) -> None:
    """PyTorch reference of `take_batch`."""
    table.copy_(ring[int(cursor) % len(ring)])
    cursor += 1


@triton.jit
def _load_inputs_kernel(
    host_inputs, chain, other, ids, positions, ranges, rows, sequences, share, PAD: tl.constexpr
):  # fmt: skip
    i = tl.arange(0, PAD)
    tokens = tl.load(host_inputs + i, mask=i < rows, other=0)
    pending = tl.load(other + 4 - tokens, mask=tokens < 0, other=0)
    tl.store(ids + i, tl.where(tokens < 0, pending, tokens), mask=i < rows)
    kv_length = tl.load(host_inputs + rows + sequences + i // share, mask=i < rows, other=0)
    tl.store(positions + i, kv_length + i % share, mask=i < rows)
    tl.store(ranges + i, tl.load(host_inputs + rows + i, mask=i < 3 * sequences), mask=i < 3 * sequences)
    first = tl.load(host_inputs + rows + i * sequences, mask=i < 3, other=0)  # start, length and capacity of the first
    tl.store(chain + 1 + i, first, mask=i < 4)  # and no tokens so far


@triton.jit
def _load_chained_inputs_kernel(chain, ids, positions, ranges):
    i = tl.arange(0, 4)
    tl.store(ids, tl.load(chain))
    tl.store(positions, tl.load(chain + 2))
    tl.store(ranges + i, tl.load(chain + 1 + i, mask=i < 3), mask=i < 3)


@triton.jit(do_not_specialize=["rows"])
def _append_token_kernel(chain, token, rows, MAX: tl.constexpr):
    count, new_token = tl.load(chain + 4), tl.load(token)
    tl.store(chain + 5 + tl.minimum(count, MAX - 1), new_token)
    tl.store(chain, new_token)
    tl.store(chain + 2, tl.load(chain + 2) + rows)
    tl.store(chain + 4, count + 1)


@triton.jit
def _take_batch_kernel(ring, cursor, table, ENTRIES: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    taken, i = tl.load(cursor), tl.arange(0, BLOCK)
    tl.store(table + i, tl.load(ring + (taken % ENTRIES) * COUNT + i, mask=i < COUNT), mask=i < COUNT)
    tl.store(cursor, taken + 1)
