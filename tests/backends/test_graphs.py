"""Capture of CUDA graphs: the memory pool after a failed capture, host work, garbage collection and timing."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from spmoe.backends import graphs
from spmoe.backends.graphs import CapturedGraph, CudaGraphRecorder, Phase, Stopwatch

CPU = torch.device("cpu")


# ---- without a GPU


class FakeStream:
    def __init__(self, device: object = None) -> None:
        self.device = device

    def wait_stream(self, other: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


class FakeGraphPools:
    """Memory pools of graphs, as PyTorch has them: after a capture that cannot end, its pool takes no other."""

    def __init__(self) -> None:
        self.count = 0
        self.in_use: set[int] = set()  # pools that a graph is captured into
        self.capture_is_invalid = False  # the capture under way cannot end

    def new_pool(self) -> int:
        self.count += 1
        return self.count

    def new_graph(self) -> FakeGraph:
        return FakeGraph(self)


class FakeGraph:
    def __init__(self, pools: FakeGraphPools) -> None:
        self._pools = pools
        self._pool = 0

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        assert pool not in self._pools.in_use, "a graph is captured into this pool"
        self._pools.in_use.add(pool)
        self._pool, self._pools.capture_is_invalid = pool, False

    def capture_end(self) -> None:
        if self._pools.capture_is_invalid:
            raise RuntimeError("the capture was invalidated")
        self._pools.in_use.remove(self._pool)

    def replay(self) -> None:
        pass


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGraphPools]:
    """Replace `torch.cuda` in the recorder's module."""
    made = FakeGraphPools()
    cuda = SimpleNamespace(
        Stream=FakeStream,
        CUDAGraph=made.new_graph,
        graph_pool_handle=made.new_pool,
        current_stream=FakeStream,
        stream=lambda stream: nullcontext(),
    )
    graphs._capture_stream.cache_clear()
    monkeypatch.setattr(graphs, "torch", SimpleNamespace(cuda=cuda, zeros=torch.zeros))
    yield made
    graphs._capture_stream.cache_clear()


@pytest.mark.parametrize("failure", ["in the forward", "at a split", "at the end"])
def test_pool_of_a_capture_that_cannot_end_is_replaced(pools: FakeGraphPools, failure: str) -> None:
    recorder = CudaGraphRecorder(CPU)

    def fail() -> None:
        if recorder.phase is Phase.CAPTURE:
            pools.capture_is_invalid = True
            if failure == "in the forward":
                raise RuntimeError("the capture was invalidated")
            if failure == "at a split":
                recorder.split(lambda: None)

    def captured_pieces(forward: Callable[[], None]) -> int:
        return len(recorder.capture(forward)[0].pieces)

    assert captured_pieces(lambda: None) == 1
    assert pools.count == 1
    for failures in (1, 2):
        with pytest.raises(RuntimeError, match="invalidated"):
            recorder.capture(fail)
        assert recorder.phase is Phase.EAGER
        assert captured_pieces(lambda: recorder.split(lambda: None)) == 3
        assert captured_pieces(lambda: None) == 1
        assert pools.count == 1 + failures


def test_pool_is_kept_after_a_failed_capture_that_can_end(pools: FakeGraphPools) -> None:
    recorder = CudaGraphRecorder(CPU)

    def fail() -> None:
        if recorder.phase is Phase.CAPTURE:
            raise ValueError("raised by a model")

    with pytest.raises(ValueError, match="by a model"):
        recorder.capture(fail)
    recorder.capture(lambda: None)
    assert pools.count == 1


def test_host_work_runs_between_graphs_with_the_observations_before_it(pools: FakeGraphPools) -> None:
    recorder, calls = CudaGraphRecorder(CPU), list[str]()

    def between(launch: Callable[[], None], observations: list[Callable[[], None]]) -> None:
        launch()
        for observe in observations:
            observe()
        calls.append("between")

    def forward() -> None:
        recorder.observe_later(lambda: calls.append("observed"))
        recorder.split_around(lambda: calls.append("work captured"), between)
        recorder.split(lambda: calls.append("host work"))

    graph, _ = recorder.capture(forward)
    assert calls == ["work captured"], "not in the warm-up, which launches nothing between graphs"
    assert recorder.take_observations() == []
    for _ in range(2):
        calls.clear()
        graph.launch_first()
        assert calls == []
        graph.launch_rest()
        assert calls == ["observed", "between", "host work"]


def test_garbage_is_not_collected_during_a_capture(pools: FakeGraphPools) -> None:
    """Freeing another engine's graphs during a capture would abort the process."""
    recorder, enabled = CudaGraphRecorder(CPU), list[tuple[Phase, bool]]()

    def forward() -> None:
        enabled.append((recorder.phase, gc.isenabled()))
        if len(enabled) == 4:
            raise ValueError("injected failure")

    recorder.capture(forward)
    assert enabled == [(Phase.WARMUP, True), (Phase.CAPTURE, False)]
    assert gc.isenabled()
    with pytest.raises(ValueError, match="injected failure"):
        recorder.capture(forward)
    assert gc.isenabled()


class TimedEvent:
    """A timing event of a device that is never behind the host."""

    now = 0.0  # milliseconds

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = TimedEvent.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: TimedEvent) -> float:
        return end.at - self.at


@pytest.mark.parametrize("pieces", [1, 3])
def test_time_between_the_first_graph_and_the_rest_is_not_counted(monkeypatch: pytest.MonkeyPatch, pieces: int) -> None:
    monkeypatch.setattr(graphs, "torch", SimpleNamespace(cuda=SimpleNamespace(Event=TimedEvent)))
    stopwatch = Stopwatch()
    graph = CapturedGraph(stopwatch)

    def advance(milliseconds: float) -> None:
        TimedEvent.now += milliseconds

    graph.pieces += [lambda: advance(2.0)] * pieces
    for running in (False, True):
        stopwatch.running = running
        graph.launch_first()
        advance(1000.0)  # the host does something else
        graph.launch_rest()
        assert stopwatch.take() == pytest.approx(0.002 * pieces if running else 0.0)


# ---- on a GPU

FAILURES: dict[str, Callable[[Tensor], Tensor]] = {
    "copy from pageable memory": lambda x: x + torch.ones(4).to("cuda"),
    "wait for the device": lambda x: x * float(x.sum()),  # after which PyTorch cannot even end the capture
}


def replay(graph: CapturedGraph) -> None:
    graph.launch_first()
    graph.launch_rest()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
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
