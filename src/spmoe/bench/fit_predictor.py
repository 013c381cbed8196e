"""Fitting the maps from a draft's residual stream to the target's, on text that streams through both models.

Most windows of the text are for the normal equations, which is all that is kept of them; every fifth is held out, and
the gates' recall on those decides how strongly each layer's map is regularised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from spmoe.bench.predictability import chosen_of, draft_depths, read_windows, recall_of, run_window
from spmoe.draft.model import DraftModel
from spmoe.engine.engine import Engine
from spmoe.errors import PromptError, UsageError
from spmoe.predict.projection import RIDGES, HiddenStateProjection, LayerFit

_HELD_OUT = 5  # one window in so many


@dataclass
class LayerGain:
    """Recall of one layer's experts on text held out."""

    before: float | None  # by the draft's states as they are; None where they fit no gate
    after: float
    ridge: float | None  # None: nothing was better than the states as they are


@dataclass
class Fit:
    """What was fitted."""

    maps: HiddenStateProjection
    tokens: int  # fitted on
    held_out: int
    layers: list[LayerGain] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"tokens": self.tokens, "held_out": self.held_out, "layers": [asdict(layer) for layer in self.layers]}


def fit_predictor(
    engine: Engine,
    text: str,
    window: int = 256,
    windows: int = 64,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Fit:
    """Fit one map per MoE layer on evenly spread windows of a text."""
    drafter, target = engine.loop.drafter, engine.target
    if not isinstance(drafter, DraftModel) or engine.draft_checkpoint is None:
        raise UsageError("a predictor is fitted for a draft model; give one with --draft")
    draft = drafter.runner
    if not (target.gates_found and draft.has_hidden_states):
        raise UsageError("the target's gates, or the draft's hidden states, cannot be had alone; nothing can be fitted")
    pieces = read_windows(engine, text, window, windows)
    aside = set(range(_HELD_OUT - 1, len(pieces), _HELD_OUT)) or {len(pieces) - 1}
    fitting, held_out = ([p for i, p in enumerate(pieces) if (i in aside) == wanted] for wanted in (False, True))
    tokens = sum(map(len, fitting))
    if tokens < max(draft.hidden_size, 2 * len(pieces[0])):
        least = max(draft.hidden_size * _HELD_OUT // (_HELD_OUT - 1) + len(pieces[0]), 4 * len(pieces[0]))
        raise PromptError(
            f"{len(pieces)} windows of {len(pieces[0])} tokens are too little text for maps from a draft "
            f"{draft.hidden_size} wide; give a longer --text, or more --windows, {least} tokens at least"
        )
    device, depths, total = target.model.device, draft_depths(engine, draft), len(pieces) + len(target.moe)
    fits = [LayerFit(draft.hidden_size, target.hidden_size, device) for _ in target.moe]
    done = 0

    def advance() -> None:
        nonlocal done
        on_progress(done, total)
        done += 1

    for piece in fitting:
        advance()
        ours, theirs = _states(engine, draft, piece)
        for layer, fit in enumerate(fits):
            fit.add(ours[depths[layer]], theirs[target.moe[layer].depth])
    for fit in fits:
        advance()
        fit.solve()
    same = draft.hidden_size == target.hidden_size
    scores = torch.zeros(len(fits), len(RIDGES) + same, dtype=torch.float64)
    for piece in held_out:
        advance()
        ours, theirs = _states(engine, draft, piece)
        for layer, fit in enumerate(fits):
            states, wanted = ours[depths[layer]], theirs[target.moe[layer].depth]
            guesses = [guess.to(states.dtype) for guess in fit.predict(states, RIDGES)] + [states] * same
            scores[layer] += torch.tensor(_recalls(engine, layer, wanted, guesses), dtype=torch.float64)
    on_progress(total, total)
    return _choose(fits, scores / len(held_out), same, tokens, sum(map(len, held_out)))


def _states(engine: Engine, draft: Any, tokens: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Residual streams of draft and target, by decoder layer."""
    ours, _ = run_window(draft, tokens)
    engine.source.begin_step()
    theirs, _ = run_window(engine.target, tokens)
    return ours, theirs


def _recalls(engine: Engine, layer: int, wanted: Tensor, guesses: list[Tensor]) -> list[float]:
    """How many of the experts that are used each guess finds."""
    target, k = engine.target, engine.target.moe[layer].top_k
    used = chosen_of(target.rank(layer, wanted), k)
    return [recall_of(used, chosen_of(target.rank(layer, guess), k)) for guess in guesses]


def _choose(fits: list[LayerFit], scores: Tensor, same: bool, tokens: int, held_out: int) -> Fit:
    """Each layer's best map; as they are, states need no map, which is one that changes nothing."""
    # scores: [layers, ridges (+ 1)]
    weights, biases, layers = [], [], []
    for fit, row in zip(fits, scores, strict=True):
        best = int(row.argmax())
        ridge = RIDGES[best] if best < len(RIDGES) else None
        weight, bias = fit.map(ridge if ridge is not None else float("inf"))
        weights.append(weight.float())
        biases.append(bias.float())
        layers.append(LayerGain(float(row[-1]) if same else None, float(row[best]), ridge))
    return Fit(HiddenStateProjection(torch.stack(weights), torch.stack(biases)), tokens, held_out, layers)
