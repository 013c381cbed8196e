"""The expert runtime of a device: its store, its slots, the transfer between them and the arithmetic over them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from spmoe.backends.base import Backend
from spmoe.backends.cpu import CpuBackend
from spmoe.config import EngineConfig
from spmoe.errors import SpmoeError
from spmoe.experts.slots import MemorySlots, Slots
from spmoe.experts.store import FillBlob, ensure_expert_file
from spmoe.experts.transfer import FileTransfer, Transfer
from spmoe.models.load import expert_file_path
from spmoe.models.loaded import LoadedModels
from spmoe.observe.announce import announcer
from spmoe.observe.progress import progress_bar
from spmoe.types import ExpertKey

if TYPE_CHECKING:
    from spmoe.backends.cuda import CudaBackend
    from spmoe.backends.cuda_memory import HostStore
    from spmoe.backends.graphs import GraphRecorder

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
    require_wanted: Callable[[], None] = lambda: None,
) -> ExpertRuntime:
    """Build the store, unless the given one holds these experts, and everything between it and compute.

    `require_wanted` is called before each expert is read, and raises an exception to end the work.
    """
    if models.device.type == "cuda":
        return _cuda_runtime(config, models, slot_count, store, require_wanted)
    path = expert_file_path(models.checkpoint, models.dtype)
    with models.experts() as fill, progress_bar("Writing experts to the cache", config.progress) as report:
        announce = announcer(config.progress)
        file = ensure_expert_file(
            path, models.spec, _wanted(fill, require_wanted), report, announce, config.verify_experts
        )
    try:
        slots = MemorySlots(slot_count, models.spec.layout)
    except SpmoeError:
        file.close()
        raise
    return ExpertRuntime(slots, FileTransfer(file, slots), CpuBackend())


def _cuda_runtime(
    config: EngineConfig,
    models: LoadedModels,
    slot_count: int,
    store: HostStore | None,
    require_wanted: Callable[[], None],
) -> ExpertRuntime:
    from spmoe.backends.cuda import CudaBackend, CudaBlobAddresses, CudaCopyStream
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
    filled = store is not None
    store = store or HostStore(models.spec, cuda, pinned=config.pin_memory)
    try:
        if not filled:
            with models.experts() as fill, progress_bar("Reading experts into memory", config.progress) as report:
                store.fill(_wanted(fill, require_wanted), report)
        recorder = CudaGraphRecorder(models.device)
        backend = CudaBackend(slots, recorder)
        addresses = CudaBlobAddresses(store, slots)
        transfer = CudaTransfer(CudaCopyStream(cuda, models.device), addresses, chunk=chunk_for(addresses.nbytes))
    except BaseException:
        store.close()
        raise
    captured = None if config.enforce_eager else recorder
    runtime = ExpertRuntime(slots, transfer, backend, captured, backend, store, notices, sys.getswitchinterval())
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))
    return runtime


def _wanted(fill: FillBlob, require_wanted: Callable[[], None]) -> FillBlob:
    def checked(key: ExpertKey, views: dict[str, Tensor]) -> None:
        require_wanted()
        fill(key, views)

    return checked
