"""Several replays at once: processes that share a trace, each with one configuration at a time."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from spmoe.errors import SpmoeError
from spmoe.observe.timeline import Timeline
from spmoe.replay.replay import Outcome, Replayer, Setting, Times
from spmoe.replay.trace import Trace

Replayed = tuple[Outcome, Timeline | None]


def usable_cores() -> int:
    """Those that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def replay_all(replayer: Replayer, settings: Sequence[Setting], workers: int, *, draw: bool) -> Iterator[Replayed]:
    """What comes of every setting, in order, with a timeline where they are to be drawn."""
    workers = min(workers, len(settings))
    if workers <= 1:
        for setting in settings:
            yield _replay(replayer, setting, draw)
        return
    # forked, they need neither import nor plan anything once more; elsewhere each is sent the trace
    forks = hasattr(os, "fork")
    context: Any = multiprocessing.get_context("fork" if forks else "spawn")
    pipes: dict[Connection, Any] = {}  # to each process
    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            inherited = [*pipes, ours] if forks else []
            shared = replayer if forks else (replayer.trace, replayer.times)
            process = context.Process(target=_work, args=(shared, settings, draw, theirs, inherited), daemon=True)
            process.start()
            theirs.close()
            pipes[ours] = process
        yield from _in_order(len(settings), pipes)
    finally:
        for process in pipes.values():
            process.terminate()
            process.join()


def _in_order(count: int, pipes: dict[Connection, Any]) -> Iterator[Replayed]:
    """Hands out numbers of settings as processes become free."""
    waiting, done, shown = iter(range(count)), dict[int, Replayed](), 0
    for pipe, number in zip(pipes, waiting, strict=False):
        pipe.send(number)
    while shown < count:
        ready = wait(list(pipes))
        for pipe in [pipe for pipe in pipes if pipe in ready]:
            try:
                number, result = pipe.recv()
            except (EOFError, OSError):
                pipes[pipe].join()
                code = pipes[pipe].exitcode
                raise SpmoeError(f"a process that replayed ended with exit code {code}; give --workers 1") from None
            if isinstance(result, BaseException):
                raise result
            done[number] = result
            if (following := next(waiting, None)) is not None:
                pipe.send(following)
        while shown in done:
            yield done.pop(shown)
            shown += 1


def _work(
    shared: Replayer | tuple[Trace, Times],
    settings: Sequence[Setting],
    draw: bool,
    pipe: Connection,
    inherited: Sequence[Connection],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it hears of it, and ends it
    for other in inherited:  # else it would never see that they were closed
        other.close()
    torch.set_num_threads(1)
    replayer = shared if isinstance(shared, Replayer) else Replayer(*shared)
    try:
        while True:
            number = pipe.recv()
            try:
                pipe.send((number, _replay(replayer, settings[number], draw)))
            except Exception as error:
                pipe.send((number, error))
    except (EOFError, OSError):  # nobody listens any more
        return


def _replay(replayer: Replayer, setting: Setting, draw: bool) -> Replayed:
    timeline = Timeline() if draw else None
    return replayer.run(setting, timeline), timeline
