"""Experts on the CPU beside a device: rows go there and back through pinned memory, in the right order."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from fake_cuda import FakeCudaDevice, FakeRowStream, run_with_timeout
from spmoe.experts.cpu_path import CpuThread
from spmoe.experts.memory_store import MemoryStore
from spmoe.experts.store import StoreSpec
from spmoe.formats.dense import Dense
from spmoe.formats.expert import ExpertFormat
from spmoe.types import ExpertKey

pytest.importorskip("triton", reason="no triton")

from spmoe.backends.cpu_experts import CpuExperts, CpuRows, cpu_thread

ROWS, TOP_K, EXPERTS, HIDDEN, FFN = 5, 2, 6, 8, 12
FORMAT = ExpertFormat(Dense(torch.float32), torch.float32)


class Layer:
    """A layer's module, blobs and rows; the device has rows only once the compute stream has run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> None:
        torch.manual_seed(seed)
        monkeypatch.setattr(
            "spmoe.backends.cpu_experts.pinned_zeros",
            lambda *size, dtype=torch.int64: torch.zeros(*size, dtype=dtype),  # no memory can be pinned here
        )
        shapes = {"gate_up_proj": (2 * FFN, HIDDEN), "down_proj": (HIDDEN, FFN)}
        self.store = MemoryStore(StoreSpec("0" * 64, FORMAT.layout(shapes), (EXPERTS,)))
        self.weights = {}
        for expert in range(EXPERTS):
            dense = {name: torch.randn(shape) for name, shape in shapes.items()}
            FORMAT.convert(dense, self.store.spec.layout.views(self.store.blob(ExpertKey(0, expert))))
            self.weights[expert] = dense
        self.module: Any = SimpleNamespace(
            spmoe_shapes={name: (EXPERTS, *shape) for name, shape in shapes.items()},
            has_gate=True,
            has_bias=False,
            is_transposed=False,
            _apply_gate=self._gate,
            act_fn=silu,
        )
        self.index = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(ROWS)])
        self.device = FakeCudaDevice()
        self.cpu = CpuExperts(self.store, FORMAT, FakeRowStream(self.device))

    @staticmethod
    def _gate(both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        return silu(gate) * up

    def rows(self, hidden: Tensor, weights: Tensor) -> CpuRows:
        return CpuRows(self.cpu, 0, self.module, self.index.numpy(), lambda: self.cpu.send_now(hidden, weights))

    def expected(self, hidden: Tensor, weights: Tensor, experts: list[int]) -> Tensor:
        """Return the sums of each pair of these experts; NaN for others."""  # [1, rows * top_k, hidden]
        sums = torch.full((1, ROWS * TOP_K, HIDDEN), torch.nan)
        for row, position in np.ndindex(ROWS, TOP_K):
            expert = int(self.index[row, position])
            if expert in experts:
                dense = self.weights[expert]
                inner = self._gate(linear(hidden[row], dense["gate_up_proj"]))
                sums[0, row * TOP_K + position] = weights[row, position] * linear(inner, dense["down_proj"])
        return sums


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, HIDDEN), torch.rand(ROWS, TOP_K)


def test_two_layers_share_the_memory_without_reading_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies and kernels run late: the CPU waits for the rows, and the second layer for the first one's kernel."""

    def body() -> None:
        layer = Layer(monkeypatch)
        worker, used = CpuThread(), sorted(set(layer.index.flatten().tolist()))[:3]
        found = []
        with layer.device.running():
            for _ in range(8):
                hidden, weights = inputs()
                rows, sums = layer.rows(hidden, weights), torch.full((1, ROWS * TOP_K, HIDDEN), torch.nan)
                rows.begin(used)
                jobs = [worker.submit(rows.work(expert), rows.rows[expert]) for expert in used]
                for job in jobs:
                    job.wait(lambda: None)
                    assert job.error is None
                computed = rows.results(used)
                rows.place(computed.values, [(0, sums)])
                found.append((hidden, weights, sums))  # the host goes on before the kernel has run
            layer.device.wait_until_idle()
        worker.close()
        for hidden, weights, sums in found:
            torch.testing.assert_close(sums, layer.expected(hidden, weights, used), equal_nan=True)
        assert not layer.device.errors

    run_with_timeout(body)


def test_fake_device_finds_a_missing_wait_for_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would fail if the CPU did not wait for the event behind the copy."""
    layer = Layer(monkeypatch)
    (hidden, weights), used = inputs(), [int(layer.index[0, 0])]
    rows, sums = layer.rows(hidden, weights), torch.full((1, ROWS * TOP_K, HIDDEN), torch.nan)
    rows.begin(used)
    assert rows._sent is not None
    rows._sent = (rows._sent[0], SimpleNamespace(query=lambda: True, synchronize=lambda: None))
    rows.work(used[0])()
    rows.place(rows.results(used).values, [(0, sums)])
    layer.device.finish()
    assert not torch.allclose(sums, layer.expected(hidden, weights, used), equal_nan=True)


def test_fake_device_finds_a_missing_wait_for_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would fail if the next layer did not wait for the event behind the kernel."""
    layer = Layer(monkeypatch)
    (hidden, weights), used = inputs(), layer.index[0].tolist()
    rows, sums = layer.rows(hidden, weights), torch.full((1, ROWS * TOP_K, HIDDEN), torch.nan)
    rows.begin(used[:1])
    layer.device.finish()
    rows.work(used[0])()
    rows.place(rows.results(used[:1]).values, [(0, sums)])
    layer.cpu._placed = None
    layer.rows(hidden, weights).begin(used[1:])
    layer.device.finish()
    assert not torch.allclose(sums, layer.expected(hidden, weights, used[:1]), equal_nan=True)


def test_results_of_experts_that_have_failed_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer(monkeypatch)
    hidden, weights = inputs()
    used = sorted(set(layer.index.flatten().tolist()))[:3]
    rows, sums = layer.rows(hidden, weights), torch.full((1, ROWS * TOP_K, HIDDEN), torch.nan)
    rows.begin(used)
    layer.device.finish()
    for expert in (used[0], used[2]):
        rows.work(expert)()
    rows.place(rows.results([used[0], used[2]]).values, [(0, sums)])
    layer.device.finish()
    expected = layer.expected(hidden, weights, [used[0], used[2]])
    torch.testing.assert_close(sums, expected, equal_nan=True)


def test_layers_share_the_memory_inside_and_outside_of_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager forwards run inside, and the host's work between two graphs outside."""
    layer = Layer(monkeypatch)
    for inference in (True, False, True):
        (hidden, weights), used = inputs(), sorted(set(layer.index.flatten().tolist()))[:3]
        sums = torch.full((1, ROWS * TOP_K, HIDDEN), torch.nan)
        with torch.inference_mode(inference):
            rows = layer.rows(hidden, weights)
            rows.begin(used)
            layer.device.finish()
            for expert in used:
                rows.work(expert)()
            computed = rows.results(used[1:])
        rows.place(computed.values, [(0, sums)])
        layer.device.finish()
        torch.testing.assert_close(sums, layer.expected(hidden, weights, used[1:]), equal_nan=True)


def test_thread_has_its_own_number_of_intra_op_threads() -> None:
    """The thread that launches kernels, and threads that start later, keep theirs."""
    before, seen = torch.get_num_threads(), list[int]()
    worker = cpu_thread(before + 1)
    worker.submit(lambda: seen.append(torch.get_num_threads()) or 0.0, 1).wait(lambda: None)  # type: ignore[func-returns-value]
    other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    other.start()
    other.join()
    worker.close()
    assert seen == [before + 1, before]
    assert torch.get_num_threads() == before
