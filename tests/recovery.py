"""Checks that an engine has recovered: right tokens within a time limit, and nothing lost."""

from __future__ import annotations

import faulthandler
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spmoe import LLM, SamplingParams

PROMPT = [5, 9, 2, 6, 5, 3]
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
SECONDS = 40.0  # for one request


class Resources:
    """Count of the threads and file descriptors of an idle engine, to be compared with later ones."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._threads, self._descriptors = set(threading.enumerate()), _descriptors()

    def lost(self) -> list[str]:
        """Return a line for each pin, slot, thread, descriptor or KV cache that the engine has lost."""
        return within(SECONDS, lambda: self._llm._thread.call(self._lost))

    def _lost(self) -> list[str]:
        pool = self._llm.engine.experts.pool
        cache, found = pool._cache, []
        pool.residents()  # waits for copies
        if pinned := [entry.key for entry in cache.entries() if entry.pins]:
            found.append(f"experts stay pinned: {pinned}")
        if any(cache._layer_pins) or pool._demands:
            found.append("a layer stays pinned, or a demand open")
        if len(cache.entries()) + len(cache._free) != cache.slot_count:
            found.append("a slot is lost")
        if self._llm.engine.parts.target_kv:
            found.append("a KV cache is not released")
        # pools start their threads when needed; one that takes the place of a lost pool repeats its names
        started = [t.name for t in threading.enumerate() if t not in self._threads and t.name.startswith("spmoe")]
        if len(set(started)) < len(started):
            found.append(f"threads of a replaced pool still run: {sorted(started)}")
        if _descriptors() > self._descriptors:
            found.append("a file descriptor is lost")
        return found


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """Run a call on another thread; raise TimeoutError if it does not end."""
    result: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        sys.settrace(None)
        try:
            result.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        faulthandler.dump_traceback()  # of all threads
        raise TimeoutError(f"no end after {seconds:g} s")
    if errors:
        raise errors[0]
    return result[0]


def tokens(llm: LLM) -> list[int]:
    """Generate within the time limit; return the tokens, or raise the request's exception."""
    return within(SECONDS, lambda: llm.generate([PROMPT], PARAMS)[0].token_ids)  # type: ignore[no-any-return]


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
