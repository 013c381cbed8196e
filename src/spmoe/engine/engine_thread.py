"""The thread that alone uses an engine. Callers give it calls and jobs, and wait for their results.

Python raises KeyboardInterrupt, and everything else that a signal handler raises, on the main thread. The engine runs
on this one, so no signal interrupts its bookkeeping: Ctrl-C ends the caller's wait, and the caller cancels its job.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from spmoe.errors import SpmoeError
from spmoe.interpreter import shorten_sleeps

T = TypeVar("T")


class EngineClosed(SpmoeError):
    """The engine was closed before, or while, something was asked of it."""

    def __init__(self) -> None:
        super().__init__("the engine is closed")


JOIN_SECONDS = 60.0  # longest wait for the thread to end
_POLL_SECONDS = 1.0  # how often a caller that waits looks whether the thread still runs


class Sink(Protocol):
    """Receiver of a job's messages: ("item", value)..., then ("end", None) or ("error", exception)."""

    def put(self, message: tuple[str, Any]) -> None:
        """Take a message, on the engine's thread; must not block."""
        ...


class _Call(Generic[T]):
    """A function to run on the thread once, and the queue for its result."""

    def __init__(self, function: Callable[[], T]) -> None:
        self.answer: SimpleQueue[tuple[str, Any]] = SimpleQueue()  # ("item", value) or ("error", exception)
        self._function = function

    def run(self) -> None:
        try:
            self.answer.put(("item", self._function()))
        except BaseException as error:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        self.answer.put(("error", error))


class _Stop(_Call[None]):
    """The last call."""


class Job(Generic[T]):
    """Work in steps: an iterator that the thread advances by one item at a time, in turns with other jobs.

    Iterate over it for the items that are not None. It ends early, after the step under way, once `cancel` is called,
    and when the job object itself is dropped.
    """

    def __init__(self, thread: EngineThread, start: Callable[[], Iterator[T | None]]) -> None:
        self._thread = thread
        self._work = _Work(start)
        self._ended = False
        self._drop = weakref.finalize(self, _cancel, self._work)
        thread._send(self._work)

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._ended:
            raise StopIteration
        answer = self._thread._receive(self._work.items)
        self._ended = answer[0] != "item"
        if answer[0] == "end":
            raise StopIteration
        return self._thread._value(answer)  # type: ignore[no-any-return]

    def cancel(self) -> None:
        """End the job after the step under way; callable from a signal handler or another thread."""
        self._work.cancelled = True


class _Work:
    """A job as the thread sees it; it holds no reference to the job object that the caller holds."""

    def __init__(self, start: Callable[[], Iterator[Any]], sink: Sink | None = None) -> None:
        self.items: SimpleQueue[tuple[str, Any]] = SimpleQueue()  # of a job without a sink
        self._sink: Sink = self.items if sink is None else sink
        self.cancelled = False
        self._start = start
        self._iterator: Iterator[Any] | None = None
        self._ended = False

    def advance(self) -> bool:
        """Run one step; return whether there may be another."""
        if self._ended:
            return False
        try:
            if self.cancelled:
                self._end(("end", None))
                return False
            if self._iterator is None:
                self._iterator = self._start()
            if (item := next(self._iterator)) is not None:
                self._sink.put(("item", item))
            return True
        except StopIteration:
            self._end(("end", None))
        except BaseException as error:
            self._end(("error", error))
        return False

    def fail(self, error: BaseException) -> None:
        """End the job with an error, unless it has ended."""
        if not self._ended:
            self._end(("error", error))

    def _end(self, last: tuple[str, Any]) -> None:
        self._ended = True
        iterator, self._iterator = self._iterator, None
        try:
            if isinstance(iterator, Generator):
                iterator.close()  # runs its `finally` blocks
        except BaseException as error:
            last = ("error", error)
        self._sink.put(last)


def _cancel(work: _Work) -> None:
    work.cancelled = True


