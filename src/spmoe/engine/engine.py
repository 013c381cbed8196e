"""A running engine: fixed parts, and the policy, drafter and step loop of its present configuration."""

from __future__ import annotations

import logging
from collections import abc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from spmoe.backends.base import MAX_KERNEL_ROWS
from spmoe.backends.devices import limit_memory
from spmoe.config import EngineConfig, Size
from spmoe.draft.base import Drafter
from spmoe.draft.none import NoDraft
from spmoe.engine.loop import Loop
from spmoe.engine.parts import EngineParts, LearnedState
from spmoe.engine.prefetching import Prefetching, make_prefetching
from spmoe.engine.profiling import (
    cost_prior,
    cutoff_inputs,
    governor_path,
    profile_settings,
    read_governor,
    write_governor,
    write_profile,
)
from spmoe.errors import BudgetError, DraftError, SpmoeError, UsageError, reason
from spmoe.experts.eviction import make_eviction
from spmoe.experts.experts import Experts
from spmoe.experts.store import StoreSpec
from spmoe.models.runner import ModelRunner
from spmoe.models.target import Target
from spmoe.observe.ledger import Counters
from spmoe.observe.progress import progress_bar
from spmoe.predict.admission import PrefetchAdmission
from spmoe.predict.costs import Rates
from spmoe.predict.cutoff import ENOUGH_STEPS, Profile
from spmoe.predict.governor import Governor, Governors, usual_draft_tokens
from spmoe.predict.policies import require_no_recording
from spmoe.predict.policies.base import PrefetchPolicy, RecordedRouting
from spmoe.predict.policies.oracle import RoutingRecorder
from spmoe.types import Sequence, Turn

CHANGEABLE = frozenset({"prefetch", "num_speculative_tokens", "cutoff", "eviction", "batching", "overlap"})


log = logging.getLogger(__name__)


