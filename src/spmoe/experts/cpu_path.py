"""The CPU path: missing experts that a thread of its own computes from host memory, while others move over the link.

`CpuPath` owns the choice of path and the thread. A backend describes a layer's experts by a `CpuLayer`, and places
the results, which `ExpertAccess.use` hands out as a batch without slots. An expert that the CPU cannot compute is
moved instead.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Protocol

from torch import Tensor

from spmoe.errors import SpmoeError, reason
from spmoe.experts.paths import MissingExpert, PathChooser
from spmoe.experts.transfer import DeviceEvent
from spmoe.observe.ledger import Ledger
from spmoe.types import ExpertKey

_POLL_SECONDS = 2e-4  # between two looks at the link while the CPU computes
_JOIN_SECONDS = 30.0  # longest wait for the thread to end
_THREAD_NAME = "spmoe-cpu-experts"

CpuWork = Callable[[], float]  # returns the seconds of it that a copy of the expert took, which later work reads


@dataclass(frozen=True, slots=True)
class ComputedRows:
    """Results of experts that the CPU has computed, in host memory, multiplied by their routing weights."""

    rows: Tensor  # [results] int64
    positions: Tensor  # [results] int64, in the row's top-k
    values: Tensor  # [results, hidden] float32

    def between(self, start: int, stop: int) -> ComputedRows:
        """Return the results of these rows, whose numbers then begin at 0."""
        inside = (self.rows >= start) & (self.rows < stop)
        return ComputedRows(self.rows[inside] - start, self.positions[inside], self.values[inside])


class CpuLayer(Protocol):
    """One layer's routed experts and hidden states, as the CPU computes them."""

    @property
    def rows(self) -> Mapping[int, int]:
        """Number of rows that are routed to each expert."""
        ...

    @property
    def has_place_for_copy(self) -> bool:
        """Whether the copy of one more expert can be kept without dropping another."""
        ...

    def needs_copy(self, expert: int) -> bool:
        """Return whether a copy of an expert is made before it is computed."""
        ...

    def begin(self, experts: Sequence[int]) -> None:
        """Prepare to compute these experts; called once, before their work."""
        ...

    def work(self, expert: int) -> CpuWork:
        """Return a call that computes one of them, on any thread."""
        ...

    def results(self, experts: Sequence[int]) -> ComputedRows:
        """Return the results of these experts, whose work has ended."""
        ...


class CpuJob(Protocol):
    """One expert on the CPU."""

    rows: int
    seconds: float  # that it took, once it has ended, without those of its copy
    copy_seconds: float  # that its copy took; 0: none was made
    error: BaseException | None

    def query(self) -> bool:
        """Return whether it has ended, successfully or not."""
        ...

    def wait(self, pump: Callable[[], None]) -> None:
        """Wait until it has ended; call `pump` meanwhile."""
        ...


class CpuWorker(Protocol):
    """Computes experts one after the other. On a virtual clock, it only takes time."""

    def submit(self, work: CpuWork, rows: int) -> CpuJob:
        """Queue an expert."""
        ...

    def cancel(self, jobs: Sequence[CpuJob]) -> None:
        """Drop jobs that have not begun, and wait for the others to end."""
        ...

    def close(self) -> None:
        """End the thread. Idempotent."""
        ...


class ThreadJob:
    """One expert that a `CpuThread` computes."""

    def __init__(self, work: CpuWork, rows: int, thread: threading.Thread) -> None:
        self.rows = rows
        self.seconds = 0.0
        self.copy_seconds = 0.0
        self.error: BaseException | None = None
        self._work = work
        self._taken = threading.Lock()  # by whoever runs or cancels the work, for good
        self._thread = thread
        self._ended = threading.Event()

    def query(self) -> bool:
        return self._ended.is_set()

    def wait(self, pump: Callable[[], None]) -> None:
        pump()
        while not self._ended.wait(_POLL_SECONDS):
            pump()
            if not self._thread.is_alive() and not self._ended.is_set():
                self.fail(SpmoeError("the thread that computes experts has died"))

    def run(self) -> None:
        """Compute the expert, unless it was cancelled."""
        if not self._taken.acquire(blocking=False):
            return
        started = time.perf_counter()
        try:
            self.copy_seconds = self._work()
        except Exception as error:
            self.error = error
        self.seconds = time.perf_counter() - started - self.copy_seconds
        self._ended.set()

    def cancel(self) -> None:
        """Drop the work if it has not begun."""
        if self._taken.acquire(blocking=False):
            self.fail(SpmoeError("the expert is not needed any more"))

    def fail(self, error: BaseException) -> None:
        """End the job with an error."""
        self.error = error
        self._ended.set()


@dataclass(frozen=True, slots=True)
class JobEnd:
    """End of a job, as a device event."""

    job: CpuJob

    def query(self) -> bool:
        return self.job.query()

    def synchronize(self) -> None:
        self.job.wait(lambda: None)


