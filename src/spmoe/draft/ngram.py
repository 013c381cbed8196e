"""A draft without a model: what followed the last few tokens where they occurred before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import one_hot

from spmoe import types
from spmoe.draft.base import ChunkObserver

LONGEST, SHORTEST = 4, 2  # of the n-grams looked for; one token alone says too little, and a wrong guess costs loads


@dataclass(slots=True)
class _Index:
    """Where each n-gram of a sequence ended last; only those that something follows."""

    length: int = 0  # tokens taken in
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)

    def take_in(self, tokens: list[int]) -> None:
        for end in range(max(1, self.length), len(tokens)):
            for n in range(SHORTEST, min(LONGEST, end) + 1):
                self.ends[tuple(tokens[end - n : end])] = end
        self.length = len(tokens)

    def find(self, tokens: list[int]) -> int | None:
        """Where the longest n-gram at the end of the tokens ended when it occurred last before."""
        for n in range(min(LONGEST, len(tokens)), SHORTEST - 1, -1):
            if (end := self.ends.get(tuple(tokens[-n:]))) is not None:
                return end
        return None


class NgramDraft:
    """Looks the end of prompt and output up in what came before it, and proposes the same continuation again."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size  # the target's
        self._device = device
        self._indexes: dict[int, _Index] = {}

    def propose(self, sequences: Sequence[types.Sequence], k: int, on_chunk: ChunkObserver | None) -> list[types.Draft]:
        return [self._propose(sequence, k) for sequence in sequences]

    def begin(self, sequence: types.Sequence, k: int, on_chunk: ChunkObserver | None) -> None:
        pass

    def prepare(self, k: int, on_chunk: ChunkObserver | None) -> None:
        pass

    def rewind(self, lengths: Mapping[int, int]) -> None:
        pass  # only tokens that were accepted are taken in

    def release(self, sequence_id: int) -> None:
        self._indexes.pop(sequence_id, None)

    def _propose(self, sequence: types.Sequence, k: int) -> types.Draft:
        index = self._indexes.setdefault(sequence.id, _Index())
        index.take_in(sequence.tokens)
        if k == 0 or (end := index.find(sequence.tokens)) is None:
            return types.Draft([])
        tokens: list[int] = []
        for place in range(end, end + k):  # a continuation that reaches the end goes on with itself: it repeats
            before = place - len(sequence.tokens)
            tokens.append(sequence.tokens[place] if before < 0 else tokens[before])
        if sequence.sampling.greedy:
            return types.Draft(tokens)
        chosen = torch.tensor(tokens, device=self._device)
        return types.Draft(tokens, one_hot(chosen, self._vocab_size).float())  # nothing else could have been proposed