class Engine:
    """Runs one model with one configuration, which may change between requests."""

    def __init__(self, config: EngineConfig, parts: EngineParts, learned: LearnedState, notices: list[str]) -> None:
        self.config = config
        self.parts = parts
        self.learned = learned
        self.notices = notices  # differences between the options and the engine, and their reasons
        self.recording: RecordedRouting | None = None  # routing of the request that runs next, for the oracle
        self._new_profiles: dict[Path, Profile] = {}  # to be written at `close`
        self.failure: Exception | None = None  # that could not be recovered from
        self._cpu_failed = False  # a notice says that experts could not be computed on the CPU
        self.prefetching: Prefetching = self._make_prefetching()
        self.loop: Loop = self._make_loop()

    # ---- shortcuts to parts

    @property
    def target(self) -> Target:
        """The model whose output counts."""
        return self.parts.models.target

    @property
    def spec(self) -> StoreSpec:
        """Description of the target's experts."""
        return self.parts.models.spec

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return self.parts.models.device

    @property
    def experts(self) -> Experts:
        """The expert side of the engine."""
        return self.parts.experts

    @property
    def counters(self) -> Counters:
        """Counts since the engine was built: a snapshot."""
        return self.parts.experts.ledger.snapshot()

    @property
    def slots(self) -> int:
        """Number of expert slots."""
        return self.parts.memory.slots

    @property
    def active_drafter(self) -> Drafter:
        """The drafter, or none while K is 0."""
        return self.parts.drafter if self.config.max_draft_tokens else NoDraft()

    def step(self, turns: abc.Sequence[Turn]) -> list[list[int]]:
        """Run one step, on the calling thread, with the engine's number of intra-op threads; see `Loop.step`.

        A draft that fails costs its sequence its drafts, not its request; of several sequences, each one has this step
        alone. After any other error that is not one of spmoe's own, the engine starts again with empty slots, so that
        the next request finds it in order.
        """
        sequences = [turn.sequence for turn in turns]
        with self._guarded(sequences):
            try:
                return self.loop.step(turns)
            except DraftError as error:
                self.recover()
                if len(turns) > 1:
                    self.undo_step(sequences, [len(sequence.tokens) for sequence in sequences])
                else:
                    self._end_drafts(sequences[0], error)
        return [new for turn in turns for new in self.step([turn._replace(repeats=len(turns) == 1)])]

    def read_prompt(self, sequence: Sequence) -> bool:
        """Read a chunk of a long prompt; see `Loop.read_prompt`."""
        with self._guarded([sequence]):
            try:
                return self.loop.read_prompt(sequence)
            except DraftError as error:
                self.recover()
                self._end_drafts(sequence, error)
                return True

    def _end_drafts(self, sequence: Sequence, error: DraftError) -> None:
        """Let a sequence go on without its draft, which has failed."""
        self._add_notice(f"the draft failed ({reason(error)}); a request goes on without drafts")
        self.release(sequence)  # a draft may share the target's KV cache
        sequence.drafts = False

    @contextmanager
    def _guarded(self, sequences: abc.Sequence[Sequence]) -> Iterator[None]:
        """Run with the engine's number of threads; bring the engine into order after an unexpected error."""
        if self.failure is not None:
            raise SpmoeError(
                f"the engine failed ({reason(self.failure)}) and could not be restored; build another one"
            ) from self.failure
        unread = sum(len(sequence.tokens) for sequence in sequences if not self.loop.has_read(sequence))
        try:
            with self.parts.threads.in_force(max(1, unread)):
                yield
            self._note_cpu_failure()
        except SpmoeError:
            self.loop.forbid_kv_reuse(sequences)
            raise
        except torch.OutOfMemoryError as error:
            self.loop.forbid_kv_reuse(sequences)
            self.recover()
            raise BudgetError(
                f"a context of {max(sequence.capacity for sequence in sequences)} tokens does not fit in the device's "
                "memory beside the weights and the experts; lower --max-model-len or --expert-memory"
            ) from error
        except BaseException:
            self.loop.forbid_kv_reuse(sequences)
            self.recover()
            raise

    def _note_cpu_failure(self) -> None:
        """Add a notice, the first time that experts could not be computed on the CPU."""
        path = self.experts.cpu_path
        if path is not None and (failure := path.take_failure()) is not None and not self._cpu_failed:
            self._cpu_failed = True
            self._add_notice(f"experts could not be computed on the CPU ({failure}); they are moved to the GPU instead")

    def undo_step(self, sequences: abc.Sequence[Sequence], lengths: abc.Sequence[int]) -> None:
        """Take back a step that has failed; `lengths`: tokens of each sequence before it."""
        self.loop.undo_step(sequences, lengths)

    def reserve_kv(self, sequence: Sequence) -> bool:
        """Give a sequence's KV caches place for its next step; return False if there is not enough."""
        return self.loop.reserve_kv(sequence)

    def take_kv(self, sequence: Sequence) -> None:
        """Give a sequence whose prompt is read next the target's KV cache."""
        with self._guarded([sequence]):
            self.loop.take_kv(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Free the place of a sequence's KV caches until `resume`."""
        with self._guarded([sequence]):
            self.loop.preempt(sequence)

    def resume(self, sequence: Sequence) -> None:
        """Move the KV cache of a preempted sequence back; see `Loop.can_resume`."""
        with self._guarded([sequence]):
            self.loop.resume(sequence)

    def note_batching(self) -> None:
        """Add a notice if requests that run at the same time cannot share their steps."""
        if (reason := self.target.batching_failure) is not None:
            self._add_notice(f"requests of {self.config.model} run in turns, not together ({reason})")

    def stop_batching(self, failure: str) -> None:
        """Run requests in turns from now on: steps of several sequences fail again and again."""
        self.target.stop_batching(failure)
        self.note_batching()

    def note_lone_reads(self, failure: str) -> None:
        """Add a notice that prompts are read in turns from now on: forwards of several fail again and again."""
        self._add_notice(f"prompts of {self.config.model} are read in turns, not together ({failure})")

    def release(self, sequence: Sequence) -> None:
        """Drop a request's state, however it ended."""
        self.loop.release(sequence)

    @property
    def policy_label(self) -> str:
        """Name of the prefetch policy that runs, with what it has chosen."""
        policy, prefetching = self.loop.policy, self.prefetching
        return prefetching.label if policy is prefetching.policy else policy.name

    # ---- configuration

    def reconfigure(self, learned: LearnedState | None = None, **changes: Any) -> None:
        """Change any of `CHANGEABLE` between two requests, without a reload; learned state is kept.

        `learned`: another learned state to continue with, as if its requests had been the last. Forwards are captured
        for up to the K that the engine was built with; a larger K is slower.
        """
        if unknown := sorted(set(changes) - CHANGEABLE):
            raise UsageError(f"{', '.join(unknown)} cannot be changed while an engine runs; build another")
        config = replace(self.config, **changes)
        if config.max_draft_tokens and not self.parts.drafter.proposes:
            raise UsageError(f"{config.model} was loaded without a draft, so nothing can be drafted; give one")
        if config == self.config and learned is None:
            return
        if self.recording is None:
            require_no_recording(config.prefetch)  # before anything changes
        self._keep_profile()
        self._change_eviction(config, learned)
        self.config = config
        configure_experts(self.experts, config)
        self.prefetching = self._make_prefetching()
        self.loop = self._make_loop()

    @contextmanager
    def using_policy(self, policy: PrefetchPolicy) -> Iterator[None]:
        """Run the requests inside with this prefetch policy."""
        before, self.loop = self.loop, self._make_loop(policy)
        try:
            yield
        finally:
            self.loop = before

    @contextmanager
    def record(self) -> Iterator[RecordedRouting]:
        """Record the routing of one request that runs inside, on demand; set it as `recording` for the oracle."""
        recorder = RoutingRecorder()
        with self.using_policy(recorder):
            yield recorder.recording

    def prepare(self) -> None:
        """Compile kernels and capture forwards before the first request, so that it is as fast as later ones."""
        if self.parts.runtime.recorder is None:
            return
        runners = [runner for runner in (self.target, self.active_drafter.runner) if runner is not None]
        rows = _warm_up_rows(self.config.prefill_chunk)
        prompts = [partial(self._warm_up, runner, count) for runner, count in product(runners, rows)]
        work: list[abc.Callable[[], None]] = [*prompts, *self.loop.captures()]
        started = self.parts.clock.now()
        with progress_bar("Compiling kernels and capturing CUDA graphs", self.config.progress) as report:
            for done, call in enumerate(work):
                report(done, len(work))
                call()
            report(len(work), len(work))
        if not self.parts.all_resident:
            self.recover()  # the prompts above say nothing about the experts that requests use
        log.info("compiled kernels and captured CUDA graphs in %.1f s", self.parts.clock.now() - started)

    def _warm_up(self, runner: ModelRunner, rows: int) -> None:
        """Read a prompt. It allocates the KV arena too."""
        rows = min(rows, runner.max_positions)
        with self.experts.ledger.ignore_demand(), runner.temporary_kv(rows) as kv:
            self.experts.step.begin()
            runner.forward([number % runner.vocab_size for number in _warm_up_tokens(rows)], kv, 1)
            self.experts.step.end()

    def learn_cutoff(self) -> None:
        """Choose an automatic cutoff again from the experts that requests so far have missed."""
        self.prefetching.learn_cutoff(self.counters, self.loop)

    def recover(self) -> None:
        """Start again with empty slots, after an unexpected error inside a step; no request is lost but that one.

        Whatever the error has left of the bookkeeping of experts, and of the eviction policy, is replaced.
        """
        try:
            self.experts.run_ahead.invalidate()  # or a forward that was launched ahead would wait for its experts
            self.parts.runtime.backend.synchronize()  # kernels of the failed step may still read slots
            name = self.config.eviction_policy
            self.learned.evictions = {name: make_eviction(name, self.spec.experts)}
            self.experts.reset(self.learned.evictions[name])
            self.parts.load_residents()
        except Exception as error:  # a device that is broken
            self.failure = error

    def close(self) -> None:
        """Write learned profiles, and release everything. Idempotent."""
        self._keep_profile()
        for file, profile in self._new_profiles.items():
            write_profile(file, profile, self.parts.origins)
        for file, governor in self.learned.governors.items():
            if governor.steps >= ENOUGH_STEPS:
                write_governor(file, governor, self.parts.origins)
        with suppress(RuntimeError):  # of a device that is broken
            self.experts.run_ahead.invalidate()
            self.parts.runtime.backend.synchronize()  # a launched draft may still use memory that is freed below
        self.experts.close()
        self.parts.runtime.close()
        if isinstance(self.config.device_memory, Size):
            limit_memory(self.device, None)
        self.parts.threads.close()

    def _make_prefetching(self) -> Prefetching:
        recorded = None if self.recording is None else lambda: self.recording or []
        prefetching = make_prefetching(self.config, self.parts, self.learned, self.active_drafter, recorded)
        for notice in prefetching.notices:
            self._add_notice(notice)
        self.experts.scheduler.step_budget = prefetching.step_budget
        return prefetching

    def _add_notice(self, notice: str) -> None:
        if notice not in self.notices:
            self.notices.append(notice)

    def _make_loop(self, policy: PrefetchPolicy | None = None) -> Loop:
        config, parts, drafter = self.config, self.parts, self.active_drafter
        policy = policy or self.prefetching.policy
        governors, rates, admission = self._deciders(policy)
        return Loop(
            parts.models.target,
            drafter,
            policy,
            parts.experts,
            parts.clock,
            config.max_draft_tokens if drafter.proposes else 0,
            config.prefill_chunk,
            config.max_num_seqs,
            parts.target_kv,
            rates,
            governors,
            admission,
            self._add_notice,
        )

    def _deciders(self, policy: PrefetchPolicy) -> tuple[Governors | None, Rates, PrefetchAdmission | None]:
        """Return what chooses K (None: fixed), the rates of a step's parts, and what admits prefetches (None: all).

        They continue from what they have learned in this and earlier runs.
        """
        config, parts, learned = self.config, self.parts, self.learned
        k = usual_draft_tokens(config.num_speculative_tokens)
        inputs = cutoff_inputs(self.spec, self.target.top_k, self.slots, k)
        file = governor_path(profile_settings(config, parts.models.checkpoint, parts.draft_checkpoint, inputs))
        shape = (inputs.layers, inputs.experts_per_layer, inputs.top_k)
        profile = self.prefetching.profile
        prior = None if profile is None else cost_prior(profile, inputs)

        def make_governor(sequences: int) -> Governor:
            path = file if sequences == 1 else file.with_stem(f"{file.stem}-{sequences}")
            if path not in learned.governors:
                most = min(config.max_draft_tokens, self.target.max_batch_rows // sequences - 1)
                known = prior if sequences == 1 else None  # of one row
                learned.governors[path] = Governor(most, *shape, known, sequences)
                read_governor(path, learned.governors[path])
            return learned.governors[path]

        governors = None
        if config.num_speculative_tokens == "auto" and parts.drafter.proposes:
            governors = Governors(make_governor)
            learned.rates[file] = governors.of(1).costs.rates
        rates = learned.rates.setdefault(file, Rates.of(prior, inputs.layers))
        if not policy.admits:
            return governors, rates, None
        return governors, rates, learned.admissions.setdefault(file, PrefetchAdmission(*shape, rates))

    def _change_eviction(self, config: EngineConfig, learned: LearnedState | None) -> None:
        name, known = config.eviction_policy, (learned or self.learned).evictions
        if new := name not in known:
            known[name] = make_eviction(name, self.spec.experts)
        if learned is not None:
            self.learned.residents, self.learned = self.experts.pool.residents(), learned
            # a new eviction policy has no residents
            self.experts.pool.exchange(known[name], [] if new else learned.residents)
        elif name != self.config.eviction_policy:
            self.experts.pool.change_eviction(known[name])

    def _keep_profile(self) -> None:
        self.learn_cutoff()
        prefetching = self.prefetching
        if prefetching.profile_file is not None and prefetching.profile is not None:
            self._new_profiles[prefetching.profile_file] = prefetching.profile
            counts = self.counters.minus(prefetching.since)
            self.learned.profiles[prefetching.profile_file] = (prefetching.profile, counts)


def configure_experts(experts: Experts, config: EngineConfig) -> None:
    """Apply the options that may change between requests."""
    experts.pool.set_batching(config.batching)
    experts.scheduler.overlap = config.overlap


def _warm_up_tokens(rows: int) -> list[int]:
    """Return few different tokens, each half as often as the one before.

    So few experts are loaded, and they get as different numbers of rows as those of a real prompt: libraries load
    another kernel for each.
    """
    tokens: list[int] = []
    while (left := rows - len(tokens)) > 0:
        tokens += [rows.bit_length() - left.bit_length()] * -(-left // 2)
    return tokens


def _warm_up_rows(chunk: int) -> list[int]:
    """Return the rows of prompts that use all kernels of prompts: grouped ones, and a product per expert.

    Grouped kernels are compiled for powers of two from 8 rows on.
    """
    return sorted({1, *(min(chunk, rows + 1) for rows in (8, 16, MAX_KERNEL_ROWS // 2)), chunk})
