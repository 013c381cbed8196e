"""Greedy verification: the longest prefix of the draft that the target would have chosen itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from spmoe.types import Draft, Sequence, VerifyResult
from spmoe.verify.filters import require_numbers

RowArgmax = tuple[list[float], list[int]]  # the largest of each row, and its place


def argmax_rows(logits: Tensor) -> Tensor:
    """The largest of each row, and its place, as one tensor to be read at once: a double holds every token id."""
    # [rows, vocabulary] -> [2, rows] float64
    return torch.stack([part.double() for part in logits.max(dim=-1)])


def read_argmax(rows: Tensor) -> RowArgmax:
    """What `argmax_rows` found, on whatever device."""
    largest, places = rows.tolist()
    return largest, [int(place) for place in places]


class GreedyVerifier:
    """Keeps draft tokens as long as each is the target's most likely one."""

    def __init__(self, known: Callable[[Tensor], RowArgmax | None] = lambda logits: None) -> None:
        self._known = known  # where what is best of some logits need not be looked for

    def verify(self, sequence: Sequence, draft: Draft, logits: Tensor) -> VerifyResult:
        largest, choices = self._known(logits) or read_argmax(argmax_rows(logits))  # [K + 1] each
        require_numbers(largest)
        accepted = 0
        while accepted < len(draft.tokens) and draft.tokens[accepted] == choices[accepted]:
            accepted += 1
        return VerifyResult(accepted, choices[accepted])
