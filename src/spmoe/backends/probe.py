"""Probes of the device: why there is none, its properties, pinning, and a kernel. devices.py measures bandwidth."""

from __future__ import annotations

import mmap
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from spmoe.backends.cuda_runtime import cuda_runtime
from spmoe.errors import reason

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


# ---- trials


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
