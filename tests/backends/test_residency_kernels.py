"""Kernels of the residency check against their PyTorch references."""

from __future__ import annotations

import pytest
import torch
from kernel_helpers import DEVICE, INTERPRETED, KERNEL_MARKS
from torch import Tensor

from spmoe.backends.kernels import residency
from spmoe.backends.kernels.residency import (
    ABORTED,
    ANSWERED,
    COMPUTED,
    REPORTED,
    STARTED,
    STATE,
    TICKET,
    TIMED_OUT,
    WORDS,
    ResidencyBuffers,
)

pytestmark = KERNEL_MARKS
triton, tl = pytest.importorskip("triton"), pytest.importorskip("triton.language")
ENTRIES, PAIRS, WIDEST = 4, 32, 24
NEVER = 2**62


@triton.jit
def _plain_fence():
    tl.debug_barrier()


@triton.jit
def _plain_nanoseconds():
    return tl.full((), 0, tl.int64)


@pytest.fixture(autouse=True)
def _plain_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace inline assembly where the interpreter runs the kernels."""
    if INTERPRETED:
        for name in ("_fence", "_light_fence"):
            monkeypatch.setattr(residency, name, _plain_fence)
        monkeypatch.setattr(residency, "_nanoseconds", _plain_nanoseconds)


def shared(*size: int, dtype: torch.dtype, value: int = 0) -> Tensor:
    """Return host memory that the device can read and write."""
    tensor = torch.full(size, value, dtype=dtype)
    return tensor if INTERPRETED else tensor.pin_memory()


def make_buffers(ticket: int, answered: int = 0, aborted: int = 0) -> ResidencyBuffers:
    """Return the buffers of a residency check whose last ticket was `ticket`."""
    buffers = ResidencyBuffers(
        words=shared(WORDS, dtype=torch.int64),
        reports=shared(ENTRIES, 2, PAIRS, dtype=torch.int32, value=-7),
        answers=shared(ENTRIES, WIDEST + 1, dtype=torch.int32, value=-1),
        state=torch.zeros(STATE, dtype=torch.int64, device=DEVICE),
        resident=torch.full((WIDEST,), -7, dtype=torch.int32, device=DEVICE),
        arrived=torch.full((WIDEST,), -7, dtype=torch.int32, device=DEVICE),
    )
    buffers.state[TICKET], buffers.state[ANSWERED] = ticket, answered
    buffers.state[COMPUTED] = 9  # of a layer before
    buffers.words[ABORTED] = aborted
    return buffers


def wait() -> None:
    if not INTERPRETED:
        torch.cuda.synchronize()


def same(found: ResidencyBuffers, expected: ResidencyBuffers) -> bool:
    """Compare everything but the time of the stalls."""
    for one in (found, expected):
        one.words[residency.STALLED_NS] = one.state[residency.STALLED] = 0
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(found, expected, strict=True))


def table_row(experts: int, missing: list[int]) -> Tensor:
    row = shared(experts, dtype=torch.int32)
    row[:] = torch.arange(experts, dtype=torch.int32) + 100
    row[missing] = -1
    return row


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(("rows", "top_k", "experts"), [(1, 2, 8), (5, 3, 24), (1, 1, 1)])
@pytest.mark.parametrize("ticket", [0, 77])
def test_a_layer_whose_experts_are_resident_does_not_wait(
    rows: int, top_k: int, experts: int, ticket: int, waits: bool
) -> None:
    index = torch.randint(experts, (rows, top_k), device=DEVICE)
    not_routed = sorted(set(range(experts)) - set(index.flatten().tolist()))
    row, found, expected = table_row(experts, not_routed), make_buffers(ticket), make_buffers(ticket)
    residency.check_residency(index, row, found, waits=waits)
    residency.await_missing(row, found)
    wait()
    residency.check_residency_plain(index.cpu(), row, expected, waits=waits)
    residency.await_missing_plain(row, expected)
    assert same(found, expected)
    assert found.words[STARTED] == found.words[REPORTED] == found.state[TICKET] == ticket + 1
    assert found.reports[(ticket + 1) % ENTRIES, 0, : index.numel()].tolist() == index.flatten().tolist()
    assert found.resident[:experts].tolist() == row.tolist()
    assert found.arrived[:experts].tolist() == [-1] * experts
    assert found.state[COMPUTED] == 0


@pytest.mark.parametrize("ticket", [0, 3])
@pytest.mark.parametrize("waits", [False, True])
def test_missing_experts_are_found_where_the_answer_says(ticket: int, waits: bool) -> None:
    index, row = torch.tensor([[0, 5], [2, 5], [9, 1]], device=DEVICE), table_row(10, [2, 5, 7])
    found, expected = (make_buffers(ticket, answered=ticket + 1) for _ in range(2))
    for one in (found, expected):
        one.answers[(ticket + 1) % ENTRIES, [2, 5, -1]] = torch.tensor([41, 43, 6], dtype=torch.int32)
    residency.check_residency(index, row, found, waits=waits)
    residency.await_missing(row, found)
    wait()
    residency.check_residency_plain(index, row, expected, waits=waits)
    residency.await_missing_plain(row, expected)
    assert same(found, expected)
    assert found.state[COMPUTED] == 6
    assert found.arrived[:10].tolist() == [-1, -1, 41, -1, -1, 43, -1, -1, -1, -1]
    assert found.resident[[2, 5, 7]].tolist() == ([41, 43, -1] if waits else [-1, -1, -1])
    slots = found.reports[(ticket + 1) % ENTRIES, 1, : index.numel()]
    assert slots.tolist() == [100, -1, -1, -1, 109, 101], "the report is that of the table"


@pytest.mark.parametrize(("aborted", "timed_out"), [(NEVER, False), (1, False), (0, True)])
@pytest.mark.parametrize("waits", [False, True])
def test_a_layer_without_an_answer_goes_on_without_its_missing_experts(
    aborted: int, timed_out: bool, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if timed_out:
        monkeypatch.setattr(residency, "WAIT_SECONDS", -1e-9 if INTERPRETED else 1e-3)
    index, row, buffers = torch.tensor([[0, 2]], device=DEVICE), table_row(4, [2]), make_buffers(0, aborted=aborted)
    buffers.answers[:] = 55  # of another ticket
    residency.check_residency(index, row, buffers, waits=waits)
    residency.await_missing(row, buffers)
    wait()
    assert buffers.resident[:4].tolist() == [100, 101, -1, 103]
    assert buffers.arrived[:4].tolist() == [-1] * 4
    assert buffers.state[COMPUTED] == 0
    assert buffers.words[TIMED_OUT] == (1 if timed_out else 0)


def test_the_end_of_a_forward_has_a_ticket() -> None:
    buffers = make_buffers(6)
    residency.end_forward(buffers)
    wait()
    assert buffers.words[STARTED] == buffers.words[REPORTED] == buffers.state[TICKET] == 7
