"""The choice between two paths to a missing expert: move it over the link, or compute it on the CPU.

A layer's missing experts are divided so that

    max(link backlog + sum of moves, CPU backlog + sum of computations) + sum over moved experts of miss * loss

is least. `loss` is what moving an expert costs or gains later: the chance that the expert it evicts is used, less the
chance that it is used itself. `miss` is the time that a missing expert costs with both paths. So a rarely used expert
prefers the CPU, where it evicts nothing, and a frequently used one the link, after which it is resident.

The time of one expert on a path is learned from every expert that took it:

    log seconds = level + shape(rows)

There are two levels, for times alone and times beside the other path: both paths read the same memory. Levels follow
changes quickly, such as a CPU that another process takes; the shape describes the expert format and changes slowly. A
path that is not used is tried again from time to time: trials cost at most `_TRIAL_SHARE` of the time.

An expert of which the CPU has to make a copy first takes the time of the copy too, which is learned separately. Since
later computations gain from it, copies may cost up to `_COPY_SHARE` of the time while there is place for them.

Nothing here reads a clock or a device: the same reports lead to the same choices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

_LEVEL_GAIN = 0.3  # share of a deviation that the level follows
_CHANGE_GAIN = 0.9  # the same of a second large deviation in a row: no outlier, but a change
_LARGE = math.log(1.5)  # deviation
_SHAPE_GAIN = 0.1  # the same of the shape
_FREE_ROWS = 4  # prior: so many rows take the time of one, and more take time in proportion
_TRIAL_SHARE = 0.01  # of the time, for trials of a path that seems slower
_COPY_SHARE = 0.1  # of the time, for copies that make later computations faster
_FIRST_PAUSE = 64  # choices without the CPU after a failure; twice as many if the next layer on it fails too
_LONGEST_PAUSE = 2**16
_MARGIN = 0.1  # relative time that another split must gain for a choice to count as wrong


class MissingExpert(NamedTuple):
    """A routed expert that is not resident."""

    rows: int  # routed to it
    loss: float = 0.0  # chance that the expert evicted for it is used, less the chance that it is used again
    needs_copy: bool = False  # the CPU makes a copy before it computes it


@dataclass(frozen=True, slots=True)
class Split:
    """A layer's missing experts, divided. Numbers are positions in the list that was given."""

    moved: tuple[int, ...]
    computed: tuple[int, ...]  # in the order in which the CPU runs them


class PathTime:
    """Learned time of one expert on one path, by number of rows, alone and beside the other path."""

    def __init__(self) -> None:
        self._levels: list[float | None] = [None, None]  # log seconds of one row: the other path is idle, is busy
        self._shape: dict[int, float] = {}  # log, what a class of row counts differs from the prior by
        self._deviation = 0.0  # log, of the last report

    @property
    def known(self) -> bool:
        """Whether any time was reported."""
        return bool(self._shape)

    @property
    def known_alone(self) -> bool:
        """Whether a time was reported during which the other path was idle."""
        return self._levels[False] is not None

    def seconds(self, rows: int, *, shared: bool) -> float:
        """Return the expected seconds of one expert; 0 if nothing is known. `shared`: the other path is busy."""
        return math.exp(self._log_seconds(rows, shared)) if self.known else 0.0

    def learn(self, rows: int, seconds: float, *, shared: bool) -> None:
        """Learn from one expert, or from the mean of several with as many rows."""
        if not 0.0 < seconds < math.inf:
            return
        kind, measured = _row_class(rows), math.log(seconds)
        if not self.known:
            self._shape[kind] = 0.0
            self._levels[shared] = measured - _prior(rows)
            return
        before, self._deviation = self._deviation, measured - self._log_seconds(rows, shared)
        if self._levels[shared] is None:
            self._levels[shared] = self._level(shared) + self._deviation
        elif kind not in self._shape:  # other classes say little of this one
            self._shape[kind] = self._nearest_shape(rows) + self._deviation
        elif min(abs(before), abs(self._deviation)) > _LARGE and before * self._deviation > 0:
            self._levels = [None if level is None else level + _CHANGE_GAIN * self._deviation for level in self._levels]
        else:
            self._levels[shared] = self._level(shared) + _LEVEL_GAIN * self._deviation
            self._shape[kind] += _SHAPE_GAIN * self._deviation

    def _log_seconds(self, rows: int, shared: bool) -> float:
        return self._level(shared) + _prior(rows) + self._nearest_shape(rows)

    def _level(self, shared: bool) -> float:
        """Return the level of this state or, if it was never seen, that of the other one."""
        own, other = self._levels[shared], self._levels[not shared]
        return own if own is not None else other or 0.0

    def _nearest_shape(self, rows: int) -> float:
        kind = _row_class(rows)
        return self._shape[min(self._shape, key=lambda known: abs(known - kind))]


