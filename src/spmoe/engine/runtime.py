"""The expert runtime of a device: its store, its slots, the transfer between them and the arithmetic over them."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from spmoe.backends.base import Backend
from spmoe.backends.cpu import CpuBackend
from spmoe.backends.cpu_experts import CpuExperts, cpu_thread
from spmoe.config import EngineConfig
from spmoe.experts.cpu_path import CpuPath
from spmoe.experts.memory_store import MemoryStore
from spmoe.experts.slots import MemorySlots, Slots
from spmoe.experts.store import FillBlob, ensure_expert_file
from spmoe.experts.transfer import BlobReader, FileTransfer, Transfer
from spmoe.formats.layout import dtype_name
from spmoe.models.expert_shards import is_worth_reading_in_place
from spmoe.models.load import expert_file_path
from spmoe.models.loaded import LoadedModels
from spmoe.observe.announce import announcer
from spmoe.observe.progress import progress_bar
from spmoe.types import ExpertKey

if TYPE_CHECKING:
    from spmoe.backends.cuda import CudaBackend
    from spmoe.backends.cuda_memory import HostStore
    from spmoe.backends.cuda_transfer import CudaTransfer
    from spmoe.backends.graphs import GraphRecorder
    from spmoe.backends.residency import CudaResidency

log = logging.getLogger(__name__)

_SWITCH_SECONDS = 2e-4  # the interpreter's default of 5 ms is longer than a layer takes


@dataclass
class ExpertRuntime:
    """Everything that holds, moves and computes experts on one device."""

    slots: Slots
    transfer: Transfer
    backend: Backend
    recorder: GraphRecorder | None = None  # None: forwards are not captured
    cuda: CudaBackend | None = None
    store: HostStore | None = None
    cpu_path: CpuPath | None = None  # closed with the expert pool
    residency: CudaResidency | None = None  # None: the host decides in every layer which experts run
    notices: list[str] = field(default_factory=list)
    switch_seconds: float | None = None  # the interpreter's switch interval before this runtime changed it

    def take_store(self) -> HostStore | None:
        """Return the host store, if there is one; the caller closes it, after this runtime."""
        store, self.store = self.store, None
        return store

    def close(self) -> None:
        """Release everything but slots and transfer, which the expert pool closes."""
        if self.store is not None:
            self.store.close()
        if self.switch_seconds is not None:
            sys.setswitchinterval(self.switch_seconds)


def make_runtime(
    config: EngineConfig,
    models: LoadedModels,
    slot_count: int,
    store: HostStore | None = None,
    raise_if_cancelled: Callable[[], None] = lambda: None,
    copy_budget: int = 0,
) -> ExpertRuntime:
    """Build the store, unless the given one holds these experts, and everything between it and compute.

    `copy_budget`: bytes of host memory for copies of packed experts, which the CPU computes beside a CUDA device.
    `raise_if_cancelled` is called before each expert is read; its exception ends the work.
    """
    if models.device.type == "cuda":
        return _cuda_runtime(config, models, slot_count, store, raise_if_cancelled, copy_budget)
    blobs = open_blobs(config, models, raise_if_cancelled)
    try:
        slots = MemorySlots(slot_count, models.spec.layout)
    except BaseException:
        blobs.close()
        raise
    notices = []
    if config.cpu_experts != "off":
        notices.append(
            f"--cpu-experts {config.cpu_experts} has no effect with --device cpu: all experts are computed on the CPU"
        )
    if config.residency_check == "device":
        notices.append("--residency-check device has no effect with --device cpu")
    return ExpertRuntime(slots, FileTransfer(blobs, slots), CpuBackend(models.expert_format), notices=notices)


def open_blobs(
    config: EngineConfig, models: LoadedModels, raise_if_cancelled: Callable[[], None] = lambda: None
) -> BlobReader:
    """Open the store that experts on a CPU are read from: memory, the checkpoint's own files, or an expert file."""
    if models.checkpoint.random:
        return _memory_store(config, models, raise_if_cancelled)
    verifies = config.verify_experts != "once"  # later reads are compared with checksums, which an expert file has
    if not verifies and is_worth_reading_in_place(models.spec) and (shards := models.open_shards()) is not None:
        return shards
    return _expert_file(config, models, raise_if_cancelled)


def _expert_file(config: EngineConfig, models: LoadedModels, raise_if_cancelled: Callable[[], None]) -> BlobReader:
    """Open the expert file; write it first if it is missing."""
    path = expert_file_path(models.checkpoint, models.dtype, models.expert_format)
    bar = progress_bar("Writing experts to the cache", config.progress, unit_bytes=models.spec.layout.nbytes)
    with models.experts() as fill, bar as report:
        announce, fill = announcer(config.progress), _cancellable(fill, raise_if_cancelled)
        return ensure_expert_file(path, models.spec, fill, report, announce, config.verify_experts)


def _memory_store(config: EngineConfig, models: LoadedModels, raise_if_cancelled: Callable[[], None]) -> BlobReader:
    """Make all experts in host memory: random ones need no file."""
    store = MemoryStore(models.spec)
    try:
        _fill(store, config, models, raise_if_cancelled)
    except BaseException:
        store.close()
        raise
    return store


