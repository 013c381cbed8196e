"""From a trace to steps that can be replayed: who is needed where, and what was foretold when, as flat expert numbers.

Expert e of layer l is number l * width + e. All of this is worked out once per trace and K, before any replay.

K smaller than recorded cuts each recorded step in several. Rows 0 to `accepted` of a step are tokens that were kept, so
a step with K' drafts may start at any of them: the first takes rows 0 to K', keeps min(accepted, K') drafts, and the
next starts at the token after those, until all that was accepted is used up. What is drafted across the end of a
recorded step is not known, so the last piece has fewer drafts. A larger K than recorded cannot be replayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from operator import itemgetter

import numpy as np

from spmoe.errors import UsageError
from spmoe.gc_pause import gc_paused
from spmoe.replay.trace import Trace
from spmoe.replay.wanted import Rank
from spmoe.types import PROMPT_ROWS, PrefetchRequests


@dataclass(slots=True)
class Prediction:
    """Prefetch requests that come together, as a replay's queue and its eviction take them."""

    prefetches: PrefetchRequests
    by_rank: list[Rank]
    _turns: list[tuple[int, list[Rank]]] | None = None

    @property
    def turns(self) -> list[tuple[int, list[Rank]]]:
        """By rank, layer after layer."""
        if self._turns is None:
            self._turns = [(layer, list(ranks)) for layer, ranks in groupby(self.by_rank, itemgetter(0))]
        return self._turns

    @classmethod
    def of(cls, keys: np.ndarray, scores: np.ndarray, width: int) -> Prediction:
        """Of experts by number, each once, with the best score it got."""
        layers, experts = np.divmod(keys, width)
        return cls.told(PrefetchRequests(layers, experts, scores, layers, np.ones(len(keys), dtype=bool)), width)

    @classmethod
    def told(cls, prefetches: PrefetchRequests, width: int) -> Prediction:
        """By a policy."""
        keys = (prefetches.layers * width + prefetches.experts).tolist()
        return cls(
            prefetches, sorted(zip(prefetches.layers.tolist(), (-prefetches.scores).tolist(), keys, strict=True))
        )

    def by_layer(self) -> Iterator[tuple[int, Prediction]]:
        """One layer's after the other, where they were named so."""
        bounds = np.flatnonzero(np.diff(self.prefetches.layers, prepend=-1)).tolist()
        for low, high in pairwise([*bounds, len(self.by_rank)]):
            yield self.by_rank[low][0], Prediction(self.prefetches.where(slice(low, high)), self.by_rank[low:high])


@dataclass(slots=True)
class ChunkPlan:
    """Some layers of a draft pass."""

    layers: int  # how many
    seconds: float
    prefetches: Prediction


@dataclass(slots=True)
class ForwardPlan:
    """One pass of the target."""

    rows: int
    front: list[float]  # by layer, seconds before its experts
    per_expert: list[float]  # by layer, seconds of one of its experts
    needed: list[list[int]]  # by layer
    shares: list[list[float]]  # by layer, of the rows that chose each; none where they are few
    chosen: np.ndarray  # int16 [rows, layers, top_k]: by row; -1: nothing
    ahead: list[Prediction | None]  # by layer: what its own state says of the next one
    ahead_experts: np.ndarray  # int16 [layers, depth, rows, top_k]: what gates picked, of later ones too; -1: nothing
    ahead_scores: np.ndarray  # float16 [layers, depth, rows, top_k]
    clear: list[Prediction | None] | None = None  # of what is ahead, what is clear; worked out when it is asked for

    @property
    def seconds(self) -> float:
        """What it takes when nothing is waited for."""
        experts = zip(self.per_expert, self.needed, strict=True)
        return sum(self.front) + sum(seconds * len(needed) for seconds, needed in experts)


@dataclass(slots=True)
class StepPlan:
    """A step: what the draft foretold, then what the target needed."""

    request: int
    drafted: int
    accepted: int
    chunks: list[ChunkPlan]
    forwards: list[ForwardPlan]
    rest: float
    said: dict[str, list[Prediction | None]] = field(default_factory=dict)  # by policies that need no replay to know it

    @property
    def tokens(self) -> int:
        """Tokens it produced."""
        return self.accepted + 1


def plan_steps(trace: Trace, draft_tokens: int | None = None) -> list[StepPlan]:
    """The steps of a trace, cut to K draft tokens."""
    recorded = trace.shape.draft_tokens
    k = recorded if draft_tokens is None else draft_tokens
    if not 0 <= k <= recorded:
        raise UsageError(
            f"the trace was recorded with {recorded} draft tokens per step, so {k} cannot be replayed; record one with "
            f"--num-speculative-tokens {k}"
        )
    with gc_paused():  # plans are large and have no cycles: it would walk them for nothing
        return list(_Planner(trace, k).steps())


