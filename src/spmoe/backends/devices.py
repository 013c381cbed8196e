"""Devices: which one to run on, what it has, and a hard limit on what is taken of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from spmoe.errors import UsageError

_TRIES = 5  # of a measurement, the best of which counts
_LINK_BYTES = 512 * 2**20  # more than caches of the host hold
_LINK_PIECE = 16 * 2**20  # smaller copies are submitted together
_MEMORY_BYTES = {"cuda": 2 * 2**30, "cpu": 128 * 2**20}

WORKSPACE_BYTES = 256 * 2**20  # libraries, recorded graphs, and what a decoding step computes on the way


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a measurement should say about where it was made."""

    name: str
    driver: str | None
    memory_bytes: int | None


def choose_device(wanted: str) -> torch.device:
    """`auto` is CUDA where there is a device for it."""
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise UsageError(
            "--device cuda was asked for, but PyTorch sees no CUDA device; check nvidia-smi and that torch is a CUDA "
            "build, or use --device cpu"
        )
    return torch.device("cuda", torch.cuda.current_device()) if available and wanted != "cpu" else torch.device("cpu")


def device_facts(device: torch.device) -> DeviceFacts:
    """Name, driver and memory."""
    if device.type != "cuda":
        return DeviceFacts("cpu", None, None)
    properties = torch.cuda.get_device_properties(device)
    try:
        import subprocess

        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        driver = None
    return DeviceFacts(properties.name, driver, properties.total_memory)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be had on a CUDA device, what this process has cached included."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def allocated_memory(device: torch.device) -> int:
    """Bytes of this process's tensors on a CUDA device."""
    return torch.cuda.memory_allocated(device)


def pinned_zeros(*size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Zeros in host memory that a device reads and writes where they are."""
    return torch.zeros(*size, dtype=dtype, pin_memory=True)


def limit_memory(device: torch.device, nbytes: int | None) -> None:
    """Make every allocation beyond this many bytes fail; None lifts the limit."""
    _, total = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction(1.0 if nbytes is None else min(1.0, nbytes / total), device)


def forget_freed(device: torch.device) -> None:
    """Give freed tensors' memory back to the device, for whoever divides what is free next."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def link_bandwidth(device: torch.device, piece: int) -> float:
    """Bytes per second from pinned host memory to a CUDA device, in copies of about this size."""
    piece = min(max(piece, _LINK_PIECE), _LINK_BYTES // 2)
    host = torch.empty(_LINK_BYTES // piece, piece, dtype=torch.uint8, pin_memory=True)  # [copies, bytes]
    there = torch.empty(piece, dtype=torch.uint8, device=device)

    def copy() -> None:
        for row in host:
            there.copy_(row, non_blocking=True)

    return host.numel() / _best_seconds(device, copy)


def copy_seconds(device: torch.device, nbytes: int, tries: int, *, pinned: bool) -> list[float]:
    """How long so many bytes take from host memory to a CUDA device, one time after the other."""
    pieces = [min(_LINK_PIECE * 4, nbytes - start) for start in range(0, nbytes, _LINK_PIECE * 4)]
    host = torch.empty(max(pieces), dtype=torch.uint8, pin_memory=pinned)
    there = torch.empty(max(pieces), dtype=torch.uint8, device=device)

    def copy() -> None:
        for piece in pieces:
            there[:piece].copy_(host[:piece], non_blocking=True)

    return _seconds(device, copy, tries)


def memory_bandwidth(device: torch.device) -> float:
    """Bytes per second that a large copy within the device's own memory reads and writes, both counted."""
    size = _MEMORY_BYTES[device.type]
    if device.type == "cuda":
        size = min(size, free_memory(device) // 4)
    here = torch.zeros(size, dtype=torch.uint8, device=device)
    there = torch.empty_like(here)
    return 2 * size / _best_seconds(device, lambda: there.copy_(here))


def _best_seconds(device: torch.device, work: Callable[[], object]) -> float:
    """The shortest time that work took of several."""
    return min(_seconds(device, work, _TRIES))


def _seconds(device: torch.device, work: Callable[[], object], tries: int) -> list[float]:
    times = []
    for _ in range(tries):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return times
