"""Transfers: the right bytes into the right slots, in the right order, and every copy ends one way or the other."""

from __future__ import annotations

import errno
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from experts_helpers import BLOB, LAYOUT, blob_of, fill, own_threads, spec_of, weights_of, within
from hypothesis import given, settings
from hypothesis import strategies as st

from spmoe.errors import BudgetError, StoreError, TransferError
from spmoe.experts import transfer as transfer_module
from spmoe.experts.link import EmulatedLink, ThrottledTransfer, VirtualTransfer
from spmoe.experts.slots import MemorySlots
from spmoe.experts.store import BlobLayout, ExpertFile, ensure_expert_file
from spmoe.experts.transfer import CopyHandle, CopyJob, FileTransfer
from spmoe.observe.clock import VirtualClock
from spmoe.types import ExpertKey

LIMIT = 30.0  # seconds after which a test that hangs gives up
A, B, C, D, E, F = (ExpertKey(layer, expert) for layer in range(2) for expert in range(3))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A good expert file of two layers with three experts each."""
    path = tmp_path / "model.safetensors"
    ensure_expert_file(path, spec_of(), fill).close()
    return path


@pytest.fixture
def slots() -> MemorySlots:
    slots = MemorySlots(6, LAYOUT)
    for slot in range(slots.count):
        slots.buffer(slot)[:] = b"\xaa" * LAYOUT.nbytes
    return slots


@pytest.fixture
def start(path: Path, slots: MemorySlots) -> Iterator[Callable[..., FileTransfer]]:
    """Make a transfer from the file; closed, and its threads gone, when the test ends."""
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
    def wait() -> None:
        for handle in handles:
            handle.wait()

    within(LIMIT, wait)


def offsets(path: Path) -> dict[ExpertKey, int]:
    """Where in the file each expert is."""
    file = ExpertFile.open(path)
    try:
        return {key: file.offset(key) for key in file.spec.keys()}  # noqa: SIM118
    finally:
        file.close()


class Gate:
    """Stands in for os.preadv: notes whose blob is read, and lets no read through until opened."""

    def __init__(self, path: Path) -> None:
        self.order: list[ExpertKey] = []
        self.concurrent = 0
        self.most = 0
        self.pinned = threading.Event()
        self._keys = {offset: key for key, offset in offsets(path).items()}
        self._changed = threading.Condition()
        self._read = os.preadv

    def __call__(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        with self._changed:
            self.order.append(self._keys[offset])
            self.concurrent += 1
            self.most = max(self.most, self.concurrent)
            self._changed.notify_all()
        assert self.pinned.wait(LIMIT)
        with self._changed:
            self.concurrent -= 1
        return self._read(fd, buffers, offset)

    def wait_for(self, reads: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.order) >= reads, LIMIT)


# ---- slots


def test_slots_show_what_was_written_into_them(slots: MemorySlots) -> None:
    slots.buffer(1)[:] = blob_of(D)
    for name, tensor in weights_of(D).items():
        assert torch.equal(slots.weights(1)[name], tensor)
    assert bytes(slots.buffer(0)) == bytes(slots.buffer(2)) == b"\xaa" * LAYOUT.nbytes, "the neighbours are untouched"


def test_closed_slots_let_go_of_their_memory_but_not_of_what_is_in_use() -> None:
    slots = MemorySlots(2, LAYOUT)
    slots.buffer(1)[:] = blob_of(D)
    weights = slots.weights(1)
    arena = weakref.ref(slots.weights(0)["up"])
    slots.close()
    slots.close()
    assert arena() is None
    for name, tensor in weights_of(D).items():
        assert torch.equal(weights[name], tensor)


def test_slots_that_cannot_be_had_are_one_clear_error() -> None:
    layout = BlobLayout("uint8", (), 1 << 50)
    with pytest.raises(BudgetError, match=r"cannot allocate 64 expert slots.*--expert-memory"):
        MemorySlots(64, layout)


# ---- files


@pytest.mark.parametrize("readers", [1, 2, 4])
@pytest.mark.parametrize("urgent", [False, True])
def test_reads_the_right_bytes_into_the_right_slots(
    start: Callable[..., FileTransfer], slots: MemorySlots, readers: int, urgent: bool
) -> None:
    transfer = start(readers)
    assert transfer.depth == readers
    keys = [D, A, F, C, B]  # and slot 5 stays as it is
    handles = transfer.copy([CopyJob(key, slot) for slot, key in enumerate(keys)], urgent=urgent)
    wait_all(handles)
    assert all(handle.ready() for handle in handles)
    for slot, key in enumerate(keys):
        assert bytes(slots.buffer(slot)) == blob_of(key)
    assert bytes(slots.buffer(5)) == b"\xaa" * LAYOUT.nbytes
    wait_all(handles)  # a ticket can be waited for again


def test_several_reads_are_outstanding(
    start: Callable[..., FileTransfer], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(path)
    monkeypatch.setattr(os, "preadv", gate)
    transfer = start(readers=3)
    handles = transfer.copy([CopyJob(key, slot) for slot, key in enumerate([A, B, C, D, E, F])], urgent=False)
    gate.wait_for(3)
    assert gate.concurrent == 3
    assert not any(handle.ready() for handle in handles)
    gate.pinned.set()
    wait_all(handles)
    assert gate.most == 3


def test_urgent_copies_go_before_those_not_started(
    start: Callable[..., FileTransfer], path: Path, slots: MemorySlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(path)
    monkeypatch.setattr(os, "preadv", gate)
    transfer = start(readers=1)
    handles = transfer.copy([CopyJob(A, 0), CopyJob(B, 1), CopyJob(C, 2)], urgent=False)
    gate.wait_for(1)
    handles += transfer.copy([CopyJob(D, 3), CopyJob(E, 4)], urgent=True)
    handles += transfer.copy([CopyJob(F, 5)], urgent=False)
    gate.pinned.set()
    wait_all(handles)
    assert gate.order == [A, D, E, B, C, F]
    assert [bytes(slots.buffer(slot)) for slot in range(6)] == [blob_of(key) for key in (A, B, C, D, E, F)]


def test_short_reads_are_continued(
    start: Callable[..., FileTransfer], slots: MemorySlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, calls = os.preadv, []

    def few(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        return read(fd, [buffers[0][: 1 + len(calls) % 700]], offset)

    monkeypatch.setattr(os, "preadv", few)
    wait_all(start(readers=1).copy([CopyJob(B, 0), CopyJob(E, 1)], urgent=False))
    assert bytes(slots.buffer(0)) == blob_of(B)
    assert bytes(slots.buffer(1)) == blob_of(E)
    assert len(calls) > 10


def fails(path: Path, handle: CopyHandle, *words: str) -> None:
    """The copy ends with a TransferError that names the file, however often one asks."""
    for _ in range(2):
        with pytest.raises(TransferError, match=re.escape(str(path))) as caught:
            within(LIMIT, handle.wait)
        for word in words:
            assert word in str(caught.value)
        assert "\n" not in str(caught.value)
    assert handle.ready()


def test_a_file_cut_short_while_open_fails_the_copy(
    start: Callable[..., FileTransfer], path: Path, slots: MemorySlots
) -> None:
    transfer = start(readers=2)
    os.truncate(path, path.stat().st_size - LAYOUT.nbytes - 100)
    good, cut, gone = transfer.copy([CopyJob(D, 0), CopyJob(E, 1), CopyJob(F, 2)], urgent=True)
    wait_all([good])
    assert bytes(slots.buffer(0)) == blob_of(D)
    fails(path, cut, "expert 1 of layer 1", "ends 100 bytes early")
    fails(path, gone, "expert 2 of layer 1", f"ends {LAYOUT.nbytes} bytes early")


@pytest.mark.parametrize("failure", [OSError(errno.EIO, os.strerror(errno.EIO)), ValueError("not an OSError")])
def test_a_read_that_fails_fails_its_copy_and_no_other(
    start: Callable[..., FileTransfer],
    path: Path,
    slots: MemorySlots,
    monkeypatch: pytest.MonkeyPatch,
    failure: Exception,
) -> None:
    transfer, read = start(readers=1), os.preadv
    bad = offsets(path)[B]

    def flaky(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset == bad:
            raise failure
        return read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", flaky)
    first, broken, last = transfer.copy([CopyJob(A, 0), CopyJob(B, 1), CopyJob(C, 2)], urgent=False)
    wait_all([first, last])
    fails(path, broken, "expert 1 of layer 0", str(failure))
    assert bytes(slots.buffer(2)) == blob_of(C)
    monkeypatch.undo()
    wait_all(transfer.copy([CopyJob(B, 1)], urgent=True))
    assert bytes(slots.buffer(1)) == blob_of(B), "the reader is still there, and the next try succeeds"


def test_an_expert_the_file_does_not_have_fails_the_copy(start: Callable[..., FileTransfer], path: Path) -> None:
    transfer = start(readers=1)
    (handle,) = transfer.copy([CopyJob(ExpertKey(9, 0), 0)], urgent=True)
    fails(path, handle, "expert 0 of layer 9")
    wait_all(transfer.copy([CopyJob(A, 0)], urgent=True))


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_a_blob_that_fails_its_checksum_is_a_store_error(start: Callable[..., FileTransfer], path: Path) -> None:
    transfer = start()
    flip(path, offsets(path)[E] + 17)
    broken, sound = transfer.copy([CopyJob(E, 0), CopyJob(F, 1)], urgent=True)
    for _ in range(2):
        with pytest.raises(StoreError, match=r"expert 1 of layer 1 .* checksum") as caught:
            within(LIMIT, broken.wait)
        assert str(path) in str(caught.value)
    wait_all([sound])
    (again,) = transfer.copy([CopyJob(E, 0)], urgent=True)
    with pytest.raises(StoreError, match="checksum"):
        within(LIMIT, again.wait)


def test_closing_lets_copies_in_flight_end_and_fails_the_rest(
    start: Callable[..., FileTransfer], path: Path, slots: MemorySlots, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(path)
    monkeypatch.setattr(os, "preadv", gate)
    transfer = start(readers=1)
    (running,) = transfer.copy([CopyJob(A, 0)], urgent=False)
    gate.wait_for(1)
    queued = transfer.copy([CopyJob(B, 1), CopyJob(C, 2)], urgent=True)
    closing = threading.Thread(target=transfer.close)
    closing.start()

    def submit_until_closed() -> None:
        while True:
            queued.extend(transfer.copy([CopyJob(D, 3)], urgent=False))
            closing.join(0.001)

    with pytest.raises(TransferError, match="closed"):
        within(LIMIT, submit_until_closed)
    gate.pinned.set()
    closing.join(LIMIT)
    assert not closing.is_alive()
    wait_all([running])
    assert bytes(slots.buffer(0)) == blob_of(A)
    for handle in queued:
        assert handle.ready()
        with pytest.raises(TransferError, match="closed"):
            within(LIMIT, handle.wait)
    assert gate.order == [A]
    assert bytes(slots.buffer(1)) == b"\xaa" * LAYOUT.nbytes
    within(LIMIT, transfer.close)


def test_a_copy_submitted_while_closing_ends(
    start: Callable[..., FileTransfer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Close at the worst moment, between the check that all is open and the job being queued: nobody waits for ever."""
    transfer = start(readers=1)
    closing = threading.Thread(target=transfer.close)

    class LateFuture(transfer_module.Future):  # type: ignore[type-arg]
        def __init__(self) -> None:
            super().__init__()
            if not closing.ident:
                closing.start()
                closing.join(0.1)

    monkeypatch.setattr(transfer_module, "Future", LateFuture)
    handles = transfer.copy([CopyJob(A, 0)], urgent=False)
    closing.join(LIMIT)
    assert not closing.is_alive()

    def settle() -> None:
        for handle in handles:
            try:
                handle.wait()
            except TransferError:
                continue

    within(LIMIT, settle)


