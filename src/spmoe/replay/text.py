"""Recorded texts that can be decoded again with any K, step by step, while a governor or a fixed number chooses it.

A trace knows, for every token of a text, its routing, the predictions of the draft and of the layers before, and
whether the draft proposed it. So a step may begin at any token and draft any number: rows follow the text as far as the
draft is right; the rows behind it are rows that the target rejected near that place in the recording.

Two knobs make other texts of a recorded one. `acceptance` changes the share of tokens that the draft proposes rightly.
`locality` changes how much the routing of consecutive tokens has in common.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from spmoe.errors import UsageError
from spmoe.observe.ledger import Counters
from spmoe.replay.engine import ReplayEngine
from spmoe.replay.eviction import make_replay_eviction
from spmoe.replay.policies import ReplayPolicy, eviction_of
from spmoe.replay.replay import ReplayConfig, link_rate, replay_step, slot_count
from spmoe.replay.steps import ChunkPlan, ForwardPlan, Prediction, StepPlan, as_routing, plan_steps
from spmoe.replay.trace import Shape, Trace
from spmoe.types import DraftOutcome, Stage


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Compute times of the parts of a step, in seconds."""

    draft_pass: float
    layer: float  # of the target, for one row, every expert resident
    expert_share: float = 0.5  # share of `layer` that its experts take; each further expert takes as long
    row: float = 0.0  # every further row of the target, over all layers
    rest: float = 0.0  # of a step, outside of passes and layers


@dataclass(frozen=True)
class Rows:
    """Routing and predictions of some rows: tokens of a text, or rejected drafts."""

    routed: np.ndarray  # int16 [rows, layers, top_k]
    predicted: np.ndarray  # int16 [rows, layers, top_k], from the draft; -1: none
    predicted_score: np.ndarray
    ahead: np.ndarray  # int16 [distance, rows, layers, top_k], by the layer 1, 2, .. before
    ahead_score: np.ndarray

    def __len__(self) -> int:
        return len(self.routed)

    def at(self, rows: np.ndarray) -> Rows:
        """Return rows whose layers come from these rows: [rows] or, for every layer another one, [rows, layers]."""
        if rows.ndim == 1:
            rows = np.repeat(rows[:, None], self.routed.shape[1], axis=1)
        layers = np.arange(self.routed.shape[1])[None, :]
        return Rows(
            self.routed[rows, layers],
            self.predicted[rows, layers],
            self.predicted_score[rows, layers],
            self.ahead[:, rows, layers],
            self.ahead_score[:, rows, layers],
        )

    def join(self, other: Rows) -> Rows:
        """Return these rows and the others."""
        return Rows(
            np.concatenate((self.routed, other.routed)),
            np.concatenate((self.predicted, other.predicted)),
            np.concatenate((self.predicted_score, other.predicted_score)),
            np.concatenate((self.ahead, other.ahead), axis=1),
            np.concatenate((self.ahead_score, other.ahead_score), axis=1),
        )


