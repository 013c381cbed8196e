"""Worker threads whose end is waited for with a time limit."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from spmoe.errors import TransferError

JOIN_SECONDS = 30.0  # longest wait for a running call to end


class Workers:
    """A few threads that run calls in order. Every call ends in its future, whatever it raises."""

    def __init__(self, count: int, name: str) -> None:
        self._name = name
        self._threads = ThreadPoolExecutor(count, name)
        self._running: set[Future[Any]] = set()
        self._closed = False

    def submit(self, call: Callable[..., None], *arguments: Any) -> Future[None]:
        """Queue a call. Raise TransferError after `close`.

        Any other error, such as of a thread that cannot start, leaves a call in the queue that may still run: it ends
        with `close`.
        """
        try:
            future = self._threads.submit(call, *arguments)
        except RuntimeError as error:
            if self._closed:
                raise TransferError("the engine is closed") from error
            raise
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    def close(self) -> None:
        """Cancel the calls that have not begun, and wait for the others. Idempotent."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        if stuck := wait(list(self._running), JOIN_SECONDS).not_done:
            raise TransferError(
                f"{len(stuck)} calls of {self._name} have not ended for {JOIN_SECONDS:g} s; the disk or the device may "
                "be stuck"
            )
        self._threads.shutdown(wait=True)
