"""Expert access: pinned layers, deferred commits, and what a use releases."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pytest
import torch
from experts_helpers import EmptySlots, cache_of, requests_for
from torch import Tensor, nn

from spmoe.backends.base import HostExperts
from spmoe.errors import TransferError
from spmoe.experts.cache import PinnedLayer
from spmoe.experts.eviction import make_eviction
from spmoe.experts.experts import Experts
from spmoe.experts.link import VirtualTransfer
from spmoe.experts.transfer import CopyHandle, CopyJob
from spmoe.observe.clock import VirtualClock
from spmoe.types import ExpertKey, PrefetchRequests, Residency


class ProtectionRecorder(VirtualTransfer):
    """Transfer that remembers which slots it must protect, up to which epoch, and which epochs have finished."""

    epoch = 0

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock, 1, 1.0)
        self.protected: list[int] = []
        self.epochs: list[int | None] = []
        self.finished = 0

    def begin_epoch(self) -> int:
        self.epoch += 1
        return self.epoch

    def finish_epochs(self, epoch: int) -> None:
        self.finished = epoch

    def protect_slots(self, slots: Iterable[int], epoch: int | None = None) -> None:
        self.protected += slots
        self.epochs.append(epoch)


def make_experts(slots: int, eviction: str = "draft-informed") -> tuple[Experts, ProtectionRecorder]:
    """Make experts of two layers with four experts each; a copy takes one second."""
    clock = VirtualClock()
    transfer = ProtectionRecorder(clock)
    policy = make_eviction(eviction, (4, 4))
    return Experts.build(EmptySlots(slots), transfer, policy, 1, clock, threaded=False), transfer


def load(experts: Experts, layer: int, *routed: int) -> None:
    """Use experts to the end, so that they are READY."""
    for _ in experts.access.use(layer, routed):
        pass


def use_pinned(experts: Experts, pinned: PinnedLayer, routed: Sequence[int]) -> bool:
    """Defer the commit of a pinned layer if it covers the routed experts; return whether it does."""
    experts.access.note_router_finished(pinned)
    if not experts.access.covers(pinned, routed):
        return False
    experts.run_ahead.defer(pinned.layer, lambda: experts.access.commit(pinned, routed))
    return True


def can_take_a_slot(experts: Experts, key: tuple[int, int]) -> bool:
    """Take a slot for a demand, if there is one."""
    return next(cache_of(experts).reserve_for_demand([ExpertKey(*key)]), None) is not None


def pin_counts(experts: Experts) -> set[int]:
    return {entry.pins for entry in cache_of(experts).entries()}


def test_pinned_experts_are_committed_and_not_yielded_again() -> None:
    experts, transfer = make_experts(4)
    load(experts, 0, 0, 1, 2)
    before = experts.ledger.counters.copy()
    pinned = experts.access.pin_layer(0)
    assert np.flatnonzero(pinned.slots >= 0).tolist() == [0, 1, 2]
    transfer.protected = []
    batches = [batch.experts for batch in experts.access.use(0, [1, 2, 3], pinned)]
    assert batches == [(3,)], "kernels already read 1 and 2; 3 was absent"
    spent = experts.ledger.counters.minus(before)
    assert (spent.hits, spent.demand_loads) == (2, 1)
    slots = experts.pool.slots_by_key()
    assert {slots[ExpertKey(0, expert)] for expert in (1, 2)} <= set(transfer.protected)
    assert pin_counts(experts) == {0}


def test_pinned_layer_is_not_evicted_until_it_is_unpinned() -> None:
    experts, _ = make_experts(2)
    load(experts, 0, 0, 1)
    pinned = experts.access.pin_layer(0)
    assert not can_take_a_slot(experts, (1, 0))
    experts.access.unpin_layer(pinned)
    experts.access.unpin_layer(pinned)
    assert can_take_a_slot(experts, (1, 0))


def test_pinned_experts_that_are_not_routed_to_can_be_evicted_by_the_use() -> None:
    experts, _ = make_experts(2)
    load(experts, 0, 0, 1)
    pinned = experts.access.pin_layer(0)
    delivered = [expert for batch in experts.access.use(0, [2, 3], pinned) for expert in batch.experts]
    assert delivered == [2, 3], "both slots held experts that the layer is not routed to"
    assert not pinned.is_pinned


def test_slots_that_kernels_read_are_protected_when_they_are_reused() -> None:
    experts, transfer = make_experts(2)
    load(experts, 0, 0, 1)
    pinned = experts.access.pin_layer(0)
    transfer.protected = []
    delivered = [expert for batch in experts.access.use(0, [0, 1, 2], pinned) for expert in batch.experts]
    assert delivered == [2]
    assert sorted(set(transfer.protected)) == [0, 1]


def test_committed_slots_are_protected_up_to_the_epoch_of_the_pin() -> None:
    experts, transfer = make_experts(4)
    load(experts, 0, 0, 1)
    pinned = experts.access.pin_layer(0)
    experts.access.pin_layer(1)
    transfer.epochs = []
    assert use_pinned(experts, pinned, [0, 1])
    assert transfer.finished == pinned.epoch, "kernels launched before the pin have finished"
    experts.run_ahead.settle()
    assert transfer.epochs == [pinned.epoch]
    experts.step.finish_compute()
    assert transfer.finished == transfer.epoch > pinned.epoch


def test_abandoned_use_releases_its_experts() -> None:
    experts, _ = make_experts(3)
    load(experts, 0, 0, 1)
    pinned = experts.access.pin_layer(0)
    batches = experts.access.use(0, [0, 2], pinned)
    next(batches)
    batches.close()
    assert pin_counts(experts) == {0}
    assert not pinned.is_pinned


def test_experts_that_arrive_after_the_pin_come_as_a_batch() -> None:
    experts, _ = make_experts(4)
    load(experts, 0, 0)
    pinned = experts.access.pin_layer(0)
    load(experts, 0, 1)
    assert [batch.experts for batch in experts.access.use(0, [0, 1], pinned)] == [(1,)]


def test_closed_pool_refuses_to_pin() -> None:
    experts, _ = make_experts(2)
    load(experts, 0, 0)
    experts.close()
    with pytest.raises(TransferError):
        experts.access.pin_layer(0)


def test_deferred_commit_counts_hits_when_it_is_settled() -> None:
    experts, transfer = make_experts(4)
    load(experts, 0, 0, 1)
    load(experts, 1, 2, 3)
    before = experts.ledger.counters.copy()
    pinned = experts.access.pin_layer(0)
    transfer.protected = []
    assert use_pinned(experts, pinned, [1])
    assert experts.ledger.counters.minus(before).hits == 0
    next_layer = experts.access.pin_layer(1)  # before the commit of layer 0
    assert not can_take_a_slot(experts, (1, 0)), "both layers stay pinned"
    experts.run_ahead.settle()
    experts.run_ahead.settle()
    assert experts.ledger.counters.minus(before).hits == 1
    assert transfer.protected == [experts.pool.slots_by_key()[ExpertKey(0, 1)]]
    assert use_pinned(experts, next_layer, [2, 3])
    experts.step.end()
    assert experts.ledger.counters.minus(before).hits == 3
    assert pin_counts(experts) == {0}


def test_commit_is_not_deferred_if_a_routed_expert_was_not_pinned() -> None:
    experts, _ = make_experts(3)
    load(experts, 0, 0, 1)
    pinned = experts.access.pin_layer(0)
    assert not use_pinned(experts, pinned, [0, 2])
    assert [batch.experts for batch in experts.access.use(0, [0, 2], pinned)] == [(2,)]


@pytest.mark.parametrize(
    "action",
    [
        lambda experts: experts.step.begin(),
        lambda experts: experts.step.end(),
        lambda experts: load(experts, 1, 0),
        lambda experts: use_pinned(experts, experts.access.pin_layer(0), []),
    ],
    ids=["begin step", "end step", "use", "use pinned"],
)
def test_deferred_commit_is_settled_before_anything_else_happens(action: Callable[[Experts], object]) -> None:
    experts, _ = make_experts(4)
    load(experts, 0, 0, 1)
    before = experts.ledger.counters.copy()
    use_pinned(experts, experts.access.pin_layer(0), [0, 1])
    action(experts)
    assert experts.ledger.counters.minus(before).hits == 2


def test_commit_reports_the_routed_experts_to_the_prefetch_policy() -> None:
    """Requests of the policy for later layers are queued, whether the layer was committed or used."""
    experts, _ = make_experts(8)
    load(experts, 0, 0)
    routed: list[tuple[int, list[int]]] = []

    def on_routed(layer: int, layer_experts: Sequence[int]) -> PrefetchRequests:
        routed.append((layer, list(layer_experts)))
        return requests_for((1, 1), (1, 2)) if layer == 0 else requests_for()

    experts.step.begin(7, on_routed)
    assert use_pinned(experts, experts.access.pin_layer(0), [0])
    assert routed == []
    load(experts, 1, 1, 2)
    assert routed == [(0, [0]), (1, [1, 2])]
    assert (experts.ledger.counters.prefetch_loads, experts.ledger.counters.late) == (2, 2)
    experts.step.end()
    load(experts, 1, 3)
    assert len(routed) == 2, "the step has ended"


@pytest.mark.parametrize("batching", [True, False])
def test_submission_that_is_refused_midway_leaves_no_pins(batching: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    experts, transfer = make_experts(4)
    experts.pool.set_batching(batching)
    copy, calls = transfer.copy, 0

    def refuse_the_last(jobs: Sequence[CopyJob], *, urgent: bool) -> list[CopyHandle]:
        nonlocal calls
        calls += 1
        if calls == (2 if batching else 3):
            raise TransferError("refused")
        return copy(jobs, urgent=urgent)

    monkeypatch.setattr(transfer, "copy", refuse_the_last)
    with pytest.raises(TransferError):
        load(experts, 0, 0, 1, 2)
    assert pin_counts(experts) == {0}
    assert not experts.pool.has_unplaced_demand


# ---- between requests


def test_load_all_fills_the_slots_and_counts_no_demand() -> None:
    experts, _ = make_experts(8)
    experts.load_all((4, 4))
    assert experts.pool.slots_by_key().keys() == {ExpertKey(layer, expert) for layer in range(2) for expert in range(4)}
    counted = experts.ledger.counters
    assert (counted.asked, counted.demand_bytes, counted.stall_seconds) == (0, 0, 0.0)


def test_exchange_restores_residents_and_counts_unused_prefetches_as_wasted() -> None:
    experts, _ = make_experts(4, "lru")
    load(experts, 0, 0, 1)
    first = experts.pool.residents()
    assert first == [ExpertKey(0, 0), ExpertKey(0, 1)]
    experts.step.begin()
    experts.scheduler.request(requests_for((1, 0)))
    assert experts.pool.residents() == [*first, ExpertKey(1, 0)], "copies in flight are waited for"
    experts.pool.exchange(make_eviction("lfu", (4, 4)), [ExpertKey(0, 1), ExpertKey(1, 3)])
    assert experts.pool.slots_by_key().keys() == {ExpertKey(0, 1), ExpertKey(1, 3)}
    assert experts.pool.residency(ExpertKey(1, 3)) is Residency.READY
    assert experts.ledger.counters.wasted_bytes == 1
    assert experts.ledger.counters.held_bytes == 0


# ---- a worker thread runs at the worst moment


class LockWithWorker:
    """The pool's lock; whenever it is released for good, a worker settles every copy that has ended by then."""

    def __init__(self, experts: Experts, clock: VirtualClock) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._working = False
        self._experts = experts
        self._clock = clock

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        self._lock.release()
        if not self._depth and not self._working:
            self._working = True
            self._clock.sleep(10.0)
            self._experts.pool.reap()
            self._working = False


