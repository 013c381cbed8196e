"""From logits to the distribution a token is drawn from. Target and draft go through the same function."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from spmoe.config import SamplingParams
from spmoe.errors import SpmoeError


def probabilities(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Temperature, then top-k, top-p and min-p, then normalised: float32, rows sum to one; on the host, as dice are."""
    # logits: [rows, vocabulary]
    # further out float32 overflows, and the distribution is that of the argmax, or uniform, long before
    scores = logits.to("cpu", torch.float32) / min(max(sampling.temperature, 1e-30), 1e30)
    if 0 < sampling.top_k < scores.shape[-1]:
        least = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < least, float("-inf"))
    if sampling.top_p < 1.0:
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)
        ordered = ordered.softmax(dim=-1)
        drop = ordered.cumsum(dim=-1) - ordered >= sampling.top_p  # the mass ahead of each token is enough without it
        drop[..., 0] = False
        scores = scores.masked_fill(drop.scatter(-1, order, drop), float("-inf"))
    probs = scores.softmax(dim=-1)
    if sampling.min_p > 0.0:
        probs = probs.masked_fill(probs < sampling.min_p * probs.amax(dim=-1, keepdim=True), 0.0)
        probs = probs / probs.sum(dim=-1, keepdim=True)
    return probs


def require_numbers(values: Iterable[float]) -> None:
    """Refuse what came of logits that are not numbers."""
    if any(math.isnan(value) for value in values):
        raise SpmoeError("the target's output is not a number; its weights overflow this dtype: try another --dtype")


def draw(probs: Tensor, rng: torch.Generator) -> int:
    """One token from one row."""  # probs: [vocabulary]
    return int(torch.multinomial(probs, 1, generator=rng))
