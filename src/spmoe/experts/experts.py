"""The expert side of an engine, put together."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from spmoe.experts.access import ExpertAccess
from spmoe.experts.cpu_path import CpuPath
from spmoe.experts.device_residency import DeviceResidency
from spmoe.experts.eviction import Eviction
from spmoe.experts.pool import ExpertPool
from spmoe.experts.prefetch import PrefetchScheduler
from spmoe.experts.run_ahead import RunAhead
from spmoe.experts.slots import Slots
from spmoe.experts.step import ExpertStep
from spmoe.experts.transfer import Transfer
from spmoe.observe.clock import Clock
from spmoe.observe.expert_uses import ExpertUses
from spmoe.observe.ledger import Ledger
from spmoe.observe.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Experts:
    """Access to experts, prefetch scheduling and the step's lifecycle, over one pool of slots."""

    pool: ExpertPool
    scheduler: PrefetchScheduler
    run_ahead: RunAhead
    step: ExpertStep
    access: ExpertAccess
    ledger: Ledger
    timeline: Timeline
    uses: ExpertUses
    cpu_path: CpuPath | None  # None: missing experts are always moved

    @classmethod
    def build(
        cls,
        slots: Slots,
        transfer: Transfer,
        eviction: Eviction,
        blob_bytes: int,
        clock: Clock,
        *,
        threaded: bool = True,
        timeline: Timeline | None = None,
        cpu_path: CpuPath | None = None,
        residency: DeviceResidency | None = None,
    ) -> Experts:
        """Connect slots, transfer and eviction policy. `threaded`: a worker thread submits prefetch requests."""
        timeline, lock = timeline or Timeline(), threading.RLock()
        ledger = Ledger(blob_bytes, lock)
        pool = ExpertPool(slots, transfer, eviction, blob_bytes, clock, ledger, timeline, lock, residency)
        scheduler = PrefetchScheduler(pool, lock, ledger, clock, timeline, threaded)
        run_ahead = RunAhead(transfer, scheduler, residency)
        uses = ExpertUses(*eviction.shape)
        step = ExpertStep(pool, scheduler, run_ahead, transfer, ledger, uses)
        access = ExpertAccess(pool, scheduler, step, run_ahead, transfer, clock, ledger, timeline, cpu_path)
        return cls(pool, scheduler, run_ahead, step, access, ledger, timeline, uses, cpu_path)

    def load_all(self, experts_per_layer: Sequence[int]) -> None:
        """Load every expert into a slot, without counting that as demand."""
        with self.ledger.ignore_demand():
            for layer, count in enumerate(experts_per_layer):
                with closing(self.access.use(layer, range(count))) as batches:
                    for _ in batches:
                        pass
            self.step.begin()

    def reset(self, eviction: Eviction) -> None:
        """Forget every expert in a slot and all work under way, after an error in the middle of bookkeeping.

        The caller waits for the device before.
        """
        if self.cpu_path is not None:
            self.cpu_path.abandon()
        self.run_ahead.reset()
        self.step.reset()
        self.scheduler.reset()
        self.pool.reset(eviction)

    def close(self) -> None:
        """End the worker and every copy, and release the slots. Idempotent."""
        if self.pool.begin_close():
            if self.cpu_path is not None:
                self.cpu_path.close()
            self.scheduler.close()
            self.pool.finish_close()