class CpuThread:
    """A thread that computes experts. `prepare` is called on it first, to set its number of intra-op threads."""

    def __init__(self, prepare: Callable[[], None] = lambda: None) -> None:
        self._prepare = prepare
        self._closed = False
        self._start()

    def submit(self, work: CpuWork, rows: int) -> CpuJob:
        if self._closed:
            raise SpmoeError("the engine is closed")
        if not self._thread.is_alive():
            self._start()
        job = ThreadJob(work, rows, self._thread)
        self._queue.put(job)
        return job

    def cancel(self, jobs: Sequence[CpuJob]) -> None:
        for job in jobs:
            if isinstance(job, ThreadJob):
                job.cancel()
        for job in jobs:
            job.wait(lambda: None)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join(_JOIN_SECONDS)
            if self._thread.is_alive():
                raise SpmoeError(f"an expert on the CPU has not ended for {_JOIN_SECONDS:g} s")

    def _start(self) -> None:
        queue, started = SimpleQueue[ThreadJob | None](), threading.Event()
        thread = threading.Thread(target=self._run, args=(queue, started), name=_THREAD_NAME, daemon=True)
        thread.start()
        self._queue, self._thread = queue, thread
        started.wait()

    def _run(self, queue: SimpleQueue[ThreadJob | None], started: threading.Event) -> None:
        try:
            self._prepare()
        finally:
            started.set()
        while (job := queue.get()) is not None:
            job.run()


class CpuPath:
    """The second path to missing experts: chooses it, runs it, and learns from it."""

    def __init__(self, worker: CpuWorker, chooser: PathChooser | None = None) -> None:
        self.chooser = chooser or PathChooser()
        self._worker = worker
        self._jobs: dict[int, CpuJob] = {}  # of the layer that runs, by expert
        self._shared = False  # whether the layer that runs, or ran last, uses both paths
        self._failure: str | None = None

    def choose(
        self, layer: CpuLayer, keys: Sequence[ExpertKey], losses: Sequence[float], link_backlog: float
    ) -> list[ExpertKey]:
        """Return the missing experts of a layer that the CPU computes, in order.

        `losses`: what moving each costs later, see `MissingExpert`; `link_backlog`: moves that the link does first.
        """
        missing = [
            MissingExpert(layer.rows[key.expert], loss, layer.needs_copy(key.expert))
            for key, loss in zip(keys, losses, strict=True)
        ]
        running = [job.rows for job in self._jobs.values() if not job.query()]
        backlog = sum(self.chooser.cpu.seconds(count, shared=True) for count in running)
        split = self.chooser.choose(missing, link_backlog, backlog, may_copy=layer.has_place_for_copy)
        self._shared = bool(split.computed) and (bool(split.moved) or link_backlog > 0.0)
        return [keys[number] for number in split.computed]

    def learn_moves(self, times: Sequence[tuple[int, float]], blob_bytes: int, ledger: Ledger) -> None:
        """Learn from copies that have ended, each with its bytes and seconds; then judge the last choice."""
        if nbytes := sum(size for size, _ in times):
            seconds = sum(time for _, time in times)
            ledger.timed_copies(nbytes, seconds)
            self.chooser.moved(seconds * blob_bytes / nbytes, shared=self._shared)
        if (wrong := self.chooser.judge()) is not None:
            ledger.path_chosen(wrong)

    def start(self, layer: CpuLayer, keys: Sequence[ExpertKey]) -> None:
        """Begin to compute experts of a layer."""
        try:
            layer.begin([key.expert for key in keys])
            for _, expert in keys:
                self._jobs[expert] = self._worker.submit(layer.work(expert), layer.rows[expert])
        except Exception as error:  # no memory for the rows, or no thread; `finish` reports what was not started
            self._failure = self._failure or reason(error)

    def finish(
        self,
        keys: Sequence[ExpertKey],
        pump: Callable[[DeviceEvent], None],
        ledger: Ledger,
        most_seconds: float = math.inf,
    ) -> list[ExpertKey]:
        """Wait until these experts are computed; return those that could not be and have to be moved.

        `pump` is called meanwhile, with the end of the expert that is waited for. If the layer has taken more than
        `most_seconds`, the CPU rests as after a failure.
        """
        failed, seconds = [], 0.0
        for key in keys:
            if (job := self._jobs.get(key.expert)) is None:  # could not be started
                failed.append(key)
                continue
            job.wait(partial(pump, JobEnd(job)))
            seconds += job.seconds + job.copy_seconds
            if job.error is not None:
                failed.append(key)
                self._failure = self._failure or reason(job.error)
            else:
                self.chooser.computed(job.rows, job.seconds, shared=self._shared)
                ledger.computed(job.seconds)
                if job.copy_seconds:
                    self.chooser.copied(job.copy_seconds, shared=self._shared)
                    ledger.expert_copied(job.copy_seconds)
        self._jobs = {}
        if failed or seconds > most_seconds:
            self.chooser.failed()
        else:
            self.chooser.succeeded()
        if failed:
            ledger.computing_failed(len(failed))
        return failed

    def abandon(self) -> None:
        """Drop experts that are not computed yet, and wait for the one that is: it reads memory that will change."""
        jobs, self._jobs = self._jobs, {}
        self._worker.cancel(list(jobs.values()))

    def take_failure(self) -> str | None:
        """Return why the CPU has failed to compute an expert, once."""
        failure, self._failure = self._failure, None
        return failure

    def close(self) -> None:
        """End the thread. Idempotent."""
        self.abandon()
        self._worker.close()
