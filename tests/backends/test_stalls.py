"""What compute has waited for copies, asked while the device goes on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="no triton")

from spmoe.backends.cuda import CudaCopyStream


class Device:
    """Some waits are over; after a number of questions all are."""

    def __init__(self, over: int, questions: int) -> None:
        self._over, self._questions = over, questions

    def wait(self, number: int) -> Any:
        def query() -> bool:
            self._questions -= 1
            return number < self._over or self._questions < 0

        # milliseconds, a digit for each
        return SimpleNamespace(elapsed_time=lambda after: 10.0**number), SimpleNamespace(query=query)


@pytest.mark.parametrize("over", range(5))
@pytest.mark.parametrize("questions", range(7))
def test_every_wait_is_counted_once(monkeypatch: pytest.MonkeyPatch, over: int, questions: int) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    copy_stream = CudaCopyStream(driver=None, device=torch.device("cpu"))  # type: ignore[arg-type]
    device = Device(over, questions)
    copy_stream._waits = [device.wait(number) for number in range(4)]
    taken = [copy_stream.take_stall_seconds() for _ in range(9)]
    assert round(sum(taken) * 1000) == 1111