class _Planner:
    def __init__(self, trace: Trace, k: int) -> None:
        self._trace = trace
        self._k = k
        self._layers = trace.shape.layers
        self._width = max(trace.shape.experts)
        self._starts = np.arange(self._layers + 1) * self._width  # of layers, among expert numbers
        numbers = trace.chosen + self._starts[:-1, None]  # [rows, layers, top_k]
        self._chosen = np.where(trace.chosen < 0, self._starts[-1], numbers)  # one beyond the last: no expert
        layer, depth = np.arange(self._layers)[:, None], np.arange(len(trace.ahead))
        later = np.minimum(layer + 1 + depth, self._layers - 1)
        self._told = [
            told[depth, :, later] for told in (trace.ahead, trace.ahead_score)
        ]  # [layers, depth, rows, top_k]
        sizes = trace.slab_rows * (trace.slab_layers[:, 1] - trace.slab_layers[:, 0])
        self._slab_at = np.concatenate(([0], np.cumsum(sizes)))
        self._forward_at = np.concatenate(([0], np.cumsum(trace.forward_rows)))

    def steps(self) -> Iterator[StepPlan]:
        trace = self._trace
        chunk = forward = 0
        for step in range(len(trace)):
            chunks = range(chunk, chunk + int(trace.step_slabs[step]))
            forwards = range(forward, forward + int(trace.step_forwards[step]))
            chunk, forward = chunks.stop, forwards.stop
            drafted, accepted = int(trace.step_drafted[step]), int(trace.step_accepted[step])
            request, rest = int(trace.step_request[step]), float(trace.step_rest[step])
            if drafted <= self._k:
                # older traces have one pass more than there are drafts
                made = [self._chunk_size(s) for s in chunks if trace.slab_pass[s] < drafted or not drafted]
                yield StepPlan(request, drafted, accepted, made, [self._forward(f, None) for f in forwards], rest)
                continue
            start = 0
            while start <= accepted:
                last = min(start + self._k, drafted)  # row of the last draft
                kept = min(accepted - start, last - start)
                yield StepPlan(
                    request,
                    last - start,
                    kept,
                    [self._chunk_size(s, cut=True) for s in chunks if start <= trace.slab_pass[s] < last],
                    [self._forward(f, (start, last + 1)) for f in forwards[-1:]],
                    rest,
                )
                start += kept + 1

    def _chunk_size(self, chunk: int, *, cut: bool = False) -> ChunkPlan:
        """A chunk; in a step that was cut only a pass's last row is kept."""
        trace = self._trace
        low, high = (int(bound) for bound in trace.slab_layers[chunk])
        rows = int(trace.slab_rows[chunk])
        part = slice(self._slab_at[chunk], self._slab_at[chunk + 1])
        experts = trace.foretold[part].reshape(high - low, rows, -1)
        scores = trace.foretold_score[part].reshape(high - low, rows, -1)
        if cut:
            experts, scores = experts[:, -1:], scores[:, -1:]
        prefetches = foretell(np.arange(low, high), experts, scores, self._width)
        return ChunkPlan(high - low, float(trace.slab_seconds[chunk]), prefetches)

    def _forward(self, forward: int, part: tuple[int, int] | None) -> ForwardPlan:
        trace = self._trace
        low, high = int(self._forward_at[forward]), int(self._forward_at[forward + 1])
        if part is not None:
            low, high = low + part[0], low + part[1]
        needed = self._needed(low, high)
        counts = needed if part is None else self._needed(*self._forward_at[forward : forward + 2])
        seconds = trace.forward_experts[forward].tolist()
        per_expert = [s / max(1, len(keys)) for s, keys in zip(seconds, counts, strict=True)]
        front, ahead = trace.forward_front[forward].tolist(), self._ahead(low, high)
        experts, scores = (part[:, :, low:high] for part in self._told)
        shares, chosen = self._shares(low, high), trace.chosen[low:high]
        return ForwardPlan(high - low, front, per_expert, needed, shares, chosen, ahead, experts, scores)

    def _needed(self, low: int, high: int) -> list[list[int]]:
        """By layer, the experts that some rows chose."""
        chosen = np.zeros(self._starts[-1] + 1, dtype=bool)
        chosen[self._chosen[low:high].ravel()] = True
        keys = np.flatnonzero(chosen[:-1])
        bounds = np.searchsorted(keys, self._starts).tolist()
        listed = keys.tolist()
        return [listed[a:b] for a, b in pairwise(bounds)]

    def _shares(self, low: int, high: int) -> list[list[float]]:
        if high - low < PROMPT_ROWS:
            return [[]] * self._layers
        counts = np.bincount(self._chosen[low:high].ravel(), minlength=self._starts[-1] + 1)[:-1]
        by_layer = (counts / (high - low)).reshape(self._layers, self._width)
        return [shares[shares > 0].tolist() for shares in by_layer]

    def _ahead(self, low: int, high: int) -> list[Prediction | None]:
        """By layer, what its state said of the next one."""
        told: list[Prediction | None] = [None] * self._layers
        if len(self._trace.ahead) and high > low:
            experts, scores = self._trace.ahead[0, low:high], self._trace.ahead_score[0, low:high]
            later = 1 + np.flatnonzero(experts[0, 1:, 0] >= 0)
            if len(later):
                found = foretell(later, experts[:, later].swapaxes(0, 1), scores[:, later].swapaxes(0, 1), self._width)
                for layer, part in found.by_layer():
                    told[layer - 1] = part
        return told


def foretell(layers: np.ndarray, experts: np.ndarray, scores: np.ndarray, width: int) -> Prediction:
    """Prefetch requests from what gates picked: per layer each expert once, with its best score."""
    # experts, scores: [layers, rows, top_k]
    keys = (experts.astype(np.int64) + layers[:, None, None] * width).ravel()
    flat = scores.astype(np.float64).ravel()
    unique, first, place = np.unique(keys, return_index=True, return_inverse=True)
    best = np.zeros(len(unique))
    np.maximum.at(best, place, flat)
    order = np.argsort(first)  # as they were named
    return Prediction.of(unique[order], best[order], width)
