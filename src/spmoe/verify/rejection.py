"""Rejection sampling: the output follows the target's distribution p for any draft distribution q.

A draft token x, drawn from q, is accepted with probability min(1, p(x) / q(x)). After the first rejection the recovered
token is drawn from max(p - q, 0), normalized. If all are accepted, the bonus token is drawn from p.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spmoe.types import Draft, Sequence, VerifyResult
from spmoe.verify.filters import check_not_nan, draw, probabilities


class RejectionVerifier:
    """Accepts or replaces sampled draft tokens; applies the sequence's sampling parameters to the target's logits."""

    def verify(self, sequence: Sequence, draft: Draft, logits: Tensor) -> VerifyResult:
        target = probabilities(logits, sequence.sampling)  # [K + 1, vocabulary]
        check_not_nan(target.sum(dim=-1).tolist())
        for position, token in enumerate(draft.tokens):
            if draft.probs is None:
                raise ValueError(
                    "the draft has tokens but no probabilities; rejection sampling needs their distribution"
                )
            p, q = target[position], draft.probs[position]
            uniform = torch.rand((), generator=sequence.rng, dtype=torch.float64)
            if float(uniform) * float(q[token]) >= float(p[token]):
                residual = (p - q).clamp_(min=0.0)
                # if p and q differ by rounding only, the residual is zero everywhere, and the token is drawn from p
                return VerifyResult(position, draw(residual if float(residual.sum()) > 0.0 else p, sequence.rng))
        return VerifyResult(len(draft.tokens), draw(target[-1], sequence.rng))
