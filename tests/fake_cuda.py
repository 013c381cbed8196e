"""A fake CUDA device: the asynchronous behaviour of copies, kernels and graphs, without a GPU.

`FakeCudaDevice` has a copy stream and a compute stream and implements `CopyStream`, which `CudaTransfer` copies with.
Work on a stream runs later and in small parts, when the test says so; with `immediate=True` it runs at once. Real bytes
move, and every kernel compares the slots that it reads with the experts that it should find there. So a kernel that
reads a slot before the copy into it has ended, or while the slot is overwritten, fails.

Example:

    >>> memory = FakeMemory(slots=2, nbytes=8, experts=[4])  # one layer with experts A, B, C and D of 8 bytes
    >>> device = FakeCudaDevice(memory)
    >>> transfer = CudaTransfer(device, memory)
    >>> (handle,) = transfer.copy([CopyJob(ExpertKey(0, 2), slot=1)], urgent=True)
    >>> device.log, handle.ready()  # the copy was submitted, and no byte has moved
    (['C[0:8]'], False)
    >>> handle.stream_wait()  # without this line, the kernel below would read slot 1 too early, and fail
    >>> device.launch([(ExpertKey(0, 2), 1)])  # a kernel that reads expert C in slot 1
    >>> device.run_compute()  # the kernel does not start: it waits for the copy
    >>> device.finish()  # runs both streams to their end
    >>> memory.content(1) == memory.blobs[ExpertKey(0, 2)]
    True

`FakeGraphRecorder` implements `GraphRecorder`, with which forwards are captured. A replay runs the forward again.
"""

from __future__ import annotations

import ctypes
import faulthandler
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor

from spmoe.backends.cuda_runtime import CopyRange, CudaCallError
from spmoe.backends.cuda_transfer import CudaCopyHandle, CudaTransfer
from spmoe.backends.graphs import Between, CapturedGraph, HostWork, Phase, Stopwatch
from spmoe.experts.access import ExpertBatch
from spmoe.experts.transfer import CopyHandle, CopyJob, DeviceEvent
from spmoe.types import ExpertKey

TIMEOUT = 30.0  # seconds after which a test that hangs fails
T = TypeVar("T")
UNINITIALIZED = b"\xee"  # every byte of device memory at first


# ---- memory


