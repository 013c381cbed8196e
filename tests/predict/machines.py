"""Generated machines and texts on a virtual clock, decoded with a fixed K or by a governor."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from spmoe.predict.costs import CostPrior, StepReport
from spmoe.predict.governor import Governor
from spmoe.predict.latency import expected_experts

FIXED = (0, 1, 2, 4, 8, 12)
MOST = 15
LAYERS, EXPERTS = 16, 16


@dataclass(frozen=True)
class Machine:
    """Milliseconds of the parts of a step, and how this target's routing uses the slots."""

    base: float  # one row, every expert resident
    load: float  # one missing expert
    draft: float  # a draft pass
    row: float = 0.05  # a further row of the verification
    top_k: int = 2
    share: float = 0.0  # of needed experts that are missing
    in_use: float = 16.0  # experts of a layer that the text seems to use
    overlap: float = 1.0  # share of loads that compute can hide

    def governor(self, *, profiled: bool = False) -> Governor:
        prior = (
            CostPrior(*(1e-3 * cost for cost in (self.base, self.load, self.draft + self.row))) if profiled else None
        )
        return Governor(MOST, LAYERS, EXPERTS * self.top_k // 2, self.top_k, prior)

    def step(self, k: int, number: int, rng: random.Random, slowdown: float) -> tuple[float, int, int]:
        """Return milliseconds, needed and missing experts of a step; slots are cold at first."""
        needed = LAYERS * expected_experts(min(self.in_use, EXPERTS * self.top_k / 2), self.top_k, k + 1)
        share = min(1.0, self.share * (1 + 0.5 * math.exp(-number / 10)))
        mean = needed * share
        missing = max(0, round(rng.gauss(mean, 1.2 * math.sqrt(mean * (1 - share)))))
        compute, loads = self.base + self.row * k, self.load * slowdown * missing
        seconds = max(compute, loads) + (1 - self.overlap) * min(compute, loads) + self.draft * k
        return seconds * rng.lognormvariate(0, 0.04), round(needed), missing


# sizes as on a GPU with a fast link: everything resident, few misses, many misses; fine and coarse experts
MACHINES = {
    "resident": Machine(3.7, 2.7, 0.25, 0.1),
    "resident, slow draft": Machine(2.4, 2.7, 0.8),
    "draft slower than target": Machine(2.4, 2.7, 3.0, 0.5, share=0.1),
    "25 % of slots, diverse": Machine(2.4, 2.7, 0.5, share=0.42),
    "50 % of slots, diverse": Machine(2.4, 2.7, 0.5, share=0.15),
    "90 % of slots, diverse": Machine(2.4, 2.7, 0.5, share=0.012),
    "25 % of slots, shared": Machine(3.7, 6.0, 2.27, 0.1, share=0.6, in_use=6.4),
    "25 % of slots, fine": Machine(1.9, 0.3, 0.4, top_k=8, share=0.5, in_use=36),
    "no overlap": Machine(2.4, 2.7, 0.5, 0.1, share=0.1, overlap=0.0),
}


class Text:
    """Tokens of which the draft proposes some rightly; the same for every K."""

    def __init__(self, tokens: int, acceptance: Callable[[float], float], seed: int) -> None:
        rng = random.Random(seed)
        self.tokens = tokens
        self._right = [rng.random() < acceptance(min(1.0, place / tokens)) for place in range(tokens + MOST + 1)]

    def right(self, start: int, end: int) -> list[bool]:
        """Return whether the draft proposes each of these tokens."""
        return self._right[start:end]

    def accepted(self, token: int, k: int) -> int:
        count = 0
        while count < k and self._right[token + 1 + count]:
            count += 1
        return count


def constant(rate: float) -> Callable[[float], float]:
    return lambda place: rate


def falling(before: float, after: float) -> Callable[[float], float]:
    return lambda place: before if place < 0.5 else after


def decode(
    chooser: Governor | int,
    machine: Machine,
    text: Text,
    seed: int = 0,
    slowdown: Callable[[float], float] = lambda place: 1.0,
    first_step: float = 1.0,
) -> tuple[float, list[int]]:
    """Decode a text; return milliseconds per token and K of every step.

    `slowdown` returns the factor by which loads are slower, by place in the text. The time of an odd first step
    (`first_step` times as long) is reported to the governor and not counted.
    """
    rng, lengths, token, total, unread = random.Random(seed), list[int](), 0, 0.0, 0  # unread: by the draft
    if isinstance(chooser, Governor):
        chooser.begin_request()
    while token < text.tokens:
        k = min(chooser if isinstance(chooser, int) else chooser.current, text.tokens - token - 1)
        seconds, needed, missing = machine.step(k, len(lengths), rng, slowdown(token / text.tokens))
        compared = isinstance(chooser, Governor) and not k and chooser.wants_comparison(unread)
        if isinstance(chooser, Governor) and compared:
            chooser.learn_matches(text.right(token - unread + 1, token + 1), 1e-3 * machine.draft)
            unread = 0
        caught_up = compared or (k > 0 and unread > 1)
        seconds += machine.draft if caught_up else 0.0
        unread = 0 if k else unread + 1
        accepted = text.accepted(token, k)
        total += seconds
        if isinstance(chooser, Governor):
            reported = 1e-3 * seconds * (first_step if not lengths else 1.0)
            chooser.learn(StepReport(k, k, accepted, reported, needed, missing, caught_up))
        token += accepted + 1
        lengths.append(k)
    return total / text.tokens, lengths


@cache
def fixed_costs(name: str, rate: float, seed: int, tokens: int = 256) -> dict[int, float]:
    """Return milliseconds per token with every fixed K, for a text of constant acceptance."""
    text = Text(tokens, constant(rate), seed)
    return {k: decode(k, MACHINES[name], text, seed)[0] for k in FIXED}
