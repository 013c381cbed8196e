"""The experts room of an engine: slots, the transfer that fills them and the arithmetic over them, per device."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spmoe.backends.base import Backend
from spmoe.backends.cpu import CpuBackend
from spmoe.config import EngineConfig
from spmoe.engine.loading import LoadedModels
from spmoe.errors import SpmoeError
from spmoe.experts.slots import MemorySlots, Slots
from spmoe.experts.store import ensure_expert_file
from spmoe.experts.transfer import FileTransfer, Transfer
from spmoe.models.load import expert_file_path
from spmoe.observe.progress import progress_bar

if TYPE_CHECKING:
    from spmoe.backends.cuda import CudaBackend
    from spmoe.backends.cuda_memory import HostStore
    from spmoe.backends.graphs import GraphRecorder

_SWITCH_SECONDS = 2e-4  # the interpreter's own 5 ms is longer than it takes to run a layer


@dataclass
class ExpertRuntime:
    """What holds, moves and computes experts."""

    slots: Slots
    transfer: Transfer
    backend: Backend
    recorder: GraphRecorder | None = None
    cuda: CudaBackend | None = None
    store: HostStore | None = None
    notices: list[str] = field(default_factory=list)
    switch_seconds: float | None = None  # the interpreter's, before this room changed it

    def give_up_store(self) -> HostStore | None:
        """The host store, if there is one; from now on it is the caller's to close, after this room."""
        store, self.store = self.store, None
        return store

    def close(self) -> None:
        """Let go of what the source does not own."""
        if self.store is not None:
            self.store.close()
        if self.switch_seconds is not None:
            sys.setswitchinterval(self.switch_seconds)


def make_runtime(
    config: EngineConfig, models: LoadedModels, count: int, store: HostStore | None = None
) -> ExpertRuntime:
    """Build the store, unless one is given that holds these experts, and everything between it and compute."""
    if models.device.type == "cuda":
        return _cuda_expert_runtime(config, models, count, store)
    path = expert_file_path(models.checkpoint, models.dtype)
    with models.experts() as fill, progress_bar("Writing experts to the cache", config.progress) as report:
        file = ensure_expert_file(path, models.spec, fill, report)
    try:
        slots = MemorySlots(count, models.spec.layout)
    except SpmoeError:
        file.close()
        raise
    return ExpertRuntime(slots, FileTransfer(file, slots), CpuBackend())


def _cuda_expert_runtime(
    config: EngineConfig, models: LoadedModels, count: int, store: HostStore | None
) -> ExpertRuntime:
    from spmoe.backends.cuda import CudaBackend, CudaBlobAddresses, CudaCopyStream
    from spmoe.backends.cuda_memory import DeviceSlots, HostStore
    from spmoe.backends.cuda_runtime import cuda_runtime
    from spmoe.backends.cuda_transfer import CudaTransfer, chunk_for
    from spmoe.backends.graphs import GraphRecorder

    driver, notices = cuda_runtime(), list[str]()
    if not config.pin_memory:
        notices.append("experts are in pageable memory, which the device reads several times slower than locked memory")
    slots = DeviceSlots(count, models.spec, models.device)
    if store is not None and (store.spec, store.pinned) != (models.spec, config.pin_memory):
        store.close()
        store = None
    filled = store is not None
    store = store or HostStore(models.spec, driver, pinned=config.pin_memory)
    try:
        if not filled:
            with models.experts() as fill, progress_bar("Reading experts into memory", config.progress) as report:
                store.fill(fill, report)
        recorder = GraphRecorder(models.device)
        backend = CudaBackend(slots, recorder)
        addresses = CudaBlobAddresses(store, slots)
        transfer = CudaTransfer(CudaCopyStream(driver, models.device), addresses, chunk=chunk_for(addresses.nbytes))
    except BaseException:
        store.close()
        raise
    room = ExpertRuntime(slots, transfer, backend, None if config.enforce_eager else recorder, backend, store, notices)
    room.switch_seconds = sys.getswitchinterval()
    sys.setswitchinterval(min(room.switch_seconds, _SWITCH_SECONDS))
    return room
