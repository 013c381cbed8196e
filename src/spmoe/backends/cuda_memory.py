"""Memory of the CUDA backend: all experts in one pinned host allocation, and slots in one device allocation."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from itertools import accumulate

import torch
from torch import Tensor

from spmoe.backends.cuda_runtime import CudaCallError, CudaRuntime
from spmoe.config import format_bytes
from spmoe.errors import BudgetError, StoreError
from spmoe.experts.store import BlobLayout, FillBlob, StoreSpec
from spmoe.system.host import available_memory, locked_memory_limit
from spmoe.types import ExpertKey


class HostStore:
    """Blobs of all experts in one contiguous allocation of host memory."""

    def __init__(self, spec: StoreSpec, runtime: CudaRuntime, *, pinned: bool) -> None:
        self.spec = spec
        self.pinned = pinned
        self._runtime = runtime
        if (free := available_memory()) < spec.nbytes:
            raise StoreError(
                f"the experts need {format_bytes(spec.nbytes)} of host memory, but only {format_bytes(free)} are free; "
                "free some memory, or use --device cpu, which reads experts from disk"
            )
        self._pages = mmap.mmap(-1, spec.nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._pages.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to pin, and fewer TLB misses
        self._arena = torch.frombuffer(self._pages, dtype=torch.uint8)
        self._address = self._arena.data_ptr()
        self._first = [0, *accumulate(spec.experts)]
        if pinned:
            self._arena.zero_()  # touches the pages with all cores; pinning would use one
            self._lock_pages()

    def blob(self, key: ExpertKey) -> Tensor:
        """Return an expert's blob."""  # [nbytes] uint8
        start = self.address(key) - self._address
        return self._arena[start : start + self.spec.layout.nbytes]

    def address(self, key: ExpertKey) -> int:
        """Return the host address of an expert's blob."""
        return self._address + (self._first[key.layer] + key.expert) * self.spec.layout.nbytes

    def fill(self, fill: FillBlob, on_progress: Callable[[int, int], None]) -> None:
        """Fill the blobs of all experts; `on_progress` receives the experts done and their total."""
        for done, key in enumerate(self.spec.keys()):
            on_progress(done, self.spec.count)
            fill(key, self.spec.layout.views(self.blob(key)))
        on_progress(self.spec.count, self.spec.count)

    def close(self) -> None:
        """Unpin and free the memory; idempotent. No copy may be in flight."""
        if self.pinned:
            self._runtime.unlock_pages(self._address)
            self.pinned = False
        self._arena = torch.empty(0, dtype=torch.uint8)

    def _lock_pages(self) -> None:
        try:
            self._runtime.lock_pages(self._address, self.spec.nbytes)
        except CudaCallError as error:
            self.pinned = False
            raise StoreError(
                f"cannot pin {format_bytes(self.spec.nbytes)} of host memory ({error}); raise `ulimit -l` "
                f"(now {_pin_limit()}), free some memory ({format_bytes(available_memory())} are free), or pass "
                "--no-pin-memory, which is several times slower"
            ) from error


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
