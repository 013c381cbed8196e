"""Ceilings: the best transfer rates of this machine, and a description of it for results."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import spmoe
from spmoe.backends.devices import device_facts, empty_device_cache, free_memory, link_bandwidth, memory_bandwidth
from spmoe.engine.engine import Engine
from spmoe.engine.memory import MemoryPlan
from spmoe.engine.runtime import open_blobs
from spmoe.experts.memory_store import MemoryStore
from spmoe.experts.slots import MemorySlots
from spmoe.experts.store import ExpertFile
from spmoe.experts.transfer import BlobReader, CopyJob, FileTransfer
from spmoe.system.host import allowed_cores, available_memory

_FILE_BYTES = 256 * 2**20  # bytes read to time an expert file, or host memory
_HOST_SHARE = 0.8  # share of free host memory that the all-resident comparison may use


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Highest rates, in bytes per second."""

    link: float  # from the store to slots
    link_source: (
        str  # "emulated", "pinned copies", "expert file" or "checkpoint files" (cached pages count), "host memory"
    )
    memory: float  # reads of the memory that slots are in


def measure_ceilings(engine: Engine) -> Ceilings:
    """Time the link, unless it is emulated, and the device's memory."""
    memory = memory_bandwidth(engine.device)
    empty_device_cache(engine.device)  # CUDA graphs cannot use memory that the allocator has cached
    if engine.config.link_gbps is not None:
        return Ceilings(engine.config.link_gbps * 1e9, "emulated", memory)
    if engine.device.type == "cuda":
        return Ceilings(link_bandwidth(engine.device, engine.spec.layout.nbytes), "pinned copies", memory)
    models = engine.parts.models
    if models.checkpoint.random:
        count = min(max(1, _FILE_BYTES // engine.spec.layout.nbytes), engine.spec.count)
        store = MemoryStore(replace(engine.spec, experts=(count,)))
        with models.experts() as fill:
            store.fill(fill, lambda done, total: None)
        return Ceilings(_read_bandwidth(store), "host memory", memory)
    blobs = open_blobs(engine.config, models)
    source = "expert file" if isinstance(blobs, ExpertFile) else "checkpoint files"
    return Ceilings(_read_bandwidth(blobs), source, memory)


def _read_bandwidth(store: BlobReader) -> float:
    """Return bytes per second of reading blobs the way the engine does; closes the store."""
    spec, blob = store.spec, store.spec.layout.nbytes
    keys = list(spec.keys())[: max(1, _FILE_BYTES // blob)]
    slots = MemorySlots(4, spec.layout)
    transfer = FileTransfer(store, slots)
    times = []
    try:
        for _ in range(3):  # the first pass also verifies checksums
            started = time.perf_counter()
            for first in range(0, len(keys), slots.count):
                jobs = [CopyJob(key, slot) for slot, key in enumerate(keys[first : first + slots.count])]
                for handle in transfer.copy(jobs, urgent=True):
                    handle.wait()
            times.append(time.perf_counter() - started)
    finally:
        transfer.close()
        slots.close()
    return len(keys) * blob / min(times)


def all_experts_fit(device: torch.device, plan: MemoryPlan, expert_bytes: int) -> bool:
    """Return whether the planned engine would also fit with slots for all experts."""
    needed = plan.resident + plan.kv + plan.workspace + expert_bytes
    return needed <= (free_memory(device) if device.type == "cuda" else _HOST_SHARE * available_memory())


def machine(device: torch.device) -> dict[str, Any]:
    """Describe hardware and software, for the record of a measurement."""
    facts = device_facts(device)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": facts.name,
        "driver": facts.driver,
        "device_memory_bytes": facts.memory_bytes,
        "processor": _processor(),
        "cores": os.cpu_count(),  # logical ones
        "usable_cores": allowed_cores(),
        "threads": torch.get_num_threads(),  # that one operation uses
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),  # of the host
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "spmoe": spmoe.__version__,
        "commit": _commit(Path(__file__).resolve()),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


@cache  # the code of a running process does not change with its checkout
def _commit(file: Path) -> str | None:
    """Return the commit of the checkout that tracks a file, with "-dirty" if files changed; None outside of one."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(file.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", file.name)  # fails if spmoe is installed inside another checkout
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