def test_closing_gives_the_file_back(start: Callable[..., FileTransfer], path: Path, slots: MemorySlots) -> None:
    file = ExpertFile.open(path)
    fd = file.fd
    transfer = FileTransfer(file, slots, 1)
    os.fstat(fd)
    within(LIMIT, transfer.close)
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(fd)
    with pytest.raises(TransferError, match="closed"):
        transfer.copy([CopyJob(A, 0)], urgent=True)


# ---- the emulated link


class Passages:
    """A link with named copies of so many bytes, at 100 bytes a second."""

    def __init__(self, rate: float = 100.0) -> None:
        self.clock = VirtualClock()
        self.link = EmulatedLink(rate, self.clock)
        self.entered: dict[str, object] = {}

    def enter(self, name: str, nbytes: int = 100, *, urgent: bool = False) -> None:
        self.entered[name] = self.link.enter(nbytes, urgent)

    def passed(self) -> str:
        return "".join(name for name, link_copy in self.entered.items() if self.link.passed(link_copy))

    def ends(self) -> dict[str, float]:
        """When each ends, found by waiting for all."""
        for link_copy in self.entered.values():
            self.link.wait(link_copy)
        return {name: link_copy.done_at for name, link_copy in self.entered.items()}


def test_a_link_moves_one_copy_at_a_time_at_its_rate() -> None:
    road = Passages()
    road.enter("a", 100)
    road.enter("b", 50)
    road.clock.sleep(0.5)
    road.enter("c", 200)
    assert road.passed() == ""
    road.clock.sleep(0.5)
    assert road.passed() == "a"
    assert road.ends() == {"a": 1.0, "b": 1.5, "c": 3.5}
    assert road.clock.now() == 3.5
    road.clock.sleep(10.0)
    road.enter("d", 100)
    assert road.ends()["d"] == 14.5, "an idle link starts at once, and not in the past"


