"""Prefetch requests from routing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmoe.types import PrefetchRequests, Routing


def requests_from_routing(layers: Sequence[int], routing: Routing, fetch_below: int) -> PrefetchRequests:
    """Return one request per expert that any row is routed to, with its best score.

    Requests for layers from `fetch_below` on are hints for eviction only: they are not fetched.
    """
    experts, scores = routing.experts.numpy(force=True), routing.scores.numpy(force=True)  # [layers, rows, top_k]
    count, rows, top_k = experts.shape
    layer = np.repeat(np.asarray(layers, dtype=np.int64), rows * top_k)
    expert, score = experts.reshape(-1).astype(np.int64), scores.reshape(-1).astype(np.float64)
    if rows > 1:
        width = int(expert.max()) + 1
        number = np.repeat(np.arange(count), rows * top_k) * width + expert
        best = np.full(count * width, -1.0)
        np.maximum.at(best, number, score)
        first = np.full(count * width, -1)
        first[number[::-1]] = np.arange(len(number) - 1, -1, -1)  # an expert keeps the place of its first row
        first = np.sort(first[first >= 0])
        layer, expert, score = layer[first], expert[first], best[number[first]]
    return PrefetchRequests(layer, expert, score, layer, layer < fetch_below)


def requests_of_one_layer(layer: int, routing: Routing, min_score: float) -> PrefetchRequests:
    """Return the requests of one layer's routing that score at least `min_score`.

    It builds a dict first: for a few experts that is faster than `requests_from_routing`.
    """
    best: dict[int, float] = {}
    for expert, score in zip(routing.experts.reshape(-1).tolist(), routing.scores.reshape(-1).tolist(), strict=True):
        if score >= min_score and score > best.get(expert, -np.inf):
            best[expert] = score
    count = len(best)
    layers = np.full(count, layer)
    experts, scores = np.fromiter(best.keys(), np.int64, count), np.fromiter(best.values(), np.float64, count)
    return PrefetchRequests(layers, experts, scores, layers, np.ones(count, dtype=bool))


def merge_requests(one: PrefetchRequests, other: PrefetchRequests) -> PrefetchRequests:
    """Return the requests of both; an expert that both name keeps its higher score."""
    return PrefetchRequests.of([*one, *other]) if len(one) and len(other) else one if len(one) else other
