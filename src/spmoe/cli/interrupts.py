"""Ctrl-C where no command runs: while modules are imported, and while the interpreter ends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130  # exit code after Ctrl-C, as shells have it


def exit_at_once(signum: int, frame: object) -> None:
    """End the process; a signal handler for times when there is nothing to clean up."""
    os._exit(INTERRUPTED)


@contextmanager
def nothing_to_clean_up() -> Iterator[None]:
    """Let Ctrl-C end the process at once, for imports: a KeyboardInterrupt inside of them can get lost or wrapped.

    Does nothing on other threads, and if the program or the shell has set a handler of its own.
    """
    on_main = threading.current_thread() is threading.main_thread()
    if not on_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, exit_at_once)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
