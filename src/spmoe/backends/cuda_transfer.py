"""Copies from host to device, on a stream of their own.

A demanded expert is submitted at once and whole. Prefetched experts go chunk by chunk, with no more than a window of
chunks on the stream, so that a demand waits for that window at most. The thread that launches kernels keeps the window
full, also while it waits for the device: another thread would take the interpreter from it whenever a chunk ends.
Compute is ordered behind a copy on the device, so the host does not wait for bytes. Likewise a slot is overwritten only
after the kernels that read it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from spmoe.backends.cuda_runtime import CopyRange
from spmoe.errors import SpmoeError, TransferError
from spmoe.experts.transfer import CHUNK_BYTES, CopyHandle, CopyJob, DeviceEvent
from spmoe.interpreter import let_others_run
from spmoe.types import ExpertKey

WINDOW = 2  # chunks on the stream: one is copied, the next is queued behind it


def chunk_for(nbytes: int) -> int:
    """Return the chunk size for blobs of this size: a whole blob rather than one chunk and a bit."""
    return nbytes if CHUNK_BYTES < nbytes < 2 * CHUNK_BYTES else CHUNK_BYTES


class CopyStream(Protocol):
    """Device operations of a transfer: a stream for copies beside the compute stream."""

    def copy(self, ranges: Sequence[CopyRange]) -> DeviceEvent:
        """Submit copies; return the event of their end."""
        ...

    def signal(self, copied: CopyRange) -> None:
        """Submit a few bytes behind all copies that were submitted. They are not measured as a copy."""
        ...

    def wait_event(self, event: DeviceEvent) -> None:
        """Order copies submitted from now on after this event."""
        ...

    def bind_compute_stream(self) -> None:
        """Bind the calling thread's current stream as the compute stream."""
        ...

    def record_compute_event(self) -> DeviceEvent:
        """Return an event behind everything launched on the compute stream so far."""
        ...

    def compute_wait_event(self, event: DeviceEvent) -> None:
        """Order kernels that the calling thread launches from now on after this event."""
        ...

    def take_stall_seconds(self) -> float:
        """Return how long compute has waited for such events since the last call, as far as they have passed."""
        ...

    def take_copy_times(self) -> list[tuple[int, float]]:
        """Return bytes and seconds of submissions that have ended since the last call, if they are measured."""
        ...

    def synchronize(self) -> None:
        """Wait for every copy to end."""
        ...


class BlobAddresses(Protocol):
    """Addresses of blobs and slots."""

    nbytes: int  # of a blob

    def source(self, key: ExpertKey) -> int: ...

    def slot(self, slot: int) -> int: ...


class Submission:
    """Copies that end together."""

    ordered = False  # compute is ordered behind their end


class CudaCopyHandle:
    """Handle on one copy."""

    def __init__(self, transfer: CudaTransfer, job: CopyJob) -> None:
        self.job = job
        self.sent = 0  # bytes
        self.end: DeviceEvent | None = None  # known once the whole blob is on the stream
        self.error: SpmoeError | None = None
        self.settled = False  # it has an end event or an error
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

    def stream_wait(self) -> None:
        """Order compute that is launched next after this copy; the host goes on."""
        self.prioritize()
        if self.error is not None:
            raise self.error
        if self.end is not None and not self._submission.ordered and not self.end.query():
            self._transfer.copy_stream.compute_wait_event(self.end)
        self._submission.ordered = True

    def prioritize(self) -> None:
        self._transfer.send_now(self)

    def fail(self, error: SpmoeError) -> None:
        """Set the error, unless the copy is settled."""
        if not self.settled:
            self.error = error
            self.settled = True

    def mark_sent(self, end: DeviceEvent, submission: Submission) -> None:
        """Note that the last byte is on the stream."""
        self.end = end
        self._submission = submission
        self.settled = True


