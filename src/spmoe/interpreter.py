"""Python's interpreter: a pause of its garbage collector, and a way to let other threads have it."""

from __future__ import annotations

import gc
import select
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


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
