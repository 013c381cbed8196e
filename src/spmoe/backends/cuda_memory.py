"""Memory of the CUDA runtime: all experts in one pinned arena of the host, and slots in one device allocation."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from spmoe.backends.cuda_runtime import CudaCallError, CudaRuntime
from spmoe.config import format_bytes
from spmoe.errors import BudgetError, StoreError
from spmoe.experts.store import BlobLayout, FillBlob, StoreSpec
from spmoe.types import ExpertKey


class HostStore:
    """Every expert's blob, in one run of host memory."""

    def __init__(self, spec: StoreSpec, driver: CudaRuntime, *, pinned: bool) -> None:
        self.spec = spec
        self.pinned = pinned
        self._driver = driver
        if (free := available_memory()) < spec.nbytes:
            raise StoreError(
                f"the experts take {format_bytes(spec.nbytes)} of host memory but {format_bytes(free)} are free; "
                "free some memory, or use --device cpu, which reads experts from disk"
            )
        self._pages = mmap.mmap(-1, spec.nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._pages.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to lock, and to walk
        self._arena = torch.frombuffer(self._pages, dtype=torch.uint8)
        self._address = self._arena.data_ptr()
        self._first = [0, *accumulate(spec.experts)]
        if pinned:
            self._arena.zero_()  # by all cores; locking would touch the pages with one
            self._lock_pages()

    def blob(self, key: ExpertKey) -> Tensor:
        """An expert's bytes."""  # [nbytes] uint8
        start = self.address(key) - self._address
        return self._arena[start : start + self.spec.layout.nbytes]

    def address(self, key: ExpertKey) -> int:
        """Where an expert's blob begins."""
        return self._address + (self._first[key.layer] + key.expert) * self.spec.layout.nbytes

    def fill(self, fill: FillBlob, on_progress: Callable[[int, int], None]) -> None:
        """Bring every expert in."""
        for done, key in enumerate(self.spec.keys()):
            on_progress(done, self.spec.count)
            fill(key, self.spec.layout.views(self.blob(key)))
        on_progress(self.spec.count, self.spec.count)

    def close(self) -> None:
        """Unlock and let go of the memory; idempotent. No copy may be under way."""
        if self.pinned:
            self._driver.unlock_pages(self._address)
            self.pinned = False
        self._arena = torch.empty(0, dtype=torch.uint8)

    def _lock_pages(self) -> None:
        try:
            self._driver.lock_pages(self._address, self.spec.nbytes)
        except CudaCallError as error:
            self.pinned = False
            raise StoreError(
                f"{format_bytes(self.spec.nbytes)} of host memory cannot be pinned ({error}); raise `ulimit -l` "
                f"(now {_locked_limit()}), free some memory ({format_bytes(available_memory())} are free), or pass "
                "--no-pin-memory, which is several times slower"
            ) from error


class DeviceSlots:
    """Slots in device memory, and a table, on the device too, of the slot that each expert is in if it stays there."""

    def __init__(self, count: int, spec: StoreSpec, device: torch.device) -> None:
        self.count = count
        self.layout: BlobLayout = spec.layout
        try:
            self.arena = torch.empty(count, spec.layout.nbytes, dtype=torch.uint8, device=device)  # [slots, bytes]
        except torch.OutOfMemoryError as error:
            raise BudgetError(
                f"the device cannot hold {count} expert slots of {format_bytes(spec.layout.nbytes)}; lower "
                "--expert-memory"
            ) from error
        self.table = torch.zeros(len(spec.experts), max(spec.experts), dtype=torch.int32, device=device)
        self._weights: dict[int, Mapping[str, Tensor]] = {}  # views take longer to make than to use

    def weights(self, slot: int) -> Mapping[str, Tensor]:
        if slot not in self._weights:
            self._weights[slot] = self.layout.views(self.arena[slot])
        return self._weights[slot]

    def address(self, slot: int) -> int:
        """Where a slot begins on the device."""
        return self.arena.data_ptr() + slot * self.layout.nbytes

    def close(self) -> None:
        self._weights.clear()
        self.arena = self.arena.new_empty(0, 0)
        self.table = self.table.new_empty(0, 0)


def available_memory() -> int:
    """Bytes of host memory that can be had without swapping."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _locked_limit() -> str:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft)
