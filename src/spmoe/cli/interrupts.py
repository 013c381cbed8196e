"""Ctrl-C where no command runs: while modules are imported, and while the interpreter ends."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from spmoe.interpreter import gc_paused

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


def import_engine() -> None:
    """Import torch and all that needs it, which takes seconds. Call this before other imports that need torch.

    torch aborts if a KeyboardInterrupt comes while it is imported; here Ctrl-C ends the process. Imports make a million
    objects that stay. So garbage collection is paused meanwhile, and later collections leave them out.
    """
    if "spmoe.engine.llm" in sys.modules:
        return
    with nothing_to_clean_up(), gc_paused():
        import spmoe.engine.llm  # noqa: F401

        gc.freeze()


@contextmanager
def watched_interrupts() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether Ctrl-C was pressed inside, also if the KeyboardInterrupt got lost.

    Imports of modules that import each other lazily report such an interrupt as a module that does not exist.
    """
    if threading.current_thread() is not threading.main_thread():  # only that one may set the file descriptor
        yield lambda: False
        return
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)  # gets the number of every signal

    def pressed() -> bool:
        with suppress(BlockingIOError):
            return signal.SIGINT in os.read(reading, 4096)
        return False

    try:
        yield pressed
    finally:
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)
