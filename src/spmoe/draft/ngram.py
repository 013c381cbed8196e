"""N-gram drafting, without a model: propose the tokens that followed the last few tokens at an earlier place."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

from spmoe import types
from spmoe.draft.base import DraftContext, Drafter, Observers
from spmoe.registry import DRAFTERS

MAX_NGRAM, MIN_NGRAM = 4, 2  # lengths that are looked up; one token predicts too little, and a wrong draft costs loads
_MAX_MATCHES = 64


@dataclass(slots=True)
class _Index:
    """Last position after each n-gram of a sequence, for n-grams that a token follows."""

    length: int = 0  # tokens indexed
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    # of the last tokens decoded without a draft: whether they would have been proposed; None: nothing would
    matches: deque[bool | None] = field(default_factory=lambda: deque(maxlen=_MAX_MATCHES))

    def update(self, tokens: list[int]) -> None:
        """Index the tokens that are new."""
        for end in range(max(1, self.length), len(tokens)):
            for n in range(MIN_NGRAM, min(MAX_NGRAM, end) + 1):
                self.ends[tuple(tokens[end - n : end])] = end
        self.length = len(tokens)

    def compare(self, tokens: list[int]) -> None:
        """Take note of whether the newest token would have been proposed; called before it is indexed."""
        before = tokens[-MAX_NGRAM - 1 : -1]
        end = self.find(before)
        self.matches.append(None if end is None else tokens[end] == tokens[-1])

    def find(self, tokens: list[int]) -> int | None:
        """Return the position after the last earlier occurrence of the longest n-gram at the end of the tokens."""
        for n in range(min(MAX_NGRAM, len(tokens)), MIN_NGRAM - 1, -1):
            if (end := self.ends.get(tuple(tokens[-n:]))) is not None:
                return end
        return None


@DRAFTERS.register("ngram")
class NgramDraft(Drafter):
    """Looks the end of prompt and output up in the text before it, and proposes the same continuation again."""

    def __init__(self) -> None:
        self._indexes: dict[int, _Index] = {}

    @classmethod
    def build(cls, context: DraftContext) -> Self:
        return cls()

    def propose(self, sequences: Sequence[types.Sequence], k: int, observers: Observers) -> list[types.Draft]:
        return [self._propose(sequence, k) for sequence in sequences]

    def num_comparable(self, sequence: types.Sequence) -> int:
        return len(self._indexes[sequence.id].matches) if sequence.id in self._indexes else 0

    def compare(self, sequence: types.Sequence) -> list[bool | None]:
        index = self._indexes.setdefault(sequence.id, _Index())
        matches = list(index.matches)
        index.matches.clear()
        return matches

    def release(self, sequence_id: int) -> None:
        self._indexes.pop(sequence_id, None)

    def _propose(self, sequence: types.Sequence, k: int) -> types.Draft:
        index = self._indexes.setdefault(sequence.id, _Index())
        if k:
            index.matches.clear()
        elif 1 < index.length == len(sequence.tokens) - 1:
            index.compare(sequence.tokens)
        index.update(sequence.tokens)  # accepted tokens only, so there is nothing to rewind
        if k == 0 or (end := index.find(sequence.tokens)) is None:
            return types.Draft([])
        tokens: list[int] = []
        for place in range(end, end + k):  # a continuation that reaches the end of the text repeats itself
            before = place - len(sequence.tokens)
            tokens.append(sequence.tokens[place] if before < 0 else tokens[before])
        return types.Draft(tokens)
