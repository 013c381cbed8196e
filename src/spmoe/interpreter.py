"""Python's interpreter: a pause of its garbage collector, threads that give way to others, and short sleeps."""

from __future__ import annotations

import ctypes
import gc
import select
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class _PauseState:
    """Number of active pauses, and whether the collector was enabled before the first."""

    lock = threading.Lock()
    count = 0
    enabled = True


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause cyclic garbage collection (re-entrant, thread-safe). Reference counting frees objects as usual."""
    with _PauseState.lock:
        if not _PauseState.count:
            _PauseState.enabled = gc.isenabled()
        _PauseState.count += 1
        gc.disable()
    try:
        yield
    finally:
        with _PauseState.lock:
            _PauseState.count -= 1
            if not _PauseState.count and _PauseState.enabled:
                gc.enable()


def let_others_run() -> None:
    """Let other threads have the interpreter, in a loop that waits for a device.

    `time.sleep(0)` sleeps for 50 to 70 us in Python 3.11 to 3.13 on Linux, longer than many layers take.
    """
    if sys.platform == "win32":
        time.sleep(0)
    else:
        select.select((), (), (), 0)  # a system call that returns at once


_SET_TIMER_SLACK = 29  # PR_SET_TIMERSLACK of prctl
_TIMER_SLACK_NS = 1000


def shorten_sleeps() -> None:
    """Let sleeps of the calling thread, and of threads that it starts later, end about when they are due.

    Linux wakes a thread up to 50 us late, so that it can wake several at once.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # a C library without prctl
            ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, ctypes.c_ulong(_TIMER_SLACK_NS), *[ctypes.c_ulong(0)] * 3)
