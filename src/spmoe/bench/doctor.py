"""Check of this machine: hardware, limits, software and caches, each with a verdict and advice.

`run_checks` yields findings as they are made. A check that fails becomes a finding itself. Nothing here needs a GPU,
a model or the network. The `judge_` functions turn facts into findings and touch nothing.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import spmoe
from spmoe.config import format_bytes, home
from spmoe.errors import SpmoeError, reason
from spmoe.system.cache import PRUNABLE, list_cache
from spmoe.system.disk import Disk, ReadSpeed, disk_of, hub_cache, hub_cache_size, hub_home, measure_read_speed
from spmoe.system.host import Memory, Processor, environment, locked_memory_limit, memory, processor

if TYPE_CHECKING:
    from spmoe.backends.probe import Gpu, GpuStatus

GIB = 2**30
TRITON_CAPABILITY = (8, 0)  # the lowest that Triton supports
MIN_CAPABILITY = (7, 5)  # the kernels compile for it, but some need more than its 64 KiB of shared memory
PIN_BYTES = GIB  # of the pinning test
_PACKAGES = ("torch", "transformers", "safetensors", "huggingface_hub")  # with a line each
_VARIABLES = (
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN", "HF_ENDPOINT", "XDG_CACHE_HOME"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "TRITON_INTERPRET", "TRITON_CACHE_DIR", "CC"),
)


class Verdict(StrEnum):
    """Result of a check; a problem prevents running."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    check: str
    verdict: Verdict
    text: str
    advice: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)  # sizes in bytes, rates in bytes per second

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "check": self.check,
            "verdict": str(self.verdict),
            "text": self.text,
            "advice": self.advice,
            "values": dict(self.values),
        }


def run_checks(*, measure: bool = True) -> Iterator[Finding]:
    """Yield the findings of all checks; without `measure`, nothing is timed, pinned or compiled."""
    machine = _Machine(measure)
    for name, check in _CHECKS.items():
        try:
            yield from check(machine)
        except Exception as error:  # a failed check must not hide the others
            yield Finding(name, Verdict.NOTE, f"not checked ({reason(error)})")


def worst(findings: list[Finding]) -> Verdict:
    """Return the worst verdict."""
    order = (Verdict.OK, Verdict.NOTE, Verdict.PROBLEM)
    return max((one.verdict for one in findings), key=order.index, default=Verdict.OK)


class _Machine:
    """Facts that several checks use, each found once."""

    def __init__(self, measure: bool) -> None:
        self.measure = measure
        self.read_speeds: dict[int, ReadSpeed] = {}  # by device of the file system

    @cached_property
    def gpu_status(self) -> GpuStatus:
        from spmoe.backends.probe import gpu_status

        return gpu_status()

    @cached_property
    def gpu(self) -> Gpu | None:
        """The GPU; None also if it cannot be used, which the check of the GPU reports."""
        try:
            return self.gpu_status.gpu
        except Exception:
            return None

    @cached_property
    def processor(self) -> Processor:
        return processor()

    @cached_property
    def memory(self) -> Memory | None:
        return memory()


# ---- software


def _check_python(machine: _Machine) -> Iterator[Finding]:
    try:
        minimum = _minimum(metadata("spmoe")["Requires-Python"] or "")
    except PackageNotFoundError:  # run from a source tree
        minimum = None
    yield judge_version("python", platform.python_version(), minimum)
    text, values = f"{spmoe.__version__} on {platform.platform()}", {"version": spmoe.__version__}
    yield Finding("spmoe", Verdict.OK, text, values=values)


def _check_packages(machine: _Machine) -> Iterator[Finding]:
    minimums = required_versions()
    for name in dict.fromkeys([*_PACKAGES, *minimums]):
        try:
            found = version(name)
        except PackageNotFoundError:
            yield Finding(name, Verdict.PROBLEM, "not installed", f"install it: pip install {name}", {"version": None})
            continue
        finding = judge_version(name, found, minimums.get(name))
        if name in _PACKAGES or finding.verdict is not Verdict.OK:
            yield finding


def required_versions() -> dict[str, tuple[int, ...] | None]:
    """Return the packages that spmoe requires and their lowest versions, from the metadata of the installation."""
    try:
        declared = requires("spmoe") or []
    except PackageNotFoundError:
        return {}
    plain = [line for line in declared if "extra ==" not in line]
    names = [re.match(r"[\w.-]+", line) for line in plain]
    return {match[0]: _minimum(line) for match, line in zip(names, plain, strict=True) if match}


