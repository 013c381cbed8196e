"""Probes of the device: why there is none, nvidia-smi, architectures of a torch build, and measurements on CUDA."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import torch

from spmoe.backends import devices, probe
from spmoe.backends.probe import Pcie, supports_capability

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize(
    ("architectures", "capability", "supported"),
    [
        (["sm_80", "sm_90"], (9, 0), True),
        (["sm_80", "sm_90"], (8, 9), True),
        (["sm_86"], (8, 0), False),
        (["sm_80", "sm_90"], (12, 0), False),
        (["sm_80", "compute_90"], (12, 0), True),
        (["sm_90a"], (9, 0), True),
        (["compute_120"], (9, 0), False),
        (["sm_120"], (12, 0), True),
        (["gfx90a", "sm_"], (9, 0), False),
        ([], (9, 0), False),
    ],
)
def test_supported_architectures(architectures: list[str], capability: tuple[int, int], supported: bool) -> None:
    assert supports_capability(architectures, capability) is supported


def test_pcie_rate() -> None:
    assert Pcie(4, 16, 16).bytes_per_second == pytest.approx(31.5e9, rel=0.01)
    assert Pcie(99, 16, 16).bytes_per_second == Pcie(6, 16, 16).bytes_per_second


@pytest.mark.parametrize(
    ("output", "found"),
    [
        ("570.86.15, 5, 16, 16\n", ("570.86.15", Pcie(5, 16, 16))),
        ("570.86.15, [N/A], 16, 16\n", ("570.86.15", None)),
        ("570.86.15\n", ("570.86.15", None)),
        ("", (None, None)),
    ],
)
def test_nvidia_smi(monkeypatch: pytest.MonkeyPatch, output: str, found: tuple[str | None, Pcie | None]) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, output, "")

    monkeypatch.setattr(subprocess, "run", run)
    assert probe._query_smi("abc") == found
    assert commands[0][-2:] == ["-i", "GPU-abc"]


@pytest.mark.parametrize("error", [FileNotFoundError(), subprocess.TimeoutExpired("nvidia-smi", 10)])
def test_nvidia_smi_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def run(command: list[str], **options: Any) -> None:
        raise error

    monkeypatch.setattr(subprocess, "run", run)
    assert probe._query_smi("") == (None, None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_missing_gpu_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    status = probe.gpu_status()
    assert (status.gpu, status.count) == (None, 0)
    assert status.reason
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert probe.gpu_status().reason, "a CUDA build without a driver"
    monkeypatch.setattr(torch.version, "hip", "6.0", raising=False)
    assert "ROCm" in str(probe.gpu_status().reason)


def test_memory_bandwidth_of_the_host() -> None:
    assert devices.memory_bandwidth(torch.device("cpu")) > 1e8


@pytest.mark.gpu
@needs_gpu
def test_gpu_properties() -> None:
    status = probe.gpu_status()
    assert status.gpu is not None
    assert status.count >= 1
    assert status.gpu.capability == torch.cuda.get_device_capability()
    assert 0 < status.gpu.memory_free <= status.gpu.memory_total
    assert status.gpu.in_torch_build


@pytest.mark.gpu
@needs_gpu
def test_bandwidths_on_cuda() -> None:
    device = torch.device("cuda")
    pinned, pageable = devices.link_bandwidth(device), devices.link_bandwidth(device, pinned=False)
    assert 1e9 < pinned < devices.memory_bandwidth(device)
    assert 1e8 < pageable < 1.5 * pinned


@pytest.mark.gpu
@needs_gpu
def test_pinning_and_kernels_on_cuda() -> None:
    probe.pin_and_unpin(64 * 2**20)
    probe.pin_and_unpin(64 * 2**20)
    assert probe.kernel_error(torch.device("cuda")) < 0.02


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")
@pytest.mark.usefixtures("fixed_interpreter")
def test_kernel_error_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    assert probe.kernel_error(torch.device("cpu")) < 0.02
    plain = "spmoe.backends.kernels.dense.small_batch_linear_plain"
    monkeypatch.setattr(plain, lambda x, weight: 1.1 * (x.float() @ weight.float().T))
    assert probe.kernel_error(torch.device("cpu")) > 0.02, "a wrong result is noticed"
