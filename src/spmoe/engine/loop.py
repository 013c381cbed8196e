"""The step: speculative decoding over offloaded experts, of one sequence or several. Read `Loop.step` first."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from spmoe.draft.base import Drafter, check_draft
from spmoe.errors import DraftError, reason
from spmoe.experts.experts import Experts
from spmoe.models.hidden_states import LayerObserver
from spmoe.models.kv import KvState
from spmoe.models.kv_pool import KvPool, common_prefix, kv_sizes
from spmoe.models.ragged import RaggedPart
from spmoe.models.runner import EagerResult, ForwardResult
from spmoe.models.target import Target
from spmoe.observe.clock import Clock
from spmoe.observe.timeline import Activity
from spmoe.predict.admission import PrefetchAdmission
from spmoe.predict.costs import Rates, StepReport
from spmoe.predict.governor import Governor, Governors
from spmoe.predict.policies.base import PrefetchPolicy
from spmoe.types import (
    Draft,
    DraftOutcome,
    LayerChunk,
    PrefetchRequests,
    Routing,
    Sequence,
    Stage,
    Turn,
    VerifyResult,
)
from spmoe.verify.greedy import verify_greedy
from spmoe.verify.logits import process_logits, token_logprobs
from spmoe.verify.sampling import verify_sampled

_SHARED_PREFIX = 32  # tokens that are worth reading one prompt after the other


class PolicyObservers:
    """Shows hidden states to the prefetch policy, and queues the prefetch requests that it returns."""

    def __init__(
        self, policy: PrefetchPolicy, experts: Experts, clock: Clock, admission: PrefetchAdmission | None
    ) -> None:
        self._policy = policy
        self._experts = experts
        self._clock = clock
        self._admission = admission  # None: every request is loaded

    def observer(self, stage: Stage, chunks: int, *, immediate: bool = False) -> LayerObserver | None:
        """Return an observer of a forward of this stage; None if the policy does not look at it."""
        if stage not in self._policy.stages:
            return None
        admission = self._admission

        def show(depths: range, residual: Tensor, routing: Routing | None) -> None:
            chunk = LayerChunk(stage, depths, residual, routing)
            if admission is None:
                self._experts.scheduler.request(self._policy.on_chunk(chunk))
            elif not admission.paused:
                started = self._clock.now()
                self._experts.scheduler.request(self._policy.on_chunk(chunk), admission)
                admission.add_effort(self._clock.now() - started)

        key = self._policy.name if immediate else ""
        return LayerObserver(chunks, partial(self._policy.predict_routing, stage), show, key, immediate)


class StepTimer:
    """Time of each step of the same sequences, from the end of the verification before to the end of its own.

    So a step includes the launch of its own draft. Time between two calls of `Loop.step` does not count.
    """

    def __init__(self, clock: Clock) -> None:
        self.plain_steps = 0  # of these sequences, since their last draft
        self._clock = clock
        self._sequence_ids: tuple[int, ...] = ()
        self._ended = self._since = 0.0

    def begin_step(self, sequence_ids: tuple[int, ...]) -> None:
        """Begin a step."""
        now = self._clock.now()
        if sequence_ids == self._sequence_ids:
            self._since += now - self._ended  # not spent in a step
        else:
            self._sequence_ids, self._since, self.plain_steps = sequence_ids, now, 0

    def lap(self) -> float:
        """Return the step's seconds; what follows belongs to the next step."""
        now = self._clock.now()
        seconds, self._since = now - self._since, now
        return seconds

    def end_step(self, k: int) -> None:
        """End a step that drafted K tokens."""
        self.plain_steps = 0 if k else self.plain_steps + 1
        self._ended = self._clock.now()


class FinishedTurn(NamedTuple):
    """One sequence's part of a step, once its draft is verified."""

    sequence: Sequence
    draft: Draft
    result: VerifyResult


class StepStart(NamedTuple):
    """Time and counts when a step began."""

    time: float
    missed: int
    computed: int  # experts on the CPU
    asked: int
    demand_loads: int
    stall_seconds: float
    cpu_wait_seconds: float


