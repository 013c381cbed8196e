"""Measure how well a draft's hidden states predict a target's routing, with the offloading engine itself.

Windows of a text run through both models. At every MoE layer, the target's own routing is compared with what its gate
selects from the draft's residual stream at the same relative depth (through the pair's fitted projection, if there is
one), and from the target's own residual stream one MoE layer earlier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, pad

from spmoe.engine.engine import Engine
from spmoe.errors import PromptError, UsageError
from spmoe.models.runner import ModelRunner
from spmoe.predict.policies.draft_gate import layers_by_draft_depth

MIN_WINDOW = 16  # tokens


@dataclass
class LayerMetrics:
    """Metrics of one MoE layer: means over tokens, from 0 to 1; None if there is no such prediction for the layer."""

    cosine: float | None = None  # similarity of the draft's and the target's residual stream after attention
    top1: float | None = None  # the most likely expert is predicted
    recall: float | None = None  # used experts that are among the k predicted
    recall_plus_one: float | None = None  # used experts that are among k + 1 predicted
    union_recall: float | None = None  # over `span` consecutive tokens: used and predicted / used
    union_precision: float | None = None  # over `span` consecutive tokens: used and predicted / predicted
    next_gate_recall: float | None = None  # recall from the target's own previous MoE layer; None at the first
    previous_token: float | None = None  # used experts that the previous token used too
    largest_load: float | None = None  # share of tokens that use the most used expert

    def add(self, **values: float) -> None:
        """Add the values of one window."""
        for name, value in values.items():
            setattr(self, name, (getattr(self, name) or 0.0) + value)


@dataclass
class Predictability:
    """Metrics of a pair of target and draft."""

    tokens: int
    span: int
    top_k: int
    experts: int
    greedy_agreement: float  # share of positions where both models' most likely tokens are equal
    sampling_acceptance: float  # probability that both models give to the same tokens; no sampler accepts more
    expert_format: str
    lossless: bool  # whether experts have the checkpoint's weights, in the run's dtype
    layers: list[LayerMetrics] = field(default_factory=list)

    def mean(self) -> LayerMetrics:
        """Return the mean of each metric over the layers that have it."""
        found = LayerMetrics()
        for name in (f.name for f in fields(LayerMetrics)):
            values = [value for one in self.layers if (value := getattr(one, name)) is not None]
            setattr(found, name, sum(values) / len(values) if values else None)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**asdict(self), "mean": asdict(self.mean())}


def measure_predictability(
    engine: Engine,
    text: str,
    window: int = 256,
    windows: int = 16,
    span: int = 5,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Predictability:
    """Compare draft and target over evenly spaced windows of a text."""
    draft = require_draft_model(engine)
    pieces = read_windows(engine, text, window, windows)
    comparison = _Comparison(engine, draft, span)
    for done, tokens in enumerate(pieces):
        on_progress(done, len(pieces))
        comparison.add(tokens)
    on_progress(len(pieces), len(pieces))
    return comparison.result()


def require_draft_model(engine: Engine) -> ModelRunner:
    """Return the draft model; raise UsageError if there is none, or if its predictions cannot be computed."""
    draft = engine.loop.drafter.runner
    if draft is None:
        raise UsageError("this command needs a draft model; give one with --draft")
    if not (engine.target.gates_found and draft.has_hidden_states):
        raise UsageError(
            "the gates of the target or the hidden states of the draft were not found, so nothing can be predicted; "
            "choose another pair"
        )
    return draft


def read_windows(engine: Engine, text: str, window: int, count: int) -> list[list[int]]:
    """Split a text into evenly spaced windows of tokens."""
    if engine.parts.tokenizer is None:
        raise UsageError(f"{engine.config.model} has no tokenizer, so text cannot be encoded; choose another model")
    ids: list[int] = engine.parts.tokenizer(text, verbose=False)["input_ids"]  # may exceed the context; windows do not
    window = min(window, engine.parts.max_model_len, len(ids))
    if window < MIN_WINDOW:
        raise PromptError(f"the text has {len(ids)} tokens; give one with at least {MIN_WINDOW}")
    count = max(1, min(count, len(ids) // window))
    starts = [round(i * (len(ids) - window) / max(1, count - 1)) for i in range(count)]
    return [ids[start : start + window] for start in starts]


class _Comparison:
    """Sums of all metrics over windows."""

    def __init__(self, engine: Engine, draft: ModelRunner, span: int) -> None:
        self._engine = engine
        self._target = engine.target
        self._draft = draft
        self._span = span
        self._draft_depth = draft_depths(engine, draft)
        count, experts = len(self._target.moe), max(engine.spec.experts)
        self._metrics = [LayerMetrics() for _ in range(count)]
        self._loads = torch.zeros(count, experts)
        self._agreement = self._acceptance = 0.0
        self._tokens = self._windows = 0

    def add(self, tokens: list[int]) -> None:
        """Run one window through both models and compare."""
        draft_states, draft_logits = run_window(self._draft, tokens)
        self._engine.experts.step.begin()
        target_states, target_logits = run_window(self._target, tokens)
        draft_logits = pad(draft_logits, (0, target_logits.shape[-1] - draft_logits.shape[-1]), value=float("-inf"))
        self._agreement += float((draft_logits.argmax(-1) == target_logits.argmax(-1)).float().mean())
        p, q = target_logits.float().softmax(-1), draft_logits.float().softmax(-1)
        self._acceptance += float(torch.minimum(p, q).sum(-1).mean())
        for layer in range(len(self._metrics)):
            self._compare(layer, draft_states, target_states)
        self._tokens += len(tokens)
        self._windows += 1

    def result(self) -> Predictability:
        """Return the means over all windows."""
        n = self._windows
        for layer, one in enumerate(self._metrics):
            for name, value in asdict(one).items():
                setattr(one, name, None if value is None else value / n)
            one.largest_load = float(self._loads[layer].max()) / self._tokens
        return Predictability(
            self._tokens,
            self._span,
            self._target.top_k,
            self._loads.shape[1],
            self._agreement / n,
            self._acceptance / n,
            self._engine.parts.models.expert_format.weight.label,
            self._engine.parts.models.lossless,
            self._metrics,
        )

    def _compare(self, layer: int, draft_states: list[Tensor], target_states: list[Tensor]) -> None:
        """Add one MoE layer's metrics of a window."""
        moe_layer, metrics, k = self._target.moe[layer], self._metrics[layer], self._target.moe[layer].top_k
        own = target_states[moe_layer.depth]
        guess = draft_states[self._draft_depth[layer]]
        actual = self._target.rank(layer, own)  # [rows, experts], most likely first
        used = top_k_mask(actual, k)  # [rows, experts] bool
        self._loads[layer] += used.sum(0)
        metrics.add(previous_token=float((used[1:] & used[:-1]).sum()) / (k * max(1, len(used) - 1)))
        if layer:
            next_gate = self._target.rank(layer, target_states[self._target.moe[layer - 1].depth])
            metrics.add(next_gate_recall=recall(used, top_k_mask(next_gate, k)))
        if self._engine.parts.projection is not None:
            guess = self._engine.parts.projection([layer], guess[None])[0]
        elif self._draft.hidden_size != self._target.hidden_size:
            return  # the gate cannot read the draft's hidden states
        ranking = self._target.rank(layer, guess)
        predicted = top_k_mask(ranking, k)
        used_in_span, predicted_in_span = _union(used, self._span), _union(predicted, self._span)
        metrics.add(
            cosine=float(cosine_similarity(guess.float(), own.float(), dim=-1).mean()),
            top1=float((ranking[:, 0] == actual[:, 0]).float().mean()),
            recall=recall(used, predicted),
            recall_plus_one=recall(used, top_k_mask(ranking, min(k + 1, ranking.shape[-1]))),
            union_recall=recall(used_in_span, predicted_in_span),
            union_precision=recall(predicted_in_span, used_in_span),
        )


