"""The simulator: steps of a trace on a virtual clock, as the live engine would run them, without weights or devices.

It does what experts/source.py, experts/prefetcher.py and the transfers do, over flat arrays, with the live eviction
rules: wishes queue by layer and score, demands go before every copy that has not started, wishes pause or are cut at a
chunk when a demand comes. Tests hold it to the live classes, load by load and second by second.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

import numpy as np

from spmoe.experts.eviction import Eviction
from spmoe.observe.ledger import Counters
from spmoe.observe.timeline import Activity, Timeline
from spmoe.replay.moving import NEVER, Link, Machine
from spmoe.replay.steps import Foretold
from spmoe.types import ExpertKey

ABSENT, LOADING, READY, IN_USE, AWAITED = range(5)  # the last two: needed by the layer that runs


class Simulation(Link):
    """One configuration, told of steps as the live source is; `counters` is the live ledger, in experts for bytes."""

    def __init__(self, machine: Machine, rule: Eviction, timeline: Timeline | None = None) -> None:
        super().__init__(machine)
        self.rule = rule
        layers, self.width = rule.shape
        self.counters = Counters()
        self.timeline = timeline
        self.link_seconds = 0.0
        self.step_budget: int | None = None  # loads by wishes, per step
        self._state = bytearray(layers * self.width)
        self._states = np.frombuffer(self._state, dtype=np.uint8).reshape(rule.shape)  # the same memory
        self._by_wish = bytearray(layers * self.width)  # came by a wish and has not been needed yet
        self._keys = [ExpertKey(*place) for place in np.ndindex(rule.shape)]
        self._free = machine.slots
        self._room = min(machine.depth, max(1, machine.slots - 1))
        self._queue: list[tuple[int, float, int]] = []
        self._wanted: dict[int, tuple[int, float, int]] = {}
        self._issued = 0
        self._unplaced = 0
        self._refused = False  # the first wish got no slot, and nothing has happened since that could change it
        self._position = -1
        self._arrived: list[int] = []  # in use, and not yet in a wave

    # ---- steps

    def begin_step(self, request: int) -> None:
        """Wishes of the last step are void."""
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

    def wish(self, wishes: Foretold, fetch_below: int) -> None:
        """Take note of guesses; they start to move as soon as the link has room."""
        counters, position = self.counters, self._position
        told, ranked = wishes.wishes, wishes.by_rank
        counters.wishes += len(ranked)
        if ranked and ranked[0][0] <= position:
            told = told.where(told.layers > position)
            ranked = [rank for rank in ranked if rank[0] > position]
            counters.wishes_stale += len(wishes.by_rank) - len(ranked)
        self.rule.wished(told)
        self._refused = False
        state, wanted, resident = self._state, self._wanted, 0
        for rank in ranked:
            key = rank[2]
            if state[key]:
                resident += 1
            elif rank[0] < fetch_below:
                known = wanted.get(key)
                if known is None or known[1] > rank[1]:
                    wanted[key] = rank
                    heappush(self._queue, rank)
        counters.wishes_resident += resident
        if wanted and len(self._loading) < self._room:
            self._pump()

    def use(self, layer: int, needed: list[int], seconds: float, then: Callable[[], None] | None = None) -> None:
        """Run a layer's experts, `seconds` each: those READY first, the others as they arrive.

        `then` is called when what is missing has been demanded.
        """
        state, counters, rule = self._state, self.counters, self.rule
        self._position = layer
        if self._wanted:
            self._drop_passed(layer)
        rule.reached(layer)
        self._refused = False
        ready: list[int] = []
        absent: list[int] = []
        awaited = 0
        for key in needed:
            now = state[key]
            if now == READY:
                ready.append(key)
                state[key] = IN_USE
            elif now == LOADING:
                awaited += 1
                state[key] = AWAITED
                self._hurry(key)
            else:
                absent.append(key)
                continue
            if self._by_wish[key]:
                self._by_wish[key] = 0
                counters.prefetch_used += 1
                counters.used_bytes += 1
                counters.late_bytes += now == LOADING
        base = layer * self.width
        if present := [key - base for key in needed if state[key]]:
            rule.used(layer, present)
        counters.hits += len(ready)
        counters.late += awaited
        counters.demand_loads += len(absent)
        counters.demand_bytes += len(absent)
        if absent:
            self._unplaced = len(absent)
            awaited += self._demand(absent)
        if then is not None:
            then()
        if ready:
            self._run_wave(ready, seconds)
        while awaited or absent:
            if absent:
                awaited += self._demand(absent)
            if not self._arrived:
                awaited -= 0 if absent else self._run_in_turn(seconds)
                if not self._arrived:
                    self._stall()
            if self._arrived:
                wave, self._arrived = self._arrived, []
                awaited -= len(wave)
                self._run_wave(wave, seconds)

    def _run_wave(self, wave: list[int], seconds: float) -> None:
        if self._wanted and len(self._loading) < self._room:
            self._pump()
        self._finish(wave, self.now + seconds * len(wave))

    def _finish(self, wave: list[int], until: float) -> None:
        self._pass(until)
        for key in wave:
            self._state[key] = READY
        self._refused = False

    def _run_in_turn(self, seconds: float) -> int:
        """Run what arrives while demands move one behind the other and no wish could; returns how many have run.

        It is what waiting for, and running, each of them comes to, without asking each time what else there is.
        """
        urgent, loading, state = self._urgent, self._loading, self._state
        count = len(urgent)
        if self._wanted:
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
            if arrived:
                wave, until = arrived, now + seconds * len(arrived)
                arrived = []
            else:
                stall += end - now
                wave, until = [key], end + seconds
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
            done += len(wave)
            if turn == count:
                break
            now = until
            for ran in wave:
                state[ran] = READY
        del urgent[:count]
        for there in (*wave, *arrived):
            state[there] = IN_USE
        self._arrived = arrived
        self.now, self.link_seconds, self.counters.stall_seconds = start, link, stall
        self._flight, self._flight_number, self._flight_start, self._flight_end = key, number, start, end
        self._finish(wave, until)
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
            held = self._states != READY
            count = min(lacking, held.size - int(np.count_nonzero(held)))
            for victim in self.rule.victims(count, held, NEVER, self._position) or ():
                self._evict(victim)
        batch = absent[: self._free]
        if not batch:
            return 0
        del absent[: len(batch)]
        self._free -= len(batch)
        self._unplaced = len(absent)
        inserted, base = self.rule.inserted, self._position * self.width
        for key in batch:
            inserted(self._keys[key])
        self.rule.used(self._position, [key - base for key in batch])
        seconds = self.machine.seconds_per_expert
        for number, key in enumerate(batch, start=self._number + 1):
            self._state[key] = AWAITED
            self._urgent.append((number, key, seconds))
        self._number += len(batch)
        self._loading += batch
        if self._flight < 0:
            self._start_next()
        else:
            self._cut_short()
        return len(batch)

    def _evict(self, victim: ExpertKey) -> None:
        key = victim.layer * self.width + victim.expert
        self._state[key] = ABSENT
        self._free += 1
        self.rule.removed(victim)
        if self._by_wish[key]:
            self._by_wish[key] = 0
            self.counters.wasted_bytes += 1

    def _pump(self) -> None:
        """Submit wishes while the link has room for them."""
        if self._unplaced or self._refused:
            return
        queue, wanted, counters, rule = self._queue, self._wanted, self.counters, self.rule
        while wanted and len(self._loading) < self._room:
            rank = queue[0]
            key = rank[2]
            if wanted.get(key) is not rank:
                heappop(queue)
                continue
            if self._state[key]:
                counters.wishes_resident += 1
                del wanted[key]
                continue
            if self.step_budget is not None and self._issued >= self.step_budget:
                counters.wishes_over_budget += len(wanted)
                wanted.clear()
                queue.clear()
                break
            expert = self._keys[key]
            if not self._free:
                victims = rule.victims(1, self._states != READY, rule.worth(expert), rank[0])
                if victims is None:
                    self._refused = True
                    break
                self._evict(victims[0])
            self._free -= 1
            del wanted[key]
            self._issued += 1
            counters.prefetch_loads += 1
            counters.issued_bytes += 1
            self._state[key] = LOADING
            self._by_wish[key] = 1
            rule.inserted(expert)
            self._number += 1
            self._loading.append(key)
            self._calm.append((self._number, key, self.machine.seconds_per_expert))
            if self._flight < 0:
                self._start_next()

    def _drop_passed(self, layer: int) -> None:
        queue, wanted = self._queue, self._wanted
        while queue and queue[0][0] <= layer:
            rank = heappop(queue)
            if wanted.get(rank[2]) is rank:
                del wanted[rank[2]]
                self.counters.wishes_stale += 1

    def _drop_all(self) -> None:
        self.counters.wishes_stale += len(self._wanted)
        self._wanted.clear()
        self._queue.clear()

    # ---- copies that end

    def _arrive(self) -> None:
        """The copy under way has ended, or a part of it: the next begins, and wishes may follow."""
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
            else:  # it was told to hurry after it had been cut
                self._urgent.append(rest)
                self._urgent.sort()
            self._start_next()
            return
        if self._state[key] == AWAITED:
            self._state[key] = IN_USE
            self._arrived.append(key)
        else:
            self._state[key] = READY
            self._refused = False
        self._loading.remove(key)
        self._start_next()
        if self._wanted and len(self._loading) < self._room:
            self._pump()

    def _stall(self) -> None:
        """Wait for the oldest copy that the layer needs or, when none of those has a slot, for whatever holds one."""
        state, started = self._state, self.now
        blocking = next((key for key in self._loading if state[key] == AWAITED), self._loading[0])
        while state[blocking] in (LOADING, AWAITED):
            self._arrive()
        self.counters.stall_seconds += self.now - started
        if self.timeline is not None:
            self.timeline.add(Activity.STALL, started, self.now)
