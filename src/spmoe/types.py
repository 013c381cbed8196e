"""Types that several packages share. Nothing here decides anything.

A *layer* is always counted among the target's MoE layers, in the order a forward reaches them. A *depth* is a decoder
layer of the model that runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import repeat
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from spmoe.config import SamplingParams
from spmoe.observe.ledger import Counters

PROMPT_ROWS = 32  # forwards of at least this many rows also report the share of rows routed to each expert


class ExpertKey(NamedTuple):
    """One expert of the target."""

    layer: int
    expert: int


class Stage(Enum):
    """Stage of a request that a forward belongs to."""

    PREFILL = "prefill"
    DRAFT = "draft"
    VERIFY = "verify"


class Residency(Enum):
    """State of an expert's weights: in no slot, being copied into one, or in one."""

    ABSENT = "absent"
    LOADING = "loading"
    READY = "ready"


class PrefetchRequest(NamedTuple):
    """A prediction that an expert is needed: `score` in [0, 1], needed before layer `deadline` runs.

    A request without `fetch` loads nothing; it tells the eviction policy to keep the expert if it is resident. Only
    residents whose chance of use is below `worth` are evicted for it, if the eviction policy knows such chances.
    """

    key: ExpertKey
    score: float
    deadline: int
    fetch: bool = True
    worth: float = math.inf


@dataclass(frozen=True)
class PrefetchRequests:
    """Prefetch requests of one prediction, each expert once, as columns: a draft pass predicts hundreds."""

    layers: np.ndarray  # int64 [requests]
    experts: np.ndarray  # int64 [requests]
    scores: np.ndarray  # float64 [requests]
    deadlines: np.ndarray  # int64 [requests]
    fetch: np.ndarray  # bool [requests]
    worth: np.ndarray | None = None  # float64 [requests]; None: any request may evict whatever scores less

    def __len__(self) -> int:
        return len(self.layers)

    @classmethod
    def of(cls, requests: Iterable[PrefetchRequest]) -> PrefetchRequests:
        """Make columns from single requests; of several for one expert the highest score counts."""
        best: dict[ExpertKey, PrefetchRequest] = {}
        for request in requests:
            if request.key not in best or best[request.key].score < request.score:
                best[request.key] = request
        if not best:
            return NO_PREFETCHES
        keys, scores, deadlines, fetch, _ = zip(*best.values(), strict=True)
        layers, experts = np.array(keys).T
        return cls(layers, experts, np.array(scores), np.array(deadlines), np.array(fetch))

    def numbers(self, width: int) -> np.ndarray:
        """Return each expert's index in a flat [layers, width] table."""  # int64 [requests]
        numbers: np.ndarray = self.layers * width + self.experts
        return numbers

    def span(self) -> tuple[int, int]:
        """Return the first and the last of their layers; there must be a request."""
        layers = self.layers  # `argmin` is faster than `min` for few elements
        return layers.item(layers.argmin()), layers.item(layers.argmax())

    def with_worth(self, worth: np.ndarray) -> PrefetchRequests:
        """Return the requests with these values of `worth`."""  # worth: float64 [requests]
        return replace(self, worth=worth)

    def where(self, kept: np.ndarray | slice) -> PrefetchRequests:
        """Return some of the requests."""  # kept: bool [requests], indices, or a range
        worth = None if self.worth is None else self.worth[kept]
        return PrefetchRequests(
            self.layers[kept], self.experts[kept], self.scores[kept], self.deadlines[kept], self.fetch[kept], worth
        )

    def __iter__(self) -> Iterator[PrefetchRequest]:
        keys = map(ExpertKey, self.layers.tolist(), self.experts.tolist())
        worth = repeat(math.inf) if self.worth is None else self.worth.tolist()
        return map(PrefetchRequest, keys, self.scores.tolist(), self.deadlines.tolist(), self.fetch.tolist(), worth)


NO_PREFETCHES = PrefetchRequests(*(np.zeros(0, dtype) for dtype in (int, int, float, int, bool)))


class Admission(Protocol):
    """Decides which predicted experts are loaded ahead of demand."""

    def admit(self, requests: PrefetchRequests, absent: np.ndarray, layer: int) -> PrefetchRequests:
        """Return the requests to load, of those that are absent; `layer` runs, or -1 while the draft does."""
        # absent: bool [requests]
        ...


class Routing(NamedTuple):
    """Experts that gates select for some hidden states."""

    experts: Tensor  # [layers, rows, top_k] int64
    scores: Tensor  # [layers, rows, top_k] float32, every row sums to one


