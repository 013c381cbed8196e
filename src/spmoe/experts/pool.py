"""The expert pool: slots, the cache over them and the loads in flight, behind one lock.

Every change of an expert's residency happens here, under the lock; no thread waits for bytes while it holds the lock.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from spmoe.errors import TransferError
from spmoe.experts.cache import Entry, ExpertCache, PinnedLayer
from spmoe.experts.device_residency import DeviceResidency
from spmoe.experts.eviction import Eviction
from spmoe.experts.inflight import InflightLoads, wait_for
from spmoe.experts.slots import Slots
from spmoe.experts.transfer import CopyHandle, Transfer
from spmoe.observe.clock import Clock
from spmoe.observe.ledger import Ledger
from spmoe.observe.timeline import Timeline
from spmoe.types import ExpertKey, PrefetchRequests, Residency

# absent experts, what moving each costs later, and moves that the link does first -> those that the CPU computes
ChooseForCpu = Callable[[Sequence[ExpertKey], Sequence[float], float], Sequence[ExpertKey]]


@dataclass(slots=True, eq=False)
class Demand:
    """Progress of one layer's demand for experts. Every entry in it is pinned."""

    ready: list[Entry] = field(default_factory=list)
    waiting: list[Entry] = field(default_factory=list)  # LOADING
    absent: list[ExpertKey] = field(default_factory=list)  # without a slot so far
    on_cpu: list[ExpertKey] = field(default_factory=list)  # need no slot
    held: list[Entry] = field(default_factory=list)  # READY, and read by kernels that were launched


