"""No slot is given away while somebody reads or writes it: pins are counted, and copies of a failed step end first."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from experts_helpers import LAYOUT, blob_of, cache_of, fill, own_threads, spec_of, within

from spmoe.experts.cache import Entry, ExpertCache
from spmoe.experts.eviction import make_eviction
from spmoe.experts.experts import Experts
from spmoe.experts.slots import MemorySlots
from spmoe.experts.store import ExpertFile, ensure_expert_file
from spmoe.experts.transfer import FileTransfer
from spmoe.observe.clock import RealClock
from spmoe.types import ExpertKey

LIMIT = 30.0  # seconds after which a test that hangs fails
EXPERTS = (4, 4)


# ---- pins


def ready(cache: ExpertCache, layer: int, expert: int) -> Entry:
    """Insert an expert and let its copy end."""
    (reservation,) = cache.reserve_for_demand([ExpertKey(layer, expert)])
    cache.mark_ready(reservation.entry)
    return reservation.entry


@pytest.mark.parametrize("pins", [2, 3])
def test_expert_stays_pinned_until_its_last_unpin(pins: int) -> None:
    cache = ExpertCache(1, make_eviction("lru", EXPERTS))
    entry, other = ready(cache, 0, 0), ExpertKey(1, 0)
    for _ in range(pins):
        cache.pin(entry)
    for _ in range(pins):
        assert cache.reserve(other) is None, "a prefetch does not evict it"
        assert list(cache.reserve_for_demand([other])) == [], "nor does a demand"
        assert cache.get(entry.key) is entry
        cache.unpin(entry)
    (reservation,) = cache.reserve_for_demand([other])
    assert reservation.evicted is entry


@pytest.mark.parametrize(("busy", "evicted"), [((), 0), ((0,), 1), ((0, 1), 2), ((0, 1, 2), None)])
def test_a_prefetch_takes_another_slot_than_one_of_a_layer_that_runs(
    busy: tuple[int, ...], evicted: int | None
) -> None:
    cache = ExpertCache(4, make_eviction("lru", (2, 2, 2, 2)), table := np.empty((4, 2), dtype=np.int32))
    for layer in (0, 1, 2):
        for _ in range(1 + (layer == 0)):
            ready(cache, layer, int(table[layer, 0] >= 0))
    before = table.copy()

    def is_quiet(layer: int) -> bool:
        assert (table[layer] != before[layer]).sum() == 1, "the table names the victim no more"
        return layer not in busy

    reservation = cache.reserve(ExpertKey(3, 0), is_quiet=is_quiet)
    if evicted is None:
        assert reservation is None
        assert (table == before).all()
    else:
        assert reservation is not None
        assert reservation.evicted is not None
        assert reservation.evicted.key == (evicted, 0)
        assert (table != before).sum() == 1


def test_expert_pinned_while_it_loads_stays_pinned_when_it_is_ready() -> None:
    cache = ExpertCache(1, make_eviction("lru", EXPERTS))
    (reservation,) = cache.reserve_for_demand([ExpertKey(0, 0)])
    entry = reservation.entry
    cache.pin(entry)
    cache.pin(entry)
    cache.unpin(entry)
    cache.mark_ready(entry)
    assert list(cache.reserve_for_demand([ExpertKey(1, 0)])) == []
    cache.unpin(entry)
    assert list(cache.reserve_for_demand([ExpertKey(1, 0)])) != []


# ---- copies


class Gate:
    """Stands in for os.preadv: reads wait until the gate is open; `read` has the offset of each read that began."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.read: list[int] = []
        self._began = threading.Event()
        self._own = os.preadv

    def __call__(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        self.read.append(offset)
        self._began.set()
        assert self.open.wait(LIMIT)
        return self._own(fd, buffers, offset)

    def wait_for_a_read(self) -> None:
        assert self._began.wait(LIMIT)


class Subject:
    """Experts over a real file, whose readers wait at a gate."""

    def __init__(self, path: Path, gate: Gate) -> None:
        self.gate = gate
        self.file = ExpertFile.open(path)
        self.slots = MemorySlots(3, LAYOUT)
        transfer = FileTransfer(self.file, self.slots, readers=2)
        self.experts = Experts.build(
            self.slots, transfer, make_eviction("lru", EXPERTS), LAYOUT.nbytes, RealClock(), threaded=False
        )

    def load(self, layer: int, experts: list[int]) -> None:
        """Use experts, and check the bytes in their slots."""

        def use() -> None:
            for batch in self.experts.access.use(layer, experts):
                self.check(batch.layer, batch.experts)

        within(LIMIT, use)

    def check(self, layer: int, experts: tuple[int, ...]) -> None:
        for expert in experts:
            entry = cache_of(self.experts).get(ExpertKey(layer, expert))
            assert entry is not None
            assert bytes(self.slots.buffer(entry.slot)) == blob_of(entry.key)

    def reset(self) -> None:
        """Reset while a copy is held up; check that it waits for that copy."""
        resetting = threading.Thread(target=lambda: self.experts.reset(make_eviction("lru", EXPERTS)))
        resetting.start()
        resetting.join(0.2)
        assert resetting.is_alive(), "the copy that has begun still writes its slot"
        self.gate.open.set()
        resetting.join(LIMIT)
        assert not resetting.is_alive()


@pytest.fixture
def subject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Subject]:
    before = own_threads()
    path = tmp_path / "model.safetensors"
    ensure_expert_file(path, spec_of(EXPERTS), fill).close()
    gate = Gate()
    monkeypatch.setattr(os, "preadv", gate)
    made = Subject(path, gate)
    yield made
    gate.open.set()
    within(LIMIT, made.experts.close)
    assert own_threads() == before


def fail_thread(monkeypatch: pytest.MonkeyPatch, is_wanted: Callable[[str], bool]) -> None:
    """Let threads of these names not start, as if the process had too many."""
    own = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if is_wanted(thread.name):
            raise RuntimeError("can't start new thread")
        own(thread)

    monkeypatch.setattr(threading.Thread, "start", start)


def test_reset_waits_for_running_copies_and_drops_queued_ones(subject: Subject) -> None:
    """Three demand loads, two readers: two reads have begun, and the third waits."""
    pool = subject.experts.pool
    demand = pool.claim(0, [0, 1, 2], None, ())
    subject.gate.wait_for_a_read()
    pool.abandon(demand)
    subject.reset()
    reads = len(subject.gate.read)
    assert reads <= 2
    assert subject.file.offset(ExpertKey(0, 2)) not in subject.gate.read, "it was never read"
    subject.load(1, [0, 1, 2])
    subject.check(1, (0, 1, 2))
    assert len(subject.gate.read) == reads + 3, "no copy of before has run"


def test_submission_that_fails_half_way_gives_no_slot_away(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread pool queues a call before it starts the thread for it: the call may run although `submit` failed."""
    with monkeypatch.context() as patch:
        fail_thread(patch, lambda name: name.startswith("spmoe-demand-reader_1"))
        with pytest.raises(RuntimeError, match="can't start new thread"):
            subject.experts.pool.claim(0, [0, 1, 2], None, ())
    subject.gate.wait_for_a_read()
    assert not cache_of(subject.experts)._free, "nobody can tell which copies will run"
    subject.reset()
    reads = len(subject.gate.read)
    subject.load(1, [0, 1, 2])
    subject.check(1, (0, 1, 2))
    assert len(subject.gate.read) == reads + 3
