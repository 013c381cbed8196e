"""The doctor's verdicts, for machines that are not here, and checks that fail."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from spmoe.backends.probe import Gpu, GpuStatus, Pcie
from spmoe.bench import doctor
from spmoe.bench.doctor import Finding, Verdict, run_checks, worst
from spmoe.system.disk import Disk, ReadSpeed
from spmoe.system.host import Memory, Processor

GIB = 2**30
H200 = Gpu("NVIDIA H200", 140 * GIB, 139 * GIB, (9, 0), True, "570.1", Pcie(5, 16, 16))
HOST = Memory(512 * GIB, 400 * GIB, None, 8 * GIB, 8 * GIB)
DISK = Disk(Path("/home/u/.cache/spmoe"), Path("/home/u"), 1000 * GIB, 500 * GIB, "ext4", True)
FAST = ReadSpeed(3e9, True)


def verdicts(findings: list[Finding]) -> dict[str, Verdict]:
    return {finding.check: finding.verdict for finding in findings}


# ---- GPU


def test_usable_gpu() -> None:
    status = GpuStatus("12.8", H200, 2, None, True)
    found = doctor.judge_gpu(status)
    assert found.verdict is Verdict.OK
    assert "the first of 2" in found.text
    assert found.values["memory_free_bytes"] == 139 * GIB
    assert "570.1" in doctor.judge_driver(H200, status).text


def test_gpu_that_others_use() -> None:
    found = doctor.judge_gpu(GpuStatus("12.8", replace(H200, memory_free=10 * GIB), 1, None, True))
    assert found.verdict is Verdict.NOTE
    assert "nvidia-smi" in str(found.advice)


@pytest.mark.parametrize(
    ("hidden", "cuda", "hardware", "words"),
    [
        (None, None, False, "run on the CPU"),
        (None, None, True, "CUDA build of torch"),
        (None, "12.8", True, "driver"),
        ("", "12.8", True, "unset CUDA_VISIBLE_DEVICES"),
    ],
)
def test_missing_gpu_is_a_note_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, hidden: str | None, cuda: str | None, hardware: bool, words: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    found = doctor.judge_gpu(GpuStatus(cuda, None, 0, "the driver is too old", hardware))
    assert found.verdict is Verdict.NOTE, "models run without a GPU"
    assert "the driver is too old" in found.text
    assert words in str(found.advice)


@pytest.mark.parametrize(
    ("capability", "built", "verdict"),
    [
        ((9, 0), True, Verdict.OK),
        ((8, 0), True, Verdict.OK),
        ((7, 5), True, Verdict.NOTE),
        ((7, 0), True, Verdict.PROBLEM),
        ((12, 0), False, Verdict.PROBLEM),
    ],
)
def test_compute_capability(capability: tuple[int, int], built: bool, verdict: Verdict) -> None:
    found = doctor.judge_capability(replace(H200, capability=capability, in_torch_build=built))
    assert found.verdict is verdict
    assert (found.advice is None) == (verdict is Verdict.OK)


def test_compiler(tmp_path: Path) -> None:
    installed = {"gcc": "/usr/bin/gcc", "/usr/bin/gcc": "/usr/bin/gcc"}
    assert "no C compiler" in doctor.judge_compiler(None, {}.get, tmp_path).text
    assert "mycc" in doctor.judge_compiler("mycc", installed.get, tmp_path).text
    without_headers = doctor.judge_compiler(None, installed.get, tmp_path)
    assert (without_headers.verdict, "Python.h" in without_headers.text) == (Verdict.PROBLEM, True)
    (tmp_path / "Python.h").touch()
    assert doctor.judge_compiler(None, installed.get, tmp_path).verdict is Verdict.OK


@pytest.mark.parametrize(
    ("pinned", "pcie", "words"),
    [
        (55e9, Pcie(5, 16, 16), None),
        (55e9, None, None),
        (20e9, Pcie(5, 16, 16), "slower than its PCIe"),
        (6.5e9, Pcie(4, 4, 16), "16 lanes"),
        (3e9, None, "limit decoding"),
        (3.2e9, Pcie(3, 4, 4), "limit decoding"),
    ],
)
def test_link(pinned: float, pcie: Pcie | None, words: str | None) -> None:
    found = doctor.judge_link(pinned, 6e9, replace(H200, pcie=pcie))
    assert found.verdict is (Verdict.OK if words is None else Verdict.NOTE)
    assert words is None or words in str(found.advice)
    assert found.values["pinned_bytes_per_second"] == pinned


@pytest.mark.parametrize(
    ("error", "verdict"), [(0.001, Verdict.OK), (0.5, Verdict.PROBLEM), (float("nan"), Verdict.PROBLEM)]
)
def test_kernel(error: float, verdict: Verdict) -> None:
    assert doctor.judge_kernel(error).verdict is verdict


@pytest.mark.parametrize(
    ("has_gpu", "tested", "failure", "verdict"),
    [
        (False, 0, None, Verdict.OK),
        (True, GIB, None, Verdict.OK),
        (True, 0, None, Verdict.OK),
        (True, GIB, "cudaHostRegister failed: out of memory", Verdict.PROBLEM),
    ],
)
def test_pinned_memory(has_gpu: bool, tested: int, failure: str | None, verdict: Verdict) -> None:
    found = doctor.judge_pinning(8 * 2**20, has_gpu, tested, failure)
    assert found.verdict is verdict
    assert "8.0 MiB" in found.text
    assert failure is None or (failure in found.text and "--no-pin-memory" in str(found.advice))
    assert "unlimited" in doctor.judge_pinning(None, has_gpu, tested, failure).text


# ---- host


@pytest.mark.parametrize(
    ("available", "gpu", "verdict"),
    [
        (400 * GIB, H200, Verdict.OK),
        (100 * GIB, H200, Verdict.NOTE),
        (100 * GIB, None, Verdict.OK),
        (3 * GIB, None, Verdict.NOTE),
        (GIB // 2, None, Verdict.PROBLEM),
    ],
)
def test_memory(available: int, gpu: Gpu | None, verdict: Verdict) -> None:
    found = doctor.judge_memory(replace(HOST, available=available), gpu)
    assert found.verdict is verdict
    assert (found.advice is None) == (verdict is Verdict.OK)
    assert "limited to 16.0 GiB" in doctor.judge_memory(replace(HOST, limit=16 * GIB), gpu).text


def test_swap() -> None:
    assert doctor.judge_swap(HOST).verdict is Verdict.OK
    assert doctor.judge_swap(replace(HOST, swap_total=0, swap_free=0)).text == "none"
    assert doctor.judge_swap(replace(HOST, swap_free=GIB)).verdict is Verdict.NOTE


def test_processor_and_threads() -> None:
    free, limited = Processor("A", 8, 16, 16, None), Processor("A", 8, 16, 4, 2.0)
    assert doctor.judge_processor(free).verdict is Verdict.OK
    found = doctor.judge_processor(limited)
    assert found.verdict is Verdict.NOTE
    assert "4 by affinity and 2 by the container's quota" in found.text
    assert doctor.judge_threads(8, None, 16).verdict is Verdict.OK
    found = doctor.judge_threads(16, "16", 2)
    assert (found.verdict, "OMP_NUM_THREADS=2" in str(found.advice)) == (Verdict.NOTE, True)


@pytest.mark.parametrize(
    ("disk", "speed", "has_gpu", "verdict", "words"),
    [
        (DISK, FAST, False, Verdict.OK, ""),
        (DISK, None, False, Verdict.OK, ""),
        (DISK, ReadSpeed(1e8, True), False, Verdict.NOTE, "NVMe"),
        (replace(DISK, writable=False), None, False, Verdict.PROBLEM, "writable directory"),
        (replace(DISK, writable=False), None, True, Verdict.NOTE, "writable directory"),
        (replace(DISK, free=GIB), FAST, False, Verdict.NOTE, "spmoe cache prune"),
        (replace(DISK, file_system="tmpfs"), FAST, False, Verdict.NOTE, "occupy memory"),
        (replace(DISK, file_system="overlay"), FAST, False, Verdict.NOTE, "volume"),
    ],
)
def test_disk(disk: Disk, speed: ReadSpeed | None, has_gpu: bool, verdict: Verdict, words: str) -> None:
    found = doctor.judge_disk("SPMOE_HOME", disk, speed, None, has_gpu)
    assert found.verdict is verdict
    assert words in str(found.advice or "")
    assert doctor.judge_disk("HF_HOME", disk, speed, None, has_gpu).verdict is not Verdict.PROBLEM


@pytest.mark.parametrize(
    ("name", "value", "verdict"),
    [
        ("HF_HUB_OFFLINE", "1", Verdict.NOTE),
        ("HF_HUB_OFFLINE", "0", Verdict.OK),
        ("CUDA_LAUNCH_BLOCKING", "1", Verdict.NOTE),
        ("TRITON_INTERPRET", "1", Verdict.NOTE),
        ("SPMOE_HOME", "/x", Verdict.OK),
    ],
)
def test_variables(name: str, value: str, verdict: Verdict) -> None:
    assert doctor.judge_variable(name, value, has_gpu=True).verdict is verdict
    assert doctor.judge_variable("TRITON_INTERPRET", "1", has_gpu=False).verdict is Verdict.OK


# ---- versions


@pytest.mark.parametrize(
    ("found", "minimum", "verdict"),
    [
        ("2.11.0+cu128", (2, 11), Verdict.OK),
        ("2.9.1", (2, 11), Verdict.PROBLEM),
        ("3.0", (2, 11), Verdict.OK),
        ("2.11.0rc1", (2, 11), Verdict.OK),
        ("unknown", None, Verdict.OK),
    ],
)
def test_versions(found: str, minimum: tuple[int, ...] | None, verdict: Verdict) -> None:
    judged = doctor.judge_version("torch", found, minimum)
    assert judged.verdict is verdict
    assert verdict is Verdict.OK or "torch>=2.11" in str(judged.advice)


def test_minimums_come_from_the_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["torch>=2.11", "huggingface_hub>=1.0", "typer", 'pytest>=8; extra == "dev"']
    monkeypatch.setattr(doctor, "requires", lambda name: lines)
    assert doctor.required_versions() == {"torch": (2, 11), "huggingface_hub": (1, 0), "typer": None}

    def missing(name: str) -> Any:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "requires", missing)
    assert doctor.required_versions() == {}, "a source tree that is not installed"


def test_missing_and_old_packages_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "safetensors":
            raise PackageNotFoundError(name)
        return {"torch": "2.0.1"}.get(name, "99.0")

    monkeypatch.setattr(doctor, "version", version)
    monkeypatch.setattr(doctor, "requires", lambda name: ["torch>=2.11", "safetensors>=0.7", "rich>=14"])
    found = verdicts(list(doctor._check_packages(doctor._Machine(False))))
    assert (found["torch"], found["safetensors"]) == (Verdict.PROBLEM, Verdict.PROBLEM)
    assert found["transformers"] is Verdict.OK
    assert "rich" not in found, "only packages with a line of their own, and problems"


# ---- all checks


def test_all_checks_run_here(spmoe_home: Path) -> None:
    findings = list(run_checks(measure=False))
    found = verdicts(findings)
    assert {"python", "torch", "transformers", "gpu", "pinned-memory", "ram", "swap", "cpu", "threads"} <= found.keys()
    assert {"disk-SPMOE_HOME", "disk-HF_HOME", "environment", "cache", "hub-cache"} <= found.keys()
    assert not [finding for finding in findings if "not checked" in finding.text]
    json.dumps([finding.to_dict() for finding in findings], allow_nan=False)
    assert str(spmoe_home) in {f.values.get("directory") for f in findings}


def test_measurements_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "measure_read_speed", lambda directory: FAST)
    findings = {finding.check: finding for finding in run_checks(measure=True)}
    assert findings["memory-bandwidth"].values["bytes_per_second"] > 1e8
    assert "3.0 GB/s" in findings["disk-SPMOE_HOME"].text


def test_failed_check_does_not_hide_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(machine: Any) -> Iterator[Finding]:
        yield Finding("first", Verdict.OK, "fine")
        raise OSError("a file of /proc is gone")

    def fine(machine: Any) -> Iterator[Finding]:
        yield Finding("second", Verdict.OK, "fine")

    monkeypatch.setattr(doctor, "_CHECKS", {"one": broken, "two": fine})
    findings = list(run_checks())
    assert [finding.check for finding in findings] == ["first", "one", "second"]
    assert findings[1].verdict is Verdict.NOTE
    assert "a file of /proc is gone" in findings[1].text


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (ImportError("libcudart.so.12: cannot open shared object file"), "install torch"),
        (RuntimeError("CUDA error: out of memory"), "nvidia-smi"),
    ],
)
def test_broken_torch_or_device_is_a_problem(monkeypatch: pytest.MonkeyPatch, error: Exception, advice: str) -> None:
    def broken() -> GpuStatus:
        raise error

    monkeypatch.setattr("spmoe.backends.probe.gpu_status", broken)
    findings = {finding.check: finding for finding in run_checks(measure=False)}
    assert findings["gpu"].verdict is Verdict.PROBLEM
    assert str(error) in findings["gpu"].text
    assert advice in str(findings["gpu"].advice)
    assert {"ram", "cpu", "disk-SPMOE_HOME", "cache"} <= findings.keys(), "the other checks run"


def test_gpu_checks_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spmoe.backends.probe.gpu_status", lambda: GpuStatus("12.8", H200, 1, None, True))
    monkeypatch.setattr("spmoe.backends.probe.kernel_error", lambda device: 0.001)
    monkeypatch.setattr("spmoe.backends.devices.link_bandwidth", lambda device, pinned=True: 5e10 if pinned else 1e10)
    monkeypatch.setattr("spmoe.backends.devices.memory_bandwidth", lambda device: 4.2e12)
    monkeypatch.setattr("spmoe.backends.probe.pin_and_unpin", lambda nbytes: None)
    monkeypatch.setattr(doctor, "measure_read_speed", lambda directory: FAST)
    findings = {finding.check: finding for finding in run_checks()}
    assert "50.0 GB/s from pinned memory, 10.0 GB/s from pageable memory" in findings["link"].text
    assert "4.20 TB/s in GPU memory" in findings["memory-bandwidth"].text
    assert findings["pinned-memory"].values["tested_bytes"] > 0
    for check in ("gpu", "gpu-driver", "compute-capability", "kernels", "link"):
        assert findings[check].verdict is Verdict.OK, findings[check]

    def refuse(nbytes: int) -> None:
        raise OSError("cannot allocate")

    def fail(device: Any) -> float:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr("spmoe.backends.probe.pin_and_unpin", refuse)
    monkeypatch.setattr("spmoe.backends.probe.kernel_error", fail)
    found = list(run_checks())
    assert worst(found) is Verdict.PROBLEM
    assert {verdict for check, verdict in verdicts(found).items() if check in ("kernels", "pinned-memory")} == {
        Verdict.PROBLEM
    }


def test_unwritable_home_is_found_while_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(directory: Path) -> ReadSpeed:
        raise OSError(30, os.strerror(30))

    monkeypatch.setattr(doctor, "measure_read_speed", refuse)
    machine = doctor._Machine(measure=True)
    machine.gpu_status = GpuStatus(None, None, 0, "none")
    found = verdicts(list(doctor._check_disks(machine)))
    assert found["disk-SPMOE_HOME"] is Verdict.PROBLEM


def test_worst_verdict() -> None:
    ok, note, problem = (Finding("x", verdict, "") for verdict in (Verdict.OK, Verdict.NOTE, Verdict.PROBLEM))
    assert worst([]) is worst([ok]) is Verdict.OK
    assert worst([ok, note]) is Verdict.NOTE
    assert worst([problem, note, ok]) is Verdict.PROBLEM