def judge_version(name: str, found: str, minimum: tuple[int, ...] | None) -> Finding:
    """Compare an installed version with the lowest supported one."""
    values = {"version": found, "minimum": None if minimum is None else ".".join(map(str, minimum))}
    if minimum is not None and _numbers(found) < minimum:
        wanted = ".".join(map(str, minimum))
        advice = f"install Python {wanted} or newer" if name == "python" else f"pip install '{name}>={wanted}'"
        return Finding(name, Verdict.PROBLEM, f"{found} is older than {wanted}", advice, values)
    return Finding(name, Verdict.OK, found, values=values)


def _minimum(requirement: str) -> tuple[int, ...] | None:
    match = re.search(r">=\s*(\d+(?:\.\d+)*)", requirement)
    return _numbers(match[1]) if match else None


def _numbers(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 11, 0) of `2.11.0+cu128`."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()


# ---- GPU


def _check_gpu(machine: _Machine) -> Iterator[Finding]:
    try:
        status = machine.gpu_status
    except (ImportError, OSError) as error:  # an installation of torch that cannot be imported
        advice = "install torch again (https://pytorch.org)"
        yield Finding("gpu", Verdict.PROBLEM, f"torch cannot be imported ({reason(error)})", advice)
        return
    except RuntimeError as error:  # a device that is there but does not answer
        advice = "see nvidia-smi: another process may occupy the GPU, or it needs a reset; --device cpu works meanwhile"
        yield Finding("gpu", Verdict.PROBLEM, f"the GPU cannot be used ({reason(error)})", advice)
        return
    yield judge_gpu(status)
    gpu = status.gpu
    if gpu is None:
        return
    yield judge_driver(gpu, status)
    yield judge_capability(gpu)
    yield _judge_triton(machine)
    yield judge_compiler(os.environ.get("CC"), shutil.which, Path(sysconfig.get_paths()["include"]))


def judge_gpu(status: GpuStatus) -> Finding:
    """Judge whether there is a usable device with enough free memory."""
    gpu = status.gpu
    if gpu is None:
        text = f"none ({status.reason})"
        if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "none", "NoDevFiles"):
            advice = "unset CUDA_VISIBLE_DEVICES, which hides every GPU"
        elif status.hardware and status.torch_cuda is None:
            advice = "install a CUDA build of torch (https://pytorch.org); until then models run on the CPU"
        elif status.hardware:
            advice = "update the NVIDIA driver or install a torch build for it; until then models run on the CPU"
        else:
            advice = "models run on the CPU, with experts on disk; a CUDA GPU is many times faster"
        return Finding("gpu", Verdict.NOTE, text, advice, {"count": 0, "name": None})
    others = f", the first of {status.count}" if status.count > 1 else ""
    text = f"{gpu.name}, {format_bytes(gpu.memory_total)}, {format_bytes(gpu.memory_free)} free{others}"
    values = {
        "count": status.count,
        "name": gpu.name,
        "memory_total_bytes": gpu.memory_total,
        "memory_free_bytes": gpu.memory_free,
    }
    if gpu.memory_free < gpu.memory_total / 2:
        advice = "other processes use the GPU: see nvidia-smi, or choose another with CUDA_VISIBLE_DEVICES"
        return Finding("gpu", Verdict.NOTE, text, advice, values)
    return Finding("gpu", Verdict.OK, text, values=values)


def judge_driver(gpu: Gpu, status: GpuStatus) -> Finding:
    """Report the driver; torch has initialized it, so it is recent enough."""
    values = {"version": gpu.driver, "torch_cuda": status.torch_cuda}
    text = f"{gpu.driver or 'version unknown (nvidia-smi does not tell)'}, torch is built for CUDA {status.torch_cuda}"
    return Finding("gpu-driver", Verdict.OK, text, values=values)


