"""A device that is only played: two streams, whose operations are carried out bit by bit when somebody says so.

Real bytes move, a few at a time and in no order within a submission, so what is read too early, or overwritten too
early, looks wrong.
"""

from __future__ import annotations

import faulthandler
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Protocol

from torch import Tensor

from spmoe.backends.cuda_runtime import CopyRange, CudaCallError
from spmoe.backends.cuda_transfer import CudaCopyHandle, CudaTransfer
from spmoe.experts.access import ExpertBatch
from spmoe.experts.transfer import CopyHandle, CopyJob, Event
from spmoe.types import ExpertKey

LIMIT = 30.0  # seconds after which what hangs is given up
GARBAGE = b"\xee"  # what device memory is full of at first
_HOST, _DEVICE = 1 << 20, 1 << 30  # where memories begin


class Memory:
    """Blobs on the host, slots on the device."""

    def __init__(self, slots: int, nbytes: int, experts: Sequence[int]) -> None:
        self.nbytes = nbytes
        self.count = slots
        self.keys = [ExpertKey(layer, e) for layer, count in enumerate(experts) for e in range(count)]
        self._first = [0, *accumulate(experts)]
        self.blobs = {key: bytes([i]) + random.Random(i).randbytes(nbytes - 1) for i, key in enumerate(self.keys)}
        self._host = b"".join(self.blobs.values())
        self._device = bytearray(GARBAGE * (slots * nbytes))

    # ---- what a transfer asks

    def source(self, key: ExpertKey) -> int:
        return _HOST + self._index(key) * self.nbytes

    def slot(self, slot: int) -> int:
        return _DEVICE + slot * self.nbytes

    # ---- what the device does, and finds

    def move(self, piece: CopyRange) -> None:
        to, source = piece.to - _DEVICE, piece.source - _HOST
        assert 0 <= to <= to + piece.nbytes <= len(self._device), "a copy to nowhere"
        assert 0 <= source <= source + piece.nbytes <= len(self._host), "a copy from nowhere"
        self._device[to : to + piece.nbytes] = self._host[source : source + piece.nbytes]

    def content(self, slot: int) -> bytes:
        return bytes(self._device[slot * self.nbytes : (slot + 1) * self.nbytes])

    def job(self, piece: CopyRange) -> CopyJob:
        """Which copy a piece is part of."""
        return CopyJob(self.keys[(piece.source - _HOST) // self.nbytes], (piece.to - _DEVICE) // self.nbytes)

    def describe(self, piece: CopyRange) -> str:
        """Such as `A[0:16]`, bytes of expert 0; for experts of one layer."""
        name = chr(ord("A") + self.job(piece).key.expert)
        start = (piece.source - _HOST) % self.nbytes
        return f"{name}[{start}:{start + piece.nbytes}]"

    def _index(self, key: ExpertKey) -> int:
        return self._first[key.layer] + key.expert


class Mark:
    """A point on a stream."""

    def __init__(self, device: Device) -> None:
        self.passed = False
        self.awaited = False
        self._device = device

    def query(self) -> bool:
        self._device.check_alive()
        return self.passed

    def synchronize(self) -> None:
        device = self._device
        with device.moved:
            self.awaited = True
            device.moved.notify_all()
            assert device.moved.wait_for(lambda: self.passed or device.broken, LIMIT), "nobody moves the stream"
            device.check_alive()


class Operation(Protocol):
    """Something on a stream."""

    def step(self) -> bool | None:
        """Do a bit of it. True: it is over; False: there is more; None: it cannot go on yet."""
        ...


class Wait:
    def __init__(self, mark: Mark) -> None:
        self.mark = mark

    def step(self) -> bool | None:
        return True if self.mark.passed else None


class Point:
    def __init__(self, mark: Mark) -> None:
        self.mark = mark

    def step(self) -> bool:
        self.mark.passed = True
        return True


class Copy:
    """The pieces of one submission, cut small, in no order."""

    def __init__(self, memory: Memory, pieces: Sequence[CopyRange], rng: random.Random) -> None:
        self._memory = memory
        self._left: list[CopyRange] = []
        for to, source, nbytes in pieces:
            cut = rng.randint(0, nbytes)
            self._left += [CopyRange(to, source, cut), CopyRange(to + cut, source + cut, nbytes - cut)]
        self._left = [piece for piece in self._left if piece.nbytes]
        rng.shuffle(self._left)

    def step(self) -> bool:
        if self._left:
            self._memory.move(self._left.pop())
        return not self._left


class Kernel:
    """Reads some experts in the slots it was told of, one half after the other."""

    def __init__(self, memory: Memory, experts: Sequence[tuple[ExpertKey, int]]) -> None:
        self._memory = memory
        half = memory.nbytes // 2
        cuts = (slice(0, half), slice(half, memory.nbytes))
        self._left = [(key, slot, cut) for key, slot in experts for cut in cuts]

    def step(self) -> bool:
        if self._left:
            key, slot, cut = self._left.pop(0)
            found, right = self._memory.content(slot)[cut], self._memory.blobs[key][cut]
            assert found == right, f"compute reads {found.hex()} in slot {slot} where {key} is {right.hex()}"
        return not self._left


class Device:
    """Plays a `Lane`."""

    def __init__(self, memory: Memory, *, chunk: int, window: int, seed: int = 0) -> None:
        self.memory = memory
        self.log: list[str] = []  # what was put on the copy stream, refusals included
        self.compute_waits = 0
        self.refusals = 0  # so many submissions are refused from now on
        self.refusal: BaseException | None = None  # with this
        self.broken = False
        self.fault_rate = 0.0
        self.struck: set[ExpertKey] = set()  # had a part in a submission that was refused
        self.expected: Callable[[CopyJob], bool] = lambda job: True  # whether such a copy may be under way
        self.drains = 0
        self.moves_itself = False  # when drained
        self.failures: list[BaseException] = []  # seen on other threads than the test's
        self.moved = threading.Condition(threading.RLock())
        self._chunk = chunk
        self._window = window
        self._rng = random.Random(seed)
        self._copies: deque[Operation] = deque()
        self._compute: deque[Operation] = deque()
        self._wishes: list[Mark] = []  # ends of submissions that nobody demanded
        self._submitter = threading.local()

    # ---- as a lane

    def copy(self, pieces: Sequence[CopyRange]) -> Event:
        with self.moved:
            assert pieces, "nothing to submit"
            self.check_alive()
            self._check_pieces(pieces)
            refused = self.refusals > 0 or self._rng.random() < self.fault_rate
            self.refusals = max(0, self.refusals - 1)
            self.log.append(" ".join(map(self.memory.describe, pieces)) + (" refused" if refused else ""))
            self.moved.notify_all()
            if refused:
                self.struck |= {self.memory.job(piece).key for piece in pieces}
                # a runtime without batches may have taken some of them, or all and then had no event to give
                self._copies.append(Copy(self.memory, pieces[: self._rng.randint(0, len(pieces))], self._rng))
                raise self.refusal or CudaCallError("submitting a copy failed: out of luck")
            end = Mark(self)
            self._copies += [Copy(self.memory, pieces, self._rng), Point(end)]
            if not getattr(self._submitter, "demands", False):
                self._check_wishes(pieces, end)
            return end

    def wait_for(self, event: Event) -> None:
        with self.moved:
            assert isinstance(event, Mark)
            self.log.append("wait")
            self._copies.append(Wait(event))
            self.moved.notify_all()

    def bind_compute_stream(self) -> None:
        pass

    def record_compute_event(self) -> Event:
        with self.moved:
            point = Mark(self)
            self._compute.append(Point(point))
            self.moved.notify_all()
            return point

    def compute_wait_event(self, event: Event) -> None:
        with self.moved:
            assert isinstance(event, Mark)
            self.compute_waits += 1
            self._compute.append(Wait(event))
            self.moved.notify_all()

    def take_stall_seconds(self) -> float:
        return 0.5

    def drain(self) -> None:
        with self.moved:
            while self.moves_itself and self._copies:
                assert self.step_copies() or self.step_compute(), "both streams wait for each other"
            assert self.moved.wait_for(lambda: not self._copies, LIMIT), "nobody moves the stream"
            self.drains += 1

    def check_alive(self) -> None:
        if self.broken:
            raise RuntimeError("an illegal memory access was encountered")

    def break_down(self) -> None:
        """From now on, whoever asks for anything gets an error, and not one of ours."""
        with self.moved:
            self.broken = True
            self.moved.notify_all()

    @contextmanager
    def demanding(self) -> Iterator[None]:
        """What this thread submits meanwhile is demanded."""
        self._submitter.demands = True
        try:
            yield
        finally:
            self._submitter.demands = False

    def _check_pieces(self, pieces: Sequence[CopyRange]) -> None:
        for piece in pieces:
            if piece.nbytes < 1 or not self.expected(self.memory.job(piece)):
                self.failures.append(AssertionError(f"{self.memory.job(piece)} is over, or was never asked for"))

    def _check_wishes(self, pieces: Sequence[CopyRange], end: Mark) -> None:
        self._wishes = [mark for mark in self._wishes if not mark.passed] + [end]
        nbytes = sum(piece.nbytes for piece in pieces)
        if len(self._wishes) > self._window:
            self.failures.append(AssertionError(f"{len(self._wishes)} chunks of prefetch requests are on the stream"))
        if nbytes > self._chunk:
            self.failures.append(AssertionError(f"a chunk of {nbytes} bytes"))

    # ---- compute

    def launch(self, experts: Sequence[tuple[ExpertKey, int]]) -> None:
        """Give compute a kernel that reads these experts, which are in these slots once it runs."""
        with self.moved:
            self._compute.append(Kernel(self.memory, experts))
            self.moved.notify_all()

    def launch_batch(self, batch: ExpertBatch) -> None:
        keys = [ExpertKey(batch.layer, expert) for expert in batch.experts]
        self.launch(list(zip(keys, batch.slots, strict=True)))

    # ---- time passes

    def step_copies(self) -> bool:
        """Do a bit of the copy stream, if it can go on."""
        return self._step(self._copies)

    def step_compute(self) -> bool:
        return self._step(self._compute)

    def run_copies(self, submissions: int | None = None) -> None:
        """Go on with the copy stream to the end of so many submissions, or as far as it goes without compute."""
        ended = 0
        while submissions is None or ended < submissions:
            with self.moved:
                ended += isinstance(self._copies[0] if self._copies else None, Point)
            if not self.step_copies():
                assert submissions is None, "fewer submissions than that can end"
                return

    def run_compute(self) -> None:
        """Go on with compute as far as it goes without copies."""
        while self.step_compute():
            pass

    def finish_compute(self) -> None:
        """Go on with compute to its end, with as few copies as that takes: the host reads a result."""
        while self._compute:
            assert self.step_compute() or self.step_copies(), "both streams wait for each other"

    def finish(self) -> None:
        """Go on to the end of both streams."""
        while self._copies or self._compute:
            assert self.step_copies() or self.step_compute(), "both streams wait for each other"

    def until_logged(self, count: int) -> None:
        """Wait for other threads to put this much on the copy stream."""
        with self.moved:
            assert self.moved.wait_for(lambda: len(self.log) >= count, LIMIT), self.log

    def until_awaited(self, handle: CudaCopyHandle) -> None:
        """Wait for another thread to wait for the end of this copy."""
        with self.moved:
            assert self.moved.wait_for(lambda: isinstance(handle.end, Mark) and handle.end.awaited, LIMIT)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Both streams go on by themselves, at uneven speeds."""
        over = threading.Event()

        def run(stream: deque[Operation], rng: random.Random) -> None:
            while not over.is_set():
                try:
                    for _ in range(rng.choice([1, 3, 30])):
                        self._step(stream)
                    if rng.random() < 0.02:
                        time.sleep(0.001)
                    with self.moved:
                        self.moved.wait_for(lambda: over.is_set() or _can_step(stream))
                except AssertionError as failure:
                    self.failures.append(failure)

        threads = [
            threading.Thread(target=run, args=(stream, random.Random(self._rng.random())), daemon=True)
            for stream in (self._copies, self._compute)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            with self.moved:
                self.moved.notify_all()
            for thread in threads:
                thread.join()

    def until_idle(self) -> None:
        """Wait until everything on both streams is over."""
        with self.moved:
            assert self.moved.wait_for(lambda: not self._copies and not self._compute, LIMIT), "the streams hang"

    def _step(self, stream: deque[Operation]) -> bool:
        with self.moved:
            if not stream:
                return False
            try:
                over = stream[0].step()
            except AssertionError:
                stream.popleft()
                raise
            if over:
                stream.popleft()
                self.moved.notify_all()
            return over is not None


def _can_step(stream: deque[Operation]) -> bool:
    return bool(stream) and not (isinstance(stream[0], Wait) and not stream[0].mark.passed)


class WatchedTransfer(CudaTransfer):
    """Tells the device which submissions are demanded."""

    copy_stream: Device

    def copy(self, jobs: Sequence[CopyJob], *, urgent: bool) -> list[CopyHandle]:
        if not urgent:
            return super().copy(jobs, urgent=False)
        with self.copy_stream.demanding():
            return super().copy(jobs, urgent=True)

    def send_now(self, handle: CudaCopyHandle) -> None:
        with self.copy_stream.demanding():
            super().send_now(handle)


class PlainSlots:
    """Slots that only have numbers: compute finds them by those."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.closings = 0

    def weights(self, slot: int) -> Mapping[str, Tensor]:
        assert not self.closings, "the slots were given back"
        return {}

    def close(self) -> None:
        self.closings += 1


def within(body: Callable[[], None]) -> None:
    """Run `body` in a thread of its own; fail, with every thread's stack, if it hangs."""
    outcome: list[BaseException | None] = []

    def run() -> None:
        try:
            body()
        except BaseException as error:
            outcome.append(error)
        else:
            outcome.append(None)

    thread = threading.Thread(target=run, name="test-body", daemon=True)
    thread.start()
    thread.join(2 * LIMIT)
    if thread.is_alive():
        faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr)
        raise AssertionError(f"still running after {2 * LIMIT} s")
    if outcome[0] is not None:
        raise outcome[0]


def own_threads() -> set[threading.Thread]:
    """The engine's threads that are alive."""
    return {t for t in threading.enumerate() if t.name.startswith("spmoe-")}
