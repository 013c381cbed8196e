"""Prefetching: the queue against a plain model, the worker thread, and the scheduler with and without overlap."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from experts_helpers import EmptySlots, cache_of, own_threads, requests_for, within
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from spmoe.errors import TransferError
from spmoe.experts.eviction import make_eviction
from spmoe.experts.experts import Experts
from spmoe.experts.link import VirtualTransfer
from spmoe.experts.prefetch import PrefetchQueue, PrefetchWorker
from spmoe.experts.transfer import CHUNK_BYTES, CopyHandle, CopyJob
from spmoe.observe.clock import VirtualClock
from spmoe.observe.ledger import Ledger
from spmoe.observe.timeline import Timeline
from spmoe.registry import EVICTION_POLICIES
from spmoe.types import ExpertKey, PrefetchRequest, Residency

LIMIT = 30.0  # seconds after which a test that hangs fails

# ---- the queue

KEYS = [ExpertKey(layer, expert) for layer in range(3) for expert in range(2)]
SCORES = (0.0, 0.25, 0.5, 1.0)

some_requests = st.integers(0, 95).map(lambda n: PrefetchRequest(KEYS[n // 16], SCORES[n // 4 % 4], n % 4))


class QueueBesideModel(RuleBasedStateMachine):
    """The queue gives the same answers as a dictionary that is searched from end to end."""

    def __init__(self) -> None:
        super().__init__()
        ledger = Ledger(blob_bytes=1)
        self.counters = ledger.counters
        self.queue = PrefetchQueue(ledger)
        self.model: dict[ExpertKey, PrefetchRequest] = {}
        self.stale = 0
        self.over_budget = 0

    @rule(requests=st.lists(some_requests, min_size=1, max_size=6))
    def put(self, requests: list[PrefetchRequest]) -> None:
        for request in requests:
            self.queue.put(request)
            if request.key not in self.model or request.score > self.model[request.key].score:
                self.model[request.key] = request

    @rule(key=st.sampled_from(KEYS))
    def discard(self, key: ExpertKey) -> None:
        self.queue.discard(key)
        self.model.pop(key, None)

    @rule()
    @precondition(lambda self: self.model)
    def take_first(self) -> None:
        request = self.queue.first()
        assert request is not None
        self.queue.discard(request.key)
        del self.model[request.key]

    @rule(layer=st.integers(-1, 4))
    def drop_passed(self, layer: int) -> None:
        self.queue.drop_passed(layer)
        self.stale += sum(request.deadline <= layer for request in self.model.values())
        self.model = {key: request for key, request in self.model.items() if request.deadline > layer}

    @rule(over_budget=st.booleans())
    def drop_all(self, over_budget: bool) -> None:
        self.queue.drop_all(over_budget=over_budget)
        if over_budget:
            self.over_budget += len(self.model)
        else:
            self.stale += len(self.model)
        self.model.clear()

    @invariant()
    def agrees(self) -> None:
        first = min(self.model.values(), key=rank, default=None)
        assert self.queue.first() == first
        assert self.queue.first() == first, "first() removes nothing"
        assert len(self.queue) == len(self.model)
        assert self.counters.prefetches_stale == self.stale
        assert self.counters.prefetches_over_budget == self.over_budget

    def teardown(self) -> None:
        order = []
        while (request := self.queue.first()) is not None:
            order.append(request)
            self.queue.discard(request.key)
        assert order == sorted(self.model.values(), key=rank)
        assert len(self.queue) == 0


def rank(request: PrefetchRequest) -> tuple[int, float, ExpertKey]:
    return request.deadline, -request.score, request.key


TestQueue = QueueBesideModel.TestCase
TestQueue.settings = settings(max_examples=60, stateful_step_count=20, deadline=None, derandomize=True)


# ---- the worker thread


class ManualHandle:
    """Handle on a copy that ends when the test sets `ended`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.ended = threading.Event()
        self.waited = threading.Event()
        self._error = error

    def ready(self) -> bool:
        return self.ended.is_set()

    def wait(self) -> None:
        self.waited.set()
        assert self.ended.wait(LIMIT)
        if self._error is not None:
            raise self._error

    stream_wait = wait

    def prioritize(self) -> None:
        pass


