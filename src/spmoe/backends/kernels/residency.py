"""Kernels that compare a layer's routed experts with the residency table, and wait for the host if one is missing.

`backends/residency.py` explains the protocol between these kernels and the host.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import time
from typing import NamedTuple

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from spmoe.interpreter import let_others_run

# longest wait for the host, which answers in milliseconds; a device with a display ends kernels that take 5 s
WAIT_SECONDS = 4.0

# offsets in `words`; the kernels below repeat the numbers
STARTED, REPORTED, ABORTED, STALLED_NS, TIMED_OUT, WORDS = 0, 1, 2, 3, 4, 5
# offsets in `state`
TICKET, ANSWERED, MISSING, COMPUTED, STALLED, STATE = 0, 1, 2, 3, 4, 5


class ResidencyBuffers(NamedTuple):
    """Memory that the device and the host share."""

    words: Tensor  # [WORDS] int64, pinned
    reports: Tensor  # [entries, 2, pairs] int32, pinned: routed experts and their slots, by ticket
    # [entries, experts + 1] int32, pinned: slots of the experts that were missing, by ticket, and the number of results
    # that the CPU has computed
    answers: Tensor
    state: Tensor  # [STATE] int64 on the device; the copy stream writes ANSWERED
    resident: Tensor  # [experts] int32 on the device: slots of the layer's resident experts
    arrived: Tensor  # [experts] int32 on the device: slots of those that were missing


def check_residency(index: Tensor, row: Tensor, buffers: ResidencyBuffers, *, waits: bool) -> None:
    """Begin a ticket: look the routed experts up in the layer's row of the table, and report them to the host.

    With `waits`, also wait for missing experts and add them to `resident`; else call `await_missing` later.
    """
    # index: [rows, top_k] int64; row: [experts] int32, pinned
    pairs, experts = index.numel(), len(row)
    _check_residency_kernel[(1,)](
        index.contiguous(),
        row,
        *buffers,
        PAIRS=pairs,
        PAIR_BLOCK=triton.next_power_of_2(pairs),
        MAX_PAIRS=buffers.reports.shape[2],
        EXPERTS=experts,
        EXPERT_BLOCK=triton.next_power_of_2(experts),
        WIDTH=buffers.answers.shape[1],
        ENTRIES=len(buffers.answers),
        WAITS=waits,
        LIMIT_NS=int(WAIT_SECONDS * 1e9),
        num_warps=1,
    )


def check_residency_plain(index: Tensor, row: Tensor, buffers: ResidencyBuffers, *, waits: bool) -> None:
    """PyTorch reference of `check_residency`."""
    words, reports, _, state, resident, _ = buffers
    ticket = int(state[TICKET]) + 1
    state[TICKET] = ticket
    words[STARTED] = ticket
    resident[: len(row)] = row
    experts = index.flatten()
    slots = resident[experts]
    state[MISSING], state[COMPUTED] = int((slots < 0).sum()), 0
    report = reports[ticket % len(reports)]
    report[0, : len(experts)] = experts.to(torch.int32)
    report[1, : len(experts)] = slots
    words[REPORTED] = ticket
    if waits:
        answer = _wait_plain(buffers)[: len(row)].to(resident.device)
        resident[: len(row)] = torch.where(answer >= 0, answer, resident[: len(row)])


def await_missing(row: Tensor, buffers: ResidencyBuffers) -> None:
    """Wait for the experts that the ticket's layer has missed, if any, and write their slots to `arrived`."""
    experts = len(row)
    _await_missing_kernel[(1,)](
        *buffers,
        EXPERTS=experts,
        EXPERT_BLOCK=triton.next_power_of_2(experts),
        WIDTH=buffers.answers.shape[1],
        ENTRIES=len(buffers.answers),
        LIMIT_NS=int(WAIT_SECONDS * 1e9),
        num_warps=1,
    )


def await_missing_plain(row: Tensor, buffers: ResidencyBuffers) -> None:
    """PyTorch reference of `await_missing`."""
    buffers.arrived[: len(row)] = _wait_plain(buffers)[: len(row)]


def end_forward(buffers: ResidencyBuffers) -> None:
    """Begin the last ticket of a forward: all kernels that read experts have finished."""
    _end_forward_kernel[(1,)](buffers.words, buffers.state, num_warps=1)


def end_forward_plain(buffers: ResidencyBuffers) -> None:
    """PyTorch reference of `end_forward`."""
    words, _, _, state, _, _ = buffers
    ticket = int(state[TICKET]) + 1
    state[TICKET] = ticket
    words[STARTED] = ticket
    words[REPORTED] = ticket


def _wait_plain(buffers: ResidencyBuffers) -> Tensor:
    words, _, answers, state, _, _ = buffers
    ticket, started = int(state[TICKET]), time.monotonic()
    if int(state[MISSING]) == 0:
        return torch.full_like(answers[0], -1)
    while int(state[ANSWERED]) < ticket and int(words[ABORTED]) < ticket:
        if time.monotonic() - started > WAIT_SECONDS:
            words[TIMED_OUT] = ticket
            break
        let_others_run()
    state[STALLED] += int((time.monotonic() - started) * 1e9)
    words[STALLED_NS] = state[STALLED]
    if int(state[ANSWERED]) < ticket:
        return torch.full_like(answers[0], -1)
    answer = answers[ticket % len(answers)].clone()
    state[COMPUTED] = answer[-1]
    return answer