def test_urgent_passages_go_before_those_that_have_not_started() -> None:
    road = Passages()
    for name in "abc":
        road.enter(name)
    road.clock.sleep(0.5)
    road.enter("x", urgent=True)
    road.enter("y", urgent=True)
    road.enter("d")
    assert road.ends() == {"a": 1.0, "x": 2.0, "y": 3.0, "b": 4.0, "c": 5.0, "d": 6.0}


def test_hurry_moves_a_waiting_passage_before_all_that_can_wait() -> None:
    road = Passages()
    for name in "abcd":
        road.enter(name)
    road.link.prioritize(road.entered["c"])
    road.clock.sleep(1.5)  # c has started
    road.link.prioritize(road.entered["d"])
    road.link.prioritize(road.entered["a"])  # over
    road.link.prioritize(road.entered["c"])  # under way
    assert road.ends() == {"a": 1.0, "c": 2.0, "d": 3.0, "b": 4.0}


def test_a_passage_entered_after_a_long_silence_does_not_rewrite_the_past() -> None:
    road = Passages()
    for name in "abc":
        road.enter(name)
    road.clock.sleep(1.5)  # nobody looks at the link in the meantime; b has started
    road.enter("x", urgent=True)
    assert road.ends() == {"a": 1.0, "b": 2.0, "x": 3.0, "c": 4.0}