class CudaTransfer:
    """Copies blobs from host memory into slots on the device."""

    draws_timeline = False

    def __init__(
        self, copy_stream: CopyStream, addresses: BlobAddresses, *, chunk: int = CHUNK_BYTES, window: int = WINDOW
    ) -> None:
        self.copy_stream = copy_stream
        # the link must not become idle between the end of one copy and the next submission of requests
        self.depth = 1 + max(1, -(-2 * window * chunk // addresses.nbytes))
        self._batching = True
        self._addresses = addresses
        self._chunk = chunk
        self._window = window
        self._lock = threading.Lock()
        self._waiting: deque[CudaCopyHandle] = deque()  # prefetches that are not wholly on the stream
        self._in_flight: deque[tuple[DeviceEvent, int]] = deque()  # chunks of prefetches on the stream: end, bytes
        self._last_use: dict[int, int] = {}  # by slot, the epoch of the kernels that read it last
        self._epoch = 1
        self._before_forward: DeviceEvent | None = None  # while a forward may wait for copies
        self._finished = 0  # kernels of this epoch and of earlier ones have finished
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
            except BaseException as error:  # an interrupt: nobody gets these handles
                for handle in handles:
                    handle.fail(_as_transfer_error(handle.job, error))
                raise
        return list(handles)

    def set_batching(self, batching: bool) -> None:
        self._batching = batching

    def pump(self) -> None:
        if self._waiting:
            with self._lock:
                self._advance()

    def wait_and_pump(self, event: DeviceEvent) -> None:
        while self._waiting and not event.query():
            self.pump()
            let_others_run()
        event.synchronize()

    def bind_compute_stream(self) -> None:
        self.copy_stream.bind_compute_stream()

    def begin_epoch(self) -> int:
        self._epoch += 1
        return self._epoch

    def finish_epochs(self, epoch: int) -> None:
        self._finished = max(self._finished, epoch - 1)

    def protect_slots(self, slots: Iterable[int], epoch: int | None = None) -> None:
        """Note an epoch for each slot, which is cheap; an event is only made when such a slot is overwritten."""
        epoch = self._epoch if epoch is None else epoch
        with self._lock:
            self._last_use.update(dict.fromkeys(slots, epoch))

    def take_stall_seconds(self) -> float:
        return self.copy_stream.take_stall_seconds()

    def queued_bytes(self) -> int:
        with self._lock:
            return sum(nbytes for end, nbytes in self._in_flight if not end.query())

    def take_copy_times(self) -> list[tuple[int, float]]:
        return self.copy_stream.take_copy_times()

    def send_now(self, handle: CudaCopyHandle) -> None:
        """Put the rest of a prefetch on the stream: it is demanded now."""
        with self._lock:
            if not handle.settled:
                self._send([handle])
                self._waiting.remove(handle)

    def begin_forward(self) -> None:
        """Let later copies wait for no kernel behind this point: a forward is launched next that waits for copies."""
        with self._lock:
            self._before_forward = self.copy_stream.record_compute_event()

    def end_forward(self) -> None:
        """Undo `begin_forward`."""
        with self._lock:
            self._before_forward = None

    def signal(self, copied: CopyRange) -> None:
        """Submit a small copy behind all that were submitted."""
        with self._lock:
            if self._closed:
                raise TransferError("the engine is closed")
            self.copy_stream.signal(copied)

    def drain(self) -> None:
        with self._lock:
            self._fail_waiting("the copy was given up after an error")
            self._in_flight.clear()
        self.copy_stream.synchronize()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._fail_waiting("the engine was closed")
        self.copy_stream.synchronize()

    # ---- under the lock

    def _fail_waiting(self, why: str) -> None:
        while self._waiting:
            self._waiting.popleft().fail(TransferError(why))

    def _groups(self, handles: list[CudaCopyHandle]) -> list[list[CudaCopyHandle]]:
        """Group small blobs into shared submissions, as long as that costs their first user little."""
        size = max(1, self._chunk // 4 // self._addresses.nbytes) if self._batching else 1
        return [handles[i : i + size] for i in range(0, len(handles), size)]

    def _send(self, handles: list[CudaCopyHandle]) -> None:
        """Put the rest of these blobs on the stream."""
        self._submit([(handle, self._addresses.nbytes) for handle in handles])

    def _advance(self) -> None:
        """Fill the window with chunks of waiting prefetches."""
        try:
            self._fill_window()
        except Exception as error:  # the device is broken; a thread may be waiting for these copies
            self._in_flight.clear()
            while self._waiting:
                handle = self._waiting.popleft()
                handle.fail(_as_transfer_error(handle.job, error))

    def _fill_window(self) -> None:
        while self._in_flight and self._in_flight[0][0].query():
            self._in_flight.popleft()
        while len(self._in_flight) < self._window and (parts := self._next_chunk()):
            nbytes = sum(stop - handle.sent for handle, stop in parts)
            if (end := self._submit(parts)) is not None:
                self._in_flight.append((end, nbytes))
            self._drop_settled()

    def _next_chunk(self) -> list[tuple[CudaCopyHandle, int]]:
        """Return the handles of the next chunk, each with the byte up to which it is sent.

        They stay in the queue until settled: an interrupt must lose none.
        """
        self._drop_settled()
        space, parts = self._chunk, list[tuple[CudaCopyHandle, int]]()
        for handle in self._waiting:
            if space <= 0 or (parts and not self._batching):
                break
            if not handle.settled:
                end = min(handle.sent + space, self._addresses.nbytes)
                space -= end - handle.sent
                parts.append((handle, end))
        return parts

    def _drop_settled(self) -> None:
        while self._waiting and self._waiting[0].settled:
            self._waiting.popleft()

    def _next_range(self, handle: CudaCopyHandle, end: int) -> CopyRange:
        """Return a copy's next range, which ends at byte `end` of the blob."""
        key, slot = handle.job
        if handle.sent == 0 and self._last_use.pop(slot, 0) > self._finished:
            # also waits for kernels that do not read the slot; this is rare
            self.copy_stream.wait_event(self._before_forward or self.copy_stream.record_compute_event())
        size = end - handle.sent
        to, source = self._addresses.slot(slot) + handle.sent, self._addresses.source(key) + handle.sent
        handle.sent += size
        return CopyRange(to, source, size)

    def _submit(self, parts: list[tuple[CudaCopyHandle, int]]) -> DeviceEvent | None:
        """Submit copies together, each up to a byte; return their end event, or None if the submission failed."""
        handles = [handle for handle, _ in parts]
        try:
            end = self.copy_stream.copy([self._next_range(*part) for part in parts])
        except BaseException as error:  # also an interrupt: a thread may be waiting for these copies
            for handle in handles:
                handle.fail(_as_transfer_error(handle.job, error))
            if not isinstance(error, Exception):
                raise
            return None
        submission = Submission()
        for handle in handles:
            if handle.sent == self._addresses.nbytes:
                handle.mark_sent(end, submission)
        return end


def _as_transfer_error(job: CopyJob, error: BaseException) -> SpmoeError:
    if isinstance(error, TransferError):
        return error
    failure = TransferError(f"expert {job.key.expert} of layer {job.key.layer} could not be copied ({error})")
    failure.__cause__ = error
    return failure