def judge_capability(gpu: Gpu) -> Finding:
    """Compare the compute capability with the needs of the kernels and of torch."""
    major, minor = gpu.capability
    text, values = f"{major}.{minor}", {"capability": [major, minor], "in_torch_build": gpu.in_torch_build}
    if not gpu.in_torch_build:
        advice = "install a torch build for this GPU (https://pytorch.org), or pass --device cpu"
        return Finding("compute-capability", Verdict.PROBLEM, f"{text}, which torch is not built for", advice, values)
    if gpu.capability < MIN_CAPABILITY:
        wanted = ".".join(map(str, MIN_CAPABILITY))
        advice = "pass --device cpu, or use a newer GPU"
        return Finding("compute-capability", Verdict.PROBLEM, f"{text}; the kernels need {wanted}", advice, values)
    if gpu.capability < TRITON_CAPABILITY:
        advice = "some kernels do not fit this GPU, and bfloat16 is emulated: try --dtype float16, else --device cpu"
        return Finding("compute-capability", Verdict.NOTE, f"{text}; Triton supports 8.0 and newer", advice, values)
    return Finding("compute-capability", Verdict.OK, text, values=values)


def _judge_triton(machine: _Machine) -> Finding:
    try:
        return Finding("triton", Verdict.OK, version("triton"), values={"version": version("triton")})
    except PackageNotFoundError:
        advice = "install it: pip install triton (CUDA builds of torch for Linux bring it along)"
        return Finding("triton", Verdict.PROBLEM, "not installed; the CUDA kernels need it", advice, {"version": None})


def judge_compiler(chosen: str | None, which: Callable[[str], str | None], include: Path) -> Finding:
    """Check for the C compiler and the Python headers with which Triton builds its launchers."""
    compiler = chosen or which("gcc") or which("clang")
    values = {"compiler": compiler, "python_headers": (include / "Python.h").is_file()}
    if compiler is None or which(compiler) is None:
        missing = "no C compiler" if compiler is None else f"there is no C compiler {compiler}"
        advice = "install gcc (apt install gcc), or name a compiler in CC"
        return Finding("compiler", Verdict.PROBLEM, f"{missing}; Triton builds its launchers with one", advice, values)
    if not values["python_headers"]:
        advice = "install the headers of this Python (apt install python3-dev)"
        return Finding("compiler", Verdict.PROBLEM, f"Python.h is not in {include}; Triton needs it", advice, values)
    return Finding("compiler", Verdict.OK, compiler, values=values)


def _check_kernels(machine: _Machine) -> Iterator[Finding]:
    if machine.gpu is None or not machine.measure:
        return
    import torch

    from spmoe.backends.probe import kernel_error

    try:
        yield judge_kernel(kernel_error(torch.device("cuda")))
    except Exception as error:  # Triton, its compilers and the driver raise anything
        advice = "correct what the lines above report, or pass --device cpu; SPMOE_DEBUG=1 shows the whole error"
        yield Finding("kernels", Verdict.PROBLEM, f"a Triton kernel does not run ({reason(error)})", advice)


def judge_kernel(error: float) -> Finding:
    """Judge the largest relative error of a kernel in bfloat16."""
    values = {"relative_error": error}
    if not error < 0.02:
        advice = "update the driver and torch, or pass --device cpu"
        return Finding("kernels", Verdict.PROBLEM, f"a Triton kernel is wrong by {100 * error:.1f}%", advice, values)
    return Finding("kernels", Verdict.OK, "a Triton kernel compiles, runs and agrees with PyTorch", values=values)


def _check_bandwidth(machine: _Machine) -> Iterator[Finding]:
    if not machine.measure:
        return
    import torch

    from spmoe.backends.devices import link_bandwidth, memory_bandwidth

    if (gpu := machine.gpu) is not None:
        device = torch.device("cuda")
        pinned, pageable = link_bandwidth(device), link_bandwidth(device, pinned=False)
        yield judge_link(pinned, pageable, gpu)
    device = torch.device("cuda" if gpu is not None else "cpu")
    speed = memory_bandwidth(device)
    place = "GPU memory" if gpu is not None else "RAM"
    values = {"bytes_per_second": speed, "device": device.type}
    yield Finding("memory-bandwidth", Verdict.OK, f"{_rate(speed)} in {place}, reads plus writes", values=values)


