"""The lifecycle of a step, as eviction, prefetch scheduling and the prefetch policy see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spmoe.experts.pool import ExpertPool
from spmoe.experts.prefetch import PrefetchScheduler
from spmoe.experts.run_ahead import RunAhead
from spmoe.experts.transfer import Transfer
from spmoe.observe.expert_uses import ExpertUses
from spmoe.observe.ledger import Ledger
from spmoe.types import PrefetchRequests

OnRouted = Callable[[int, Sequence[int]], PrefetchRequests]  # layer, routed experts -> prefetch requests


class ExpertStep:
    """The step under way: begins, reaches one layer after the other, and ends."""

    def __init__(
        self,
        pool: ExpertPool,
        scheduler: PrefetchScheduler,
        run_ahead: RunAhead,
        transfer: Transfer,
        ledger: Ledger,
        uses: ExpertUses,
    ) -> None:
        self._pool = pool
        self._scheduler = scheduler
        self._run_ahead = run_ahead
        self._transfer = transfer
        self._ledger = ledger
        self._uses = uses
        self._on_routed: OnRouted | None = None

    def begin(self, sequence_id: int = 0, on_routed: OnRouted | None = None) -> None:
        """Begin a step. `on_routed` is called with each layer's routed experts once their loads are submitted."""
        self._run_ahead.settle()
        self._transfer.bind_compute_stream()
        self._scheduler.begin_step()
        self._pool.begin_step(sequence_id)
        self._on_routed = on_routed

    def routed(self, layer: int, experts: Sequence[int]) -> None:
        """Count a layer's routed experts; report them to the prefetch policy, and queue the requests it returns."""
        if self._on_routed is not None:  # a step of a request, not a warm-up
            self._uses.add(layer, experts)
            self._scheduler.request(self._on_routed(layer, experts))

    def end(self) -> None:
        """End the step and drop all queued requests."""
        self._run_ahead.settle()
        self._scheduler.end_step()
        self._on_routed = None
        self.count_stalls()

    def reset(self) -> None:
        """Forget the step under way."""
        self._on_routed = None

    def finish_compute(self) -> None:
        """State that every kernel launched so far has finished."""
        self._transfer.finish_epochs(self._transfer.begin_epoch())

    def count_stalls(self) -> None:
        """Count the time that the compute stream has waited for copies, as far as it is known."""
        self._ledger.stalled(self._run_ahead.take_stall_seconds())
