"""Transfers: copies of blobs from the store into slots.

`FileTransfer`, here, reads an expert file. Emulated links are in link.py, the CUDA transfer in backends/.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from spmoe.errors import SpmoeError, TransferError
from spmoe.experts.slots import MemorySlots
from spmoe.experts.store import ExpertFile
from spmoe.files import read_into
from spmoe.types import ExpertKey

CHUNK_BYTES = 16 * 2**20  # size of one submission: large enough for the full speed of a link


class CopyJob(NamedTuple):
    """Copy this expert into this slot."""

    key: ExpertKey
    slot: int


class CopyHandle(Protocol):
    """Handle on one submitted copy."""

    def ready(self) -> bool:
        """Return whether the copy has ended, successfully or not. Never blocks."""
        ...

    def wait(self) -> None:
        """Block until the copy has ended; raise SpmoeError if it failed."""
        ...

    def stream_wait(self) -> None:
        """Order compute that is launched next after this copy; the copy counts as ready from then on.

        Raise SpmoeError if it failed. Transfers whose compute runs on the host block until the copy has ended.
        """
        ...

    def prioritize(self) -> None:
        """Move this copy before every copy that has not started: compute needs it now."""
        ...


class DeviceEvent(Protocol):
    """Point in the work that was launched on a device."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Transfer(Protocol):
    """Moves blobs into slots. Copies run in the order given, urgent ones before others that have not started.

    Compute that runs asynchronously is divided into numbered epochs, so that no slot is overwritten while a kernel
    that reads it may still run.
    """

    depth: int  # copies that keep the transfer busy; more than that only delays later ones
    draws_timeline: bool  # whether it adds its copies to the timeline itself

    def copy(self, jobs: Sequence[CopyJob], *, urgent: bool) -> list[CopyHandle]:
        """Submit a batch; return at once with one handle per job."""
        ...

    def set_batching(self, batching: bool) -> None:
        """Allow or forbid that copies share a submission."""
        ...

    def pump(self) -> None:
        """Submit copies that wait behind the window of copies in flight, as far as there is space by now."""
        ...

    def wait_and_pump(self, event: DeviceEvent) -> None:
        """Wait for a device event, pumping meanwhile."""
        ...

    def bind_compute_stream(self) -> None:
        """Bind the calling thread's current stream as the compute stream."""
        ...

    def begin_epoch(self) -> int:
        """Begin a new epoch of compute and return its number; later epochs have larger numbers."""
        ...

    def finish_epochs(self, epoch: int) -> None:
        """State that all kernels launched before this epoch have finished."""
        ...

    def protect_slots(self, slots: Iterable[int], epoch: int | None = None) -> None:
        """Do not overwrite these slots until the kernels up to this epoch (default: the current one) finish."""
        ...

    def take_stall_seconds(self) -> float:
        """Return how long the compute stream has waited for copies since the last call."""
        ...

    def close(self) -> None:
        """Let copies in flight end, fail the others and release everything."""
        ...


class HostCompute:
    """Transfer methods for compute that runs on the host: every kernel has finished when its call returns."""

    draws_timeline = False

    def set_batching(self, batching: bool) -> None:
        """Do nothing: reads are never merged."""

    def pump(self) -> None:
        """Do nothing: reader threads take every job."""

    def wait_and_pump(self, event: DeviceEvent) -> None:
        event.synchronize()

    def bind_compute_stream(self) -> None:
        """Do nothing: there is no stream."""

    def begin_epoch(self) -> int:
        return 0

    def finish_epochs(self, epoch: int) -> None:
        """Do nothing: all epochs have finished."""

    def protect_slots(self, slots: Iterable[int], epoch: int | None = None) -> None:
        """Do nothing: no kernel reads a slot asynchronously."""

    def take_stall_seconds(self) -> float:
        """Return 0: the caller measures its own waits."""
        return 0.0


class FutureHandle:
    """Handle on a copy that a reader thread runs."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def ready(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()

    stream_wait = wait

    def prioritize(self) -> None:
        """Do nothing: a reader is free for every job that is not urgent (see FileTransfer.depth)."""


class FileTransfer(HostCompute):
    """Reads blobs from an expert file with several reads in flight; a read does not hold the interpreter lock."""

    def __init__(self, file: ExpertFile, slots: MemorySlots, readers: int = 4) -> None:
        self.depth = readers
        self._file = file
        self._slots = slots
        self._jobs: queue.PriorityQueue[tuple[int, int, CopyJob | None, Future[None]]] = queue.PriorityQueue()
        self._sequence = 0
        self._lock = threading.Lock()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._read_jobs, name=f"spmoe-reader-{i}", daemon=True) for i in range(readers)
        ]
        for thread in self._threads:
            thread.start()

    def copy(self, jobs: Sequence[CopyJob], *, urgent: bool) -> list[CopyHandle]:
        with self._lock:
            if self._closed:
                raise TransferError("the engine is closed")
            return [FutureHandle(self._put(0 if urgent else 1, job)) for job in jobs]

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True  # nothing is queued after this, so the loop below empties the queue
            for _ in self._threads:
                self._put(-1, None)
        for thread in self._threads:
            thread.join()
        while not self._jobs.empty():
            self._jobs.get()[3].set_exception(TransferError("the engine was closed"))
        self._file.close()

    def _put(self, priority: int, job: CopyJob | None) -> Future[None]:
        future: Future[None] = Future()
        self._sequence += 1
        self._jobs.put((priority, self._sequence, job, future))
        return future

    def _read_jobs(self) -> None:
        while True:
            _, _, job, future = self._jobs.get()
            if job is None:
                return
            try:
                self._read(job)
            except Exception as error:  # a thread may be waiting for this copy
                future.set_exception(_as_transfer_error(job.key, self._file, error))
            else:
                future.set_result(None)

    def _read(self, job: CopyJob) -> None:
        buffer = self._slots.buffer(job.slot)
        if missing := len(buffer) - read_into(self._file.fd, buffer, self._file.offset(job.key)):
            raise OSError(f"the file ends {missing} bytes early")
        self._file.check(job.key, buffer)


def _as_transfer_error(key: ExpertKey, file: ExpertFile, error: Exception) -> SpmoeError:
    if isinstance(error, SpmoeError):
        return error
    failure = TransferError(
        f"expert {key.expert} of layer {key.layer} could not be read from {file.path} ({error}); "
        "check the disk, or delete the file to have it rebuilt"
    )
    failure.__cause__ = error
    return failure
