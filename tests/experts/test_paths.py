"""The choice between the link and the CPU, on the virtual clock: regret against the best fixed split is bounded."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmoe.experts.paths import MissingExpert, PathChooser, Split
from spmoe.observe.clock import VirtualClock

SHARES = [number / 8 for number in range(9)]  # of missing experts on the CPU, by a fixed split
REGRET = 1.05  # of the best fixed split's time
CHANGE = 3  # longest layers that the start, and every change, may cost in addition


@dataclass(frozen=True)
class Phase:
    """Layers during which the machine stays the same. Times are in seconds."""

    link: float  # one expert over the link
    cpu: float  # one expert of one row on the CPU
    link_beside: float  # factor on `link` while the CPU computes
    cpu_beside: float  # factor on `cpu` while the link moves experts
    free_rows: int  # that take the time of one
    layers: int
    failures: float = 0.0  # share of experts that the CPU fails to compute, after having tried

    def longest(self) -> float:
        """Return a bound on the time of a layer of six experts with up to eight rows on one path."""
        return 6 * max(self.link * self.link_beside, self.cpu * self.cpu_beside * 8 / self.free_rows)


class Machine:
    """Runs layers on the virtual clock."""

    def __init__(self, rng: random.Random) -> None:
        self.clock = VirtualClock()
        self._rng = rng

    def run(self, phase: Phase, rows: Sequence[int], split: Split, chooser: PathChooser | None) -> None:
        """Run a layer whose missing experts have so many rows; report the times of its experts."""
        moves, both = len(split.moved), bool(split.moved) and bool(split.computed)
        link, cpu, failed = phase.link * (phase.link_beside if both else 1.0), 0.0, 0
        times: list[tuple[int, float]] = []
        for expert in split.computed:
            noise = self._rng.uniform(0.9, 1.1)
            seconds = phase.cpu * max(1.0, rows[expert] / phase.free_rows) * noise
            seconds *= phase.cpu_beside if both else 1.0
            cpu += seconds
            if chooser is not None and self._rng.random() < phase.failures:
                failed += 1
            else:
                times.append((rows[expert], seconds))
        self.clock.sleep(max(moves * link, cpu) + failed * link)  # those that failed are moved afterwards
        if chooser is not None:
            if moves:
                chooser.moved(link, shared=both)
            for count, seconds in times:
                chooser.computed(count, seconds, shared=both)
            if failed:
                chooser.failed()
            elif times:
                chooser.succeeded()


phases = st.builds(
    Phase,
    link=st.floats(-4, -2).map(lambda power: 10**power),
    cpu=st.floats(-4.5, -1.5).map(lambda power: 10**power),
    link_beside=st.floats(1, 2),
    cpu_beside=st.floats(1, 2),
    free_rows=st.sampled_from([1, 2, 4, 8]),
    layers=st.integers(100, 300),
    failures=st.sampled_from([0.0, 0.0, 0.0, 0.3, 1.0]),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(phases, min_size=1, max_size=3), st.integers(0, 2**32))
def test_regret_against_the_best_fixed_split_is_bounded(story: list[Phase], seed: int) -> None:
    """Rates change from phase to phase, such as those of a CPU that another process takes, and the CPU may fail."""
    rng = random.Random(seed)
    chooser, machine = PathChooser(), Machine(random.Random(seed))
    fixed = {share: Machine(random.Random(seed)) for share in SHARES}
    for phase in story:
        for _ in range(phase.layers):
            rows = [rng.choice([1, 1, 1, 2, 5, 8]) for _ in range(rng.randint(1, 6))]
            machine.run(phase, rows, chooser.choose([MissingExpert(count) for count in rows]), chooser)
            by_rows = sorted(range(len(rows)), key=lambda i: rows[i])
            for share, other in fixed.items():
                count = round(share * len(rows))
                other.run(phase, rows, Split(tuple(by_rows[count:]), tuple(by_rows[:count])), None)
    if any(phase.failures for phase in story):  # a fixed split does not know of failures
        best = fixed[0.0].clock.now()
    else:
        best = min(other.clock.now() for other in fixed.values())
    longest = max(phase.longest() for phase in story)
    assert machine.clock.now() <= REGRET * best + CHANGE * (1 + len(story)) * longest


def taught(link: float = 1e-3, cpu: float = 1e-3, rows: Sequence[int] = (1,)) -> PathChooser:
    """Return a chooser that knows the times of both paths."""
    chooser = PathChooser()
    for shared in (False, True):
        for _ in range(8):
            chooser.moved(link, shared=shared)
            for count in rows:
                chooser.computed(count, cpu, shared=shared)
    return chooser


@pytest.mark.parametrize(("link", "cpu", "computed"), [(1e-3, 1e-3, 3), (1e-3, 5e-4, 4), (1e-3, 2e-3, 2), (1e-3, 1, 0)])
def test_both_paths_finish_together(link: float, cpu: float, computed: int) -> None:
    split = taught(link, cpu).choose([MissingExpert(1)] * 6)
    assert len(split.computed) == computed
    assert sorted(split.moved + split.computed) == list(range(6))


def test_backlogs_count() -> None:
    missing = [MissingExpert(1)] * 4
    assert len(taught().choose(missing, link_backlog=2.0).computed) == 3
    assert len(taught().choose(missing, link_backlog=20.0).computed) == 4
    assert len(taught().choose(missing, cpu_backlog=2e-3).computed) == 1


def test_cpu_takes_experts_with_few_rows() -> None:
    """In a prompt, the CPU computes the least used experts, since its time grows with the rows."""
    chooser = PathChooser()
    for shared in (False, True):
        chooser.moved(1e-3, shared=shared)
        for rows in (1, 16, 64):
            chooser.computed(rows, 2e-4 * rows, shared=shared)
    rows = [64, 1, 16, 2, 64]
    split = chooser.choose([MissingExpert(count) for count in rows])
    assert {1, 3} <= set(split.computed)
    assert {0, 4} <= set(split.moved)


def test_experts_that_need_a_copy_take_its_time_too() -> None:
    chooser = taught(link=1e-3, cpu=5e-4)
    for shared in (False, True):
        chooser.copied(2e-2, shared=shared)
    missing = [MissingExpert(1, needs_copy=number % 2 == 0) for number in range(6)]
    assert set(chooser.choose(missing).computed) == {1, 3, 5}
    assert chooser.cpu.seconds(1, shared=True) == pytest.approx(5e-4), "copies do not spoil the time of computations"


@pytest.mark.parametrize(("cpu", "pays"), [(5e-4, True), (1e-1, False)])
def test_copies_cost_a_bounded_share_of_the_time_and_are_made_if_they_pay(cpu: float, pays: bool) -> None:
    """24 experts, four of which are missing in each layer; one copy takes as long as 10 moves."""
    link, copy, layers = 1e-3, 1e-2, 2000
    chooser, rng, copied = taught(link, cpu), random.Random(0), set[int]()
    chooser.copied(copy, shared=True)
    seconds, moved = 0.0, 0.0
    for _ in range(layers):
        experts = rng.sample(range(24), 4)
        missing = [MissingExpert(1, needs_copy=expert not in copied) for expert in experts]
        split = chooser.choose(missing, may_copy=True)
        new = {experts[number] for number in split.computed} - copied
        seconds += max(len(split.moved) * link, len(split.computed) * cpu + len(new) * copy)
        moved += 4 * link
        copied |= new
        assert seconds <= 1.11 * moved + 3 * (copy + cpu), "1 % for trials, 10 % for copies, and the first ones"
    if pays:  # three of four experts on the CPU finish together with the fourth on the link
        assert len(copied) > 16
        assert seconds < 0.6 * moved
    else:
        assert len(copied) <= 2


def test_no_copy_is_paid_for_in_advance_if_there_is_no_place() -> None:
    chooser = taught(link=1e-3, cpu=5e-4)
    chooser.copied(5e-2, shared=True)
    missing = [MissingExpert(1, needs_copy=True)] * 4
    computed = [len(chooser.choose(missing, may_copy=False).computed) for _ in range(200)]
    assert sum(computed) <= 1, "a trial"


def test_rarely_used_experts_prefer_the_cpu() -> None:
    """The CPU takes experts that would evict better ones, if others take as long."""
    missing = [MissingExpert(1, loss) for loss in (-0.4, 0.3, -0.2, 0.5)]
    assert set(taught().choose(missing).computed) == {1, 3}


def test_frequently_used_experts_are_moved_although_the_cpu_is_faster() -> None:
    """Otherwise nothing would ever become resident."""
    assert taught(cpu=9e-4).choose([MissingExpert(1, -0.9)]).moved == (0,)
    assert taught(cpu=9e-4).choose([MissingExpert(1)]).computed == (0,)


def test_cpu_rests_after_a_failure_and_is_tried_again() -> None:
    chooser = taught()
    chooser.failed()
    chosen = [len(chooser.choose([MissingExpert(1)] * 4).computed) for _ in range(65)]
    assert chosen == [0] * 64 + [2]
    chooser.failed()
    assert [len(chooser.choose([MissingExpert(1)] * 4).computed) for _ in range(129)] == [0] * 128 + [2]
    chooser.succeeded()
    chooser.failed()
    assert [len(chooser.choose([MissingExpert(1)] * 4).computed) for _ in range(65)] == [0] * 64 + [2]


def test_choices_are_judged_by_later_times() -> None:
    chooser = taught()
    chooser.choose([MissingExpert(1)] * 4)
    assert chooser.judge() is False
    chooser.choose([MissingExpert(1)] * 4)
    for _ in range(10):
        chooser.computed(1, 0.1, shared=True)
    assert chooser.judge() is True
    assert chooser.judge() is None, "a choice is judged once"


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_share_can_be_fixed(share: float) -> None:
    chooser, computed, total = PathChooser(share), 0, 0
    for count in (1, 2, 3, 1, 3) * 10:
        split = chooser.choose([MissingExpert(1)] * count)
        assert len(split.moved) + len(split.computed) == count
        computed, total = computed + len(split.computed), total + count
    assert computed == pytest.approx(share * total, abs=1)
