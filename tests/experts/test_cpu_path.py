"""The CPU path of `ExpertAccess.use`, with the live expert classes on a virtual clock and with its real thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import pairwise

import pytest
import torch
from experts_helpers import BLOB, EmptySlots, cache_of, open_demands, requests_for

from spmoe.errors import SpmoeError
from spmoe.experts.cpu_path import ComputedRows, CpuPath, CpuThread, CpuWork
from spmoe.experts.eviction import make_eviction
from spmoe.experts.experts import Experts
from spmoe.experts.link import VirtualTransfer
from spmoe.experts.paths import PathChooser
from spmoe.observe.clock import RealClock
from spmoe.observe.ledger import Ledger
from spmoe.types import ExpertKey

EXPERTS = (6, 6)
COPY_SECONDS = 1e-9


class Rows:
    """A layer whose experts have given numbers of rows; experts in `failing` cannot be computed.

    A copy is made of each expert in `uncopied`, once, in `COPY_SECONDS`.
    """

    has_place_for_copy = True

    def __init__(
        self,
        rows: Mapping[int, int],
        failing: Sequence[int] = (),
        gate: threading.Event | None = None,
        uncopied: Sequence[int] = (),
    ):
        self.rows = rows
        self.uncopied = set(uncopied)
        self.computed: list[int] = []
        self._failing = failing
        self._gate = gate

    def needs_copy(self, expert: int) -> bool:
        return expert in self.uncopied

    def begin(self, experts: Sequence[int]) -> None:
        pass

    def work(self, expert: int) -> CpuWork:
        def compute() -> float:
            if self._gate is not None:
                assert self._gate.wait(30)
            if expert in self._failing:
                raise RuntimeError(f"expert {expert} failed")
            self.computed.append(expert)
            copy_seconds = COPY_SECONDS if expert in self.uncopied else 0.0
            self.uncopied.discard(expert)
            return copy_seconds

        return compute

    def results(self, experts: Sequence[int]) -> ComputedRows:
        return ComputedRows(torch.tensor(experts), torch.zeros(len(experts)), torch.zeros(len(experts), 1))


def taught() -> PathChooser:
    """Return a chooser that sends half of the missing experts to the CPU."""
    chooser = PathChooser()
    for shared in (False, True):
        for _ in range(8):
            chooser.moved(1e-3, shared=shared)
            chooser.computed(1, 1e-3, shared=shared)
    return chooser


def build(share: float, slots: int = 4) -> Experts:
    """Connect everything over a link that takes no time."""
    clock = RealClock()
    return Experts.build(
        EmptySlots(slots), VirtualTransfer(clock, BLOB, 1e12), make_eviction("draft-informed", EXPERTS), BLOB, clock,
        threaded=False, cpu_path=CpuPath(CpuThread(), PathChooser(share)),
    )  # fmt: skip


@pytest.mark.parametrize(("share", "moved", "computed"), [(0.0, 3, 0), (1.0, 0, 3), (0.4, 2, 1)])
def test_computed_experts_take_no_slot_and_come_last(share: float, moved: int, computed: int) -> None:
    experts, rows = build(share), Rows(dict.fromkeys(range(6), 1))
    with closing(experts.access.use(0, [1, 3, 4], on_cpu=rows)) as batches:
        found = list(batches)
    assert sorted(e for batch in found for e in batch.experts) == [1, 3, 4]
    on_cpu = [batch for batch in found if batch.computed is not None]
    assert on_cpu == found[len(found) - len(on_cpu) :]
    assert len(cache_of(experts)) == moved
    counters = experts.ledger.counters
    assert (counters.demand_loads, counters.cpu_experts) == (moved, computed)
    assert (counters.demand_bytes, counters.cpu_bytes) == (moved * BLOB, computed * BLOB)
    assert open_demands(experts) == 0
    experts.close()


def test_uses_on_the_cpu_count_for_eviction() -> None:
    """Otherwise an expert that the CPU computes again and again would never be worth a slot."""
    experts, rows = build(1.0), Rows({2: 1})
    for _ in range(3):
        experts.step.begin()
        list(experts.access.use(0, [2], on_cpu=rows))
        experts.step.end()
    experts.step.begin()
    eviction = cache_of(experts).eviction
    assert eviction.chance(ExpertKey(0, 2)) > eviction.chance(ExpertKey(0, 3)) == 0.0
    experts.close()


def test_losses_of_moves_compare_experts_with_those_they_evict() -> None:
    """Two slots hold two of three experts that every step uses."""
    experts = build(0.0, slots=2)
    for _ in range(4):
        experts.step.begin()
        for needed in ([0, 1], [2]):
            list(experts.access.use(0, needed))
        experts.step.end()
    experts.step.begin()
    (absent,) = {0, 1, 2} - {key.expert for key in experts.pool.slots_by_key()}
    frequent, rare = cache_of(experts).move_losses([ExpertKey(0, absent), ExpertKey(0, 5)])
    assert frequent == pytest.approx(0.0, abs=0.01), "both are used as often"
    assert rare > 0.5
    experts.close()


def test_failed_experts_are_moved_and_the_others_are_used() -> None:
    experts, rows = build(1.0), Rows(dict.fromkeys(range(6), 1), failing=[3])
    found = list(experts.access.use(0, [1, 3, 4], on_cpu=rows))
    assert sorted(e for batch in found for e in batch.experts) == [1, 3, 4]
    assert [batch.experts for batch in found if batch.computed is None] == [(3,)]
    counters = experts.ledger.counters
    assert (counters.cpu_experts, counters.cpu_failures, counters.demand_loads) == (2, 1, 1)
    assert experts.cpu_path is not None
    assert experts.cpu_path.take_failure() == "expert 3 failed"
    assert experts.cpu_path.take_failure() is None
    experts.close()


def test_pauses_double_while_one_expert_fails_beside_others() -> None:
    path, rows, failed = CpuPath(CpuThread(), taught()), Rows(dict.fromkeys(range(6), 1), failing=[3]), list[int]()
    for layer in range(500):
        chosen = path.choose(rows, [ExpertKey(0, expert) for expert in (3, 1, 2, 4)], [0.0] * 4, 0.0)
        path.start(rows, chosen)
        if chosen and path.finish(chosen, lambda until: None, Ledger(BLOB)):
            failed.append(layer)
    assert [after - before for before, after in pairwise(failed)] == [65, 129, 257]
    assert rows.computed
    path.close()


@pytest.mark.parametrize("follows", [False, True], ids=["use", "follow"])
def test_prefetches_are_submitted_while_the_cpu_computes(follows: bool) -> None:
    experts, gate = build(1.0), threading.Event()
    rows = Rows(dict.fromkeys(range(6), 1), gate=gate)
    experts.step.begin(0)
    with experts.scheduler.held():
        experts.scheduler.request(requests_for((1, 0), (1, 1)))

    def open_when_submitted() -> None:
        deadline = time.monotonic() + 10
        while len(experts.scheduler) and time.monotonic() < deadline:
            time.sleep(1e-3)
        left.append(len(experts.scheduler))
        gate.set()

    left = list[int]()
    watcher = threading.Thread(target=open_when_submitted)
    watcher.start()
    if follows:
        experts.access.end_follow(experts.access.follow(0, [3], [3], rows).demand)
    else:
        list(experts.access.use(0, [3], on_cpu=rows))
    watcher.join()
    assert left == [0]
    assert set(experts.pool.slots_by_key()) == {ExpertKey(1, 0), ExpertKey(1, 1)}
    experts.close()


def test_cpu_rests_after_a_layer_that_takes_too_long() -> None:
    path, rows, keys = CpuPath(CpuThread(), taught()), Rows(dict.fromkeys(range(6), 1)), [ExpertKey(0, 3)]
    for most_seconds, rests in ((10.0, False), (0.0, True)):
        path.start(rows, keys)
        assert path.finish(keys, lambda until: None, Ledger(BLOB), most_seconds) == []
        assert (path.choose(rows, keys, [0.0], 0.0) == []) == rests
    path.close()


def test_copies_are_timed_and_counted_apart_from_computations() -> None:
    experts, rows = build(1.0), Rows(dict.fromkeys(range(6), 1), uncopied=[3, 4])
    for _ in range(2):
        list(experts.access.use(0, [1, 3, 4], on_cpu=rows))
    counters = experts.ledger.counters
    assert (counters.cpu_experts, counters.cpu_copies) == (6, 2)
    assert counters.cpu_copy_seconds == pytest.approx(2 * COPY_SECONDS)
    assert rows.computed[:3] == [1, 3, 4], "experts that need no copy come first"
    assert experts.cpu_path is not None
    assert experts.cpu_path.chooser.copying.seconds(1, shared=False) == pytest.approx(COPY_SECONDS)
    experts.close()


def test_closing_the_iterator_waits_for_the_expert_under_way_and_drops_the_others() -> None:
    gate = threading.Event()
    experts, rows = build(1.0), Rows(dict.fromkeys(range(6), 1), gate=gate)
    list(experts.access.use(0, [0]))  # READY, so that there is a batch before those of the CPU
    batches = experts.access.use(0, [0, 1, 2, 3], on_cpu=rows)
    assert next(batches).experts == (0,)
    threading.Timer(0.05, gate.set).start()
    batches.close()
    assert len(rows.computed) <= 1
    assert [batch.experts for batch in experts.access.use(0, [1], on_cpu=rows)] == [(1,)]
    experts.close()


def test_thread_that_has_ended_is_replaced() -> None:
    thread = CpuThread()
    thread._queue.put(None)  # the thread ends
    thread._thread.join()
    job = thread.submit(lambda: 0.0, 1)
    job.wait(lambda: None)
    assert job.error is None
    thread.close()
    thread.close()
    with pytest.raises(SpmoeError, match="closed"):
        thread.submit(lambda: 0.0, 1)


def test_thread_that_cannot_be_replaced_fails_the_work_and_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = CpuThread()
    thread._queue.put(None)  # as if it had died
    thread._thread.join(30)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda self: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            thread.submit(lambda: 0.0, rows=1)
    thread.close()
