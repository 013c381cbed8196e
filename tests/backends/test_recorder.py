"""Which memory forwards are recorded into, when graphs cannot be ended; the device is played."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spmoe.backends import graphs
from spmoe.backends.graphs import GraphRecorder, Phase, Recording, Stopwatch


class Streamed:
    def __init__(self, device: object = None) -> None:
        self.device = device

    def wait_stream(self, other: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Played:
    """What a recorder asks of CUDA. A pool whose graph could not be ended takes no other."""

    def __init__(self) -> None:
        self.pools = 0
        self.open: set[int] = set()  # pools that are being recorded into
        self.invalid = False  # what is recorded now cannot be ended

    def graph_pool_handle(self) -> int:
        self.pools += 1
        return self.pools

    def graph(self) -> Any:
        played = self

        class Graph:
            def capture_begin(self, pool: int, capture_error_mode: str) -> None:
                assert pool not in played.open, "the allocator takes this memory for one that is being recorded into"
                played.open.add(pool)
                self.pool, played.invalid = pool, False

            def capture_end(self) -> None:
                if played.invalid:
                    raise RuntimeError("capturing was invalidated")
                played.open.remove(self.pool)

            def replay(self) -> None:
                pass

        return Graph()


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    it = Played()
    cuda = SimpleNamespace(
        Stream=Streamed,
        Event=Streamed,
        CUDAGraph=it.graph,
        graph_pool_handle=it.graph_pool_handle,
        current_stream=Streamed,
        stream=lambda stream: nullcontext(),
    )
    graphs._recording_stream.cache_clear()
    monkeypatch.setattr(graphs, "torch", SimpleNamespace(cuda=cuda, zeros=torch.zeros))
    yield it
    graphs._recording_stream.cache_clear()


@pytest.mark.parametrize("ending", ["raising", "splitting", "at the end"])
def test_memory_of_a_graph_that_could_not_be_ended_is_left_alone(played: Played, ending: str) -> None:
    recorder = GraphRecorder(torch.device("cpu"))

    def spoil() -> None:
        if recorder.phase is Phase.RECORDING:
            played.invalid = True
            if ending == "raising":
                raise RuntimeError("capturing was invalidated")
            if ending == "splitting":
                recorder.split(lambda: None)

    def record(forward: Callable[[], None]) -> int:
        return len(recorder.record(forward)[0].pieces)

    assert record(lambda: None) == 1
    assert played.pools == 1
    for failures in (1, 2):
        with pytest.raises(RuntimeError, match="invalidated"):
            record(spoil)
        assert recorder.phase is Phase.EAGER
        assert record(lambda: recorder.split(lambda: None)) == 3
        assert record(lambda: None) == 1
        assert played.pools == 1 + failures


def test_a_failure_after_which_it_can_be_ended_costs_no_memory(played: Played) -> None:
    recorder = GraphRecorder(torch.device("cpu"))

    def fail() -> None:
        if recorder.phase is Phase.RECORDING:
            raise ValueError("a model's own")

    with pytest.raises(ValueError, match="own"):
        recorder.record(fail)
    recorder.record(lambda: None)
    assert played.pools == 1


def test_nothing_is_collected_while_a_graph_is_recorded(played: Played) -> None:
    """Freeing another engine's graphs meanwhile would end the process."""
    recorder, gc_pause = GraphRecorder(torch.device("cpu")), list[tuple[Phase, bool]]()

    def forward() -> None:
        gc_pause.append((recorder.phase, gc.isenabled()))
        if len(gc_pause) == 4:
            raise ValueError("it cannot be recorded")

    recorder.record(forward)
    assert gc_pause == [(Phase.WARMUP, True), (Phase.RECORDING, False)]
    assert gc.isenabled()
    with pytest.raises(ValueError, match="cannot be recorded"):
        recorder.record(forward)
    assert gc.isenabled()


class Timed:
    """An event of a device that has done everything by the time the host submits more."""

    now = 0.0  # milliseconds

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = Timed.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Timed) -> float:
        return end.at - self.at


@pytest.mark.parametrize("pieces", [1, 3])
def test_what_lies_between_a_forwards_beginning_and_its_rest_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    monkeypatch.setattr(graphs, "torch", SimpleNamespace(cuda=SimpleNamespace(Event=Timed)))
    stopwatch = Stopwatch()
    recording = Recording(stopwatch)

    def take(milliseconds: float) -> None:
        Timed.now += milliseconds

    recording.pieces += [lambda: take(2.0)] * pieces
    for running in (False, True):
        stopwatch.running = running
        recording.begin()
        take(1000.0)  # the host has other things to do
        recording.finish()
        assert stopwatch.take() == pytest.approx(0.002 * pieces if running else 0.0)
