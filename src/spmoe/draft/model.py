"""A draft model: a smaller network, held in memory whole, that runs K single-token passes per step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from spmoe import types
from spmoe.draft.base import ChunkObserver
from spmoe.models.hidden_states import LayerObserver
from spmoe.models.kv import KvState
from spmoe.models.runner import ModelRunner
from spmoe.verify.filters import draw, probabilities

FIRST_PASS_CHUNKS = 2  # a step's first prediction should not wait for a whole pass; later ones may, in one cheaper call


class _Begun(NamedTuple):
    """Tokens that are being found, and what for: all of it must be as it was when they are asked for."""

    sequence: int
    length: int
    k: int
    fetch: Callable[[], list[int]]


class DraftModel:
    """Proposes what another language model with the same tokenizer would say."""

    def __init__(self, runner: ModelRunner, vocab_size: int, prefill_chunk: int) -> None:
        self.runner = runner
        self._vocab_size = vocab_size  # the target's
        self._prefill_chunk = prefill_chunk
        self._states: MutableMapping[int, KvState] = {}
        self._begun: _Begun | None = None

    def propose(self, sequences: Sequence[types.Sequence], k: int, on_chunk: ChunkObserver | None) -> list[types.Draft]:
        return [self._propose(sequence, k, on_chunk) for sequence in sequences]

    def begin(self, sequence: types.Sequence, k: int, on_chunk: ChunkObserver | None) -> None:
        self._begun, kv = None, self._states.get(sequence.id)
        if kv is None or len(sequence.tokens) + k > self.runner.max_positions:
            return
        pending = sequence.tokens[kv.length :]
        if sequence.sampling.greedy and kv.length > 0 and len(pending) <= self._prefill_chunk:
            fetch = self.runner.greedy(self._known(pending), kv, *self._passes(k, on_chunk))
            self._begun = _Begun(sequence.id, len(sequence.tokens), k, fetch)

    def prepare(self, k: int, on_chunk: ChunkObserver | None) -> None:
        for pending in (1, 2) if k else ():  # the newest token and, where the draft before was kept whole, its last
            self.runner.prepare_greedy(pending, *self._passes(k, on_chunk))

    def rewind(self, lengths: Mapping[int, int]) -> None:
        for sequence_id, length in lengths.items():
            if sequence_id in self._states:
                self._states[sequence_id].rewind(length)

    def release(self, sequence_id: int) -> None:
        self._begun = None
        if (kv := self._states.pop(sequence_id, None)) is not None:
            self.runner.release_kv(kv)

    def _propose(self, sequence: types.Sequence, k: int, on_chunk: ChunkObserver | None) -> types.Draft:
        if len(sequence.tokens) + k > self.runner.max_positions:
            return types.Draft([])
        kv = self._states.get(sequence.id)
        if kv is None:
            kv = self._states[sequence.id] = self.runner.new_kv(sequence.capacity)
        elif k == 0:
            return types.Draft([])
        if self._begun is None or self._begun[:3] != (sequence.id, len(sequence.tokens), k):
            self.begin(sequence, k, on_chunk)
        begun, self._begun = self._begun, None
        if begun is not None:
            return types.Draft(begun.fetch())
        pending = sequence.tokens[kv.length :]
        stage = types.Stage.PREFILL if kv.length == 0 else types.Stage.DRAFT
        logits = self._catch_up(pending, kv, self._watch(stage, on_chunk, FIRST_PASS_CHUNKS))
        tokens: list[int] = []
        probs: list[Tensor] = []
        for position in range(k):
            if position:
                observer = self._watch(types.Stage.DRAFT, on_chunk, 1)
                logits = self.runner.forward(tokens[-1:], kv, keep=1, observer=observer)
            tokens.append(self._choose(logits, sequence, probs))
        return types.Draft(tokens, torch.stack(probs) if probs else None)

    def _catch_up(self, pending: list[int], kv: KvState, observer: LayerObserver | None) -> Tensor:
        pending = self._known(pending)
        for start in range(0, len(pending), self._prefill_chunk):
            logits = self.runner.forward(pending[start : start + self._prefill_chunk], kv, keep=1, observer=observer)
        return logits

    def _known(self, tokens: list[int]) -> list[int]:
        # a target padded further than this model has tokens that are nothing to it; any stand-in keeps positions right
        return [token if token < self.runner.vocab_size else 0 for token in tokens]

    def _choose(self, logits: Tensor, sequence: types.Sequence, probs: list[Tensor]) -> int:
        """Pick a token the way the target would; when sampling, note the distribution it came from."""
        missing = self._vocab_size - logits.shape[-1]
        logits = pad(logits, (0, missing), value=float("-inf"))  # a negative pad cuts padding entries off
        if sequence.sampling.greedy:
            return int(logits[-1].argmax())
        probs.append(probabilities(logits[-1:], sequence.sampling)[0])
        return draw(probs[-1], sequence.rng)

    def _passes(self, k: int, on_chunk: ChunkObserver | None) -> tuple[list[LayerObserver | None], int]:
        """Who looks on at each greedy pass, and how many entries of the vocabulary it chooses from."""
        first, later = (self._watch(types.Stage.DRAFT, on_chunk, chunks) for chunks in (FIRST_PASS_CHUNKS, 1))
        return [first] + [later] * (k - 1), min(self._vocab_size, self.runner.vocab_size)

    def _watch(self, stage: types.Stage, on_chunk: ChunkObserver | None, chunks: int) -> LayerObserver | None:
        if on_chunk is None:
            return None
        count = self.runner.depth_count

        def tell(depths: range, residual: Tensor, routing: types.Routing | None) -> None:
            on_chunk(types.LayerChunk(stage, depths, count, residual, routing))

        return LayerObserver(chunks, on_chunk.ask, tell)
