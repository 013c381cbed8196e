"""An engine survives exceptions in expert arithmetic and a fork, and releases everything when it is dropped."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from checkpoints import Pair
from recovery import Resources, tokens
from spmoe import LLM
from spmoe.backends.cpu import CpuBackend
from spmoe.errors import SpmoeError, TransferError


def make(pair: Pair) -> LLM:
    return LLM(str(pair.target), str(pair.good), expert_memory="25%", dtype="float32", progress=False)


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, KeyboardInterrupt, TransferError])
def test_no_pin_outlives_an_exception_in_expert_arithmetic(
    mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Slots are few, so that experts that stay pinned would leave none for the next request."""
    kept: list[BaseException] = []  # with its traceback, and so with every frame that it has passed
    with make(mixtral_pair) as llm:
        expected, resources = tokens(llm), Resources(llm)

        def fail(self: CpuBackend, experts: Any, hidden: Any, index: Any, weights: Any, batches: Iterable[Any]) -> None:
            next(iter(batches))
            raise error("no arithmetic")

        for _ in range(3):
            with monkeypatch.context() as patch:
                patch.setattr(CpuBackend, "run_experts", fail)
                with pytest.raises(error) as failure:
                    tokens(llm)
            kept.append(failure.value)
            assert tokens(llm) == expected
            assert resources.lost() == []


def test_a_dropped_engine_releases_its_threads_and_files(mixtral_pair: Pair) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    with make(mixtral_pair) as llm:
        tokens(llm)
    gc.collect()
    before = threading.active_count(), descriptors()
    for _ in range(3):
        llm = make(mixtral_pair)
        tokens(llm)
        assert threading.active_count() > before[0]
        del llm
        gc.collect()
    assert (threading.active_count(), descriptors()) == before


def test_a_dropped_stream_does_not_keep_its_engine(mixtral_pair: Pair) -> None:
    before = threading.active_count()
    stream = make(mixtral_pair).stream([1, 2, 3])
    next(iter(stream))
    assert threading.active_count() > before, "the stream keeps its engine"
    del stream
    gc.collect()
    assert threading.active_count() == before


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork in a process with threads
def test_a_forked_process_is_refused(mixtral_pair: Pair) -> None:
    with make(mixtral_pair) as llm:
        expected = tokens(llm)
        if not (child := os.fork()):
            try:
                llm.generate([[1, 2, 3]])
            except SpmoeError as error:
                llm.close()
                os._exit(0 if '"spawn"' in str(error) else 2)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert tokens(llm) == expected, "the parent's engine runs on"
