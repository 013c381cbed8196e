"""Copies on a stream of their own: the right bytes, demands before prefetch requests, and no slot read or written too early.

The device is played by `device_double`: what is submitted happens later, bit by bit.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import pytest
from device_double import (
    GARBAGE,
    LIMIT,
    Device,
    Memory,
    PlainSlots,
    WatchedTransfer,
    own_threads,
    within,
)
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

from spmoe.backends.cuda_runtime import CopyRange
from spmoe.backends.cuda_transfer import CHUNK_BYTES, CudaCopyHandle, chunk_for
from spmoe.errors import SpmoeError, TransferError
from spmoe.experts.access import ExpertBatch, PinnedLayer
from spmoe.experts.eviction import make_eviction
from spmoe.experts.transfer import CopyHandle, CopyJob
from spmoe.observe.clock import RealClock
from spmoe.observe.ledger import Counters
from spmoe.registry import EVICTION_POLICIES
from spmoe.types import ExpertKey, PrefetchRequest, PrefetchRequests, Residency

urgencies = pytest.mark.parametrize("urgent", [True, False], ids=["demand", "wish"])


def job_of(name: str) -> CopyJob:
    """`B3`: expert 1 into slot 3."""
    return CopyJob(ExpertKey(0, ord(name[0]) - ord("A")), int(name[1:]))


class Stand:
    """A transfer on a device that stands still unless told to go on."""

    def __init__(self, nbytes: int, chunk: int, window: int) -> None:
        self.memory = Memory(slots=6, nbytes=nbytes, experts=[8])
        self.device = Device(self.memory, chunk=chunk, window=window, seed=nbytes)
        self.transfer = WatchedTransfer(self.device, self.memory, chunk=chunk, window=window)

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
        """Give compute a kernel that reads these."""
        self.device.launch([job_of(name) for name in names])

    @property
    def log(self) -> list[str]:
        return list(self.device.log)

    def kept(self, count: int) -> None:
        """Have the window filled, after which this much was put on the copy stream."""
        self.transfer.pump()
        assert len(self.log) == count

    def holds(self, *names: str) -> bool:
        """Whether these, and no others, have arrived."""
        there = {slot: key for key, slot in map(job_of, names)}
        for slot in range(self.memory.count):
            right = self.memory.blobs[there[slot]] if slot in there else GARBAGE * self.memory.nbytes
            if self.memory.content(slot) != right:
                return False
        return True

    def end(self, handles: Sequence[CopyHandle]) -> None:
        """Let the device go on by itself until these copies have ended, well or badly."""

        def wait() -> None:
            while not all(handle.ready() for handle in handles):
                self.transfer.pump()

        with self.device.running():
            within(wait)
            self.device.until_idle()


@pytest.fixture
def make() -> Iterator[Callable[..., Stand]]:
    """Make stands; closed, their threads gone and nothing seen amiss, when the test ends."""
    before = own_threads()
    made: list[Stand] = []

    def make(nbytes: int = 40, chunk: int = 16, window: int = 2) -> Stand:
        made.append(Stand(nbytes, chunk, window))
        return made[-1]

    yield make
    for stand in made:
        with stand.device.running():
            within(stand.transfer.close)
        assert not stand.device.failures
    assert own_threads() == before


def ended(handles: Sequence[CopyHandle]) -> str:
    """A letter for each: `.` not yet, `+` well, `-` badly."""
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


@urgencies
@pytest.mark.parametrize(
    ("nbytes", "chunk"), [(40, 16), (32, 16), (17, 16), (16, 16), (15, 16), (5, 16), (3, 64), (2, 1)]
)
def test_blobs_of_any_size_arrive(make: Callable[..., Stand], nbytes: int, chunk: int, urgent: bool) -> None:
    stand = make(nbytes, chunk)
    names = ["C4", "A0", "H1", "B5"]
    handles = stand.copy(*names, urgent=urgent)
    stand.end(handles)
    assert ended(handles) == "++++"
    assert stand.holds(*names)
    ends = [part[0] for parts in stand.log for part in parts.split() if part.endswith(f":{nbytes}]")]
    assert ends == ["C", "A", "H", "B"], "one last part each, in the order of asking"


def test_a_copy_ends_with_its_last_part(make: Callable[..., Stand]) -> None:
    stand = make(window=1)
    handles = stand.prefetch("A0")
    for count, parts in enumerate(["A[0:16]", "A[16:32]", "A[32:40]"], start=1):
        stand.kept(count)
        assert stand.log[-1] == parts
        assert not handles[0].ready()
        stand.device.run_copies(1)
    assert ended(handles) == "+"
    assert stand.holds("A0")
    assert len(stand.log) == 3


def test_small_wishes_share_a_chunk_and_small_demands_a_quarter_of_one(make: Callable[..., Stand]) -> None:
    stand = make(nbytes=5, chunk=16, window=1)
    prefetches = stand.prefetch("A0", "B1", "C2", "D3", "E4")
    assert stand.log == ["A[0:5] B[0:5] C[0:5] D[0:1]"]
    stand.device.run_copies(1)
    assert ended(prefetches) == "+++.."
    stand.kept(2)
    assert stand.log[1] == "D[1:5] E[0:5]"
    stand.end(prefetches)
    assert stand.holds("A0", "B1", "C2", "D3", "E4")
    stand = make(nbytes=5, chunk=40)
    demands = stand.demand("A0", "B1", "C2")
    assert stand.log == ["A[0:5] B[0:5]", "C[0:5]"]
    stand.device.run_copies(1)
    assert ended(demands) == "++."
    stand.device.run_copies(1)
    assert ended(demands) == "+++"
    assert stand.holds("A0", "B1", "C2")


def test_compute_behind_one_copy_is_behind_all_that_end_with_it(make: Callable[..., Stand]) -> None:
    stand = make(nbytes=5, chunk=40)
    first, second, third = stand.demand("A0", "B1", "C2")
    first.order()
    assert (first.ready(), second.ready(), third.ready()) == (True, True, False), "the third is another submission"
    stand.launch("A0")
    stand.launch("B1")
    stand.end([first, second, third])
    stand.device.run_compute()


@pytest.mark.parametrize(("nbytes", "chunk"), [(40, 16), (16, 16), (3, 16), (1000, 1)])
def test_wishes_up_to_its_depth_fill_the_window_twice(make: Callable[..., Stand], nbytes: int, chunk: int) -> None:
    """So that the link is busy while the prefetcher looks for the next."""
    stand = make(nbytes, chunk, 2)
    assert stand.transfer.depth >= 2
    assert (stand.transfer.depth - 1) * nbytes >= 2 * 2 * chunk
    assert stand.transfer.take_stall_seconds() == 0.5


# ---- demands before prefetch requests


def test_a_demand_goes_behind_the_window_and_before_all_other_chunks(make: Callable[..., Stand]) -> None:
    stand = make(window=2)
    prefetches = stand.prefetch("A0", "B1")
    (demand,) = stand.demand("C2")
    assert stand.log == ["A[0:16]", "A[16:32]", "C[0:40]"]
    stand.device.run_copies(1)
    stand.kept(4)
    assert stand.log[3:] == ["A[32:40] B[0:8]"]
    stand.device.run_copies(2)
    assert ended([*prefetches, demand]) == "..+"
    stand.kept(5)
    assert stand.log[4:] == ["B[8:24]"], "the end of a demand makes no room for prefetch requests; that of a chunk does"
    stand.end([*prefetches, demand])
    assert stand.log[5:] == ["B[24:40]"]
    assert stand.holds("A0", "B1", "C2")


@pytest.mark.parametrize("call", [CudaCopyHandle.prioritize, CudaCopyHandle.order])
def test_the_rest_of_a_wish_that_is_needed_now_goes_at_once(
    make: Callable[..., Stand], call: Callable[[CudaCopyHandle], None]
) -> None:
    stand = make(window=1)
    half, untouched, other = stand.prefetch("A0", "B1", "C2")
    call(untouched)
    call(half)
    assert stand.log == ["A[0:16]", "B[0:40]", "A[16:40]"]
    call(half)
    call(untouched)
    assert len(stand.log) == 3, "once is enough"
    assert half.ready() == untouched.ready() == (call is CudaCopyHandle.order)
    stand.end([half, untouched, other])
    assert stand.log[3:] == ["C[0:16]", "C[16:32]", "C[32:40]"]
    assert stand.holds("A0", "B1", "C2")


@pytest.mark.parametrize("window", [1, 2, 3])
def test_the_window_is_kept_full_and_never_overfull(make: Callable[..., Stand], window: int) -> None:
    """That it is never overfull is the device's own check, at each submission."""
    stand = make(nbytes=64, window=window)  # four chunks each
    prefetches = stand.prefetch("A0", "B1")
    prefetches += stand.prefetch("C2")
    for over in range(12):
        stand.kept(min(12, over + window))
        stand.device.run_copies(1)
    assert ended(prefetches) == "+++"
    assert stand.holds("A0", "B1", "C2")
    late = stand.prefetch("D3")  # after a time in which the window ran dry
    assert stand.log[12:] == ["D[0:16]", "D[16:32]", "D[32:48]"][:window]
    stand.end(late)