def test_next_event_is_the_end_of_what_is_under_way() -> None:
    road = Passages()
    assert road.link.next_event() is None
    road.enter("a")
    road.enter("b")
    assert road.link.next_event() == 1.0
    road.clock.sleep(1.0)
    assert road.link.next_event() == 2.0
    road.clock.sleep(5.0)
    assert road.link.next_event() is None


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    graph=st.lists(
        st.one_of(
            st.tuples(st.just("enter"), st.booleans()),
            st.tuples(st.just("hurry"), st.integers(0, 9)),
            st.tuples(st.just("sleep"), st.sampled_from([0.25, 0.5, 1.0, 1.25, 3.0])),
        ),
        max_size=25,
    )
)
def test_a_link_behaves_like_a_queue_stepped_in_quarters_of_a_second(graph: list[tuple[str, float]]) -> None:
    road = Passages()
    waiting: list[tuple[bool, int]] = []  # (can wait, number)
    current, left, count, model = None, 0, 0, {}

    def start_next() -> None:
        nonlocal current, left
        if current is None and waiting:
            waiting.sort()
            current, left = waiting.pop(0)[1], 4

    for what, value in graph:
        if what == "enter":
            road.enter(str(count), urgent=bool(value))
            waiting.append((not value, count))
            count += 1
            start_next()
        elif what == "hurry":
            if value < count:
                road.link.prioritize(road.entered[str(value)])
                waiting = [(can_wait and number != value, number) for can_wait, number in waiting]
        else:
            for _ in range(int(4 * value)):
                left -= 1
                if current is not None and left == 0:
                    model[str(current)] = True
                    current = None
                start_next()
            road.clock.sleep(value)
        assert set(model) == {name for name, link_copy in road.entered.items() if road.link.passed(link_copy)}


