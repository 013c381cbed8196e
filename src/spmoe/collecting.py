"""Python's collector of cycles, held off where it would do harm."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Held:
    """How many hold it off now, and whether it ran before the first of them did."""

    lock = threading.Lock()
    count = 0
    enabled = True


@contextmanager
def no_collection() -> Iterator[None]:
    """Without the collector inside, whoever else leaves such a block meanwhile.

    What is freed at once when nobody refers to it is freed as ever.
    """
    with _Held.lock:
        if not _Held.count:
            _Held.enabled = gc.isenabled()
        _Held.count += 1
        gc.disable()
    try:
        yield
    finally:
        with _Held.lock:
            _Held.count -= 1
            if not _Held.count and _Held.enabled:
                gc.enable()
