"""Replays in several processes: same results in the same order, and no process left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from traces import make_trace, on_link

from spmoe.config import Size
from spmoe.errors import SpmoeError, UsageError
from spmoe.observe.timeline import Timeline
from spmoe.replay.replay import ReplayConfig, Replayer, ReplayResult
from spmoe.replay.workers import replay_all
from spmoe.system.host import allowed_cores

CONFIGS = [
    ReplayConfig(prefetch, memory=Size(bytes=slots * 10**6))
    for prefetch in ("draft-gate", "activation", "on-demand")
    for slots in (20, 30)
]


def replayed(workers: int, *, draw: bool = False) -> list[tuple[ReplayResult, Timeline | None]]:
    found = list(replay_all(Replayer(make_trace()), CONFIGS, workers, draw=draw))
    return [(replace(result, wall_seconds=0.0), line) for result, line in found]


@pytest.mark.parametrize("draw", [False, True])
def test_results_do_not_depend_on_the_number_of_processes(draw: bool) -> None:
    alone, together = replayed(1, draw=draw), replayed(3, draw=draw)
    assert [result.config for result, _ in together] == CONFIGS
    assert together == alone
    assert all((line is not None and line.spans) if draw else line is None for _, line in together)
    assert not multiprocessing.active_children()


def test_results_are_the_same_where_fork_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = replayed(1)
    monkeypatch.delattr(os, "fork")
    assert replayed(2) == alone


def test_one_worker_is_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    process_ids = list[int]()
    run = Replayer.run

    def counted(self: Replayer, config: ReplayConfig, timeline: Timeline | None = None) -> ReplayResult:
        process_ids.append(os.getpid())
        return run(self, config, timeline)

    monkeypatch.setattr(Replayer, "run", counted)
    replayed(1)
    assert set(process_ids) == {os.getpid()}
    process_ids.clear()
    replayed(2)
    assert not process_ids, "worker processes ran them"
    assert allowed_cores() >= 1


def test_error_in_a_worker_is_raised() -> None:
    trace = make_trace()
    with pytest.raises(UsageError, match="how fast its link was"):
        list(replay_all(Replayer(on_link(trace, link_bytes_per_second=0.0)), CONFIGS, 2, draw=False))
    assert not multiprocessing.active_children()


def test_killed_worker_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replayer, "run", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(SpmoeError, match=r"replay process died.*--workers 1"):
        replayed(2)
    assert not multiprocessing.active_children()


@pytest.fixture
def default_sigint() -> Iterator[None]:
    """Handle SIGINT as in a terminal; a background process of a shell may ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("default_sigint")
def test_ctrl_c_ends_all_workers(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def interrupted(_: Replayer, config: ReplayConfig, __: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)  # a terminal signals the whole process group
        if config == CONFIGS[0]:
            os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)

    monkeypatch.setattr(Replayer, "run", interrupted)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        replayed(2)
    assert time.monotonic() - began < 30
    assert not multiprocessing.active_children()
    assert not capfd.readouterr().err
