"""Forwards recorded as CUDA graphs, piecewise: between two graphs the host may look at results and decide.

A forward is run twice before it is replayed: once as a rehearsal, in which kernels are compiled and libraries make
their workspaces, and once to be recorded. What is computed in either counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from functools import cache
from typing import TypeVar

import torch

from spmoe.gc_pause import gc_paused

T = TypeVar("T")
Between = Callable[[Callable[[], None], list[Callable[[], None]]], None]  # submit the work, and the notes


class Phase(Enum):
    """What becomes of kernels that are submitted now."""

    EAGER = "run, and count"
    WARMUP = "run, for nothing"
    RECORDING = "noted down"


class Stopwatch:
    """How long replays take on the device; off unless asked for."""

    def __init__(self) -> None:
        self.running = False
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> torch.cuda.Event | None:
        """Time what is submitted from now on, until `stop` is given what this returns."""
        if not self.running:
            return None
        start = torch.cuda.Event(enable_timing=True)
        start.record()
        return start

    def stop(self, start: torch.cuda.Event | None) -> None:
        """That was all of it."""
        if start is not None:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            self._spans.append((start, end))

    def take(self) -> float:
        """Seconds so far, which are then forgotten; waits for the last."""
        seconds = 0.0
        for start, end in self._spans:
            end.synchronize()
            seconds += start.elapsed_time(end) / 1000
        self._spans.clear()
        return seconds


class Recording:
    """A recorded forward."""

    def __init__(self, stopwatch: Stopwatch | None = None) -> None:
        self.pieces: list[Callable[[], None]] = []
        self._stopwatch = stopwatch or Stopwatch()

    def begin(self) -> None:
        """Submit the first graph, up to where the host has something to do."""
        self._submit(self.pieces[:1])

    def finish(self) -> None:
        """Submit the others, one after the other, with the host's own work in between."""
        self._submit(self.pieces[1:])

    def _submit(self, pieces: list[Callable[[], None]]) -> None:
        """These, timed: until others follow, the device may have nothing to do."""
        if not pieces:
            return
        start = self._stopwatch.start()
        for piece in pieces:
            piece()
        self._stopwatch.stop(start)


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all recorders: libraries keep a workspace for every stream that they have ever seen."""
    return torch.cuda.Stream(device)


class GraphRecorder:
    """Records forwards of one device. They share memory for what they compute on the way: run one at a time."""

    def __init__(self, device: torch.device) -> None:
        self.phase = Phase.EAGER
        self.turns = 0  # forwards begun so far: what one leaves on the device, the next may write over
        self.stopwatch = Stopwatch()
        self.while_waiting: Callable[[], None] = lambda: None  # what the host does before it waits for a chained draft
        self.be_patient: Callable[[bool], None] = lambda patient: None  # whether that is left to it
        self.wait_and_pump: Callable[[torch.cuda.Event], None] = lambda event: event.synchronize()  # how it waits
        self._stream = _recording_stream(device)
        self._spoilt = False  # the allocator takes its memory for one that is being recorded into
        self._graph: torch.cuda.CUDAGraph | None = None
        self._recording = Recording()
        self._notes: list[Callable[[], None]] = []
        self._take_memory()

    def record(self, forward: Callable[[], T]) -> tuple[Recording, T]:
        """Rehearse and record; the result's tensors are those that every replay fills anew."""
        if self._spoilt:
            self._take_memory()
        outer = torch.cuda.current_stream(self._stream.device)
        self._recording, self._notes = Recording(self.stopwatch), list[Callable[[], None]]()
        self._stream.wait_stream(outer)
        try:
            with torch.cuda.stream(self._stream):
                self.phase = Phase.WARMUP
                forward()
                self._stream.synchronize()
                self.phase = Phase.RECORDING
                with gc_paused():  # graphs of an engine that is gone must not be freed while one is recorded
                    result = self._capture(forward)
        finally:
            self.phase = Phase.EAGER
            outer.wait_stream(self._stream)
        return self._recording, result

    def _capture(self, forward: Callable[[], T]) -> T:
        self._begin()
        try:
            result = forward()
        except BaseException:
            with suppress(RuntimeError):  # which would hide why
                self._end()
            raise
        self._end()
        return result

    def split(self, between: Callable[[], None]) -> None:
        """While recording: end the graph here, and let the host do this before the next one."""
        if self.phase is Phase.RECORDING:
            self._end()
            self._recording.pieces.append(between)
            self._begin()

    def split_around(self, work: Callable[[], None], between: Between) -> None:
        """The same, where the host submits this work, recorded as a graph of its own, as often as it finds right.

        It is also handed what was noted since the last such split, to be done once it has waited for the device.
        """
        if self.phase is Phase.RECORDING:
            self._end()
            self._begin()
            work()
            self._end()
            submit, notes = self._recording.pieces.pop(), self.take_notes()
            self._recording.pieces.append(lambda: between(submit, notes))
            self._begin()

    def note(self, later: Callable[[], None]) -> None:
        """While recording: let the host do this at the next split at which it waits for the device anyway."""
        if self.phase is Phase.RECORDING:
            self._notes.append(later)

    def take_notes(self) -> list[Callable[[], None]]:
        """What was noted since they were last taken: whoever takes them does them, on every replay."""
        notes, self._notes = self._notes, []
        return notes

    def wait(self) -> None:
        """Until all that was submitted here is over."""
        torch.cuda.current_stream(self._stream.device).synchronize()

    def new_event(self) -> torch.cuda.Event:
        """A mark to `record` between two graphs, and to wait for."""
        return torch.cuda.Event()

    def _take_memory(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._spoilt = False
        # memory is kept for graphs as long as one of them lives: this one does
        self._anchor, _ = self.record(lambda: torch.zeros(1, device=self._stream.device))

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # copies go on, on other threads, while a forward is recorded
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def _end(self) -> None:
        if self._graph is not None:
            graph, self._graph = self._graph, None
            try:
                graph.capture_end()
            except RuntimeError:
                self._spoilt = True
                raise
            self._recording.pieces.append(graph.replay)