def judge_link(pinned: float, pageable: float, gpu: Gpu) -> Finding:
    """Compare the measured link, in bytes per second, with the PCIe connection."""
    pcie = gpu.pcie
    values = {
        "pinned_bytes_per_second": pinned,
        "pageable_bytes_per_second": pageable,
        "pcie_generation": pcie.generation if pcie else None,
        "pcie_lanes": pcie.lanes if pcie else None,
        "pcie_max_lanes": pcie.max_lanes if pcie else None,
    }
    text = f"{_rate(pinned)} from pinned memory, {_rate(pageable)} from pageable memory"
    advice = None
    if pcie is not None:
        text += f"; PCIe {pcie.generation} x{pcie.lanes}, at most {_rate(pcie.bytes_per_second)}"
        if pinned < 0.6 * pcie.bytes_per_second:
            advice = "the link is slower than its PCIe connection allows: stop other work that uses memory or the link"
        elif pcie.lanes < pcie.max_lanes:
            advice = f"the GPU has {pcie.max_lanes} lanes: move it to a slot that connects all of them"
    if advice is None and pinned < 5e9:
        advice = "bytes over the link limit decoding: give experts more memory, or use a draft (`spmoe plan` predicts)"
    return Finding("link", Verdict.OK if advice is None else Verdict.NOTE, text, advice, values)


# ---- host


def _check_pinning(machine: _Machine) -> Iterator[Finding]:
    limit = locked_memory_limit()
    failure, tested = None, 0
    if machine.gpu is not None and machine.measure:
        from spmoe.backends.probe import pin_and_unpin

        available = machine.memory.available if machine.memory is not None else PIN_BYTES
        tested = min(PIN_BYTES, available // 4)
        try:
            pin_and_unpin(tested)
        except (SpmoeError, OSError) as error:
            failure = reason(error)
    yield judge_pinning(limit, machine.gpu is not None, tested, failure)


def judge_pinning(limit: int | None, has_gpu: bool, tested: int, failure: str | None) -> Finding:
    """Judge whether host memory can be pinned; `tested` in bytes, 0: not tried."""
    limit_text = f"limit (`ulimit -l`) {'unlimited' if limit is None else format_bytes(limit)}"
    values = {"limit_bytes": limit, "tested_bytes": tested, "error": failure}
    if not has_gpu:
        return Finding("pinned-memory", Verdict.OK, f"{limit_text}; only needed with a GPU", values=values)
    if failure is not None:
        advice = "raise `ulimit -l` (containers: --ulimit memlock=-1) and free memory, or pass --no-pin-memory (slower)"
        text = f"{format_bytes(tested)} cannot be pinned ({failure}); {limit_text}"
        return Finding("pinned-memory", Verdict.PROBLEM, text, advice, values)
    if not tested:
        return Finding("pinned-memory", Verdict.OK, f"{limit_text}; not tried", values=values)
    return Finding("pinned-memory", Verdict.OK, f"{format_bytes(tested)} were pinned; {limit_text}", values=values)


def _check_memory(machine: _Machine) -> Iterator[Finding]:
    if machine.memory is None:
        yield Finding("ram", Verdict.NOTE, "not known: /proc/meminfo cannot be read")
        return
    yield judge_memory(machine.memory, machine.gpu)
    yield judge_swap(machine.memory)


def judge_memory(found: Memory, gpu: Gpu | None) -> Finding:
    """Judge the available host memory."""
    limited = "" if found.limit is None else f", limited to {format_bytes(found.limit)} by the container"
    text = f"{format_bytes(found.total)}{limited}, {format_bytes(found.available)} available"
    values = {"total_bytes": found.total, "available_bytes": found.available, "limit_bytes": found.limit}
    if found.available < GIB:
        return Finding("ram", Verdict.PROBLEM, text, "stop other programs, or raise the container's limit", values)
    if gpu is not None and found.available < gpu.memory_total:
        advice = "with a GPU all experts are kept in host memory: larger models need more RAM, or --device cpu"
        return Finding("ram", Verdict.NOTE, text, advice, values)
    if found.available < 4 * GIB:
        advice = "weights, expert slots and KV caches must fit in it: keep --expert-memory small"
        return Finding("ram", Verdict.NOTE, text, advice, values)
    return Finding("ram", Verdict.OK, text, values=values)


def judge_swap(found: Memory) -> Finding:
    """Judge the use of swap space."""
    used = found.swap_total - found.swap_free
    values = {"total_bytes": found.swap_total, "used_bytes": used}
    text = f"{format_bytes(used)} of {format_bytes(found.swap_total)} in use" if found.swap_total else "none"
    if used > max(GIB, found.swap_total / 4):
        return Finding("swap", Verdict.NOTE, text, "stop other programs: swapped memory slows everything down", values)
    return Finding("swap", Verdict.OK, text, values=values)


def _check_processor(machine: _Machine) -> Iterator[Finding]:
    yield judge_processor(machine.processor)
    import torch

    omp = os.environ.get("OMP_NUM_THREADS")
    yield judge_threads(torch.get_num_threads(), omp, machine.processor.usable_cores)


def judge_processor(found: Processor) -> Finding:
    """Report the processor, and limits on it."""
    physical = f"{found.physical_cores} physical and " if found.physical_cores else ""
    text = f"{found.model or platform.machine()}, {physical}{found.logical_cores} logical cores"
    values = {
        "model": found.model,
        "physical_cores": found.physical_cores,
        "logical_cores": found.logical_cores,
        "allowed_cores": found.allowed_cores,
        "quota_cores": found.quota,
    }
    limits = []
    if found.allowed_cores < found.logical_cores:
        limits.append(f"{found.allowed_cores} by affinity")
    if found.quota is not None and found.quota < found.logical_cores:
        limits.append(f"{found.quota:g} by the container's quota")
    if limits:
        advice = "allow more cores (taskset, docker run --cpus) if the CPU computes experts"
        return Finding("cpu", Verdict.NOTE, f"{text}, limited to {' and '.join(limits)}", advice, values)
    return Finding("cpu", Verdict.OK, text, values=values)


def judge_threads(threads: int, omp: str | None, usable_cores: int) -> Finding:
    """Compare torch's number of threads with the cores that they can run on."""
    text = f"torch uses {threads} by default" if omp is None else f"{threads} by OMP_NUM_THREADS={omp}"
    values = {"torch_threads": threads, "omp_num_threads": omp, "usable_cores": usable_cores}
    if threads > usable_cores:
        advice = f"set OMP_NUM_THREADS={usable_cores}: more threads than cores wait for each other"
        return Finding("threads", Verdict.NOTE, text, advice, values)
    return Finding("threads", Verdict.OK, text, values=values)


# ---- disks, environment and caches


def _check_disks(machine: _Machine) -> Iterator[Finding]:
    for name, directory in (("SPMOE_HOME", home()), ("HF_HOME", hub_home())):
        disk = disk_of(directory)
        speed, failure = None, None
        if machine.measure and disk.writable:
            device = disk.existing.stat().st_dev
            try:
                speed = machine.read_speeds.get(device) or measure_read_speed(disk.existing)
                machine.read_speeds[device] = speed
            except OSError as error:
                failure = error.strerror or str(error)
                disk = replace(disk, writable=error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT))
        yield judge_disk(name, disk, speed, failure, machine.gpu is not None)


