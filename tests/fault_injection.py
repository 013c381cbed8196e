"""Fault injection by line: raise an exception at one line of the engine, and check that the engine recovers.

`python tests/fault_injection.py` tries every line that a request reaches; the test suite tries a sample.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import spmoe
from spmoe import LLM, SamplingParams

PACKAGE = Path(spmoe.__file__).parent
FILES = (  # expert access, scheduling, transfer, cache, and the engine's thread
    *("experts/access.py", "experts/pool.py", "experts/cache.py", "experts/inflight.py", "experts/prefetch.py"),
    *("experts/transfer.py", "experts/step.py", "experts/run_ahead.py", "experts/workers.py", "engine/loop.py"),
    *("engine/engine.py", "engine/engine_thread.py"),
)
# the loop of the thread and the clean-up after a fault: one fault at a time does not reach a second one
OUTSIDE = {"_run", "_fail", "fail", "_end", "recover", "reset", "close", "drain", "_stop", "_start", "release"}
ERRORS: tuple[type[BaseException], ...] = (RuntimeError, MemoryError, KeyboardInterrupt)
PROMPT = [5, 9, 2, 6, 5, 3]
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
SECONDS = 30.0  # for one request


class Line(NamedTuple):
    """A line of the package."""

    file: str  # relative to the package
    number: int


class Tracer:
    """Trace function that notes lines and raises an exception at one of them, once."""

    def __init__(self) -> None:
        self.reached: set[Line] = set()
        self.target: Line | None = None
        self.error: type[BaseException] = RuntimeError
        self.raised = False
        self._names = {str(PACKAGE / file): file for file in FILES}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        name = self._names.get(frame.f_code.co_filename)
        if name is None or frame.f_code.co_name in OUTSIDE:
            return None
        return self._trace_line if event == "call" else None

    def _trace_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            line = Line(self._names[frame.f_code.co_filename], frame.f_lineno)
            self.reached.add(line)
            if line == self.target and not self.raised:
                self.raised = True
                raise self.error(f"injected at {line.file}:{line.number}")
        return self._trace_line


class Subject:
    """An engine under test, with the tokens that it must generate and the resources that it may hold."""

    def __init__(self, model: str, draft: str | None, **options: Any) -> None:
        self.tracer = Tracer()
        threading.settrace(self.tracer)  # of threads that start later
        self.llm = LLM(model, draft, progress=False, **options)
        self.llm._thread.call(lambda: sys.settrace(self.tracer))
        self.expected = self.generate()
        self.generate()
        self._threads, self._descriptors = threading.active_count(), _descriptors()

    def generate(self) -> list[int]:
        """Generate within the time limit; raise the request's exception."""
        return _within(SECONDS, lambda: self.llm.generate([PROMPT], PARAMS)[0].token_ids)

    def inject(self, line: Line, error: type[BaseException]) -> list[str]:
        """Raise an exception at a line during a request; return what is wrong afterwards."""
        tracer = self.tracer
        tracer.target, tracer.error, tracer.raised = line, error, False
        problems = []
        try:
            if self.generate() != self.expected:
                problems.append("the request in which the fault occurred has wrong tokens")
        except TimeoutError:
            problems.append("the request in which the fault occurred hangs")
        except BaseException:
            pass
        tracer.target = None
        try:
            if self.generate() != self.expected:
                problems.append("the next request has wrong tokens")
        except BaseException as failure:
            problems.append(f"the next request fails ({failure!r})")
        return [f"{error.__name__} at {line.file}:{line.number}: {one}" for one in problems + self._lost()]

    def _lost(self) -> list[str]:
        """Return resources that are lost: pins, slots, threads, descriptors, KV caches."""
        pool = self.llm.engine.experts.pool
        cache, found = pool._cache, []
        pool.residents()
        if pinned := [entry.key for entry in cache.entries() if entry.pins]:
            found.append(f"experts stay pinned: {pinned}")
        if any(cache._layer_pins) or pool._demands:
            found.append("a layer stays pinned, or a demand open")
        if len(cache.entries()) + len(cache._free) != cache.slot_count:
            found.append("a slot is lost")
        if self.llm.engine.parts.target_kv:
            found.append("a KV cache is not released")
        if threading.active_count() > self._threads + 8:  # readers start when they are needed
            found.append(f"{threading.active_count()} threads instead of {self._threads}")
        if _descriptors() > self._descriptors:
            found.append("a file descriptor is lost")
        return found

    def close(self) -> list[str]:
        """Close the engine; return what is wrong afterwards."""
        threading.settrace(None)  # type: ignore[arg-type]
        try:
            _within(SECONDS, self.llm.close)
        except BaseException as failure:
            return [f"close fails ({failure!r})"]
        return []


@contextmanager
def subject(model: str, draft: str | None, **options: Any) -> Iterator[Subject]:
    """Yield an engine under test; raise AssertionError if it cannot be closed."""
    made = Subject(model, draft, **options)
    try:
        yield made
    finally:
        assert made.close() == []


def faults(reached: set[Line], count: int | None, seed: int = 0) -> list[tuple[Line, type[BaseException]]]:
    """Return every line with every exception, or a sample of them."""
    every = [(line, error) for line in sorted(reached) for error in ERRORS]
    return every if count is None else random.Random(seed).sample(every, min(count, len(every)))


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """Run a call on another thread; raise TimeoutError if it does not end."""
    result: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        sys.settrace(None)
        try:
            result.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"no end after {seconds:g} s")
    if errors:
        raise errors[0]
    return result[0]


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def main() -> None:
    """Try every line on the shipped pair and report what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, help="number of faults, drawn at random; default: all")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--expert-memory", default="10%")
    arguments = parser.parse_args()
    model = str(PACKAGE / "pair" / "target")
    with subject(model, arguments.draft, expert_memory=arguments.expert_memory) as tested:
        tried = faults(tested.tracer.reached, arguments.count)
        print(f"{len(tested.tracer.reached)} lines, {len(tried)} faults", flush=True)
        problems = 0
        for number, (line, error) in enumerate(tried, 1):
            for problem in tested.inject(line, error):
                problems += 1
                print(problem, flush=True)
            if number % 100 == 0:
                print(f"{number} of {len(tried)}", flush=True)
    print(f"{problems} problems")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
