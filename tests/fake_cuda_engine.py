"""CUDA engines on a fake device that runs everything at once, with the PyTorch twins of the kernels.

The fake device is explained in tests/fake_cuda.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fake_cuda import FakeCudaDevice, FakeGraphRecorder, FollowedRecorder

pytest.importorskip("triton", reason="no triton")

from spmoe.backends.cpu_experts import CpuExperts, cpu_thread
from spmoe.backends.cuda import CudaBackend, CudaBlobAddresses, CudaRowStream
from spmoe.backends.cuda_memory import DeviceSlots, HostStore
from spmoe.backends.cuda_transfer import CudaTransfer
from spmoe.backends.kernels import attention, dense, experts, inputs, packed, residency
from spmoe.backends.residency import CudaResidency, FollowedForward
from spmoe.engine import build
from spmoe.engine.runtime import ExpertRuntime
from spmoe.experts.cpu_path import CpuPath
from spmoe.experts.paths import PathChooser


@dataclass
class FakeCuda:
    """The fake device and recorder that engines use; replace them before an engine is built."""

    device: FakeCudaDevice
    recorder: FakeGraphRecorder
    cpu_share: float | None = None  # of missing experts that the CPU computes; None: as it chooses
    copy_budget: int = 2**30  # bytes of copies of experts for the CPU


class JoinedResidency(CudaResidency):
    """Also waits for the thread of the recorder, in which its forwards run."""

    def __init__(
        self,
        experts: Sequence[int],
        count: int,
        device: torch.device,
        transfer: CudaTransfer,
        recorder: FollowedRecorder,
    ) -> None:
        super().__init__(experts, count, device, transfer)
        self._recorder = recorder
        self.followed = 0  # forwards

    def launch(self, forward: FollowedForward) -> None:
        super().launch(forward)
        self._recorder.launches_followed = True

    def follow(self) -> bool:
        is_valid = super().follow()
        self.followed += is_valid
        self._recorder.join()
        return is_valid

    def abort(self) -> None:
        super().abort()
        self._recorder.join()


PLAIN_KERNELS = (  # the module that calls the kernels, the module that has their twins, and the kernels
    ("backends.cuda", experts, ("run_expert_batch", "reduce_experts", "place_results")),
    ("backends.cuda", inputs, ("take_batch",)),
    ("models.decode_graphs", inputs, ("load_chained_inputs", "append_token")),
    ("backends.kernels.attention", attention, ("append_kv", "decode_attention")),
    ("backends.cuda", packed, ("dequantize_matrix",)),
    ("backends.kernels.experts", experts, ("run_expert_batch", "reduce_experts")),  # of quantized drafts
    ("backends.kernels.dense", dense, ("norm_and_route_layers",)),
    ("backends.residency", residency, ("check_residency", "await_missing", "end_forward")),
)


def use_fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Build engines on a fake device, with the PyTorch twins of the kernels."""
    fake = FakeCuda(FakeCudaDevice(immediate=True), FakeGraphRecorder())
    for user, kernels, names in PLAIN_KERNELS:
        for name in names:
            monkeypatch.setattr(f"spmoe.{user}.{name}", getattr(kernels, f"{name}_plain"))
    monkeypatch.setattr("spmoe.models.decode_graphs.load_inputs", lambda *args: fake.recorder.load_inputs(*args))
    monkeypatch.setattr("spmoe.backends.quantize.kernels_run_on", lambda device: True)
    monkeypatch.setattr("spmoe.models.runner.fuse", lambda model: lambda: None)  # tested elsewhere, and slow here
    for user in (
        "backends.cuda",
        "backends.cpu_experts",
        "backends.residency",
        "models.decode_graphs",
    ):  # without CUDA no memory can be pinned
        monkeypatch.setattr(
            f"spmoe.{user}.pinned_zeros", lambda *size, dtype=torch.int64: torch.zeros(*size, dtype=dtype)
        )

    def make_runtime(
        config: Any, models: Any, count: int, store: Any = None, raise_if_cancelled: Any = None, copies: int = 0
    ) -> ExpertRuntime:
        slots = DeviceSlots(count, models.spec, torch.device("cpu"))
        store = HostStore(models.spec, runtime=None, pinned=False)  # type: ignore[arg-type]
        with models.experts() as fill:
            store.fill(fill, lambda done, total: None)
        cpu, cpu_path = None, None
        if config.cpu_experts != "off":
            cpu = CpuExperts(store, models.expert_format, CudaRowStream(fake.recorder), fake.copy_budget)
            cpu_path = CpuPath(cpu_thread(config.cpu_experts), PathChooser(fake.cpu_share))
        transfer = CudaTransfer(fake.device, CudaBlobAddresses(store, slots), chunk=1000)
        residency = None  # also for `auto`: tests of the host's path outnumber those of the device's, which ask for it
        if config.residency_check == "device" and count < models.spec.count:
            fake.recorder = FollowedRecorder(fake.device)
            residency = JoinedResidency(models.spec.experts, count, torch.device("cpu"), transfer, fake.recorder)
        backend = CudaBackend(slots, fake.recorder, models.expert_format, cpu, residency)
        backend.synchronize = fake.recorder.wait  # type: ignore[method-assign]
        recorder = None if config.enforce_eager else fake.recorder
        return ExpertRuntime(slots, transfer, backend, recorder, backend, store, cpu_path, residency)

    monkeypatch.setattr(build, "make_runtime", make_runtime)
    return fake