def _row_class(rows: int) -> int:
    """Return the class of a row count: 1, 2, 3 to 4, 5 to 8, and so on."""
    return max(0, rows - 1).bit_length()


def _prior(rows: int) -> float:
    return math.log(max(1.0, rows / _FREE_ROWS))


@dataclass(frozen=True, slots=True)
class _Choice:
    """A choice that was made, to be judged when the times of its experts are known."""

    missing: tuple[MissingExpert, ...]
    order: tuple[int, ...]
    count: int  # computed on the CPU: the first of `order`
    link_backlog: float  # moves
    cpu_backlog: float  # seconds


class PathChooser:
    """Divides each layer's missing experts between link and CPU; learns how long both take.

    `cpu_share` is for tests: it fixes the share of missing experts that the CPU computes.
    """

    def __init__(self, cpu_share: float | None = None) -> None:
        self.link = PathTime()
        self.cpu = PathTime()
        self.copying = PathTime()  # of one expert, on the CPU
        self._cpu_share = cpu_share
        self._owed = 0.0  # experts that the CPU is to compute by `cpu_share`
        self._allowance = 0.0  # seconds that trials may cost
        self._copy_allowance = 0.0  # seconds that copies may cost
        self._pause = 0  # choices for which the CPU is not used
        self._next_pause = _FIRST_PAUSE
        self._last: _Choice | None = None

    def choose(
        self,
        missing: Sequence[MissingExpert],
        link_backlog: float = 0.0,
        cpu_backlog: float = 0.0,
        *,
        may_copy: bool = False,
    ) -> Split:
        """Divide a layer's missing experts.

        `link_backlog`: moves that the link finishes first, also a fraction; `cpu_backlog`: seconds of work that the
        CPU finishes first; `may_copy`: a copy may be made although the layer finishes later.
        """
        order = self._order(missing)
        count = self._count(missing, order, link_backlog, cpu_backlog)
        self._last = _Choice(tuple(missing), tuple(order), count, link_backlog, cpu_backlog) if missing else None
        if may_copy and self._is_copy_worthwhile(missing, order, link_backlog, cpu_backlog, count):
            count, self._last = count + 1, None  # not judged: it finishes later by intention
        return Split(tuple(sorted(order[count:])), tuple(order[:count]))

    def moved(self, seconds: float, *, shared: bool) -> None:
        """Report the time of one move, or the mean of several. `shared`: the CPU computed experts meanwhile."""
        self.link.learn(1, seconds, shared=shared)

    def computed(self, rows: int, seconds: float, *, shared: bool) -> None:
        """Report the time of one expert on the CPU. `shared`: the link was busy meanwhile."""
        self.cpu.learn(rows, seconds, shared=shared)

    def copied(self, seconds: float, *, shared: bool) -> None:
        """Report the time of one copy that the CPU has made before it computed an expert."""
        self.copying.learn(1, seconds, shared=shared)

    def succeeded(self) -> None:
        """Report that the CPU has computed all experts that it was given of a layer: the next pause is short again."""
        self._next_pause = _FIRST_PAUSE

    def failed(self) -> None:
        """Report that the CPU has failed to compute an expert of a layer: leave it alone for some time."""
        self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, _LONGEST_PAUSE)
        self._last = None

    def judge(self) -> bool | None:
        """Return whether the last choice was wrong by the times that are known now; None if there was none to judge.

        It was wrong if the layer would have finished earlier with one expert more or one fewer on the CPU.
        """
        last, self._last = self._last, None
        if last is None or not (self.link.known and self.cpu.known):
            return None
        finishes = self._finishes(last.missing, last.order, last.link_backlog, last.cpu_backlog)
        others = [finishes[count] for count in (last.count - 1, last.count + 1) if 0 <= count < len(finishes)]
        return min(others) < (1 - _MARGIN) * finishes[last.count]

    # ---- how many

    def _count(
        self, missing: Sequence[MissingExpert], order: Sequence[int], link_backlog: float, cpu_backlog: float
    ) -> int:
        """Return how many experts the CPU computes."""
        if self._cpu_share is not None:
            self._owed += self._cpu_share * len(missing)
            count = math.floor(self._owed + 1e-9)
            self._owed -= count
            return count
        if self._pause or not missing:
            self._pause = max(0, self._pause - 1)
            return 0
        if not self.cpu.known:
            return 1
        if not self.link.known:
            return len(missing) - 1
        finishes = self._finishes(missing, order, link_backlog, cpu_backlog)
        costs = self._with_losses(finishes, missing, order)
        best = min(range(len(costs)), key=lambda count: (costs[count], count))
        return self._try_other(finishes[best], costs, best)

    def _try_other(self, seconds: float, costs: Sequence[float], best: int) -> int:
        """Return the count to use instead of the best one, now and then, to learn a time that is not known well.

        A path that is not used may have become faster. A path that was never used alone may be faster then.
        """
        # seconds: of the best count
        self._allowance += _TRIAL_SHARE * seconds
        total = len(costs) - 1
        if best == 0:
            trial = 1
        elif best == total:
            trial = total - 1
        elif not self.link.known_alone:
            trial = 0
        elif not self.cpu.known_alone:
            trial = total
        else:
            return best
        cost = costs[trial] - costs[best]
        if self._allowance < cost:
            return best
        self._allowance -= cost
        return trial

    def _is_copy_worthwhile(
        self,
        missing: Sequence[MissingExpert],
        order: Sequence[int],
        link_backlog: float,
        cpu_backlog: float,
        count: int,
    ) -> bool:
        """Return whether the CPU takes one more expert than `count` to make a copy of it, and pay from the allowance.

        It would have to be worth computing if it had a copy.
        """
        if self._cpu_share is not None or self._pause or not (self.link.known and self.cpu.known and missing):
            return False
        costs = self._costs(missing, order, link_backlog, cpu_backlog)
        slowest = max(self.cpu.seconds(expert.rows, shared=True) for expert in missing)
        dearest = self.copying.seconds(1, shared=True) + slowest
        # at most two copies in a row, however long none was made
        self._copy_allowance = min(self._copy_allowance + _COPY_SHARE * min(costs), 2 * dearest)
        if count == len(missing) or not missing[order[count]].needs_copy:
            return False
        copied = [expert._replace(needs_copy=False) for expert in missing]
        later = self._costs(copied, order, link_backlog, cpu_backlog)
        cost = costs[count + 1] - costs[count]
        if later[count + 1] >= later[count] or self._copy_allowance < cost:
            return False
        self._copy_allowance -= cost
        return True

    def _order(self, missing: Sequence[MissingExpert]) -> list[int]:
        """Return the experts in the order in which the CPU takes them.

        Those that need no copy come first, and of these the quickly computed and rarely used ones.
        """
        miss = self._miss()
        times = {expert.rows: self.cpu.seconds(expert.rows, shared=True) or expert.rows for expert in missing}

        def rank(number: int) -> tuple[bool, float, int]:
            expert = missing[number]
            return expert.needs_copy, times[expert.rows] - miss * expert.loss, number

        return sorted(range(len(missing)), key=rank)

    def _costs(
        self, missing: Sequence[MissingExpert], order: Sequence[int], link_backlog: float, cpu_backlog: float
    ) -> list[float]:
        """Return when the layer finishes for each count of experts on the CPU, and what the moves cost later."""
        return self._with_losses(self._finishes(missing, order, link_backlog, cpu_backlog), missing, order)

    def _finishes(
        self, missing: Sequence[MissingExpert], order: Sequence[int], link_backlog: float, cpu_backlog: float
    ) -> list[float]:
        """Return when the layer finishes if the CPU computes the first 0, 1, 2, ... experts of `order`."""
        total, finishes = len(missing), list[float]()
        computing = [0.0, 0.0]  # seconds of the experts on the CPU: while the link is idle, and while it is busy
        alone, beside = self.link.seconds(1, shared=False), self.link.seconds(1, shared=True)
        for count in range(total + 1):
            if count:
                expert = missing[order[count - 1]]
                computing = [computing[shared] + self._cpu_seconds(expert, shared=shared) for shared in (False, True)]
            moves = total - count + link_backlog
            both = moves > 0.0 and (count > 0 or cpu_backlog > 0.0)
            link = moves * (beside if both else alone)
            finishes.append(max(link if count < total else 0.0, computing[both] + cpu_backlog if count else 0.0))
        return finishes

    def _cpu_seconds(self, expert: MissingExpert, *, shared: bool) -> float:
        copy = self.copying.seconds(1, shared=shared) if expert.needs_copy else 0.0
        return self.cpu.seconds(expert.rows, shared=shared) + copy

    def _with_losses(
        self, finishes: Sequence[float], missing: Sequence[MissingExpert], order: Sequence[int]
    ) -> list[float]:
        """Add what the moved experts cost or gain later."""
        miss, costs = self._miss(), list(finishes)
        loss = 0.0
        for count in range(len(missing) - 1, -1, -1):
            loss += missing[order[count]].loss
            costs[count] += miss * loss
        return costs

    def _miss(self) -> float:
        """Return the seconds that one missing expert costs while both paths are in use."""
        link, cpu = self.link.seconds(1, shared=True), self.cpu.seconds(1, shared=True)
        return link * cpu / (link + cpu) if link and cpu else 0.0