def _fill(
    store: MemoryStore, config: EngineConfig, models: LoadedModels, raise_if_cancelled: Callable[[], None]
) -> None:
    """Fill a store in memory: with the checkpoint's own bytes if they need no conversion."""
    label = "Making random experts" if models.checkpoint.random else "Reading experts into memory"
    shards, started = models.open_shards(), time.monotonic()
    with progress_bar(label, config.progress, unit_bytes=models.spec.layout.nbytes) as report:

        def report_unless_cancelled(done: int, total: int) -> None:
            raise_if_cancelled()
            report(done, total)

        if shards is None:
            # random experts are drawn a few times only, by few threads; the others are copied
            expert_bytes = 0 if models.checkpoint.random else models.dense_expert_bytes
            with models.experts() as fill:
                store.fill(fill, report_unless_cancelled, expert_bytes)
        else:
            try:
                store.load(shards, report_unless_cancelled)
            finally:
                shards.close()
    size, seconds = models.spec.nbytes / 1e9, time.monotonic() - started
    log.info("filled the store with %.1f GB of experts in %.1f s (%.2f GB/s)", size, seconds, size / seconds)


def _cuda_runtime(
    config: EngineConfig,
    models: LoadedModels,
    slot_count: int,
    store: HostStore | None,
    raise_if_cancelled: Callable[[], None],
    copy_budget: int,
) -> ExpertRuntime:
    from spmoe.backends.cuda import CudaBackend, CudaBlobAddresses, CudaCopyStream, CudaRowStream
    from spmoe.backends.cuda_memory import DeviceSlots, HostStore
    from spmoe.backends.cuda_runtime import cuda_runtime
    from spmoe.backends.cuda_transfer import CudaTransfer, chunk_for
    from spmoe.backends.graphs import CudaGraphRecorder

    cuda, notices = cuda_runtime(), list[str]()
    if not config.pin_memory:
        notices.append("experts are in pageable memory, which the device reads several times slower than pinned memory")
    slots = DeviceSlots(slot_count, models.spec, models.device)
    if store is not None and (store.spec, store.pinned) != (models.spec, config.pin_memory):
        store.close()
        store = None
    filled, cpu_path = store is not None, None
    store = store or HostStore(models.spec, cuda, pinned=config.pin_memory)
    try:
        if not filled:
            _fill(store, config, models, raise_if_cancelled)
        recorder = CudaGraphRecorder(models.device)
        cpu = None
        if config.cpu_experts != "off":
            cpu = CpuExperts(store, models.expert_format, CudaRowStream(recorder), copy_budget)
            cpu_path = CpuPath(cpu_thread(None if config.cpu_experts == "auto" else config.cpu_experts))
            notices += cpu_rounding_notice(models)
        addresses = CudaBlobAddresses(store, slots)
        copy_stream = CudaCopyStream(cuda, models.device, timed=cpu is not None)
        transfer = CudaTransfer(copy_stream, addresses, chunk=chunk_for(addresses.nbytes))
        residency = make_residency(config, models, slot_count, transfer, notices)
        backend = CudaBackend(slots, recorder, models.expert_format, cpu, residency)
    except BaseException:
        if cpu_path is not None:
            cpu_path.close()
        store.close()
        raise
    captured = None if config.enforce_eager else recorder
    runtime = ExpertRuntime(
        slots, transfer, backend, captured, backend, store, cpu_path, residency, notices, sys.getswitchinterval()
    )
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))
    return runtime


def make_residency(
    config: EngineConfig, models: LoadedModels, slot_count: int, transfer: CudaTransfer, notices: list[str]
) -> CudaResidency | None:
    """Return the residency check on the device, unless the host is to do it or it does not work here.

    A notice says why it does not, if it was asked for.
    """
    if config.residency_check == "host" or slot_count >= models.spec.count:
        return None
    others = {
        "--link-gbps": config.link_gbps is not None,
        "--enforce-eager": config.enforce_eager,
        "--no-overlap": not config.overlap,
    }
    asked = config.residency_check == "device"
    if given := [name for name, is_given in others.items() if is_given]:
        if asked:
            notices.append(f"--residency-check device has no effect with {given[0]}")
        return None
    from spmoe.backends.residency import CudaResidency

    residency = CudaResidency(models.spec.experts, slot_count, models.device, transfer)
    if (failure := residency.try_out()) is not None:
        log.info("the device cannot look experts up (%s); the host does", failure)
        if asked:
            notices.append(f"--residency-check device does not work here ({failure}); the host checks instead")
        return None
    return residency


def cpu_rounding_notice(models: LoadedModels) -> list[str]:
    """Return a notice if experts round differently on the CPU than on the device."""
    dtype = dtype_name(models.dtype)
    if dtype == "float32":
        return []
    return [
        f"in {dtype}, experts on the CPU (--cpu-experts) round differently from those on the GPU, so the text may "
        "differ on near-ties from one run to the next; --cpu-experts off avoids it"
    ]


def _cancellable(fill: FillBlob, raise_if_cancelled: Callable[[], None]) -> FillBlob:
    """Return a function that also checks before each expert whether the work was cancelled."""

    def checked(key: ExpertKey, views: dict[str, Tensor]) -> None:
        raise_if_cancelled()
        fill(key, views)

    return checked
