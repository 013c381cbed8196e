"""The fake CUDA device detects the errors that tests use it for."""

from __future__ import annotations

import doctest
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fake_cuda
from fake_cuda import UNINITIALIZED, CheckedTransfer, FakeCudaDevice, FakeGraphRecorder, FakeMemory
from spmoe.backends.graphs import Phase
from spmoe.errors import SpmoeError
from spmoe.experts.transfer import CopyJob
from spmoe.types import ExpertKey

A, B = ExpertKey(0, 0), ExpertKey(0, 1)


def make(**options: int) -> tuple[FakeMemory, FakeCudaDevice, CheckedTransfer]:
    memory = FakeMemory(slots=2, nbytes=8, experts=[4])
    device = FakeCudaDevice(memory, **options)  # type: ignore[arg-type]
    return memory, device, CheckedTransfer(device, memory, chunk=8, window=2)


def test_example_of_the_module_runs() -> None:
    found = doctest.testmod(fake_cuda)
    assert (found.failed, found.attempted > 5) == (0, True)


# ---- streams


def test_kernel_that_does_not_wait_for_its_copy_fails() -> None:
    _, device, transfer = make()
    transfer.copy([CopyJob(A, 0)], urgent=True)
    device.launch([(A, 0)])
    with pytest.raises(AssertionError, match="a kernel reads"):
        device.run_compute()


def test_kernel_whose_slot_is_overwritten_fails() -> None:
    _, device, transfer = make()
    transfer.copy([CopyJob(A, 0)], urgent=True)
    device.finish()
    device.launch([(A, 0)])
    transfer.copy([CopyJob(B, 0)], urgent=True)  # protect_slots was not called
    device.run_copies()
    with pytest.raises(AssertionError, match="a kernel reads"):
        device.run_compute()


def test_streams_that_wait_for_each_other_are_detected() -> None:
    _, device, transfer = make()
    (handle,) = transfer.copy([CopyJob(A, 0)], urgent=True)
    device.compute_wait_event(event := fake_cuda.FakeEvent(device))
    device.wait_event(device.record_compute_event())
    assert not event.query()
    with pytest.raises(AssertionError, match="wait for each other"):
        device.finish()
    assert handle.ready(), "the copy was before the wait"


def test_copies_outside_the_memory_fail() -> None:
    memory, _, transfer = make()
    (handle,) = transfer.copy([CopyJob(A, memory.slot_count)], urgent=True)
    with pytest.raises(SpmoeError, match="outside the slots"):
        handle.wait()
    assert memory.content(0) == memory.content(1) == UNINITIALIZED * memory.nbytes


@pytest.mark.parametrize(("limits", "error"), [({"window": 1}, "2 chunks of prefetches"), ({"chunk": 7}, "8 bytes")])
@pytest.mark.parametrize("urgent", [True, False])
def test_prefetches_beyond_the_limits_are_errors(limits: dict[str, int], error: str, urgent: bool) -> None:
    _, device, transfer = make(**limits)
    transfer.copy([CopyJob(A, 0), CopyJob(B, 1)], urgent=urgent)
    assert bool(device.errors) != urgent
    assert all(error in str(found) for found in device.errors)


def test_copies_that_nobody_asked_for_are_errors() -> None:
    _, device, transfer = make()
    device.may_copy = lambda job: job.key == A
    transfer.copy([CopyJob(A, 0)], urgent=True)
    assert not device.errors
    transfer.copy([CopyJob(B, 1)], urgent=True)
    assert len(device.errors) == 1


def test_immediate_device_runs_everything_at_once() -> None:
    memory = FakeMemory(slots=2, nbytes=8, experts=[4])
    device = FakeCudaDevice(memory, immediate=True)
    transfer = CheckedTransfer(device, memory, chunk=4, window=1)
    (handle,) = transfer.copy([CopyJob(A, 1)], urgent=True)
    assert handle.ready()
    assert memory.content(1) == memory.blobs[A]
    device.launch([(A, 1)])
    with pytest.raises(AssertionError, match="a kernel reads"):
        device.launch([(B, 1)])
    event = fake_cuda.FakeEvent(device)
    assert not event.query()
    event.record()
    assert event.query()


# ---- graphs


def forward_of(recorder: FakeGraphRecorder, log: list[str], x: Tensor) -> Callable[[], Tensor]:
    def forward() -> Tensor:
        log.append(f"first ({recorder.phase.value})")
        y = x * 2
        recorder.split(lambda: log.append("host"))
        log.append("second")
        return y + 1

    return forward


def test_graphs_run_when_they_are_launched() -> None:
    recorder, log, x = FakeGraphRecorder(), list[str](), torch.ones(2)
    graph, result = recorder.capture(forward_of(recorder, log, x))
    assert log == ["first (warm-up)", "second", "first (capture)", "second"], "the host works in replays only"
    log.clear()
    x.fill_(5)
    graph.launch_first()
    assert log == ["first (capture)"]
    assert result.isnan().all(), "the result is not there yet"
    graph.launch_rest()
    assert log[1:] == ["first (capture)", "host", "second"]
    assert result.tolist() == [11.0, 11.0]
    assert (recorder.captured, recorder.replayed, recorder.phase) == (1, 1, Phase.EAGER)


def test_rest_of_a_forward_fails_after_the_launch_of_another_graph() -> None:
    recorder, x = FakeGraphRecorder(), torch.ones(2)
    first, second = (recorder.capture(forward_of(recorder, [], x))[0] for _ in range(2))
    first.launch_first()
    second.launch_first()
    with pytest.raises(AssertionError, match="another graph"):
        first.launch_rest()
    second.launch_rest()
