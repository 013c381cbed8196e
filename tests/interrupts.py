"""Ctrl-C at random moments, through the Python API and on the command line; check that the engine recovers.

`python tests/interrupts.py` interrupts the shipped pair many times; the test suite does so a few times.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Any

import spmoe
from recovery import PARAMS, PROMPT, SECONDS, Resources, tokens
from spmoe import LLM

TARGET = str(Path(spmoe.__file__).parent / "pair" / "target")
COMMAND = [sys.executable, "-m", "spmoe", "run", "--prompt", "def f(n):", "--max-tokens", "40", "--ignore-eos"]


# ---- the Python API


class Interrupter:
    """Sends Ctrl-C to the main thread, which must be the caller's."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.interrupted = 0  # calls that have raised KeyboardInterrupt
        self._handled = 0

    @contextmanager
    def handler(self) -> Iterator[None]:
        """Count interrupts as they are handled; Python's own handler cannot be asked."""
        before = signal.signal(signal.SIGINT, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def call(self, function: Callable[[], object], seconds: float) -> None:
        """Call a function and interrupt it after at most `seconds`; return once the signal has been handled."""
        before = self._handled
        main = threading.main_thread().ident or 0
        timer = threading.Timer(self.random.uniform(0, seconds), lambda: signal.pthread_kill(main, signal.SIGINT))
        try:
            timer.start()
            function()
            while self._handled == before:
                time.sleep(0.001)
        except KeyboardInterrupt:
            self.interrupted += 1

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._handled += 1
        raise KeyboardInterrupt


class InterruptedEngine:
    """An engine whose calls are interrupted, with the tokens that it must generate."""

    def __init__(self, seed: int, model: str, draft: str | None, **options: Any) -> None:
        self._make = lambda: LLM(model, draft, progress=False, **options)
        self._interrupter = Interrupter(seed)
        self.calls: Counter[str] = Counter()  # interrupted calls by kind
        started = time.monotonic()
        self._llm = self._make()
        self._build_seconds = time.monotonic() - started
        self._expected = tokens(self._llm)
        started = time.monotonic()
        tokens(self._llm)
        self._seconds = time.monotonic() - started
        self._resources = Resources(self._llm)

    def interrupt(self, count: int, rebuild_every: int) -> list[str]:
        """Interrupt so many calls; return what is wrong. Every now and then `close` and a new engine are calls too."""
        problems: list[str] = []
        kinds: list[tuple[str, Callable[[], object], float]] = []
        with self._interrupter.handler():
            for number in range(1, count + 1):
                kinds = [("generate", self._generate, self._seconds), ("stream", self._stream, self._seconds)]
                if number % rebuild_every == 0:
                    kinds = [("close", self._llm.close, 0.02), ("build", self._build, self._build_seconds)]
                kind, function, seconds = kinds[self._interrupter.random.random() < 0.5]
                faulthandler.dump_traceback_later(3 * SECONDS, exit=True)  # a hang of the main thread itself
                self._interrupter.call(function, 1.2 * seconds)
                self.calls[kind] += 1
                problems += [f"{number}, {kind}: {problem}" for problem in self._check(kind)]
                faulthandler.cancel_dump_traceback_later()
        return problems

    @property
    def interrupted(self) -> int:
        """Calls that have raised KeyboardInterrupt."""
        return self._interrupter.interrupted

    def close(self) -> None:
        """Close the engine."""
        self._llm.close()

    def _generate(self) -> None:
        self._llm.generate([PROMPT], PARAMS)

    def _stream(self) -> None:
        for _ in self._llm.stream(PROMPT, PARAMS):
            pass

    def _build(self) -> None:
        with self._make() as llm:
            llm.generate([PROMPT], PARAMS)

    def _check(self, kind: str) -> list[str]:
        try:
            if kind == "close":
                self._llm.close()
                self._llm = self._make()
                tokens(self._llm)
                self._resources = Resources(self._llm)
            found = [] if tokens(self._llm) == self._expected else ["the next request has wrong tokens"]
            return found + ([] if kind == "build" else self._resources.lost())
        except BaseException as failure:
            return [f"the next request fails ({failure!r})"]


def _interrupt_part(seed: int, count: int, expert_memory: str) -> tuple[int, Counter[str], list[str]]:
    engine = InterruptedEngine(seed, TARGET, "auto", expert_memory=expert_memory)
    problems = engine.interrupt(count, rebuild_every=10)
    engine.close()
    return engine.interrupted, engine.calls, problems


# ---- the command line


def interrupt_command(seed: int, seconds: float) -> tuple[str, str | None]:
    """Send Ctrl-C twice to a command that takes about `seconds`; return how it ended, and what is wrong."""
    chance = random.Random(seed)
    process = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(chance.uniform(0, seconds))
    process.send_signal(signal.SIGINT)
    time.sleep(chance.choice([0.0, chance.uniform(0, 0.05), chance.uniform(0, 1)]))
    process.send_signal(signal.SIGINT)
    try:
        _, errors = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return "hang", f"run {seed}: no end {SECONDS:g} s after the second Ctrl-C\n{process.communicate()[1]}"
    code = process.returncode
    if "KeyboardInterrupt" in errors and "spmoe" not in errors:
        return "while Python itself started", None  # prints a traceback that no program can avoid
    if code not in (0, 130, -signal.SIGINT):
        return f"exit code {code}", f"run {seed}: exit code {code}\n{errors}"
    if "Traceback" in errors:
        return "traceback", f"run {seed}: a traceback\n{errors}"
    return {0: "ended before", 130: "exit code 130"}.get(code, "killed by SIGINT"), None


def main() -> None:
    """Interrupt the shipped pair and report what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--api", type=int, default=500, metavar="N", help="interrupts through the Python API")
    parser.add_argument("--command", type=int, default=300, metavar="N", help="commands with two Ctrl-C each")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--expert-memory", default="5%")
    arguments = parser.parse_args()
    problems: list[str] = []
    if arguments.api:
        each = -(-arguments.api // arguments.jobs)
        with ProcessPoolExecutor(arguments.jobs, get_context("spawn")) as processes:
            calls = [processes.submit(_interrupt_part, n, each, arguments.expert_memory) for n in range(arguments.jobs)]
            results = [call.result() for call in calls]
        kinds = sum((kinds for _, kinds, _ in results), Counter[str]())
        problems += [problem for _, _, found in results for problem in found]
        print(
            f"Python API: {sum(kinds.values())} interrupts ({dict(kinds)}), {sum(one for one, _, _ in results)} raised"
        )
    if arguments.command:
        started = time.monotonic()
        subprocess.run(COMMAND, check=True, capture_output=True)
        seconds = time.monotonic() - started
        with ThreadPoolExecutor(arguments.jobs) as threads:
            ends = list(threads.map(lambda seed: interrupt_command(seed, seconds), range(arguments.command)))
        problems += [problem for _, problem in ends if problem is not None]
        print(f"command line: {len(ends)} commands ({dict(Counter(end for end, _ in ends))})")
    print(*problems, sep="\n")
    print(f"{len(problems)} problems")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
