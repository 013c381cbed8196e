"""What a recorded forward is told anew: tokens and their positions, read by the device from page-locked memory.

A copy would queue behind experts on their way to the device; a kernel's few reads do not.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor


def stage(inbox: Tensor, ids: Tensor, positions: Tensor, length: Tensor) -> None:
    """Spread the inbox (tokens, then how many came before them) over a forward's inputs."""
    # inbox: [rows + 1] int64, page-locked; ids, positions: [1, rows] int64; length: [1] int64
    rows = ids.shape[1]
    _stage_kernel[(1,)](inbox, ids, positions, length, rows, PAD=triton.next_power_of_2(rows), num_warps=1)


def stage_plain(inbox: Tensor, ids: Tensor, positions: Tensor, length: Tensor) -> None:
    """What `stage` does."""
    rows = ids.shape[1]
    ids[0] = inbox[:rows]
    length[0] = inbox[rows]
    positions[0] = inbox[rows] + inbox.new_tensor(range(rows))


@triton.jit
def _stage_kernel(inbox, ids, positions, length, rows, PAD: tl.constexpr):
    at = tl.arange(0, PAD)
    held = tl.load(inbox + rows)
    tl.store(ids + at, tl.load(inbox + at, mask=at < rows, other=0), mask=at < rows)
    tl.store(positions + at, held + at, mask=at < rows)
    tl.store(length, held)