# ---- throttled and virtual transfers


def test_a_throttled_copy_ends_when_link_and_disk_are_done(
    start: Callable[..., FileTransfer], slots: MemorySlots
) -> None:
    clock = VirtualClock()
    transfer = ThrottledTransfer(start(), 1000, 1000 / 1e9, clock)  # one second a blob
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


def test_a_throttled_copy_waits_for_the_disk_too(
    start: Callable[..., FileTransfer], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(path)
    monkeypatch.setattr(os, "preadv", gate)
    clock = VirtualClock()
    (handle,) = ThrottledTransfer(start(), 1000, 1.0, clock).copy([CopyJob(A, 0)], urgent=True)
    clock.sleep(100.0)
    assert not handle.ready()
    gate.pinned.set()
    wait_all([handle])
    assert handle.ready()


def test_a_throttled_copy_fails_when_the_disk_does(start: Callable[..., FileTransfer], path: Path) -> None:
    transfer = ThrottledTransfer(start(), 1000, 1.0, VirtualClock())
    os.truncate(path, path.stat().st_size - LAYOUT.nbytes)
    (handle,) = transfer.copy([CopyJob(F, 0)], urgent=True)
    fails(path, handle, "expert 2 of layer 1")


def test_a_virtual_transfer_tells_of_start_and_end_once_and_takes_its_time() -> None:
    clock = VirtualClock()
    told: list[tuple[str, CopyJob, float]] = []
    transfer = VirtualTransfer(
        clock,
        BLOB,
        2 * BLOB,
        depth=3,
        on_start=lambda job: told.append(("start", job, clock.now())),
        on_done=lambda job: told.append(("done", job, clock.now())),
    )
    assert transfer.depth == 3
    jobs = (CopyJob(A, 0), CopyJob(B, 1))
    first, second = transfer.copy(jobs, urgent=False)
    assert transfer.submissions == [jobs]
    assert told == [("start", jobs[0], 0.0), ("start", jobs[1], 0.0)]
    second.wait()
    second.wait()
    first.wait()
    assert told[2:] == [("done", jobs[1], 1.0), ("done", jobs[0], 1.0)]
    transfer.close()
    with pytest.raises(TransferError, match="closed"):
        transfer.copy(jobs, urgent=True)
    assert transfer.submissions == [jobs]


def test_a_virtual_copy_that_fails_fails_every_time_it_is_waited_for() -> None:
    calls: list[CopyJob] = []

    def fail(job: CopyJob) -> None:
        calls.append(job)
        raise TransferError("played")

    transfer = VirtualTransfer(VirtualClock(), BLOB, BLOB, on_done=fail)
    (handle,) = transfer.copy([CopyJob(A, 0)], urgent=True)
    assert not handle.ready()
    for _ in range(2):
        with pytest.raises(TransferError, match="played"):
            handle.wait()
    assert handle.ready()
    assert len(calls) == 1


def test_a_virtual_clock_stops_at_every_event_on_the_way() -> None:
    clock = VirtualClock()
    transfer = VirtualTransfer(clock, BLOB, BLOB)
    at: list[float] = []
    clock.add_event_source(transfer.link.next_event, lambda: at.append(clock.now()))
    transfer.copy([CopyJob(A, 0), CopyJob(B, 1), CopyJob(C, 2)], urgent=False)
    clock.sleep(2.5)
    assert at == [1.0, 2.0]
    assert clock.now() == 2.5
    clock.sleep(-1.0)
    assert clock.now() == 2.5
    clock.sleep(0.5)
    assert at == [1.0, 2.0, 3.0]