class ExpertPool:
    """Residency of all experts. Thread-safe."""

    def __init__(
        self,
        slots: Slots,
        transfer: Transfer,
        eviction: Eviction,
        blob_bytes: int,
        clock: Clock,
        ledger: Ledger,
        timeline: Timeline,
        lock: threading.RLock,
        residency: DeviceResidency | None = None,
    ) -> None:
        self.blob_bytes = blob_bytes
        self.slot_count = slots.count
        # no prefetch is submitted while this many copies are in flight; one slot stays free for demand loads
        self.prefetch_depth = min(transfer.depth, max(1, slots.count - 1))
        self._slots = slots
        self._transfer = transfer
        self._ledger = ledger
        self._clock = clock
        self._timeline = timeline
        self._residency = residency
        self._cache = self._new_cache(eviction)
        self._loads = InflightLoads(transfer, self._cache, ledger, clock, timeline)
        self._demands: list[Demand] = []  # claimed and not abandoned
        self._closed = False
        self._lock = lock  # shared with the prefetch scheduler, whose queue it guards too

    # ---- state

    @property
    def closed(self) -> bool:
        """Whether the pool refuses further claims."""
        return self._closed

    @property
    def loads_in_flight(self) -> int:
        """Copies that have been submitted and not settled."""
        return len(self._loads)

    @property
    def peak_slots(self) -> int:
        """Most slots that were occupied at once."""
        return self._cache.peak

    @property
    def has_unplaced_demand(self) -> bool:
        """Whether a demand waits for a slot; prefetches must not take one then."""
        return any(demand.absent for demand in self._demands)

    def residency(self, key: ExpertKey) -> Residency:
        """Return an expert's state."""
        entry = self._cache.get(key)
        return Residency.ABSENT if entry is None else entry.state

    def slots_by_key(self) -> dict[ExpertKey, int]:
        """Return the slot of every expert that has one, READY or LOADING."""
        with self._lock:
            return {entry.key: entry.slot for entry in self._cache.entries()}

    def present(self) -> np.ndarray:
        """Return which experts have a slot, READY or LOADING."""  # bool [layers, experts]
        with self._lock:
            return self._cache.present.copy()

    def handles(self) -> list[CopyHandle]:
        """Return a handle for each copy in flight."""
        with self._lock:
            return self._loads.handles

    def oldest_handle(self) -> CopyHandle | None:
        """Return the handle of the copy that has been in flight for longest."""
        return self._loads.entries[0].handle if self._loads.entries else None

    # ---- events for the eviction policy

    def begin_step(self, sequence_id: int) -> None:
        """Report the begin of a step to the eviction policy."""
        with self._lock:
            self._cache.eviction.begin_step(sequence_id)

    def note_prefetches(self, requests: PrefetchRequests) -> np.ndarray:
        """Report prefetch requests to the eviction policy; return which experts have a slot."""  # bool [requests]
        with self._lock:
            self._cache.eviction.on_prefetches(requests)
            present: np.ndarray = self._cache.present[requests.layers, requests.experts]
            return present

    # ---- demand

    def pin_layer(self, layer: int) -> PinnedLayer:
        """Pin a layer's READY experts so that kernels can launch before the routed experts are known.

        The caller knows the routed experts before it commits or claims: every earlier kernel has finished by then.
        """
        with self._lock:
            self._require_open()
            self._loads.reap()
            return self._cache.pin_layer(layer, self._transfer.begin_epoch())

    def unpin_layer(self, pinned: PinnedLayer) -> None:
        """Release a pinned layer. Idempotent."""
        with self._lock:
            self._cache.unpin_layer(pinned)

    def commit(self, pinned: PinnedLayer, experts: Sequence[int]) -> None:
        """Count these experts of a pinned layer as used by kernels that were launched, and release the layer."""
        with self._lock:
            self._loads.reap()
            self._cache.eviction.on_layer(pinned.layer)
            self._commit(pinned, experts)

    def claim(
        self,
        layer: int,
        experts: Sequence[int],
        pinned: PinnedLayer | None,
        shares: Sequence[float],
        choose_for_cpu: ChooseForCpu | None = None,
    ) -> Demand:
        """Pin the routed experts that are resident, and submit demand loads of the others.

        Experts of `pinned`, which kernels already read, are committed and left out. `shares`: for a prompt, the share
        of rows that are routed to each expert. `choose_for_cpu` selects absent experts that are not loaded.
        """
        demand, needed = Demand(), list(dict.fromkeys(experts))
        with self._lock:
            self._demands.append(demand)
            try:
                self._loads.reap()
                # together with the pins: once a layer runs, policies may score its experts lowest
                self._cache.eviction.on_layer(layer)
                if shares:
                    self._cache.eviction.on_prompt(layer, experts, shares)
                if pinned is not None:
                    launched = set(np.flatnonzero(pinned.slots >= 0).tolist())
                    self._commit(pinned, [expert for expert in needed if expert in launched])
                    needed = [expert for expert in needed if expert not in launched]
                self._pin_residents(layer, needed, demand)
                self._demand_absent(demand, choose_for_cpu)
            except BaseException:
                self.abandon(demand)
                raise
        return demand

    def follow(
        self,
        layer: int,
        experts: Sequence[int],
        missing: Sequence[int],
        choose_for_cpu: ChooseForCpu | None = None,
    ) -> Demand:
        """Count the experts that a forward has found resident as used, and submit demand loads of the missing ones.

        While some are missing, the forward waits for them, and may read the others: no load may take their slots. They
        are pinned until the demand is abandoned.
        `choose_for_cpu` selects absent experts that are not loaded.
        """
        demand = Demand()
        with self._lock:
            self._demands.append(demand)
            try:
                self._require_open()
                self._cache.eviction.on_layer(layer)
                hits = [expert for expert in experts if expert not in missing]
                resident = [entry for e in hits if (entry := self._cache.get(ExpertKey(layer, e))) is not None]
                if missing:  # before anything is counted: the device waits for them
                    for entry in resident:
                        self._cache.pin(entry)
                        demand.held.append(entry)
                    self._pin_residents(layer, missing, demand)
                    self._demand_absent(demand, choose_for_cpu)
                else:  # not with missing ones: it submits prefetches, which would precede the answer
                    self._loads.reap()
                self._ledger.hit(len(hits))
                if resident:
                    self._cache.eviction.on_use(layer, [entry.key.expert for entry in resident])
                for entry in resident:
                    if entry.prefetched:
                        self._use_prefetched(entry)
            except BaseException:
                self.abandon(demand)
                raise
        return demand

    def load_instead(self, demand: Demand, keys: Sequence[ExpertKey]) -> None:
        """Load experts that the CPU was to compute."""
        with self._lock:
            self._ledger.demanded(len(keys))
            demand.absent += keys
            self._load_absent(demand)

    def poll(self, demand: Demand) -> tuple[Entry, CopyHandle] | None:
        """Move arrived experts to `demand.ready`; if there is none, return an entry to wait for, and its handle."""
        with self._lock:
            self._loads.reap()
            self._load_absent(demand)
            self._collect(demand)
            if demand.ready:
                return None
            own = [e for e in self._loads.entries if e in demand.waiting] or demand.waiting  # else a failed one
            blocking = next(iter(own or self._loads.entries), None)
            if blocking is None or blocking.handle is None:
                raise AssertionError("every slot is pinned by an expert batch that was never released")
            return blocking, blocking.handle  # an entry loses its handle when another thread settles its copy

    def collect(self, demand: Demand) -> None:
        """Move arrived experts to `demand.ready`."""
        with self._lock:
            self._loads.reap()
            self._collect(demand)

    def give_up(self, entry: Entry) -> None:
        """Settle a copy that has failed."""
        with self._lock:
            self._loads.give_up(entry)

    def weights(self, entries: Sequence[Entry]) -> tuple[Mapping[str, Tensor], ...]:
        """Return the tensors of pinned entries."""
        with self._lock:
            self._require_open()
            return tuple(self._slots.weights(entry.slot) for entry in entries)

    def release(self, entries: Sequence[Entry]) -> None:
        """Unpin entries whose kernels have been launched; their slots stay protected until those finish."""
        if not entries:
            return
        self._transfer.protect_slots([entry.slot for entry in entries])
        with self._lock:
            for entry in entries:
                if entry.state is not Residency.ABSENT:
                    self._cache.unpin(entry)

    def abandon(self, demand: Demand) -> None:
        """End a demand and unpin the experts that it still holds. Idempotent."""
        held = demand.ready + demand.waiting + demand.held
        with self._lock:
            if demand in self._demands:
                self._demands.remove(demand)
            demand.ready, demand.waiting, demand.absent, demand.on_cpu, demand.held = [], [], [], [], []
        self.release(held)

    # ---- prefetch

    def reserve(self, key: ExpertKey, worth: float = math.inf) -> Entry | None:
        """Take a slot for a prefetched expert; None if the eviction policy scores every resident higher.

        Residents whose chance of use is not below `worth` are not evicted either.
        """
        with self._lock:
            if (reservation := self._cache.reserve(key, worth, self._is_quiet)) is None:
                return None
            if reservation.evicted is not None and reservation.evicted.prefetched:
                self._ledger.prefetch_wasted()
            return reservation.entry

    def submit(self, entries: list[Entry]) -> None:
        """Start the copies of prefetched experts; raise SpmoeError if the transfer refuses them."""
        with self._lock:
            self._loads.submit(entries, urgent=False)

    def reap(self) -> None:
        """Settle every copy that has ended."""
        with self._lock:
            self._loads.reap()

    def take_copy_times(self) -> list[tuple[int, float]]:
        """Return bytes and seconds of copies that have ended since the last call, if they are measured."""
        return self._transfer.take_copy_times()

    # ---- between requests

    def set_batching(self, batching: bool) -> None:
        """Submit copies that are ready together in one call, or one by one."""
        self._loads.set_batching(batching)

    def change_eviction(self, eviction: Eviction) -> None:
        """Switch to another eviction policy, which keeps its learned state."""
        with self._lock:
            self._cache.change_eviction(eviction)

    def residents(self) -> list[ExpertKey]:
        """Wait for all copies to end; return the keys of the experts in slots."""
        wait_for(self.handles())
        with self._lock:
            self._loads.reap()
            return [entry.key for entry in self._cache.entries()]

    def exchange(self, eviction: Eviction, keys: Sequence[ExpertKey]) -> None:
        """Replace the residents by these experts, and the eviction policy by the one that managed them before.

        Raise SpmoeError if an expert cannot be loaded.
        """
        with self._lock:
            for entry in self._cache.entries():
                if entry.prefetched:
                    self._ledger.prefetch_wasted()
                    self._cache.mark_used(entry)  # so that it is not counted again
            self._loads.submit(self._cache.exchange(eviction, frozenset(keys)), urgent=True)
            handles = self._loads.handles
        try:
            for handle in handles:
                handle.wait()
        finally:
            wait_for(handles)
            with self._lock:
                self._loads.reap()

    def reset(self, eviction: Eviction) -> None:
        """Forget every expert in a slot. Call it only when nothing reads or requests experts.

        Whatever an error has left of the bookkeeping is replaced, not repaired.
        """
        self._transfer.drain()
        with self._lock:
            peak, batching = self._cache.peak, self._loads.batching
            self._ledger.prefetch_lost()
            self._cache = self._new_cache(eviction)
            self._cache.peak = peak
            self._loads = InflightLoads(self._transfer, self._cache, self._ledger, self._clock, self._timeline)
            self._loads.set_batching(batching)
            self._demands = []

    def begin_close(self) -> bool:
        """Refuse every further claim; return False if that was done before."""
        with self._lock:
            closed, self._closed = self._closed, True
            return not closed

    def finish_close(self) -> None:
        """End every copy and release the slots."""
        self._transfer.close()
        with self._lock:
            self._slots.close()

    def _new_cache(self, eviction: Eviction) -> ExpertCache:
        return ExpertCache(self.slot_count, eviction, None if self._residency is None else self._residency.table)

    def _is_quiet(self, layer: int) -> bool:
        return self._residency is None or self._residency.is_quiet(layer)

    # ---- under the lock

    def _require_open(self) -> None:
        if self._closed:
            raise TransferError("the engine was closed")

    def _pin_residents(self, layer: int, experts: Sequence[int], demand: Demand) -> None:
        resident: list[int] = []
        for expert in experts:
            entry = self._cache.get(ExpertKey(layer, expert))
            if entry is None:
                demand.absent.append(ExpertKey(layer, expert))
                continue
            resident.append(expert)
            self._cache.pin(entry)
            if entry.state is Residency.READY:
                demand.ready.append(entry)
            else:
                demand.waiting.append(entry)
                if entry.handle is not None:
                    entry.handle.prioritize()
            if entry.prefetched:
                self._use_prefetched(entry)
        if resident:
            self._cache.eviction.on_use(layer, resident)
        self._ledger.hit(len(demand.ready))
        self._ledger.late(len(demand.waiting))

    def _demand_absent(self, demand: Demand, choose_for_cpu: ChooseForCpu | None) -> None:
        """Leave absent experts to the CPU or submit their loads."""
        if choose_for_cpu is not None and demand.absent:
            self._leave_to_cpu(demand, choose_for_cpu)
        self._ledger.demanded(len(demand.absent))
        self._load_absent(demand)

    def _leave_to_cpu(self, demand: Demand, choose: ChooseForCpu) -> None:
        """Move absent experts that the CPU computes to `demand.on_cpu`."""
        # experts that this layer waits for may be among those that the link is busy with
        backlog = max(len(demand.waiting), self._transfer.queued_bytes() / self.blob_bytes)
        demand.on_cpu = list(choose(demand.absent, self._cache.move_losses(demand.absent), backlog))
        if demand.on_cpu:
            demand.absent = [key for key in demand.absent if key not in demand.on_cpu]
            self._cache.eviction.on_use(demand.on_cpu[0].layer, [key.expert for key in demand.on_cpu])

    def _commit(self, pinned: PinnedLayer, experts: Sequence[int]) -> None:
        layer = pinned.layer
        self._ledger.hit(len(experts))
        if experts:
            self._cache.eviction.on_use(layer, experts)
        for expert in np.flatnonzero(self._cache.prefetched[layer]).tolist():
            if expert in experts and (entry := self._cache.get(ExpertKey(layer, expert))) is not None:
                self._use_prefetched(entry)
        self._transfer.protect_slots(pinned.slots[list(experts)].tolist(), pinned.epoch)
        self._cache.unpin_layer(pinned)

    def _use_prefetched(self, entry: Entry) -> None:
        self._cache.mark_used(entry)
        self._ledger.prefetch_used(late=entry.state is Residency.LOADING)

    def _load_absent(self, demand: Demand) -> None:
        """Submit demand loads for as many absent experts as slots can be taken for."""
        if not demand.absent:
            return
        self._require_open()
        entries: list[Entry] = []
        for reservation in self._cache.reserve_for_demand(tuple(demand.absent)):
            if reservation.evicted is not None and reservation.evicted.prefetched:
                self._ledger.prefetch_wasted()
            entry = reservation.entry
            self._cache.pin(entry)
            entries.append(entry)
            demand.waiting.append(entry)
            del demand.absent[0]
            if len(entries) == 1:  # the link need not wait until the other slots are taken
                self._loads.submit(entries, urgent=True)
        self._loads.submit(entries[1:], urgent=True)
        if entries:
            self._cache.eviction.on_use(entries[0].key.layer, [entry.key.expert for entry in entries])

    def _collect(self, demand: Demand) -> None:
        arrived = [entry for entry in demand.waiting if entry.state is Residency.READY]
        if arrived:
            demand.ready += arrived
            demand.waiting = [entry for entry in demand.waiting if entry.state is not Residency.READY]
