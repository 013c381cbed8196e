"""Sampling filters: from logits to probabilities, for both target and draft."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from spmoe.config import SamplingParams
from spmoe.errors import SpmoeError

_SORTED_FIRST = 256  # tokens; most distributions of a language model have a top-p of fewer


def probabilities(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Apply temperature, top-k, top-p and min-p; return float32 rows that sum to one, in host memory."""
    # logits: [rows, vocabulary]
    # float32 overflows outside these bounds; well inside them the result is already the argmax, or uniform
    scores = logits.to("cpu", torch.float32) / min(max(sampling.temperature, 1e-30), 1e30)
    if 0 < sampling.top_k < scores.shape[-1]:
        smallest = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < smallest, float("-inf"))
    if sampling.top_p < 1.0:
        scores = torch.stack([_nucleus(row, sampling.top_p) for row in scores])
    probs = scores.softmax(dim=-1)
    if sampling.min_p > 0.0:
        probs = probs.masked_fill(probs < sampling.min_p * probs.amax(dim=-1, keepdim=True), 0.0)
        probs = probs / probs.sum(dim=-1, keepdim=True)
    return probs


def _nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Return the scores with -inf for all tokens but the most likely ones, up to a probability of `top_p` together.

    Sorting a large vocabulary takes longer than a step, so few tokens are sorted first, and more if they are too few.
    """
    # [vocabulary] -> [vocabulary]
    probs, count = scores.softmax(dim=-1), _SORTED_FIRST
    while True:
        smallest = scores.topk(min(count, len(scores))).values[-1]
        # in order of tokens, with all that are as likely as the last, and with NaN
        found = (~(scores < smallest) & (scores != float("-inf"))).nonzero()[:, 0]
        tokens = found[scores[found].argsort(descending=True, stable=True)]
        ordered = probs[tokens]
        total = ordered.cumsum(dim=-1)
        if len(found) < count or total[-1] >= top_p:
            break
        count *= 16
    drop = total - ordered >= top_p  # the tokens before it already have enough mass
    drop[:1] = False
    kept = tokens[~drop]
    return torch.full_like(scores, float("-inf")).index_copy_(0, kept, scores[kept])


def check_not_nan(values: Iterable[float]) -> None:
    """Raise an error if any value computed from the target's logits is NaN."""
    if any(math.isnan(value) for value in values):
        raise SpmoeError("the target's logits contain NaN: its activations overflow this dtype; try another --dtype")
