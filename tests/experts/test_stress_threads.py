"""Experts with real threads: random work and faults; every byte is checked, nothing deadlocks, no thread stays."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from experts_helpers import LAYOUT, blob_of, cache_of, fill, own_threads, requests_for, spec_of, within

from spmoe.errors import SpmoeError, TransferError
from spmoe.experts.access import ExpertBatch
from spmoe.experts.eviction import make_eviction
from spmoe.experts.experts import Experts
from spmoe.experts.link import ThrottledTransfer
from spmoe.experts.slots import MemorySlots
from spmoe.experts.store import ExpertFile, ensure_expert_file
from spmoe.experts.transfer import CopyHandle, CopyJob, FileTransfer, HostCompute, Transfer
from spmoe.observe.clock import RealClock
from spmoe.registry import EVICTION_POLICIES
from spmoe.types import ExpertKey, PrefetchRequest, PrefetchRequests

EXPERTS = (6, 4, 6, 5)
CONTENT = {
    ExpertKey(layer, e): blob_of(ExpertKey(layer, e)) for layer, count in enumerate(EXPERTS) for e in range(count)
}
GARBAGE = b"\xaa" * LAYOUT.nbytes
LIMIT = 60.0  # seconds after which a test that hangs fails


class FlakyHandle:
    """Handle that is ready later than the copy behind it, and may fail."""

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
            raise TransferError("injected: the copy failed")

    stream_wait = wait

    def prioritize(self) -> None:
        self._inner.prioritize()


class FlakyTransfer(HostCompute):
    """Another transfer with injected faults; it overwrites a slot with garbage before the slot's copy starts."""

    def __init__(self, inner: Transfer, slots: MemorySlots, seed: int, fault_rate: float) -> None:
        self.depth = inner.depth
        self._inner = inner
        self._buffers = [slots.buffer(slot) for slot in range(slots.count)]
        self._rng = random.Random(seed)
        self._fault_rate = fault_rate
        self._lock = threading.Lock()
        self._latest: dict[int, FlakyHandle] = {}  # by slot

    def copy(self, jobs: Sequence[CopyJob], *, urgent: bool) -> list[CopyHandle]:
        with self._lock:
            if self._rng.random() < self._fault_rate / 4:
                raise TransferError("injected: the submission was refused")
            for job in jobs:
                earlier = self._latest.get(job.slot)
                assert earlier is None or earlier.ready(), "a slot that is being written is overwritten"
                self._buffers[job.slot][:] = GARBAGE
            handles: list[CopyHandle] = []
            for job, inner in zip(jobs, self._inner.copy(jobs, urgent=urgent), strict=True):
                delay = self._rng.choice([0.0, 0.0, 0.0, 0.0005, 0.002])
                handle = FlakyHandle(inner, delay, self._rng.random() < self._fault_rate)
                self._latest[job.slot] = handle
                handles.append(handle)
            return handles

    def close(self) -> None:
        self._inner.close()


class StressedExperts:
    """Experts over a real file, with reader threads and a prefetch worker."""

    def __init__(self, path: Path, eviction: str, slots: int, *, seed: int, fault_rate: float, throttled: bool) -> None:
        clock = RealClock()
        self.slots = MemorySlots(slots, LAYOUT)
        self.rng = random.Random(seed)
        transfer: Transfer = FileTransfer(ExpertFile.open(path), self.slots, readers=3)
        if throttled:
            transfer = ThrottledTransfer(transfer, LAYOUT.nbytes, 0.05, clock)
        flaky = FlakyTransfer(transfer, self.slots, seed, fault_rate)
        self.experts = Experts.build(self.slots, flaky, make_eviction(eviction, EXPERTS), LAYOUT.nbytes, clock)
        self.counters = self.experts.ledger.counters
        self.faults = 0
        self.routed = 0

    def check(self, batch: ExpertBatch) -> None:
        for expert, weights in zip(batch.experts, batch.weights, strict=True):
            content = CONTENT[ExpertKey(batch.layer, expert)]
            for field in LAYOUT.fields:
                assert weights[field.name].numpy().tobytes() == content[field.offset : field.offset + field.nbytes]

    def use(self, layer: int, experts: list[int]) -> None:
        """Take all batches, or now and then only the first; check the content when it comes and before its release."""
        self.routed += len(experts)
        delivered: list[int] = []
        only_first = self.rng.random() < 1 / 9
        batches = self.experts.access.use(layer, experts)
        for batch in batches:
            self.check(batch)
            if self.rng.random() < 0.2:
                time.sleep(0.001)
                self.check(batch)
            delivered += batch.experts
            if only_first:
                batches.close()
                return
        assert sorted(delivered) == sorted(experts)

    def run_step(self) -> None:
        rng = self.rng
        self.experts.step.begin()
        self.experts.scheduler.step_budget = rng.choice([None, None, 3 * LAYOUT.nbytes])
        routed = [rng.sample(range(count), rng.randint(1, count)) for count in EXPERTS]
        for layer, experts in enumerate(routed):
            predicted = [e for e in range(EXPERTS[layer]) if (e in experts) == (rng.random() < 0.8)]
            self.experts.scheduler.request(
                PrefetchRequests.of(PrefetchRequest(ExpertKey(layer, e), rng.random(), layer) for e in predicted)
            )
        for layer, experts in enumerate(routed):
            try:
                self.use(layer, experts)
            except TransferError as error:
                if "injected" not in str(error):
                    raise
                self.faults += 1
        self.experts.step.end()

    def settle(self) -> None:
        """Wait until no copy is in flight, then check slots and counters against each other."""
        self.experts.step.end()
        self.experts.pool.residents()
        entries = cache_of(self.experts).entries()
        assert self.experts.pool.loads_in_flight == 0
        assert len({entry.slot for entry in entries}) == len(entries) <= self.slots.count
        assert self.experts.pool.peak_slots <= self.slots.count
        for entry in entries:
            assert entry.pins == 0
            assert bytes(self.slots.buffer(entry.slot)) == CONTENT[entry.key]
        assert self.counters.asked == self.routed
        assert self.counters.held_bytes == LAYOUT.nbytes * sum(entry.prefetched for entry in entries)


