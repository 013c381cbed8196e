"""Recorded forwards: what they read and write stays theirs for as long as they may be replayed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from spmoe.backends.graphs import Recording
from spmoe.models.attention import current_length
from spmoe.models.programs import Programs

inputs = pytest.importorskip("spmoe.backends.kernels.inputs", reason="no Triton")


class OnceRecorder:
    """Runs what it is to record, and forgets it, as a graph does: only addresses are left."""

    def be_patient(self, patient: bool) -> None:
        pass

    def while_waiting(self) -> None:
        pass

    def sit_out(self, event: SimpleNamespace) -> None:
        pass

    def record(self, forward: Callable[[], Tensor]) -> tuple[Recording, Tensor]:
        return Recording(), forward()

    def new_event(self) -> SimpleNamespace:
        return SimpleNamespace(record=lambda: None, synchronize=lambda: None)


class Model:
    """Remembers, weakly, what it was given."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.given: list[weakref.ref[Tensor]] = []

    def __call__(self, input_ids: Tensor, position_ids: Tensor, **kwargs: Any) -> SimpleNamespace:
        length = current_length()
        assert length is not None
        self.given += [weakref.ref(tensor) for tensor in (input_ids, position_ids, length)]
        return SimpleNamespace(logits=torch.zeros(1, input_ids.shape[1], 8))


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spmoe.models.programs.page_locked", lambda *size, dtype=torch.int64: torch.zeros(*size))
    for name in ("stage", "stage_chained", "go_on"):
        monkeypatch.setattr(f"spmoe.models.programs.{name}", lambda *args: None)


def test_inputs_live_as_long_as_the_recording() -> None:
    """A replay writes tokens and positions to where they were recorded, whoever has been given that memory since."""
    model = Model()
    programs = Programs(model, lambda watch, on_slab: nullcontext(), OnceRecorder())  # type: ignore[arg-type]
    kv: Any = SimpleNamespace(length=3, cache=None, programs={}, advance=lambda rows: None)
    programs.forward([1, 2], kv, 2, None)
    programs.greedy([1], kv, [None, None], 8)()
    gc.collect()
    assert len(model.given) == 9
    assert all(tensor() is not None for tensor in model.given)
    kv.programs.clear()
    gc.collect()
    assert all(tensor() is None for tensor in model.given), "a state that is gone keeps nothing"
