"""Memory of the CUDA backend: all experts in pinned host memory, and slots in one device allocation."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from spmoe.backends.cuda_runtime import CudaCallError, CudaRuntime
from spmoe.config import format_bytes
from spmoe.errors import BudgetError, StoreError
from spmoe.experts.memory_store import MemoryStore
from spmoe.experts.store import StoreSpec
from spmoe.formats.layout import BlobLayout
from spmoe.system.host import available_memory, locked_memory_limit
from spmoe.types import ExpertKey

_PIECE_BYTES = 2**30  # of memory that is pinned in one call


class HostStore(MemoryStore):
    """Blobs of all experts in host memory that the device reads; pinned piece by piece, as they are filled."""

    _remedy = "free some memory, or use --device cpu, which reads experts from disk"

    def __init__(self, spec: StoreSpec, runtime: CudaRuntime, *, pinned: bool) -> None:
        super().__init__(spec)
        self.pinned = pinned
        self._runtime = runtime
        self._piece = max(1, _PIECE_BYTES // spec.layout.nbytes)  # in blobs: a copy must not span two pinned ranges
        self._missing = [min(self._piece, spec.count - first) for first in range(0, spec.count, self._piece)]
        self._lock = threading.Lock()
        self._locked: list[int] = []  # addresses of pinned pieces

    def close(self) -> None:
        """Unpin and free the memory; idempotent. No copy may be in flight."""
        while self._locked:
            self._runtime.unlock_pages(self._locked.pop())
        super().close()

    def _filled(self, key: ExpertKey) -> None:
        """Pin the piece of this blob if it is complete: by then many threads have touched its pages."""
        piece = self._ordinal(key) // self._piece
        with self._lock:
            self._missing[piece] -= 1
            complete = self._missing[piece] == 0
        if complete and self.pinned:
            self._lock_pages(piece)

    def _lock_pages(self, piece: int) -> None:
        blob = self.spec.layout.nbytes
        first, count = piece * self._piece, min(self._piece, self.spec.count - piece * self._piece)
        address = self._address + first * blob
        try:
            self._runtime.lock_pages(address, count * blob)
        except CudaCallError as error:
            raise StoreError(
                f"cannot pin {format_bytes(self.spec.nbytes)} of host memory ({error}); raise `ulimit -l` "
                f"(now {_pin_limit()}), free some memory ({format_bytes(available_memory())} are free), or pass "
                "--no-pin-memory, which is several times slower"
            ) from error
        self._locked.append(address)


class DeviceSlots:
    """Expert slots in device memory, and a device table of each expert's slot for when all experts are resident."""

    def __init__(self, count: int, spec: StoreSpec, device: torch.device) -> None:
        self.count = count
        self.layout: BlobLayout = spec.layout
        try:
            self.arena = torch.empty(count, spec.layout.nbytes, dtype=torch.uint8, device=device)  # [slots, bytes]
        except torch.OutOfMemoryError as error:
            raise BudgetError(
                f"out of device memory for {count} expert slots of {format_bytes(spec.layout.nbytes)}; lower "
                "--expert-memory"
            ) from error
        self.table = torch.zeros(len(spec.experts), max(spec.experts), dtype=torch.int32, device=device)
        self._weights: dict[int, Mapping[str, Tensor]] = {}  # cached, since creating views takes longer than using them

    def weights(self, slot: int) -> Mapping[str, Tensor]:
        """Return the tensors of the expert in a slot, as views."""
        if slot not in self._weights:
            self._weights[slot] = self.layout.views(self.arena[slot])
        return self._weights[slot]

    def address(self, slot: int) -> int:
        """Return the device address of a slot."""
        return self.arena.data_ptr() + slot * self.layout.nbytes

    def close(self) -> None:
        """Free the device memory; idempotent."""
        self._weights.clear()
        self.arena = self.arena.new_empty(0, 0)
        self.table = self.table.new_empty(0, 0)


def _pin_limit() -> str:
    """Return the limit of `ulimit -l` in words."""
    limit = locked_memory_limit()
    return "unlimited" if limit is None else format_bytes(limit)
