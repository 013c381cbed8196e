"""Transfers: how a blob gets from the store into a slot. The narrow waist of the runtime.

`FileTransfer`, here, reads an expert file. Others are in link.py and, for devices, in backends/.
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


class CopyJob(NamedTuple):
    """Bring this expert into this slot."""

    key: ExpertKey
    slot: int


class CopyHandle(Protocol):
    """A handle on one submitted copy."""

    def ready(self) -> bool:
        """Whether the copy has ended, well or badly. Never blocks."""
        ...

    def wait(self) -> None:
        """Block until the copy has ended; raises SpmoeError if it failed."""
        ...

    def order(self) -> None:
        """Make compute that is submitted next come after this copy, and let it count as ready from then on.

        Where compute is not submitted but done, that is waiting. Raises like `wait`.
        """
        ...

    def prioritize(self) -> None:
        """Somebody waits for this copy now: it goes before every copy that has not started."""
        ...


class Event(Protocol):
    """A point in what a device was given to do."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Transfer(Protocol):
    """Moves blobs. Copies run in the order given, urgent ones before others that have not started."""

    depth: int  # how many copies keep it busy; more than that only makes later ones wait
    batched: bool  # whether copies may share a submission

    def copy(self, jobs: Sequence[CopyJob], *, urgent: bool) -> list[CopyHandle]:
        """Submit a batch, return at once with one ticket per job."""
        ...

    def keep_full(self) -> None:
        """Submit what waits behind a window of copies, as far as there is room by now."""
        ...

    def wait_and_pump(self, event: Event) -> None:
        """Wait for a point of compute, and keep full meanwhile."""
        ...

    def bind_compute_stream(self) -> None:
        """The calling thread is the one that gives work to compute, as it does now, until another says so."""
        ...

    def mark(self) -> int:
        """A point in what is given to compute; later ones are larger."""
        ...

    def passed(self, mark: int) -> None:
        """All that compute was given before this point is over."""
        ...

    def fence(self, slots: Iterable[int], mark: int | None = None) -> None:
        """What compute was given before the next point after this one, or so far, may still read these slots.

        They are written only after it.
        """
        ...

    def stalled_seconds(self) -> float:
        """How long compute has waited, on its own device, behind ordered copies since last asked."""
        ...

    def close(self) -> None:
        """Let copies in flight end, fail the rest, release everything."""
        ...


class HostPaced:
    """What a transfer does about compute that runs on the host: nothing, since it has ended when its call returns."""

    batched = True  # a batch of reads is only a list of them

    def keep_full(self) -> None:
        """Others do."""

    def wait_and_pump(self, event: Event) -> None:
        """Nothing else is to be done."""
        event.synchronize()

    def bind_compute_stream(self) -> None:
        """Whoever it is."""

    def mark(self) -> int:
        """Whatever was given is over."""
        return 0

    def passed(self, mark: int) -> None:
        """It always is."""

    def fence(self, slots: Iterable[int], mark: int | None = None) -> None:
        """Nothing reads a slot behind the caller's back."""

    def stalled_seconds(self) -> float:
        """The caller has seen every wait itself."""
        return 0.0


class FutureHandle:
    """A ticket on a copy that another thread runs at once."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def ready(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()

    order = wait

    def prioritize(self) -> None:
        """Nothing to do: a reader is free for every job that is not urgent (see FileTransfer.depth)."""


class FileTransfer(HostPaced):
    """Reads blobs from an expert file with several reads outstanding; reads hold no interpreter lock."""

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
            self._closed = True  # nothing is put after this, so nothing is left behind by the loop below
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
            except Exception as error:  # whatever it is, somebody may be waiting for this copy
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
