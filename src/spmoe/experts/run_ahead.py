"""Work that runs ahead of the host.

A CUDA device is given work before the host asks for its result, so that neither waits for the other:

- the next step's draft is launched as soon as this step's tokens are known (`launch_draft`);
- the first graph of its verification is launched behind it, and reads the draft's tokens on the device
  (`launch_verify`). A step without drafts, of one or several sequences, has only that (`plan_plain`);
- bookkeeping of a layer whose routed experts were all READY is deferred until the next layer's kernels are launched
  (`defer`, `settle`);
- prefetch requests of a draft are read and submitted while the device goes on (`reading_predictions`, `wait`).

`RunAhead` is the only owner of that state. Any launch that it does not make itself invalidates its launches: captured
graphs share memory, and the next forward overwrites their results. On a CPU nothing is ever launched ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum

from spmoe.experts.device_residency import DeviceResidency
from spmoe.experts.prefetch import PrefetchScheduler
from spmoe.experts.transfer import DeviceEvent, Transfer
from spmoe.interpreter import let_others_run

ReadTokens = Callable[[], list[int]]  # waits for the tokens of a launched draft
KvRange = tuple[int, int, int]  # start in the KV arena, length before a forward, capacity


class Launched(Enum):
    """Part of the next step that has been launched."""

    NOTHING = "nothing"
    DRAFT = "the draft, if the step has one"
    VERIFY = "the draft, and the first graph of its verification behind it"


@dataclass(slots=True)
class _Draft:
    sequence_ids: list[int]  # one, or several if K is 0
    length: int  # tokens of the sequence when the draft was launched
    k: int
    read: ReadTokens
    tokens: list[int] | None = None  # once they were read


@dataclass(frozen=True, slots=True)
class _Verify:
    graph: object  # the captured forward
    tokens: list[int]  # the last token of each sequence, which the draft's tokens follow
    ranges: Sequence[KvRange]  # of the sequences


def _starts_and_lengths(ranges: Sequence[KvRange]) -> list[tuple[int, int]]:
    """Return the start and length of ranges, which results depend on; capacities may have grown since a launch."""
    return [(start, length) for start, length, _ in ranges]


@dataclass(frozen=True, slots=True)
class _DeferredLayer:
    layer: int
    commit: Callable[[], None]
    observations: Sequence[Callable[[], None]]  # hidden states to show to the prefetch policy


class RunAhead:
    """Work launched on the device before the host asks for it, and host work deferred until the device has it."""

    def __init__(
        self, transfer: Transfer, scheduler: PrefetchScheduler, residency: DeviceResidency | None = None
    ) -> None:
        self.launched = Launched.NOTHING
        self._transfer = transfer
        self._scheduler = scheduler
        self._residency = residency
        self._draft: _Draft | None = None
        self._verify: _Verify | None = None
        self._deferred: _DeferredLayer | None = None
        self._launching = False

    # ---- launches

    def launch_draft(self, sequence_id: int, length: int, k: int, launch: Callable[[], ReadTokens]) -> None:
        """Launch a draft of K tokens for a sequence of `length` tokens; earlier launches become invalid."""
        self.invalidate()
        with self._own_launch():
            self._draft = _Draft([sequence_id], length, k, launch())
        self.launched = Launched.DRAFT

    def plan_plain(self, sequence_ids: Sequence[int]) -> None:
        """Let the next step of these sequences have no drafts; earlier launches become invalid."""
        self.invalidate()
        self._draft = _Draft(list(sequence_ids), 0, 0, list, tokens=[])
        self.launched = Launched.DRAFT

    def take_draft(self, sequence_id: int, length: int, k: int) -> list[int] | None:
        """Wait for and return the launched draft's tokens, if it was launched for exactly this; else None."""
        draft = self._draft
        if draft is None or (draft.sequence_ids, draft.length, draft.k) != ([sequence_id], length, k):
            self.invalidate()
            return None
        try:
            draft.tokens = draft.read()
        except BaseException:
            self.invalidate()
            raise
        if self.launched is Launched.DRAFT:
            self.invalidate()
        return list(draft.tokens)

    def launch_verify(self, k: int, tokens: list[int], ranges: Sequence[KvRange], launch: Callable[[], object]) -> None:
        """Launch the first graph of the forward that verifies the launched draft; `launch` returns that forward.

        It appends `tokens`, and the draft's behind them, to these ranges of the KV arena. Do nothing unless a draft of
        K tokens is launched and nothing was launched behind it.
        """
        if self.launched is Launched.DRAFT and self._draft is not None and self._draft.k == k:
            with self._own_launch():
                self._verify = _Verify(launch(), tokens, ranges)
            self.launched = Launched.VERIFY

    def take_verify(self, graph: object, tokens: list[int], ranges: Sequence[KvRange]) -> bool:
        """Return whether this forward's first graph was launched for exactly these tokens. A launch is taken once."""
        draft, verify = self._draft, self._verify
        is_taken = (
            draft is not None
            and verify is not None
            and verify.graph is graph
            and draft.tokens is not None
            and [*verify.tokens, *draft.tokens] == tokens
            and _starts_and_lengths(verify.ranges) == _starts_and_lengths(ranges)
        )
        if is_taken:
            self._forget()
        else:
            self.invalidate()
        return is_taken

    def launch_next(self, launch: Callable[[], None]) -> Exception | None:
        """Launch the next step's draft and verification. After a failure nothing is launched; return the failure.

        It is not raised, so that this step's tokens are kept: the caller raises it where the draft is needed.
        """
        try:
            launch()
        except Exception as error:
            self.invalidate()
            return error
        return None

    def note_launch(self) -> None:
        """Invalidate all launches because another forward is launched; do nothing inside a launch of this object."""
        if not self._launching:
            self.invalidate()

    def keep_only(self, sequence_ids: Sequence[int]) -> None:
        """Invalidate all launches unless they belong to the step of these sequences, which begins."""
        if self._draft is not None and self._draft.sequence_ids != list(sequence_ids):
            self.invalidate()

    def invalidate(self) -> None:
        """Discard all launches. The device still runs them to their end; nobody reads their results."""
        self._forget()
        if self._residency is not None:
            self._residency.abort()

    def _forget(self) -> None:
        self._draft = self._verify = None
        self.launched = Launched.NOTHING

    def reset(self) -> None:
        """Discard all launches and deferred bookkeeping, whatever an error has left of them."""
        self.invalidate()
        self._deferred = None
        self._launching = False

    @contextmanager
    def _own_launch(self) -> Iterator[None]:
        self._launching = True
        try:
            yield
        except BaseException:
            self.invalidate()
            raise
        finally:
            self._launching = False

    # ---- deferred bookkeeping

    def defer(self, layer: int, commit: Callable[[], None], observations: Sequence[Callable[[], None]] = ()) -> None:
        """Defer a layer's bookkeeping until the device is busy with the next layer."""
        self.settle()
        self._deferred = _DeferredLayer(layer, commit, observations)

    def settle(self, next_layer: int | None = None) -> None:
        """Do the deferred bookkeeping; show its observations only if the layer after it runs now.

        While a layer runs, prefetch requests that follow from it are queued for `submit_prefetches`.
        """
        if (deferred := self._deferred) is None:
            return
        self._deferred = None
        if next_layer is None:
            deferred.commit()
            return
        with self._scheduler.held():
            deferred.commit()
            if next_layer == deferred.layer + 1:
                for observe in deferred.observations:
                    observe()

    # ---- waiting

    def wait(self, event: DeviceEvent) -> None:
        """Wait for a device event; submit waiting copies meanwhile."""
        self._transfer.wait_and_pump(event)

    def wait_and_prefetch(self, event: DeviceEvent) -> None:
        """Wait for a device event; submit prefetch requests, and settle copies that end, meanwhile."""
        while not event.query() and self._scheduler.has_work:
            self._scheduler.submit(event)
            let_others_run()
        self.wait(event)

    def take_stall_seconds(self) -> float:
        """Return how long compute on the device has waited for experts since the last call, as far as it is known."""
        waited = 0.0 if self._residency is None else self._residency.take_stall_seconds()
        return waited + self._transfer.take_stall_seconds()

    @contextmanager
    def reading_predictions(self) -> Iterator[None]:
        """Queue prefetch requests inside; `submit_prefetches` submits them while the device is busy."""
        with self._scheduler.held():
            yield

    def submit_prefetches(self, until: DeviceEvent | None = None) -> None:
        """Submit prefetch requests until the event has passed."""
        self._scheduler.submit(until)
