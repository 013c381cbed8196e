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
from spmoe.models.attention import current_length
from spmoe.models.decode_graphs import DecodeGraphs

inputs = pytest.importorskip("spmoe.backends.kernels.inputs", reason="no Triton")


class RunOnceRecorder:
    """Runs the forward once at capture and forgets it, as a graph does: only addresses are left."""

    def __init__(self) -> None:
        self.launched: list[int] = []  # rows of each forward that is launched

    def capture(self, forward: Callable[[], Tensor]) -> tuple[CapturedGraph, Tensor]:
        captured, logits = CapturedGraph(), forward()
        captured.pieces.append(lambda: self.launched.append(len(logits)))
        return captured, logits

    def new_event(self) -> SimpleNamespace:
        return SimpleNamespace(record=lambda: None, synchronize=lambda: None)


class Model:
    """Keeps weak references to its inputs."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.given: list[weakref.ref[Tensor]] = []

    def __call__(self, input_ids: Tensor, position_ids: Tensor, **kwargs: Any) -> SimpleNamespace:
        length = current_length()
        assert length is not None
        self.given += [weakref.ref(tensor) for tensor in (input_ids, position_ids, length)]
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


def graphs(recorder: RunOnceRecorder, ahead: RunAhead, model: Model | None = None, **chains: Any) -> DecodeGraphs:
    capture = CaptureContext(recorder, ahead, 64, **chains)  # type: ignore[arg-type]
    return DecodeGraphs(model or Model(), lambda observer, on_chunk: nullcontext(), capture)


def kv_cache(length: int = 3) -> Any:
    return SimpleNamespace(length=length, cache=None, graphs={}, advance=lambda rows: None)


def test_inputs_live_as_long_as_the_captured_graph() -> None:
    """A replay writes tokens and positions to their captured addresses, also after that memory was freed."""
    model, kv = Model(), kv_cache()
    captured = graphs(RunOnceRecorder(), run_ahead(), model)
    captured.forward([1, 2], kv, 2, None)
    captured.launch_greedy([1], kv, [None, None], 8)()
    gc.collect()
    assert len(model.given) == 9
    assert all(tensor() is not None for tensor in model.given)
    kv.graphs.clear()
    gc.collect()
    assert all(tensor() is None for tensor in model.given), "a KV cache that is gone keeps nothing alive"


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
