"""Captured forwards that look up on the device whether the experts they need are in slots; the host follows behind.

The table of residents, `table[layer, expert]` = slot or -1, is in pinned memory. The host alone writes it: the slot
once an expert's copy has ended, -1 before its slot is given away. A forward is one graph. Each of its layers has a
ticket, a number that grows by one from layer to layer, and the forward's end has one too.

    device, at a layer's router                          host, behind it
    1. started = ticket                                  a. wait until reported >= ticket
    2. read the layer's row of the table                 b. count the routed experts as used
    3. report routed experts and their slots;            c. if some are missing: load them, write their slots to
       reported = ticket                                    answers[ticket], and put a copy of the ticket number to
    4. run the resident experts                             `answered` on the copy stream, behind the experts
    5. if some are missing: wait until
       answered >= ticket, and run them

With a CPU path, c. may leave some experts to it; their results are in pinned memory before `answered` is copied, and
a kernel after step 5 adds them.

When is a slot free to be overwritten? Tickets run one after the other on one stream, so `started >= t` means that all
kernels of earlier tickets have finished. Only kernels of a layer read experts of that layer.

- For a prefetch, the host sets the victim's entry to -1 and then reads `started`. If a ticket of the victim's layer is
  under way, it may have read the old entry: the host writes the entry back and takes a victim of another layer.
  Otherwise every later ticket reads -1, since steps 1 and 2 are ordered by a fence as the host's two accesses are: the
  slot is free.
- For a missing expert, the device waits in step 5 of this ticket. All earlier kernels have finished, this ticket reads
  only experts that it is routed to, and those are pinned: every other slot is free.
- A forward that nobody follows (`abort`) waits for no expert. The host waits for its last ticket before it goes on.

No kernel may be loaded, and nobody may wait for the compute stream, while a layer waits for the host. Whatever breaks
this rule waits for a few seconds only: then the layer gives up (`TIMED_OUT`), and the forward runs once more.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from spmoe.backends.base import MAX_KERNEL_ROWS
from spmoe.backends.cuda_runtime import CopyRange
from spmoe.backends.devices import pinned_zeros
from spmoe.backends.kernels.residency import (
    ABORTED,
    ANSWERED,
    COMPUTED,
    REPORTED,
    STALLED_NS,
    STARTED,
    STATE,
    TICKET,
    TIMED_OUT,
    WORDS,
    ResidencyBuffers,
    await_missing,
    check_residency,
    end_forward,
)
from spmoe.errors import reason
from spmoe.experts.access import ExpertAccess
from spmoe.experts.cpu_path import CpuLayer
from spmoe.experts.run_ahead import RunAhead
from spmoe.experts.transfer import DeviceEvent
from spmoe.interpreter import let_others_run

_NEVER_WAIT = 2**62  # as the last aborted ticket: no layer waits
_POLL_SECONDS = 4e-5  # between two looks at the device while no expert is missing
_MAX_TOP_K = 16
_REPORT_SECONDS = 60.0  # longest wait for a layer of a device that is busy
_TRIAL_SECONDS = 10.0
_CHECK_SECONDS = 0.1  # between two looks whether the device is still busy
_STRONGLY_ORDERED = ("x86_64", "AMD64")  # others see the writes of a core in their order

Follow = Callable[[int], None]  # given a ticket, the host's part of its layer


class SignalStream(Protocol):
    """The transfer, as `CudaResidency` uses it."""

    def begin_forward(self) -> None:
        """A forward is launched next that may wait for copies; copies must not wait for it."""
        ...

    def end_forward(self) -> None:
        """The forward waits for no copy any more."""
        ...

    def signal(self, copied: CopyRange) -> None:
        """Submit a small copy behind all copies that were submitted."""
        ...


@dataclass
class FollowedForward:
    """The layers of a captured forward, in order."""

    layers: list[int] = field(default_factory=list)
    follows: list[Follow] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LayerReport:
    """Routed experts of a layer, as the device has found them."""

    routed: np.ndarray  # [pairs] int32, row by row
    experts: list[int]  # the same, sorted
    missing: list[int]  # those that were not resident


class Reported:
    """A device event: the device has reported a ticket."""

    def __init__(self, residency: CudaResidency, ticket: int) -> None:
        self._residency = residency
        self._ticket = ticket

    def query(self) -> bool:
        return self._residency.has_reported(self._ticket)

    def synchronize(self) -> None:
        self._residency.wait_for_report(self._ticket)


class CudaResidency:
    """Table of residents, reports and answers. Only the thread that launches kernels uses it."""

    def __init__(self, experts: Sequence[int], slot_count: int, device: torch.device, transfer: SignalStream) -> None:
        # experts: number of experts of each layer
        self._experts = list(experts)
        self._slot_count = slot_count
        self._transfer = transfer
        self._rows = pinned_zeros(len(experts), max(experts), dtype=torch.int32)
        self.table = self._rows.numpy()
        self.table.fill(-1)
        entries = max(64, 2 * (len(experts) + 1))  # a forward that is not followed is the only one
        self.buffers = ResidencyBuffers(
            words=pinned_zeros(WORDS),
            reports=pinned_zeros(entries, 2, MAX_KERNEL_ROWS * _MAX_TOP_K, dtype=torch.int32),
            answers=pinned_zeros(entries, max(experts) + 1, dtype=torch.int32),
            state=torch.zeros(STATE, dtype=torch.int64, device=device),
            resident=torch.full((max(experts),), -1, dtype=torch.int32, device=device),
            arrived=torch.full((max(experts),), -1, dtype=torch.int32, device=device),
        )
        self._words, self._reports = self.buffers.words.numpy(), self.buffers.reports.numpy()
        self._answers = self.buffers.answers.numpy()
        self._numbers = pinned_zeros(entries)  # sources of the copies to `answered`
        self._first = 1  # ticket of the forward that was launched last
        self._last = 0  # its last ticket, which is that of its end
        self._forward = FollowedForward()
        self._stream: torch.cuda.Stream | None = None  # that it was launched on
        self._under_way = False  # launched and neither followed to its end nor aborted
        self._missed = False  # an expert was missing in this forward
        self._missed_before = False  # the same of the forward before
        self._capturing: FollowedForward | None = None
        self._refused = False
        self._fence = threading.Lock()
        self._stalled_ns = 0

    def try_out(self) -> str | None:
        """Let a layer miss an expert and answer it; return why that does not work here, or None."""
        if platform.machine() not in _STRONGLY_ORDERED:
            return f"it was not made for the memory order of {platform.machine()}"
        if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
            return "CUDA_LAUNCH_BLOCKING is set"
        index = torch.zeros(1, 1, dtype=torch.int64, device=self.buffers.state.device)

        def run() -> None:
            check_residency(index, self._rows[0, : self._experts[0]], self.buffers, waits=True)
            end_forward(self.buffers)

        try:
            with self.capture():  # compile and load the kernels while no layer waits: loading may wait for the device
                run()
            self.launch(FollowedForward([0]))
            run()
            self.wait_for_report(self._first, _TRIAL_SECONDS)
            self.answer(self._first, {0: 0})
            self.wait_for_report(self._last, _TRIAL_SECONDS)
            found = int(self.buffers.resident[0])
            self._under_way = False
            self._transfer.end_forward()
        except Exception as error:  # of the compiler, the driver or the device
            with suppress(Exception):
                self.resync()
            return reason(error)
        return None if found == 0 else f"the device has read slot {found} instead of 0"

    # ---- capture

    @contextmanager
    def capture(self) -> Iterator[FollowedForward]:
        """Capture a forward inside; the object is empty if its layers need the host between graphs."""
        forward, self._refused = FollowedForward(), False
        self.abort()
        self._words[ABORTED] = _NEVER_WAIT
        try:
            self._capturing = forward
            yield forward
        finally:
            self._capturing = None
            self._last = int(self.buffers.state[TICKET])  # waits for the device
            self._words[ABORTED] = self._last
            if self._refused:
                forward.layers, forward.follows = [], []

    def takes(self, rows: int, top_k: int, layer: int) -> bool:
        """Return whether the forward that is captured or replayed is served: experts that a layer misses fit in slots.

        If it does not serve one layer, it serves none of the forward.
        """
        most = min(rows * top_k, self._experts[layer])
        if rows > MAX_KERNEL_ROWS or top_k > _MAX_TOP_K or most >= self._slot_count:
            self.refuse()
        return not self._refused

    def refuse(self) -> None:
        """Do not serve the forward that is captured now."""
        if self._capturing is not None:
            self._refused = True

    def restart(self) -> None:
        """Begin the layers again: a forward runs once for warm-up and once for capture."""
        if self._capturing is not None:
            self._capturing.layers, self._capturing.follows = [], []

    def check(self, layer: int, index: Tensor, follow: Follow, *, waits: bool) -> Tensor:
        """Launch a layer's look at the table; return the slots of its resident experts.

        With `waits`, these include missing experts, for which the device waits; else `await_missing` does so.
        """
        if self._capturing is not None:
            self._capturing.layers.append(layer)
            self._capturing.follows.append(follow)
        row = self._rows[layer, : self._experts[layer]]
        check_residency(index, row, self.buffers, waits=waits)
        return self.buffers.resident

    def await_missing(self, layer: int) -> Tensor:
        """Launch the wait for a layer's missing experts; return their slots."""
        await_missing(self._rows[layer, : self._experts[layer]], self.buffers)
        return self.buffers.arrived

    @property
    def computed(self) -> Tensor:
        """Number of results of the CPU that the layer adds, on the device."""  # [1]
        return self.buffers.state[COMPUTED : COMPUTED + 1]

    def end(self) -> None:
        """Launch the end of a forward."""
        if not self._refused and (self._capturing is None or self._capturing.layers):
            end_forward(self.buffers)

    # ---- replay

    @property
    def tickets(self) -> int:
        """Number of the last ticket that was given out."""
        return self._last

    @property
    def under_way(self) -> bool:
        """Whether a forward is launched that waits for missing experts."""
        return self._under_way

    def launch(self, forward: FollowedForward) -> None:
        """Note that this forward is launched next."""
        self.abort()
        self._transfer.begin_forward()
        self._forward = forward
        if (device := self.buffers.state.device).type == "cuda":
            self._stream = torch.cuda.current_stream(device)
        self._words[ABORTED] = self._last  # a capture that failed may have left a later ticket
        self._first = self._last + 1
        self._last += len(forward.layers) + 1
        self._under_way = True

    def follow(self) -> bool:
        """Do the host's part of every layer, as the device reports them; return when the device has left the last.

        False: a layer has waited too long for its experts, and the results are wrong.
        """
        try:
            self._missed_before, self._missed = self._missed, False
            for number, follow in enumerate(self._forward.follows):
                if self._has_timed_out:
                    break
                follow(self._first + number)
            else:
                self.wait_for_report(self._last)
        except BaseException:
            self.abort()
            raise
        if self._has_timed_out:
            self.abort()
            return False
        self._under_way = False
        self._transfer.end_forward()
        return True

    @property
    def _has_timed_out(self) -> bool:
        return bool(self._words[TIMED_OUT] >= self._first)

    def reported(self, ticket: int) -> Reported:
        """Return the event that the device has reported this ticket."""
        return Reported(self, ticket)

    def has_reported(self, ticket: int) -> bool:
        return bool(self._words[REPORTED] >= ticket)

    def wait_for_report(self, ticket: int, seconds: float = _REPORT_SECONDS) -> None:
        """Wait until the device has reported a ticket; look often if experts were missing lately, and at the end."""
        started = checked = time.monotonic()
        while not self.has_reported(ticket):
            now = time.monotonic()
            if now - started > seconds:
                raise RuntimeError(f"the device has not reached a layer for {seconds:g} s")
            if now - checked > _CHECK_SECONDS:
                checked = now
                if self._is_idle() and not self.has_reported(ticket):
                    raise RuntimeError("the device has not run a forward that was launched")
            if self._missed or self._missed_before or ticket == self._last:
                let_others_run()
            else:
                time.sleep(_POLL_SECONDS)

    def _is_idle(self) -> bool:
        """Return whether the device has finished all that was launched; raise its error if it is broken."""
        return self._stream is not None and self._stream.query()

    def report(self, ticket: int, pairs: int) -> LayerReport:
        """Return what the device has found in the layer of a ticket, which is routed to so many (row, expert) pairs."""
        experts, slots = self._reports[ticket % len(self._reports), :, :pairs]
        missing = sorted(set(experts[slots < 0].tolist()))
        self._missed = self._missed or bool(missing)
        return LayerReport(experts.copy(), sorted(set(experts.tolist())), missing)

    def answer(self, ticket: int, slots: dict[int, int], computed: int = 0) -> None:
        """Let the device run the missing experts, which are in these slots, once all submitted copies have ended.

        `computed`: number of results of the CPU that it adds.
        """
        entry = ticket % len(self._answers)
        row = self._answers[entry]
        row.fill(-1)
        row[list(slots)] = list(slots.values())
        row[-1] = computed
        self._numbers[entry] = ticket
        state, numbers = self.buffers.state, self._numbers
        to = state.data_ptr() + ANSWERED * state.element_size()
        self._transfer.signal(
            CopyRange(to, numbers.data_ptr() + entry * numbers.element_size(), numbers.element_size())
        )

    def is_quiet(self, layer: int) -> bool:
        if not self._under_way:
            return True
        with self._fence:  # the write of the table must come before the read: a lock is a full fence
            pass
        started = int(self._words[STARTED])
        if not self._first <= started < self._last:
            return True
        return self._forward.layers[started - self._first] != layer

    def abort(self) -> None:
        if not self._under_way:
            return
        self._words[ABORTED] = self._last
        self.wait_for_report(self._last)
        self._under_way = False
        self._transfer.end_forward()

    def take_stall_seconds(self) -> float:
        """Return how long layers have waited for missing experts since the last call."""
        total = int(self._words[STALLED_NS])
        seconds, self._stalled_ns = (total - self._stalled_ns) / 1e9, total
        return seconds

    def resync(self) -> None:
        """Count tickets as the device does, after a launch that failed."""
        self._words[ABORTED] = _NEVER_WAIT
        self._last = int(self.buffers.state[TICKET])  # waits for the device
        self._words[ABORTED] = self._last
        self._under_way = False
        self._transfer.end_forward()


def follow_layer(
    residency: CudaResidency,
    layer: int,
    access: ExpertAccess,
    run_ahead: RunAhead,
    pairs: int,  # (row, expert) pairs that the layer is routed to
    observations: Sequence[Callable[[], None]],  # hidden states to show to the prefetch policy
    cpu_layer: Callable[[np.ndarray, DeviceEvent], CpuLayer] | None,  # given: routed experts, and that they are known
    ticket: int,
) -> None:
    """Do the host's part of a layer: count its experts as used; load those that are missing, or compute them."""
    reported = residency.reported(ticket)
    run_ahead.wait_and_prefetch(reported)
    report = residency.report(ticket, pairs)
    on_cpu = cpu_layer(report.routed, reported) if cpu_layer is not None and report.missing else None
    demand, slots, computed = access.follow(layer, report.experts, report.missing, on_cpu)
    try:
        if report.missing:
            residency.answer(ticket, slots, computed)
        with run_ahead.reading_predictions():
            access.routed(layer, report.experts)
            for observe in observations:
                observe()
        run_ahead.submit_prefetches(residency.reported(ticket + 1))  # a chunk at least, even if the device is ahead
    finally:
        access.end_follow(demand)  # until the next ticket is reported, prefetches leave the layer's experts alone