def test_the_window_is_kept_full_while_compute_is_waited_for(make: Callable[..., Stand]) -> None:
    stand = make(nbytes=64, window=1)
    stand.demand("F5")
    stand.device.run_copies(1)
    stand.launch("F5")
    point = stand.device.record_compute_event()
    prefetches = stand.prefetch("A0", "B1")
    waiter = threading.Thread(target=stand.transfer.wait_and_pump, args=(point,), daemon=True)
    waiter.start()
    for over in range(1, 8):
        stand.device.until_logged(1 + over)
        stand.device.run_copies(1)
    stand.device.until_logged(9)
    with stand.device.moved:  # nothing is left to submit: it sleeps
        assert stand.device.moved.wait_for(lambda: point.awaited, LIMIT)
    assert waiter.is_alive()
    stand.device.run_compute()
    waiter.join(LIMIT)
    assert not waiter.is_alive()
    stand.end(prefetches)
    assert stand.holds("A0", "B1", "F5")


def test_what_has_passed_is_not_waited_for(make: Callable[..., Stand]) -> None:
    stand = make(window=1)
    point = stand.device.record_compute_event()
    stand.device.run_compute()
    prefetches = stand.prefetch("A0")
    within(lambda: stand.transfer.wait_and_pump(point))
    assert stand.log == ["A[0:16]"], "no byte of it has moved"
    stand.end(prefetches)


# ---- slots that compute reads


