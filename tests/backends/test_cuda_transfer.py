"""Copies on their own stream: right bytes, demands before prefetches, and no slot read or overwritten too early.

The copies run on a fake device; read tests/fake_cuda.py first.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fake_cuda import (
    TIMEOUT,
    UNINITIALIZED,
    CheckedTransfer,
    FakeCudaDevice,
    FakeMemory,
    FakeSlots,
    engine_threads,
    run_with_timeout,
)
from spmoe.backends.cuda_runtime import CopyRange
from spmoe.backends.cuda_transfer import CudaCopyHandle, CudaTransfer, chunk_for
from spmoe.errors import SpmoeError, TransferError
from spmoe.experts.access import ExpertBatch
from spmoe.experts.cache import Entry, PinnedLayer
from spmoe.experts.eviction import make_eviction
from spmoe.experts.experts import Experts
from spmoe.experts.transfer import CHUNK_BYTES, CopyHandle, CopyJob
from spmoe.observe.clock import RealClock
from spmoe.registry import EVICTION_POLICIES
from spmoe.types import ExpertKey, PrefetchRequest, PrefetchRequests, Residency

for_demands_and_prefetches = pytest.mark.parametrize("urgent", [True, False], ids=["demand", "prefetch"])


def job_of(name: str) -> CopyJob:
    """Return the copy of this name; `B3` copies expert 1 into slot 3."""
    return CopyJob(ExpertKey(0, ord(name[0]) - ord("A")), int(name[1:]))


class TransferSetup:
    """A transfer of experts A to H, all of one layer, on a fake device with 6 slots that runs when it is told to."""

    def __init__(self, nbytes: int, chunk: int, window: int) -> None:
        self.memory = FakeMemory(slots=6, nbytes=nbytes, experts=[8])
        self.device = FakeCudaDevice(self.memory, chunk=chunk, window=window, seed=nbytes)
        self.transfer = CheckedTransfer(self.device, self.memory, chunk=chunk, window=window)

    def copy(self, *names: str, urgent: bool) -> list[CudaCopyHandle]:
        handles: list[CudaCopyHandle] = []
        for handle in self.transfer.copy([job_of(name) for name in names], urgent=urgent):
            assert isinstance(handle, CudaCopyHandle)
            handles.append(handle)
        return handles

    def demand(self, *names: str) -> list[CudaCopyHandle]:
        return self.copy(*names, urgent=True)

    def prefetch(self, *names: str) -> list[CudaCopyHandle]:
        return self.copy(*names, urgent=False)

    def launch(self, *names: str) -> None:
        """Launch a kernel that reads these experts in these slots."""
        self.device.launch([job_of(name) for name in names])

    @property
    def log(self) -> list[str]:
        return list(self.device.log)

    def pump_and_expect(self, count: int) -> None:
        """Fill the window; there must be so many entries in the log then."""
        self.transfer.pump()
        assert len(self.log) == count

    def slots_hold(self, *names: str) -> bool:
        """Return whether these experts have arrived, and the other slots were never written."""
        arrived = {slot: key for key, slot in map(job_of, names)}
        for slot in range(self.memory.slot_count):
            expected = self.memory.blobs[arrived[slot]] if slot in arrived else UNINITIALIZED * self.memory.nbytes
            if self.memory.content(slot) != expected:
                return False
        return True

    def run_until_settled(self, handles: Sequence[CopyHandle]) -> None:
        """Run the device by threads until these copies have ended, successfully or not."""

        def wait() -> None:
            while not all(handle.ready() for handle in handles):
                self.transfer.pump()

        with self.device.running():
            run_with_timeout(wait)
            self.device.wait_until_idle()


@pytest.fixture
def make() -> Iterator[Callable[..., TransferSetup]]:
    """Build setups. After the test they are closed; no thread may be left, and the devices must have seen no error."""
    before = engine_threads()
    made: list[TransferSetup] = []

    def make(nbytes: int = 40, chunk: int = 16, window: int = 2) -> TransferSetup:
        made.append(TransferSetup(nbytes, chunk, window))
        return made[-1]

    yield make
    for setup in made:
        with setup.device.running():
            run_with_timeout(setup.transfer.close)
        assert not setup.device.errors
    assert engine_threads() == before


def states(handles: Sequence[CopyHandle]) -> str:
    """Return one character per copy: `.` in flight, `+` arrived, `-` failed."""
    letters = ""
    for handle in handles:
        if not handle.ready():
            letters += "."
            continue
        try:
            handle.wait()
        except TransferError:
            letters += "-"
        else:
            letters += "+"
    return letters


# ---- bytes


@for_demands_and_prefetches
@pytest.mark.parametrize(
    ("nbytes", "chunk"), [(40, 16), (32, 16), (17, 16), (16, 16), (15, 16), (5, 16), (3, 64), (2, 1)]
)
def test_blobs_of_any_size_arrive(make: Callable[..., TransferSetup], nbytes: int, chunk: int, urgent: bool) -> None:
    setup = make(nbytes, chunk)
    names = ["C4", "A0", "H1", "B5"]
    handles = setup.copy(*names, urgent=urgent)
    setup.run_until_settled(handles)
    assert states(handles) == "++++"
    assert setup.slots_hold(*names)
    ends = [part[0] for submission in setup.log for part in submission.split() if part.endswith(f":{nbytes}]")]
    assert ends == ["C", "A", "H", "B"], "each blob ends once, in the order given"


def test_copy_is_ready_with_its_last_chunk(make: Callable[..., TransferSetup]) -> None:
    setup = make(window=1)
    handles = setup.prefetch("A0")
    for count, parts in enumerate(["A[0:16]", "A[16:32]", "A[32:40]"], start=1):
        setup.pump_and_expect(count)
        assert setup.log[-1] == parts
        assert not handles[0].ready()
        setup.device.run_copies(1)
    assert states(handles) == "+"
    assert setup.slots_hold("A0")
    assert len(setup.log) == 3


def test_small_prefetches_share_a_chunk_and_small_demands_a_quarter_of_it(make: Callable[..., TransferSetup]) -> None:
    setup = make(nbytes=5, chunk=16, window=1)
    prefetches = setup.prefetch("A0", "B1", "C2", "D3", "E4")
    assert setup.log == ["A[0:5] B[0:5] C[0:5] D[0:1]"]
    setup.device.run_copies(1)
    assert states(prefetches) == "+++.."
    setup.pump_and_expect(2)
    assert setup.log[1] == "D[1:5] E[0:5]"
    setup.run_until_settled(prefetches)
    assert setup.slots_hold("A0", "B1", "C2", "D3", "E4")
    setup = make(nbytes=5, chunk=40)
    demands = setup.demand("A0", "B1", "C2")
    assert setup.log == ["A[0:5] B[0:5]", "C[0:5]"]
    setup.device.run_copies(1)
    assert states(demands) == "++."
    setup.device.run_copies(1)
    assert states(demands) == "+++"
    assert setup.slots_hold("A0", "B1", "C2")


def test_waiting_for_one_copy_covers_the_whole_submission(make: Callable[..., TransferSetup]) -> None:
    setup = make(nbytes=5, chunk=40)
    first, second, third = setup.demand("A0", "B1", "C2")
    first.stream_wait()
    assert (first.ready(), second.ready(), third.ready()) == (True, True, False), "the third is another submission"
    setup.launch("A0")
    setup.launch("B1")
    setup.run_until_settled([first, second, third])
    setup.device.run_compute()


@pytest.mark.parametrize(("nbytes", "chunk"), [(40, 16), (16, 16), (3, 16), (1000, 1)])
def test_depth_fills_the_window_twice(make: Callable[..., TransferSetup], nbytes: int, chunk: int) -> None:
    """The link stays busy until the next prefetches are submitted."""
    setup = make(nbytes, chunk, 2)
    assert setup.transfer.depth >= 2
    assert (setup.transfer.depth - 1) * nbytes >= 2 * 2 * chunk


@for_demands_and_prefetches
@pytest.mark.parametrize("batching", [True, False])
def test_small_blobs_share_a_submission_only_with_batching(
    make: Callable[..., TransferSetup], urgent: bool, batching: bool
) -> None:
    setup = make(nbytes=2, chunk=64, window=8)
    setup.transfer.set_batching(batching)
    names = ["A0", "B1", "C2", "D3"]
    handles = setup.copy(*names, urgent=urgent)
    assert setup.log == (["A[0:2] B[0:2] C[0:2] D[0:2]"] if batching else ["A[0:2]", "B[0:2]", "C[0:2]", "D[0:2]"])
    setup.run_until_settled(handles)
    assert setup.slots_hold(*names)


# ---- demands and prefetches


def test_demand_goes_behind_the_window_and_before_all_other_chunks(make: Callable[..., TransferSetup]) -> None:
    setup = make(window=2)
    prefetches = setup.prefetch("A0", "B1")
    (demand,) = setup.demand("C2")
    assert setup.log == ["A[0:16]", "A[16:32]", "C[0:40]"]
    setup.device.run_copies(1)
    setup.pump_and_expect(4)
    assert setup.log[3:] == ["A[32:40] B[0:8]"]
    setup.device.run_copies(2)
    assert states([*prefetches, demand]) == "..+"
    setup.pump_and_expect(5)
    assert setup.log[4:] == ["B[8:24]"], "the window counts chunks of prefetches only"
    setup.run_until_settled([*prefetches, demand])
    assert setup.log[5:] == ["B[24:40]"]
    assert setup.slots_hold("A0", "B1", "C2")


@pytest.mark.parametrize("call", [CudaCopyHandle.prioritize, CudaCopyHandle.stream_wait])
def test_rest_of_a_demanded_prefetch_is_submitted_at_once(
    make: Callable[..., TransferSetup], call: Callable[[CudaCopyHandle], None]
) -> None:
    setup = make(window=1)
    half, untouched, other = setup.prefetch("A0", "B1", "C2")
    call(untouched)
    call(half)
    assert setup.log == ["A[0:16]", "B[0:40]", "A[16:40]"]
    call(half)
    call(untouched)
    assert len(setup.log) == 3, "only once"
    assert half.ready() == untouched.ready() == (call is CudaCopyHandle.stream_wait)
    setup.run_until_settled([half, untouched, other])
    assert setup.log[3:] == ["C[0:16]", "C[16:32]", "C[32:40]"]
    assert setup.slots_hold("A0", "B1", "C2")


@pytest.mark.parametrize("window", [1, 2, 3])
def test_window_is_kept_full_and_never_exceeded(make: Callable[..., TransferSetup], window: int) -> None:
    """The device checks at each submission that the window is not exceeded."""
    setup = make(nbytes=64, window=window)  # four chunks per blob
    prefetches = setup.prefetch("A0", "B1")
    prefetches += setup.prefetch("C2")
    for ended in range(12):
        setup.pump_and_expect(min(12, ended + window))
        setup.device.run_copies(1)
    assert states(prefetches) == "+++"
    assert setup.slots_hold("A0", "B1", "C2")
    late = setup.prefetch("D3")  # the window was empty
    assert setup.log[12:] == ["D[0:16]", "D[16:32]", "D[32:48]"][:window]
    setup.run_until_settled(late)


def test_window_is_kept_full_while_the_host_waits_for_compute(make: Callable[..., TransferSetup]) -> None:
    setup = make(nbytes=64, window=1)
    setup.demand("F5")
    setup.device.run_copies(1)
    setup.launch("F5")
    event = setup.device.record_compute_event()
    prefetches = setup.prefetch("A0", "B1")
    waiter = threading.Thread(target=setup.transfer.wait_and_pump, args=(event,), daemon=True)
    waiter.start()
    for ended in range(1, 8):
        setup.device.wait_until_logged(1 + ended)
        setup.device.run_copies(1)
    setup.device.wait_until_logged(9)
    setup.device.wait_until_awaited(lambda: event)  # nothing is left to submit, so it sleeps
    assert waiter.is_alive()
    setup.device.run_compute()
    waiter.join(TIMEOUT)
    assert not waiter.is_alive()
    setup.run_until_settled(prefetches)
    assert setup.slots_hold("A0", "B1", "F5")


def test_wait_for_a_passed_event_returns_at_once(make: Callable[..., TransferSetup]) -> None:
    setup = make(window=1)
    event = setup.device.record_compute_event()
    setup.device.run_compute()
    prefetches = setup.prefetch("A0")
    run_with_timeout(lambda: setup.transfer.wait_and_pump(event))
    assert setup.log == ["A[0:16]"], "it does not wait for copies"
    setup.run_until_settled(prefetches)


# ---- slots that kernels read


@for_demands_and_prefetches
def test_slot_is_overwritten_only_after_the_kernels_that_read_it(
    make: Callable[..., TransferSetup], urgent: bool
) -> None:
    setup = make(window=1)
    setup.demand("A0")
    setup.device.run_copies()
    setup.launch("A0")  # fails if the bytes are not A's when it runs
    setup.transfer.protect_slots([0])
    handles = setup.copy("B0", urgent=urgent)
    first = "B[0:40]" if urgent else "B[0:16]"
    assert setup.log[1:] == ["wait", first]
    setup.device.run_copies()
    assert setup.slots_hold("A0")
    assert not handles[0].ready()
    setup.device.run_compute()
    setup.run_until_settled(handles)
    assert setup.memory.content(0) == setup.memory.blobs[handles[0].job.key]
    assert setup.log.count("wait") == 1, "later chunks are behind the first"


@for_demands_and_prefetches
def test_copy_does_not_wait_for_finished_epochs(make: Callable[..., TransferSetup], urgent: bool) -> None:
    setup = make()
    setup.demand("A0")
    setup.device.run_copies()
    setup.launch("A0")
    setup.transfer.protect_slots([0, 1])
    epoch = setup.transfer.begin_epoch()
    setup.device.run_compute()
    setup.transfer.finish_epochs(epoch)
    setup.launch("A0")
    handles = setup.copy("B1", urgent=urgent)
    setup.device.run_copies(1)
    setup.device.run_compute()
    setup.run_until_settled(handles)
    assert "wait" not in setup.log
    assert setup.slots_hold("A0", "B1")


def test_copy_waits_for_epochs_that_have_not_finished(make: Callable[..., TransferSetup]) -> None:
    setup = make()
    setup.demand("A0", "B1")
    setup.device.run_copies()
    setup.launch("A0")
    epoch = setup.transfer.begin_epoch()
    setup.transfer.protect_slots([1], epoch)  # read by the kernel launched next
    setup.launch("B1")
    setup.transfer.begin_epoch()
    setup.transfer.finish_epochs(epoch)  # ends the epochs before this one
    logged = len(setup.log)
    handles = setup.demand("C1")
    assert setup.log[logged:] == ["wait", "C[0:40]"]
    setup.device.run_copies()
    assert setup.slots_hold("A0", "B1")
    setup.run_until_settled(handles)
    assert setup.slots_hold("A0", "C1")


def test_copy_waits_only_for_protected_slots_and_once(make: Callable[..., TransferSetup]) -> None:
    setup = make()
    setup.transfer.protect_slots([0, 3])
    handles = setup.demand("A1", "B0", "C0", "D2")
    assert setup.log == ["A[0:40]", "wait", "B[0:40]", "C[0:40]", "D[0:40]"]
    setup.run_until_settled(handles)
    assert setup.slots_hold("A1", "C0", "D2")


def test_prefetch_waits_for_kernels_launched_after_it_was_queued(make: Callable[..., TransferSetup]) -> None:
    setup = make(window=1)
    setup.demand("B1")
    setup.device.run_copies()
    setup.transfer.protect_slots([1])
    setup.device.run_compute()
    prefetches = setup.prefetch("A0", "C1")
    setup.launch("B1")
    setup.transfer.protect_slots([1])
    setup.device.run_copies(1)
    setup.pump_and_expect(3)
    prefetches[0].prioritize()
    prefetches[1].prioritize()
    assert setup.log[1:] == ["A[0:16]", "A[16:32]", "A[32:40]", "wait", "C[0:40]"]
    setup.device.run_copies()
    assert setup.slots_hold("A0", "B1")
    setup.run_until_settled(prefetches)
    assert setup.slots_hold("A0", "C1")


def test_one_protected_slot_delays_a_shared_submission(make: Callable[..., TransferSetup]) -> None:
    setup = make(nbytes=5, chunk=64)
    setup.demand("A0", "B1")
    setup.device.run_copies()
    setup.launch("A0", "B1")
    setup.transfer.protect_slots([1])
    handles = setup.demand("C2", "D1", "E3")
    assert setup.log[1:] == ["wait", "C[0:5] D[0:5] E[0:5]"]
    setup.device.run_copies()
    assert setup.slots_hold("A0", "B1")
    setup.run_until_settled(handles)
    assert setup.slots_hold("A0", "D1", "C2", "E3")


@for_demands_and_prefetches
def test_failed_copy_leaves_its_slot_protected(make: Callable[..., TransferSetup], urgent: bool) -> None:
    setup = make(window=1)
    setup.demand("A0")
    setup.device.run_copies()
    setup.launch("A0")
    setup.transfer.protect_slots([0])
    setup.device.failing_copies = 1
    failed = setup.copy("B0", urgent=urgent)
    assert states(failed) == "-"
    handles = setup.copy("C0", urgent=urgent)
    setup.device.run_copies()
    assert setup.slots_hold("A0")
    setup.run_until_settled(handles)
    assert setup.memory.content(0) == setup.memory.blobs[ExpertKey(0, 2)]


# ---- kernels that need a copy


@for_demands_and_prefetches
def test_kernels_wait_for_a_copy_on_the_device(make: Callable[..., TransferSetup], urgent: bool) -> None:
    setup = make()
    (handle,) = setup.copy("A0", urgent=urgent)
    assert not handle.ready()
    handle.stream_wait()
    assert setup.device.compute_waits == 1
    assert handle.ready()
    run_with_timeout(handle.wait)  # returns at once: the host does not wait for bytes
    setup.launch("A0")
    setup.device.run_compute()
    assert not setup.slots_hold("A0")
    setup.device.finish()
    assert setup.slots_hold("A0")
    assert states([handle]) == "+"


@for_demands_and_prefetches
def test_kernels_do_not_wait_for_a_copy_that_has_ended(make: Callable[..., TransferSetup], urgent: bool) -> None:
    setup = make(nbytes=16)
    (handle,) = setup.copy("A0", urgent=urgent)
    setup.device.run_copies(1)
    assert handle.ready()
    handle.stream_wait()
    assert setup.device.compute_waits == 0
    setup.launch("A0")
    setup.device.run_compute()


@for_demands_and_prefetches
def test_copy_is_ready_when_its_last_byte_has_arrived(make: Callable[..., TransferSetup], urgent: bool) -> None:
    setup = make()
    (handle,) = setup.copy("A0", urgent=urgent)

    def run_until_ready() -> None:
        while not handle.ready():
            setup.transfer.pump()
            setup.device.step_copies()

    run_with_timeout(run_until_ready)
    assert setup.slots_hold("A0")


@for_demands_and_prefetches
def test_host_waits_until_a_copy_has_ended(make: Callable[..., TransferSetup], urgent: bool) -> None:
    setup = make()
    (handle,) = setup.copy("A0", urgent=urgent)
    found: list[bool] = []

    def wait() -> None:
        handle.wait()
        found.append(setup.slots_hold("A0"))

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    setup.device.wait_until_awaited(lambda: handle.end)
    assert setup.log == (["A[0:40]"] if urgent else ["A[0:16]", "A[16:32]", "A[32:40]"]), "all of it is submitted"
    setup.device.finish()
    waiter.join(TIMEOUT)
    assert found == [True]


# ---- stalls


class FakeWaits:
    """Waits of the compute stream. The first `ended` of them have ended; after `queries` queries all have."""

    def __init__(self, ended: int, queries: int) -> None:
        self._ended = ended
        self._queries = queries

    def events(self, number: int) -> Any:
        """Return the events before and after a wait, which lasts 1, 10, 100 or 1000 ms."""

        def query() -> bool:
            self._queries -= 1
            return number < self._ended or self._queries < 0

        return SimpleNamespace(elapsed_time=lambda after: 10.0**number), SimpleNamespace(query=query)


@pytest.mark.parametrize("ended", range(5))
@pytest.mark.parametrize("queries", range(7))
def test_every_stall_is_counted_once(monkeypatch: pytest.MonkeyPatch, ended: int, queries: int) -> None:
    pytest.importorskip("triton", reason="no triton")
    from spmoe.backends.cuda import CudaCopyStream

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    copy_stream = CudaCopyStream(runtime=None, device=torch.device("cpu"))  # type: ignore[arg-type]
    waits = FakeWaits(ended, queries)
    copy_stream._waits = [waits.events(number) for number in range(4)]
    taken = [copy_stream.take_stall_seconds() for _ in range(9)]
    assert round(sum(taken) * 1000) == 1111


def test_signals_are_not_measured_as_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="no triton")
    from spmoe.backends.cuda import CudaCopyStream

    event = SimpleNamespace(record=lambda stream: None, query=lambda: True, elapsed_time=lambda other: 5.0)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: event)
    submitted: list[list[CopyRange]] = []
    runtime: Any = SimpleNamespace(copy=lambda ranges, stream: submitted.append(ranges))
    transfer = CudaTransfer(CudaCopyStream(runtime, torch.device("cpu"), timed=True), FakeMemory(1, 8, [1]))
    transfer.copy([CopyJob(ExpertKey(0, 0), 0)], urgent=True)
    transfer.signal(CopyRange(1, 2, 8))
    assert submitted[1] == [CopyRange(1, 2, 8)]
    assert transfer.take_copy_times() == [(8, 0.005)]


# ---- failures


def test_failed_submission_fails_all_demands_in_it(make: Callable[..., TransferSetup]) -> None:
    setup = make(nbytes=4, chunk=32)  # two blobs per submission
    setup.device.failing_copies = 1
    handles = setup.demand("A0", "B1", "C2", "D3", "E4")
    assert states(handles) == "--..."
    for handle, expert in zip(handles[:2], (0, 1), strict=True):
        assert handle.ready()
        for call in (handle.wait, handle.stream_wait):
            with pytest.raises(TransferError, match=rf"expert {expert} of layer 0 .*injected failure") as caught:
                call()
            assert isinstance(caught.value.__cause__, SpmoeError)
        handle.prioritize()
    assert setup.device.compute_waits == 0
    setup.run_until_settled(handles)
    assert states(handles) == "--+++"
    for name in ("C2", "D3", "E4"):
        assert setup.memory.content(job_of(name).slot) == setup.memory.blobs[job_of(name).key]
    again = setup.demand("A0", "B1")
    setup.run_until_settled(again)
    assert setup.slots_hold("A0", "B1", "C2", "D3", "E4")


def test_transfer_error_is_raised_unchanged(make: Callable[..., TransferSetup]) -> None:
    setup = make()
    setup.device.failing_copies, setup.device.failure = 1, TransferError("the link is down")
    (handle,) = setup.demand("A0")
    with pytest.raises(TransferError) as caught:
        handle.wait()
    assert caught.value is setup.device.failure


@pytest.mark.parametrize(
    ("accepted", "outcome"),
    [
        (0, "-+++"),  # A[0:16]
        (1, "-+++"),  # A[16:32]
        (2, "--++"),  # A[32:40] B[0:8]
        (3, "+-++"),  # B[8:24]
        (4, "+-++"),  # B[24:40]
        (5, "++-+"),  # C[0:16]
        (9, "+++-"),  # D[24:40]
    ],
)
def test_failed_chunk_fails_the_prefetches_in_it(
    make: Callable[..., TransferSetup], accepted: int, outcome: str
) -> None:
    setup = make(window=1)
    if accepted == 0:
        setup.device.failing_copies = 1
    handles = setup.prefetch("A0", "B1", "C2", "D3")
    for count in range(1, accepted + 1):
        setup.pump_and_expect(count)
        if count == accepted:
            setup.device.failing_copies = 1
        setup.device.run_copies(1)
    setup.run_until_settled(handles)
    assert states(handles) == outcome
    assert setup.log[accepted].endswith("failed")
    failed = handles[outcome.index("-")]
    name = "ABCD"[outcome.index("-")]
    assert not [submission for submission in setup.log[accepted + 1 :] if f"{name}[" in submission]
    with pytest.raises(TransferError, match="injected failure"):
        failed.stream_wait()
    assert setup.device.compute_waits == 0
    for handle, letter in zip(handles, outcome, strict=True):
        key, slot = handle.job
        if letter == "+":
            assert setup.memory.content(slot) == setup.memory.blobs[key]
    names = ["A0", "B1", "C2", "D3"]
    setup.run_until_settled(setup.demand(*(name for name, letter in zip(names, outcome, strict=True) if letter == "-")))
    assert setup.slots_hold(*names)


@pytest.mark.parametrize("call", [CudaCopyHandle.prioritize, CudaCopyHandle.stream_wait])
@pytest.mark.parametrize("which", [0, 1])
def test_failed_rest_of_a_demanded_prefetch_fails_that_prefetch_alone(
    make: Callable[..., TransferSetup], call: Callable[[CudaCopyHandle], None], which: int
) -> None:
    setup = make(window=1)
    handles = setup.prefetch("A0", "B1", "C2")
    setup.device.failing_copies = 1
    raises = call is CudaCopyHandle.stream_wait
    with pytest.raises(TransferError, match="injected failure") if raises else nullcontext():
        call(handles[which])
    assert states(handles) == "".join("-" if i == which else "." for i in range(3))
    setup.run_until_settled(handles)
    assert states(handles) == "".join("-" if i == which else "+" for i in range(3))


@for_demands_and_prefetches
def test_any_error_of_a_submission_fails_its_copies(make: Callable[..., TransferSetup], urgent: bool) -> None:
    setup = make()
    setup.device.failing_copies, setup.device.failure = 1, RuntimeError("no event")
    handles = setup.copy("A0", "B1", urgent=urgent)
    assert states(handles) == "-."
    with pytest.raises(TransferError, match=r"expert 0 of layer 0 .*no event") as caught:
        handles[0].wait()
    assert caught.value.__cause__ is setup.device.failure
    setup.run_until_settled(handles)
    assert states(handles) == "-+"


@pytest.mark.parametrize("accepted", range(5))
@pytest.mark.parametrize("demanded", [False, True])
def test_interrupted_copies_fail_and_can_be_repeated(
    make: Callable[..., TransferSetup], accepted: int, demanded: bool
) -> None:
    """Retire the slots: a part of the copies may be on the stream."""
    setup = make(window=1)
    setup.device.failure = KeyboardInterrupt()
    handles = setup.prefetch("A0", "B1", "C2")
    for _ in range(accepted):
        setup.device.run_copies(1)
        setup.transfer.pump()
    setup.device.run_copies(1)
    setup.device.failing_copies = 1
    call = partial(setup.demand, "D3") if demanded else setup.transfer.pump
    with pytest.raises(KeyboardInterrupt):
        call()
    setup.device.failure = None
    for handle in handles:
        handle.prioritize()
    setup.run_until_settled(handles)
    for handle, letter in zip(handles, states(handles), strict=True):
        key, slot = handle.job
        assert (letter == "+") == (key not in setup.device.failed_keys)
        assert letter == "-" or setup.memory.content(slot) == setup.memory.blobs[key]
    again = [name for name, letter in zip(("A0", "B1", "C2"), states(handles), strict=True) if letter == "-"]
    assert bool(again) != demanded
    setup.run_until_settled(setup.demand("D3", *again))
    assert setup.slots_hold("A0", "B1", "C2", "D3")


def test_broken_device_fails_copies_at_once(make: Callable[..., TransferSetup]) -> None:
    setup = make(window=1)
    handles = setup.prefetch("A0", "B1")
    setup.device.break_down()
    for handle in handles:
        with pytest.raises(TransferError, match="illegal memory access"):
            run_with_timeout(handle.wait)
    assert states(setup.prefetch("D3")) == "-"
    setup.device.broken = False
    setup.device.finish()
    later = setup.prefetch("C2")
    setup.run_until_settled(later)
    assert states(later) == "+"


# ---- closing


def test_close_fails_waiting_copies_and_finishes_submitted_ones(make: Callable[..., TransferSetup]) -> None:
    setup = make(window=1)
    sent, half, waiting = setup.demand("C2") + setup.prefetch("A0", "B1")
    closing = threading.Thread(target=setup.transfer.close, daemon=True)
    closing.start()
    for handle in (half, waiting):
        with pytest.raises(TransferError, match="closed"):
            run_with_timeout(handle.wait)  # although no byte has moved
        with pytest.raises(TransferError, match="closed"):
            handle.stream_wait()
        handle.prioritize()
    assert states([sent, half, waiting]) == ".--"
    assert setup.device.synchronizations < 1
    setup.device.finish()
    closing.join(TIMEOUT)
    assert not closing.is_alive()
    assert setup.device.synchronizations == 1
    assert states([sent, half, waiting]) == "+--"
    assert setup.log == ["C[0:40]", "A[0:16]"]
    assert setup.memory.content(2) == setup.memory.blobs[ExpertKey(0, 2)]
    assert not engine_threads()


@pytest.mark.parametrize("busy", [False, True])
def test_close_is_idempotent_and_later_copies_are_refused(make: Callable[..., TransferSetup], busy: bool) -> None:
    setup = make()
    handles = setup.prefetch("A0") if busy else []
    with setup.device.running():
        run_with_timeout(setup.transfer.close)
    run_with_timeout(setup.transfer.close)
    assert setup.device.synchronizations == 1
    assert not engine_threads()
    logged = len(setup.log)
    for urgent in (True, False):
        with pytest.raises(TransferError, match="closed"):
            setup.copy("B1", urgent=urgent)
    setup.transfer.protect_slots([0])
    assert len(setup.log) == logged
    assert all(handle.ready() for handle in handles)


# ---- experts over the transfer, with kernels that run later than the host


class Shape(NamedTuple):
    """Bytes of a blob, bytes of a chunk, and chunks in the window."""

    nbytes: int
    chunk: int
    window: int


SHAPES = (Shape(6, 4, 1), Shape(7, 2, 1), Shape(8, 8, 2), Shape(5, 8, 1), Shape(4, 64, 2), Shape(9, 2, 2))
EXPERTS = (6, 4, 5, 6)
LAST_LAYER = 6  # experts of the last layer: more than there are slots, so that a lost slot is detected


class FakeEngine:
    """Uses `Experts` on a fake device as an engine does. Each batch becomes a kernel that checks its experts' bytes.

    The host runs ahead of the kernels. With `in_step` it waits, before each use, for all kernels launched so far, as an
    engine does that reads the routed experts. With `threaded`, threads run the device and submit prefetches.
    """

    def __init__(
        self,
        eviction: str,
        slots: int,
        shape: Shape,
        experts: Sequence[int],
        *,
        in_step: bool,
        seed: int = 0,
        threaded: bool = False,
    ) -> None:
        self.experts_per_layer = tuple(experts)
        self.in_step = in_step
        self.threaded = threaded
        self.closed = False
        self.memory = FakeMemory(slots, shape.nbytes, experts)
        self.device = FakeCudaDevice(self.memory, chunk=shape.chunk, window=shape.window, seed=seed)
        self.device.runs_when_synchronized = not threaded
        self.transfer = CheckedTransfer(self.device, self.memory, chunk=shape.chunk, window=shape.window)
        self.slots = FakeSlots(slots)
        policy = make_eviction(eviction, experts)
        self.experts = Experts.build(self.slots, self.transfer, policy, shape.nbytes, RealClock(), threaded=threaded)
        self.counters = self.experts.ledger.counters
        self.device.may_copy = self._is_loading
        self.batches: Generator[ExpertBatch, None, None] | None = None  # of the layer that runs
        self.needed: set[ExpertKey] = set()
        self.delivered: set[ExpertKey] = set()
        self.failures = 0  # uses that have raised

    @property
    def entries(self) -> list[Entry]:
        """The experts that have a slot."""
        return self.experts.pool._cache.entries()

    def synchronize(self) -> None:
        """Wait for all kernels launched so far."""
        epoch = self.transfer.begin_epoch()
        if self.threaded:
            self.device.record_compute_event().synchronize()
        else:
            self.device.finish_compute()
        self.transfer.finish_epochs(epoch)

    def begin_step(self) -> None:
        if self.in_step:
            self.synchronize()
        self.experts.step.begin()

    def prefetch(self, *keys: tuple[int, int]) -> None:
        """Request prefetches of experts, given as layer and number."""
        requests = [PrefetchRequest(ExpertKey(*key), 0.9, key[0]) for key in keys]
        self.experts.scheduler.request(PrefetchRequests.of(requests))

    def use(self, layer: int, experts: Sequence[int], *, ahead: bool = False) -> None:
        """Begin to use experts and take the first batch; `ahead`: launch READY experts before they are asked for."""
        assert self.batches is None
        if not self.threaded:
            self.device.failed_keys.clear()
        self.needed = {ExpertKey(layer, expert) for expert in experts}
        self.delivered = set()
        pinned: PinnedLayer | None = None
        if ahead:
            try:
                pinned = self._launch_pinned(layer)
            except TransferError:
                assert self.closed, "an error without a cause"
                self.failures += 1
                return
        if pinned is None and self.in_step:
            self.synchronize()
        needed, access = sorted(experts), self.experts.access
        if pinned is not None:
            access.note_router_finished(pinned)
            if access.covers(pinned, needed):
                self.experts.run_ahead.defer(layer, lambda: access.commit(pinned, needed))
                return
        self.batches = access.use(layer, experts, pinned)
        self.take_batch()

    def _launch_pinned(self, layer: int) -> PinnedLayer:
        """Pin a layer and launch its READY experts; wait for the kernels launched before, and for no others."""
        known = self.device.record_compute_event()
        pinned = self.experts.access.pin_layer(layer)
        launched = [key for key in self.needed if pinned.slots[key.expert] >= 0]  # kernels skip the other experts
        self.device.launch([(key, int(pinned.slots[key.expert])) for key in launched])
        self.delivered |= set(launched)
        self.experts.run_ahead.settle(layer)
        if self.threaded:
            known.synchronize()
        while not known.query():
            assert self.device.step_compute() or self.device.step_copies(), "the streams wait for each other"
        return pinned

    def take_batch(self) -> None:
        """Release the last batch, whose kernel is launched; take the next one and launch its kernel."""
        assert self.batches is not None
        try:
            batch = next(self.batches, None)
        except TransferError:
            assert self.closed or self.device.failed_keys & (self.needed - self.delivered), "an error without a cause"
            self.batches = None
            self.failures += 1
            return
        if batch is None:
            assert self.delivered == self.needed
            self.batches = None
            return
        keys = {ExpertKey(batch.layer, expert) for expert in batch.experts}
        assert keys <= self.needed - self.delivered
        self.delivered |= keys
        self.device.launch_batch(batch)

    def use_all(self, layer: int, experts: Sequence[int]) -> None:
        """Use experts, batch by batch."""
        self.use(layer, experts)
        while self.batches is not None:
            self.take_batch()

    def abandon_use(self, *, raising: bool) -> None:
        """Stop in the middle of a use; kernels that were launched still run."""
        batches, self.batches = self.batches, None
        assert batches is not None
        if raising:
            with pytest.raises(RuntimeError, match="injected"):
                batches.throw(RuntimeError("injected"))
        else:
            batches.close()

    def close(self) -> None:
        self.closed = True
        self.experts.close()

    def _is_loading(self, job: CopyJob) -> bool:
        entry = self.experts.pool._cache.get(job.key)
        return entry is not None and entry.state is Residency.LOADING and entry.slot == job.slot

    def check(self) -> None:
        """Fail if the device has found an error or two experts share a slot."""
        assert not self.device.errors, self.device.errors
        entries = self.entries
        assert len({entry.slot for entry in entries}) == len(entries) <= self.slots.count

    def settle(self) -> None:
        """End the step and all copies; every expert that has a slot must be unpinned, and its bytes right."""
        self.experts.step.end()
        while any(entry.state is Residency.LOADING for entry in self.entries):
            self.transfer.pump()
            if self.threaded:
                self.device.wait_until_idle()
            else:
                self.device.finish()
            self.experts.scheduler.pump()
        for entry in self.entries:
            assert entry.pins == 0
            assert self.memory.content(entry.slot) == self.memory.blobs[entry.key]
        self.check()

    def finish(self) -> None:
        """Settle, check that every slot can still be used, and close."""
        while self.batches is not None:
            self.take_batch()
        self.device.failing_copies, self.device.failure_rate = 0, 0.0
        if not self.closed:
            self.device.finish()
            self.settle()
            failures, layer = self.failures, len(self.experts_per_layer) - 1
            self.use_all(layer, range(self.experts_per_layer[layer]))
            assert self.failures == failures, "experts cannot be loaded although no copy fails"
            self.device.finish()
            self.settle()
            assert len(self.entries) == self.slots.count, "a slot was lost"
        self.close()
        self.close()
        assert self.device.synchronizations == self.slots.times_closed == 1
        self.device.finish()
        self.check()


def make_engine(slots: int = 3) -> FakeEngine:
    return FakeEngine("lru", slots, Shape(6, 4, 1), (4, LAST_LAYER), in_step=False)


def residency(engine: FakeEngine, *keys: tuple[int, int]) -> list[Residency]:
    return [engine.experts.pool.residency(ExpertKey(*key)) for key in keys]


@pytest.mark.parametrize("accepted", [0, 1])
def test_expert_whose_prefetch_failed_is_absent_and_can_be_demanded(accepted: int) -> None:
    engine = make_engine(slots=2)
    engine.experts.step.begin()
    engine.device.failing_copies = 1 - accepted
    engine.prefetch((0, 0))
    if accepted:
        assert residency(engine, (0, 0)) == [Residency.LOADING]
        engine.device.run_copies(1)
        engine.device.failing_copies = 1
        engine.transfer.pump()
    engine.experts.scheduler.pump()
    assert residency(engine, (0, 0)) == [Residency.ABSENT]
    assert engine.counters.failed_bytes == engine.memory.nbytes
    engine.use_all(0, [0, 1])
    assert engine.failures == 0
    assert (engine.counters.demand_loads, engine.counters.late) == (2, 0)
    engine.finish()


def test_failed_demand_fails_its_use_alone() -> None:
    engine = make_engine()
    engine.device.failing_copies = 1
    engine.use_all(0, [0, 1])
    assert (engine.failures, residency(engine, (0, 0))) == (1, [Residency.ABSENT])
    engine.use_all(0, [0, 1])
    assert engine.failures == 1
    engine.finish()


def test_failed_rest_of_a_demanded_prefetch_fails_its_use_alone() -> None:
    engine = make_engine()
    engine.experts.step.begin()
    engine.prefetch((0, 0), (0, 1))
    engine.device.failing_copies = 1
    engine.use_all(0, [0])
    assert (engine.failures, residency(engine, (0, 0), (0, 1))) == (1, [Residency.ABSENT, Residency.LOADING])
    engine.use_all(0, [1, 0])
    assert engine.failures == 1
    engine.finish()


@for_demands_and_prefetches
def test_reset_after_an_interrupted_submission_ends_its_copies(urgent: bool) -> None:
    """A slot may be written to as long as a copy of the interrupted submission runs."""
    engine = FakeEngine("lru", 4, Shape(6, 4, 1), [6], in_step=True)
    experts = engine.experts
    experts.step.begin()
    if urgent:
        engine.prefetch((0, 2), (0, 3))
    engine.device.failing_copies, engine.device.failure = 1, KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        list(experts.access.use(0, [0, 1])) if urgent else engine.prefetch((0, 0), (0, 1))
    engine.device.failure = None
    experts.reset(make_eviction("lru", [6]))
    assert not engine.device._copies, "every copy has ended"
    assert not engine.entries
    assert not experts.pool.loads_in_flight
    experts.step.begin()
    for needed in ([2, 3, 4], [0, 1, 5]):
        for batch in experts.access.use(0, needed):
            engine.device.launch_batch(batch)
        engine.device.finish()
    assert len(engine.entries) == 4, "no slot is lost"
    experts.close()
    assert not engine.device.errors


def test_host_launches_a_whole_pass_before_any_byte_has_moved() -> None:
    """Many experts pass through one slot, and each kernel finds its own there."""
    engine = make_engine(slots=1)
    for layer in (0, 1, 0):
        engine.use_all(layer, range(engine.experts_per_layer[layer]))
    assert engine.memory.content(0) == UNINITIALIZED * engine.memory.nbytes
    assert engine.counters.demand_loads == 4 + LAST_LAYER + 4
    engine.device.run_copies()
    engine.finish()


# Hypothesis spends most of its time on drawing, so one number is drawn for a whole prefetch request, and one for a set
# of experts. Numbers of layers and experts are taken modulo their count.
SCORES = (0.1, 0.5, 0.9, 1.0)
SLACKS = (0, 0, 0, 0, 0, -1, 1, None)  # deadline of a prefetch request minus its layer; None: a hint, not to be fetched
numbers = st.integers(0, 7)
some_requests = st.lists(
    st.integers(0, 2047).map(lambda n: (n // 256, n // 32 % 8, SCORES[n // 8 % 4], SLACKS[n % 8])),
    min_size=1,
    max_size=6,
)
some_experts = st.integers(1, 255).map(lambda n: [e for e in range(8) if n >> e & 1])
some_steps = st.sampled_from([0, 0, 1, 2, 3, 5, 8, 13, 10_000])


EVICTION_NAMES = list(EVICTION_POLICIES.names())
halves_of_eviction_policies = pytest.mark.parametrize(
    "evictions", [EVICTION_NAMES[::2], EVICTION_NAMES[1::2]], ids=", ".join
)


class RandomActions(RuleBasedStateMachine):
    """A host that runs ahead, two streams at any speed and copies that fail, in any order."""

    evictions: Sequence[str]
    engine: FakeEngine

    @initialize(
        eviction=numbers,
        slots=st.integers(1, 4),
        shape=st.sampled_from(SHAPES),
        experts=st.lists(st.integers(1, 3), min_size=1, max_size=2),
        in_step=st.booleans(),
        seed=st.integers(0, 3),
    )
    def build(self, eviction: int, slots: int, shape: Shape, experts: list[int], in_step: bool, seed: int) -> None:
        name = self.evictions[eviction % len(self.evictions)]
        self.engine = FakeEngine(name, slots, shape, [*experts, LAST_LAYER], in_step=in_step, seed=seed)

    def key(self, layer: int, expert: int) -> ExpertKey:
        layer %= len(self.engine.experts_per_layer)
        return ExpertKey(layer, expert % self.engine.experts_per_layer[layer])

    @property
    def using(self) -> bool:
        return self.engine.batches is not None

    @rule(begins=st.booleans())
    @precondition(lambda self: not self.using)
    def begin_or_end_step(self, begins: bool) -> None:
        if begins:
            self.engine.begin_step()
        else:
            self.engine.experts.step.end()

    @rule(requests=some_requests)
    def prefetch(self, requests: list[tuple[int, int, float, int | None]]) -> None:
        for layer, expert, score, slack in requests:
            key = self.key(layer, expert)
            request = PrefetchRequest(key, score, key.layer + (slack or 0), fetch=slack is not None)
            self.engine.experts.scheduler.request(PrefetchRequests.of([request]))

    @rule(copies=some_steps, compute=some_steps, compute_first=st.booleans())
    def run_streams(self, copies: int, compute: int, compute_first: bool) -> None:
        device = self.engine.device
        turns = [(device.step_copies, copies), (device.step_compute, compute)]
        for step, count in reversed(turns) if compute_first else turns:
            for _ in range(count):
                if not step():
                    break

    @rule(scheduler=st.booleans(), transfer=st.booleans())
    def pump(self, scheduler: bool, transfer: bool) -> None:
        if transfer:
            self.engine.transfer.pump()
        if scheduler:
            self.engine.experts.scheduler.pump()

    @rule(layer=numbers, experts=some_experts, ahead=st.booleans())
    @precondition(lambda self: not self.using)
    def use(self, layer: int, experts: list[int], ahead: bool) -> None:
        layer %= len(self.engine.experts_per_layer)
        self.engine.use(layer, sorted({self.key(layer, e).expert for e in experts}), ahead=ahead)

    @rule(batches=st.integers(1, 8))
    @precondition(lambda self: self.using)
    def take_batches(self, batches: int) -> None:
        for _ in range(batches):
            if self.using:
                self.engine.take_batch()

    @rule(raising=st.booleans())
    @precondition(lambda self: self.using)
    def abandon_use(self, raising: bool) -> None:
        self.engine.abandon_use(raising=raising)

    @rule(failing=st.sampled_from([0, 0, 1, 1, 2, 3]), budget=st.none() | st.integers(0, 40))
    def change_failures_and_budget(self, failing: int, budget: int | None) -> None:
        self.engine.device.failing_copies = failing
        self.engine.experts.scheduler.step_budget = budget

    @rule(number=st.integers(0, 15))
    def close_sometimes(self, number: int) -> None:
        if number == 1:
            self.engine.close()

    @invariant()
    def no_errors(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self) -> None:
        if hasattr(self, "engine") and sys.exc_info()[0] is None:  # else this would hide the first failure
            self.engine.finish()


@halves_of_eviction_policies
def test_kernels_find_their_experts_after_any_actions(evictions: Sequence[str]) -> None:
    options = settings(
        max_examples=200,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    machine = type("RandomActions", (RandomActions,), {"evictions": evictions})
    run_with_timeout(lambda: run_state_machine_as_test(machine, settings=options))


# ---- with threads


@pytest.fixture
def _frequent_thread_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(before)


def run_step(engine: FakeEngine, rng: random.Random) -> None:
    """Run a step of a model for which most experts are predicted correctly."""
    scheduler = engine.experts.scheduler
    engine.begin_step()
    scheduler.step_budget = rng.choice([None, None, 3 * engine.memory.nbytes])
    needed = [rng.sample(range(count), rng.randint(1, count)) for count in engine.experts_per_layer]
    for layer, experts in enumerate(needed):
        predicted = [e for e in range(engine.experts_per_layer[layer]) if (e in experts) == (rng.random() < 0.8)]
        requests = [PrefetchRequest(ExpertKey(layer, e), rng.random(), layer) for e in predicted]
        scheduler.request(PrefetchRequests.of(requests))
    for layer, experts in enumerate(needed):
        if engine.failures and engine.closed:
            return
        engine.use(layer, experts, ahead=rng.random() < 0.5)
        while engine.batches is not None:
            if rng.random() < 0.05:
                engine.abandon_use(raising=False)
            else:
                engine.take_batch()
    engine.experts.step.end()


def run_steps_and_close(engine: FakeEngine, seed: int, steps: int) -> None:
    rng = random.Random(seed)
    for _ in range(steps):
        run_step(engine, rng)
    engine.device.failure_rate = 0.0
    engine.synchronize()
    engine.settle()
    engine.close()
    engine.device.wait_until_idle()


@pytest.mark.usefixtures("_frequent_thread_switches")
@halves_of_eviction_policies
@pytest.mark.parametrize("in_step", [False, True], ids=["ahead", "in step"])
@pytest.mark.parametrize("failure_rate", [0.0, 0.05])
def test_kernels_find_their_experts_with_threads(evictions: Sequence[str], in_step: bool, failure_rate: float) -> None:
    before = engine_threads()
    failures = 0
    for seed, shape in enumerate(SHAPES):
        slots, eviction = 1 + seed % 4, evictions[seed % len(evictions)]
        engine = FakeEngine(eviction, slots, shape, EXPERTS, in_step=in_step, seed=seed, threaded=True)
        engine.device.failure_rate = failure_rate
        with engine.device.running():
            run_with_timeout(partial(run_steps_and_close, engine, seed, 20))
        engine.check()
        failures += engine.failures
        assert engine_threads() == before
    assert (failures > 0) == (failure_rate > 0), "some uses meet a failed copy"


@pytest.mark.usefixtures("_frequent_thread_switches")
def test_close_from_another_thread_ends_a_running_model() -> None:
    before = engine_threads()
    for seed in range(8):
        engine = FakeEngine("lru", 3, SHAPES[seed % len(SHAPES)], EXPERTS, in_step=False, seed=seed, threaded=True)
        first_step_done = threading.Event()
        worker = threading.Thread(target=run_until_closed, args=(engine, seed, first_step_done), daemon=True)
        with engine.device.running():
            worker.start()
            assert first_step_done.wait(TIMEOUT)
            run_with_timeout(engine.close)
            worker.join(TIMEOUT)
            assert not worker.is_alive(), "the model's thread hangs"
        engine.check()
        assert engine.failures == 1
        assert engine_threads() == before


def run_until_closed(engine: FakeEngine, seed: int, first_step_done: threading.Event) -> None:
    rng = random.Random(seed)
    while not engine.failures:
        run_step(engine, rng)
        first_step_done.set()


@pytest.mark.parametrize(("blob", "chunk"), [(0.25, 1.0), (1.0, 1.0), (1.5, 1.5), (2.0, 1.0), (20.0, 1.0)])
def test_chunk_is_a_whole_blob_if_that_is_less_than_two_chunks(blob: float, chunk: float) -> None:
    assert chunk_for(int(blob * CHUNK_BYTES)) == chunk * CHUNK_BYTES
