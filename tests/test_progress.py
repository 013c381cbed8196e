"""Progress: a bar on a terminal, otherwise a line every few seconds, and nothing where nobody asked for it."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr

import pytest
from rich.console import Console

from spmoe.observe import progress
from spmoe.observe.progress import format_duration, hide_bars, progress_bar


class Terminal(io.StringIO):
    """Standard error that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list whose only element is the time."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """Return a terminal of 120 columns, to be made standard error."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    yield Terminal()
    assert not progress._bars, "bars in use"


def test_without_a_terminal_prints_a_line_every_few_seconds(clock: list[float]) -> None:
    stderr = io.StringIO()
    with redirect_stderr(stderr), progress_bar("Writing experts") as report:
        for done in range(0, 101, 2):
            report(done, 100)
            clock[0] += 1.0
    lines = stderr.getvalue().splitlines()
    assert lines[0] == "Writing experts: 10 of 100 (10%), 5 s, 45 s left"
    assert lines[1] == "Writing experts: 20 of 100 (20%), 10 s, 40 s left"
    assert lines[-1] == "Writing experts: 100 of 100 (100%), 50 s"
    assert len(lines) == 10


def test_short_work_prints_nothing(clock: list[float]) -> None:
    stderr = io.StringIO()
    with redirect_stderr(stderr), progress_bar("Writing experts") as report:
        for done in range(3):
            report(done, 2)
            clock[0] += 1.0
    assert stderr.getvalue() == ""


def test_work_that_ends_late_ends_with_one_line(clock: list[float]) -> None:
    stderr = io.StringIO()
    with redirect_stderr(stderr), progress_bar("Runs") as report:
        report(3, 5, "first")
        clock[0] += 90.0
        report(4, 5, "second")
        clock[0] += 1.0
        report(5, 5)
        report(5, 5)
    first, last = stderr.getvalue().splitlines()
    assert first == "Runs: 4 of 5 (80%), 1 min 30 s, 1 min 30 s left; second", "what was done before is no measure"
    assert last == "Runs: 5 of 5 (100%), 1 min 31 s"


@pytest.mark.parametrize("enabled", [True, False])
def test_silent_without_reports_or_if_disabled(enabled: bool, terminal: Terminal) -> None:
    with redirect_stderr(terminal), progress_bar("Runs", enabled) as report:
        if not enabled:
            report(1, 2)
    assert terminal.getvalue() == ""


def test_without_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with progress_bar("Runs") as report:
        report(1, 2)


def test_bar_on_a_terminal_names_work_and_goes_away(terminal: Terminal, capsys: pytest.CaptureFixture[str]) -> None:
    with redirect_stderr(terminal), progress_bar("Runs") as report:
        report(1, 2, "draft-gate, K=4")
        print("a result")
        hide_bars()
        Console(stderr=True).print("a note")
        report(2, 2)
    drawn = terminal.getvalue()
    assert "Runs" in drawn
    assert "1/2" in drawn
    assert "draft-gate, K=4" in drawn
    assert "\x1b[2Ka note\n" in drawn, "the bar is erased before another line is printed"
    assert drawn.endswith("\x1b[2K"), "the bar is erased"
    assert capsys.readouterr().out == "a result\n", "standard output is not drawn above the bar"


def test_inner_bar_replaces_the_outer_one_for_its_time(terminal: Terminal) -> None:
    with redirect_stderr(terminal), progress_bar("Runs") as outer:
        outer(0, 2, "loading")
        with progress_bar("Reading experts") as inner:
            inner(1, 9)
            terminal.truncate(0)
            inner(9, 9)
            assert "Reading experts" in terminal.getvalue()
            assert "Runs" not in terminal.getvalue()
        terminal.truncate(0)
        outer(1, 2)
        assert "Runs" in terminal.getvalue()
        assert "Reading" not in terminal.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (60, "1 min 0 s"), (3599, "59 min 59 s"), (7500, "2 h 5 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
