"""Replays in several processes: the same outcomes in the same order, and nothing left behind."""

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
from spmoe.replay.replay import Outcome, Replayer, Setting
from spmoe.replay.workers import replay_all, usable_cores

SETTINGS = [
    Setting(prefetch, memory=Size(bytes=slots * 10**6))
    for prefetch in ("draft-gate", "activation", "on-demand")
    for slots in (20, 30)
]


def replayed(workers: int, *, draw: bool = False) -> list[tuple[Outcome, Timeline | None]]:
    found = list(replay_all(Replayer(make_trace()), SETTINGS, workers, draw=draw))
    return [(replace(outcome, wall_seconds=0.0), line) for outcome, line in found]


@pytest.mark.parametrize("draw", [False, True])
def test_processes_change_nothing(draw: bool) -> None:
    alone, together = replayed(1, draw=draw), replayed(3, draw=draw)
    assert [outcome.setting for outcome, _ in together] == SETTINGS
    assert together == alone
    assert all((line is not None and line.spans) if draw else line is None for _, line in together)
    assert not multiprocessing.active_children()


def test_also_where_processes_cannot_be_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = replayed(1)
    monkeypatch.delattr(os, "fork")
    assert replayed(2) == alone


def test_one_is_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[int]()
    run = Replayer.run

    def noted(self: Replayer, setting: Setting, timeline: Timeline | None = None) -> Outcome:
        seen.append(os.getpid())
        return run(self, setting, timeline)

    monkeypatch.setattr(Replayer, "run", noted)
    replayed(1)
    assert set(seen) == {os.getpid()}
    seen.clear()
    replayed(2)
    assert not seen, "others did it"
    assert usable_cores() >= 1


def test_errors_are_those_of_one_process() -> None:
    trace = make_trace()
    with pytest.raises(UsageError, match="how fast its link was"):
        list(replay_all(Replayer(on_link(trace, link_bytes_per_second=0.0)), SETTINGS, 2, draw=False))
    assert not multiprocessing.active_children()


def test_a_process_that_is_killed_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replayer, "run", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(SpmoeError, match="exit code -9; give --workers 1"):
        replayed(2)
    assert not multiprocessing.active_children()


@pytest.fixture
def heeding_interrupts() -> Iterator[None]:
    """As in a terminal; what runs in the background of a shell may have been told to ignore them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeding_interrupts")
def test_ctrl_c_ends_all_of_them(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def interrupted(_: Replayer, setting: Setting, __: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)  # a terminal tells all of them
        if setting == SETTINGS[0]:
            os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)

    monkeypatch.setattr(Replayer, "run", interrupted)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        replayed(2)
    assert time.monotonic() - began < 30
    assert not multiprocessing.active_children()
    assert not capfd.readouterr().err
