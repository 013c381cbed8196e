"""Devices: selection, properties, memory limits, and measurements of bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from spmoe.errors import UsageError

_TRIES = 5  # repetitions of a measurement; the fastest counts, so the first is a warm-up
_LINK_BYTES = 512 * 2**20  # larger than the host's caches
_COPY_BYTES = 64 * 2**20
_MIN_COPY = 16 * 2**20  # the engine submits smaller copies together
_MEMORY_BYTES = {"cuda": 2 * 2**30, "cpu": 128 * 2**20}

WORKSPACE_BYTES = 256 * 2**20  # for libraries, captured graphs and the activations of a decode step


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Properties of a device to save with a measurement."""

    name: str
    driver: str | None
    memory_bytes: int | None


def choose_device(wanted: str) -> torch.device:
    """Return the device for `auto`, `cuda` or `cpu`; `auto` prefers CUDA."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise UsageError(
            "--device cuda was given, but PyTorch finds no CUDA device; check nvidia-smi and that torch is a CUDA "
            "build, or use --device cpu"
        )
    return torch.device("cuda", torch.cuda.current_device()) if available and wanted != "cpu" else torch.device("cpu")


def device_facts(device: torch.device) -> DeviceFacts:
    """Return the device's name, driver version and memory in bytes."""
    if device.type != "cuda":
        return DeviceFacts("cpu", None, None)
    properties = torch.cuda.get_device_properties(device)
    try:
        import subprocess

        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        driver = None
    return DeviceFacts(properties.name, driver, properties.total_memory)


def free_memory(device: torch.device) -> int:
    """Return the bytes that can be allocated on a CUDA device, including this process's cached blocks."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def allocated_memory(device: torch.device) -> int:
    """Return the bytes of this process's tensors on a CUDA device."""
    return torch.cuda.memory_allocated(device)


def pinned_zeros(*size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Allocate zeros in pinned host memory, which kernels can read and write directly."""
    return torch.zeros(*size, dtype=dtype, pin_memory=True)


def limit_memory(device: torch.device, nbytes: int | None) -> None:
    """Limit this process's allocations on a CUDA device, in bytes; None removes the limit."""
    _, total = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction(1.0 if nbytes is None else min(1.0, nbytes / total), device)


def empty_device_cache(device: torch.device) -> None:
    """Return cached, unused memory to a CUDA device, so that `free_memory` of all processes includes it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def link_bandwidth(device: torch.device, copy_bytes: int = _COPY_BYTES, *, pinned: bool = True) -> float:
    """Measure the bytes per second from host memory to a CUDA device, in copies of about this size."""
    copy_bytes = min(max(copy_bytes, _MIN_COPY), _LINK_BYTES // 2)
    source = torch.zeros(_LINK_BYTES // copy_bytes, copy_bytes, dtype=torch.uint8, pin_memory=pinned)  # [copies, bytes]
    target = torch.empty(copy_bytes, dtype=torch.uint8, device=device)

    def copy() -> None:
        for row in source:
            target.copy_(row, non_blocking=True)

    return source.numel() / _best_seconds(device, copy)


def memory_bandwidth(device: torch.device) -> float:
    """Measure the bytes per second, reads plus writes, of a large copy within the device's memory."""
    size = _MEMORY_BYTES[device.type]
    if device.type == "cuda":
        size = min(size, free_memory(device) // 4)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _best_seconds(device, lambda: target.copy_(source))


def _best_seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Return the shortest duration of several tries in seconds, with the device idle before and after each."""
    if device.type != "cuda":
        return min(_host_seconds(work) for _ in range(_TRIES))
    with torch.cuda.device(device):
        return min(_cuda_seconds(work) for _ in range(_TRIES))


def _cuda_seconds(work: Callable[[], object]) -> float:
    started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    started.record()
    work()
    ended.record()
    ended.synchronize()
    return float(started.elapsed_time(ended)) / 1000


def _host_seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