@triton.jit
def _fence():
    """Order all accesses of the program before it, seen from the whole system, before all behind it."""
    tl.debug_barrier()
    tl.inline_asm_elementwise("fence.sc.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()


@triton.jit
def _light_fence():
    """Order writes before it, seen from the whole system, before writes behind it, and reads likewise."""
    tl.debug_barrier()
    tl.inline_asm_elementwise("fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()


@triton.jit
def _nanoseconds():
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _wait_for_answer(
    words, answers, state, ticket, i,
    EXPERTS: tl.constexpr, WIDTH: tl.constexpr, ENTRIES: tl.constexpr, LIMIT_NS: tl.constexpr,
):  # fmt: skip
    """Poll until the host has answered or aborted this ticket; return the answer, or -1 for every expert."""
    started = _nanoseconds()
    now = started
    answered = tl.load(state + 1, volatile=True)
    aborted = tl.load(words + 2, volatile=True)
    while (answered < ticket) & (aborted < ticket) & (now - started < LIMIT_NS):
        answered = tl.load(state + 1, volatile=True)
        aborted = tl.load(words + 2, volatile=True)
        now = _nanoseconds()
    if (answered < ticket) & (aborted < ticket):
        tl.store(words + 4, ticket)
    _light_fence()
    answer = answers + (ticket % ENTRIES) * WIDTH
    slots = tl.load(answer + i, mask=(i < EXPERTS) & (answered >= ticket), other=-1, volatile=True)
    computed = tl.load(answer + WIDTH - 1, mask=answered >= ticket, other=0, volatile=True)
    tl.store(state + 3, computed.to(tl.int64))
    stalled = tl.load(state + 4) + (_nanoseconds() - started)  # on the device: a read over the link takes a microsecond
    tl.store(state + 4, stalled)
    tl.store(words + 3, stalled)
    return slots


@triton.jit
def _check_residency_kernel(
    index, row, words, reports, answers, state, resident, arrived,
    PAIRS: tl.constexpr, PAIR_BLOCK: tl.constexpr, MAX_PAIRS: tl.constexpr,
    EXPERTS: tl.constexpr, EXPERT_BLOCK: tl.constexpr, WIDTH: tl.constexpr, ENTRIES: tl.constexpr,
    WAITS: tl.constexpr, LIMIT_NS: tl.constexpr,
):  # fmt: skip
    ticket = tl.load(state) + 1
    tl.debug_barrier()
    tl.store(state, ticket)
    tl.store(words, ticket)  # before the table is read: see `CudaResidency.is_quiet`
    _fence()
    i = tl.arange(0, EXPERT_BLOCK)
    slots = tl.load(row + i, mask=i < EXPERTS, other=-1, volatile=True)
    tl.store(resident + i, slots, mask=i < EXPERTS)
    tl.debug_barrier()
    pair = tl.arange(0, PAIR_BLOCK)
    expert = tl.load(index + pair, mask=pair < PAIRS, other=0)
    slot = tl.load(resident + expert, mask=pair < PAIRS, other=0)
    missing = tl.sum((slot < 0).to(tl.int32), axis=0)
    tl.store(state + 2, missing.to(tl.int64))
    tl.store(state + 3, missing.to(tl.int64) * 0)
    report = reports + (ticket % ENTRIES) * (2 * MAX_PAIRS)
    tl.store(report + pair, expert.to(tl.int32), mask=pair < PAIRS)
    tl.store(report + MAX_PAIRS + pair, slot, mask=pair < PAIRS)
    _light_fence()
    tl.store(words + 1, ticket)
    if WAITS:  # noqa: SIM102, known when the kernel is compiled
        if missing > 0:
            answer = _wait_for_answer(words, answers, state, ticket, i, EXPERTS, WIDTH, ENTRIES, LIMIT_NS)
            tl.store(resident + i, tl.where(answer >= 0, answer, slots), mask=i < EXPERTS)


@triton.jit
def _await_missing_kernel(
    words, reports, answers, state, resident, arrived,
    EXPERTS: tl.constexpr, EXPERT_BLOCK: tl.constexpr, WIDTH: tl.constexpr, ENTRIES: tl.constexpr,
    LIMIT_NS: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, EXPERT_BLOCK)
    tl.store(arrived + i, tl.full((EXPERT_BLOCK,), -1, tl.int32), mask=i < EXPERTS)
    if tl.load(state + 2) > 0:
        answer = _wait_for_answer(words, answers, state, tl.load(state), i, EXPERTS, WIDTH, ENTRIES, LIMIT_NS)
        tl.store(arrived + i, answer, mask=i < EXPERTS)


@triton.jit
def _end_forward_kernel(words, state):
    ticket = tl.load(state) + 1
    tl.debug_barrier()
    tl.store(state, ticket)
    tl.store(words, ticket)
    _light_fence()
    tl.store(words + 1, ticket)
