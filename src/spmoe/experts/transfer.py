"""Transfers: copies of blobs from the store into slots.

`FileTransfer`, here, reads an expert file, or experts in host memory. Emulated links are in link.py, the CUDA transfer
in backends/.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import NamedTuple, Protocol

from spmoe.errors import SpmoeError, TransferError
from spmoe.experts.slots import MemorySlots
from spmoe.experts.store import StoreSpec
from spmoe.experts.workers import Workers
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

    def queued_bytes(self) -> int:
        """Return the bytes of prefetches that a demand submitted now would wait for."""
        ...

    def take_copy_times(self) -> list[tuple[int, float]]:
        """Return bytes and seconds of copies that have ended since the last call, if they are measured."""
        ...

    def drain(self) -> None:
        """Let copies in flight end and fail the others; afterwards no slot is written, and copies may start again."""
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

    def queued_bytes(self) -> int:
        """Return 0: urgent copies wait for no other."""
        return 0

    def take_copy_times(self) -> list[tuple[int, float]]:
        """Return nothing: copies are not measured."""
        return []


class BlobReader(Protocol):
    """Store whose blobs are read one by one: an expert file, a checkpoint's own files, or host memory."""

    @property
    def spec(self) -> StoreSpec:
        """Description of the blobs."""
        ...

    @property
    def path(self) -> Path | str:
        """Place of the blobs, for messages."""
        ...

    def read(self, key: ExpertKey, buffer: memoryview) -> None:
        """Read an expert's blob into a buffer; raise an exception unless it is the whole and the right blob."""
        ...

    def close(self) -> None:
        """Release the file or memory; idempotent."""
        ...


class FutureHandle:
    """Handle on a copy that a reader thread runs."""

    def __init__(self, key: ExpertKey, store: BlobReader, future: Future[None]) -> None:
        self._key = key
        self._store = store
        self._future = future

    def ready(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        try:
            error = self._future.exception()  # of the read, not of waiting for it
        except CancelledError:
            raise TransferError("the engine was closed") from None
        if isinstance(error, Exception) and not isinstance(error, SpmoeError):
            raise TransferError(
                f"expert {self._key.expert} of layer {self._key.layer} could not be read from {self._store.path} "
                f"({error}); check the disk, or delete the file to have it rebuilt"
            ) from error
        if error is not None:
            raise error

    stream_wait = wait

    def prioritize(self) -> None:
        """Do nothing: every copy that is in flight has a reader (see FileTransfer.depth)."""


class FileTransfer(HostCompute):
    """Reads blobs of a file or of host memory, several at once; a read does not hold the interpreter lock.

    Urgent reads have threads of their own, so that they wait for no other read.
    """

    def __init__(self, store: BlobReader, slots: MemorySlots, readers: int = 4) -> None:
        self.depth = readers
        self._store = store
        self._slots = slots
        self._readers = readers
        self._closed = False
        self._start()

    def copy(self, jobs: Sequence[CopyJob], *, urgent: bool) -> list[CopyHandle]:
        readers = self._urgent if urgent else self._others
        return [FutureHandle(job.key, self._store, readers.submit(self._read, job)) for job in jobs]

    def drain(self) -> None:
        self._stop()
        self._start()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._stop()
            self._store.close()

    def _start(self) -> None:
        self._urgent = Workers(self._readers, "spmoe-demand-reader")
        self._others = Workers(self._readers, "spmoe-prefetch-reader")

    def _stop(self) -> None:
        self._urgent.close()
        self._others.close()

    def _read(self, job: CopyJob) -> None:
        self._store.read(job.key, self._slots.buffer(job.slot))
