"""Transfers and links: the right bytes in the right slots, the order of copies, failures and close."""

from __future__ import annotations

import errno
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from experts_helpers import BLOB, LAYOUT, blob_of, fill, own_threads, spec_of, weights_of, within
from hypothesis import given, settings
from hypothesis import strategies as st

from spmoe.errors import BudgetError, StoreError, TransferError
from spmoe.experts import workers
from spmoe.experts.link import EmulatedLink, ThrottledTransfer, VirtualTransfer
from spmoe.experts.slots import MemorySlots
from spmoe.experts.store import BlobLayout, ExpertFile, ensure_expert_file
from spmoe.experts.transfer import CopyHandle, CopyJob, FileTransfer
from spmoe.observe.clock import VirtualClock
from spmoe.observe.timeline import Activity, Span, Timeline
from spmoe.types import ExpertKey

LIMIT = 30.0  # seconds after which a test that hangs fails
GARBAGE = b"\xaa" * LAYOUT.nbytes
A, B, C, D, E, F = (ExpertKey(layer, expert) for layer in range(2) for expert in range(3))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Write an expert file of two layers with three experts each."""
    path = tmp_path / "model.safetensors"
    ensure_expert_file(path, spec_of(), fill).close()
    return path


@pytest.fixture
def slots() -> MemorySlots:
    """Make six slots that are filled with garbage."""
    slots = MemorySlots(6, LAYOUT)
    for slot in range(slots.count):
        slots.buffer(slot)[:] = GARBAGE
    return slots


@pytest.fixture
def start(path: Path, slots: MemorySlots) -> Iterator[Callable[..., FileTransfer]]:
    """Make transfers from the file that are closed at the end of the test; then check that their threads have ended."""
    before = own_threads()
    made: list[FileTransfer] = []

    def start(readers: int = 2) -> FileTransfer:
        made.append(FileTransfer(ExpertFile.open(path), slots, readers))
        return made[-1]

    yield start
    for transfer in made:
        within(LIMIT, transfer.close)
    assert own_threads() == before


def wait_all(handles: list[CopyHandle]) -> None:
    """Wait for copies; fail if one does not end."""

    def wait() -> None:
        for handle in handles:
            handle.wait()

    within(LIMIT, wait)


def offsets(path: Path) -> dict[ExpertKey, int]:
    """Return each expert's offset in the file, in bytes."""
    file = ExpertFile.open(path)
    try:
        return {key: file.offset(key) for key in file.spec.keys()}  # noqa: SIM118
    finally:
        file.close()


class GatedReads:
    """Stands in for os.preadv: records which expert each read is for, and blocks every read until `opened` is set."""

    def __init__(self, path: Path) -> None:
        self.order: list[ExpertKey] = []
        self.concurrent = 0
        self.most_concurrent = 0
        self.opened = threading.Event()
        self._keys = {offset: key for key, offset in offsets(path).items()}
        self._changed = threading.Condition()
        self._read = os.preadv

    def __call__(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        with self._changed:
            self.order.append(self._keys[offset])
            self.concurrent += 1
            self.most_concurrent = max(self.most_concurrent, self.concurrent)
            self._changed.notify_all()
        assert self.opened.wait(LIMIT)
        with self._changed:
            self.concurrent -= 1
        return self._read(fd, buffers, offset)

    def wait_for(self, reads: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.order) >= reads, LIMIT)


# ---- slots


def test_slot_shows_the_bytes_written_into_it(slots: MemorySlots) -> None:
    slots.buffer(1)[:] = blob_of(D)
    for name, tensor in weights_of(D).items():
        assert torch.equal(slots.weights(1)[name], tensor)
    assert bytes(slots.buffer(0)) == bytes(slots.buffer(2)) == GARBAGE, "other slots are untouched"


def test_closed_slots_free_their_memory_except_tensors_in_use() -> None:
    slots = MemorySlots(2, LAYOUT)
    slots.buffer(1)[:] = blob_of(D)
    weights = slots.weights(1)
    unused = weakref.ref(slots.weights(0)["up"])
    slots.close()
    slots.close()
    assert unused() is None
    for name, tensor in weights_of(D).items():
        assert torch.equal(weights[name], tensor)


