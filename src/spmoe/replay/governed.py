"""Compare the governor with every fixed K on replayed texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from spmoe.predict.costs import CostPrior, StepReport
from spmoe.predict.governor import Governor
from spmoe.replay.replay import ReplayConfig, link_rate
from spmoe.replay.text import Chooser, DecodedStep, DecodedText, ReplayText, StepTimes, TextDecoder
from spmoe.replay.trace import Shape

FIXED = (0, 1, 2, 4, 8, 12)  # values of K that the governor is compared with


@dataclass(frozen=True, slots=True)
class Comparison:
    """Seconds per token of each request, in order: governed, and with every fixed K."""

    governed: list[DecodedText]
    fixed: dict[int, list[DecodedText]]

    def best(self, requests: slice = slice(None)) -> int:
        """Return the fixed K that is fastest over these requests."""
        return min(self.fixed, key=lambda k: seconds_per_token(self.fixed[k][requests]))

    def of_best(self, requests: slice = slice(None)) -> float:
        """Return the speed of the governor, relative to the best fixed K."""
        return seconds_per_token(self.fixed[self.best(requests)][requests]) / seconds_per_token(self.governed[requests])

    def of_plain(self, requests: slice = slice(None)) -> float:
        """Return the speed of the governor, relative to plain decoding."""
        return seconds_per_token(self.fixed[0][requests]) / seconds_per_token(self.governed[requests])


def compare(
    texts: Sequence[ReplayText],
    shape: Shape,
    config: ReplayConfig,
    times: StepTimes,
    tokens: int = 256,
    fixed: Sequence[int] = FIXED,
    slowdown: Callable[[int, int], float] = lambda request, token: 1.0,
) -> Comparison:
    """Decode the texts one after the other, from empty slots: governed, and with every fixed K.

    `slowdown` returns a factor of all times at a token of a request, for the governor and every K alike.
    """
    prior = cost_prior(shape, config, times)
    choosers: list[Chooser] = [Governed(max(fixed), shape, prior), *(FixedK(k) for k in fixed)]
    governed, *others = [decode_all(texts, shape, config, times, one, tokens, slowdown) for one in choosers]
    return Comparison(governed, dict(zip(fixed, others, strict=True)))


def decode_all(
    texts: Sequence[ReplayText],
    shape: Shape,
    config: ReplayConfig,
    times: StepTimes,
    chooser: Chooser,
    tokens: int = 256,
    slowdown: Callable[[int, int], float] = lambda request, token: 1.0,
) -> list[DecodedText]:
    """Decode the texts one after the other, from empty slots, with the K of a chooser."""
    decoder = TextDecoder(shape, config, times)
    try:
        return [decoder.decode(text, tokens, chooser, partial(slowdown, n)) for n, text in enumerate(texts)]
    finally:
        decoder.close()


@dataclass(frozen=True, slots=True)
class FixedK(Chooser):
    """Chooser that drafts K tokens in every step."""

    current: int


class Governed(Chooser):
    """Chooser that asks a governor for K."""

    def __init__(self, most: int, shape: Shape, prior: CostPrior | None = None) -> None:
        self.governor = Governor(most, shape.layers, max(shape.experts), shape.top_k, prior)

    @property
    def current(self) -> int:
        return self.governor.current

    def begin_request(self) -> None:
        self.governor.begin_request()

    def wants_comparison(self, tokens: int) -> bool:
        return self.governor.wants_comparison(tokens)

    def learn_matches(self, matches: Sequence[bool], seconds: float) -> None:
        self.governor.learn_matches(matches, seconds)

    def learn(self, step: DecodedStep) -> None:
        self.governor.learn_reported()  # beside this step, as in a live engine
        self.governor.report(
            StepReport(step.k, step.k, step.accepted, step.seconds, step.needed, step.missing, step.caught_up)
        )


def cost_prior(shape: Shape, config: ReplayConfig, times: StepTimes) -> CostPrior:
    """Return the costs that a live engine knows from its profile."""
    load = shape.expert_bytes / link_rate(config.link_gbps, shape)
    return CostPrior(shape.layers * times.layer, load, times.draft_pass)


def seconds_per_token(decoded: Sequence[DecodedText]) -> float:
    """Return the mean seconds of an output token over several texts."""
    return sum(one.seconds for one in decoded) / sum(one.tokens for one in decoded)
