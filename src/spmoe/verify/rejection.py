"""Lossless rejection sampling: whatever the draft proposes, the output follows the target's distribution.

A draft token x, drawn from q, is kept with probability min(1, p(x) / q(x)). At the first rejection the recovered token
is drawn from max(p - q, 0), normalised; when all are kept, the bonus token is drawn from p.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spmoe.types import Draft, Sequence, VerifyResult
from spmoe.verify.filters import draw, probabilities, require_numbers


class RejectionVerifier:
    """Keeps or replaces sampled draft tokens. The target's probabilities pass the sequence's own filters."""

    def verify(self, sequence: Sequence, draft: Draft, logits: Tensor) -> VerifyResult:
        target = probabilities(logits, sequence.sampling)  # [K + 1, vocabulary]
        require_numbers(target.sum(dim=-1).tolist())
        for position, token in enumerate(draft.tokens):
            if draft.probs is None:
                raise ValueError("a sampled draft needs the probabilities it was drawn from")
            p, q = target[position], draft.probs[position]
            chance = torch.rand((), generator=sequence.rng, dtype=torch.float64)
            if float(chance) * float(q[token]) >= float(p[token]):
                residue = (p - q).clamp_(min=0.0)
                # p and q can differ by rounding alone; then there is nothing left to draw from but p itself
                return VerifyResult(position, draw(residue if float(residue.sum()) > 0.0 else p, sequence.rng))
        return VerifyResult(len(draft.tokens), draw(target[-1], sequence.rng))
