"""Stall time of the compute stream, read while the device goes on; without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="no triton")

from spmoe.backends.cuda import CudaCopyStream


class FakeWaits:
    """Waits of the compute stream. The first `ended` of them have ended; after `queries` queries all have."""

    def __init__(self, ended: int, queries: int) -> None:
        self._ended = ended
        self._queries = queries

    def events(self, number: int) -> Any:
        """Return the events before and after a wait, which lasts 1, 10, 100 or 1000 ms."""

        def query() -> bool:
            self._queries -= 1
            return number < self._ended or self._queries < 0

        return SimpleNamespace(elapsed_time=lambda after: 10.0**number), SimpleNamespace(query=query)


@pytest.mark.parametrize("ended", range(5))
@pytest.mark.parametrize("queries", range(7))
def test_every_stall_is_counted_once(monkeypatch: pytest.MonkeyPatch, ended: int, queries: int) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    copy_stream = CudaCopyStream(runtime=None, device=torch.device("cpu"))  # type: ignore[arg-type]
    waits = FakeWaits(ended, queries)
    copy_stream._waits = [waits.events(number) for number in range(4)]
    taken = [copy_stream.take_stall_seconds() for _ in range(9)]
    assert round(sum(taken) * 1000) == 1111
