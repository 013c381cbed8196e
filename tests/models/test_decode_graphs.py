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
from spmoe.models.decode_graphs import DecodeGraphs

inputs = pytest.importorskip("spmoe.backends.kernels.inputs", reason="no Triton")


class OnceRecorder:
    """Runs what it is to record, and forgets it, as a graph does: only addresses are left."""

    turns = 0

    def be_patient(self, patient: bool) -> None:
        pass

    def while_waiting(self) -> None:
        pass

    def wait_and_pump(self, event: SimpleNamespace) -> None:
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
    monkeypatch.setattr(
        "spmoe.models.decode_graphs.pinned_zeros", lambda *size, dtype=torch.int64: torch.zeros(*size, dtype=dtype)
    )
    for name in ("load_inputs", "load_chained_inputs", "append_token"):
        monkeypatch.setattr(f"spmoe.models.decode_graphs.{name}", lambda *args: None)


def test_inputs_live_as_long_as_the_recording() -> None:
    """A replay writes tokens and positions to where they were recorded, whoever has been given that memory since."""
    model = Model()
    decode_graphs = DecodeGraphs(model, lambda observer, on_layers: nullcontext(), OnceRecorder())  # type: ignore[arg-type]
    kv: Any = SimpleNamespace(length=3, cache=None, decode_graphs={}, advance=lambda rows: None)
    decode_graphs.forward([1, 2], kv, 2, None)
    decode_graphs.greedy([1], kv, [None, None], 8)()
    gc.collect()
    assert len(model.given) == 9
    assert all(tensor() is not None for tensor in model.given)
    kv.decode_graphs.clear()
    gc.collect()
    assert all(tensor() is None for tensor in model.given), "a state that is gone keeps nothing"


class Counted(OnceRecorder):
    """Notes which rows are begun."""

    def __init__(self) -> None:
        self.begun: list[int] = []

    def record(self, forward: Callable[[], Tensor]) -> tuple[Recording, Tensor]:
        recording, logits = super().record(forward)
        recording.pieces.append(lambda: self.begun.append(len(logits)))
        return recording, logits


def state(length: int = 3) -> Any:
    return SimpleNamespace(length=length, cache=None, decode_graphs={}, advance=lambda rows: None)


@pytest.fixture
def two() -> tuple[Counted, DecodeGraphs, DecodeGraphs]:
    """A draft and a target that follows it, on one recorder."""
    recorder = Counted()
    draft, target = (DecodeGraphs(Model(), lambda observer, on_layers: nullcontext(), recorder) for _ in range(2))  # type: ignore[arg-type]
    target.leader = draft
    return recorder, draft, target


def begin(draft: DecodeGraphs, target: DecodeGraphs, kv: Any) -> list[int]:
    fetch = draft.greedy([5], state(), [None] * 3, 8)
    target.begin(5, 3, kv, None)
    return fetch()


@pytest.mark.parametrize("between", ["nothing", "a draft", "another forward", "longer", "other tokens", "other token"])
def test_what_was_begun_counts_only_if_it_is_what_is_asked_for_and_nothing_came_between(
    two: tuple[Counted, DecodeGraphs, DecodeGraphs], between: str
) -> None:
    recorder, draft, target = two
    kv = state()
    tokens = [5, *begin(draft, target, kv)]
    if between == "a draft":
        draft.greedy([5], state(), [None] * 3, 8)()
    elif between == "another forward":
        target.forward(tokens, state(), 4, None)
    elif between == "longer":
        kv.length += 1
    elif between == "other tokens":
        tokens[2] += 1
    elif between == "other token":
        tokens[0] += 1
    recorder.begun.clear()
    target.forward(tokens, kv, 4, None)
    assert recorder.begun == ([] if between == "nothing" else [4])
    recorder.begun.clear()
    target.forward(tokens, kv, 4, None)
    assert recorder.begun == [4], "once"


def test_what_was_begun_is_not_finished_with_tokens_of_the_draft_before(
    two: tuple[Counted, DecodeGraphs, DecodeGraphs],
) -> None:
    """Of its own draft nobody knows what it chose, as long as it is not fetched."""
    recorder, draft, target = two
    kv = state()
    tokens = [5, *begin(draft, target, kv)]
    draft.greedy([5], state(), [None] * 3, 8)
    target.begin(5, 3, kv, None)
    recorder.begun.clear()
    target.forward(tokens, kv, 4, None)
    assert recorder.begun == [4]


def test_nothing_is_begun_without_a_draft_that_was_launched_just_before(
    two: tuple[Counted, DecodeGraphs, DecodeGraphs],
) -> None:
    recorder, draft, target = two
    target.begin(5, 3, state(), None)
    assert recorder.begun == []
    draft.greedy([5], state(), [None] * 2, 8)
    target.begin(5, 3, state(), None)
    assert recorder.begun == [1, 1], "of another length"
    target.forward([5, 6], state(), 2, None)
    target.begin(5, 2, state(), None)
    assert recorder.begun == [1, 1, 2], "something came between"


def test_what_is_best_is_known_of_the_newest_logits_only(two: tuple[Counted, DecodeGraphs, DecodeGraphs]) -> None:
    _, draft, target = two
    kv = state()
    older, newer = (target.forward([5] * rows, kv, rows, None) for rows in (3, 2))
    assert target.argmax(older) is None
    assert target.argmax(newer.clone()) is None
    assert target.argmax(newer) == ([0.0, 0.0], [0, 0])
    assert draft.argmax(newer) is None
