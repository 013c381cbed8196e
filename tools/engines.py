"""Engines that are built one after the other, for measurements: experts stay in host memory from one to the next."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from spmoe import LLM


class EngineSequence:
    """Builds engines; one whose experts equal those of the engine before takes them over. A context manager."""

    def __init__(self) -> None:
        self._store: Any = None

    def __enter__(self) -> EngineSequence:
        return self

    def __exit__(self, *exc: object) -> None:
        self._close_store()

    @contextmanager
    def build(self, model: str | None, draft: str | None, **options: Any) -> Iterator[LLM]:
        """Build an engine, and close it at the end; its experts are kept on a GPU."""
        store, self._store = self._store, None
        gc.collect()  # an engine that was closed keeps the memory of its captured graphs until its caller drops it
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            llm = LLM(model, draft, store=store, **options)
        except BaseException:
            if store is not None:
                store.close()
            raise
        with llm:
            try:
                yield llm
            finally:
                self._store = llm.engine.parts.runtime.take_store()

    def forget(self) -> None:
        """Free the experts before an engine with others is built: both might not fit in host memory."""
        self._close_store()

    def _close_store(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()