@urgencies
def test_a_slot_is_written_after_the_compute_that_reads_it(make: Callable[..., Stand], urgent: bool) -> None:
    stand = make(window=1)
    stand.demand("A0")
    stand.device.run_copies()
    stand.launch("A0")  # will see that the bytes are still A's
    stand.transfer.fence([0])
    handles = stand.copy("B0", urgent=urgent)
    first = "B[0:40]" if urgent else "B[0:16]"
    assert stand.log[1:] == ["wait", first]
    stand.device.run_copies()
    assert stand.holds("A0")
    assert not handles[0].ready()
    stand.device.run_compute()
    stand.end(handles)
    assert stand.memory.content(0) == stand.memory.blobs[handles[0].job.key]
    assert stand.log.count("wait") == 1, "later parts come after the first anyway"


@urgencies
def test_compute_that_is_over_is_not_waited_for(make: Callable[..., Stand], urgent: bool) -> None:
    stand = make()
    stand.demand("A0")
    stand.device.run_copies()
    stand.launch("A0")
    stand.transfer.fence([0, 1])
    point = stand.transfer.mark()
    stand.device.run_compute()
    stand.transfer.passed(point)
    stand.launch("A0")
    handles = stand.copy("B1", urgent=urgent)
    stand.device.run_copies(1)
    stand.device.run_compute()
    stand.end(handles)
    assert "wait" not in stand.log
    assert stand.holds("A0", "B1")


def test_what_was_given_after_the_point_that_is_passed_is_waited_for(make: Callable[..., Stand]) -> None:
    stand = make()
    stand.demand("A0", "B1")
    stand.device.run_copies()
    stand.launch("A0")
    before = stand.transfer.mark()
    stand.transfer.fence([1], before)  # booked for what is given now, though it is told of later
    stand.launch("B1")
    stand.transfer.mark()
    stand.transfer.passed(before)
    logged = len(stand.log)
    handles = stand.demand("C1")
    assert stand.log[logged:] == ["wait", "C[0:40]"]
    stand.device.run_copies()
    assert stand.holds("A0", "B1")
    stand.end(handles)
    assert stand.holds("A0", "C1")


def test_only_slots_that_are_read_are_waited_for_and_once(make: Callable[..., Stand]) -> None:
    stand = make()
    stand.transfer.fence([0, 3])
    handles = stand.demand("A1", "B0", "C0", "D2")
    assert stand.log == ["A[0:40]", "wait", "B[0:40]", "C[0:40]", "D[0:40]"]
    stand.end(handles)
    assert stand.holds("A1", "C0", "D2")


def test_the_last_use_counts_even_if_it_comes_after_the_wish(make: Callable[..., Stand]) -> None:
    stand = make(window=1)
    stand.demand("B1")
    stand.device.run_copies()
    stand.transfer.fence([1])
    stand.device.run_compute()
    prefetches = stand.prefetch("A0", "C1")
    stand.launch("B1")
    stand.transfer.fence([1])
    stand.device.run_copies(1)
    stand.kept(3)
    prefetches[0].prioritize()
    prefetches[1].prioritize()
    assert stand.log[1:] == ["A[0:16]", "A[16:32]", "A[32:40]", "wait", "C[0:40]"]
    stand.device.run_copies()
    assert stand.holds("A0", "B1")
    stand.end(prefetches)
    assert stand.holds("A0", "C1")


def test_one_slot_of_a_shared_submission_holds_it_back(make: Callable[..., Stand]) -> None:
    stand = make(nbytes=5, chunk=64)
    stand.demand("A0", "B1")
    stand.device.run_copies()
    stand.launch("A0", "B1")
    stand.transfer.fence([1])
    handles = stand.demand("C2", "D1", "E3")
    assert stand.log[1:] == ["wait", "C[0:5] D[0:5] E[0:5]"]
    stand.device.run_copies()
    assert stand.holds("A0", "B1")
    stand.end(handles)
    assert stand.holds("A0", "D1", "C2", "E3")


@urgencies
def test_a_refused_copy_does_not_make_the_slot_free_to_write(make: Callable[..., Stand], urgent: bool) -> None:
    stand = make(window=1)
    stand.demand("A0")
    stand.device.run_copies()
    stand.launch("A0")
    stand.transfer.fence([0])
    stand.device.refusals = 1
    refused = stand.copy("B0", urgent=urgent)
    assert ended(refused) == "-"
    handles = stand.copy("C0", urgent=urgent)
    stand.device.run_copies()
    assert stand.holds("A0")
    stand.end(handles)
    assert stand.memory.content(0) == stand.memory.blobs[ExpertKey(0, 2)]


# ---- compute that needs a copy


@urgencies
def test_compute_comes_after_a_copy_it_is_ordered_behind(make: Callable[..., Stand], urgent: bool) -> None:
    stand = make()
    (handle,) = stand.copy("A0", urgent=urgent)
    assert not handle.ready()
    handle.order()
    assert stand.device.compute_waits == 1
    assert handle.ready()
    within(handle.wait)  # the host does not wait for bytes
    stand.launch("A0")
    stand.device.run_compute()
    assert not stand.holds("A0")
    stand.device.finish()
    assert stand.holds("A0")
    assert ended([handle]) == "+"


@urgencies
def test_a_copy_that_has_ended_costs_compute_nothing(make: Callable[..., Stand], urgent: bool) -> None:
    stand = make(nbytes=16)
    (handle,) = stand.copy("A0", urgent=urgent)
    stand.device.run_copies(1)
    assert handle.ready()
    handle.order()
    assert stand.device.compute_waits == 0
    stand.launch("A0")
    stand.device.run_compute()


