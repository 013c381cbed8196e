"""The experts room with its real threads: random work and faults, every byte checked, no deadlock, nothing left."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from experts_helpers import LAYOUT, blob_of, fill, own_threads, spec_of, within

from spmoe.errors import SpmoeError, TransferError
from spmoe.experts.batches import ExpertBatch
from spmoe.experts.eviction import make_eviction
from spmoe.experts.link import ThrottledTransfer
from spmoe.experts.slots import MemorySlots
from spmoe.experts.source import ExpertSource
from spmoe.experts.store import ExpertFile, ensure_expert_file
from spmoe.experts.transfer import CopyHandle, CopyJob, FileTransfer, HostPaced, Transfer
from spmoe.observe.clock import RealClock
from spmoe.observe.ledger import Counters
from spmoe.registry import EVICTION_POLICIES
from spmoe.types import ExpertKey, PrefetchRequest, PrefetchRequests, Residency

EXPERTS = (6, 4, 6, 5)
CONTENT = {
    ExpertKey(layer, e): blob_of(ExpertKey(layer, e)) for layer, count in enumerate(EXPERTS) for e in range(count)
}
GARBAGE = b"\xaa" * LAYOUT.nbytes
LIMIT = 60.0  # seconds after which a test that hangs gives up


class FlakyTicket:
    """Ends later than the copy it stands for, and not always well."""

    def __init__(self, inner: CopyHandle, delay: float, fails: bool) -> None:
        self._inner = inner
        self._until = time.perf_counter() + delay
        self._fails = fails

    def ready(self) -> bool:
        return self._inner.ready() and time.perf_counter() >= self._until

    def wait(self) -> None:
        self._inner.wait()
        time.sleep(max(0.0, self._until - time.perf_counter()))
        if self._fails:
            raise TransferError("injected: the disk had a bad moment")

    order = wait

    def prioritize(self) -> None:
        self._inner.prioritize()


class FlakyTransfer(HostPaced):
    """Another transfer with faults; it scribbles over every slot before a copy begins, as a torn write would."""

    def __init__(self, inner: Transfer, slots: MemorySlots, seed: int, fault_rate: float) -> None:
        self.depth = inner.depth
        self._inner = inner
        self._buffers = [slots.buffer(slot) for slot in range(slots.count)]
        self._rng = random.Random(seed)
        self._fault_rate = fault_rate
        self._lock = threading.Lock()
        self._under_way: dict[int, FlakyTicket] = {}

    def copy(self, jobs: Sequence[CopyJob], *, urgent: bool) -> list[CopyHandle]:
        with self._lock:
            if self._rng.random() < self._fault_rate / 4:
                raise TransferError("injected: nothing can be submitted right now")
            for job in jobs:
                earlier = self._under_way.get(job.slot)
                assert earlier is None or earlier.ready(), "a slot that is being written is given away"
                self._buffers[job.slot][:] = GARBAGE
            handles: list[CopyHandle] = []
            for job, inner in zip(jobs, self._inner.copy(jobs, urgent=urgent), strict=True):
                delay = self._rng.choice([0.0, 0.0, 0.0, 0.0005, 0.002])
                handle = FlakyTicket(inner, delay, self._rng.random() < self._fault_rate)
                self._under_way[job.slot] = handle
                handles.append(handle)
            return handles

    def close(self) -> None:
        self._inner.close()


class Stand:
    """A source on a real file with real threads."""

    def __init__(self, path: Path, eviction: str, slots: int, *, seed: int, fault_rate: float, throttled: bool) -> None:
        clock = RealClock()
        self.slots = MemorySlots(slots, LAYOUT)
        self.counters = Counters()
        self.rng = random.Random(seed)
        transfer: Transfer = FileTransfer(ExpertFile.open(path), self.slots, readers=3)
        if throttled:
            transfer = ThrottledTransfer(transfer, LAYOUT.nbytes, 0.05, clock)
        self.source = ExpertSource(
            self.slots,
            FlakyTransfer(transfer, self.slots, seed, fault_rate),
            make_eviction(eviction, EXPERTS),
            LAYOUT.nbytes,
            clock,
            self.counters,
        )
        self.faults = 0
        self.asked = 0

    def check(self, batch: ExpertBatch) -> None:
        for expert, weights in zip(batch.experts, batch.weights, strict=True):
            content = CONTENT[ExpertKey(batch.layer, expert)]
            for field in LAYOUT.fields:
                assert weights[field.name].numpy().tobytes() == content[field.offset : field.offset + field.nbytes]

    def use(self, layer: int, experts: list[int]) -> None:
        """Take all batches; the content must be right when a batch comes and still when it is given back."""
        self.asked += len(experts)
        delivered: list[int] = []
        stop_after = self.rng.choice([None] * 8 + [1])
        batches = self.source.use(layer, experts)
        for batch in batches:
            self.check(batch)
            if self.rng.random() < 0.2:
                time.sleep(0.001)
                self.check(batch)
            delivered += batch.experts
            if stop_after == 1:
                batches.close()  # type: ignore[attr-defined]
                return
        assert sorted(delivered) == sorted(experts)

    def step(self) -> None:
        rng, source = self.rng, self.source
        source.begin_step()
        source.grants.step_budget = rng.choice([None, None, 3 * LAYOUT.nbytes])
        needed = [rng.sample(range(count), rng.randint(1, count)) for count in EXPERTS]
        for layer, experts in enumerate(needed):
            guesses = [e for e in range(EXPERTS[layer]) if (e in experts) == (rng.random() < 0.8)]
            source.prefetch(
                PrefetchRequests.of(PrefetchRequest(ExpertKey(layer, e), rng.random(), layer) for e in guesses)
            )
        for layer, experts in enumerate(needed):
            try:
                self.use(layer, experts)
            except TransferError as error:
                if "injected" not in str(error):
                    raise
                self.faults += 1
        source.end_step()

    def settle(self) -> None:
        """Wait until nothing is under way, then see that the books agree with the slots."""
        source = self.source
        source.end_step()
        while any(e.state is Residency.LOADING for e in source.cache.entries()):
            source.pump()
            time.sleep(0.001)
        entries = source.cache.entries()
        assert len({e.slot for e in entries}) == len(entries) <= self.slots.count >= source.cache.peak
        for entry in entries:
            assert entry.pins == 0
            assert bytes(self.slots.buffer(entry.slot)) == CONTENT[entry.key]
        assert self.counters.asked == self.asked
        assert self.counters.held_bytes == LAYOUT.nbytes * sum(e.prefetched for e in entries)


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Callable[..., Stand]]:
    """Make stands; they are closed, and every thread of theirs is gone, when the test ends."""
    before = own_threads()
    path = tmp_path / "model.safetensors"
    ensure_expert_file(path, spec_of(EXPERTS), fill).close()
    made: list[Stand] = []

    def make(
        eviction: str = "lru", slots: int = 5, *, seed: int = 0, fault_rate: float = 0.0, throttled: bool = False
    ) -> Stand:
        made.append(Stand(path, eviction, slots, seed=seed, fault_rate=fault_rate, throttled=throttled))
        return made[-1]

    yield make
    for one in made:
        within(LIMIT, one.source.close)
    assert own_threads() == before


@pytest.mark.parametrize("eviction", EVICTION_POLICIES.names())
@pytest.mark.parametrize("slots", [1, 2, 7])
@pytest.mark.parametrize(("fault_rate", "throttled"), [(0.0, False), (0.1, False), (0.1, True)])
def test_every_wave_is_right_whatever_happens(
    stand: Callable[..., Stand], eviction: str, slots: int, fault_rate: float, throttled: bool
) -> None:
    steps = 12 if throttled else 25
    one = stand(eviction, slots, seed=slots, fault_rate=fault_rate, throttled=throttled)

    def work() -> None:
        for _ in range(steps):
            one.step()
        one.settle()

    within(LIMIT, work)
    assert (one.faults > 0) == (fault_rate > 0), "the faults were meant to be met"
    within(LIMIT, one.source.close)
    within(LIMIT, one.source.close)


@pytest.mark.parametrize("throttled", [False, True])
def test_closing_from_another_thread_ends_a_model_in_the_middle(stand: Callable[..., Stand], throttled: bool) -> None:
    for seed in range(6):
        one = stand(slots=3, seed=seed, fault_rate=0.05, throttled=throttled)
        warm = threading.Event()
        outcome: list[SpmoeError] = []

        def work(one: Stand = one, warm: threading.Event = warm, outcome: list[SpmoeError] = outcome) -> None:
            try:
                while True:
                    one.step()
                    warm.set()
            except SpmoeError as error:
                outcome.append(error)

        worker = threading.Thread(target=lambda work=work: within(LIMIT, work), daemon=True)
        worker.start()
        assert warm.wait(LIMIT)
        time.sleep(random.Random(seed).random() / 100)
        within(LIMIT, one.source.close)
        worker.join(LIMIT)
        assert not worker.is_alive(), "the model's thread hangs"
        assert "closed" in str(outcome[0])
        assert not own_threads()


def test_after_close_nothing_moves_any_more(stand: Callable[..., Stand]) -> None:
    one = stand(slots=4)
    within(LIMIT, lambda: one.use(0, [0, 1]))
    within(LIMIT, one.source.close)
    issued = one.counters.issued_bytes
    one.source.prefetch(PrefetchRequests.of([PrefetchRequest(ExpertKey(3, 0), 1.0, 3)]))
    assert one.source.pump() is None
    assert one.counters.issued_bytes == issued
    with pytest.raises(TransferError, match="closed"):
        within(LIMIT, lambda: one.use(1, [0]))


def test_wishes_move_by_themselves(stand: Callable[..., Stand]) -> None:
    """The worker, and nobody else, brings what was wished for; more than its depth of them."""
    one = stand(slots=7)
    wished = [ExpertKey(3, e) for e in range(5)]
    one.source.begin_step()
    one.source.prefetch(PrefetchRequests.of(PrefetchRequest(key, 0.5, key.layer) for key in wished))

    def arrive() -> None:
        while one.counters.prefetch_loads < len(wished):
            time.sleep(0.001)
        one.settle()

    within(LIMIT, arrive)
    assert {e.key for e in one.source.cache.entries() if e.prefetched} == set(wished)
    within(LIMIT, lambda: one.use(3, list(range(5))))
    assert (one.counters.hits, one.counters.demand_loads) == (5, 0)