def draft_depths(engine: Engine, draft: ModelRunner) -> list[int]:
    """Return, for each MoE layer, the draft's decoder layer that predicts it."""
    at = layers_by_draft_depth(engine.target.layer_depths, engine.target.depth_count, draft.depth_count)
    return [depth for depth, layers in enumerate(at) for _ in layers]


def run_window(runner: ModelRunner, tokens: list[int]) -> tuple[list[Tensor], Tensor]:
    """Return every decoder layer's residual stream after attention, and the logits of every position."""
    # -> layers x [rows, hidden], [rows, vocabulary]
    states: list[Tensor] = [torch.empty(0)] * runner.depth_count

    def on_hidden_states(depth: int, residual: Tensor) -> None:
        states[depth] = residual

    with runner.temporary_kv(len(tokens)) as kv:
        logits = runner.forward(tokens, kv, num_logits=len(tokens), on_hidden_states=on_hidden_states)
    return states, logits


def top_k_mask(ranking: Tensor, k: int) -> Tensor:
    """Mark the experts among the first k of a ranking."""  # [rows, experts] -> [rows, experts] bool
    return torch.zeros_like(ranking, dtype=torch.bool).scatter_(1, ranking[:, :k], True)


def _union(mask: Tensor, span: int) -> Tensor:
    """Mark the experts of any of `span` consecutive tokens."""  # [rows, experts] -> [rows // span, experts]
    rows = max(span, len(mask) // span * span)
    return mask[:rows].reshape(-1, min(span, len(mask)), mask.shape[-1]).any(1)


def recall(wanted: Tensor, given: Tensor) -> float:
    """Return the share of wanted experts that are given."""  # both: bool masks of one shape
    return float((wanted & given).sum()) / max(1, int(wanted.sum()))
