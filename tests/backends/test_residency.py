"""The protocol between forwards that look their experts up on the device and the host, in generated interleavings.

`Device` is a plain model of the kernels in small steps. It runs a step at random points of the host's code: whenever
the host waits, submits a copy, or stands between its write of the table and its read of `started`. Copies run in small
steps too. Every read of an expert is compared, byte by byte, with the expert that the layer is routed to.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fake_cuda import FakeCudaDevice, FakeMemory, FakeSlots

pytest.importorskip("triton", reason="no triton")

from spmoe.backends import cuda_transfer, residency
from spmoe.backends.cuda_runtime import CopyRange
from spmoe.backends.cuda_transfer import CudaTransfer
from spmoe.backends.kernels import residency as kernels
from spmoe.backends.kernels.residency import ABORTED, ANSWERED, MISSING, REPORTED, STARTED, TICKET, TIMED_OUT
from spmoe.backends.residency import CudaResidency, FollowedForward, follow_layer
from spmoe.errors import TransferError
from spmoe.experts import access, run_ahead
from spmoe.experts.eviction import make_eviction
from spmoe.experts.experts import Experts
from spmoe.observe.clock import RealClock
from spmoe.types import ExpertKey, PrefetchRequest, PrefetchRequests

LAYERS, EXPERTS, TOP_K = 4, 6, 3
EVICTIONS = ("lru", "lru-per-layer", "draft-informed")
STEPS = 100_000  # after which a program that hangs fails


class SignalDevice(FakeCudaDevice):
    """Runs the program's other work whenever a copy is submitted."""

    def __init__(self, program: Program, memory: FakeMemory, seed: int) -> None:
        super().__init__(memory, seed=seed)
        self._program = program

    def copy(self, ranges: Sequence[CopyRange]) -> Any:
        self._program.run_others()
        return super().copy(ranges)

    def signal(self, copied: CopyRange) -> None:
        self._program.run_others()
        super().signal(copied)


class ForwardWork:
    """A forward on the compute stream."""

    def __init__(self, steps: Iterator[None]) -> None:
        self._steps = steps

    def step(self) -> bool:
        return next(self._steps, self) is self


