"""The contract of verification: which draft tokens the target keeps, and what follows them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from spmoe.types import Draft, Sequence, VerifyResult


class Verifier(Protocol):
    """Judges one sequence's draft. The tokens that come of it are distributed exactly as the target's."""

    def verify(self, sequence: Sequence, draft: Draft, logits: Tensor) -> VerifyResult:
        """`logits` are the target's at the last token and at each draft token."""  # [K + 1, vocabulary]
        ...
