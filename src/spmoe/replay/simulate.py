"""The simulator: steps of a trace on a virtual clock, as the live engine would run them, without weights or devices.

It does what experts/source.py, experts/prefetcher.py and the transfers do, over flat arrays, with the live eviction
rules: prefetch requests queue by layer and score, demands go before every copy that has not started, prefetch requests pause or are cut at a
chunk when a demand comes. Tests hold it to the live classes, load by load and second by second.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat

import numpy as np

from spmoe.experts.eviction import Eviction
from spmoe.observe.ledger import Counters
from spmoe.observe.timeline import Activity, Timeline
from spmoe.replay.moving import NEVER, EmulatedLink, Machine
from spmoe.replay.steps import Prediction
from spmoe.replay.wanted import Wanted
from spmoe.types import ExpertKey

ABSENT, LOADING, READY, IN_USE, AWAITED = range(5)  # the last two: needed by the layer that runs
_MOVING = (LOADING, AWAITED)
_READY = np.array(READY, dtype=np.uint8)


class Simulation(EmulatedLink):
    """One configuration, told of steps as the live source is; `counters` is the live ledger, in experts for bytes."""

    def __init__(self, machine: Machine, rule: Eviction, timeline: Timeline | None = None) -> None:
        super().__init__(machine)
        self.rule = rule
        layers, self.width = rule.shape
        self.counters = Counters()
        self.timeline = timeline
        self.link_seconds = 0.0
        self.step_budget = NEVER  # loads by prefetch requests, per step
        self._state = bytearray(layers * self.width)
        self._states = np.frombuffer(self._state, dtype=np.uint8).reshape(rule.shape)  # the same memory
        self._by_wish = bytearray(layers * self.width)  # came by a prefetch request and has not been needed yet
        self._keys = [ExpertKey(*place) for place in np.ndindex(rule.shape)]
        self._free = machine.slots
        self._room = min(machine.depth, max(1, machine.slots - 1))
        self._wanted = Wanted(layers)
        self._issued = 0
        self._unplaced = 0
        self._refused = (
            False  # the first prefetch request got no slot, and nothing has happened since that could change it
        )
        self._position = -1
        self._arrived: list[int] = []  # in use, and not yet in a batch

    # ---- steps

    def begin_step(self, request: int) -> None:
        """Prefetch requests of the last step are void."""
        self._drop_all()
        self.rule.begin_step(request)
        self._issued = 0
        self._position = -1

    def end_step(self) -> None:
        """What is still wished for is void."""
        self._drop_all()

    def compute(self, seconds: float) -> None:
        """Let time pass; copies end on the way."""
        self._pass(self.now + seconds)

    def prefetch(self, prefetches: Prediction, fetch_below: int) -> None:
        """Take note of guesses; they start to move as soon as the link has room."""
        counters, position, wanted, state = self.counters, self._position, self._wanted, self._state
        told, turns, count = prefetches.prefetches, prefetches.turns, len(prefetches.by_rank)
        counters.prefetches_requested += count
        if turns and turns[0][0] <= position:
            told = told.where(told.layers > position)
            turns = [turn for turn in turns if turn[0] > position]
            counters.prefetches_stale += count - len(told)
            count = len(told)
        self.rule.on_prefetches(told)
        self._refused = False
        for layer, ranks in turns:
            absent = [rank for rank in ranks if not state[rank[2]]]
            count -= len(absent)
            if absent and layer < fetch_below:
                wanted.add(layer, absent)
        counters.prefetches_resident += count
        if wanted.first < wanted.none and len(self._loading) < self._room:
            self._pump()

    def use(self, layer: int, needed: list[int], seconds: float, then: Callable[[], None] | None = None) -> None:
        """Run a layer's experts, `seconds` each: those READY first, the others as they arrive.

        `then` is called when what is missing has been demanded.
        """
        state, counters, rule = self._state, self.counters, self.rule
        self._position = layer
        if self._wanted.first <= layer:
            counters.prefetches_stale += self._wanted.drop_passed(layer)
        rule.on_layer(layer)
        self._refused = False
        absent = [key for key in needed if not state[key]]
        awaited = 0
        ready: list[int] = []
        if len(absent) < len(needed):
            base, present = layer * self.width, [key for key in needed if state[key]]
            ready, awaited = self._claim(present)
            rule.on_use(layer, [key - base for key in present])
        if absent:
            counters.demand_loads += len(absent)
            counters.demand_bytes += len(absent)
            self._unplaced = len(absent)
            awaited += self._demand(absent)
        if then is not None:
            then()
        if ready:
            self._run_wave(ready, seconds)
        wanted, loading = self._wanted, self._loading
        while awaited or absent:
            if absent:
                awaited += self._demand(absent)
            if not self._arrived:
                if not absent and (len(loading) > self._room or wanted.first == wanted.none):
                    awaited -= self._run_in_turn(seconds)
                if not self._arrived:
                    self._stall()
            if self._arrived:
                batch, self._arrived = self._arrived, []
                awaited -= len(batch)
                self._run_wave(batch, seconds)

    def _claim(self, present: list[int]) -> tuple[list[int], int]:
        """What has a slot is in use now, or awaited; returns what is READY, and the number of the others."""
        state, by_wish, counters = self._state, self._by_wish, self.counters
        ready = [key for key in present if state[key] == READY]
        awaited = len(present) - len(ready)
        used = [key for key in present if by_wish[key]]
        if awaited:
            counters.late += awaited
            counters.late_bytes += sum(state[key] == LOADING for key in used)
            for key in present:
                if state[key] == LOADING:
                    state[key] = AWAITED
                    self._prioritize(key)
        for key in ready:
            state[key] = IN_USE
        for key in used:
            by_wish[key] = 0
        counters.prefetch_used += len(used)
        counters.used_bytes += len(used)
        counters.hits += len(ready)
        return ready, awaited

    def _run_wave(self, batch: list[int], seconds: float) -> None:
        if self._wanted.first < self._wanted.none and len(self._loading) < self._room:
            self._pump()
        self._finish(batch, self.now + seconds * len(batch))

    def _finish(self, batch: list[int], until: float) -> None:
        while self._flight_end <= until:
            self._arrive()
        self.now = until
        state = self._state
        for key in batch:
            state[key] = READY
        self._refused = False

    def _run_in_turn(self, seconds: float) -> int:
        """Run what arrives while demands move one behind the other and no prefetch request could; returns how many have run.

        It is what waiting for, and running, each of them comes to, without asking each time what else there is.
        """
        urgent, loading, state = self._urgent, self._loading, self._state
        count = len(urgent)
        if self._wanted.first < self._wanted.none:
            count = min(count, len(loading) - self._room)
        if count <= 0 or self._flight_calm or self._left > 0.0 or self.timeline is not None:
            return 0
        if urgent[0][0] < self._flight_number or (self._calm and self._flight_end < self._committed):
            return 0
        now, link, stall, done = self.now, self.link_seconds, self.counters.stall_seconds, 0
        key, start, end = self._flight, self._flight_start, self._flight_end
        arrived: list[int] = []
        turn = 0
        while True:
            while not arrived and turn + 1 < count and end + urgent[turn][2] > end + seconds:  # one by one
                stall += end - now
                now = end + seconds
                link += end - start
                loading.remove(key)
                state[key] = READY
                _, key, left = urgent[turn]
                start, end = end, end + left
                turn += 1
                done += 1
            if arrived:
                batch, until = arrived, now + seconds * len(arrived)
                arrived = []
            else:
                stall += end - now
                batch, until = [key], end + seconds
                link += end - start
                loading.remove(key)
                number, key, left = urgent[turn]
                start, end = end, end + left
                turn += 1
            while turn < count and end <= until:
                arrived.append(key)
                link += end - start
                loading.remove(key)
                number, key, left = urgent[turn]
                start, end = end, end + left
                turn += 1
            done += len(batch)
            if turn == count:
                break
            now = until
            for ran in batch:
                state[ran] = READY
        del urgent[:count]
        for there in (*batch, *arrived):
            state[there] = IN_USE
        self._arrived = arrived
        self.now, self.link_seconds, self.counters.stall_seconds = start, link, stall
        self._flight, self._flight_number, self._flight_start, self._flight_end = key, number, start, end
        self._finish(batch, until)
        return done

    def _pass(self, until: float) -> None:
        while self._flight_end <= until:
            self._arrive()
        self.now = until

    # ---- slots

    def _demand(self, absent: list[int]) -> int:
        """Load as many of these as slots can be had for; takes them out and returns their number."""
        lacking = len(absent) - self._free
        if lacking > 0:
            free = np.equal(self._states, _READY)
            count = min(lacking, int(np.count_nonzero(free)))
            self._evict(self.rule.leaving(count, free, NEVER, self._position) or [])
        batch = absent[: self._free]
        if not batch:
            return 0
        del absent[: len(batch)]
        self._free -= len(batch)
        self._unplaced = len(absent)
        base = self._position * self.width
        self.rule.demanded(self._position, [key - base for key in batch])
        state, number = self._state, self._number + 1
        for key in batch:
            state[key] = AWAITED
        self._number += len(batch)
        self._urgent += zip(range(number, number + len(batch)), batch, repeat(self._seconds))
        self._loading += batch
        if self._flight < 0:
            self._start_next()
        else:
            self._cut_short()
        return len(batch)

    def _evict(self, victims: list[int]) -> None:
        state, by_wish = self._state, self._by_wish
        self.rule.gone(victims)
        for key in victims:
            state[key] = ABSENT
            if by_wish[key]:
                by_wish[key] = 0
                self.counters.wasted_bytes += 1
        self._free += len(victims)

    def _pump(self) -> None:
        """Submit prefetch requests while the link has room for them."""
        if self._unplaced or self._refused:
            return
        wanted, counters, rule, loading, state = self._wanted, self.counters, self.rule, self._loading, self._state
        while wanted.first < wanted.none and len(loading) < self._room:
            if self._issued >= self.step_budget:
                counters.prefetches_over_budget += wanted.drop_all()
                break
            layer, _, key = wanted.head()
            expert = self._keys[key]
            if not self._free:
                victims = rule.leaving(1, np.equal(self._states, _READY), rule.score(expert), layer)
                if victims is None:
                    self._refused = True
                    break
                self._evict(victims)
            self._free -= 1
            wanted.take()
            self._issued += 1
            counters.prefetch_loads += 1
            counters.issued_bytes += 1
            state[key] = LOADING
            self._by_wish[key] = 1
            rule.on_insert(expert)
            self._number = number = self._number + 1
            loading.append(key)
            self._calm.append((number, key, self._seconds))
            if self._flight < 0:
                self._start_next()

    def _drop_all(self) -> None:
        self.counters.prefetches_stale += self._wanted.drop_all()

    # ---- copies that end

    def _arrive(self) -> None:
        """The copy under way has ended, or a part of it: the next begins, and prefetch requests may follow."""
        self.now = self._flight_end
        key = self._flight
        self.link_seconds += self.now - self._flight_start
        if self.timeline is not None:
            detail = f"{key // self.width}.{key % self.width}"
            kind = Activity.PREFETCH if self._by_wish[key] else Activity.COPY
            self.timeline.add(kind, self._flight_start, self.now, detail)
        if self._left > 0.0:
            rest = (self._flight_number, key, self._left)
            if self._flight_calm:
                self._calm.insert(0, rest)
            else:  # it was told to prioritize after it had been cut
                self._urgent.append(rest)
                self._urgent.sort()
            self._start_next()
            return
        state = self._state
        if state[key] == AWAITED:
            state[key] = IN_USE
            self._arrived.append(key)
        else:
            state[key] = READY
            self._refused = False
        self._loading.remove(key)
        self._start_next()
        if self._wanted.first < self._wanted.none and len(self._loading) < self._room:
            self._pump()

    def _stall(self) -> None:
        """Wait for the oldest copy that the layer needs or, when none of those has a slot, for whatever holds one."""
        state, started = self._state, self.now
        for blocking in self._loading:
            if state[blocking] == AWAITED:
                break
        else:
            blocking = self._loading[0]
        while state[blocking] in _MOVING:
            self._arrive()
        self.counters.stall_seconds += self.now - started
        if self.timeline is not None:
            self.timeline.add(Activity.STALL, started, self.now)