class Program:
    """A random program of forwards, prefetches and aborted launches."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch, eviction: str = "lru") -> None:
        self.rng = random.Random(seed)
        slots = self.rng.randint(TOP_K + 1, 18)
        self.memory = FakeMemory(slots, 16, [EXPERTS] * LAYERS)
        self.device = SignalDevice(self, self.memory, seed)
        self.transfer = CudaTransfer(self.device, self.memory, chunk=16)
        monkeypatch.setattr(residency, "pinned_zeros", lambda *size, dtype=torch.int64: torch.zeros(*size, dtype=dtype))
        self.residency = CudaResidency([EXPERTS] * LAYERS, slots, torch.device("cpu"), self.transfer)
        self.residency._fence = self  # type: ignore[assignment]
        waiting = SimpleNamespace(sleep=lambda seconds: self.run_others(at_least=1), monotonic=lambda: 0.0)
        monkeypatch.setattr(residency, "time", waiting)
        for module in (residency, access, cuda_transfer, run_ahead):
            monkeypatch.setattr(module, "let_others_run", lambda: waiting.sleep(0))
        rules = make_eviction(eviction, [EXPERTS] * LAYERS)
        self.experts = Experts.build(
            FakeSlots(slots),
            self.transfer,
            rules,
            self.memory.nbytes,
            RealClock(),
            threaded=False,
            residency=self.residency,
        )
        self.steps = 0
        self.errors: list[str] = []
        self.reads = 0
        self.misses = 0

    # ---- the other side of the host

    def __enter__(self) -> None:
        """Stand in for the fence between the host's write and its read."""
        self.run_others()

    def __exit__(self, *error: object) -> None:
        self.run_others()

    def run_others(self, at_least: int = 0) -> None:
        """Run a few steps of copies and of the forward."""
        self.steps += 1
        assert self.steps < STEPS, "host and device wait for each other"
        copies = self.rng.choice([0.05, 0.5, 0.95])  # share of the steps: either side may be much faster
        for _ in range(max(at_least, self.rng.choice([0, 0, 1, 2, 5, 20]))):
            if self.rng.random() < copies:
                self.device.step_copies()
            else:
                self.device.step_compute()

    def device_forward(self, routing: Sequence[Sequence[int]]) -> Iterator[None]:
        """Run a forward as the kernels do, in small steps."""
        words, reports, answers, state, *_ = self.residency.buffers
        for layer, routed in enumerate(routing):
            ticket = int(state[TICKET]) + 1
            state[TICKET] = words[STARTED] = ticket
            yield
            slots = self.residency.table[layer][list(routed)].copy()
            yield
            report = reports[ticket % len(reports)]
            report[0, : len(routed)] = torch.tensor(routed, dtype=torch.int32)
            report[1, : len(routed)] = torch.from_numpy(slots)
            state[MISSING] = int((slots < 0).sum())
            yield
            words[REPORTED] = ticket
            yield
            yield from self.read(layer, routed, slots)
            if (slots < 0).any():
                self.misses += 1
                while state[ANSWERED] < ticket and words[ABORTED] < ticket:
                    yield
                if state[ANSWERED] >= ticket:
                    arrived = answers[ticket % len(answers)].numpy()[list(routed)].copy()
                    if not ((arrived >= 0) == (slots < 0)).all():
                        self.errors.append("an answer without a missing expert, or with another one")
                    yield from self.read(layer, routed, arrived)
        state[TICKET] += 1
        words[STARTED] = state[TICKET]
        yield
        words[REPORTED] = state[TICKET]

    def read(self, layer: int, routed: Sequence[int], slots: np.ndarray) -> Iterator[None]:
        """Read experts in slots, a part of each after the other."""
        for part in (slice(start, start + 2) for start in range(0, 16, 2)):
            for expert, slot in zip(routed, slots.tolist(), strict=True):
                if slot >= 0:
                    found, wanted = self.memory.content(slot)[part], self.memory.blobs[ExpertKey(layer, expert)][part]
                    if found != wanted:  # not raised here, in the middle of the host's code
                        self.errors.append(f"layer {layer} reads another expert than {expert} in slot {slot}")
                    self.reads += 1
                yield

    # ---- the host

    def run(self, forwards: int) -> None:
        """Run forwards, with prefetches before and during them; some are launched and never followed."""
        for number in range(forwards):
            self.experts.step.begin(number, lambda layer, experts: PrefetchRequests.of(self.guesses(layer)))
            if self.rng.random() < 0.5:
                self.experts.scheduler.request(PrefetchRequests.of(self.guesses(-1)))
            if self.rng.random() < 0.2:
                self.launch()
                self.experts.run_ahead.invalidate()
            self.launch()
            if self.rng.random() < 0.7:  # while the draft runs, say
                self.experts.scheduler.request(PrefetchRequests.of(self.guesses(-1)))
            assert self.residency.follow()
            self.experts.step.end()
        assert self.transfer._before_forward is None, "copies may wait for kernels again"
        self.device.finish()
        assert not self.errors

    def launch(self) -> None:
        routing = [sorted(self.rng.sample(range(EXPERTS), TOP_K)) for _ in range(LAYERS)]
        parts = self.experts.access, self.experts.run_ahead
        follows = [
            partial(follow_layer, self.residency, layer, *parts, TOP_K, [self.observe], None) for layer in range(LAYERS)
        ]
        self.residency.launch(FollowedForward(list(range(LAYERS)), list(follows)))
        running = [work for work in self.device._compute if isinstance(work, ForwardWork)]
        assert not running, "the forward before has not ended"
        self.device.add_compute(ForwardWork(self.device_forward(routing)))

    def observe(self) -> None:
        self.experts.scheduler.request(PrefetchRequests.of(self.guesses(-1)))
        self.run_others()

    def guesses(self, layer: int) -> list[PrefetchRequest]:
        """Return random prefetch requests for later layers."""
        later = [
            ExpertKey(other, e) for other in range(layer + 1, LAYERS) for e in range(EXPERTS) if self.rng.random() < 0.3
        ]
        return [PrefetchRequest(key, self.rng.random(), key.layer) for key in later]


