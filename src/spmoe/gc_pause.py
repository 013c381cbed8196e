"""Pause of Python's cyclic garbage collector."""

from __future__ import annotations

import gc
import threading
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