def test_slots_that_do_not_fit_in_memory_are_a_budget_error() -> None:
    layout = BlobLayout("uint8", 1, "uint8", 1, (), 1 << 50)
    with pytest.raises(BudgetError, match=r"cannot allocate 64 expert slots.*--expert-memory"):
        MemorySlots(64, layout)


# ---- FileTransfer


@pytest.mark.parametrize("readers", [1, 2, 4])
@pytest.mark.parametrize("urgent", [False, True])
def test_copies_the_right_bytes_into_the_right_slots(
    start: Callable[..., FileTransfer], slots: MemorySlots, readers: int, urgent: bool
) -> None:
    transfer = start(readers)
    assert transfer.depth == readers
    keys = [D, A, F, C, B]  # slot 5 stays as it is
    handles = transfer.copy([CopyJob(key, slot) for slot, key in enumerate(keys)], urgent=urgent)
    wait_all(handles)
    assert all(handle.ready() for handle in handles)
    for slot, key in enumerate(keys):
        assert bytes(slots.buffer(slot)) == blob_of(key)
    assert bytes(slots.buffer(5)) == GARBAGE
    wait_all(handles)  # a handle can be waited for again


def test_as_many_reads_are_in_flight_as_there_are_readers(
    start: Callable[..., FileTransfer], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = GatedReads(path)
    monkeypatch.setattr(os, "preadv", gate)
    transfer = start(readers=3)
    handles = transfer.copy([CopyJob(key, slot) for slot, key in enumerate([A, B, C, D, E, F])], urgent=False)
    gate.wait_for(3)
    assert gate.concurrent == 3
    assert not any(handle.ready() for handle in handles)
    gate.opened.set()
    wait_all(handles)
    assert gate.most_concurrent == 3


def test_urgent_copies_wait_for_no_other_copy(
    start: Callable[..., FileTransfer], path: Path, slots: MemorySlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = GatedReads(path)
    monkeypatch.setattr(os, "preadv", gate)
    transfer = start(readers=1)
    handles = transfer.copy([CopyJob(A, 0), CopyJob(B, 1), CopyJob(C, 2)], urgent=False)
    gate.wait_for(1)
    handles += transfer.copy([CopyJob(D, 3), CopyJob(E, 4)], urgent=True)
    gate.wait_for(2)
    assert gate.order == [A, D]
    gate.opened.set()
    wait_all(handles)
    assert [key for key in gate.order if key in (A, B, C)] == [A, B, C]
    assert [key for key in gate.order if key in (D, E)] == [D, E]
    assert [bytes(slots.buffer(slot)) for slot in range(5)] == [blob_of(key) for key in (A, B, C, D, E)]


def test_short_reads_are_continued(
    start: Callable[..., FileTransfer], slots: MemorySlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, calls = os.preadv, []

    def read_few(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        return read(fd, [buffers[0][: 1 + len(calls) % 700]], offset)

    monkeypatch.setattr(os, "preadv", read_few)
    wait_all(start(readers=1).copy([CopyJob(B, 0), CopyJob(E, 1)], urgent=False))
    assert bytes(slots.buffer(0)) == blob_of(B)
    assert bytes(slots.buffer(1)) == blob_of(E)
    assert len(calls) > 10


def assert_fails(path: Path, handle: CopyHandle, *words: str) -> None:
    """Check that every wait for the copy raises a one-line TransferError with the file's path and these words."""
    for _ in range(2):
        with pytest.raises(TransferError, match=re.escape(str(path))) as caught:
            within(LIMIT, handle.wait)
        for word in words:
            assert word in str(caught.value)
        assert "\n" not in str(caught.value)
    assert handle.ready()


def test_file_that_is_truncated_while_open_fails_the_copy(
    start: Callable[..., FileTransfer], path: Path, slots: MemorySlots
) -> None:
    transfer = start(readers=2)
    os.truncate(path, path.stat().st_size - LAYOUT.nbytes - 100)
    complete, cut, missing = transfer.copy([CopyJob(D, 0), CopyJob(E, 1), CopyJob(F, 2)], urgent=True)
    wait_all([complete])
    assert bytes(slots.buffer(0)) == blob_of(D)
    assert_fails(path, cut, "expert 1 of layer 1", "ends 100 bytes early")
    assert_fails(path, missing, "expert 2 of layer 1", f"ends {LAYOUT.nbytes} bytes early")


@pytest.mark.parametrize("failure", [OSError(errno.EIO, os.strerror(errno.EIO)), ValueError("not an OSError")])
def test_failed_read_fails_only_its_own_copy(
    start: Callable[..., FileTransfer],
    path: Path,
    slots: MemorySlots,
    monkeypatch: pytest.MonkeyPatch,
    failure: Exception,
) -> None:
    transfer, read = start(readers=1), os.preadv
    bad_offset = offsets(path)[B]

    def flaky(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset == bad_offset:
            raise failure
        return read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", flaky)
    first, broken, last = transfer.copy([CopyJob(A, 0), CopyJob(B, 1), CopyJob(C, 2)], urgent=False)
    wait_all([first, last])
    assert_fails(path, broken, "expert 1 of layer 0", str(failure))
    assert bytes(slots.buffer(2)) == blob_of(C)
    monkeypatch.undo()
    wait_all(transfer.copy([CopyJob(B, 1)], urgent=True))
    assert bytes(slots.buffer(1)) == blob_of(B), "the reader thread goes on, and the next read succeeds"


def test_expert_that_is_not_in_the_file_fails_the_copy(start: Callable[..., FileTransfer], path: Path) -> None:
    transfer = start(readers=1)
    (handle,) = transfer.copy([CopyJob(ExpertKey(9, 0), 0)], urgent=True)
    assert_fails(path, handle, "expert 0 of layer 9")
    wait_all(transfer.copy([CopyJob(A, 0)], urgent=True))


def flip_bit(path: Path, offset: int) -> None:
    """Flip one bit of the byte at this offset."""
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_blob_with_a_wrong_checksum_is_a_store_error(start: Callable[..., FileTransfer], path: Path) -> None:
    transfer = start()
    flip_bit(path, offsets(path)[E] + 17)
    broken, intact = transfer.copy([CopyJob(E, 0), CopyJob(F, 1)], urgent=True)
    for _ in range(2):
        with pytest.raises(StoreError, match=r"expert 1 of layer 1 .* checksum") as caught:
            within(LIMIT, broken.wait)
        assert str(path) in str(caught.value)
    wait_all([intact])
    (again,) = transfer.copy([CopyJob(E, 0)], urgent=True)
    with pytest.raises(StoreError, match="checksum"):
        within(LIMIT, again.wait)


def test_close_lets_running_reads_end_and_fails_queued_ones(
    start: Callable[..., FileTransfer], path: Path, slots: MemorySlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = GatedReads(path)
    monkeypatch.setattr(os, "preadv", gate)
    transfer = start(readers=1)
    (running,) = transfer.copy([CopyJob(A, 0)], urgent=False)
    gate.wait_for(1)
    queued = transfer.copy([CopyJob(B, 1), CopyJob(C, 2)], urgent=False)
    closing = threading.Thread(target=transfer.close)
    closing.start()

    def submit_until_closed() -> None:
        while True:
            queued.extend(transfer.copy([CopyJob(D, 3)], urgent=False))
            closing.join(0.001)

    with pytest.raises(TransferError, match="closed"):
        within(LIMIT, submit_until_closed)
    gate.opened.set()
    closing.join(LIMIT)
    assert not closing.is_alive()
    wait_all([running])
    assert bytes(slots.buffer(0)) == blob_of(A)
    for handle in queued:
        assert handle.ready()
        with pytest.raises(TransferError, match="closed"):
            within(LIMIT, handle.wait)
    assert gate.order == [A]
    assert bytes(slots.buffer(1)) == GARBAGE
    within(LIMIT, transfer.close)


def test_drained_transfer_writes_no_slot_and_copies_again(
    start: Callable[..., FileTransfer], path: Path, slots: MemorySlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = GatedReads(path)
    monkeypatch.setattr(os, "preadv", gate)
    transfer = start(readers=1)
    running, queued = transfer.copy([CopyJob(A, 0), CopyJob(B, 1)], urgent=False)
    gate.wait_for(1)
    draining = threading.Thread(target=transfer.drain)
    draining.start()
    gate.opened.set()
    draining.join(LIMIT)
    assert not draining.is_alive()
    assert running.ready()
    with pytest.raises(TransferError):
        within(LIMIT, queued.wait)
    assert bytes(slots.buffer(1)) == GARBAGE
    wait_all(transfer.copy([CopyJob(B, 1)], urgent=True))
    assert bytes(slots.buffer(1)) == blob_of(B)


def test_close_says_which_reads_are_stuck(
    start: Callable[..., FileTransfer], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = GatedReads(path)
    monkeypatch.setattr(os, "preadv", gate)
    monkeypatch.setattr(workers, "JOIN_SECONDS", 0.01)
    transfer = start(readers=1)
    (handle,) = transfer.copy([CopyJob(A, 0)], urgent=True)
    gate.wait_for(1)
    with pytest.raises(TransferError, match=r"1 calls of spmoe-demand-reader have not ended for 0\.01 s"):
        within(LIMIT, transfer.drain)
    gate.opened.set()
    wait_all([handle])


def test_close_closes_the_file_and_ends_the_threads(path: Path, slots: MemorySlots) -> None:
    before = own_threads()
    file = ExpertFile.open(path)
    fd = file.fd
    transfer = FileTransfer(file, slots, 1)
    os.fstat(fd)
    within(LIMIT, transfer.close)
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(fd)
    assert own_threads() == before
    with pytest.raises(TransferError, match="closed"):
        transfer.copy([CopyJob(A, 0)], urgent=True)


# ---- EmulatedLink


class NamedCopies:
    """Link of 100 bytes per second, with a name for each copy."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.link = EmulatedLink(100.0, self.clock)
        self._copies: dict[str, Any] = {}

    def enter(self, name: str, nbytes: int = 100, *, urgent: bool = False) -> None:
        self._copies[name] = self.link.enter(nbytes, urgent)

    def prioritize(self, name: str) -> None:
        self.link.prioritize(self._copies[name])

    def done(self) -> set[str]:
        """Return the names of the copies that have ended."""
        return {name for name, copy in self._copies.items() if self.link.done(copy)}

    def end_times(self) -> dict[str, float]:
        """Wait for all copies; return when each ended."""
        for copy in self._copies.values():
            self.link.wait(copy)
        return {name: copy.done_at for name, copy in self._copies.items()}


def test_link_moves_one_copy_at_a_time_at_its_rate() -> None:
    copies = NamedCopies()
    copies.enter("a", 100)
    copies.enter("b", 50)
    copies.clock.sleep(0.5)
    copies.enter("c", 200)
    assert copies.done() == set()
    copies.clock.sleep(0.5)
    assert copies.done() == {"a"}
    assert copies.end_times() == {"a": 1.0, "b": 1.5, "c": 3.5}
    assert copies.clock.now() == 3.5
    copies.clock.sleep(10.0)
    copies.enter("d", 100)
    assert copies.end_times()["d"] == 14.5, "on an idle link a copy starts when it enters, not earlier"


def test_urgent_link_copies_go_before_copies_that_have_not_started() -> None:
    copies = NamedCopies()
    for name in "abc":
        copies.enter(name)
    copies.clock.sleep(0.5)
    copies.enter("x", urgent=True)
    copies.enter("y", urgent=True)
    copies.enter("d")
    assert copies.end_times() == {"a": 1.0, "x": 2.0, "y": 3.0, "b": 4.0, "c": 5.0, "d": 6.0}


def test_prioritized_link_copy_goes_before_all_that_are_not_urgent() -> None:
    copies = NamedCopies()
    for name in "abcd":
        copies.enter(name)
    copies.prioritize("c")
    copies.clock.sleep(1.5)  # c has started
    copies.prioritize("d")
    copies.prioritize("a")  # has ended
    copies.prioritize("c")  # has started
    assert copies.end_times() == {"a": 1.0, "c": 2.0, "d": 3.0, "b": 4.0}


def test_link_copy_that_enters_late_does_not_change_earlier_ones() -> None:
    copies = NamedCopies()
    for name in "abc":
        copies.enter(name)
    copies.clock.sleep(1.5)  # without a look at the link meanwhile; b has started
    copies.enter("x", urgent=True)
    assert copies.end_times() == {"a": 1.0, "b": 2.0, "x": 3.0, "c": 4.0}


def test_next_event_is_the_end_of_the_running_copy() -> None:
    copies = NamedCopies()
    assert copies.link.next_event() is None
    copies.enter("a")
    copies.enter("b")
    assert copies.link.next_event() == 1.0
    copies.clock.sleep(1.0)
    assert copies.link.next_event() == 2.0
    copies.clock.sleep(5.0)
    assert copies.link.next_event() is None


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    actions=st.lists(
        st.one_of(
            st.tuples(st.just("enter"), st.booleans()),
            st.tuples(st.just("prioritize"), st.integers(0, 9)),
            st.tuples(st.just("sleep"), st.sampled_from([0.25, 0.5, 1.0, 1.25, 3.0])),
        ),
        max_size=25,
    )
)
def test_link_behaves_like_a_queue_that_is_stepped_by_quarter_seconds(actions: list[tuple[str, float]]) -> None:
    copies = NamedCopies()
    waiting: list[tuple[bool, int]] = []  # (not urgent, number)
    running: int | None = None
    quarters_left, count = 0, 0
    model_done: set[str] = set()

    def start_next() -> None:
        nonlocal running, quarters_left
        if running is None and waiting:
            waiting.sort()
            running, quarters_left = waiting.pop(0)[1], 4

    for action, value in actions:
        if action == "enter":
            copies.enter(str(count), urgent=bool(value))
            waiting.append((not value, count))
            count += 1
            start_next()
        elif action == "prioritize":
            if value < count:
                copies.prioritize(str(value))
                waiting = [(not_urgent and number != value, number) for not_urgent, number in waiting]
        else:
            for _ in range(int(4 * value)):
                quarters_left -= 1
                if running is not None and quarters_left == 0:
                    model_done.add(str(running))
                    running = None
                start_next()
            copies.clock.sleep(value)
        assert copies.done() == model_done


# ---- ThrottledTransfer, VirtualTransfer, VirtualClock


def test_throttled_copies_take_the_time_of_the_link(start: Callable[..., FileTransfer], slots: MemorySlots) -> None:
    clock = VirtualClock()
    transfer = ThrottledTransfer(start(), 1000, 1000 / 1e9, clock)  # one second per blob
    assert transfer.depth == 2
    first, second, third = transfer.copy([CopyJob(A, 0), CopyJob(B, 1), CopyJob(C, 2)], urgent=False)
    (urgent,) = transfer.copy([CopyJob(D, 3)], urgent=True)
    assert not first.ready()
    third.prioritize()
    for handle, at, slot, key in ((first, 1.0, 0, A), (third, 2.0, 2, C), (urgent, 3.0, 3, D), (second, 4.0, 1, B)):
        wait_all([handle])
        assert clock.now() == at
        assert handle.ready()
        assert bytes(slots.buffer(slot)) == blob_of(key)
    transfer.close()
    with pytest.raises(TransferError, match="closed"):
        transfer.copy([CopyJob(A, 0)], urgent=True)


def test_throttled_copy_waits_for_the_read_too(
    start: Callable[..., FileTransfer], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = GatedReads(path)
    monkeypatch.setattr(os, "preadv", gate)
    clock = VirtualClock()
    (handle,) = ThrottledTransfer(start(), 1000, 1.0, clock).copy([CopyJob(A, 0)], urgent=True)
    clock.sleep(100.0)
    assert not handle.ready()
    gate.opened.set()
    wait_all([handle])
    assert handle.ready()


def test_throttled_copy_fails_if_the_read_fails(start: Callable[..., FileTransfer], path: Path) -> None:
    transfer = ThrottledTransfer(start(), 1000, 1.0, VirtualClock())
    os.truncate(path, path.stat().st_size - LAYOUT.nbytes)
    (handle,) = transfer.copy([CopyJob(F, 0)], urgent=True)
    assert_fails(path, handle, "expert 2 of layer 1")


class CallRecorder:
    """Records the name and the arguments of every method call; each call returns its number."""

    depth = 4

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*args: object) -> int:
            self.calls.append((name, *args))
            return len(self.calls)

        return call


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("set_batching", (False,)),
        ("pump", ()),
        ("wait_and_pump", ("event",)),
        ("bind_compute_stream", ()),
        ("begin_epoch", ()),
        ("finish_epochs", (3,)),
        ("protect_slots", ([1, 2], 3)),
        ("take_stall_seconds", ()),
        ("close", ()),
    ],
)
def test_throttled_transfer_passes_calls_on(method: str, args: tuple[object, ...]) -> None:
    inner = CallRecorder()
    throttled = ThrottledTransfer(inner, 1000, 1.0, VirtualClock())  # type: ignore[arg-type]
    returned = getattr(throttled, method)(*args)
    assert inner.calls == [(method, *args)]
    assert returned == (1 if method in ("begin_epoch", "take_stall_seconds") else None)


def test_throttled_transfer_draws_each_copy_once_at_its_time_on_the_link() -> None:
    clock, timeline = VirtualClock(), Timeline(recording=True)
    inner = VirtualTransfer(clock, 1000, 1e9)
    transfer = ThrottledTransfer(inner, 1000, 1000 / 1e9, clock, timeline)  # one second per blob
    assert transfer.draws_timeline
    (prefetch, behind) = transfer.copy([CopyJob(A, 0), CopyJob(B, 1)], urgent=False)
    (demand,) = transfer.copy([CopyJob(D, 2)], urgent=True)
    for handle in (prefetch, behind, demand, behind):
        handle.wait()
    assert timeline.spans == [
        Span(Activity.PREFETCH, 0.0, 1.0, "0.0"),
        Span(Activity.PREFETCH, 2.0, 3.0, "0.1"),
        Span(Activity.COPY, 1.0, 2.0, "1.0"),
    ]


def test_virtual_transfer_calls_back_once_at_start_and_end() -> None:
    clock = VirtualClock()
    calls: list[tuple[str, CopyJob, float]] = []
    transfer = VirtualTransfer(
        clock,
        BLOB,
        2 * BLOB,
        depth=3,
        on_start=lambda job: calls.append(("start", job, clock.now())),
        on_done=lambda job: calls.append(("done", job, clock.now())),
    )
    assert transfer.depth == 3
    jobs = (CopyJob(A, 0), CopyJob(B, 1))
    first, second = transfer.copy(jobs, urgent=False)
    assert transfer.submissions == [jobs]
    assert calls == [("start", jobs[0], 0.0), ("start", jobs[1], 0.0)]
    second.wait()
    second.wait()
    first.wait()
    assert calls[2:] == [("done", jobs[1], 1.0), ("done", jobs[0], 1.0)]
    transfer.close()
    with pytest.raises(TransferError, match="closed"):
        transfer.copy(jobs, urgent=True)
    assert transfer.submissions == [jobs]


def test_failed_virtual_copy_raises_at_every_wait() -> None:
    calls: list[CopyJob] = []

    def fail(job: CopyJob) -> None:
        calls.append(job)
        raise TransferError("simulated")

    transfer = VirtualTransfer(VirtualClock(), BLOB, BLOB, on_done=fail)
    (handle,) = transfer.copy([CopyJob(A, 0)], urgent=True)
    assert not handle.ready()
    for _ in range(2):
        with pytest.raises(TransferError, match="simulated"):
            handle.wait()
    assert handle.ready()
    assert len(calls) == 1


def test_virtual_clock_stops_at_every_event_on_the_way() -> None:
    clock = VirtualClock()
    transfer = VirtualTransfer(clock, BLOB, BLOB)
    times: list[float] = []
    clock.add_event_source(transfer.link.next_event, lambda: times.append(clock.now()))
    transfer.copy([CopyJob(A, 0), CopyJob(B, 1), CopyJob(C, 2)], urgent=False)
    clock.sleep(2.5)
    assert times == [1.0, 2.0]
    assert clock.now() == 2.5
    clock.sleep(-1.0)
    assert clock.now() == 2.5
    clock.sleep(0.5)
    assert times == [1.0, 2.0, 3.0]