class CountingPump:
    """Stands in for `PrefetchScheduler.pump`: counts its calls and returns these handles, then None."""

    def __init__(self, *handles: ManualHandle) -> None:
        self.handles = list(handles)
        self.calls = 0
        self._called = threading.Condition()

    def __call__(self) -> ManualHandle | None:
        with self._called:
            self.calls += 1
            self._called.notify_all()
            return self.handles.pop(0) if self.handles else None

    def wait_for(self, calls: int) -> None:
        with self._called:
            assert self._called.wait_for(lambda: self.calls >= calls, LIMIT), f"{self.calls} calls, not {calls}"


def test_worker_pumps_only_when_woken_and_ends_when_closed() -> None:
    before = own_threads()
    pump = CountingPump()
    worker = PrefetchWorker(pump)
    assert pump.calls == 0
    for calls in (1, 2, 3):
        worker.wake()
        pump.wait_for(calls)
    assert len(own_threads() - before) == 1
    within(LIMIT, worker.close)
    assert own_threads() == before
    assert pump.calls == 3


def test_worker_pumps_again_when_the_copy_it_waits_for_ends() -> None:
    first, second = ManualHandle(), ManualHandle()
    pump = CountingPump(first, second)
    worker = PrefetchWorker(pump)
    worker.wake()
    assert first.waited.wait(LIMIT)
    assert pump.calls == 1, "it waits for the copy and does not spin"
    first.ended.set()
    assert second.waited.wait(LIMIT)
    assert pump.calls == 2
    second.ended.set()
    pump.wait_for(3)
    within(LIMIT, worker.close)


def test_worker_survives_a_copy_that_failed() -> None:
    failing = ManualHandle(TransferError("broken"))
    failing.ended.set()
    pump = CountingPump(failing)
    worker = PrefetchWorker(pump)
    worker.wake()
    pump.wait_for(2)
    worker.wake()
    pump.wait_for(3)
    within(LIMIT, worker.close)


def test_wake_of_a_busy_worker_is_not_lost() -> None:
    handle = ManualHandle()
    pump = CountingPump(handle)
    worker = PrefetchWorker(pump)
    worker.wake()
    assert handle.waited.wait(LIMIT)
    worker.wake()
    handle.ended.set()
    pump.wait_for(3)  # the first wake, the end of the copy, the second wake
    within(LIMIT, worker.close)


