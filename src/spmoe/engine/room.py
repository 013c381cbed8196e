"""The experts room of an engine: slots, the transfer that fills them and the arithmetic over them, per device."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spmoe.backends.base import Backend
from spmoe.backends.cpu import CpuBackend
from spmoe.config import EngineConfig
from spmoe.engine.materials import Materials
from spmoe.errors import SpmoeError
from spmoe.experts.slots import MemorySlots, Slots
from spmoe.experts.store import ensure_expert_file
from spmoe.experts.transfer import FileTransfer, Transfer
from spmoe.models.load import expert_file_path
from spmoe.observe.progress import progress_bar

if TYPE_CHECKING:
    from spmoe.backends.cuda import CudaBackend
    from spmoe.backends.cuda_memory import HostStore
    from spmoe.backends.graphs import Recorder

_SWITCH_SECONDS = 2e-4  # the interpreter's own 5 ms is longer than it takes to run a layer


@dataclass
class Room:
    """What holds, moves and computes experts."""

    slots: Slots
    transfer: Transfer
    backend: Backend
    recorder: Recorder | None = None
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


def make_room(config: EngineConfig, materials: Materials, count: int, store: HostStore | None = None) -> Room:
    """Build the store, unless one is given that holds these experts, and everything between it and compute."""
    if materials.device.type == "cuda":
        return _cuda_room(config, materials, count, store)
    path = expert_file_path(materials.checkpoint, materials.dtype)
    with materials.experts() as fill, progress_bar("Writing experts to the cache", config.progress) as report:
        file = ensure_expert_file(path, materials.spec, fill, report)
    try:
        slots = MemorySlots(count, materials.spec.layout)
    except SpmoeError:
        file.close()
        raise
    return Room(slots, FileTransfer(file, slots), CpuBackend())


def _cuda_room(config: EngineConfig, materials: Materials, count: int, store: HostStore | None) -> Room:
    from spmoe.backends.cuda import CudaAddresses, CudaBackend, CudaLane
    from spmoe.backends.cuda_driver import cuda_driver
    from spmoe.backends.cuda_memory import DeviceSlots, HostStore
    from spmoe.backends.cuda_transfer import CudaTransfer, chunk_for
    from spmoe.backends.graphs import Recorder

    driver, notices = cuda_driver(), list[str]()
    if config.pageable:
        notices.append("experts are in pageable memory, which the device reads several times slower than locked memory")
    slots = DeviceSlots(count, materials.spec, materials.device)
    if store is not None and (store.spec, store.pinned) != (materials.spec, not config.pageable):
        store.close()
        store = None
    filled = store is not None
    store = store or HostStore(materials.spec, driver, pinned=not config.pageable)
    try:
        if not filled:
            with materials.experts() as fill, progress_bar("Reading experts into memory", config.progress) as report:
                store.fill(fill, report)
        recorder = Recorder(materials.device)
        backend = CudaBackend(slots, recorder)
        addresses = CudaAddresses(store, slots)
        transfer = CudaTransfer(CudaLane(driver, materials.device), addresses, chunk=chunk_for(addresses.nbytes))
    except BaseException:
        store.close()
        raise
    room = Room(slots, transfer, backend, None if config.enforce_eager else recorder, backend, store, notices)
    room.switch_seconds = sys.getswitchinterval()
    sys.setswitchinterval(min(room.switch_seconds, _SWITCH_SECONDS))
    return room