@pytest.mark.parametrize("eviction", EVICTIONS)
@pytest.mark.parametrize("seed", range(40))
def test_no_layer_reads_another_expert(seed: int, eviction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program(seed, monkeypatch, eviction)
    program.run(12)
    counters = program.experts.ledger.counters
    assert program.reads > 0
    assert program.misses > 0
    assert counters.asked == 12 * LAYERS * TOP_K
    assert not any(entry.pins for entry in program.experts.pool._cache.entries())


def fails(monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether a program reads a wrong expert, or hangs."""
    for seed in range(60):
        with monkeypatch.context() as patch:
            try:
                Program(seed, patch, EVICTIONS[seed % len(EVICTIONS)]).run(12)
            except AssertionError:
                return True
    return False


def test_the_model_sees_a_victim_that_a_layer_still_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaResidency, "is_quiet", lambda self, layer: True)
    assert fails(monkeypatch)


def test_the_model_sees_a_check_before_the_table_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host must write the table first and read `started` then."""
    own = CudaResidency.is_quiet

    def stale(self: CudaResidency, layer: int) -> bool:
        """Answer for the time before the table was written: one ticket ago."""
        started = int(self._words[STARTED])
        self._words[STARTED] = max(started - 1, 0)
        try:
            return own(self, layer)
        finally:
            self._words[STARTED] = max(started, int(self._words[STARTED]))

    monkeypatch.setattr(CudaResidency, "is_quiet", stale)
    assert fails(monkeypatch)


def test_the_model_sees_an_answer_before_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def signal(self: CudaTransfer, copied: CopyRange) -> None:
        ctypes.memmove(*copied)

    monkeypatch.setattr(CudaTransfer, "signal", signal)
    assert fails(monkeypatch)


def test_the_model_sees_an_aborted_forward_that_nobody_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def abort(self: CudaResidency) -> None:
        if self._under_way:
            self._words[ABORTED] = self._last
            self._under_way = False
            self._transfer.end_forward()

    monkeypatch.setattr(CudaResidency, "abort", abort)
    assert fails(monkeypatch)


def test_a_failed_copy_ends_the_forward_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = 0
    for seed in range(20):
        with monkeypatch.context() as patch:
            program = Program(seed, patch)
            program.run(2)
            program.device.failing_copies = 1
            try:
                program.run(1)
            except TransferError:
                failures += 1
            assert not program.residency.under_way
            program.device.failing_copies = 0
            program.run(3)
    assert failures > 0


def test_no_prefetch_is_submitted_between_a_missing_expert_and_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is copied behind all that was submitted, and the device waits for it."""
    program = Program(1, monkeypatch)
    program.rng = random.Random(0)
    monkeypatch.setattr(SignalDevice, "copy", FakeCudaDevice.copy)
    monkeypatch.setattr(SignalDevice, "signal", lambda self, copied: self.log.append("answer"))
    device, one, access = program.device, program.residency, program.experts.access
    program.experts.step.begin(0, lambda layer, experts: PrefetchRequests.of([]))
    prefetches = [PrefetchRequest(ExpertKey(1, expert), 1.0, 1) for expert in range(4)]
    program.experts.scheduler.request(PrefetchRequests.of(prefetches))
    assert device.log == ["A[0:16]", "B[0:16]"], "the window is full, and two wait"
    device.run_copies(1)
    one.buffers.words[REPORTED] = 1
    one.buffers.reports[1, :, 0] = torch.tensor([5, -1])
    follow_layer(one, 0, access, program.experts.run_ahead, 1, [], None, 1)
    assert device.log[2:] == ["F[0:16]", "answer", "C[0:16]"]
    device.finish()


# ---- words in shared memory


def test_an_answer_names_no_expert_of_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Program(0, monkeypatch).residency
    one.answer(3, {1: 5, 4: 2}, computed=6)
    one.answer(3 + len(one.buffers.answers), {0: 7})
    assert one.buffers.answers[3].tolist() == [7, *[-1] * (EXPERTS - 1), 0]


def test_two_forwards_do_not_share_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that was aborted may still report while the host prepares the next one."""
    monkeypatch.setattr(residency, "pinned_zeros", lambda *size, dtype=torch.int64: torch.zeros(*size, dtype=dtype))
    transfer: Any = None
    buffers = CudaResidency([2] * 100, 4, torch.device("cpu"), transfer).buffers
    assert len(buffers.reports) == len(buffers.answers) >= 2 * (100 + 1)


def test_the_host_reads_started_behind_the_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its write of the table reaches the device only there; a layer that has begun by then may have read before."""
    one = Program(0, monkeypatch).residency
    one.launch(FollowedForward([2], []))
    assert one.is_quiet(2)

    class Fence:
        def __enter__(self) -> None:
            one.buffers.words[STARTED] = one.tickets - 1

        def __exit__(self, *error: object) -> None:
            pass

    one._fence = Fence()  # type: ignore[assignment]
    assert not one.is_quiet(2)
    assert one.is_quiet(1)
    one.buffers.words[REPORTED] = one.tickets
    one.abort()


# ---- trial and failures


class Stream:
    """A device whose kernels run one after the other beside the host; see `FakeMemory` for the copies."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(residency, "pinned_zeros", lambda *size, dtype=torch.int64: torch.zeros(*size, dtype=dtype))
        monkeypatch.setattr(residency, "_TRIAL_SECONDS", 1.0)
        self.loaded: list[tuple[str, int]] = []  # kernels, when they were launched first, and the last aborted ticket
        self._thread = ThreadPoolExecutor(1)
        transfer: Any = SimpleNamespace(
            begin_forward=lambda: None, end_forward=lambda: None, signal=lambda copied: ctypes.memmove(*copied)
        )
        self.residency = CudaResidency([2], 1, torch.device("cpu"), transfer)
        for name in ("check_residency", "end_forward"):
            monkeypatch.setattr(residency, name, partial(self.launch, name))
        capture = CudaResidency.capture

        @contextmanager
        def capture_and_wait(self_: CudaResidency) -> Iterator[FollowedForward]:
            with capture(self_) as forward:
                yield forward
                self._thread.submit(int).result()

        monkeypatch.setattr(CudaResidency, "capture", capture_and_wait)

    def launch(self, name: str, *args: Any, **options: Any) -> None:
        if name not in [known for known, _ in self.loaded]:
            self.loaded.append((name, int(self.residency.buffers.words[ABORTED])))
        self._thread.submit(partial(getattr(kernels, f"{name}_plain"), *args, **options))


def test_the_trial_loads_no_kernel_while_a_layer_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading may wait for the device, which would wait for the answer."""
    stream = Stream(monkeypatch)
    assert stream.residency.try_out() is None
    assert not stream.residency.under_way
    assert [name for name, aborted in stream.loaded if aborted > 100] == ["check_residency", "end_forward"]


def test_the_trial_fails_if_no_answer_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(monkeypatch)
    stream.residency._transfer.signal = lambda copied: None  # type: ignore[method-assign]
    assert "has not reached a layer" in (stream.residency.try_out() or "")
    assert not stream.residency.under_way


def test_a_forward_without_layers_has_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host does not count its tickets."""
    monkeypatch.setattr(residency, "end_forward", kernels.end_forward_plain)
    one = Program(0, monkeypatch).residency
    with one.capture():
        one.end()
    assert one.buffers.state[TICKET] == one.tickets == 0


def test_a_device_that_is_broken_or_idle_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    one, now = Program(0, monkeypatch).residency, iter(range(1000))
    monkeypatch.setattr(
        residency, "time", SimpleNamespace(sleep=lambda seconds: None, monotonic=lambda: next(now) / 20)
    )
    one._stream = SimpleNamespace(query=lambda: True)  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="has not run a forward"):
        one.wait_for_report(1)
    one._stream = SimpleNamespace(query=lambda: 1 / 0)  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        one.wait_for_report(1)
    one._stream = SimpleNamespace(query=lambda: False)  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="for 20 s"):
        one.wait_for_report(1, 20.0)


def test_a_forward_that_has_given_up_is_aborted_and_not_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(20):
        with monkeypatch.context() as patch:
            program = Program(seed, patch)
            program.run(1)
            program.launch()
            program.residency._words[TIMED_OUT] = program.residency._first
            assert not program.residency.follow()
            assert not program.residency.under_way
            program.run(2)