def test_closing_a_busy_worker_waits_for_its_copy_and_pumps_no_more() -> None:
    handle = ManualHandle()
    pump = CountingPump(handle, ManualHandle())
    worker = PrefetchWorker(pump)
    worker.wake()
    assert handle.waited.wait(LIMIT)
    closing = threading.Thread(target=worker.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive(), "close returns only when the thread has ended"
    handle.ended.set()
    closing.join(LIMIT)
    assert not closing.is_alive()
    assert pump.calls == 1


def test_worker_can_be_closed_twice() -> None:
    worker = PrefetchWorker(CountingPump())
    within(LIMIT, worker.close)
    within(LIMIT, worker.close)


@pytest.mark.parametrize("wakes", [1, 50])
def test_closing_right_after_waking_never_hangs(wakes: int) -> None:
    before = own_threads()
    for _ in range(20):
        worker = PrefetchWorker(CountingPump())
        for _ in range(wakes):
            worker.wake()
        within(LIMIT, worker.close)
    assert own_threads() == before


# ---- the scheduler

LAYERS, EXPERTS = 4, 4


class RefusingTransfer(VirtualTransfer):
    """Virtual transfer that refuses the copy of one expert, and remembers whether it may batch."""

    refused: ExpertKey | None = None
    batching: bool | None = None

    def copy(self, jobs: Sequence[CopyJob], *, urgent: bool) -> list[CopyHandle]:
        if any(job.key == self.refused for job in jobs):
            raise TransferError("refused")
        return super().copy(jobs, urgent=urgent)

    def set_batching(self, batching: bool) -> None:
        self.batching = batching


class Setup:
    """Experts on a virtual clock, in the draft of a step. A copy takes one second."""

    def __init__(
        self,
        slots: int = 12,
        depth: int = 4,
        eviction: str = "lru",
        blob: int = 1,
        *,
        auto_pump: bool = True,
        timeline: Timeline | None = None,
    ) -> None:
        self.clock = VirtualClock()
        self.transfer = RefusingTransfer(self.clock, 1, 1.0, depth)
        self.policy = make_eviction(eviction, [EXPERTS] * LAYERS)
        self.experts = Experts.build(
            EmptySlots(slots), self.transfer, self.policy, blob, self.clock, threaded=False, timeline=timeline
        )
        self.counters = self.experts.ledger.counters
        if auto_pump:
            self.clock.add_event_source(self.transfer.link.next_event, self.experts.scheduler.pump)
        self.experts.step.begin()

    def prefetch(self, *keys: tuple[int, int]) -> None:
        self.experts.scheduler.request(requests_for(*keys, score=1.0))

    def use(self, layer: int, *routed: int) -> None:
        for _ in self.experts.access.use(layer, routed):
            pass

    def residency(self, layer: int, expert: int) -> Residency:
        return self.experts.pool.residency(ExpertKey(layer, expert))


@pytest.mark.parametrize("batching", [True, False])
def test_without_batching_every_submission_is_one_copy(batching: bool) -> None:
    setup = Setup()
    setup.experts.pool.set_batching(batching)
    assert setup.transfer.batching == batching
    setup.prefetch((1, 0), (1, 1), (1, 2))
    setup.use(0, 0, 1, 2)  # the first demand load does not wait for the slots of the others
    assert [len(jobs) for jobs in setup.transfer.submissions] == ([3, 1, 2] if batching else [1] * 6)
    assert {job.key for jobs in setup.transfer.submissions for job in jobs} == {
        ExpertKey(layer, expert) for layer in range(2) for expert in range(3)
    }


@pytest.mark.parametrize("batching", [True, False])
def test_refused_submission_fails_every_copy_that_was_not_submitted(batching: bool) -> None:
    setup = Setup()
    setup.experts.pool.set_batching(batching)
    setup.transfer.refused = ExpertKey(1, 1)
    setup.prefetch((1, 0), (1, 1), (1, 2))
    first = Residency.ABSENT if batching else Residency.LOADING
    assert [setup.residency(1, expert) for expert in range(3)] == [first, Residency.ABSENT, Residency.ABSENT]
    assert setup.counters.failed_bytes == (3 if batching else 2)
    setup.transfer.refused = None
    setup.use(1, 0, 1, 2)
    assert all(setup.residency(1, expert) is Residency.READY for expert in range(3))


@pytest.mark.parametrize("depth", [1, 2, 8])
def test_without_overlap_prefetches_of_the_draft_are_copied_when_it_ends(depth: int) -> None:
    setup = Setup(depth=depth)
    setup.experts.scheduler.overlap = False
    setup.prefetch((0, 0), (1, 0))
    setup.clock.sleep(5.0)  # the draft goes on
    assert setup.transfer.submissions == [], "no copy overlaps with the draft"
    setup.prefetch((2, 0))
    setup.experts.scheduler.finish_draft()
    assert setup.clock.now() == pytest.approx(8.0)
    assert setup.counters.stall_seconds == pytest.approx(3.0)
    assert all(setup.residency(layer, 0) is Residency.READY for layer in range(3))
    for layer in range(3):
        setup.use(layer, 0)
    assert (setup.counters.hits, setup.counters.late) == (3, 0)
    assert setup.clock.now() == pytest.approx(8.0)


def test_without_overlap_prefetches_of_the_target_are_copied_at_once() -> None:
    setup = Setup()
    setup.experts.scheduler.overlap = False
    setup.experts.scheduler.finish_draft()
    setup.use(0, 0)
    now = setup.clock.now()
    setup.prefetch((1, 1), (1, 2))
    assert setup.clock.now() == pytest.approx(now + 2.0)
    assert setup.residency(1, 1) is setup.residency(1, 2) is Residency.READY


def test_without_overlap_a_request_that_finds_no_slot_is_not_waited_for() -> None:
    setup = Setup(slots=2)
    setup.experts.scheduler.overlap = False
    setup.prefetch((1, 0), (1, 1), (1, 2), (2, 0))
    setup.experts.scheduler.finish_draft()
    assert setup.counters.prefetch_loads == 2, "prefetches do not evict what this step has prefetched"
    setup.use(1, 0, 1)
    assert setup.counters.hits == 2


def test_without_overlap_a_failed_copy_raises_where_the_expert_is_used() -> None:
    setup = Setup()
    setup.experts.scheduler.overlap = False
    broken = ExpertKey(1, 1)

    def fail(job: CopyJob) -> None:
        if job.key == broken:
            raise TransferError("broken")

    setup.transfer._on_done = fail
    setup.prefetch((1, 0), (1, 1))
    setup.experts.scheduler.finish_draft()
    assert setup.residency(1, 0) is Residency.READY
    assert setup.residency(1, 1) is Residency.ABSENT
    with pytest.raises(TransferError, match="broken"):
        setup.use(1, 0, 1)


@pytest.mark.parametrize("eviction", EVICTION_POLICIES.names())
def test_another_eviction_policy_takes_over_the_residents(eviction: str) -> None:
    setup = Setup(slots=4, eviction="lru")
    setup.use(0, 0, 1)
    setup.use(1, 0, 1)
    setup.experts.pool.change_eviction(make_eviction(eviction, [EXPERTS] * LAYERS))
    setup.experts.step.begin()
    setup.use(2, 0, 1)  # evicts two
    assert len(setup.experts.pool.slots_by_key()) == 4
    setup.experts.pool.change_eviction(setup.policy)
    setup.use(3, 0, 1)
    assert len(setup.experts.pool.slots_by_key()) == 4
    assert setup.residency(3, 0) is setup.residency(3, 1) is Residency.READY


def test_requests_are_submitted_a_chunk_at_a_time() -> None:
    setup = Setup(depth=8, blob=CHUNK_BYTES // 2)
    setup.prefetch((1, 0), (1, 1), (1, 2), (1, 3), (2, 0))
    assert [len(jobs) for jobs in setup.transfer.submissions] == [2, 2, 1]


class FixedEvent:
    """Device event that has passed, or has not."""

    def __init__(self, passed: bool) -> None:
        self.passed = passed

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        pass


@pytest.mark.parametrize(("passed", "submitted"), [(True, 1), (False, 2)])
def test_held_requests_are_submitted_until_the_event_has_passed(passed: bool, submitted: int) -> None:
    setup = Setup(slots=6, depth=2, eviction="draft-informed", blob=CHUNK_BYTES, auto_pump=False)
    with setup.experts.scheduler.held():
        setup.prefetch((1, 0), (1, 1), (1, 2), (1, 3))
        assert len(setup.experts.scheduler) == 4
        assert setup.experts.pool.loads_in_flight == 0, "held requests are not submitted"
        setup.experts.scheduler.submit(FixedEvent(passed))
        assert setup.experts.pool.loads_in_flight == submitted
    setup.prefetch((2, 0))
    assert setup.experts.pool.loads_in_flight == 2, "outside the block, a request is submitted at once"


@pytest.mark.parametrize("interrupted", ["before it is READY", "after it is READY"])
def test_interrupt_while_copies_are_settled_leaves_none_loading_for_good(
    monkeypatch: pytest.MonkeyPatch, interrupted: str
) -> None:
    timeline = Timeline(recording=True)
    setup = Setup(slots=6, auto_pump=False, timeline=timeline)
    setup.prefetch((1, 0))
    (handle,) = setup.experts.pool.handles()
    setup.clock.sleep(100.0)

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    if interrupted == "before it is READY":
        monkeypatch.setattr(handle, "wait", interrupt)
    else:
        monkeypatch.setattr(timeline, "add", interrupt)
    with pytest.raises(KeyboardInterrupt):
        setup.experts.scheduler.pump()
    monkeypatch.undo()
    setup.experts.scheduler.pump()
    assert not setup.experts.pool.loads_in_flight
    assert [entry.state for entry in cache_of(setup.experts).entries()] == [Residency.READY]


def test_failed_call_of_the_worker_is_raised_by_the_next_step() -> None:
    def fail() -> None:
        raise ValueError("inconsistent")

    worker = PrefetchWorker(fail)
    worker.wake()
    within(LIMIT, worker.close)
    with pytest.raises(RuntimeError, match="inconsistent"):
        worker.check()