@dataclass(frozen=True)
class ReplayText:
    """One recorded generation."""

    prompt: list[StepPlan]  # the steps that read the prompt
    tokens: Rows  # one row per token, the prompt's last one first
    right: np.ndarray  # bool [tokens], whether the draft proposes this token after the text before it
    rejected: Rows
    rejected_at: list[int]  # token before each rejected row, ascending

    @property
    def acceptance(self) -> float:
        """Share of tokens that the draft proposes rightly."""
        return float(self.right[1:].mean()) if len(self.right) > 1 else 0.0

    def scaled(self, acceptance: float | None = None, locality: float = 0.0, seed: int = 0) -> ReplayText:
        """Return a text with this share of right drafts, and with other locality.

        `locality` from 0 to 1: the share of (token, layer) pairs that take the routing of the token before; from 0 to
        -1: the share that take the routing of any token of the text.
        """
        rng, count, layers = np.random.default_rng(seed), len(self.tokens), self.tokens.routed.shape[1]
        right = self.right.copy()
        if acceptance is not None:
            now, dice = self.acceptance, rng.random(count)
            if acceptance < now:
                right &= dice < acceptance / now
            elif now < 1:
                right |= dice < (acceptance - now) / (1 - now)
        sources = np.repeat(np.arange(count)[:, None], layers, axis=1)
        dice, others = rng.random(sources.shape), rng.integers(0, count, sources.shape)
        if locality < 0:
            sources = np.where(dice < -locality, others, sources)
        for token in range(1, count):
            if locality > 0:
                sources[token] = np.where(dice[token] < locality, sources[token - 1], sources[token])
        return replace(self, tokens=self.tokens.at(sources), right=right)

    def plan(self, token: int, k: int, times: StepTimes) -> StepPlan:
        """Plan a step that begins at a token and drafts K tokens; behind its end the text begins again."""
        count = len(self.tokens)
        at = (token + np.arange(k + 1)) % count
        accepted = 0
        while accepted < k and self.right[at[accepted + 1]]:
            accepted += 1
        rows = self.tokens.at(at[: accepted + 1])
        if accepted < k:
            rows = rows.join(self._rejected_rows(int(at[accepted]), k - accepted))
        return StepPlan(
            0, k, accepted, [_chunk(rows, row, times) for row in range(k)], [_forward(rows, times)], times.rest
        )

    def _rejected_rows(self, token: int, count: int) -> Rows:
        if not len(self.rejected):  # all drafts were right: rows of another place
            return self.tokens.at((token + len(self.tokens) // 2 + np.arange(count)) % len(self.tokens))
        first = bisect_left(self.rejected_at, token)
        return self.rejected.at((first + np.arange(count)) % len(self.rejected))


def read_texts(trace: Trace) -> list[ReplayText]:
    """Return every generation of a trace that was recorded with a draft model."""
    if not trace.verified:
        raise UsageError("the trace has no drafts; record one with -k 8 or more")
    plans = plan_steps(trace)
    found = []
    for sequence_id in dict.fromkeys(int(one) for one in trace.step_sequence):
        steps = [step for step in plans if step.sequence_id == sequence_id]
        decoded = [step for step in steps if step.drafted]
        if decoded:
            found.append(_read_text([step for step in steps if not step.drafted][:1], decoded, trace))
    return found


def _read_text(prompt: list[StepPlan], steps: list[StepPlan], trace: Trace) -> ReplayText:
    kept, rejected, right, rejected_at = list[Rows](), list[Rows](), list[bool](), list[int]()
    for step in steps:
        rows = _rows_of(step, trace)
        right += [False] + [True] * step.accepted  # the first row is a token that no draft has proposed
        kept.append(rows.at(np.arange(step.accepted + 1)))
        if step.accepted + 1 < len(rows):
            rejected.append(rows.at(np.arange(step.accepted + 1, len(rows))))
            rejected_at += [len(right) - 1] * len(rejected[-1])
    # after a draft that was accepted as a whole, nothing is known of the next token: it is as likely right as others
    rate, rng, first = float(np.mean(right)), np.random.default_rng(len(right)), 0
    for step in steps[:-1]:
        first += step.accepted + 1
        if step.accepted == step.drafted:
            right[first] = bool(rng.random() < rate)
    tokens = _join(kept)
    return ReplayText(
        prompt, tokens, np.array(right), _join(rejected) if rejected else tokens.at(np.arange(0)), rejected_at
    )


def _join(parts: list[Rows]) -> Rows:
    joined = parts[0]
    for part in parts[1:]:
        joined = joined.join(part)
    return joined


def _rows_of(step: StepPlan, trace: Trace) -> Rows:
    """Return all rows that a recorded step verified, with the predictions that were made for them."""
    forward = step.forwards[-1]
    shape = forward.routed.shape  # [rows, layers, top_k]
    predicted, score = np.full(shape, -1, dtype=np.int16), np.zeros(shape, dtype=np.float32)
    passed = dict[int, int]()  # row of the pass that predicted a layer last
    for chunk in step.chunks:
        for place, layer in enumerate(chunk.prediction.layers):
            row = passed.get(layer, -1) + 1
            passed[layer] = row
            if row < len(predicted):
                predicted[row, layer] = chunk.prediction.routing.experts[place, -1].numpy()
                score[row, layer] = chunk.prediction.routing.scores[place, -1].numpy()
    distances = len(trace.ahead)
    ahead, ahead_score = np.full((distances, *shape), -1, dtype=np.int16), np.zeros((distances, *shape), np.float32)
    for prediction in forward.ahead:
        if prediction is not None:
            for distance, later in enumerate(prediction.layers):
                ahead[distance, :, later] = prediction.routing.experts[distance].numpy()
                ahead_score[distance, :, later] = prediction.routing.scores[distance].numpy()
    return Rows(forward.routed, predicted, score, ahead, ahead_score)


def _chunk(rows: Rows, row: int, times: StepTimes) -> ChunkPlan:
    """Plan the draft pass that reads one row's token, as one chunk."""
    layers = range(rows.routed.shape[1])
    experts, scores = rows.predicted[row][:, None, :], rows.predicted_score[row][:, None, :]  # [layers, 1, top_k]
    unknown = (
        experts < 0
    )  # the row of the last draft token of a recorded step has no pass: the routing itself stands in
    experts = np.where(unknown, rows.routed[row][:, None, :], experts)
    scores = np.where(unknown, 1 / experts.shape[-1], scores)
    return ChunkPlan(times.draft_pass, Prediction(Stage.DRAFT, layers, layers, as_routing(experts, scores)))


def _forward(rows: Rows, times: StepTimes) -> ForwardPlan:
    count, layers, top_k = rows.routed.shape
    experts = [sorted({int(e) for e in rows.routed[:, layer].ravel() if e >= 0}) for layer in range(layers)]
    front = times.layer * (1 - times.expert_share) + times.row * (count - 1) / layers
    ahead: list[Prediction | None] = []
    for layer in range(layers):
        later = range(layer + 1, min(layer + 1 + len(rows.ahead), layers))
        if not later or rows.ahead[0, 0, layer + 1, 0] < 0:
            ahead.append(None)
            continue
        at = (np.arange(len(later)), slice(None), np.asarray(later))
        routing = as_routing(rows.ahead[at], rows.ahead_score[at])
        ahead.append(Prediction(Stage.VERIFY, range(layer, layer + 1), later, routing))
    per_expert = times.layer * times.expert_share / top_k
    return ForwardPlan(count, [front] * layers, [per_expert] * layers, experts, [[]] * layers, rows.routed, ahead)


# ---- decoding


@dataclass(frozen=True, slots=True)
class DecodedStep:
    """One step of a replayed text, as a chooser of K learns of it."""

    k: int
    accepted: int
    seconds: float
    needed: int  # routed experts
    missing: int  # of these, experts that were loaded
    caught_up: bool  # whether the draft first read tokens of steps without a draft


@dataclass(frozen=True, slots=True)
class DecodedText:
    """Totals of one replayed text, without its prompt."""

    tokens: int
    seconds: float
    lengths: tuple[int, ...]  # K of every step


class Chooser:
    """Chooses K of every step of replayed texts; learns nothing unless a subclass does."""

    @property
    def current(self) -> int:
        """K of the next step."""
        raise NotImplementedError

    def begin_request(self) -> None:
        """Take note that another text begins."""

    def wants_comparison(self, tokens: int) -> bool:
        """Return whether to compare the draft with so many tokens of plain steps."""
        return False

    def learn_matches(self, matches: Sequence[bool], seconds: float) -> None:
        """Take note of whether the draft would have proposed each of the next tokens of plain steps.

        `seconds`: that it took to find out.
        """

    def learn(self, step: DecodedStep) -> None:
        """Take note of a finished step."""


class TextDecoder:
    """Decodes texts one after the other with the live expert cache, eviction and prefetching on a virtual clock."""

    def __init__(self, shape: Shape, config: ReplayConfig, times: StepTimes) -> None:
        self._times = times
        self._policies = {name: ReplayPolicy(name, shape, []) for name in (config.prefetch, "on-demand")}
        self._prefetch = config.prefetch
        eviction = make_replay_eviction(eviction_of(config.prefetch, config.eviction), shape.experts, [])
        self._engine = ReplayEngine(
            shape,
            slot_count(config.memory, shape),
            link_rate(config.link_gbps, shape),
            eviction,
            admits=self._policies[config.prefetch].admits,
        )
        self._sequence_id = -1

    @property
    def counters(self) -> Counters:
        """Counts of the replay so far."""
        return self._engine.counters

    def decode(
        self,
        text: ReplayText,
        tokens: int,
        chooser: Chooser,
        slowdown: Callable[[int], float] = lambda token: 1.0,
    ) -> DecodedText:
        """Decode `tokens` tokens with the K of the chooser.

        `slowdown` returns a factor of the compute times at a token.
        """
        engine, counters = self._engine, self._engine.counters
        self._sequence_id += 1
        chooser.begin_request()
        for step in text.prompt:
            replay_step(engine, self._policies[self._prefetch], replace(step, sequence_id=self._sequence_id))
        began, done, lengths, unread = engine.now, 0, list[int](), 0
        while done < tokens:
            k = min(chooser.current, tokens - done - 1)
            started, asked, missing = engine.now, counters.asked, counters.useful_loads
            step = replace(text.plan(done, k, self._times), sequence_id=self._sequence_id)
            policy = self._policies[self._prefetch if k else "on-demand"]
            caught_up = k > 0 and unread > 1
            if caught_up:  # the draft reads the tokens of steps without a draft, in one pass
                engine.compute(self._times.draft_pass)
            if not k and chooser.wants_comparison(unread):
                engine.compute(self._times.draft_pass)
                compared = np.arange(done - unread + 1, done + 1) % len(text.right)
                chooser.learn_matches(text.right[compared].tolist(), self._times.draft_pass)
                unread, caught_up = 0, True
            unread = 0 if k else unread + 1
            replay_step(engine, policy, step)
            policy.on_accept(DraftOutcome(k, step.accepted))
            if (factor := slowdown(done)) > 1.0:
                engine.compute((factor - 1.0) * (engine.now - started))
            needed, loaded = counters.asked - asked, counters.useful_loads - missing
            chooser.learn(DecodedStep(k, step.accepted, engine.now - started, needed, loaded, caught_up))
            done += step.tokens
            lengths.append(k)
        return DecodedText(done, engine.now - began, tuple(lengths))

    def close(self) -> None:
        """Release the live classes."""
        self._engine.close()
