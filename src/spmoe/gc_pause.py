"""Python's collector of cycles, held off where it would do harm."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _PauseState:
    """How many hold it off now, and whether it ran before the first of them did."""

    lock = threading.Lock()
    count = 0
    enabled = True


@contextmanager
def gc_paused() -> Iterator[None]:
    """Without the collector inside, whoever else leaves such a block meanwhile.

    What is freed at once when nobody refers to it is freed as ever.
    """
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