@urgencies
def test_a_copy_is_ready_when_its_last_byte_is_there(make: Callable[..., Stand], urgent: bool) -> None:
    stand = make()
    (handle,) = stand.copy("A0", urgent=urgent)

    def observer() -> None:
        while not handle.ready():
            stand.transfer.pump()
            stand.device.step_copies()

    within(observer)
    assert stand.holds("A0")


@urgencies
def test_waiting_for_a_copy_lasts_until_its_end(make: Callable[..., Stand], urgent: bool) -> None:
    stand = make()
    (handle,) = stand.copy("A0", urgent=urgent)
    found: list[bool] = []

    def wait() -> None:
        handle.wait()
        found.append(stand.holds("A0"))

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    stand.device.until_awaited(handle)
    assert stand.log == (["A[0:40]"] if urgent else ["A[0:16]", "A[16:32]", "A[32:40]"]), "it hurries"
    stand.device.finish()
    waiter.join(LIMIT)
    assert found == [True]


# ---- refusals


def test_a_refused_demand_fails_those_that_shared_the_submission(make: Callable[..., Stand]) -> None:
    stand = make(nbytes=4, chunk=32)  # two to a submission
    stand.device.refusals = 1
    handles = stand.demand("A0", "B1", "C2", "D3", "E4")
    assert ended(handles) == "--..."
    for handle, expert in zip(handles[:2], (0, 1), strict=True):
        assert handle.ready()
        for call in (handle.wait, handle.order):
            with pytest.raises(TransferError, match=rf"expert {expert} of layer 0 .*out of luck") as caught:
                call()
            assert isinstance(caught.value.__cause__, SpmoeError)
        handle.prioritize()
    assert stand.device.compute_waits == 0
    stand.end(handles)
    assert ended(handles) == "--+++"
    for name in ("C2", "D3", "E4"):
        assert stand.memory.content(job_of(name).slot) == stand.memory.blobs[job_of(name).key]
    again = stand.demand("A0", "B1")
    stand.end(again)
    assert stand.holds("A0", "B1", "C2", "D3", "E4")


def test_a_transfer_error_is_passed_on_as_it_is(make: Callable[..., Stand]) -> None:
    stand = make()
    stand.device.refusals, stand.device.refusal = 1, TransferError("the cable is out")
    (handle,) = stand.demand("A0")
    with pytest.raises(TransferError) as caught:
        handle.wait()
    assert caught.value is stand.device.refusal


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
def test_a_refused_chunk_fails_the_wishes_with_a_part_in_it(
    make: Callable[..., Stand], accepted: int, outcome: str
) -> None:
    """At whichever part, be it submitted at once or later."""
    stand = make(window=1)
    if accepted == 0:
        stand.device.refusals = 1
    handles = stand.prefetch("A0", "B1", "C2", "D3")
    for count in range(1, accepted + 1):
        stand.kept(count)
        if count == accepted:
            stand.device.refusals = 1
        stand.device.run_copies(1)
    stand.end(handles)
    assert ended(handles) == outcome
    assert stand.log[accepted].endswith("refused")
    failed = handles[outcome.index("-")]
    name = "ABCD"[outcome.index("-")]
    assert not any(f"{name}[" in parts for parts in stand.log[accepted + 1 :]), "what has failed is not gone on with"
    with pytest.raises(TransferError, match="out of luck"):
        failed.order()
    assert stand.device.compute_waits == 0
    for handle, letter in zip(handles, outcome, strict=True):
        key, slot = handle.job
        if letter == "+":
            assert stand.memory.content(slot) == stand.memory.blobs[key]
    names = ["A0", "B1", "C2", "D3"]
    stand.end(stand.demand(*(name for name, letter in zip(names, outcome, strict=True) if letter == "-")))
    assert stand.holds(*names)


@pytest.mark.parametrize("call", [CudaCopyHandle.prioritize, CudaCopyHandle.order])
@pytest.mark.parametrize("which", [0, 1])
def test_a_refused_rest_fails_that_wish_alone(
    make: Callable[..., Stand], call: Callable[[CudaCopyHandle], None], which: int
) -> None:
    stand = make(window=1)
    handles = stand.prefetch("A0", "B1", "C2")
    stand.device.refusals = 1
    with pytest.raises(TransferError, match="out of luck") if call is CudaCopyHandle.order else nullcontext():
        call(handles[which])
    assert ended(handles) == "".join("-" if i == which else "." for i in range(3))
    stand.end(handles)
    assert ended(handles) == "".join("-" if i == which else "+" for i in range(3))


@urgencies
def test_whatever_a_submission_raises_its_copies_fail(make: Callable[..., Stand], urgent: bool) -> None:
    stand = make()
    stand.device.refusals, stand.device.refusal = 1, RuntimeError("no event to be had")
    handles = stand.copy("A0", "B1", urgent=urgent)
    assert ended(handles) == "-."
    with pytest.raises(TransferError, match=r"expert 0 of layer 0 .*no event") as caught:
        handles[0].wait()
    assert caught.value.__cause__ is stand.device.refusal
    stand.end(handles)
    assert ended(handles) == "-+"