def judge_disk(name: str, disk: Disk, speed: ReadSpeed | None, failure: str | None, has_gpu: bool) -> Finding:
    """Judge space and speed of the disk that a directory is on; experts of the CPU path are read from SPMOE_HOME."""
    is_home = name == "SPMOE_HOME"
    text = f"{disk.directory}: {format_bytes(disk.free)} of {format_bytes(disk.total)} free"
    text += f" ({disk.file_system})" if disk.file_system else ""
    if speed is not None:
        text += f", reads {_rate(speed.bytes_per_second)}{'' if speed.direct else ' (perhaps from memory)'}"
    elif failure is not None:
        text += f", speed not measured ({failure})"
    values = {
        "directory": str(disk.directory),
        "total_bytes": disk.total,
        "free_bytes": disk.free,
        "file_system": disk.file_system,
        "writable": disk.writable,
        "read_bytes_per_second": speed.bytes_per_second if speed is not None else None,
        "read_direct": speed.direct if speed is not None else None,
    }
    check = f"disk-{name}"
    if not disk.writable:
        verdict = Verdict.PROBLEM if is_home and not has_gpu else Verdict.NOTE
        use = "converted experts and profiles" if is_home else "downloads"
        advice = f"point {name} at a writable directory, for {use}"
        return Finding(check, verdict, f"{text}, not writable", advice, values)
    if disk.free < 10 * GIB:
        use = "without a GPU, experts are converted to files here" if is_home else "models are downloaded to here"
        remedy = "delete some with `spmoe cache prune`" if is_home else "delete old models"
        advice = f"{use}: {remedy}, or point {name} at a larger disk"
        return Finding(check, Verdict.NOTE, text, advice, values)
    if disk.file_system in ("tmpfs", "ramfs"):
        advice = f"these files occupy memory and are lost at a restart: point {name} at a disk"
        return Finding(check, Verdict.NOTE, text, advice, values)
    if disk.file_system == "overlay":
        advice = f"these files are lost with the container: mount a volume, and point {name} at it"
        return Finding(check, Verdict.NOTE, text, advice, values)
    if speed is not None and speed.bytes_per_second < 0.5e9:
        use = "the CPU reads experts from here" if is_home else "loading reads models from here"
        return Finding(check, Verdict.NOTE, text, f"{use}: point {name} at an NVMe disk", values)
    return Finding(check, Verdict.OK, text, values=values)


