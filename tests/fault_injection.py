"""Fault injection by line: raise an exception at one line of the engine, and check that the engine recovers.

`python tests/fault_injection.py` tries every line that a request reaches; the test suite tries a sample.
"""

from __future__ import annotations

import argparse
import linecache
import random
import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, NamedTuple

import spmoe
from checkpoints import save_pair
from recovery import SECONDS, Resources, tokens, within
from spmoe import LLM

PACKAGE = Path(spmoe.__file__).parent
FILES = (  # expert access, scheduling, transfer, cache, and the engine's thread
    *("experts/access.py", "experts/pool.py", "experts/cache.py", "experts/inflight.py", "experts/prefetch.py"),
    *("experts/transfer.py", "experts/step.py", "experts/run_ahead.py", "experts/workers.py", "engine/loop.py"),
    *("engine/engine.py", "engine/engine_thread.py", "engine/request.py"),
)
# the loop of the thread and the clean-up after a fault: one fault at a time does not reach a second one
OUTSIDE = {"_run", "_fail", "fail", "_end", "recover", "reset", "close", "drain", "_stop", "_start", "release"}
# CPython leaves a `with` block before it returns a constant from it: an exception there would keep a lock for good
CANNOT_FAIL = re.compile(r"(return( None| True| False)?|break|continue|pass|try:|else:)( *#.*)?\n?")
ERRORS: tuple[type[BaseException], ...] = (RuntimeError, MemoryError, KeyboardInterrupt)
TARGET = str(PACKAGE / "pair" / "target")


class Line(NamedTuple):
    """A line of the package."""

    file: str  # relative to the package
    number: int


Fault = tuple[Line, type[BaseException]]


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
        if name is None or frame.f_code.co_name in OUTSIDE or event != "call":
            return None
        visited = set[Line]()

        def trace_line(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "line":
                line = Line(name, frame.f_lineno)
                # a `with` statement is visited again before its block is left; no exception can come from there
                if line == self.target and not self.raised and line not in visited:
                    self.raised = True
                    raise self.error(f"injected at {line.file}:{line.number}")
                visited.add(line)
                if not CANNOT_FAIL.fullmatch(linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()):
                    self.reached.add(line)
            return trace_line

        return trace_line


class Subject:
    """An engine under test, with the tokens that it must generate and the resources that it may hold."""

    def __init__(self, model: str, draft: str | None, **options: Any) -> None:
        self.tracer = Tracer()
        threading.settrace(self.tracer)  # of threads that start later
        self.llm = LLM(model, draft, progress=False, **options)
        self.llm._thread.call(lambda: sys.settrace(self.tracer))
        self._expected = tokens(self.llm)
        tokens(self.llm)
        self._resources = Resources(self.llm)

    def inject(self, line: Line, error: type[BaseException]) -> list[str]:
        """Raise an exception at a line during a request; return what is wrong afterwards."""
        tracer = self.tracer
        tracer.target, tracer.error, tracer.raised = line, error, False
        problems = []
        try:
            if tokens(self.llm) != self._expected:
                problems.append("the request in which the fault occurred has wrong tokens")
        except TimeoutError:
            problems.append("the request in which the fault occurred hangs")
        except BaseException:
            pass
        tracer.target = None
        try:
            if tokens(self.llm) != self._expected:
                problems.append("the next request has wrong tokens")
            problems += self._resources.lost()
        except BaseException as failure:
            problems.append(f"the next request fails ({failure!r})")
        return [f"{error.__name__} at {line.file}:{line.number}: {one}" for one in problems]

    def inject_all(self, faults: list[Fault]) -> list[str]:
        """Inject one fault after the other, up to the first that makes the engine hang; return what is wrong."""
        problems: list[str] = []
        for fault in faults:
            problems += self.inject(*fault)
            if any("hangs" in problem for problem in problems):
                break
        return problems

    def close(self) -> list[str]:
        """Close the engine; return what is wrong afterwards."""
        threading.settrace(None)  # type: ignore[arg-type]
        try:
            within(SECONDS, self.llm.close)
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


def faults(reached: set[Line], count: int | None, seed: int = 0) -> list[Fault]:
    """Return every line with every exception, or a sample of them."""
    every = [(line, error) for line in sorted(reached) for error in ERRORS]
    return every if count is None else random.Random(seed).sample(every, min(count, len(every)))


def _try_part(part: int, parts: int, arguments: argparse.Namespace) -> tuple[int, int, list[str]]:
    """Inject every `parts`-th fault; return the numbers of lines and of faults, and the problems."""
    with subject(arguments.model, arguments.draft, expert_memory=arguments.expert_memory) as tested:
        lines = len(tested.tracer.reached)
        tried = faults(tested.tracer.reached, arguments.count)[part::parts]
        return lines, len(tried), tested.inject_all(tried)


def main() -> None:
    """Inject faults into an engine, and report what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, help="number of faults, drawn at random; default: all")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument(
        "--model", default=TARGET, help="default: the shipped target; 'tiny': a random one, much faster"
    )
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--expert-memory", default="10%")
    arguments = parser.parse_args()
    directory = TemporaryDirectory()
    if arguments.model == "tiny":
        arguments.model = str(save_pair(Path(directory.name), "mixtral", seed=40).target)
    with directory, ProcessPoolExecutor(arguments.jobs, get_context("spawn")) as processes:
        calls = [processes.submit(_try_part, part, arguments.jobs, arguments) for part in range(arguments.jobs)]
        results = [call.result() for call in calls]
    problems = [problem for _, _, found in results for problem in found]
    print(*problems, sep="\n")
    print(f"{results[0][0]} lines, {sum(count for _, count, _ in results)} faults, {len(problems)} problems")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
