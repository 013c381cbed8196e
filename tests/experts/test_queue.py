"""The queue of prefetch requests against a plain model of it, and the worker thread."""

from __future__ import annotations

import threading

import pytest
from experts_helpers import own_threads, within
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from spmoe.errors import TransferError
from spmoe.experts.prefetcher import PrefetchQueue, PrefetchWorker
from spmoe.observe.ledger import Counters
from spmoe.types import ExpertKey, PrefetchRequest

LIMIT = 30.0  # seconds after which a test that hangs gives up

KEYS = [ExpertKey(layer, expert) for layer in range(3) for expert in range(2)]
SCORES = (0.0, 0.25, 0.5, 1.0)

keys = st.sampled_from(KEYS)
prefetches = st.integers(0, 95).map(lambda n: PrefetchRequest(KEYS[n // 16], SCORES[n // 4 % 4], n % 4))


class QueueProgram(RuleBasedStateMachine):
    """The queue does what a dictionary that is searched from end to end does."""

    def __init__(self) -> None:
        super().__init__()
        self.counters = Counters()
        self.queue = PrefetchQueue(self.counters)
        self.model: dict[ExpertKey, PrefetchRequest] = {}
        self.stale = 0
        self.over_budget = 0

    @rule(prefetches=st.lists(prefetches, min_size=1, max_size=6))
    def put(self, prefetches: list[PrefetchRequest]) -> None:
        for request in prefetches:
            self.queue.put(request)
            if request.key not in self.model or request.score > self.model[request.key].score:
                self.model[request.key] = request

    @rule(key=keys)
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
        self.stale += sum(w.deadline <= layer for w in self.model.values())
        self.model = {key: w for key, w in self.model.items() if w.deadline > layer}

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
        best = min(self.model.values(), key=lambda w: (w.deadline, -w.score, w.key), default=None)
        assert self.queue.first() == best
        assert self.queue.first() == best, "looking takes nothing out"
        assert len(self.queue) == len(self.model)
        assert self.counters.prefetches_stale == self.stale
        assert self.counters.prefetches_over_budget == self.over_budget

    def teardown(self) -> None:
        order = []
        while (request := self.queue.first()) is not None:
            order.append(request)
            self.queue.discard(request.key)
        assert order == sorted(self.model.values(), key=lambda w: (w.deadline, -w.score, w.key))
        assert len(self.queue) == 0


TestQueue = QueueProgram.TestCase
TestQueue.settings = settings(max_examples=60, stateful_step_count=20, deadline=None, derandomize=True)


# ---- the worker


class ScriptedTicket:
    """Ends when told to."""

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

    order = wait

    def prioritize(self) -> None:
        pass


class Pump:
    """Counts its calls and answers from a list, then with None."""

    def __init__(self, *answers: ScriptedTicket) -> None:
        self.answers = list(answers)
        self.calls = 0
        self._called = threading.Condition()

    def __call__(self) -> ScriptedTicket | None:
        with self._called:
            self.calls += 1
            self._called.notify_all()
            return self.answers.pop(0) if self.answers else None

    def wait_for(self, calls: int) -> None:
        with self._called:
            assert self._called.wait_for(lambda: self.calls >= calls, LIMIT), f"{self.calls} calls, not {calls}"


def test_worker_pumps_only_when_poked_and_ends_when_closed() -> None:
    before = own_threads()
    pump = Pump()
    worker = PrefetchWorker(pump)
    assert len(own_threads() - before) == 1
    assert pump.calls == 0
    for calls in (1, 2, 3):
        worker.poke()
        pump.wait_for(calls)
    within(LIMIT, worker.close)
    assert own_threads() == before
    assert pump.calls == 3


def test_worker_pumps_again_when_the_ticket_it_was_given_ends() -> None:
    first, second = ScriptedTicket(), ScriptedTicket()
    pump = Pump(first, second)
    worker = PrefetchWorker(pump)
    worker.poke()
    assert first.waited.wait(LIMIT)
    assert pump.calls == 1, "it waits for the ticket, it does not spin"
    first.ended.set()
    assert second.waited.wait(LIMIT)
    assert pump.calls == 2
    second.ended.set()
    pump.wait_for(3)
    within(LIMIT, worker.close)


def test_worker_survives_a_copy_that_failed() -> None:
    failing = ScriptedTicket(TransferError("broken"))
    failing.ended.set()
    pump = Pump(failing)
    worker = PrefetchWorker(pump)
    worker.poke()
    pump.wait_for(2)
    worker.poke()
    pump.wait_for(3)
    within(LIMIT, worker.close)


def test_a_poke_while_the_worker_is_busy_is_not_lost() -> None:
    handle = ScriptedTicket()
    pump = Pump(handle)
    worker = PrefetchWorker(pump)
    worker.poke()
    assert handle.waited.wait(LIMIT)
    worker.poke()
    handle.ended.set()
    pump.wait_for(3)  # the poke, the ticket, the poke in between
    within(LIMIT, worker.close)


def test_closing_a_busy_worker_waits_for_its_ticket_and_pumps_no_more() -> None:
    handle = ScriptedTicket()
    pump = Pump(handle, ScriptedTicket())
    worker = PrefetchWorker(pump)
    worker.poke()
    assert handle.waited.wait(LIMIT)
    closing = threading.Thread(target=worker.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive(), "the thread is still needed"
    handle.ended.set()
    closing.join(LIMIT)
    assert not closing.is_alive()
    assert pump.calls == 1


def test_closing_twice_is_harmless() -> None:
    worker = PrefetchWorker(Pump())
    within(LIMIT, worker.close)
    within(LIMIT, worker.close)


@pytest.mark.parametrize("pokes", [1, 50])
def test_closing_right_after_poking_never_hangs(pokes: int) -> None:
    before = own_threads()
    for _ in range(20):
        worker = PrefetchWorker(Pump())
        for _ in range(pokes):
            worker.poke()
        within(LIMIT, worker.close)
    assert own_threads() == before
