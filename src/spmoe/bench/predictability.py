"""How well a draft's hidden states predict a target's routing, measured through the offloading engine itself.

Windows of text run through both models, one at a time. At every MoE layer the target's own routing is compared with
what its gate says about the draft's residual stream at the same relative depth (through the maps fitted for the pair,
where there are such), and about its own one layer earlier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, pad

from spmoe.draft.model import DraftModel
from spmoe.engine.engine import Engine
from spmoe.errors import PromptError, UsageError
from spmoe.models.runner import ModelRunner
from spmoe.predict.policies.draft_gate import layers_by_draft_depth


@dataclass
class LayerFigures:
    """One MoE layer; all are means over tokens, from 0 to 1."""

    cosine: float = 0.0  # of draft's and target's residual stream after attention
    top1: float = 0.0  # the most likely expert is predicted as such
    recall: float = 0.0  # of the experts used, those among the k predicted
    recall_plus_one: float = 0.0  # the same when k + 1 are predicted
    union_recall: float = 0.0  # over `span` tokens together: used and predicted / used
    union_precision: float = 0.0  # used and predicted / predicted
    next_gate_recall: float = 0.0  # predicted from the target's own previous layer; 0 at the first
    previous_token: float = 0.0  # of the experts used, those that the previous token used
    largest_load: float = 0.0  # share of tokens that use the busiest expert


@dataclass
class Predictability:
    """What was measured."""

    tokens: int
    span: int
    top_k: int
    experts: int
    greedy_agreement: float
    sampling_acceptance: float
    layers: list[LayerFigures] = field(default_factory=list)

    def mean(self) -> LayerFigures:
        """The mean over layers."""
        names = [f.name for f in fields(LayerFigures)]
        return LayerFigures(**{n: sum(getattr(one, n) for one in self.layers) / len(self.layers) for n in names})

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "mean": asdict(self.mean())}


def measure_predictability(
    engine: Engine,
    text: str,
    window: int = 256,
    windows: int = 16,
    span: int = 5,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Predictability:
    """Compare draft and target over evenly spread windows of a text."""
    drafter = engine.loop.drafter
    if not isinstance(drafter, DraftModel):
        raise UsageError("predictability needs a draft model; give one with --draft")
    if not (engine.target.gates_found and drafter.runner.has_hidden_states):
        raise UsageError(
            "the target's gates, or the draft's hidden states, cannot be had alone; nothing can be compared"
        )
    pieces = read_windows(engine, text, window, windows)
    sums = _Sums(engine, drafter.runner, span)
    for done, tokens in enumerate(pieces):
        on_progress(done, len(pieces))
        sums.add(tokens)
    on_progress(len(pieces), len(pieces))
    return sums.result()


def read_windows(engine: Engine, text: str, window: int, count: int) -> list[list[int]]:
    """Evenly spread windows of a text's tokens."""
    if engine.tokenizer is None:
        raise UsageError(f"{engine.config.model} ships no tokenizer, so a text cannot be read")
    ids: list[int] = engine.tokenizer(text, verbose=False)["input_ids"]  # longer than any context is fine here
    window = min(window, engine.max_model_len, len(ids))
    if window < 16:
        raise PromptError(f"the text has {len(ids)} tokens; give one of at least 16")
    count = max(1, min(count, len(ids) // window))
    starts = [round(i * (len(ids) - window) / max(1, count - 1)) for i in range(count)]
    return [ids[start : start + window] for start in starts]


class _Sums:
    """Running totals over windows."""

    def __init__(self, engine: Engine, draft: ModelRunner, span: int) -> None:
        self._engine = engine
        self._target = engine.target
        self._draft = draft
        self._span = span
        self._draft_depth = draft_depths(engine, draft)
        count, experts = len(self._target.moe), max(engine.store.experts)
        self._figures = [LayerFigures() for _ in range(count)]
        self._loads = torch.zeros(count, experts)
        self._agreement = self._acceptance = 0.0
        self._tokens = self._windows = 0

    def add(self, tokens: list[int]) -> None:
        """Run one window through both models and compare."""
        draft_taps, draft_logits = run_window(self._draft, tokens)
        self._engine.source.begin_step()
        target_taps, target_logits = run_window(self._target, tokens)
        draft_logits = pad(draft_logits, (0, target_logits.shape[-1] - draft_logits.shape[-1]), value=float("-inf"))
        self._agreement += float((draft_logits.argmax(-1) == target_logits.argmax(-1)).float().mean())
        p, q = target_logits.float().softmax(-1), draft_logits.float().softmax(-1)
        self._acceptance += float(torch.minimum(p, q).sum(-1).mean())
        for layer in range(len(self._figures)):
            self._compare(layer, draft_taps, target_taps)
        self._tokens += len(tokens)
        self._windows += 1

    def result(self) -> Predictability:
        """Means over all windows."""
        n = self._windows
        for layer, one in enumerate(self._figures):
            for f in fields(LayerFigures):
                setattr(one, f.name, getattr(one, f.name) / n)
            one.largest_load = float(self._loads[layer].max()) / self._tokens
        return Predictability(
            self._tokens,
            self._span,
            self._target.top_k,
            self._loads.shape[1],
            self._agreement / n,
            self._acceptance / n,
            self._figures,
        )

    def _compare(self, layer: int, draft_taps: list[Tensor], target_taps: list[Tensor]) -> None:
        moe_layer, figures, k = self._target.moe[layer], self._figures[layer], self._target.moe[layer].top_k
        own = target_taps[moe_layer.depth]
        guess = draft_taps[self._draft_depth[layer]]
        real = self._target.rank(layer, own)  # [rows, experts], most likely first
        used = chosen_of(real, k)  # [rows, experts] bool
        self._loads[layer] += used.sum(0)
        figures.previous_token += float((used[1:] & used[:-1]).sum()) / (k * max(1, len(used) - 1))
        if layer:
            before = self._target.rank(layer, target_taps[self._target.moe[layer - 1].depth])
            figures.next_gate_recall += recall_of(used, chosen_of(before, k))
        if self._engine.projection is not None:
            guess = self._engine.projection([layer], guess[None])[0]
        elif self._draft.hidden_size != self._target.hidden_size:
            return  # nothing of the draft's fits the gate; the figures stay at zero
        predicted = self._target.rank(layer, guess)
        said = chosen_of(predicted, k)
        figures.cosine += float(cosine_similarity(guess.float(), own.float(), dim=-1).mean())
        figures.top1 += float((predicted[:, 0] == real[:, 0]).float().mean())
        figures.recall += recall_of(used, said)
        figures.recall_plus_one += recall_of(used, chosen_of(predicted, min(k + 1, predicted.shape[-1])))
        together, expected = _union(used, self._span), _union(said, self._span)
        figures.union_recall += recall_of(together, expected)
        figures.union_precision += recall_of(expected, together)


def draft_depths(engine: Engine, draft: ModelRunner) -> list[int]:
    """For each MoE layer, the draft's decoder layer that predicts it."""
    at = layers_by_draft_depth(engine.target.layer_depths, engine.target.depth_count, draft.depth_count)
    return [depth for depth, layers in enumerate(at) for _ in layers]


def run_window(runner: ModelRunner, tokens: list[int]) -> tuple[list[Tensor], Tensor]:
    """Every layer's residual stream after attention, and the logits of every position."""
    taps: list[Tensor] = [torch.empty(0)] * runner.depth_count

    def keep(depth: int, residual: Tensor) -> None:
        taps[depth] = residual  # [rows, hidden]

    logits = runner.forward(tokens, runner.new_kv(len(tokens)), keep=len(tokens), on_hidden_states=keep)
    return taps, logits


def chosen_of(ranking: Tensor, k: int) -> Tensor:
    """Which experts are among the first k."""  # [rows, experts] -> [rows, experts] bool
    return torch.zeros_like(ranking, dtype=torch.bool).scatter_(1, ranking[:, :k], True)


def _union(chosen: Tensor, span: int) -> Tensor:
    """Experts used by any of `span` tokens in a row."""  # [rows, experts] -> [rows // span, experts]
    rows = max(span, len(chosen) // span * span)
    return chosen[:rows].reshape(-1, min(span, len(chosen)), chosen.shape[-1]).any(1)


def recall_of(wanted: Tensor, given: Tensor) -> float:
    """The share of what is wanted that is given."""
    return float((wanted & given).sum()) / max(1, int(wanted.sum()))
