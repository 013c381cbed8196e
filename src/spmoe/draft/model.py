"""A draft model: a smaller language model, resident as a whole, that runs K single-token passes per step."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Self

from torch import Tensor
from torch.nn.functional import pad

from spmoe import types
from spmoe.draft.base import DraftContext, Drafter, DraftSources, Observers
from spmoe.errors import DraftError, UsageError
from spmoe.experts.run_ahead import RunAhead
from spmoe.models.hidden_states import LayerObserver
from spmoe.models.kv import KvState
from spmoe.models.kv_pool import kv_sizes
from spmoe.models.ragged import RaggedPart
from spmoe.models.runner import ModelRunner
from spmoe.registry import DRAFTERS
from spmoe.verify.filters import probabilities
from spmoe.verify.greedy import argmax_rows, read_argmax
from spmoe.verify.logits import process_logits

CATCH_UP_ROWS = (16, 8, 4, 2, 1)  # of captured forwards that read the tokens of steps without a draft
_MAX_CATCH_UP = 96  # tokens; from there on, one forward that is not captured is faster
FIRST_PASS_CHUNKS = 2  # a step's first prediction should not wait for a whole pass; later passes use one cheaper call


@DRAFTERS.register("model")
class DraftModel(Drafter):
    """Proposes the tokens of another language model with the same tokenizer."""

    def __init__(
        self,
        runner: ModelRunner,
        vocab_size: int,
        prefill_chunk: int,
        run_ahead: RunAhead,
        states: MutableMapping[int, KvState] | None = None,
    ) -> None:
        self.runner: ModelRunner = runner
        self._vocab_size = vocab_size  # of the target
        self._prefill_chunk = prefill_chunk
        self._run_ahead = run_ahead
        self._states: MutableMapping[int, KvState] = {} if states is None else states

    @classmethod
    def load_runner(cls, sources: DraftSources) -> ModelRunner | None:
        if sources.checkpoint is None:
            raise UsageError("a draft model needs a checkpoint; give a directory or a hub id with --draft")
        runner = sources.models.load_draft(sources.checkpoint)
        if not runner.can_rewind:
            raise UsageError(
                f"the draft {sources.checkpoint.name} keeps a state that cannot be rolled back; choose another draft"
            )
        return runner

    @classmethod
    def build(cls, context: DraftContext) -> Self:
        assert context.runner is not None
        return cls(context.runner, context.vocab_size, context.prefill_chunk, context.run_ahead)

    def propose(self, sequences: Sequence[types.Sequence], k: int, observers: Observers) -> list[types.Draft]:
        if len(sequences) > 1 and k and self.runner.batches:
            return self._propose_together(sequences, k, observers)
        return [self._propose(sequence, k, observers) for sequence in sequences]

    def read_prompt(self, sequence: types.Sequence) -> bool:
        if len(sequence.tokens) > self.runner.max_positions:
            return False
        kv = self._states.get(sequence.id) or self._new_kv(sequence, 0)
        if len(sequence.tokens) - kv.length <= self._prefill_chunk:
            return False
        self._read(sequence.tokens[kv.length : kv.length + self._prefill_chunk], kv, None)
        return True

    def launch(self, sequence: types.Sequence, k: int, observers: Observers) -> None:
        kv = self._states.get(sequence.id)
        if kv is None or not self.runner.captures or len(sequence.tokens) + k > self.runner.max_positions:
            return
        unread = len(sequence.tokens) - kv.length
        if not sequence.sampling.greedy or kv.length == 0 or unread > self._prefill_chunk:
            return
        if sequence.sampling.structured_outputs is not None:  # passes on the device know no grammar
            return
        if len(sequence.tokens) + k - 1 > kv.capacity:  # kernels would drop the rows; the next step gets more place
            return
        self._catch_up(sequence, kv)  # greedy drafts are captured for one and two pending tokens
        pending = self._known_tokens(sequence.tokens[kv.length :])
        launcher = self.runner.greedy_launcher(pending, kv, *self._greedy_passes(k, observers))
        if launcher is not None:
            self._run_ahead.launch_draft(sequence.id, len(sequence.tokens), k, launcher)

    def prepare(self, k: int, max_num_seqs: int, observers: Observers) -> None:
        first, later = (self._observer(types.Stage.DRAFT, observers, chunks) for chunks in (FIRST_PASS_CHUNKS, 1))
        for pending in (1, 2) if k else ():  # the newest token and, if the whole last draft was accepted, its last
            self.runner.prepare_greedy(pending, *self._greedy_passes(k, observers))
            self.runner.prepare(pending, 1, first)  # of drafts whose tokens are chosen on the host
        if k > 1:
            self.runner.prepare(1, 1, later)
        for rows in CATCH_UP_ROWS if k else ():
            self.runner.prepare(rows, rows, None)
        if k:  # each sequence has one or two pending tokens, then one
            self.runner.prepare_batches(2 * max_num_seqs, first)
            self.runner.prepare_batches(max_num_seqs, later)

    def num_comparable(self, sequence: types.Sequence) -> int:
        kv = self._states.get(sequence.id)
        if kv is None or not kv.length or len(sequence.tokens) > self.runner.max_positions:
            return 0
        if not sequence.sampling.greedy or sequence.sampling.structured_outputs is not None:
            return 0  # it would have to select its tokens anew, one by one
        return len(sequence.tokens) - 1 - kv.length

    def compare(self, sequence: types.Sequence) -> list[bool | None]:
        kv = self._states[sequence.id]
        matches, pending = list[bool | None](), self._known_tokens(sequence.tokens[kv.length : -1])
        while pending:
            rows = next(rows for rows in CATCH_UP_ROWS if rows <= len(pending))
            new = sequence.tokens[kv.length + 1 : kv.length + 1 + rows]  # each is compared with the argmax before it
            _, tokens = self.runner.run(pending[:rows], kv, rows).argmax()
            matches += [decoded == drafted for decoded, drafted in zip(new, tokens, strict=True)]
            pending = pending[rows:]
        return matches

    def kv_cache(self, sequence_id: int) -> KvState | None:
        return self._states.get(sequence_id)

    def rewind(self, lengths: Mapping[int, int]) -> None:
        for sequence_id, length in lengths.items():
            if sequence_id in self._states:
                self._states[sequence_id].rewind(length)

    def release(self, sequence_id: int) -> None:
        if (kv := self._states.pop(sequence_id, None)) is not None:
            self.runner.release_kv(kv)

    def _propose(self, sequence: types.Sequence, k: int, observers: Observers) -> types.Draft:
        if len(sequence.tokens) + k > self.runner.max_positions:
            return types.Draft([])
        kv = self._states.get(sequence.id)
        if kv is None:
            kv = self._new_kv(sequence, k)
        elif k == 0 and sequence.has_output:
            return types.Draft([])
        if k == 0 and kv.length and self._reads_captured(len(sequence.tokens) - kv.length):
            # the end of a prompt with a cached prefix; the next draft reads its last token
            self._catch_up(sequence, kv)
            return types.Draft([])
        if k:
            self._catch_up(sequence, kv)
            if (tokens := self._launched_tokens(sequence, k, observers)) is not None:
                return types.Draft(tokens)
        stage = types.Stage.DRAFT if k and kv.length else types.Stage.PREFILL
        logits = self._read(sequence.tokens[kv.length :], kv, self._observer(stage, observers, FIRST_PASS_CHUNKS))
        tokens = []
        for position in range(k):
            if position:
                observer = self._observer(types.Stage.DRAFT, observers, 1)
                logits = self.runner.forward(tokens[-1:], kv, 1, observer=observer)
            tokens.append(self._choose(logits, sequence, tokens))
        return types.Draft(tokens)

    def _propose_together(self, sequences: Sequence[types.Sequence], k: int, observers: Observers) -> list[types.Draft]:
        """Propose tokens for several sequences, whose prompts are read, with one forward per position."""
        drafts: dict[int, list[int]] = {sequence.id: [] for sequence in sequences}
        fitting = [sequence for sequence in sequences if len(sequence.tokens) + k <= self.runner.max_positions]
        for sequence in fitting:
            kv = self._states.get(sequence.id) or self._new_kv(sequence, k)
            if not kv.length and len(sequence.tokens) > 1:  # of a sequence that was preempted
                self._read(sequence.tokens[:-1], kv, None)
            self._catch_up(sequence, kv)
        for position in range(k if fitting else 0):
            parts = []
            for sequence in fitting:
                kv, drafted = self._states[sequence.id], drafts[sequence.id]
                new = drafted[-1:] if drafted else self._known_tokens(sequence.tokens[kv.length :])
                parts.append(RaggedPart(new, kv, 1))
            chunks = 1 if position else FIRST_PASS_CHUNKS
            results = self.runner.run_batch(parts, self._observer(types.Stage.DRAFT, observers, chunks))
            for sequence, result in zip(fitting, results, strict=True):
                drafts[sequence.id].append(self._choose(result.logits, sequence, drafts[sequence.id]))
        return [types.Draft(drafts[sequence.id]) for sequence in sequences]

    def _new_kv(self, sequence: types.Sequence, k: int) -> KvState:
        least, preferred = kv_sizes(len(sequence.tokens), k, sequence.capacity)
        kv = self._states[sequence.id] = self.runner.new_kv(least, sequence.tokens, preferred)
        return kv

    def _catch_up(self, sequence: types.Sequence, kv: KvState) -> None:
        """Read all but the newest token of steps without a draft; they predict nothing that is still to come."""
        pending = self._known_tokens(sequence.tokens[kv.length : -1])
        if not kv.length or len(pending) < 2:
            return
        if not self._reads_captured(len(pending)):
            self._read(pending, kv, None)
            return
        while pending:  # in forwards that are captured
            rows = next(rows for rows in CATCH_UP_ROWS if rows <= len(pending))
            self.runner.forward(pending[:rows], kv, rows)
            pending = pending[rows:]

    def _reads_captured(self, count: int) -> bool:
        """Return whether so many pending tokens are read in captured forwards."""
        return self.runner.captures and count <= min(_MAX_CATCH_UP, self._prefill_chunk)

    def _launched_tokens(self, sequence: types.Sequence, k: int, observers: Observers) -> list[int] | None:
        """Return the tokens of the launched draft; launch it now if it was not. None if it cannot be launched."""
        length = len(sequence.tokens)
        if (tokens := self._run_ahead.take_draft(sequence.id, length, k)) is None:
            self.launch(sequence, k, observers)
            tokens = self._run_ahead.take_draft(sequence.id, length, k)
        return tokens

    def _read(self, pending: list[int], kv: KvState, observer: LayerObserver | None) -> Tensor:
        pending = self._known_tokens(pending)
        for start in range(0, len(pending), self._prefill_chunk):
            logits = self.runner.forward(pending[start : start + self._prefill_chunk], kv, 1, observer=observer)
        return logits

    def _known_tokens(self, tokens: list[int]) -> list[int]:
        # this model has no embedding for tokens of a target's padded vocabulary; any token keeps positions right
        return [token if token < self.runner.vocab_size else 0 for token in tokens]

    def _choose(self, logits: Tensor, sequence: types.Sequence, drafted: list[int]) -> int:
        """Choose the token after `drafted` as the target would; when sampling, with the same noise."""
        missing = self._vocab_size - logits.shape[-1]
        logits = pad(logits[-1:], (0, missing), value=float("-inf"))  # a negative pad cuts padding entries off
        logits = process_logits(logits, sequence, drafted)
        if sequence.sampling.greedy:
            largest, (token,) = read_argmax(argmax_rows(logits))
            _check_not_nan(largest)
            return token
        probs = probabilities(logits, sequence.sampling)[0]
        _check_not_nan([float(probs.sum())])
        return sequence.noise.pick(probs, len(sequence.tokens) + len(drafted))

    def _greedy_passes(self, k: int, observers: Observers) -> tuple[list[LayerObserver | None], int]:
        """Return the observer of each greedy pass, and the size of the vocabulary that they select from."""
        first, later = (self._observer(types.Stage.DRAFT, observers, chunks) for chunks in (FIRST_PASS_CHUNKS, 1))
        return [first] + [later] * (k - 1), min(self._vocab_size, self.runner.vocab_size)

    def _observer(self, stage: types.Stage, observers: Observers, chunks: int) -> LayerObserver | None:
        return observers.observer(stage, chunks)


def _check_not_nan(values: list[float]) -> None:
    """Raise an error if a value computed from the draft's logits is NaN."""
    if any(math.isnan(value) for value in values):
        raise DraftError("its logits contain NaN")
