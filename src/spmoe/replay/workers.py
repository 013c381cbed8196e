"""Replay several configurations at once, in a pool of processes that share the planned steps of a trace."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from spmoe.errors import SpmoeError
from spmoe.observe.timeline import Timeline
from spmoe.replay.replay import ReplayConfig, Replayer, ReplayResult

_replayer: Replayer  # of a worker process


def replay_all(
    replayer: Replayer, configs: Sequence[ReplayConfig], workers: int, *, draw: bool
) -> Iterator[tuple[ReplayResult, Timeline | None]]:
    """Yield the result of every configuration, in order; with a timeline if `draw`."""
    workers = min(workers, len(configs))
    if workers <= 1:
        for config in configs:
            yield _replay(replayer, config, draw)
        return
    # forked workers inherit imports and plans; elsewhere they are sent the replayer
    context: Any = multiprocessing.get_context("fork" if hasattr(os, "fork") else "spawn")
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(replayer,))
    try:
        futures = [pool.submit(_replay_in_worker, config, draw) for config in configs]
        for future in futures:
            yield future.result()
    except BrokenProcessPool as error:
        raise SpmoeError("a replay process died, perhaps for lack of memory; try --workers 1") from error
    finally:  # also after Ctrl-C or an error, when replays may still be running
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        pool.shutdown(cancel_futures=True)


def _start_worker(replayer: Replayer) -> None:
    global _replayer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process receives Ctrl-C too, and ends the workers
    torch.set_num_threads(1)
    _replayer = replayer


def _replay_in_worker(config: ReplayConfig, draw: bool) -> tuple[ReplayResult, Timeline | None]:
    return _replay(_replayer, config, draw)


def _replay(replayer: Replayer, config: ReplayConfig, draw: bool) -> tuple[ReplayResult, Timeline | None]:
    timeline = Timeline() if draw else None
    return replayer.run(config, timeline), timeline
