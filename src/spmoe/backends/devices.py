"""Devices: which one to run on, what it has, and a hard limit on what is taken of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spmoe.errors import UsageError

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


def limit_memory(device: torch.device, nbytes: int) -> None:
    """Make every allocation beyond this many bytes fail."""
    _, total = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total), device)


def peak_memory(device: torch.device) -> int:
    """The most bytes that were reserved at once."""
    return torch.cuda.max_memory_reserved(device)