def _check_environment(machine: _Machine) -> Iterator[Finding]:
    found = environment(_VARIABLES, ("SPMOE_",))
    for name, value in found.items():
        yield judge_variable(name, value, machine.gpu is not None)
    if not found:
        yield Finding("environment", Verdict.OK, "no variable changes a default")


def judge_variable(name: str, value: str, has_gpu: bool) -> Finding:
    """Judge an environment variable that is set."""
    on = value.strip().lower() not in ("", "0", "false", "off", "no")
    advice = {
        "HF_HUB_OFFLINE": "nothing is downloaded from the hub; unset it to allow downloads",
        "CUDA_LAUNCH_BLOCKING": "every kernel waits for the one before; unset it unless you debug",
        "TRITON_INTERPRET": "kernels run in Python, very slowly; unset it",
        "SPMOE_DEBUG": "errors are shown with tracebacks; unset it for short messages",
    }.get(name)
    if name == "TRITON_INTERPRET" and not has_gpu:
        advice = None
    noted = on and advice is not None
    verdict = Verdict.NOTE if noted else Verdict.OK
    values = {"name": name, "value": value}
    return Finding("environment", verdict, f"{name}={value}", advice if noted else None, values)


def _check_caches(machine: _Machine) -> Iterator[Finding]:
    entries = list_cache()
    total = sum(entry.nbytes for entry in entries)
    prunable = sum(entry.nbytes for entry in entries if entry.state in PRUNABLE)
    values = {"directory": str(home()), "files": len(entries), "bytes": total, "prunable_bytes": prunable}
    text = f"{format_bytes(total)} in {len(entries)} files in {home()}"
    if prunable:
        advice = f"`spmoe cache prune` frees {format_bytes(prunable)}; `spmoe cache ls` lists all files"
        yield Finding("cache", Verdict.NOTE, text, advice, values)
    else:
        yield Finding("cache", Verdict.OK, text, values=values)
    hub = hub_cache_size()
    values = {"directory": str(hub_cache()), "models": hub.models, "bytes": hub.nbytes}
    values |= {"incomplete_bytes": hub.incomplete_bytes}
    text = f"{format_bytes(hub.nbytes)} of {hub.models} models in {hub_cache()}"
    if hub.incomplete_bytes:
        advice = f"{format_bytes(hub.incomplete_bytes)} are downloads that did not end: start them again to finish them"
        yield Finding("hub-cache", Verdict.NOTE, text, advice, values)
    else:
        yield Finding("hub-cache", Verdict.OK, text, values=values)


def _rate(bytes_per_second: float) -> str:
    if bytes_per_second >= 1e12:
        return f"{bytes_per_second / 1e12:.2f} TB/s"
    if bytes_per_second >= 1e9:
        return f"{bytes_per_second / 1e9:.1f} GB/s"
    return f"{bytes_per_second / 1e6:.0f} MB/s"


_CHECKS: dict[str, Callable[[_Machine], Iterator[Finding]]] = {
    "python": _check_python,
    "packages": _check_packages,
    "gpu": _check_gpu,
    "kernels": _check_kernels,
    "bandwidth": _check_bandwidth,
    "pinned-memory": _check_pinning,
    "ram": _check_memory,
    "cpu": _check_processor,
    "disk": _check_disks,
    "environment": _check_environment,
    "cache": _check_caches,
}
