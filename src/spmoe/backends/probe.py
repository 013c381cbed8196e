"""Probes of the device: why there is none, its properties, bandwidth of link and memory, pinning, and kernels."""

from __future__ import annotations

import mmap
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from spmoe.backends.cuda_runtime import cuda_runtime
from spmoe.backends.devices import free_memory
from spmoe.errors import reason

_TRIES = 5  # repetitions of a measurement; the fastest counts, so the first is a warm-up
_LINK_BYTES = 512 * 2**20  # larger than the host's caches
_COPY_BYTES = 64 * 2**20
_MIN_COPY = 16 * 2**20  # the engine submits smaller copies together
_MEMORY_BYTES = {"cuda": 2 * 2**30, "cpu": 128 * 2**20}
_SMI_FIELDS = ("driver_version", "pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max")


@dataclass(frozen=True, slots=True)
class Pcie:
    """Connection of a device to the host."""

    generation: int  # the highest that device and host support; an idle device may run slower
    lanes: int
    max_lanes: int  # of the device

    @property
    def bytes_per_second(self) -> float:
        """Theoretical rate of one direction."""
        per_lane = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
        return self.lanes * per_lane.get(self.generation, per_lane[6])


@dataclass(frozen=True, slots=True)
class Gpu:
    """Properties of a CUDA device. Sizes are in bytes."""

    name: str
    memory_total: int
    memory_free: int
    capability: tuple[int, int]
    in_torch_build: bool  # whether this build of torch has kernels for it
    driver: str | None
    pcie: Pcie | None


@dataclass(frozen=True, slots=True)
class GpuStatus:
    """The CUDA device that the engine would use, or the reason why there is none."""

    torch_cuda: str | None  # CUDA version of the torch build; None: a build without CUDA
    gpu: Gpu | None
    count: int = 0  # of the devices that torch can use
    reason: str | None = None  # why there is no device
    hardware: bool = False  # whether the system has an NVIDIA device, also if torch cannot use it


def gpu_status() -> GpuStatus:
    """Return the CUDA device, or the reason why torch has none."""
    hardware = any(Path("/proc/driver/nvidia/gpus").glob("*")) or Path("/dev/nvidia0").exists()
    cuda = torch.version.cuda
    if torch.version.hip is not None:
        return GpuStatus(None, None, 0, "torch is a ROCm build, and the kernels need CUDA", hardware)
    if cuda is None:
        return GpuStatus(None, None, 0, f"torch {torch.__version__} is a build without CUDA", hardware)
    if not torch.cuda.is_available():
        return GpuStatus(cuda, None, 0, _why_unavailable(), hardware)
    return GpuStatus(cuda, _gpu(torch.cuda.current_device()), torch.cuda.device_count(), None, hardware=True)


def _why_unavailable() -> str:
    try:
        torch.cuda.init()
        return "torch finds no CUDA device"
    except Exception as error:  # anything from an old driver to a broken installation
        return reason(error)


def _gpu(index: int) -> Gpu:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    capability = (properties.major, properties.minor)
    driver, pcie = _query_smi(str(getattr(properties, "uuid", "")))
    supported = supports_capability(torch.cuda.get_arch_list(), capability)
    return Gpu(properties.name, total, free, capability, supported, driver, pcie)


def supports_capability(architectures: list[str], capability: tuple[int, int]) -> bool:
    """Return whether kernels built for these (`sm_90`, `compute_120`) run on a device of this compute capability.

    Machine code runs on the same major version; PTX (`compute_`) is compiled for any later one.
    """
    for name in architectures:
        kind, _, number = name.partition("_")
        digits = "".join(c for c in number if c.isdigit())
        if len(digits) < 2:
            continue
        major, minor = int(digits[:-1]), int(digits[-1])
        if kind == "compute" and (major, minor) <= capability:
            return True
        if (major == capability[0]) and minor <= capability[1]:
            return True
    return False


def _query_smi(uuid: str) -> tuple[str | None, Pcie | None]:
    """Return driver version and PCIe connection by nvidia-smi; None where it does not tell."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader,nounits"]
    if uuid:
        command += ["-i", uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None, None
    driver, *numbers = [field.strip() for field in lines[0].split(",")] if lines else [""]
    known = len(numbers) == 3 and all(number.isdigit() and int(number) for number in numbers)
    return driver or None, Pcie(*map(int, numbers)) if known else None


# ---- measurements


def measure_link_bandwidth(device: torch.device, copy_bytes: int = _COPY_BYTES, *, pinned: bool = True) -> float:
    """Measure the bytes per second from host memory to a CUDA device, in copies of about this size."""
    copy_bytes = min(max(copy_bytes, _MIN_COPY), _LINK_BYTES // 2)
    source = torch.zeros(_LINK_BYTES // copy_bytes, copy_bytes, dtype=torch.uint8, pin_memory=pinned)  # [copies, bytes]
    target = torch.empty(copy_bytes, dtype=torch.uint8, device=device)

    def copy() -> None:
        for row in source:
            target.copy_(row, non_blocking=True)

    return source.numel() / _best_seconds(device, copy)


def measure_memory_bandwidth(device: torch.device) -> float:
    """Measure the bytes per second, reads plus writes, of a large copy within the device's memory."""
    size = _MEMORY_BYTES[device.type]
    if device.type == "cuda":
        size = min(size, free_memory(device) // 4)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _best_seconds(device, lambda: target.copy_(source))


def pin_and_unpin(nbytes: int) -> None:
    """Pin so much host memory as the expert store does, and unpin it; raise SpmoeError if that is not possible."""
    runtime = cuda_runtime()
    pages = mmap.mmap(-1, nbytes)
    arena = torch.frombuffer(pages, dtype=torch.uint8)
    arena.zero_()
    runtime.lock_pages(arena.data_ptr(), nbytes)
    runtime.unlock_pages(arena.data_ptr())


def kernel_error(device: torch.device) -> float:
    """Compile and run a Triton kernel with tensor cores; return its largest relative error against PyTorch."""
    from spmoe.backends.kernels.dense import small_batch_linear, small_batch_linear_plain

    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator).bfloat16().to(device) for shape in ((4, 256), (128, 256)))
    expected = small_batch_linear_plain(x, weight).float()
    difference = small_batch_linear(x, weight).float() - expected
    return float(difference.abs().max() / expected.abs().max())


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