@pytest.mark.parametrize("accepted", range(5))
@pytest.mark.parametrize("demanded", [False, True])
def test_an_interrupt_loses_no_copy(make: Callable[..., Stand], accepted: int, demanded: bool) -> None:
    """Whether a part of it is on the stream is not known: it has failed, and can be asked for again."""
    stand = make(window=1)
    stand.device.refusal = KeyboardInterrupt()
    handles = stand.prefetch("A0", "B1", "C2")
    for _ in range(accepted):
        stand.device.run_copies(1)
        stand.transfer.pump()
    stand.device.run_copies(1)
    stand.device.refusals = 1
    call = partial(stand.demand, "D3") if demanded else stand.transfer.pump
    with pytest.raises(KeyboardInterrupt):
        call()
    stand.device.refusal = None
    for handle in handles:
        handle.prioritize()
    stand.end(handles)
    for handle, letter in zip(handles, ended(handles), strict=True):
        key, slot = handle.job
        assert (letter == "+") == (key not in stand.device.struck)
        assert letter == "-" or stand.memory.content(slot) == stand.memory.blobs[key]
    again = [name for name, letter in zip(("A0", "B1", "C2"), ended(handles), strict=True) if letter == "-"]
    assert bool(again) != demanded
    stand.end(stand.demand("D3", *again))
    assert stand.holds("A0", "B1", "C2", "D3")


@urgencies
def test_after_an_interrupted_request_experts_can_be_had_elsewhere(
    monkeypatch: pytest.MonkeyPatch, urgent: bool
) -> None:
    """The slots that they were to have may still be written: nobody gets those."""
    room = ExpertRuntime("lru", 4, Shape(6, 4, 1), [6], in_step=True)
    room.source.begin_step()
    room.device.refusals, room.device.refusal = 1, KeyboardInterrupt()
    seen = list[CopyRange]()
    check = room.device._check_pieces
    monkeypatch.setattr(room.device, "_check_pieces", lambda pieces: (seen.extend(pieces), check(pieces)))
    prefetches = PrefetchRequests.of(PrefetchRequest(ExpertKey(0, expert), 1.0, 0) for expert in (0, 1))
    with pytest.raises(KeyboardInterrupt):
        list(room.source.use(0, [0, 1])) if urgent else room.source.prefetch(prefetches)
    monkeypatch.undo()
    assert not room.source.cache.entries()
    assert not len(room.source.loads)
    room.device.refusal, lost = None, {room.memory.job(piece).slot for piece in seen}
    for experts in ([2, 3, 4], [0, 1, 5]):
        for batch in room.source.use(0, experts):
            assert lost.isdisjoint(batch.slots)
            room.device.launch_batch(batch)
        room.device.finish()
    room.source.close()
    assert not room.device.failures


def test_nobody_waits_for_a_device_that_is_broken(make: Callable[..., Stand]) -> None:
    stand = make(window=1)
    handles = stand.prefetch("A0", "B1")
    stand.device.break_down()
    for handle in handles:
        with pytest.raises(TransferError, match="illegal memory access"):
            within(handle.wait)
    assert ended(stand.prefetch("D3")) == "-"
    stand.device.broken = False
    stand.device.finish()
    later = stand.prefetch("C2")
    stand.end(later)
    assert ended(later) == "+"


# ---- closing


def test_closing_fails_what_waits_and_lets_end_what_is_on_the_stream(make: Callable[..., Stand]) -> None:
    stand = make(window=1)
    sent, half, waiting = stand.demand("C2") + stand.prefetch("A0", "B1")
    closing = threading.Thread(target=stand.transfer.close, daemon=True)
    closing.start()
    for handle in (half, waiting):
        with pytest.raises(TransferError, match="closed"):
            within(handle.wait)  # though no byte has moved
        with pytest.raises(TransferError, match="closed"):
            handle.order()
        handle.prioritize()
    assert ended([sent, half, waiting]) == ".--"
    assert stand.device.drains < 1
    stand.device.finish()
    closing.join(LIMIT)
    assert not closing.is_alive()
    assert stand.device.drains == 1
    assert ended([sent, half, waiting]) == "+--"
    assert stand.log == ["C[0:40]", "A[0:16]"]
    assert stand.memory.content(2) == stand.memory.blobs[ExpertKey(0, 2)]
    assert not own_threads()


@pytest.mark.parametrize("busy", [False, True])
def test_closing_twice_is_closing_once_and_nothing_is_copied_after_it(make: Callable[..., Stand], busy: bool) -> None:
    stand = make()
    handles = stand.prefetch("A0") if busy else []
    with stand.device.running():
        within(stand.transfer.close)
    within(stand.transfer.close)
    assert stand.device.drains == 1
    assert not own_threads()
    logged = len(stand.log)
    for urgent in (True, False):
        with pytest.raises(TransferError, match="closed"):
            stand.copy("B1", urgent=urgent)
    stand.transfer.fence([0])
    assert len(stand.log) == logged
    assert all(handle.ready() for handle in handles)


# ---- the source on top, with compute that comes after the host


class Shape(NamedTuple):
    nbytes: int
    chunk: int
    window: int


SHAPES = (Shape(6, 4, 1), Shape(7, 2, 1), Shape(8, 8, 2), Shape(5, 8, 1), Shape(4, 64, 2), Shape(9, 2, 2))
EXPERTS = (6, 4, 5, 6)
LAST_LAYER = 6  # experts of the last layer: more than there are slots, so that a lost slot shows