def test_worker_may_settle_copies_whenever_the_lock_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()
    policy = make_eviction("lru", (4, 4))
    experts = Experts.build(EmptySlots(3), VirtualTransfer(clock, 1, 1.0), policy, 1, clock, threaded=False)
    monkeypatch.setattr(experts.pool, "_lock", LockWithWorker(experts, clock))
    delivered = [expert for batch in experts.access.use(0, [0, 1, 2, 3]) for expert in batch.experts]
    assert sorted(delivered) == [0, 1, 2, 3]
    assert pin_counts(experts) == {0}


def test_worker_cannot_evict_experts_of_the_running_layer_before_they_are_claimed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once a layer runs, its experts are needed last: policies must not learn of it before they are pinned."""
    experts, _ = make_experts(2)
    load(experts, 0, 0, 1)
    experts.step.begin()
    with experts.scheduler.held():
        experts.scheduler.request(requests_for((0, 0), (0, 1), (1, 0), (1, 1)))
    claim = experts.pool.claim

    def claim_after_worker(*args: object) -> object:
        experts.scheduler.pump()
        return claim(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(experts.pool, "claim", claim_after_worker)
    before = experts.ledger.counters.copy()
    load(experts, 0, 0, 1)
    assert experts.ledger.counters.minus(before).hits == 2


def test_failure_in_expert_arithmetic_releases_its_experts_at_once() -> None:
    """The exception is kept, as a logger or a future keeps it; its traceback must hold no pinned expert."""
    experts, _ = make_experts(slots=2)

    class FailingArithmetic:
        def run_experts(
            self, module: object, hidden: object, index: object, weights: object, batches: object
        ) -> Tensor:
            next(iter(batches))  # type: ignore[call-overload]
            raise RuntimeError("out of memory")

    forward = HostExperts(0, experts.access, FailingArithmetic())  # type: ignore[arg-type]
    kept: list[BaseException] = []
    for _ in range(3):
        index = torch.tensor([[0, 1]])
        with pytest.raises(RuntimeError) as failure:
            forward.run(nn.Identity(), torch.zeros(1, 4), index, torch.ones(1, 2))
        kept.append(failure.value)
    assert len(kept) == 3
    assert [batch.experts for batch in experts.access.use(1, [2, 3])], "both slots can be taken by another layer"
