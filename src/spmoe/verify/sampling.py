"""Sampling with noise by position: a text depends on the target, the parameters and the seed, and on nothing else.

The token at a position is the one with the largest p / e, where p is its probability and e exponential noise that
belongs to the seed, the position and the token: an exponential race, which draws from p. A draft draws its tokens from
its own distribution with the same noise, and the target accepts those that it draws itself. So neither K nor the draft
changes the text. Two similar distributions mostly agree: they do with a probability of at least (1 - d) / (1 + d), d
being their total variation distance, where no method exceeds 1 - d.
"""

from __future__ import annotations

import secrets

import numpy as np
import torch
from torch import Tensor

from spmoe.types import Draft, Sequence, VerifyResult
from spmoe.verify.filters import check_not_nan, probabilities

_SMALLEST = 2.0**-60  # noise that is exactly zero would choose tokens of any probability


class PositionNoise:
    """Noise of one sequence, by position. Implements `TokenNoise`."""

    def __init__(self, seed: int | None) -> None:
        self._seed = secrets.randbits(64) if seed is None else seed
        self._known: dict[int, Tensor] = {}  # by position; a draft and its verification need the same

    def pick(self, probs: Tensor, position: int) -> int:
        """Draw the token at a position from probabilities, or from weights that do not sum to one."""
        noise = self._known.get(position)
        if noise is None or len(noise) < len(probs):
            noise = self._known[position] = self._draw(position, len(probs))
        return int((probs.double() / noise[: len(probs)]).argmax())

    def forget(self, position: int) -> None:
        """Drop the noise of earlier positions, whose tokens are decided."""
        self._known = {place: noise for place, noise in self._known.items() if place >= position}

    def _draw(self, position: int, count: int) -> Tensor:
        generator = np.random.Generator(np.random.Philox(key=np.array([self._seed, position], dtype=np.uint64)))
        return torch.from_numpy(generator.standard_exponential(count)).clamp_(min=_SMALLEST)


def verify_sampled(sequence: Sequence, draft: Draft, logits: Tensor) -> VerifyResult:
    """Accept draft tokens up to the first that the target does not draw itself; apply the sampling parameters.

    `logits` are the target's at the last token and at each draft token.
    """
    target = probabilities(logits, sequence.sampling)  # [K + 1, vocabulary]
    check_not_nan(target.sum(dim=-1).tolist())
    accepted, first = 0, len(sequence.tokens)
    while True:
        token = sequence.noise.pick(target[accepted], first + accepted)
        if accepted == len(draft.tokens) or draft.tokens[accepted] != token:
            break
        accepted += 1
    sequence.noise.forget(first + accepted + 1)
    return VerifyResult(accepted, token)