class ExpertRuntime:
    """An `ExpertSource` on a played device. Every batch becomes a kernel that looks at the bytes when it finally runs.

    The host runs ahead of compute; or it keeps in step: before each use it reads the router's choice, which is behind
    everything that compute was given before.
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
        self.experts = tuple(experts)
        self.in_step = in_step
        self.threaded = threaded
        self.closed = False
        self.memory = Memory(slots, shape.nbytes, experts)
        self.device = Device(self.memory, chunk=shape.chunk, window=shape.window, seed=seed)
        self.device.moves_itself = not threaded
        self.transfer = WatchedTransfer(self.device, self.memory, chunk=shape.chunk, window=shape.window)
        self.slots = PlainSlots(slots)
        self.counters = Counters()
        self.source = ExpertSource(
            self.slots,
            self.transfer,
            make_eviction(eviction, experts),
            shape.nbytes,
            RealClock(),
            self.counters,
            threaded=threaded,
        )
        self.device.expected = self._under_way
        self.batches: Iterator[ExpertBatch] | None = None
        self.asked: set[ExpertKey] = set()
        self.delivered: set[ExpertKey] = set()
        self.faults = 0

    def synchronize(self) -> None:
        """The host reads something that compute has computed."""
        point = self.transfer.mark()
        if self.threaded:
            self.device.record_compute_event().synchronize()
        else:
            self.device.finish_compute()
        self.transfer.passed(point)

    def keep(self) -> None:
        self.transfer.pump()

    def begin_step(self) -> None:
        if self.in_step:
            self.synchronize()
        self.source.begin_step()

    def use(self, layer: int, experts: Sequence[int], *, ahead: bool = False) -> None:
        """Begin a use and take its first batch; `ahead`: after giving compute what is READY before it is asked for."""
        assert self.batches is None
        if not self.threaded:
            self.device.struck.clear()
        self.asked = {ExpertKey(layer, expert) for expert in experts}
        self.delivered = set()
        pinned = self._run_ahead(layer) if ahead and not self.closed else None
        if pinned is None and self.in_step:
            self.synchronize()
        if pinned is not None and self.source.use_pinned(pinned, sorted(experts)):
            return
        self.batches = self.source.use(layer, experts, pinned)
        self.next_wave()

    def _run_ahead(self, layer: int) -> PinnedLayer:
        """As a port does: the host waits for all that was given before the opening, and for nothing given after it."""
        known = self.device.record_compute_event()
        pinned = self.source.open(layer)
        given = [key for key in self.asked if pinned.slots[key.expert] >= 0]  # what is not chosen is not read
        self.device.launch([(key, int(pinned.slots[key.expert])) for key in given])
        self.delivered |= set(given)
        self.source.book()
        if self.threaded:
            known.synchronize()
        while not known.query():
            assert self.device.step_compute() or self.device.step_copies(), "both streams wait for each other"
        return pinned

    def next_wave(self) -> None:
        """Give the batch back, once its kernel is submitted, and take the next."""
        assert self.batches is not None
        try:
            batch = next(self.batches, None)
        except TransferError:
            assert self.closed or self.device.struck & (self.asked - self.delivered), "raised for no reason"
            self.batches = None
            self.faults += 1
            return
        if batch is None:
            assert self.delivered == self.asked
            self.batches = None
            return
        keys = {ExpertKey(batch.layer, expert) for expert in batch.experts}
        assert keys <= self.asked - self.delivered
        self.delivered |= keys
        self.device.launch_batch(batch)

    def use_all(self, layer: int, experts: Sequence[int]) -> None:
        self.use(layer, experts)
        while self.batches is not None:
            self.next_wave()

    def leave(self, *, raising: bool) -> None:
        """The consumer stops in the middle; what it has submitted still runs."""
        batches, self.batches = self.batches, None
        assert batches is not None
        if raising:
            with pytest.raises(RuntimeError, match="the consumer failed"):
                batches.throw(RuntimeError("the consumer failed"))  # type: ignore[attr-defined]
        else:
            batches.close()  # type: ignore[attr-defined]

    def close(self) -> None:
        self.closed = True
        self.source.close()

    def _under_way(self, job: CopyJob) -> bool:
        entry = self.source.cache.get(job.key)
        return entry is not None and entry.state is Residency.LOADING and entry.slot == job.slot

    def check(self) -> None:
        assert not self.device.failures, self.device.failures
        entries = self.source.cache.entries()
        assert len({entry.slot for entry in entries}) == len(entries) <= self.slots.count

    def settle(self) -> None:
        """Let everything end, and see that books and bytes agree."""
        self.source.end_step()
        while any(entry.state is Residency.LOADING for entry in self.source.cache.entries()):
            self.keep()
            if self.threaded:
                self.device.until_idle()
            else:
                self.device.finish()
            self.source.pump()
        for entry in self.source.cache.entries():
            assert entry.pins == 0
            assert self.memory.content(entry.slot) == self.memory.blobs[entry.key]
        self.check()

    def finish(self) -> None:
        """Settle, see that no slot is lost, and close."""
        while self.batches is not None:
            self.next_wave()
        self.device.refusals, self.device.fault_rate = 0, 0.0
        if not self.closed:
            self.device.finish()
            self.settle()
            faults, layer = self.faults, len(self.experts) - 1
            self.use_all(layer, range(self.experts[layer]))
            assert self.faults == faults, "everything is well, yet experts cannot be had"
            self.device.finish()
            self.settle()
            assert len(self.source.cache.entries()) == self.slots.count, "a slot was lost"
        self.close()
        self.close()
        assert self.device.drains == self.slots.closings == 1
        self.device.finish()
        self.check()


def make_runtime(slots: int = 3) -> ExpertRuntime:
    return ExpertRuntime("lru", slots, Shape(6, 4, 1), (4, LAST_LAYER), in_step=False)


def prefetch(room: ExpertRuntime, *keys: tuple[int, int]) -> None:
    room.source.prefetch(PrefetchRequests.of(PrefetchRequest(ExpertKey(*key), 0.9, key[0]) for key in keys))


def residency(room: ExpertRuntime, *keys: tuple[int, int]) -> list[Residency]:
    entries = [room.source.cache.get(ExpertKey(*key)) for key in keys]
    return [entry.state if entry is not None else Residency.ABSENT for entry in entries]


@pytest.mark.parametrize("accepted", [0, 1])
def test_an_expert_whose_wish_failed_is_absent_and_can_be_demanded(accepted: int) -> None:
    room = make_runtime(slots=2)
    room.source.begin_step()
    room.device.refusals = 1 - accepted
    prefetch(room, (0, 0))
    if accepted:
        assert residency(room, (0, 0)) == [Residency.LOADING]
        room.device.run_copies(1)
        room.device.refusals = 1
        room.keep()
    room.source.pump()
    assert residency(room, (0, 0)) == [Residency.ABSENT]
    assert room.counters.failed_bytes == room.memory.nbytes
    room.use_all(0, [0, 1])
    assert room.faults == 0
    assert (room.counters.demand_loads, room.counters.late) == (2, 0)
    room.finish()


def test_a_demand_that_is_refused_fails_its_use_alone() -> None:
    room = make_runtime()
    room.device.refusals = 1
    room.use_all(0, [0, 1])
    assert (room.faults, residency(room, (0, 0))) == (1, [Residency.ABSENT])
    room.use_all(0, [0, 1])
    assert room.faults == 1
    room.finish()


def test_a_half_sent_wish_that_is_needed_and_then_refused_fails_its_use_alone() -> None:
    room = make_runtime()
    room.source.begin_step()
    prefetch(room, (0, 0), (0, 1))
    room.device.refusals = 1
    room.use_all(0, [0])
    assert (room.faults, residency(room, (0, 0), (0, 1))) == (1, [Residency.ABSENT, Residency.LOADING])
    room.use_all(0, [1, 0])
    assert room.faults == 1
    room.finish()


def test_the_host_goes_through_a_pass_before_a_byte_has_moved() -> None:
    """One slot, many experts: each is in it for a moment, and its kernel finds it there."""
    room = make_runtime(slots=1)
    for layer in (0, 1, 0):
        room.use_all(layer, range(room.experts[layer]))
    assert room.memory.content(0) == GARBAGE * room.memory.nbytes
    assert room.counters.demand_loads == 4 + LAST_LAYER + 4
    room.device.run_copies()
    room.finish()


# One number is drawn for a whole prefetch request, and one for a set of experts: most of the time goes into drawing. Numbers of
# layers and experts are taken modulo how many there are.
SCORES = (0.1, 0.5, 0.9, 1.0)
SLACKS = (0, 0, 0, 0, 0, -1, 1, None)  # a prefetch request's deadline, seen from its own layer; None: not to be fetched
numbers = st.integers(0, 7)
some_wishes = st.lists(
    st.integers(0, 2047).map(lambda n: (n // 256, n // 32 % 8, SCORES[n // 8 % 4], SLACKS[n % 8])),
    min_size=1,
    max_size=6,
)
some_experts = st.integers(1, 255).map(lambda n: [e for e in range(8) if n >> e & 1])
some_steps = st.sampled_from([0, 0, 1, 2, 3, 5, 8, 13, 10_000])


rules_in_turn = pytest.mark.parametrize("evictions", [EVICTION_POLICIES.names()[::2], EVICTION_POLICIES.names()[1::2]], ids=", ".join)


class DecodeGraphs(RuleBasedStateMachine):
    """A host that runs ahead, two streams at any speed, a thread that comes late, and refusals; in any order."""

    evictions: Sequence[str]
    room: ExpertRuntime

    @initialize(
        rule=numbers,
        slots=st.integers(1, 4),
        shape=st.sampled_from(SHAPES),
        experts=st.lists(st.integers(1, 3), min_size=1, max_size=2),
        in_step=st.booleans(),
        seed=st.integers(0, 3),
    )
    def build(self, rule: int, slots: int, shape: Shape, experts: list[int], in_step: bool, seed: int) -> None:
        eviction = self.evictions[rule % len(self.evictions)]
        self.room = ExpertRuntime(eviction, slots, shape, [*experts, LAST_LAYER], in_step=in_step, seed=seed)

    def key(self, layer: int, expert: int) -> ExpertKey:
        layer %= len(self.room.experts)
        return ExpertKey(layer, expert % self.room.experts[layer])

    @property
    def using(self) -> bool:
        return self.room.batches is not None

    @rule(begins=st.booleans())
    @precondition(lambda self: not self.using)
    def turn(self, begins: bool) -> None:
        if begins:
            self.room.begin_step()
        else:
            self.room.source.end_step()

    @rule(prefetches=some_wishes)
    def prefetch(self, prefetches: list[tuple[int, int, float, int | None]]) -> None:
        for layer, expert, score, slack in prefetches:
            key = self.key(layer, expert)
            self.room.source.prefetch(
                PrefetchRequests.of([PrefetchRequest(key, score, key.layer + (slack or 0), fetch=slack is not None)])
            )

    @rule(copies=some_steps, compute=some_steps, compute_first=st.booleans())
    def pass_time(self, copies: int, compute: int, compute_first: bool) -> None:
        device = self.room.device
        turns = [(device.step_copies, copies), (device.step_compute, compute)]
        for step, count in reversed(turns) if compute_first else turns:
            for _ in range(count):
                if not step():
                    break

    @rule(pump=st.booleans(), num_logits=st.booleans())
    def threads_run(self, pump: bool, keep: bool) -> None:
        if keep:
            self.room.keep()
        if pump:
            self.room.source.pump()

    @rule(layer=numbers, experts=some_experts, ahead=st.booleans())
    @precondition(lambda self: not self.using)
    def use(self, layer: int, experts: list[int], ahead: bool) -> None:
        layer %= len(self.room.experts)
        self.room.use(layer, sorted({self.key(layer, e).expert for e in experts}), ahead=ahead)

    @rule(batches=st.integers(1, 8))
    @precondition(lambda self: self.using)
    def consume(self, batches: int) -> None:
        for _ in range(batches):
            if self.using:
                self.room.next_wave()

    @rule(raising=st.booleans())
    @precondition(lambda self: self.using)
    def leave(self, raising: bool) -> None:
        self.room.leave(raising=raising)

    @rule(refusals=st.sampled_from([0, 0, 1, 1, 2, 3]), budget=st.none() | st.integers(0, 40))
    def disturb(self, refusals: int, budget: int | None) -> None:
        self.room.device.refusals = refusals
        self.room.source.grants.step_budget = budget

    @rule(really=st.integers(0, 15))
    def close(self, really: int) -> None:
        if really == 1:
            self.room.close()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "room"):
            self.room.check()

    def teardown(self) -> None:
        if hasattr(self, "room") and sys.exc_info()[0] is None:  # else the failure itself is what to see
            self.room.finish()


@rules_in_turn
def test_whatever_compute_was_given_it_finds(evictions: Sequence[str]) -> None:
    modest = settings(
        max_examples=200,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    machine = type("Program", (DecodeGraphs,), {"evictions": evictions})
    within(lambda: run_state_machine_as_test(machine, settings=modest))


# ---- the same with real threads


@pytest.fixture
def _restless() -> Iterator[None]:
    """Threads take turns more often than they would."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(before)


