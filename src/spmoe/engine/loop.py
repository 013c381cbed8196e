"""The loop: one step of speculative decoding over offloaded experts. Read `step` first."""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import torch

from spmoe.draft.base import Drafter
from spmoe.experts.source import ExpertSource
from spmoe.models.hidden_states import LayerObserver
from spmoe.models.kv import KvState
from spmoe.models.target import Target
from spmoe.observe.clock import Clock
from spmoe.observe.ledger import Counters
from spmoe.observe.timeline import Activity
from spmoe.predict.base import PrefetchPolicy
from spmoe.predict.draft_length import FIRST, DraftLength
from spmoe.types import DraftOutcome, LayerChunk, Routing, Sequence, Stage
from spmoe.verify.greedy import GreedyVerifier
from spmoe.verify.rejection import RejectionVerifier


class Lookout:
    """Predicts and prefetches, while a model runs."""

    def __init__(self, loop: Loop, stage: Stage) -> None:
        self._loop = loop
        self.ask = partial(loop.policy.ask, stage)

    def __call__(self, seen: LayerChunk) -> None:
        if seen.stage in self._loop.policy.stages:
            self._loop.source.prefetch(self._loop.policy.on_chunk(seen))


class Loop:
    """Everything a step touches."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        policy: PrefetchPolicy,
        source: ExpertSource,
        clock: Clock,
        draft_tokens: int,
        prefill_chunk: int,
        states: dict[int, KvState] | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.policy = policy
        self.source = source
        self.draft_tokens = draft_tokens  # K, or the most
        self.length: DraftLength | None = None  # who chooses how many, where that is left open
        self.counters: Counters = source.counters
        self._clock = clock
        self._prefill_chunk = prefill_chunk
        self.states = states if states is not None else {}  # the target's, by sequence; a draft may share them

    def step(self, sequence: Sequence, room: int) -> list[int]:
        """Draft, predict, prefetch, verify, accept, account; the new tokens, of which there are at most `room`."""
        started, loaded = self._clock.now(), self.counters.useful_loads
        self.source.begin_step(sequence.id, self.policy.on_routed)
        self.source.prefetch(self.policy.begin_step(sequence.id))
        k = self._draft_length(sequence, room)

        (draft,) = self.drafter.propose([sequence], k, self._lookout(Stage.DRAFT))
        drafted = self._clock.now()
        self.source.draft_is_over()

        logits = self._verify(sequence, draft.tokens)  # [K + 1, vocabulary]
        self.source.end_step()  # while a device comes to the end of it
        verifier = GreedyVerifier(self.target.argmax) if sequence.sampling.greedy else RejectionVerifier()
        result = verifier.verify(sequence, draft, logits)
        self.source.computed()

        if self.length is not None and sequence.sampling.greedy and len(sequence.tokens) > sequence.prompt_length:
            self.length.learn(len(draft.tokens), result.accepted, drafted - started, self._clock.now() - drafted)
        new = [*draft.tokens[: result.accepted], result.next_token]
        sequence.tokens += new
        self._rewind(sequence, len(sequence.tokens) - 1)
        if (k := self._draft_length(sequence, room - len(new))) > 0:
            with suppress(Exception):  # what goes wrong goes wrong again when asked for, and these tokens are kept
                self.drafter.begin(sequence, k, self._lookout(Stage.DRAFT))  # a device goes on while the host does
                self._begin_verification(sequence, k)

        self.source.book_stalls()
        self.policy.on_accept(DraftOutcome(len(draft.tokens), result.accepted))
        self.counters.steps += 1
        self.counters.tokens += len(new)
        self.counters.count_draft(len(draft.tokens), result.accepted, self.counters.useful_loads - loaded)
        self._account_time(started, drafted, self._clock.now())
        return new

    def prepare(self) -> None:
        """Have all forwards recorded that greedy requests replay, over the states that earlier ones have left."""
        observer = self._target_observer()
        for rows in range(1, self.draft_tokens + 2):  # drafts get shorter at the end of a request
            self.target.prepare(rows, rows, observer)
        self.drafter.prepare(self.draft_tokens, self._lookout(Stage.DRAFT))

    def release(self, sequence: Sequence) -> None:
        """The request is over, however it ended."""
        self.source.end_step()
        if (kv := self.states.pop(sequence.id, None)) is not None:
            self.target.release_kv(kv)
        self.drafter.release(sequence.id)

    def _account_time(self, started: float, drafted: float, ended: float) -> None:
        self.counters.draft_seconds += drafted - started
        self.counters.verify_seconds += ended - drafted
        self.source.timeline.add(Activity.DRAFT, started, drafted)
        self.source.timeline.add(Activity.VERIFY, drafted, ended)

    def _draft_length(self, sequence: Sequence, room: int) -> int:
        """K, less at the end of a request and where rotary embeddings change; none before the prompt has been read."""
        if sequence.id not in self.states:
            return 0
        k = self.draft_tokens
        if self.length is not None:  # what is drawn at random must not depend on how long steps take
            k = self.length.current if sequence.sampling.greedy else min(k, FIRST)
        rows = self.target.changes.distance(len(sequence.tokens) - 1)  # that go on as the last one does
        return min(k, room - 1, k if rows is None else rows - 1)

    def _verify(self, sequence: Sequence, draft: list[int]) -> torch.Tensor:
        """Run the target over what it has not seen yet; logits at the last accepted token and each draft token."""
        kv = self.states.get(sequence.id)
        if kv is not None and self.target.changes.invalidates(kv.length, len(sequence.tokens)):
            self.target.release_kv(self.states.pop(sequence.id))
            kv = None
        if kv is None:
            kv = self.states[sequence.id] = self.target.new_kv(sequence.capacity)
        total_length = 0 if kv.length else len(sequence.tokens)
        pending, keep = sequence.tokens[kv.length :] + draft, len(draft) + 1
        chunk = max(self._prefill_chunk, keep)  # of several recorded forwards of as many rows, one's logits are left
        chunk = chunk if self.target.inspection.resumes else len(pending)
        if draft and not kv.can_rewind:  # it goes back to a mark only: let that be just before the draft
            certain, pending = pending[:-keep], pending[-keep:]
            while certain:
                rows = chunk if total_length else min(chunk, self.target.changes.distance(kv.length) or chunk)
                self.target.forward(certain[:rows], kv, 1, total_length=total_length)
                certain = certain[rows:]
            kv.mark()
        observer = self._target_observer()
        parts = [
            self.target.forward(pending[start : start + chunk], kv, keep, observer=observer, total_length=total_length)
            for start in range(0, len(pending), chunk)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)[-keep:]

    def _begin_verification(self, sequence: Sequence, k: int) -> None:
        """Let a device go on from the draft that was begun to the forward that verifies it."""
        kv = self.states[sequence.id]
        if len(sequence.tokens) == kv.length + 1:
            self.target.begin(sequence.tokens[-1], k, kv, self._target_observer())

    def _lookout(self, stage: Stage) -> Lookout | None:
        return Lookout(self, stage) if stage in self.policy.stages else None

    def _target_observer(self) -> LayerObserver | None:
        """Who looks at each of the target's layers while it runs, if the policy does."""
        lookout, count = self._lookout(Stage.VERIFY), self.target.depth_count
        if lookout is None or not self.target.has_hidden_states:
            return None

        def tell(depths: range, residual: torch.Tensor, routing: Routing | None) -> None:
            lookout(LayerChunk(Stage.VERIFY, depths, count, residual, routing))

        return LayerObserver(count, lookout.ask, tell, at_once=True, question=self.policy.name)

    def _rewind(self, sequence: Sequence, length: int) -> None:
        self.states[sequence.id].rewind(length)
        self.drafter.rewind({sequence.id: length})
