"""A draft model: a smaller network, held in memory whole, that runs K single-token passes per step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from spmoe import types
from spmoe.draft.base import OnSeen
from spmoe.models.kv import KvState
from spmoe.models.network import Network
from spmoe.models.taps import Watch
from spmoe.verify.filters import draw, probabilities

FIRST_PASS_SLABS = 2  # a step's first prediction should not wait for a whole pass; later ones may, in one cheaper call


class _Begun(NamedTuple):
    """Tokens that are being found, and what for: all of it must be as it was when they are asked for."""

    sequence: int
    length: int
    k: int
    fetch: Callable[[], list[int]]


class DraftModel:
    """Proposes what another language model with the same tokenizer would say."""

    def __init__(self, network: Network, vocab_size: int, prefill_chunk: int) -> None:
        self.network = network
        self._vocab_size = vocab_size  # the target's
        self._prefill_chunk = prefill_chunk
        self._states: MutableMapping[int, KvState] = {}
        self._begun: _Begun | None = None

    def propose(self, sequences: Sequence[types.Sequence], k: int, on_seen: OnSeen | None) -> list[types.Draft]:
        return [self._propose(sequence, k, on_seen) for sequence in sequences]

    def begin(self, sequence: types.Sequence, k: int, on_seen: OnSeen | None) -> None:
        self._begun, kv = None, self._states.get(sequence.id)
        if kv is None or len(sequence.tokens) + k > self.network.max_positions:
            return
        pending = sequence.tokens[kv.length :]
        if sequence.sampling.greedy and kv.length > 0 and len(pending) <= self._prefill_chunk:
            fetch = self.network.greedy(self._known(pending), kv, *self._passes(k, on_seen))
            self._begun = _Begun(sequence.id, len(sequence.tokens), k, fetch)

    def prepare(self, k: int, on_seen: OnSeen | None) -> None:
        for pending in (1, 2) if k else ():  # the newest token and, where the draft before was kept whole, its last
            self.network.prepare_greedy(pending, *self._passes(k, on_seen))

    def rewind(self, lengths: Mapping[int, int]) -> None:
        for sequence_id, length in lengths.items():
            if sequence_id in self._states:
                self._states[sequence_id].rewind(length)

    def release(self, sequence_id: int) -> None:
        self._begun = None
        if (kv := self._states.pop(sequence_id, None)) is not None:
            self.network.give_back(kv)

    def _propose(self, sequence: types.Sequence, k: int, on_seen: OnSeen | None) -> types.Draft:
        if len(sequence.tokens) + k > self.network.max_positions:
            return types.Draft([])
        kv = self._states.get(sequence.id)
        if kv is None:
            kv = self._states[sequence.id] = self.network.new_kv(sequence.capacity)
        elif k == 0:
            return types.Draft([])
        if self._begun is None or self._begun[:3] != (sequence.id, len(sequence.tokens), k):
            self.begin(sequence, k, on_seen)
        begun, self._begun = self._begun, None
        if begun is not None:
            return types.Draft(begun.fetch())
        pending = sequence.tokens[kv.length :]
        stage = types.Stage.PREFILL if kv.length == 0 else types.Stage.DRAFT
        logits = self._catch_up(pending, kv, self._watch(stage, on_seen, FIRST_PASS_SLABS))
        tokens: list[int] = []
        probs: list[Tensor] = []
        for position in range(k):
            if position:
                watch = self._watch(types.Stage.DRAFT, on_seen, 1)
                logits = self.network.forward(tokens[-1:], kv, keep=1, watch=watch)
            tokens.append(self._choose(logits, sequence, probs))
        return types.Draft(tokens, torch.stack(probs) if probs else None)

    def _catch_up(self, pending: list[int], kv: KvState, watch: Watch | None) -> Tensor:
        pending = self._known(pending)
        for start in range(0, len(pending), self._prefill_chunk):
            logits = self.network.forward(pending[start : start + self._prefill_chunk], kv, keep=1, watch=watch)
        return logits

    def _known(self, tokens: list[int]) -> list[int]:
        # a target padded further than this model has tokens that are nothing to it; any stand-in keeps positions right
        return [token if token < self.network.vocab_size else 0 for token in tokens]

    def _choose(self, logits: Tensor, sequence: types.Sequence, probs: list[Tensor]) -> int:
        """Pick a token the way the target would; when sampling, note the distribution it came from."""
        missing = self._vocab_size - logits.shape[-1]
        logits = pad(logits, (0, missing), value=float("-inf"))  # a negative pad cuts padding entries off
        if sequence.sampling.greedy:
            return int(logits[-1].argmax())
        probs.append(probabilities(logits[-1:], sequence.sampling)[0])
        return draw(probs[-1], sequence.rng)

    def _passes(self, k: int, on_seen: OnSeen | None) -> tuple[list[Watch | None], int]:
        """Who looks on at each greedy pass, and how many entries of the vocabulary it chooses from."""
        first, later = (self._watch(types.Stage.DRAFT, on_seen, slabs) for slabs in (FIRST_PASS_SLABS, 1))
        return [first] + [later] * (k - 1), min(self._vocab_size, self.network.vocab_size)

    def _watch(self, stage: types.Stage, on_seen: OnSeen | None, slabs: int) -> Watch | None:
        if on_seen is None:
            return None
        count = self.network.depth_count

        def tell(depths: range, residual: Tensor, routing: types.Routing | None) -> None:
            on_seen(types.Seen(stage, depths, count, residual, routing))

        return Watch(slabs, on_seen.ask, tell)
