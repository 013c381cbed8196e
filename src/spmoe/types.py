"""The nouns every room shares. Words are those of docs/architecture.md; nothing here decides anything.

A *layer* is always counted among the target's MoE layers, in the order a forward reaches them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spmoe.config import SamplingParams

PROMPT_ROWS = 32  # from so many on, how many rows of a forward chose an expert says more than that some did


class ExpertKey(NamedTuple):
    """One expert of the target."""

    layer: int
    expert: int


class Stage(Enum):
    """Where in a request a forward pass belongs."""

    PREFILL = "prefill"
    DRAFT = "draft"
    VERIFY = "verify"


class Residency(Enum):
    """Whether an expert's weights are in a slot."""

    ABSENT = "absent"
    LOADING = "loading"
    READY = "ready"


class PrefetchRequest(NamedTuple):
    """A guess that an expert will be needed: `score` in [0, 1], wanted before `deadline` (a layer) runs.

    One that is not to be fetched still says what is worth keeping.
    """

    key: ExpertKey
    score: float
    deadline: int
    fetch: bool = True


@dataclass(frozen=True)
class PrefetchRequests:
    """Prefetch requests that come together, each expert once, as columns: a draft pass names hundreds."""

    layers: np.ndarray  # int64 [prefetch requests]
    experts: np.ndarray  # int64 [prefetch requests]
    scores: np.ndarray  # float64 [prefetch requests]
    deadlines: np.ndarray  # int64 [prefetch requests]
    fetch: np.ndarray  # bool [prefetch requests]

    def __len__(self) -> int:
        return len(self.layers)

    @classmethod
    def of(cls, prefetches: Iterable[PrefetchRequest]) -> PrefetchRequests:
        """From one by one; of several for one expert the highest score counts."""
        best: dict[ExpertKey, PrefetchRequest] = {}
        for request in prefetches:
            if request.key not in best or best[request.key].score < request.score:
                best[request.key] = request
        if not best:
            return NO_PREFETCHES
        keys, scores, deadlines, fetch = zip(*best.values(), strict=True)
        layers, experts = np.array(keys).T
        return cls(layers, experts, np.array(scores), np.array(deadlines), np.array(fetch))

    def numbers(self, width: int) -> np.ndarray:
        """Each expert's, counted through layers that have so many."""  # int64 [prefetch requests]
        known: tuple[int, np.ndarray] | None = self.__dict__.get("_numbers")  # replays ask again and again
        if known is None or known[0] != width:
            known = self.__dict__["_numbers"] = (width, self.layers * width + self.experts)
        return known[1]

    def span(self) -> tuple[int, int]:
        """The first of their layers, and the last; there must be one."""
        known: tuple[int, int] | None = self.__dict__.get("_span")
        if known is None:
            layers = self.layers  # `argmin` is faster than `min` where they are few
            known = self.__dict__["_span"] = (layers.item(layers.argmin()), layers.item(layers.argmax()))
        return known

    def where(self, kept: np.ndarray | slice) -> PrefetchRequests:
        """Some of them."""  # kept: bool [prefetch requests], or a range
        columns = (self.layers, self.experts, self.scores, self.deadlines, self.fetch)
        return PrefetchRequests(*(column[kept] for column in columns))

    def __iter__(self) -> Iterator[PrefetchRequest]:
        keys = map(ExpertKey, self.layers.tolist(), self.experts.tolist())
        return map(PrefetchRequest, keys, self.scores.tolist(), self.deadlines.tolist(), self.fetch.tolist())


NO_PREFETCHES = PrefetchRequests(*(np.zeros(0, dtype) for dtype in (int, int, float, int, bool)))


class Routing(NamedTuple):
    """What the target's own gates say about some hidden states."""

    experts: Tensor  # [layers, rows, top_k] int64
    scores: Tensor  # [layers, rows, top_k] float32, every row sums to one


@dataclass(frozen=True, slots=True)
class LayerChunk:
    """What a chunk of layers of the model that ran has produced.

    `depths` are decoder layers of that model, out of `depth_count`. `routing` is the policy's own question, answered
    already where the model that ran could ask it on its device.
    """

    stage: Stage
    depths: range
    depth_count: int
    residual: Tensor  # [depths, rows, hidden], the residual stream after attention; empty where routing says it all
    routing: Routing | None = None


@dataclass(slots=True)
class Sequence:
    """One request's tokens: the prompt, then every accepted, recovered or bonus token."""

    id: int
    tokens: list[int]
    prompt_length: int
    sampling: SamplingParams
    rng: torch.Generator = field(repr=False)
    capacity: int  # positions that its KV caches must be able to hold


@dataclass(frozen=True, slots=True)
class Draft:
    """K proposed tokens for one sequence; `probs` is what they were sampled from, absent when greedy."""

    tokens: list[int]
    probs: Tensor | None = None  # [K, vocabulary] float32


class VerifyResult(NamedTuple):
    """How many draft tokens are kept, and the recovered (or, when all are kept, bonus) token after them."""

    accepted: int
    next_token: int


@dataclass(frozen=True, slots=True)
class DraftOutcome:
    """What a policy is told when a step ends."""

    drafted: int
    accepted: int
