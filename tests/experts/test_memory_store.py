"""The store in host memory: filled by several threads, in pieces that are pinned as soon as they are complete."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from spmoe.backends.cuda_memory import HostStore
from spmoe.backends.cuda_runtime import CudaCallError
from spmoe.errors import StoreError
from spmoe.experts.memory_store import MemoryStore
from spmoe.experts.store import StoreSpec
from spmoe.formats.layout import BlobLayout
from spmoe.types import ExpertKey

SPEC = StoreSpec("0" * 64, BlobLayout.of({"weight": (8, 16)}, torch.float32), (5, 5, 5))
BLOB = SPEC.layout.nbytes


def content(key: ExpertKey) -> float:
    return float(100 * key.layer + key.expert + 1)


def fill(key: ExpertKey, views: dict[str, Tensor]) -> None:
    views["weight"].fill_(content(key))


def ignore(done: int, total: int) -> None:
    """Take progress."""


class FakeRuntime:
    """Pinning that is only noted; fails from the `fails_at`-th call on."""

    def __init__(self, store_bytes: dict[int, int], fails_at: int | None = None) -> None:
        self.pinned = store_bytes  # sizes by address
        self.calls = 0
        self.fails_at = fails_at
        self.lock = threading.Lock()

    def lock_pages(self, address: int, nbytes: int) -> None:
        with self.lock:
            self.calls += 1
            if self.fails_at is not None and self.calls >= self.fails_at:
                raise CudaCallError("cudaHostRegister failed: out of memory")
            self.pinned[address] = nbytes

    def unlock_pages(self, address: int) -> None:
        del self.pinned[address]


def store_with(runtime: FakeRuntime, *, pinned: bool = True) -> HostStore:
    return HostStore(SPEC, runtime, pinned=pinned)  # type: ignore[arg-type]


def test_every_blob_is_filled_and_read() -> None:
    store, seen = MemoryStore(SPEC), list[tuple[int, int]]()
    before = torch.get_num_threads()
    store.fill(fill, lambda done, total: seen.append((done, total)))
    assert seen == [(done, 15) for done in range(16)]
    assert torch.get_num_threads() == before
    buffer = bytearray(BLOB)
    for key in list(SPEC.keys()):
        store.read(key, memoryview(buffer))
        assert set(torch.frombuffer(buffer, dtype=torch.float32)[:128].tolist()) == {content(key)}
        assert store.address(key) - store.address(ExpertKey(0, 0)) == (5 * key.layer + key.expert) * BLOB
    store.close()
    store.close()


def test_several_threads_fill_at_once() -> None:
    together = threading.Barrier(3, timeout=20)  # breaks unless three calls run at the same time

    def fill_together(key: ExpertKey, views: dict[str, Tensor]) -> None:
        together.wait()
        fill(key, views)

    MemoryStore(SPEC).fill(fill_together, ignore)


def test_first_error_is_raised_when_no_thread_writes_any_more() -> None:
    store, running = MemoryStore(SPEC), set[int]()

    def failing(key: ExpertKey, views: dict[str, Tensor]) -> None:
        running.add(threading.get_ident())
        try:
            if key == ExpertKey(1, 1):
                raise StoreError("damaged")
            fill(key, views)
        finally:
            running.discard(threading.get_ident())

    with pytest.raises(StoreError, match="damaged"):
        store.fill(failing, ignore)
    assert not running
    assert not [thread for thread in threading.enumerate() if thread.name == "spmoe-experts"]


def test_interrupt_ends_all_threads() -> None:
    def interrupt(done: int, total: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        MemoryStore(SPEC).fill(fill, interrupt)
    assert not [thread for thread in threading.enumerate() if thread.name == "spmoe-experts"]


@pytest.mark.parametrize(("piece", "sizes"), [(4, [4, 4, 4, 3]), (1, [1] * 15), (100, [15])])
def test_pieces_of_whole_blobs_are_pinned_once_they_are_filled(
    piece: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spmoe.backends.cuda_memory._PIECE_BYTES", piece * BLOB)
    runtime = FakeRuntime({})
    store = store_with(runtime)

    def check_and_fill(key: ExpertKey, views: dict[str, Tensor]) -> None:
        address = store.address(key)
        assert not any(first <= address < first + size for first, size in dict(runtime.pinned).items())
        fill(key, views)

    store.fill(check_and_fill, ignore)
    assert [size // BLOB for _, size in sorted(runtime.pinned.items())] == sizes
    assert min(runtime.pinned) == store.address(ExpertKey(0, 0))
    store.close()
    store.close()
    assert not runtime.pinned


def test_pageable_store_is_not_pinned() -> None:
    runtime = FakeRuntime({})
    store_with(runtime, pinned=False).fill(fill, ignore)
    assert not runtime.calls


def test_failed_pinning_says_what_to_do_and_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spmoe.backends.cuda_memory._PIECE_BYTES", BLOB)
    runtime = FakeRuntime({}, fails_at=3)
    store = store_with(runtime)
    with pytest.raises(StoreError, match=r"cannot pin .* raise `ulimit -l`.*--no-pin-memory"):
        store.fill(fill, ignore)
    assert len(runtime.pinned) == 2
    store.close()
    assert not runtime.pinned


def test_large_blobs_are_filled_by_fewer_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    from spmoe.experts import memory_store

    cores: Any = type("Processor", (), {"usable_cores": 64})
    monkeypatch.setattr(memory_store, "processor", cores)
    counts = [memory_store._filler_count(nbytes) for nbytes in (2**20, 2**28, 2**40)]
    assert counts == [16, 5, 1]
