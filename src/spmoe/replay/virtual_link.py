"""Links on the virtual clock: whole copies over an emulated link, or the live `CudaTransfer` without a device.

With `CudaTransfer`, chunks, windows and the order of copies are the live code; a virtual copy stream only says how long
each copy takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from spmoe.backends.cuda_runtime import CopyRange
from spmoe.backends.cuda_transfer import CudaTransfer
from spmoe.experts.link import VirtualTransfer
from spmoe.experts.transfer import CopyJob, DeviceEvent, Transfer
from spmoe.observe.clock import VirtualClock
from spmoe.replay.trace import Shape
from spmoe.types import ExpertKey


class VirtualLink(Protocol):
    """A transfer on the virtual clock."""

    transfer: Transfer

    def next_event(self) -> float | None:
        """Return when the next copy, or chunk of one, ends; None if the link is idle."""
        ...

    def on_event(self) -> bool:
        """Handle that event, at its time; return whether a copy has ended."""
        ...

    def busy_seconds(self) -> float:
        """Return the seconds in which the link was busy, up to now."""
        ...


def make_link(clock: VirtualClock, shape: Shape, bytes_per_second: float) -> VirtualLink:
    """Return the kind of link that the trace was recorded on, at this rate."""
    kind = WholeCopyLink if shape.chunk_bytes is None else ChunkedLink
    return kind(clock, shape, bytes_per_second)


class WholeCopyLink:
    """One copy at a time; demand loads overtake copies that have not started."""

    def __init__(self, clock: VirtualClock, shape: Shape, bytes_per_second: float) -> None:
        transfer = VirtualTransfer(clock, shape.expert_bytes, bytes_per_second, shape.depth, on_done=self._on_done)
        self.transfer: Transfer = transfer
        self.next_event = transfer.link.next_event
        self._seconds = shape.expert_bytes / bytes_per_second  # of one copy
        self._busy = 0.0

    def on_event(self) -> bool:
        return True

    def busy_seconds(self) -> float:
        return self._busy

    def _on_done(self, job: CopyJob) -> None:
        self._busy += self._seconds


class ChunkedLink:
    """The live CUDA transfer: prefetches in chunks, which demand loads overtake."""

    def __init__(self, clock: VirtualClock, shape: Shape, bytes_per_second: float) -> None:
        if shape.chunk_bytes is None:
            raise ValueError("the shape has no chunk size")
        self._stream = VirtualCopyStream(clock, bytes_per_second, shape.expert_bytes)
        addresses = NoAddresses(shape.expert_bytes)
        self.transfer: Transfer = CudaTransfer(self._stream, addresses, chunk=shape.chunk_bytes, window=shape.window)
        self.next_event = self._stream.next_event
        self.busy_seconds = self._stream.busy_seconds

    def on_event(self) -> bool:
        if self._stream.pop_event():
            return True
        self.transfer.pump()
        return False


class VirtualEvent:
    """A moment on the virtual clock."""

    def __init__(self, clock: VirtualClock, time: float) -> None:
        self._clock = clock
        self.time = time  # seconds

    def query(self) -> bool:
        return self.time <= self._clock.now()

    def synchronize(self) -> None:
        self._clock.sleep_until(self.time)


class VirtualCopyStream:
    """A stream that runs one copy after the other at a fixed rate. Compute is done by the caller, on the same clock."""

    def __init__(self, clock: VirtualClock, bytes_per_second: float, blob_bytes: int) -> None:
        self._clock = clock
        self._rate = bytes_per_second
        self._blob_bytes = blob_bytes
        self._free_at = 0.0
        self._busy = 0.0  # seconds that all submitted copies take
        self._ends: deque[tuple[float, bool]] = deque()  # end of each submission, and whether it completes a blob

    def copy(self, pieces: Sequence[CopyRange]) -> DeviceEvent:
        seconds = sum(piece.nbytes for piece in pieces) / self._rate
        self._free_at = max(self._free_at, self._clock.now()) + seconds
        self._busy += seconds
        completes = any(piece.source + piece.nbytes == self._blob_bytes for piece in pieces)  # all blobs are at 0
        self._ends.append((self._free_at, completes))
        return VirtualEvent(self._clock, self._free_at)

    def next_event(self) -> float | None:
        """Return when the next submission ends; None if the stream is idle."""
        return self._ends[0][0] if self._ends else None

    def pop_event(self) -> bool:
        """Forget the submission that ends now; return whether it completes a blob."""
        return self._ends.popleft()[1]

    def busy_seconds(self) -> float:
        """Return the seconds in which copies have run, up to now."""
        return self._busy - max(0.0, self._free_at - self._clock.now())

    def signal(self, copied: CopyRange) -> None:
        """Do nothing: no kernel waits for a signal."""

    def wait_event(self, event: DeviceEvent) -> None:
        """Do nothing: compute has ended when its call returns."""

    def bind_compute_stream(self) -> None:
        """Do nothing: there is one thread."""

    def record_compute_event(self) -> DeviceEvent:
        return VirtualEvent(self._clock, self._clock.now())

    def compute_wait_event(self, event: DeviceEvent) -> None:
        event.synchronize()

    def take_stall_seconds(self) -> float:
        """Return 0: the caller measures every wait on the clock."""
        return 0.0

    def take_copy_times(self) -> list[tuple[int, float]]:
        """Return the time of one copy: the rate is always the same."""
        return [(self._blob_bytes, self._blob_bytes / self._rate)]

    def synchronize(self) -> None:
        self._clock.sleep_until(self._free_at)


class NoAddresses:
    """Addresses of blobs and slots that do not exist: all are 0."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes  # of a blob

    def source(self, key: ExpertKey) -> int:
        return 0

    def slot(self, slot: int) -> int:
        return 0
