"""Captured forwards: they keep their tensors alive, and replay what run-ahead has not launched."""

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

from spmoe.backends.graphs import CaptureContext, CapturedGraph
from spmoe.experts.run_ahead import RunAhead
from spmoe.models.attention import current_ranges
from spmoe.models.decode_graphs import DecodeGraphs
from spmoe.models.ragged import RaggedPart

inputs = pytest.importorskip("spmoe.backends.kernels.inputs", reason="no Triton")


class RunOnceRecorder:
    """Runs the forward once at capture and forgets it, as a graph does: only addresses are left."""

    def __init__(self) -> None:
        self.launched: list[int] = []  # rows of each forward that is launched

    def capture(self, forward: Callable[[], Tensor]) -> tuple[CapturedGraph, Tensor]:
        captured, logits = CapturedGraph(), forward()
        captured.pieces.append(lambda: self.launched.append(len(logits)))
        return captured, logits

    def wait(self) -> None:
        """Do nothing: work has ended when it is launched."""

    def new_event(self) -> SimpleNamespace:
        return SimpleNamespace(record=lambda: None, synchronize=lambda: None)


class Model:
    """Keeps weak references to its inputs."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.given: list[weakref.ref[Tensor]] = []

    def __call__(self, input_ids: Tensor, position_ids: Tensor, **kwargs: Any) -> SimpleNamespace:
        ranges = current_ranges()
        assert ranges is not None
        self.given += [weakref.ref(tensor) for tensor in (input_ids, position_ids, ranges)]
        return SimpleNamespace(logits=torch.zeros(1, input_ids.shape[1], 8))


@pytest.fixture(autouse=True)
def _kernels_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "spmoe.models.decode_graphs.pinned_zeros", lambda *size, dtype=torch.int64: torch.zeros(*size, dtype=dtype)
    )
    for name in ("load_inputs", "load_chained_inputs", "append_token"):
        monkeypatch.setattr(f"spmoe.models.decode_graphs.{name}", lambda *args: None)


def run_ahead() -> RunAhead:
    transfer = SimpleNamespace(wait_and_pump=lambda event: None)
    scheduler = SimpleNamespace(held=nullcontext, submit=lambda until=None: None)
    return RunAhead(transfer, scheduler)  # type: ignore[arg-type]


class Pool:
    """An arena without layers, and its scratch range."""

    def __init__(self) -> None:
        self.arena = SimpleNamespace(generation=0, layers=0)
        self.scratch = SimpleNamespace(start=0, capacity=64)


def graphs(recorder: RunOnceRecorder, ahead: RunAhead, model: Model | None = None, **chains: Any) -> DecodeGraphs:
    capture = CaptureContext(recorder, ahead, 64, **chains)  # type: ignore[arg-type]
    return DecodeGraphs(model or Model(), lambda observer, on_chunk: nullcontext(), Pool(), capture)  # type: ignore[arg-type]


class StubKv:
    """A KV cache without memory."""

    def __init__(self, start: int, length: int, capacity: int) -> None:
        self.start, self.length, self.capacity = start, length, capacity

    @property
    def range(self) -> tuple[int, int, int]:
        return self.start, self.length, self.capacity

    def advance(self, rows: int) -> None:
        """Do nothing: the length says where graphs append."""


def kv_cache(length: int = 3) -> Any:
    return StubKv(7, length, 50)


def test_inputs_live_as_long_as_the_captured_graph() -> None:
    """A replay writes tokens and positions to their captured addresses, also after that memory was freed."""
    model, kv = Model(), kv_cache()
    captured = graphs(RunOnceRecorder(), run_ahead(), model)
    captured.forward([1, 2], kv, 2, None)
    captured.launch_greedy([1], kv, [None, None], 8)()
    gc.collect()
    assert len(model.given) == 9
    assert all(tensor() is not None for tensor in model.given)
    captured.arena.generation += 1
    first = list(model.given)
    captured.forward([1, 2], kv, 2, None)
    gc.collect()
    assert len(model.given) == 12, "captured again: the memory of KV caches is another one"
    assert all(tensor() is None for tensor in first)


def test_a_batch_is_padded_by_repeating_its_last_row(pair: tuple[Any, Any, DecodeGraphs, DecodeGraphs]) -> None:
    _, _, _, target = pair
    parts = [
        RaggedPart([5, 6], StubKv(10, 3, 9), 2),  # type: ignore[arg-type]
        RaggedPart([7], StubKv(40, 8, 20), 1),  # type: ignore[arg-type]
    ]
    results = target.forward_batch(parts, None)
    assert [len(one.logits) for one in results] == [2, 1]
    graph = target.prepare_batch(4, None)
    starts, lengths, capacities = [10, 10, 40, 40], [3, 4, 8, 8], [9, 9, 20, 20]
    assert graph._inbox.tolist() == [5, 6, 7, 7, *starts, *lengths, *capacities]


@pytest.fixture
def pair() -> tuple[RunOnceRecorder, RunAhead, DecodeGraphs, DecodeGraphs]:
    """A draft and the target that verifies it, on one recorder."""
    recorder, ahead, chain = RunOnceRecorder(), run_ahead(), torch.zeros(67, dtype=torch.int64)
    return recorder, ahead, graphs(recorder, ahead, chain=chain), graphs(recorder, ahead, draft_chain=chain)


def test_draft_and_target_share_the_token_chain(pair: tuple[Any, Any, DecodeGraphs, DecodeGraphs]) -> None:
    _, _, draft, target = pair
    assert target.draft_chain is draft.chain
    assert target.chain is not draft.chain


def launch(ahead: RunAhead, draft: DecodeGraphs, target: DecodeGraphs, kv: Any) -> list[int]:
    ahead.launch_draft(1, 4, 3, lambda: draft.launch_greedy([5], kv_cache(), [None] * 3, 8))
    target.launch_verify(5, 3, kv, None)
    tokens = ahead.take_draft(1, 4, 3)
    assert tokens is not None
    return tokens


@pytest.mark.parametrize("between", ["nothing", "a draft", "a forward", "a longer KV cache", "other tokens"])
def test_first_graph_is_reused_only_if_nothing_changed(
    pair: tuple[RunOnceRecorder, RunAhead, DecodeGraphs, DecodeGraphs], between: str
) -> None:
    recorder, ahead, draft, target = pair
    kv = kv_cache()
    tokens = [5, *launch(ahead, draft, target, kv)]
    if between == "a draft":
        draft.launch_greedy([5], kv_cache(), [None] * 3, 8)()
    elif between == "a forward":
        target.forward(tokens, kv_cache(), 4, None)
    elif between == "a longer KV cache":
        kv.length += 1
    elif between == "other tokens":
        tokens[2] += 1
    recorder.launched.clear()
    target.forward(tokens, kv, 4, None)
    assert recorder.launched == ([] if between == "nothing" else [4])
    recorder.launched.clear()
    target.forward(tokens, kv, 4, None)
    assert recorder.launched == [4], "a launch counts once"


def test_argmax_is_that_of_the_logits(pair: tuple[Any, Any, DecodeGraphs, DecodeGraphs]) -> None:
    _, _, _, target = pair
    result = target.forward([5, 5], kv_cache(), 2, None)
    assert result.argmax() == ([0.0, 0.0], [0, 0])
