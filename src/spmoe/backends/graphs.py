"""Forwards as CUDA graphs, captured piecewise: between two graphs the host may read results and decide.

A forward runs twice before it is replayed: once as a warm-up, in which kernels are compiled and libraries allocate
their workspaces, and once for capture. The results of both are discarded.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from spmoe.experts.run_ahead import RunAhead
from spmoe.interpreter import gc_paused

if TYPE_CHECKING:
    from spmoe.backends.residency import CudaResidency

T = TypeVar("T")
HostWork = Callable[[], None]
Between = Callable[[HostWork, list[HostWork]], None]  # given: launch the captured work, and the observations so far


class Phase(Enum):
    """Effect of the kernels that are launched now."""

    EAGER = "eager"  # they run, and their results count
    WARMUP = "warm-up"  # they run, and their results are discarded
    CAPTURE = "capture"  # they are captured and do not run


class Stopwatch:
    """Measures how long replays take on the device; off by default."""

    def __init__(self) -> None:
        self.running = False
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> torch.cuda.Event | None:
        """Begin a span; pass the returned event to `stop`."""
        if not self.running:
            return None
        start = torch.cuda.Event(enable_timing=True)
        start.record()
        return start

    def stop(self, start: torch.cuda.Event | None) -> None:
        """End a span."""
        if start is not None:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            self._spans.append((start, end))

    def take(self) -> float:
        """Wait for the last span; return the seconds of all spans and forget them."""
        seconds = 0.0
        for start, end in self._spans:
            end.synchronize()
            seconds += start.elapsed_time(end) / 1000
        self._spans.clear()
        return seconds


class CapturedGraph:
    """A captured forward: CUDA graphs, with host work between them."""

    def __init__(self, stopwatch: Stopwatch | None = None) -> None:
        self.pieces: list[HostWork] = []
        self._stopwatch = stopwatch or Stopwatch()

    def append(self, work: HostWork) -> None:
        """Add host work, or the replay of a graph, behind what was added before."""
        self.pieces.append(work)

    def launch_first(self) -> None:
        """Launch the first graph, up to the first host work."""
        self._run(self.pieces[:1])

    def launch_rest(self) -> None:
        """Launch the other graphs in order, with the host work between them."""
        self._run(self.pieces[1:])

    def _run(self, pieces: list[HostWork]) -> None:
        """Time these pieces alone: until the rest is launched, the device may be idle."""
        if not pieces:
            return
        start = self._stopwatch.start()
        for piece in pieces:
            piece()
        self._stopwatch.stop(start)


class GraphRecorder(Protocol):
    """Captures forwards. `CudaGraphRecorder` captures CUDA graphs; a test double runs the forward again instead."""

    phase: Phase
    stopwatch: Stopwatch

    def capture(self, forward: Callable[[], T]) -> tuple[CapturedGraph, T]:
        """Warm up and capture a forward; every replay fills the tensors of the returned result again."""
        ...

    def split(self, between: HostWork) -> None:
        """During capture: end the graph here and let the host do this before the next one."""
        ...

    def split_around(self, work: HostWork, between: Between) -> None:
        """During capture: capture `work` as a graph of its own, which `between` launches as often as it likes.

        `between` also gets the observations since the last split, to be made once the host has waited for the device.
        """
        ...

    def observe_later(self, observe: HostWork) -> None:
        """During capture: make this observation at the next split at which the host waits for the device."""
        ...

    def take_observations(self) -> list[HostWork]:
        """Return the observations since the last call; the caller makes them on every replay."""
        ...

    def wait(self) -> None:
        """Wait until everything launched on the current stream has finished."""
        ...

    def new_event(self) -> Any:
        """Return a CUDA event to record between two graphs and to wait for."""
        ...


@dataclass(frozen=True)
class CaptureContext:
    """Everything that a model's captured forwards are made from."""

    recorder: GraphRecorder
    run_ahead: RunAhead
    max_positions: int  # longest sequence
    chain: Tensor | None = None  # where a draft's greedy tokens are appended on the device
    draft_chain: Tensor | None = None  # the chain of the draft whose tokens these forwards verify
    residency: CudaResidency | None = None  # None: the host decides in every layer which experts run


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for all recorders: libraries keep a workspace for every stream they are used on."""
    return torch.cuda.Stream(device)


class CudaGraphRecorder:
    """Captures forwards of one device. Their graphs share memory for intermediate results: run one at a time."""

    def __init__(self, device: torch.device) -> None:
        self.phase = Phase.EAGER
        self.stopwatch = Stopwatch()
        self._stream = _capture_stream(device)
        self._pool_unusable = False  # after a failed capture the allocator believes that the pool is in use
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captured = CapturedGraph()
        self._observations: list[HostWork] = []
        self._new_pool()

    def capture(self, forward: Callable[[], T]) -> tuple[CapturedGraph, T]:
        if self._pool_unusable:
            self._new_pool()
        outer = torch.cuda.current_stream(self._stream.device)
        self._captured, self._observations = CapturedGraph(self.stopwatch), list[HostWork]()
        self._stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self._stream):
                self.phase = Phase.WARMUP
                forward()
                self._stream.synchronize()
                self.phase = Phase.CAPTURE
                with gc_paused():  # freeing a closed engine's graphs during a capture aborts the process
                    result = self._run_capture(forward)
        finally:
            self.phase = Phase.EAGER
            outer.wait_stream(self._stream)
        return self._captured, result

    def _run_capture(self, forward: Callable[[], T]) -> T:
        self._begin_graph()
        try:
            result = forward()
        except BaseException:
            with suppress(RuntimeError):  # which would hide the first error
                self._end_graph()
            raise
        self._end_graph()
        return result

    def split(self, between: HostWork) -> None:
        if self.phase is Phase.CAPTURE:
            self._end_graph()
            self._captured.append(between)
            self._begin_graph()

    def split_around(self, work: HostWork, between: Between) -> None:
        if self.phase is Phase.CAPTURE:
            self._end_graph()
            self._begin_graph()
            work()
            self._end_graph()
            launch, observations = self._captured.pieces.pop(), self.take_observations()
            self._captured.append(lambda: between(launch, observations))
            self._begin_graph()

    def observe_later(self, observe: HostWork) -> None:
        if self.phase is Phase.CAPTURE:
            self._observations.append(observe)

    def take_observations(self) -> list[HostWork]:
        observations, self._observations = self._observations, []
        return observations

    def wait(self) -> None:
        torch.cuda.current_stream(self._stream.device).synchronize()

    def new_event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def _new_pool(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._pool_unusable = False
        # the pool's memory lives as long as one of its graphs does: this one
        self._anchor, _ = self.capture(lambda: torch.zeros(1, device=self._stream.device))

    def _begin_graph(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # other threads go on copying during a capture
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def _end_graph(self) -> None:
        if self._graph is not None:
            graph, self._graph = self._graph, None
            try:
                graph.capture_end()
            except RuntimeError:
                self._pool_unusable = True
                raise
            self._captured.append(graph.replay)
