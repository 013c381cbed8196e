"""CUDA graph capture goes on after a capture that failed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from spmoe.backends.graphs import CapturedGraph, CudaGraphRecorder, Phase

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

FAILURES: dict[str, Callable[[Tensor], Tensor]] = {
    "copy from pageable memory": lambda x: x + torch.ones(4).to("cuda"),
    "wait for the device": lambda x: x * float(x.sum()),  # after which PyTorch cannot even end the capture
}


def replay(graph: CapturedGraph) -> None:
    graph.launch_first()
    graph.launch_rest()


@pytest.mark.parametrize("failure", FAILURES)
def test_captures_and_replays_go_on_after_a_failed_capture(failure: str) -> None:
    recorder, x = CudaGraphRecorder(torch.device("cuda")), torch.ones(4, device="cuda")
    earlier, before = recorder.capture(lambda: x * 2)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="captur"):
            recorder.capture(lambda: FAILURES[failure](x))
        assert recorder.phase is Phase.EAGER
        later, after = recorder.capture(lambda: x * 3)
        x.fill_(5)
        replay(earlier)
        replay(later)
        assert (before.tolist(), after.tolist()) == ([10.0] * 4, [15.0] * 4)
