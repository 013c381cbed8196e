"""Progress of long work on standard error: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from spmoe.errors import printable

if TYPE_CHECKING:
    from rich.progress import Progress

LINE_SECONDS = 5.0  # between two lines
_REFRESH_SECONDS = 0.1  # between two drawings of a bar


class Report(Protocol):
    """Function that takes how much is done of how much, and what is being done now."""

    def __call__(self, done: int, total: int, detail: str = "") -> None: ...


@contextmanager
def progress_bar(label: str, enabled: bool = True, unit_bytes: int = 0) -> Iterator[Report]:
    """Yield `report(done, total, detail)`; nothing is shown before the first call, or if not `enabled`.

    With `unit_bytes`, a unit is so many bytes, and their rate in GB/s is shown as the detail.

    Everything is drawn by the calling thread, during calls, so that work that is timed between them runs undisturbed.
    """
    if not enabled or sys.stderr is None:
        yield lambda done, total, detail="": None
    elif sys.stderr.isatty():
        with _bar(label) as report:
            yield _with_rate(report, unit_bytes) if unit_bytes else report
    else:
        lines = _Lines(label)
        yield _with_rate(lines, unit_bytes) if unit_bytes else lines


def _with_rate(report: Report, unit_bytes: int) -> Report:
    """Return a report that adds gigabytes and their mean rate since the first call."""
    started_at, first, drawn_at = 0.0, 0, 0.0

    def with_rate(done: int, total: int, detail: str = "") -> None:
        nonlocal started_at, first, drawn_at
        now = time.monotonic()
        if not started_at:
            started_at, first = now, done
        elif done < total and now - drawn_at < _REFRESH_SECONDS:  # a detail would be drawn at every call
            return
        drawn_at = now
        elapsed, moved = now - started_at, (done - first) * unit_bytes / 1e9
        rate = f", {moved / elapsed:.2f} GB/s" if elapsed > 0 and moved else ""
        size = f"{done * unit_bytes / 1e9:.1f} of {total * unit_bytes / 1e9:.1f} GB{rate}"
        report(done, total, f"{size}; {detail}" if detail else size)

    return with_rate


class _Lines:
    """Report that prints a line every few seconds, and one at the end of work that took longer."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._start: tuple[float, int] | None = None  # time and units done at the first call
        self._printed_at = 0.0
        self._printed = self._ended = False

    def __call__(self, done: int, total: int, detail: str = "") -> None:
        now = time.monotonic()
        if self._start is None:
            self._start, self._printed_at = (now, done), now
        ends = done >= total and self._printed and not self._ended
        if ends or now - self._printed_at >= LINE_SECONDS:
            print(printable(self._line(now, done, total, detail)), file=sys.stderr, flush=True)
            self._printed_at, self._printed, self._ended = now, True, done >= total

    def _line(self, now: float, done: int, total: int, detail: str) -> str:
        assert self._start is not None
        elapsed, made = now - self._start[0], done - self._start[1]
        parts = [f"{self._label}: {done} of {total} ({100 * done // max(1, total)}%)", format_duration(elapsed)]
        if made > 0 and done < total:
            parts.append(f"{format_duration(elapsed / made * (total - done))} left")
        return ", ".join(parts) + (f"; {detail}" if detail else "")


_bars: list[Progress] = []  # bars in use, the inner ones last; only the last one is drawn


def hide_bars() -> None:
    """Erase bars until their next report; call this before anything else is printed to standard error."""
    for bar in _bars:
        bar.stop()


@contextmanager
def _bar(label: str) -> Iterator[Report]:
    from rich.console import Console  # here, since the command line imports this module for every command
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[detail]}", style="dim", markup=False),
    )
    # standard output may be a file, and what is written there must not be drawn above the bar
    bar = Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False, redirect_stdout=False)
    drawn_at = 0.0

    def report(done: int, total: int, detail: str = "") -> None:
        nonlocal drawn_at
        if not bar.tasks:
            hide_bars()
            bar.add_task(printable(label), total=total, detail="")
            _bars.append(bar)
        bar.update(bar.tasks[0].id, completed=done, total=total, detail=printable(detail))
        if not bar.live.is_started:
            bar.start()
        now = time.monotonic()
        if done >= total or detail or now - drawn_at >= _REFRESH_SECONDS:
            bar.refresh()
            drawn_at = now

    try:
        yield report
    finally:
        if bar in _bars:
            _bars.remove(bar)
            bar.stop()


def format_duration(seconds: float) -> str:
    """Return "12 s", "3 min 20 s" or "2 h 5 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
