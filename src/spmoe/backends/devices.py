"""Devices: selection, properties and memory limits. Measurements of bandwidth are in probe.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spmoe.errors import UsageError

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