class EngineThread:
    """A thread that runs calls at once and jobs in turns, until it is closed."""

    def __init__(self, name: str = "spmoe-engine") -> None:
        self._inbox: SimpleQueue[_Call[Any] | _Work] = SimpleQueue()
        self._owner = os.getpid()
        self._closing = False
        self._ended = False
        self._message: _Call[Any] | _Work | None = None  # being served
        self._jobs: deque[_Work] = deque()
        self._current: _Work | None = None  # the job whose step runs
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the thread, between two steps of jobs, and return its result.

        An exception of a signal handler ends the wait; the function still runs to its end.
        """
        if threading.current_thread() is self._thread:
            return function()
        call = _Call(function)
        self._send(call)
        return self._value(self._receive(call.answer))  # type: ignore[no-any-return]

    @property
    def is_open(self) -> bool:
        """Whether calls and jobs are taken."""
        return not self._closing and self._thread.is_alive()

    def require_open(self) -> None:
        """Raise EngineClosed if `close` was called; long calls on the thread ask now and then."""
        if self._closing:
            raise EngineClosed

    def job(self, start: Callable[[], Iterator[T | None]]) -> Job[T]:
        """Start a job; `start` is called on the thread and returns the iterator."""
        return Job(self, start)

    def send_job(self, start: Callable[[], Iterator[Any]], sink: Sink) -> Callable[[], None]:
        """Start a job whose items go to a sink; return a function that cancels it."""
        work = _Work(start, sink)
        self._send(work)
        return partial(_cancel, work)

    def close(self, last: Callable[[], None] = lambda: None) -> None:
        """End all jobs, run `last` on the thread and end it. Raise an error if it does not end. Idempotent."""
        if self._closing or os.getpid() != self._owner:
            return
        self._closing = True
        stop = _Stop(last)
        self._inbox.put(stop)
        if threading.current_thread() is self._thread:  # the garbage collector may run here
            return
        deadline = time.monotonic() + JOIN_SECONDS
        while self._thread.is_alive() and time.monotonic() < deadline:
            self._thread.join(_POLL_SECONDS)
        if self._thread.is_alive():
            raise SpmoeError(
                f"the engine's thread has not ended for {JOIN_SECONDS:g} s; a step, the disk or the device may be stuck"
            )
        self._value(self._receive(stop.answer))

    def _send(self, message: _Call[Any] | _Work) -> None:
        if os.getpid() != self._owner:
            raise SpmoeError(
                "an engine does not run in a forked process; build it in that process, and start the process with the "
                'multiprocessing start method "spawn"'
            )
        if not self.is_open:
            raise EngineClosed
        self._inbox.put(message)

    @staticmethod
    def _value(answer: tuple[str, Any]) -> Any:
        kind, value = answer
        if kind == "error":
            raise value
        return value

    def _receive(self, queue: SimpleQueue[tuple[str, Any]]) -> tuple[str, Any]:
        """Wait for a result; raise an error if the thread has ended without one."""
        while True:
            alive = self._thread.is_alive()  # before the queue is looked at: the thread may answer and end
            try:
                return queue.get(timeout=_POLL_SECONDS) if alive else queue.get_nowait()
            except Empty:
                if not alive:
                    raise EngineClosed from None

    # ---- on the thread

    def _run(self) -> None:
        shorten_sleeps()
        while not self._ended:
            try:
                self._serve()
            except BaseException as error:
                self._fail(error)

    def _serve(self) -> None:
        """Take all messages, then run one step of the next job; wait for a message if there is no job."""
        while self._take_message():
            pass
        if self._jobs:
            self._current = self._jobs.popleft()
            if self._current.advance():
                self._jobs.append(self._current)
            self._current = None

    def _take_message(self) -> bool:
        """Serve the next message; return whether there was one, and there may be another."""
        with suppress(Empty):
            self._message = self._inbox.get(block=not self._jobs)
        if (message := self._message) is None:
            return False
        if isinstance(message, _Stop):
            self._stop(message)
        elif isinstance(message, _Call):
            message.run()
        elif message.advance():  # its first step, which takes no time: all that wait are known before one of them runs
            self._jobs.append(message)
        self._message = None
        return bool(self._jobs)

    def _stop(self, stop: _Stop) -> None:
        self._ended = True
        try:
            while self._jobs:
                self._jobs.popleft().fail(EngineClosed())
        finally:
            stop.run()

    def _fail(self, error: BaseException) -> None:
        """Answer the caller whose message or job was being served."""
        for served in (self._message, self._current):
            if served is not None:
                served.fail(error)
        self._message = self._current = None