def run_step(room: ExpertRuntime, rng: random.Random) -> None:
    """A step of a model whose draft guesses most experts right."""
    room.begin_step()
    room.source.grants.step_budget = rng.choice([None, None, 3 * room.memory.nbytes])
    needed = [rng.sample(range(count), rng.randint(1, count)) for count in room.experts]
    for layer, experts in enumerate(needed):
        guesses = [e for e in range(room.experts[layer]) if (e in experts) == (rng.random() < 0.8)]
        room.source.prefetch(
            PrefetchRequests.of(PrefetchRequest(ExpertKey(layer, e), rng.random(), layer) for e in guesses)
        )
    for layer, experts in enumerate(needed):
        if room.faults and room.closed:
            return
        room.use(layer, experts, ahead=rng.random() < 0.5)
        while room.batches is not None:
            if rng.random() < 0.05:
                room.leave(raising=False)
            else:
                room.next_wave()
    room.source.end_step()


def run_steps(room: ExpertRuntime, seed: int, steps: int) -> None:
    """Some steps; then everything ends, is looked at, and closed."""
    rng = random.Random(seed)
    for _ in range(steps):
        run_step(room, rng)
    room.device.fault_rate = 0.0
    room.synchronize()
    room.settle()
    room.close()
    room.device.until_idle()


