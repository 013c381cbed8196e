"""Interface of verifiers."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from spmoe.types import Draft, Sequence, VerifyResult


class Verifier(Protocol):
    """Accepts or rejects one sequence's draft tokens, so that the output follows the target's distribution exactly."""

    def verify(self, sequence: Sequence, draft: Draft, logits: Tensor) -> VerifyResult:
        """Return the number of accepted draft tokens and the token that follows them.

        `logits` are the target's at the last token and at each draft token.
        """
        # logits: [K + 1, vocabulary]
        ...
