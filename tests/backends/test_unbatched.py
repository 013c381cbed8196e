"""Copies to a device that may not share a submission, for measuring what sharing is worth."""

from __future__ import annotations

import pytest
from device_double import Device, Memory, WatchedTransfer

from spmoe.experts.transfer import CopyJob
from spmoe.types import ExpertKey


@pytest.mark.parametrize("urgent", [True, False])
@pytest.mark.parametrize("batched", [True, False])
def test_small_blobs_share_a_submission_only_where_they_may(urgent: bool, batched: bool) -> None:
    memory = Memory(slots=6, nbytes=2, experts=[8])
    device = Device(memory, chunk=64, window=8, seed=0)
    transfer = WatchedTransfer(device, memory, chunk=64, window=8)
    submitted: list[int] = []
    copy = device.copy

    def counted(pieces: list[object]) -> object:
        submitted.append(len(pieces))
        return copy(pieces)  # type: ignore[arg-type]

    device.copy = counted  # type: ignore[method-assign, assignment]
    transfer.batched = batched
    handles = transfer.copy([CopyJob(ExpertKey(0, e), e) for e in range(4)], urgent=urgent)
    transfer.pump()
    with device.running():
        for handle in handles:
            handle.wait()
        device.until_idle()
        transfer.close()
    assert submitted == ([4] if batched else [1] * 4)
    assert all(memory.content(slot) == memory.blobs[ExpertKey(0, slot)] for slot in range(4))
    assert not device.failures
