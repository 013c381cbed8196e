"""Recording as CUDA graphs, where something goes wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from spmoe.backends.graphs import GraphRecorder, Phase

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

FAILURES: dict[str, Callable[[Tensor], Tensor]] = {
    "a copy that recording forbids": lambda x: x + torch.ones(4).to("cuda"),
    "a question to the host": lambda x: x * float(x.sum()),  # after which PyTorch cannot even end the graph
}


@pytest.mark.parametrize("failure", FAILURES)
def test_after_a_failure_everything_goes_on(failure: str) -> None:
    recorder, x = GraphRecorder(torch.device("cuda")), torch.ones(4, device="cuda")
    earlier, before = recorder.record(lambda: x * 2)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="captur"):
            recorder.record(lambda: FAILURES[failure](x))
        assert recorder.phase is Phase.EAGER
        later, after = recorder.record(lambda: x * 3)
        x.fill_(5)
        earlier.replay()
        later.replay()
        assert (before.tolist(), after.tolist()) == ([10.0] * 4, [15.0] * 4)