class Loop:
    """Runs steps with one drafter and one prefetch policy."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        policy: PrefetchPolicy,
        experts: Experts,
        clock: Clock,
        max_draft_tokens: int,
        prefill_chunk: int,
        max_num_seqs: int,
        target_kv: MutableMapping[int, KvState],
        rates: Rates,
        governors: Governors | None = None,
        admission: PrefetchAdmission | None = None,
        add_notice: Callable[[str], None] = lambda notice: None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.policy = policy
        self.max_draft_tokens = max_draft_tokens  # K, or its upper bound if the governor chooses it
        self.governors = governors  # choose K; None: K is fixed
        self.rates = rates  # of a step's parts, learned from every step
        self._admission = admission  # of prefetches; None: every prefetch request is loaded
        self._experts = experts
        self._clock = clock
        self.prefill_chunk = prefill_chunk
        self._max_num_seqs = max_num_seqs
        self._target_kv = target_kv  # the target's KV caches by sequence id; a drafter may share them
        self._add_notice = add_notice
        self._failed_launches: dict[int, Exception] = {}  # of the next draft, by sequence id
        self._observers = PolicyObservers(policy, experts, clock, admission)
        self._timer = StepTimer(clock)
        self._reports = 0  # to governors and rates

    @property
    def governor(self) -> Governor | None:
        """The governor of steps of one sequence; None: K is fixed."""
        return None if self.governors is None else self.governors.of(1)

    def step(self, turns: abc.Sequence[Turn]) -> list[list[int]]:
        """Draft, predict, prefetch, verify, accept, account; return the new tokens of each sequence.

        Several sequences may run together if `can_join` is true for each of them, or `can_read_together` for all.
        """
        self._experts.run_ahead.keep_only([turn.sequence.id for turn in turns])
        for turn in turns:
            self._grow_kv(turn.sequence)
        before = self._begin_step([turn.sequence for turn in turns])
        k = self._num_draft_tokens(turns)
        if self._admission is not None:
            self._admission.begin_step(k if self._have_read(turns) else None)
        self._experts.scheduler.request(self.policy.begin_step(turns[0].sequence.id))

        compared = not k and self._compare_draft(turns)
        drafts = self._draft(turns, k)
        draft_ended = self._clock.now()
        self._experts.scheduler.finish_draft()

        outputs = self._verify(turns, drafts)
        self._learn_reported()  # if no layer has asked for experts
        self._experts.step.end()
        finished = [
            FinishedTurn(turn.sequence, draft, self._judge(turn.sequence, draft, output))
            for turn, draft, output in zip(turns, drafts, outputs, strict=True)
        ]
        self._experts.step.finish_compute()
        self._learn(finished, k, before, draft_ended, compared=compared)

        new = [self._accept(*turn) for turn in finished]
        if all(turn.repeats for turn in turns):
            self._launch_next([Turn(t.sequence, t.max_new_tokens - len(n)) for t, n in zip(turns, new, strict=True)])
        self._account(finished, before, draft_ended)
        self._timer.end_step(k)
        return new

    def can_join(self, sequence: Sequence) -> bool:
        """Return whether a sequence's next step may run together with those of other sequences."""
        return self.target.batches and self.has_read(sequence)

    def can_read_together(self, sequences: abc.Sequence[Sequence]) -> bool:
        """Return whether the prompts of these sequences, which are not read yet, can be read in one forward."""
        return self.target.reads_together and not any(sequence.has_output for sequence in sequences)

    def take_kv(self, sequence: Sequence) -> None:
        """Give a sequence whose prompt is read next the target's KV cache."""
        self._kv_of(sequence)

    def num_unread(self, sequence: Sequence) -> int:
        """Return the number of prompt tokens that a sequence's next turn reads; 0 once its prompt was read."""
        if self.has_read(sequence):
            return 0
        tokens = sequence.tokens
        found = (pool.num_reusable(tokens) if kv is None else kv.length for pool, kv in self._kv_caches(sequence))
        return min(len(tokens) - min(found), self.prefill_chunk)

    def begins_as_one_of(self, sequence: Sequence, others: abc.Sequence[Sequence]) -> bool:
        """Return whether a prompt could reuse clearly more of one of these, once it is read, than of earlier ones."""
        if not self.target.kv_pool.reuses_prefixes:
            return False
        tokens, kept = sequence.tokens, self.target.kv_pool.num_reusable(sequence.tokens)
        enough = min(kept + _SHARED_PREFIX, len(tokens) - 1)
        return any(kept < common_prefix(tokens, other.tokens) >= enough for other in others)

    def read_prompt(self, sequence: Sequence) -> bool:
        """Read a chunk of a prompt if more than one is left, by the target or the draft; return whether there was one.

        So a long prompt is read between the steps of other sequences; `step` reads the rest.
        """
        if self.has_read(sequence) or not self.target.inspection.resumes or self.target.longrope.switches:
            return False  # LongRoPE may have to read a prompt again from its start
        if len(sequence.tokens) <= self.prefill_chunk:
            return False
        self._experts.run_ahead.invalidate()
        self._grow_kv(sequence)
        kv, length = self._kv_of(sequence), len(sequence.tokens)
        chunk = sequence.tokens[kv.length : kv.length + self.prefill_chunk]
        if kv.length + len(chunk) >= length:
            return self._read_draft_prompt(sequence)
        self._begin_step([sequence])
        self.target.run(chunk, kv, 1, observer=self._target_observer(), total_length=length)
        self._experts.step.end()
        self._experts.step.finish_compute()
        self._timer.end_step(0)
        return True

    def _read_draft_prompt(self, sequence: Sequence) -> bool:
        try:
            return sequence.drafts and self.drafter.read_prompt(sequence)
        except Exception as error:  # of any model
            raise DraftError(reason(error)) from error

    def _begin_step(self, sequences: abc.Sequence[Sequence]) -> StepStart:
        """Begin a step of these sequences."""
        self._experts.ledger.charge(*(sequence.counters for sequence in sequences))
        counters = self._experts.ledger.counters
        start = StepStart(
            self._clock.now(),
            counters.missed,
            counters.cpu_experts,
            counters.asked,
            counters.demand_loads,
            counters.stall_seconds,
            counters.cpu_wait_seconds,
        )
        self._timer.begin_step(tuple(sequence.id for sequence in sequences))
        self._experts.step.begin(sequences[0].id, self._on_routed)
        return start

    def prepare(self) -> None:
        """Capture every forward that greedy requests replay."""
        for capture in self.captures():
            capture()

    def captures(self) -> list[Callable[[], None]]:
        """Return the calls that `prepare` makes, so that a caller can report progress between them."""
        observer, plain = self._target_observer(), self._step_observer(0)
        most_rows = min(self.target.max_batch_rows, self._max_num_seqs * (self.max_draft_tokens + 1))
        lengths = range(self.max_draft_tokens + 1) if self.governor is None else self.governor.lengths
        return [
            *(partial(self.target.prepare, k + 1, k + 1, observer if k else plain) for k in lengths),
            partial(self.target.prepare_batches, most_rows, observer),
            partial(self.target.prepare_batches, self._max_num_seqs, plain),
            partial(self.drafter.prepare, self.max_draft_tokens, self._max_num_seqs, self._observers),
        ]

    def undo_step(self, sequences: abc.Sequence[Sequence], lengths: abc.Sequence[int]) -> None:
        """Forget what a failed step has appended to sequences that had so many tokens before, and to KV caches."""
        for sequence, length in zip(sequences, lengths, strict=True):
            del sequence.tokens[length:]
            del sequence.logprobs[length - sequence.prompt_length :]
            if (kv := self._target_kv.get(sequence.id)) is not None:
                kv.cut(length - 1)
            if sequence.drafts:
                self._tell_drafter(sequence, partial(self.drafter.rewind, {sequence.id: length - 1}))

    def forbid_kv_reuse(self, sequences: abc.Sequence[Sequence]) -> None:
        """Let no other sequence reuse the KV caches of these, whose step has failed."""
        for sequence in sequences:
            if (kv := self._target_kv.get(sequence.id)) is not None:
                kv.tokens = []

    def release(self, sequence: Sequence) -> None:
        """Drop a request's state, however it ended."""
        self._learn_reported()
        self._experts.step.end()
        self._experts.run_ahead.invalidate()
        self._experts.ledger.close_account(sequence.counters)
        if (kv := self._target_kv.pop(sequence.id, None)) is not None:
            self.target.release_kv(kv)
        self._failed_launches.pop(sequence.id, None)
        self._tell_drafter(sequence, lambda: self.drafter.release(sequence.id))

    # ---- KV caches

    def reserve_kv(self, sequence: Sequence) -> bool:
        """Give a sequence's KV caches place for its next step; return False if there is not enough.

        A sequence that has none yet gets them when it is read.
        """
        least, preferred = self._kv_sizes(sequence)
        return all(
            pool.has_place(least) if kv is None else pool.reserve(kv, least, preferred)
            for pool, kv in self._kv_caches(sequence)
        )

    def preempt(self, sequence: Sequence) -> None:
        """Free the place of a sequence's KV caches: the target's goes to host memory, the draft reads its own again."""
        self._experts.run_ahead.invalidate()
        if (kv := self._target_kv.get(sequence.id)) is not None:
            self.target.kv_pool.swap_out(kv)
        self._tell_drafter(sequence, lambda: self.drafter.release(sequence.id))

    def can_resume(self, sequence: Sequence) -> bool:
        """Return whether there is place for the KV caches of a preempted sequence."""
        least, _ = self._kv_sizes(sequence)
        return all(pool.has_place(least) for pool, _ in self._kv_caches(sequence))

    def resume(self, sequence: Sequence) -> None:
        """Move the KV cache of a preempted sequence back."""
        self._experts.run_ahead.invalidate()  # the copy waits for all that was launched
        if (kv := self._target_kv.get(sequence.id)) is not None:
            self.target.kv_pool.swap_in(kv, *self._kv_sizes(sequence))

    def _kv_sizes(self, sequence: Sequence) -> tuple[int, int]:
        """Return the least and the preferred number of positions, for this step and what is launched for the next."""
        return kv_sizes(len(sequence.tokens), 2 * (self.max_draft_tokens + 1), sequence.capacity)

    def _kv_caches(self, sequence: Sequence) -> list[tuple[KvPool, KvState | None]]:
        """Return the pools that a sequence needs a KV cache of, and its KV cache there."""
        found = [(self.target.kv_pool, self._target_kv.get(sequence.id))]
        runner = self.drafter.runner
        if runner is not None and runner.kv_pool is not self.target.kv_pool and sequence.drafts:
            found.append((runner.kv_pool, self.drafter.kv_cache(sequence.id)))
        return found

    def _grow_kv(self, sequence: Sequence) -> None:
        """Give a sequence's KV caches place for its next step, if need be beyond the limit."""
        if not self.reserve_kv(sequence):
            for pool, kv in self._kv_caches(sequence):
                if kv is not None:
                    pool.grow(kv, self._kv_sizes(sequence)[0])

    # ---- draft

    def _draft(self, turns: abc.Sequence[Turn], k: int) -> list[Draft]:
        """Propose up to K tokens for each sequence that has place for them; predict and prefetch on the way."""
        drafting = [turn.sequence for turn in turns if turn.sequence.drafts and turn.max_new_tokens > k]
        try:
            for sequence in drafting:
                # kept until the sequence is released: if several run together, each one tries alone after this
                if (failure := self._failed_launches.get(sequence.id)) is not None:
                    raise failure
            drafts = self._propose(drafting, k)
        except Exception as error:  # of any model, and of prediction
            raise DraftError(reason(error)) from error
        return [drafts.get(turn.sequence.id, Draft([])) for turn in turns]

    def _compare_draft(self, turns: abc.Sequence[Turn]) -> bool:
        """Let the governor know what drafts of plain steps would have been, if it asks; return whether time was taken.

        So it learns acceptance without drafting.
        """
        if self.governors is None or not self._have_read(turns):
            return False
        sequence = turns[0].sequence
        try:
            if not self._wants_comparison(turns):
                return False
            started = self._clock.now()
            matches = self.drafter.compare(sequence)
        except Exception as error:  # of any model
            raise DraftError(reason(error)) from error
        self.governors.of(1).learn_matches(matches, self._clock.now() - started)
        return self.drafter.runner is not None

    def _wants_comparison(self, turns: abc.Sequence[Turn]) -> bool:
        """Return whether the governor wants to know what the drafts of a sequence's plain steps would have been."""
        sequence = turns[0].sequence
        if self.governors is None or len(turns) > 1 or not sequence.drafts:
            return False
        count, free = self.drafter.num_comparable(sequence), self.drafter.runner is None
        return self.governors.of(1).wants_comparison(count, free=free)

    def _compares_next(self, turns: abc.Sequence[Turn]) -> bool:
        """Return whether the next step begins with a forward of the draft, which would discard a launched one."""
        return self.drafter.runner is not None and self._wants_comparison(turns)

    def _propose(self, sequences: abc.Sequence[Sequence], k: int) -> dict[int, Draft]:
        """Return drafts by sequence id; a draft that cannot be used is left out, and nothing else is affected."""
        drafts: dict[int, Draft] = {}
        try:
            proposed = self.drafter.propose(sequences, k, self._observers) if sequences else []
        except DraftError as error:
            if len(sequences) == 1:
                self._add_notice(f"a draft was not used: {error}")
                return {}
            self.drafter.rewind({sequence.id: len(sequence.tokens) - 1 for sequence in sequences})
            for sequence in sequences:  # the error concerns one of them, which is not known
                drafts |= self._propose([sequence], k)
            return drafts
        for sequence, draft in zip(sequences, proposed, strict=True):
            try:
                check_draft(draft, k, self.target.vocab_size)
                drafts[sequence.id] = draft
            except DraftError as error:
                self._add_notice(f"a draft was not used: {error}")
        return drafts

    def _tell_drafter(self, sequence: Sequence, tell: Callable[[], None]) -> None:
        """Call a method of the drafter that returns nothing; if it fails, the sequence is not drafted for any more."""
        try:
            tell()
        except Exception as error:  # of any drafter
            sequence.drafts = False
            self._add_notice(f"the draft failed ({reason(error)}); a request goes on without drafts")

    def _num_draft_tokens(self, turns: abc.Sequence[Turn]) -> int:
        """Return K for the next step: fewer for many sequences, at their ends or before LongRoPE switches.

        0 while a prompt is read. Sequences that have no place for K more tokens are not drafted for.
        """
        drafting = [turn for turn in turns if turn.sequence.drafts]
        if not drafting or not self._have_read(turns):
            return 0
        most = self.max_draft_tokens if len(turns) == 1 else self.target.max_batch_rows // len(turns) - 1
        if most < 1:
            return 0
        governor = self.governors.of(len(turns)) if self.governors is not None else None
        k = self.max_draft_tokens if governor is None else governor.current
        k = min(k, most, max(turn.max_new_tokens for turn in drafting) - 1)
        rows = self.target.longrope.distance(len(turns[0].sequence.tokens) - 1)  # before LongRoPE switches
        k = min(k, k if rows is None else rows - 1)
        return k if governor is None else governor.at_most(k)

    def has_read(self, sequence: Sequence) -> bool:
        """Return whether the target has read the sequence's prompt."""
        return sequence.has_output and sequence.id in self._target_kv

    def _have_read(self, turns: abc.Sequence[Turn]) -> bool:
        return all(self.has_read(turn.sequence) for turn in turns)

    def _on_routed(self, layer: int, experts: abc.Sequence[int]) -> PrefetchRequests:
        """Show the routed experts of a layer to everything that learns from them, while the device is busy."""
        self._learn_reported()
        if self._admission is not None:
            self._admission.on_routed(layer, experts)
        return self.policy.on_routed(layer, experts)

    def _learn(
        self, finished: abc.Sequence[FinishedTurn], k: int, before: StepStart, draft_ended: float, *, compared: bool
    ) -> None:
        """Learn from a finished step; `compared`: its time contains a comparison of the draft with plain steps."""
        seconds, counters = self._timer.lap(), self._experts.ledger.counters
        if not finished[0].sequence.has_output:
            if self.governors is not None:
                self.governors.begin_request()
            return
        with_draft = [turn for turn in finished if turn.draft.tokens] or finished
        turn = with_draft[self._reports % len(with_draft)]  # acceptance is learned from one sequence after the other
        self._reports += 1
        report = StepReport(
            k,
            len(turn.draft.tokens),
            turn.result.accepted,
            seconds,
            counters.asked - before.asked,
            counters.missed - before.missed,
            disturbed=compared or (k > 0 and self._timer.plain_steps > 0 and self.drafter.runner is not None),
            verify_seconds=min(seconds, self._clock.now() - draft_ended),
            # while the host waits for the CPU, the device mostly waits for copies
            stall_seconds=max(
                counters.stall_seconds - before.stall_seconds, counters.cpu_wait_seconds - before.cpu_wait_seconds
            ),
            demanded=counters.demand_loads - before.demand_loads,
            computed=counters.cpu_experts - before.computed,
        )
        self.rates.learn(report, len(self.target.moe))
        if self.governors is None or 2 * len(finished) > self.target.max_batch_rows:  # there is no K to choose
            return
        governor = self.governors.of(len(finished))
        governor.report(report)
        for sequence, _, result in finished:
            if sequence.speculation is not None:
                sequence.speculation.add(k, result.accepted + 1, seconds, governor.plain_cost)

    def _learn_reported(self) -> None:
        """Let the governor learn from the step before while the device is busy: this takes up to a millisecond."""
        if self.governors is not None:
            self.governors.learn_reported()

    # ---- verify

    def _verify(self, turns: abc.Sequence[Turn], drafts: abc.Sequence[Draft]) -> list[ForwardResult]:
        """Run the target over the tokens it has not read; return logits at the last token and each draft token."""
        if len(turns) == 1:
            return [self._verify_one(turns[0].sequence, drafts[0].tokens)]
        have_read, parts = self._have_read(turns), []
        for turn, draft in zip(turns, drafts, strict=True):
            kv = self._kv_of(turn.sequence)
            parts.append(RaggedPart(turn.sequence.tokens[kv.length :] + draft.tokens, kv, len(draft.tokens) + 1))
        if not have_read:
            return self.target.read_batch(parts, self._target_observer())
        return self.target.run_batch(parts, self._step_observer(max(len(draft.tokens) for draft in drafts)))

    def _verify_one(self, sequence: Sequence, draft_tokens: list[int]) -> ForwardResult:
        kv = self._kv_of(sequence)
        total_length = 0 if kv.length and sequence.has_output else len(sequence.tokens)
        pending, num_logits = sequence.tokens[kv.length :] + draft_tokens, len(draft_tokens) + 1
        chunk = max(self.prefill_chunk, num_logits)  # logits of the last chunk only, as replays overwrite them
        chunk = chunk if self.target.inspection.resumes else len(pending)
        if draft_tokens and not kv.can_rewind:  # its state is restored from a snapshot: take one before the draft
            certain, pending = pending[:-num_logits], pending[-num_logits:]
            while certain:
                rows = chunk if total_length else min(chunk, self.target.longrope.distance(kv.length) or chunk)
                self.target.forward(certain[:rows], kv, 1, total_length=total_length)
                certain = certain[rows:]
            kv.snapshot()
        observer = self._target_observer() if total_length else self._step_observer(len(draft_tokens))
        parts = [
            self.target.run(
                pending[start : start + chunk], kv, num_logits, observer=observer, total_length=total_length
            )
            for start in range(0, len(pending), chunk)
        ]
        return parts[0] if len(parts) == 1 else EagerResult(torch.cat([part.logits for part in parts])[-num_logits:])

    def _kv_of(self, sequence: Sequence) -> KvState:
        """Return the target's KV cache of a sequence; a new one if the sequence must be read from the start."""
        kv = self._target_kv.get(sequence.id)
        if kv is not None and self.target.longrope.invalidates(kv.length, len(sequence.tokens)):
            self.target.release_kv(self._target_kv.pop(sequence.id))
            kv = None
        if kv is None:
            least, preferred = self._kv_sizes(sequence)
            kv = self._target_kv[sequence.id] = self.target.new_kv(least, sequence.tokens, preferred)
            if not sequence.has_output and sequence.drafts:  # one whose draft has failed finds its own tokens
                sequence.cached_tokens = kv.length
        return kv

    def _step_observer(self, k: int) -> LayerObserver | None:
        """Return the observer of a step after the prompt; None for a step that the governor decodes plainly."""
        return None if self.governors is not None and not k else self._target_observer()

    def _target_observer(self) -> LayerObserver | None:
        if not self.target.has_hidden_states:
            return None
        return self._observers.observer(Stage.VERIFY, self.target.depth_count, immediate=True)

    # ---- accept

    def _judge(self, sequence: Sequence, draft: Draft, output: ForwardResult) -> VerifyResult:
        """Wait for the device; decide how many draft tokens the target accepts."""
        logits = process_logits(output.logits, sequence, draft.tokens)
        if not sequence.sampling.greedy:
            result = verify_sampled(sequence, draft, logits)
        else:
            # without processors, the device has computed the argmax already
            argmax = (output if logits is output.logits else EagerResult(logits)).argmax()
            result = verify_greedy(draft, argmax)
        if (count := sequence.sampling.logprobs) is not None:
            new = [*draft.tokens[: result.accepted], result.next_token]
            sequence.logprobs += token_logprobs(output.logits, new, count)
        return result

    def _accept(self, sequence: Sequence, draft: Draft, result: VerifyResult) -> list[int]:
        """Append the accepted tokens and the next one; roll both KV caches back to them."""
        new = [*draft.tokens[: result.accepted], result.next_token]
        sequence.tokens += new
        length = len(sequence.tokens) - 1
        self._target_kv[sequence.id].rewind(length)
        if sequence.drafts:
            self._tell_drafter(sequence, lambda: self.drafter.rewind({sequence.id: length}))
        return new

    def _launch_next(self, turns: abc.Sequence[Turn]) -> None:
        """Let a device start the next draft, and its verification behind it, while the host accounts for this step.

        Of several sequences, it starts the next forward if they have no drafts.
        """
        k = self._num_draft_tokens(turns)
        if any(turn.max_new_tokens < 1 for turn in turns) or (k and len(turns) > 1):
            return
        sequence = turns[0].sequence

        def launch() -> None:
            if k:
                self.drafter.launch(sequence, k, self._observers)
            elif not self.target.captures or self._compares_next(turns):
                return
            else:
                self._experts.run_ahead.plan_plain([turn.sequence.id for turn in turns])
            self._launch_verify(turns, k)

        error = self._experts.run_ahead.launch_next(launch)
        if error is not None and k:  # a forward without a draft is launched again, and raises its error then
            self._failed_launches[sequence.id] = error

    def _launch_verify(self, turns: abc.Sequence[Turn], k: int) -> None:
        """Launch the verification of the launched draft, or the next forward of sequences without drafts."""
        caches = [(turn.sequence, self._target_kv[turn.sequence.id]) for turn in turns]
        lengths = [(len(sequence.tokens), kv) for sequence, kv in caches]
        # kernels drop rows that the KV cache has no place for, and it does not grow before the next step begins
        if any(length != kv.length + 1 or length + k > kv.capacity for length, kv in lengths):
            return
        if len(turns) > 1:
            parts = [RaggedPart(sequence.tokens[-1:], kv, 1) for sequence, kv in caches]
            self.target.launch_batch(parts, self._step_observer(k))
        else:
            ((sequence, kv),) = caches
            self.target.launch_verify(sequence.tokens[-1], k, kv, self._step_observer(k))

    # ---- account

    def _account(self, finished: abc.Sequence[FinishedTurn], before: StepStart, draft_ended: float) -> None:
        """Count the step and report the drafts' outcomes to the prefetch policy."""
        ledger, count = self._experts.ledger, len(finished)
        self._experts.step.count_stalls()
        ended, missing = self._clock.now(), ledger.counters.missed - before.missed
        for number, (sequence, draft, result) in enumerate(finished):
            drafted, accepted = len(draft.tokens), result.accepted
            self.policy.on_accept(DraftOutcome(drafted, accepted))
            ledger.step(
                sequence.counters,
                tokens=accepted + 1,
                drafted=drafted,
                accepted=accepted,
                missing=missing // count + (number < missing % count),
                draft_seconds=(draft_ended - before.time) / count,
                verify_seconds=(ended - draft_ended) / count,
            )
        self._experts.timeline.add(Activity.DRAFT, before.time, draft_ended)
        self._experts.timeline.add(Activity.VERIFY, draft_ended, ended)
