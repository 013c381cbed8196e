"""Sampling filters: from logits to probabilities, for both target and draft."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from spmoe.config import SamplingParams
from spmoe.errors import SpmoeError


def probabilities(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Apply temperature, top-k, top-p and min-p; return float32 rows that sum to one, in host memory."""
    # logits: [rows, vocabulary]
    # float32 overflows outside these bounds; well inside them the result is already the argmax, or uniform
    scores = logits.to("cpu", torch.float32) / min(max(sampling.temperature, 1e-30), 1e30)
    if 0 < sampling.top_k < scores.shape[-1]:
        smallest = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < smallest, float("-inf"))
    if sampling.top_p < 1.0:
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)
        ordered = ordered.softmax(dim=-1)
        drop = ordered.cumsum(dim=-1) - ordered >= sampling.top_p  # the tokens before it already have enough mass
        drop[..., 0] = False
        scores = scores.masked_fill(drop.scatter(-1, order, drop), float("-inf"))
    probs = scores.softmax(dim=-1)
    if sampling.min_p > 0.0:
        probs = probs.masked_fill(probs < sampling.min_p * probs.amax(dim=-1, keepdim=True), 0.0)
        probs = probs / probs.sum(dim=-1, keepdim=True)
    return probs


def check_not_nan(values: Iterable[float]) -> None:
    """Raise an error if any value computed from the target's logits is NaN."""
    if any(math.isnan(value) for value in values):
        raise SpmoeError("the target's logits contain NaN: its activations overflow this dtype; try another --dtype")