class FakeMemory:
    """Blobs on the host and slots on the device, with real addresses. It implements `BlobAddresses`."""

    def __init__(self, slots: int, nbytes: int, experts: Sequence[int]) -> None:
        # nbytes: of a blob; experts: number of experts of each layer
        self.nbytes = nbytes
        self.slot_count = slots
        self.keys = [ExpertKey(layer, e) for layer, count in enumerate(experts) for e in range(count)]
        self.blobs = {key: bytes([i]) + random.Random(i).randbytes(nbytes - 1) for i, key in enumerate(self.keys)}
        self._first = [0, *accumulate(experts)]
        self._host = ctypes.create_string_buffer(b"".join(self.blobs.values()), len(self.keys) * nbytes)
        self._device = ctypes.create_string_buffer(UNINITIALIZED * (slots * nbytes), slots * nbytes)
        self._host_address, self._device_address = ctypes.addressof(self._host), ctypes.addressof(self._device)

    def source(self, key: ExpertKey) -> int:
        return self._host_address + (self._first[key.layer] + key.expert) * self.nbytes

    def slot(self, slot: int) -> int:
        return self._device_address + slot * self.nbytes

    def content(self, slot: int) -> bytes:
        """Return the bytes in a slot."""
        return ctypes.string_at(self.slot(slot), self.nbytes)

    def check(self, copied: CopyRange) -> None:
        """Fail if a range is not inside the blobs and the slots."""
        source, to = copied.source - self._host_address, copied.to - self._device_address
        assert 0 <= source <= source + copied.nbytes <= len(self._host), "the source of a copy is outside the blobs"
        assert 0 <= to <= to + copied.nbytes <= len(self._device), "the target of a copy is outside the slots"

    def job(self, copied: CopyRange) -> CopyJob:
        """Return the copy that a range is part of."""
        key = self.keys[(copied.source - self._host_address) // self.nbytes]
        return CopyJob(key, (copied.to - self._device_address) // self.nbytes)

    def describe(self, copied: CopyRange) -> str:
        """Return, for example, `A[0:16]` for the first 16 bytes of expert 0. The layer is not named."""
        name = chr(ord("A") + self.job(copied).key.expert)
        start = (copied.source - self._host_address) % self.nbytes
        return f"{name}[{start}:{start + copied.nbytes}]"


class FakeSlots:
    """Slots without tensors: fake kernels read them by number."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.times_closed = 0

    def weights(self, slot: int) -> Mapping[str, Tensor]:
        assert not self.times_closed, "the slots are closed"
        return {}

    def close(self) -> None:
        self.times_closed += 1


# ---- work on a stream


class FakeEvent:
    """An event; `passed` once the stream that it was recorded on has reached it."""

    def __init__(self, device: FakeCudaDevice) -> None:
        self.passed = False
        self.awaited = False  # a thread waits, or has waited, for it
        self._device = device

    def record(self) -> None:
        """Record the event on the compute stream."""
        self.passed = False
        self._device.add_compute(_RecordEvent(self))

    def query(self) -> bool:
        self._device.check_alive()
        return self.passed

    def synchronize(self) -> None:
        device = self._device
        with device.changed:
            self.awaited = True
            device.changed.notify_all()
            assert device.changed.wait_for(lambda: self.passed or device.broken, TIMEOUT), "the stream does not run"
            device.check_alive()


class _Work(Protocol):
    """Work on a stream."""

    def step(self) -> bool | None:
        """Do a small part. Return True at the end, False if there is more, None if it cannot go on yet."""
        ...


class _WaitEvent:
    def __init__(self, event: FakeEvent) -> None:
        self.event = event

    def step(self) -> bool | None:
        return True if self.event.passed else None


class _RecordEvent:
    def __init__(self, event: FakeEvent) -> None:
        self._event = event

    def step(self) -> bool:
        self._event.passed = True
        return True


class _CopyRanges:
    """The ranges of one submission, each cut in two, in random order."""

    def __init__(self, ranges: Sequence[CopyRange], rng: random.Random) -> None:
        self._left: list[CopyRange] = []
        for to, source, nbytes in ranges:
            cut = rng.randint(0, nbytes)
            self._left += [CopyRange(to, source, cut), CopyRange(to + cut, source + cut, nbytes - cut)]
        rng.shuffle(self._left)

    def step(self) -> bool:
        if self._left:
            ctypes.memmove(*self._left.pop())
        return not self._left


class _ReadExperts:
    """A kernel that reads experts in slots, one half of each after the other, and checks every byte."""

    def __init__(self, memory: FakeMemory, experts: Sequence[tuple[ExpertKey, int]]) -> None:
        self._memory = memory
        half = memory.nbytes // 2
        halves = (slice(0, half), slice(half, memory.nbytes))
        self._left = [(key, slot, part) for key, slot in experts for part in halves]

    def step(self) -> bool:
        if self._left:
            key, slot, part = self._left.pop(0)
            found, expected = self._memory.content(slot)[part], self._memory.blobs[key][part]
            assert found == expected, f"a kernel reads {found.hex()} in slot {slot}; {key} is {expected.hex()}"
        return not self._left


# ---- the device


class FakeCudaDevice:
    """Two streams that run step by step, or at once if `immediate`. Implements `CopyStream`. Thread-safe.

    With `chunk` and `window`, prefetches must not exceed so many bytes per submission and so many submissions at once;
    a `CheckedTransfer` says which submissions are prefetches. Violations are collected in `errors`.
    """

    def __init__(
        self,
        memory: FakeMemory | None = None,
        *,
        chunk: int | None = None,
        window: int | None = None,
        immediate: bool = False,
        seed: int = 0,
    ) -> None:
        self.log: list[str] = []  # submissions to the copy stream, with those that failed; needs `memory`
        self.compute_waits = 0  # waits for copies that were put on the compute stream
        self.synchronizations = 0
        self.errors: list[BaseException] = []  # found by any thread; a test checks that there are none
        self.failing_copies = 0  # so many of the next submissions fail
        self.failure_rate = 0.0  # probability that any other submission fails
        self.failure: BaseException | None = None  # raised by a submission that fails; None: CudaCallError
        self.failed_keys: set[ExpertKey] = set()  # experts in submissions that have failed
        self.broken = False  # everything fails
        self.may_copy: Callable[[CopyJob], bool] = lambda job: True  # whether this copy should be in flight
        self.runs_when_synchronized = False  # else another thread has to run the copy stream
        self.changed = threading.Condition(threading.RLock())  # notified whenever a stream changes
        self._memory = memory
        self._chunk = chunk
        self._window = window
        self._immediate = immediate
        self._rng = random.Random(seed)
        self._copies: deque[_Work] = deque()
        self._compute: deque[_Work] = deque()
        self._prefetch_ends: list[FakeEvent] = []
        self._thread = threading.local()

    # ---- as a copy stream

    def copy(self, ranges: Sequence[CopyRange]) -> DeviceEvent:
        with self.changed:
            assert ranges, "an empty submission"
            self.check_alive()
            failing = self.failing_copies > 0 or self._rng.random() < self.failure_rate
            self.failing_copies = max(0, self.failing_copies - 1)
            self._check_ranges(ranges, failing)
            if failing:
                # some ranges may be copied all the same: the error can come from a later range, or from the event
                self._copies.append(_CopyRanges(ranges[: self._rng.randint(0, len(ranges))], self._rng))
                self._notify()
                raise self.failure or CudaCallError("injected failure of a copy")
            end = FakeEvent(self)
            self._copies += [_CopyRanges(ranges, self._rng), _RecordEvent(end)]
            self._check_prefetch(ranges, end)
            self._notify()
            return end

    def signal(self, copied: CopyRange) -> None:
        with self.changed:
            self.check_alive()
            if self.failing_copies > 0:
                raise self.failure or CudaCallError("injected failure of a signal")
            self._copies.append(_Call(lambda: ctypes.memmove(*copied)))
            self._notify()

    def wait_event(self, event: DeviceEvent) -> None:
        with self.changed:
            assert isinstance(event, FakeEvent)
            self.log.append("wait")
            self._copies.append(_WaitEvent(event))
            self._notify()

    def bind_compute_stream(self) -> None:
        pass

    def record_compute_event(self) -> FakeEvent:
        event = FakeEvent(self)
        event.record()
        return event

    def compute_wait_event(self, event: DeviceEvent) -> None:
        assert isinstance(event, FakeEvent)
        self.compute_waits += 1
        self.add_compute(_WaitEvent(event))

    def take_stall_seconds(self) -> float:
        return 0.0

    def take_copy_times(self) -> list[tuple[int, float]]:
        return []

    def synchronize(self) -> None:
        with self.changed:
            while self.runs_when_synchronized and self._copies:
                assert self.step_copies() or self.step_compute(), "the streams wait for each other"
            assert self.changed.wait_for(lambda: not self._copies, TIMEOUT), "the copy stream does not run"
            self.synchronizations += 1

    # ---- kernels

    def launch(self, experts: Sequence[tuple[ExpertKey, int]]) -> None:
        """Launch a kernel that reads these experts in these slots."""
        assert self._memory is not None, "kernels need a FakeMemory"
        self.add_compute(_ReadExperts(self._memory, experts))

    def launch_batch(self, batch: ExpertBatch) -> None:
        """Launch a kernel that reads the experts of a batch."""
        keys = [ExpertKey(batch.layer, expert) for expert in batch.experts]
        self.launch(list(zip(keys, batch.slots, strict=True)))

    def add_compute(self, work: _Work) -> None:
        """Put work on the compute stream."""
        with self.changed:
            self._compute.append(work)
            self._notify()

    # ---- failures

    def check_alive(self) -> None:
        """Raise an error like PyTorch's if the device is broken."""
        if self.broken:
            raise RuntimeError("an illegal memory access was encountered")

    def break_down(self) -> None:
        """Let everything fail from now on."""
        with self.changed:
            self.broken = True
            self.changed.notify_all()

    # ---- running the streams from the test

    def step_copies(self) -> bool:
        """Do a small part of the copy stream; return whether that was possible."""
        return self._step(self._copies)

    def step_compute(self) -> bool:
        """Do a small part of the compute stream; return whether that was possible."""
        return self._step(self._compute)

    def run_copies(self, submissions: int | None = None) -> None:
        """Run the copy stream to the end of so many submissions, or as far as it goes without compute."""
        ended = 0
        while submissions is None or ended < submissions:
            with self.changed:
                ended += isinstance(self._copies[0] if self._copies else None, _RecordEvent)
            if not self.step_copies():
                assert submissions is None, f"only {ended} submissions can end"
                return

    def run_compute(self) -> None:
        """Run the compute stream as far as it goes without further copies."""
        while self.step_compute():
            pass

    def finish_compute(self) -> None:
        """Run the compute stream to its end, with as few copies as that takes."""
        while self._compute:
            assert self.step_compute() or self.step_copies(), "the streams wait for each other"

    def finish(self) -> None:
        """Run both streams to their end."""
        while self._copies or self._compute:
            assert self.step_copies() or self.step_compute(), "the streams wait for each other"

    # ---- running the streams by threads

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run each stream by a thread of its own, at varying speed."""
        ended = threading.Event()

        def run(stream: deque[_Work], rng: random.Random) -> None:
            while not ended.is_set():
                try:
                    for _ in range(rng.choice([1, 3, 30])):
                        self._step(stream)
                    if rng.random() < 0.02:
                        time.sleep(0.001)
                    with self.changed:
                        self.changed.wait_for(lambda: ended.is_set() or _can_step(stream))
                except AssertionError as error:
                    self.errors.append(error)

        threads = [
            threading.Thread(target=run, args=(stream, random.Random(self._rng.random())), daemon=True)
            for stream in (self._copies, self._compute)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            with self.changed:
                self.changed.notify_all()
            for thread in threads:
                thread.join()

    def wait_until_idle(self) -> None:
        """Wait until both streams are empty."""
        with self.changed:
            assert self.changed.wait_for(lambda: not self._copies and not self._compute, TIMEOUT), "the streams hang"

    def wait_until_logged(self, count: int) -> None:
        """Wait until so many submissions are in the log."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.log) >= count, TIMEOUT), self.log

    def wait_until_awaited(self, event: Callable[[], DeviceEvent | None]) -> None:
        """Wait until another thread waits for the event that the callable returns."""

        def awaited() -> bool:
            return isinstance(found := event(), FakeEvent) and found.awaited

        with self.changed:
            assert self.changed.wait_for(awaited, TIMEOUT), "no thread waits for the event"

    # ---- checks

    @contextmanager
    def urgent_submissions(self) -> Iterator[None]:
        """Do not count submissions of this thread as prefetches inside."""
        self._thread.urgent = True
        try:
            yield
        finally:
            self._thread.urgent = False

    def _check_ranges(self, ranges: Sequence[CopyRange], failing: bool) -> None:
        if self._memory is None:
            return
        for copied in ranges:
            self._memory.check(copied)
            job = self._memory.job(copied)
            if copied.nbytes < 1 or not self.may_copy(job):
                self.errors.append(AssertionError(f"a copy that has ended or was never asked for: {job}"))
            if failing:
                self.failed_keys.add(job.key)
        self.log.append(" ".join(map(self._memory.describe, ranges)) + (" failed" if failing else ""))

    def _check_prefetch(self, ranges: Sequence[CopyRange], end: FakeEvent) -> None:
        if getattr(self._thread, "urgent", False):
            return
        self._prefetch_ends = [event for event in self._prefetch_ends if not event.passed] + [end]
        nbytes = sum(copied.nbytes for copied in ranges)
        if self._window is not None and len(self._prefetch_ends) > self._window:
            self.errors.append(AssertionError(f"{len(self._prefetch_ends)} chunks of prefetches are on the stream"))
        if self._chunk is not None and nbytes > self._chunk:
            self.errors.append(AssertionError(f"a chunk of {nbytes} bytes"))

    def _notify(self) -> None:
        if self._immediate:
            self.finish()
        self.changed.notify_all()

    def _step(self, stream: deque[_Work]) -> bool:
        with self.changed:
            if not stream:
                return False
            try:
                ended = stream[0].step()
            except AssertionError:
                stream.popleft()
                raise
            if ended:
                stream.popleft()
                self.changed.notify_all()
            return ended is not None


def _can_step(stream: deque[_Work]) -> bool:
    return bool(stream) and not (isinstance(stream[0], _WaitEvent) and not stream[0].event.passed)


class _Call:
    """A kernel or copy that does everything at once, when its turn comes."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def step(self) -> bool:
        with torch.inference_mode():  # which a device does not know of
            self._call()
        return True


class FakeRowStream:
    """Implements `RowStream`: copies to the host and kernels that place results run when the compute stream does.

    So work on the CPU that starts before the event behind a copy reads old rows, and results that are overwritten
    before the event behind their kernel are placed wrongly.
    """

    def __init__(self, device: FakeCudaDevice) -> None:
        self._device = device

    def copy_to_host(self, target: Tensor, source: Tensor) -> None:
        self._device.add_compute(_Call(lambda: target.copy_(source)))

    def record_event(self) -> FakeEvent:
        return self._device.record_compute_event()

    def place_results(self, values: Tensor, pairs: Tensor, first: int, sums: Tensor) -> None:
        from spmoe.backends.kernels.experts import place_results_plain

        self._device.add_compute(_Call(lambda: place_results_plain(values, pairs, first, sums)))


class CheckedTransfer(CudaTransfer):
    """Tells the fake device which submissions are urgent, so that it can check those of prefetches."""

    copy_stream: FakeCudaDevice

    def copy(self, jobs: Sequence[CopyJob], *, urgent: bool) -> list[CopyHandle]:
        if not urgent:
            return super().copy(jobs, urgent=False)
        with self.copy_stream.urgent_submissions():
            return super().copy(jobs, urgent=True)

    def send_now(self, handle: CudaCopyHandle) -> None:
        with self.copy_stream.urgent_submissions():
            super().send_now(handle)


# ---- graphs


class _FirstGraphEnds(Exception):
    """The forward has reached the first split."""


@dataclass
class _Forward:
    """A captured forward and its last launch."""

    run: Callable[[], Tensor]
    result: Tensor
    splits: bool  # whether the host works between its graphs
    launch: int = 0  # number of the launch of its first graph
    inputs: list[Tensor] | None = None  # that the first graph has read


class FakeGraphRecorder:
    """Implements `GraphRecorder`: keeps a captured forward and replays it by running it again.

    `launch_first` runs the forward up to the first split. `launch_rest` runs all of it again, with the inputs that
    `launch_first` has read. It fails if another graph was launched in between, since graphs share memory.
    """

    def __init__(self, device: FakeCudaDevice | None = None) -> None:
        self.phase = Phase.EAGER
        self.stopwatch = Stopwatch()
        self.captured = 0  # forwards
        self.replayed = 0  # times that the first graph of a forward was launched
        self._device = device or FakeCudaDevice(immediate=True)
        self._replaying: _Forward | None = None
        self._stops_at_split = False
        self._splits = 0
        self._observations: list[HostWork] = []

    def capture(self, forward: Callable[[], T]) -> tuple[CapturedGraph, T]:
        """Warm up and capture a forward, which returns a tensor."""
        try:
            self.phase = Phase.WARMUP
            forward()
            self.phase, self._splits = Phase.CAPTURE, 0
            result = cast(Tensor, forward()).clone()
        finally:
            self.phase = Phase.EAGER
        self.captured += 1
        run = cast(Callable[[], Tensor], forward)
        graph, kept = CapturedGraph(), _Forward(run, result, splits=self._splits > 0)
        graph.pieces.append(partial(self._launch_first, kept))
        if kept.splits:
            graph.pieces.append(partial(self._launch_rest, kept))
        return graph, cast(T, result)

    def split(self, between: HostWork) -> None:
        self._split()
        if self._replaying is not None:
            between()

    def split_around(self, work: HostWork, between: Between) -> None:
        self._split()
        if self._replaying is not None:
            between(work, self.take_observations())

    def observe_later(self, observe: HostWork) -> None:
        if self._replaying is not None:
            self._observations.append(observe)

    def take_observations(self) -> list[HostWork]:
        observations, self._observations = self._observations, []
        return observations

    def wait(self) -> None:
        pass

    def new_event(self) -> FakeEvent:
        return FakeEvent(self._device)

    def load_inputs(self, host_inputs: Tensor, chain: Tensor, other: Tensor, *inputs: Tensor) -> None:
        """Replace the kernel of this name: `launch_rest` gets the inputs that `launch_first` has read."""
        from spmoe.backends.kernels.inputs import load_inputs_plain

        forward = self._replaying
        if forward is not None and not self._stops_at_split and forward.inputs is not None:
            for tensor, saved in zip((chain, *inputs), forward.inputs, strict=True):
                tensor.copy_(saved)
            return
        load_inputs_plain(host_inputs, chain, other, *inputs)
        if forward is not None and self._stops_at_split:
            forward.inputs = [tensor.clone() for tensor in (chain, *inputs)]

    def _launch_first(self, forward: _Forward) -> None:
        self.replayed += 1
        forward.launch, forward.inputs = self.replayed, None
        self._run(forward, stops_at_split=forward.splits)

    def _launch_rest(self, forward: _Forward) -> None:
        assert forward.launch == self.replayed, "another graph may have overwritten the results of the first one"
        self._run(forward, stops_at_split=False)

    def _run(self, forward: _Forward, *, stops_at_split: bool) -> None:
        self.phase, self._replaying, self._stops_at_split = Phase.CAPTURE, forward, stops_at_split
        try:
            forward.result.copy_(forward.run())
        except _FirstGraphEnds:
            forward.result.fill_(float("nan"))  # nobody may read it before the rest has run
            self._observations.clear()
        finally:
            self.phase, self._replaying, self._stops_at_split = Phase.EAGER, None, False

    def _split(self) -> None:
        self._splits += 1
        if self._stops_at_split:
            raise _FirstGraphEnds


class _ThreadEvent(FakeEvent):
    """An event behind the followed forward that was launched last."""

    def __init__(self, recorder: FollowedRecorder, device: FakeCudaDevice) -> None:
        super().__init__(device)
        self._recorder = recorder
        self._after: threading.Thread | None = None

    def record(self) -> None:
        self._after = self._recorder.thread
        self.passed = True

    def query(self) -> bool:
        return super().query() and (self._after is None or not self._after.is_alive())

    def synchronize(self) -> None:
        if self._after is not None:
            self._after.join(TIMEOUT)
            assert not self._after.is_alive(), "the forward does not end"
        super().synchronize()


class FollowedRecorder(FakeGraphRecorder):
    """Runs forwards that look their experts up themselves in a thread: the host and the device run side by side."""

    def __init__(self, device: FakeCudaDevice | None = None) -> None:
        super().__init__(device)
        self.thread: threading.Thread | None = None
        self.launches_followed = False  # the next launch
        self._failure: BaseException | None = None

    def new_event(self) -> FakeEvent:
        return _ThreadEvent(self, self._device)

    def wait(self) -> None:
        self.join()

    def join(self) -> None:
        """Wait for the forward that runs; raise its error."""
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(TIMEOUT)
            assert not self.thread.is_alive(), "the forward does not end"
            self.thread = None
            failure, self._failure = self._failure, None
            if failure is not None:
                raise failure

    def capture(self, forward: Callable[[], T]) -> tuple[CapturedGraph, T]:
        self.join()
        try:
            return super().capture(forward)
        finally:
            self._observations.clear()

    def observe_later(self, observe: HostWork) -> None:
        """Keep observations for the captured layers that the host follows, as `CudaGraphRecorder` does."""
        if self.phase is Phase.CAPTURE:
            self._observations.append(observe)

    def _launch_first(self, forward: _Forward) -> None:
        self.join()
        launch, followed = partial(super()._launch_first, forward), self.launches_followed
        self.launches_followed = False
        if not followed:
            launch()
            return

        def run() -> None:
            try:
                launch()
            except BaseException as error:
                self._failure = error

        self.thread = threading.Thread(target=run, name="device", daemon=True)
        self.thread.start()


# ---- threads


def run_with_timeout(body: Callable[[], None]) -> None:
    """Run `body` in another thread; if it hangs, print the stack of every thread and fail."""
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
    thread.join(2 * TIMEOUT)
    if thread.is_alive():
        faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr)
        raise AssertionError(f"still running after {2 * TIMEOUT} s")
    if outcome[0] is not None:
        raise outcome[0]


def engine_threads() -> set[threading.Thread]:
    """Return the engine's threads that are alive."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("spmoe-")}
