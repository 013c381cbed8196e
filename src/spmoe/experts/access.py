"""Expert access: a layer gets the experts it is routed to, READY ones first, the others as they arrive."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import Tensor

from spmoe.errors import SpmoeError
from spmoe.experts.cache import Entry, PinnedLayer
from spmoe.experts.cpu_path import ComputedRows, CpuLayer, CpuPath
from spmoe.experts.pool import ChooseForCpu, Demand, ExpertPool
from spmoe.experts.prefetch import PrefetchScheduler
from spmoe.experts.run_ahead import RunAhead
from spmoe.experts.step import ExpertStep
from spmoe.experts.transfer import DeviceEvent, Transfer
from spmoe.interpreter import let_others_run
from spmoe.observe.clock import Clock
from spmoe.observe.ledger import Ledger
from spmoe.observe.timeline import Activity, Timeline

# on the CPU for a layer that the device waits for; after more, the CPU rests, since the device gives up after 4 s and
# the next try must be faster
_FOLLOWED_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class ExpertBatch:
    """Experts of one layer that are ready together; they stay in their slots until the next batch is taken.

    A batch that the CPU has computed has results instead of slots and weights.
    """

    layer: int
    experts: tuple[int, ...]
    slots: tuple[int, ...]
    weights: tuple[Mapping[str, Tensor], ...]
    computed: ComputedRows | None = None


class FollowedLayer(NamedTuple):
    """Answer of the host for a layer whose experts the device has looked up."""

    demand: Demand  # to be ended when the layer was answered
    slots: dict[int, int]  # of the missing experts
    computed: int  # results of the CPU for the others


class ExpertAccess:
    """Hands out experts in slots."""

    def __init__(
        self,
        pool: ExpertPool,
        scheduler: PrefetchScheduler,
        step: ExpertStep,
        run_ahead: RunAhead,
        transfer: Transfer,
        clock: Clock,
        ledger: Ledger,
        timeline: Timeline,
        cpu_path: CpuPath | None = None,
    ) -> None:
        self._pool = pool
        self._scheduler = scheduler
        self._step = step
        self._run_ahead = run_ahead
        self._transfer = transfer
        self._clock = clock
        self._ledger = ledger
        self._timeline = timeline
        self._cpu_path = cpu_path

    def use(
        self,
        layer: int,
        experts: Sequence[int],
        pinned: PinnedLayer | None = None,
        shares: Sequence[float] = (),
        on_cpu: CpuLayer | None = None,
    ) -> Generator[ExpertBatch, None, None]:
        """Yield the routed experts in batches. Close the iterator to release the experts it holds.

        Experts of `pinned`, which kernels already read, are not yielded. `shares`: for a prompt, the share of rows
        that are routed to each expert. With `on_cpu`, the CPU may compute some of the missing experts; their batch
        comes last.
        """
        self._run_ahead.settle()
        started, demand = self._clock.now(), Demand()
        try:
            self._scheduler.reach_layer(layer)
            demand = self._pool.claim(layer, experts, pinned, shares, self._choose_for_cpu(on_cpu))
            if demand.on_cpu and on_cpu is not None and self._cpu_path is not None:
                self._cpu_path.start(on_cpu, demand.on_cpu)
            self._step.routed(layer, experts)
            while demand.ready or demand.waiting or demand.absent or demand.on_cpu:
                if demand.on_cpu and on_cpu is not None and not (demand.ready or demand.waiting or demand.absent):
                    if (batch := self._finish_on_cpu(layer, demand, on_cpu)) is not None:
                        yield batch
                    continue
                if not demand.ready:
                    self._wait_for_arrival(demand)
                if demand.ready:
                    yield self._batch(layer, demand.ready)
                    self._pool.release(demand.ready)
                    demand.ready = []
        finally:
            if demand.on_cpu and self._cpu_path is not None:
                self._cpu_path.abandon()
            self._pool.abandon(demand)
            if pinned is not None:
                self._pool.unpin_layer(pinned)
            self._timeline.add(Activity.LAYER, started, self._clock.now(), f"experts of layer {layer}")

    def follow(
        self, layer: int, experts: Sequence[int], missing: Sequence[int], on_cpu: CpuLayer | None = None
    ) -> FollowedLayer:
        """Count the uses of a layer whose experts the device has looked up, and submit the loads of missing ones.

        With `on_cpu`, the CPU may compute some of the missing experts; return when it has.
        """
        self._scheduler.reach_layer(layer)
        demand, computed = self._pool.follow(layer, experts, missing, self._choose_for_cpu(on_cpu)), 0
        try:
            if demand.on_cpu and on_cpu is not None and self._cpu_path is not None:
                self._cpu_path.start(on_cpu, demand.on_cpu)
                batch = self._finish_on_cpu(layer, demand, on_cpu, _FOLLOWED_SECONDS)
                computed = 0 if batch is None or batch.computed is None else len(batch.computed.values)
            while demand.absent:  # every other slot is loading
                self._pool.poll(demand)
                let_others_run()
            for entry in demand.waiting:
                if (handle := entry.handle) is not None and handle.ready():
                    handle.wait()  # raises the error of a copy that failed
            slots = {entry.key.expert: entry.slot for entry in demand.ready + demand.waiting}
        except BaseException:
            if self._cpu_path is not None:
                self._cpu_path.abandon()
            self._pool.abandon(demand)
            raise
        return FollowedLayer(demand, slots, computed)

    def end_follow(self, demand: Demand) -> None:
        """Release the experts of a layer that was answered, and settle copies that have ended."""
        if demand.waiting:
            self._pool.reap()
        self._pool.abandon(demand)

    def routed(self, layer: int, experts: Sequence[int]) -> None:
        """Report the routed experts of a followed layer to the prefetch policy."""
        self._step.routed(layer, experts)

    def pin_layer(self, layer: int) -> PinnedLayer:
        """Pin a layer's READY experts so that kernels can launch before the routed experts are known.

        Release it with `use`, `commit` or `unpin_layer`.
        """
        return self._pool.pin_layer(layer)

    def unpin_layer(self, pinned: PinnedLayer) -> None:
        """Release a pinned layer. Idempotent."""
        self._pool.unpin_layer(pinned)

    def note_router_finished(self, pinned: PinnedLayer) -> None:
        """State that the layer's router has finished on the device, and so every kernel launched before the pin."""
        self._transfer.finish_epochs(pinned.epoch)

    def covers(self, pinned: PinnedLayer, experts: Sequence[int]) -> bool:
        """Return whether all routed experts are pinned."""
        return bool((pinned.slots[list(experts)] >= 0).all())

    def commit(self, pinned: PinnedLayer, experts: Sequence[int]) -> None:
        """Account for a layer whose routed experts were all pinned, and release it."""
        self._scheduler.reach_layer(pinned.layer)
        self._pool.commit(pinned, experts)
        self._step.routed(pinned.layer, experts)

    def _choose_for_cpu(self, on_cpu: CpuLayer | None) -> ChooseForCpu | None:
        """Return how absent experts are selected for the CPU; None if it computes none."""
        if on_cpu is None or self._cpu_path is None:
            return None
        self._cpu_path.learn_moves(self._pool.take_copy_times(), self._pool.blob_bytes, self._ledger)
        return partial(self._cpu_path.choose, on_cpu)

    def _finish_on_cpu(
        self, layer: int, demand: Demand, on_cpu: CpuLayer, most_seconds: float = math.inf
    ) -> ExpertBatch | None:
        """Wait for the experts on the CPU and return their batch; load those that it could not compute."""
        assert self._cpu_path is not None
        started = self._clock.now()
        failed = self._cpu_path.finish(demand.on_cpu, self._pump, self._ledger, most_seconds)
        now = self._clock.now()
        self._ledger.waited_for_cpu(now - started)
        self._timeline.add(Activity.STALL, started, now)
        experts = tuple(key.expert for key in demand.on_cpu if key not in failed)
        demand.on_cpu = []
        if failed:
            self._pool.load_instead(demand, failed)
        return ExpertBatch(layer, experts, (), (), on_cpu.results(experts)) if experts else None

    def _pump(self, until: DeviceEvent) -> None:
        """Submit waiting copies, and prefetch requests until the event has passed."""
        self._transfer.pump()
        if len(self._scheduler):
            self._scheduler.submit(until)

    def _wait_for_arrival(self, demand: Demand) -> None:
        """Wait until another expert arrives, or until a slot for an absent one may be free."""
        if (blocked := self._pool.poll(demand)) is None:
            return
        blocking, handle = blocked
        started = self._clock.now()
        try:
            handle.stream_wait()
        except SpmoeError:
            self._pool.give_up(blocking)
            if blocking in demand.waiting:
                raise
        finally:
            now = self._clock.now()
            self._ledger.stalled(now - started)
            self._timeline.add(Activity.STALL, started, now)
        self._pool.collect(demand)

    def _batch(self, layer: int, entries: list[Entry]) -> ExpertBatch:
        if len(self._scheduler):
            self._scheduler.submit()
        experts, slots = tuple(e.key.expert for e in entries), tuple(e.slot for e in entries)
        return ExpertBatch(layer, experts, slots, self._pool.weights(entries))
