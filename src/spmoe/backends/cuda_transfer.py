"""Copies from host to device, on a stream of their own.

What is demanded is submitted at once and whole. What is wished for goes chunk by chunk, with no more than a window of
chunks on the stream, so that a demand waits for that window at most. The thread that computes keeps the window full,
also while it waits for the device: another would take the interpreter from it whenever a chunk ends. Compute is ordered
behind a copy on the device: the host does not wait for bytes. Likewise a slot is written again only after the kernels
that read it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from spmoe.backends.cuda_runtime import CopyRange
from spmoe.errors import SpmoeError, TransferError
from spmoe.experts.transfer import CopyHandle, CopyJob, Event
from spmoe.types import ExpertKey

CHUNK_BYTES = 16 * 2**20  # large enough for the link's full speed
WINDOW = 2  # chunks on the stream: one moves, the next is behind it when it ends


def chunk_for(nbytes: int) -> int:
    """How much of blobs of this size goes at a time: a whole one rather than one and a bit."""
    return nbytes if CHUNK_BYTES < nbytes < 2 * CHUNK_BYTES else CHUNK_BYTES


class CopyStream(Protocol):
    """The device as this file needs it: a stream for copies beside the one that computes."""

    def copy(self, pieces: Sequence[CopyRange]) -> Event:
        """Submit copies; the event is their end."""
        ...

    def wait_for(self, event: Event) -> None:
        """Copies submitted from now on come after this event."""
        ...

    def bind_compute_stream(self) -> None:
        """The calling thread is the one that submits to compute, on its current stream."""
        ...

    def record_compute_event(self) -> Event:
        """Everything that thread has submitted to compute so far."""
        ...

    def compute_wait_event(self, event: Event) -> None:
        """What the calling thread submits to compute from now on comes after this event."""
        ...

    def stalled_seconds(self) -> float:
        """How long compute has waited for such events since last asked; what has not ended yet is left for later."""
        ...

    def drain(self) -> None:
        """Wait for every copy to end."""
        ...


class BlobAddresses(Protocol):
    """Where blobs and slots are."""

    nbytes: int  # of a blob

    def source(self, key: ExpertKey) -> int: ...

    def slot(self, slot: int) -> int: ...


class Submission:
    """Copies that end together."""

    ordered = False  # compute is behind their end


class CudaCopyHandle:
    """One copy."""

    def __init__(self, transfer: CudaTransfer, job: CopyJob) -> None:
        self.job = job
        self.sent = 0  # bytes
        self.end: Event | None = None  # known once everything is on the stream
        self.error: SpmoeError | None = None
        self.settled = False  # it has an end, or an error
        self._transfer = transfer
        self._submission = Submission()

    def ready(self) -> bool:
        return self.error is not None or self._submission.ordered or (self.end is not None and self.end.query())

    def wait(self) -> None:
        self.prioritize()
        if self.error is not None:
            raise self.error
        if self.end is not None and not self._submission.ordered:
            self.end.synchronize()

    def order(self) -> None:
        """Compute that is submitted next comes after this copy; the host goes on."""
        self.prioritize()
        if self.error is not None:
            raise self.error
        if self.end is not None and not self._submission.ordered and not self.end.query():
            self._transfer.copy_stream.compute_wait_event(self.end)
        self._submission.ordered = True

    def prioritize(self) -> None:
        self._transfer.send_now(self)

    def fail(self, error: SpmoeError) -> None:
        """The copy will not be made, unless it has been."""
        if not self.settled:
            self.error = error
            self.settled = True

    def sent_whole(self, end: Event, submission: Submission) -> None:
        """The last byte is on the stream."""
        self.end = end
        self._submission = submission
        self.settled = True


class CudaTransfer:
    """Host to device."""

    def __init__(
        self, copy_stream: CopyStream, addresses: BlobAddresses, *, chunk: int = CHUNK_BYTES, window: int = WINDOW
    ) -> None:
        self.copy_stream = copy_stream
        self.batched = True  # copies may share a submission
        # the link must not run dry between the end of one copy and the prefetcher's next look
        self.depth = 1 + max(1, -(-2 * window * chunk // addresses.nbytes))
        self._addresses = addresses
        self._chunk = chunk
        self._window = window
        self._lock = threading.Lock()
        self._waiting: deque[CudaCopyHandle] = deque()  # prefetch requests not wholly on the stream
        self._flying: deque[Event] = deque()  # chunks of prefetch requests on the stream
        self._last_use: dict[int, int] = {}  # by slot, the last point before what reads it
        self._points = 1
        self._over = 0  # what was given to compute after this point, and before the next, is over
        self._closed = False

    def copy(self, jobs: Sequence[CopyJob], *, urgent: bool) -> list[CopyHandle]:
        handles = [CudaCopyHandle(self, job) for job in jobs]
        with self._lock:
            if self._closed:
                raise TransferError("the engine is closed")
            try:
                if urgent:
                    for group in self._groups(handles):
                        self._send(group)
                else:
                    self._waiting.extend(handles)
                    self._advance()
            except BaseException as error:  # an interrupt: nobody will have these tickets
                for handle in handles:
                    handle.fail(_as_transfer_error(handle.job, error))
                raise
        return list(handles)

    def keep_full(self) -> None:
        if self._waiting:
            with self._lock:
                self._advance()

    def wait_and_pump(self, event: Event) -> None:
        while self._waiting and not event.query():
            self.keep_full()
            time.sleep(0)  # others may have the interpreter
        event.synchronize()

    def bind_compute_stream(self) -> None:
        self.copy_stream.bind_compute_stream()

    def mark(self) -> int:
        self._points += 1
        return self._points

    def passed(self, mark: int) -> None:
        self._over = max(self._over, mark - 1)

    def fence(self, slots: Iterable[int], mark: int | None = None) -> None:
        """A number for each slot costs nothing; an event is only made for one that is written while it matters."""
        point = self._points if mark is None else mark
        with self._lock:
            self._last_use.update(dict.fromkeys(slots, point))

    def stalled_seconds(self) -> float:
        return self.copy_stream.stalled_seconds()

    def send_now(self, handle: CudaCopyHandle) -> None:
        """Put the rest of a prefetch request on the stream: it is demanded."""
        with self._lock:
            if not handle.settled:
                self._send([handle])
                self._waiting.remove(handle)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            while self._waiting:
                self._waiting.popleft().fail(TransferError("the engine was closed"))
        self.copy_stream.drain()

    # ---- under the lock

    def _groups(self, handles: list[CudaCopyHandle]) -> list[list[CudaCopyHandle]]:
        """Small blobs share a submission, and an end, as long as that costs their first user little."""
        size = max(1, self._chunk // 4 // self._addresses.nbytes) if self.batched else 1
        return [handles[i : i + size] for i in range(0, len(handles), size)]

    def _send(self, handles: list[CudaCopyHandle]) -> None:
        """Put all that is left of these on the stream."""
        self._submit([(handle, self._addresses.nbytes) for handle in handles])

    def _advance(self) -> None:
        """Fill the window with chunks of the prefetch requests that wait."""
        try:
            self._fill_window()
        except Exception as error:  # the device is broken, and somebody may be waiting for these
            self._flying.clear()
            while self._waiting:
                handle = self._waiting.popleft()
                handle.fail(_as_transfer_error(handle.job, error))

    def _fill_window(self) -> None:
        while self._flying and self._flying[0].query():
            self._flying.popleft()
        while len(self._flying) < self._window and (parts := self._next_chunk()):
            if (over := self._submit(parts)) is not None:
                self._flying.append(over)
            self._forget_settled()

    def _next_chunk(self) -> list[tuple[CudaCopyHandle, int]]:
        """The first that wait, and up to which byte each. They stay until settled: an interrupt must lose none."""
        self._forget_settled()
        room, parts = self._chunk, list[tuple[CudaCopyHandle, int]]()
        for handle in self._waiting:
            if room <= 0 or (parts and not self.batched):
                break
            if not handle.settled:
                end = min(handle.sent + room, self._addresses.nbytes)
                room -= end - handle.sent
                parts.append((handle, end))
        return parts

    def _forget_settled(self) -> None:
        while self._waiting and self._waiting[0].settled:
            self._waiting.popleft()

    def _piece(self, handle: CudaCopyHandle, end: int) -> CopyRange:
        """A copy's next part, up to this byte of the blob."""
        key, slot = handle.job
        if handle.sent == 0 and self._last_use.pop(slot, 0) > self._over:
            self.copy_stream.wait_for(self.copy_stream.record_compute_event())  # later than need be, and rarely
        size = end - handle.sent
        to, source = self._addresses.slot(slot) + handle.sent, self._addresses.source(key) + handle.sent
        handle.sent += size
        return CopyRange(to, source, size)

    def _submit(self, parts: list[tuple[CudaCopyHandle, int]]) -> Event | None:
        """One submission of copies, each up to a byte; None when it is refused, and they have failed."""
        handles = [handle for handle, _ in parts]
        try:
            end = self.copy_stream.copy([self._piece(*part) for part in parts])
        except BaseException as error:  # whatever it is, also an interrupt, somebody may wait for these copies
            for handle in handles:
                handle.fail(_as_transfer_error(handle.job, error))
            if not isinstance(error, Exception):
                raise
            return None
        submission = Submission()
        for handle in handles:
            if handle.sent == self._addresses.nbytes:
                handle.sent_whole(end, submission)
        return end


def _as_transfer_error(job: CopyJob, error: BaseException) -> SpmoeError:
    if isinstance(error, TransferError):
        return error
    failure = TransferError(f"expert {job.key.expert} of layer {job.key.layer} could not be copied ({error})")
    failure.__cause__ = error
    return failure
