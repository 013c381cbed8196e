"""Greedy verification: accept the longest prefix of the draft that equals the target's argmax."""

from __future__ import annotations

import torch
from torch import Tensor

from spmoe.types import Draft, VerifyResult
from spmoe.verify.filters import check_not_nan

RowArgmax = tuple[list[float], list[int]]  # largest logit and its token, per row


def argmax_rows(logits: Tensor) -> Tensor:
    """Return the largest logit and its token of each row in one tensor, to be copied at once.

    float64 represents every token id exactly.
    """
    # [rows, vocabulary] -> [2, rows] float64
    return torch.stack([part.double() for part in logits.max(dim=-1)])


def read_argmax(rows: Tensor) -> RowArgmax:
    """Read the result of `argmax_rows` from any device."""
    largest, tokens = rows.tolist()
    return largest, [int(token) for token in tokens]


def verify_greedy(draft: Draft, argmax: RowArgmax) -> VerifyResult:
    """Accept draft tokens up to the first that is not the target's argmax.

    `argmax` is that of the target's logits at the last token and at each draft token.
    """
    largest, tokens = argmax  # [K + 1] each
    check_not_nan(largest)
    accepted = 0
    while accepted < len(draft.tokens) and draft.tokens[accepted] == tokens[accepted]:
        accepted += 1
    return VerifyResult(accepted, tokens[accepted])