MakeStressed = Callable[..., StressedExperts]


@pytest.fixture
def make_stressed(tmp_path: Path) -> Iterator[MakeStressed]:
    """Make experts that are closed at the end of the test; then check that their threads have ended."""
    before = own_threads()
    path = tmp_path / "model.safetensors"
    ensure_expert_file(path, spec_of(EXPERTS), fill).close()
    made: list[StressedExperts] = []

    def make(
        eviction: str = "lru", slots: int = 5, *, seed: int = 0, fault_rate: float = 0.0, throttled: bool = False
    ) -> StressedExperts:
        made.append(StressedExperts(path, eviction, slots, seed=seed, fault_rate=fault_rate, throttled=throttled))
        return made[-1]

    yield make
    for stressed in made:
        within(LIMIT, stressed.experts.close)
    assert own_threads() == before


@pytest.mark.parametrize("eviction", EVICTION_POLICIES.names())
@pytest.mark.parametrize(
    ("slots", "fault_rate", "throttled"), [(1, 0.1, False), (2, 0.0, False), (2, 0.1, True), (7, 0.1, False)]
)
def test_every_batch_has_the_right_content(
    make_stressed: MakeStressed, eviction: str, slots: int, fault_rate: float, throttled: bool
) -> None:
    steps = 12 if throttled else 25
    stressed = make_stressed(eviction, slots, seed=slots, fault_rate=fault_rate, throttled=throttled)

    def work() -> None:
        for _ in range(steps):
            stressed.run_step()
        stressed.settle()

    within(LIMIT, work)
    assert (stressed.faults > 0) == (fault_rate > 0), "the injected faults were met"
    within(LIMIT, stressed.experts.close)
    within(LIMIT, stressed.experts.close)


@pytest.mark.parametrize("throttled", [False, True])
def test_close_from_another_thread_ends_a_running_model(make_stressed: MakeStressed, throttled: bool) -> None:
    before = own_threads()  # engines that other tests share keep theirs
    for seed in range(6):
        stressed = make_stressed(slots=3, seed=seed, fault_rate=0.05, throttled=throttled)
        first_step_done = threading.Event()
        errors: list[SpmoeError] = []

        def work(
            stressed: StressedExperts = stressed,
            first_step_done: threading.Event = first_step_done,
            errors: list[SpmoeError] = errors,
        ) -> None:
            try:
                while True:
                    stressed.run_step()
                    first_step_done.set()
            except SpmoeError as error:
                errors.append(error)

        model = threading.Thread(target=lambda work=work: within(LIMIT, work), daemon=True)
        model.start()
        assert first_step_done.wait(LIMIT)
        time.sleep(random.Random(seed).random() / 100)
        within(LIMIT, stressed.experts.close)
        model.join(LIMIT)
        assert not model.is_alive(), "the model's thread hangs"
        assert "closed" in str(errors[0])
        assert own_threads() == before


def test_nothing_is_copied_after_close(make_stressed: MakeStressed) -> None:
    stressed = make_stressed(slots=4)
    within(LIMIT, lambda: stressed.use(0, [0, 1]))
    within(LIMIT, stressed.experts.close)
    issued = stressed.counters.issued_bytes
    stressed.experts.scheduler.request(requests_for((3, 0)))
    assert stressed.experts.scheduler.pump() is None
    assert stressed.counters.issued_bytes == issued
    with pytest.raises(TransferError, match="closed"):
        within(LIMIT, lambda: stressed.use(1, [0]))


@pytest.mark.parametrize("held", [False, True])
def test_worker_submits_requests_by_itself(make_stressed: MakeStressed, held: bool) -> None:
    """The worker alone submits all requests, which are more than the transfer's depth; it submits held ones too."""
    stressed = make_stressed(slots=7)
    keys = [ExpertKey(3, expert) for expert in range(5)]
    stressed.experts.step.begin()
    if held:
        with stressed.experts.scheduler.held():
            stressed.experts.scheduler.request(requests_for(*keys))
    else:
        stressed.experts.scheduler.request(requests_for(*keys))

    def wait_until_copied() -> None:
        while stressed.counters.prefetch_loads < len(keys):
            time.sleep(0.001)
        stressed.settle()

    within(LIMIT, wait_until_copied)
    assert {entry.key for entry in cache_of(stressed.experts).entries() if entry.prefetched} == set(keys)
    within(LIMIT, lambda: stressed.use(3, list(range(5))))
    assert (stressed.counters.hits, stressed.counters.demand_loads) == (5, 0)