@dataclass(frozen=True, slots=True)
class LayerChunk:
    """Hidden states of a few consecutive decoder layers of a forward.

    `routing` is the result of the policy's `predict_routing`, if the forward computed it.
    """

    stage: Stage
    depths: range  # decoder layers of the model that runs
    residual: Tensor  # [depths, rows, hidden], the residual stream after attention; empty if only the routing is shown
    routing: Routing | None = None


class TokenNoise(Protocol):
    """The randomness of a sampled request: each position of its text has its own."""

    def pick(self, probs: Tensor, position: int) -> int:
        """Draw the token at a position of the text; the same for the same probabilities."""  # probs: [vocabulary]
        ...

    def forget(self, position: int) -> None:
        """State that the tokens before this position are decided."""
        ...


class LogitsProcessor(Protocol):
    """Changes the target's logits before a token is chosen."""

    def applies(self, length: int) -> bool:
        """Return whether the logits after `length` tokens of prompt and output are changed."""
        ...

    def process(self, logits: Tensor, tokens: list[int], draft: list[int]) -> Tensor:
        """Return processed logits. The last row follows `tokens` and `draft`, each earlier row one draft token less."""
        # [rows, vocabulary] -> [rows, vocabulary] float32
        ...


class TokenLogprobs(NamedTuple):
    """Log-probability and rank (1: the most likely) of a generated token, and the most likely tokens, best first."""

    logprob: float
    rank: int
    top: dict[int, float]


@dataclass(slots=True)
class Speculation:
    """K of the steps of one sequence that did not read its prompt, as `-k auto` chose it, and what that gained."""

    steps: int = 0
    least: int = 0  # K
    most: int = 0
    drafts: int = 0  # draft tokens that were asked for
    tokens: int = 0  # of steps for which the time of plain decoding is known
    seconds: float = 0.0  # of these steps
    plain_seconds: float = 0.0  # that their tokens would have taken in plain decoding

    def add(self, k: int, tokens: int, seconds: float, plain_cost: float | None) -> None:
        """Count one step; `plain_cost`: expected seconds per token of plain decoding, None if they are not known."""
        self.least = k if not self.steps else min(self.least, k)
        self.most = max(self.most, k)
        self.steps += 1
        self.drafts += k
        if plain_cost is not None:
            self.tokens += tokens
            self.seconds += seconds
            self.plain_seconds += tokens * plain_cost

    def plus(self, other: Speculation) -> Speculation:
        """Return the sum of both."""
        if not self.steps or not other.steps:
            return self if self.steps else other
        return Speculation(
            self.steps + other.steps,
            min(self.least, other.least),
            max(self.most, other.most),
            self.drafts + other.drafts,
            self.tokens + other.tokens,
            self.seconds + other.seconds,
            self.plain_seconds + other.plain_seconds,
        )

    def summary(self) -> str | None:
        """Return K and the gain in words; None if there was no step."""
        if not self.steps:
            return None
        if not self.most:
            return "K 0 in all steps: plain decoding"
        line = f"K {self.least} to {self.most} (mean {self.drafts / self.steps:.1f})"
        if self.tokens:
            plain, taken = (1e3 * seconds / self.tokens for seconds in (self.plain_seconds, self.seconds))
            line += f"; plain would have taken {plain:.3g} ms/token, this took {taken:.3g}"
        return line


@dataclass(slots=True)
class Sequence:
    """One generation request: the prompt's tokens, then every accepted, recovered or bonus token."""

    id: int
    tokens: list[int]
    prompt_length: int
    sampling: SamplingParams
    noise: TokenNoise = field(repr=False)  # unused by greedy requests
    capacity: int  # positions that its KV caches must be able to hold
    processors: LogitsProcessor | None = None  # None: the target's logits are used as they are
    counters: Counters = field(default_factory=Counters)  # its account; the ledger writes it
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the output's tokens, if they are asked for
    drafts: bool = True  # False once its draft has failed
    speculation: Speculation | None = None  # what `-k auto` did; None: K is fixed
    cached_tokens: int = 0  # of the prompt, that an earlier sequence's KV cache had

    @property
    def has_output(self) -> bool:
        """Whether a step has added tokens."""
        return len(self.tokens) > self.prompt_length


class Turn(NamedTuple):
    """One sequence's part of a step."""

    sequence: Sequence
    max_new_tokens: int  # that the step may add
    repeats: bool = True  # whether the next step is of the same sequences, so that a device may start it


@dataclass(frozen=True, slots=True)
class Draft:
    """At most K proposed tokens of one sequence."""

    tokens: list[int]


class VerifyResult(NamedTuple):
    """Number of accepted draft tokens, and the recovered (or, if all are accepted, bonus) token after them."""

    accepted: int
    next_token: int


@dataclass(frozen=True, slots=True)
class DraftOutcome:
    """Outcome of a step's draft, as reported to prefetch policies."""

    drafted: int
    accepted: int
