"""Fit the projection of a draft's hidden states to the target's, by ridge regression on a text.

Of most windows of the text only the sums of the normal equations are kept. Every fifth window is held out: the recall
of the target's gates there chooses each layer's ridge.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from spmoe.bench.predictability import draft_depths, read_windows, recall, require_draft_model, run_window, top_k_mask
from spmoe.engine.engine import Engine
from spmoe.errors import PromptError, UsageError
from spmoe.models.runner import ModelRunner
from spmoe.predict.projection import RIDGES, HiddenStateProjection, LayerFit

_HELD_OUT = 5  # one window of this many is held out


@dataclass
class LayerRecall:
    """Recall of one MoE layer's used experts on the held-out text."""

    before: float | None  # from the draft's hidden states as they are; None if their width differs from the target's
    after: float
    ridge: float | None  # None: no projection was better than the hidden states as they are


@dataclass
class Fit:
    """A fitted projection with its results."""

    projection: HiddenStateProjection
    tokens: int  # fitted on
    held_out: int  # tokens
    layers: list[LayerRecall] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"tokens": self.tokens, "held_out": self.held_out, "layers": [asdict(layer) for layer in self.layers]}


def fit_predictor(
    engine: Engine,
    text: str,
    window: int = 256,
    windows: int = 64,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Fit:
    """Fit one affine map per MoE layer on evenly spaced windows of a text."""
    draft, target = require_draft_model(engine), engine.target
    if engine.parts.draft_checkpoint is None:  # the draft is the quantized target itself, which needs no projection
        raise UsageError("a projection is fitted for a separate draft model; give one with --draft")
    pieces = read_windows(engine, text, window, windows)
    held_out_numbers = set(range(_HELD_OUT - 1, len(pieces), _HELD_OUT)) or {len(pieces) - 1}
    fitting = [piece for number, piece in enumerate(pieces) if number not in held_out_numbers]
    held_out = [pieces[number] for number in sorted(held_out_numbers)]
    tokens = sum(map(len, fitting))
    if tokens < max(draft.hidden_size, 2 * len(pieces[0])):
        least = max(draft.hidden_size * _HELD_OUT // (_HELD_OUT - 1) + len(pieces[0]), 4 * len(pieces[0]))
        raise PromptError(
            f"{len(pieces)} windows of {len(pieces[0])} tokens are too little text for a draft of hidden size "
            f"{draft.hidden_size}; give a longer --text, or more --windows: at least {least} tokens"
        )
    depths, total = draft_depths(engine, draft), len(pieces) + len(target.moe)
    fits = [LayerFit(draft.hidden_size, target.hidden_size, target.model.device) for _ in target.moe]
    done = 0

    def advance() -> None:
        nonlocal done
        on_progress(done, total)
        done += 1

    for piece in fitting:
        advance()
        draft_states, target_states = _hidden_states(engine, draft, piece)
        for layer, fit in enumerate(fits):
            fit.add(draft_states[depths[layer]], target_states[target.moe[layer].depth])
    for fit in fits:
        advance()
        fit.solve()
    same_width = draft.hidden_size == target.hidden_size
    scores = torch.zeros(len(fits), len(RIDGES) + same_width, dtype=torch.float64)
    for piece in held_out:
        advance()
        draft_states, target_states = _hidden_states(engine, draft, piece)
        for layer, fit in enumerate(fits):
            states, actual = draft_states[depths[layer]], target_states[target.moe[layer].depth]
            guesses = [guess.to(states.dtype) for guess in fit.predict(states, RIDGES)] + [states] * same_width
            scores[layer] += torch.tensor(_recalls(engine, layer, actual, guesses), dtype=torch.float64)
    on_progress(total, total)
    return _best(fits, scores / len(held_out), same_width, tokens, sum(map(len, held_out)))


def _hidden_states(engine: Engine, draft: ModelRunner, tokens: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the residual streams of draft and target, by decoder layer."""
    draft_states, _ = run_window(draft, tokens)
    engine.experts.step.begin()
    target_states, _ = run_window(engine.target, tokens)
    return draft_states, target_states


def _recalls(engine: Engine, layer: int, actual: Tensor, guesses: list[Tensor]) -> list[float]:
    """Return the recall of the layer's used experts from each guess of the hidden states."""
    target, k = engine.target, engine.target.moe[layer].top_k
    used = top_k_mask(target.rank(layer, actual), k)
    return [recall(used, top_k_mask(target.rank(layer, guess), k)) for guess in guesses]


def _best(fits: list[LayerFit], scores: Tensor, same_width: bool, tokens: int, held_out: int) -> Fit:
    """Choose each layer's map with the best score; an infinite ridge leaves hidden states as they are."""
    # scores: [layers, ridges (+ 1 for no map if the widths are equal)]
    weights, biases, layers = [], [], []
    for fit, row in zip(fits, scores, strict=True):
        best = int(row.argmax())
        ridge = RIDGES[best] if best < len(RIDGES) else None
        weight, bias = fit.map(ridge if ridge is not None else float("inf"))
        weights.append(weight.float())
        biases.append(bias.float())
        layers.append(LayerRecall(float(row[-1]) if same_width else None, float(row[best]), ridge))
    return Fit(HiddenStateProjection(torch.stack(weights), torch.stack(biases)), tokens, held_out, layers)