@pytest.mark.usefixtures("_restless")
@rules_in_turn
@pytest.mark.parametrize("in_step", [False, True], ids=["ahead", "in step"])
@pytest.mark.parametrize("fault_rate", [0.0, 0.05])
def test_with_threads_too(evictions: Sequence[str], in_step: bool, fault_rate: float) -> None:
    before = own_threads()
    faults = 0
    for seed, shape in enumerate(SHAPES):
        slots, eviction = 1 + seed % 4, evictions[seed % len(evictions)]
        room = ExpertRuntime(eviction, slots, shape, EXPERTS, in_step=in_step, seed=seed, threaded=True)
        room.device.fault_rate = fault_rate
        with room.device.running():
            within(partial(run_steps, room, seed, 20))
        room.check()
        faults += room.faults
        assert own_threads() == before
    assert (faults > 0) == (fault_rate > 0), "the faults were meant to be met"


@pytest.mark.usefixtures("_restless")
def test_closing_from_another_thread_ends_a_model_in_the_middle() -> None:
    before = own_threads()
    for seed in range(8):
        room = ExpertRuntime("lru", 3, SHAPES[seed % len(SHAPES)], EXPERTS, in_step=False, seed=seed, threaded=True)
        warm = threading.Event()
        worker = threading.Thread(target=run_until_closed, args=(room, seed, warm), daemon=True)
        with room.device.running():
            worker.start()
            assert warm.wait(LIMIT)
            within(room.close)
            worker.join(LIMIT)
            assert not worker.is_alive(), "the model's thread hangs"
        room.check()
        assert room.faults == 1
        assert own_threads() == before


def run_until_closed(room: ExpertRuntime, seed: int, warm: threading.Event) -> None:
    rng = random.Random(seed)
    while not room.faults:
        run_step(room, rng)
        warm.set()


@pytest.mark.parametrize(("parts", "chunk"), [(0.25, 1.0), (1.0, 1.0), (1.5, 1.5), (2.0, 1.0), (20.0, 1.0)])
def test_a_chunk_is_a_whole_expert_rather_than_one_and_a_bit(parts: float, chunk: float) -> None:
    assert chunk_for(int(parts * CHUNK_BYTES)) == chunk * CHUNK_BYTES
