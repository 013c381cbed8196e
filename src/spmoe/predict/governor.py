"""The governor: choose K, the number of draft tokens of each step, so that speculation never costs time.

`-k auto` asks it before every step and reports every finished step to it. With a settled K, the next step begins before
this one is learned from, so that learning costs no time. docs/governor.md explains the formulas:

    cost(K)    = seconds(K) / tokens(K)                     seconds per output token, which the governor minimizes
    tokens(K)  = 1 + p (a_1 + a_1 a_2 + .. + a_1 .. a_K)    p: share of steps with a draft, a_i: acceptance by position

The cost model (`costs.py`) knows seconds(K). A K that may be better than the present one is tried for a few steps if
the time that the trial may lose fits in a budget. Plain decoding is tried again and again in any case.

Nothing here reads a clock, a device or a random number: the same reports lead to the same choices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np

from spmoe.config import DraftTokens
from spmoe.predict.costs import OUTLIER, ChangeDetector, CostModel, CostPrior, StepReport, StepSeconds

LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 15)  # values of K that are considered
USUAL = 4  # K that memory, threads and profiles are planned for

# trials
TRIAL_SHARE = 0.015  # share of the time that trials may lose
_FIRST_BUDGET = 1.5  # further time that the trials of a new governor may lose, in tokens of plain decoding
_MAX_BUDGET = 4.0  # largest budget that is saved up, in tokens of plain decoding
_TRIAL_STEPS = 3
_HOPELESS = 2.0  # standard deviations that a K is worse by when its trial ends early
_CERTAIN = 2.5  # the same of plain decoding when it is not tried again
_STEPS_BETWEEN_TRIALS = 4  # after a trial that changed nothing; half as many again after the next, and so on
_STEPS_UNTIL_PLAIN = 8  # of drafting until plain decoding is tried again; twice as many the next time, and so on
_STEPS_WITHOUT_DRAFT = 24  # after which one is tried even if little is expected of it
_MAX_STEPS_BETWEEN_TRIALS = 64
_NEW_STEPS = 8  # with a newly settled K, after which steps are learned from later, short ones together
_EFFORT = 3e-4  # seconds that it takes to learn and to choose
_EFFORT_SHARE = 0.02  # of the time of steps that may be spent on that; the device is busy meanwhile
_MOST_TOGETHER = 16  # steps that are learned from together
_MIN_STEPS = 2  # steps with one K before another one is chosen
_MIN_GAIN = 0.02  # expected gain for which K changes
_MIN_TRIAL_GAIN = 0.005  # expected gain of a trial, per token of the horizon
_CAUTION = 0.35  # standard deviations by which drafting must beat plain decoding
_HORIZON = 128.0  # tokens for which a better K is expected to stay better

# comparison of the draft with tokens of plain steps
COMPARED_TOKENS = 16  # at a time, which one pass of the draft reads
_FIRST_COMPARED = 4  # tokens of a request's first comparison; twice as many the next time
_COMPARISON_SHARE = 0.01  # of the time of plain steps that the draft's passes may take

# acceptance
_DRAFT_DECAY = 0.98  # weight of an acceptance result, per later draft
_STEP_DECAY = 0.992  # the same, per later step without a draft
_PRIOR_DRAFTS = 2.0  # drafts that the prior of an acceptance rate counts for
_PRIOR_ACCEPTANCE = 0.7
# changes
_KEPT_AT_CHANGE = 0.2  # weight of what was learned before a change
_KEPT_OF_OTHER_TEXT = 0.8  # weight of acceptance in earlier requests
_KEPT_OF_OTHER_RUN = 0.1  # the same in earlier runs


def usual_draft_tokens(draft_tokens: DraftTokens) -> int:
    """Return K, or a usual value for `auto`."""
    return USUAL if draft_tokens == "auto" else draft_tokens


class AcceptanceModel:
    """Acceptance rate of every draft position, given that it is reached, and the share of drafts that exist."""

    def __init__(self, max_draft_tokens: int) -> None:
        self.reached = np.zeros(max_draft_tokens)  # drafts that reached each position, decayed
        self.accepted = np.zeros(max_draft_tokens)
        self.asked = self.proposed = 0.0
        self.compared = False  # whether drafts are compared with the tokens of plain steps
        self._draft_so_far = 0  # right tokens of the draft that would be under way; it is compared with plain steps
        self._next_is_bonus = False  # whether the next token is a bonus token, after a draft that is right as a whole
        self._change = ChangeDetector()
        self._positions = np.arange(max_draft_tokens)
        self._rates: np.ndarray | None = None  # None: to be computed from the counts

    def learn(self, drafted: int, accepted: float) -> bool:
        """Count a draft that was asked for; return whether acceptance has changed."""
        self.asked = _DRAFT_DECAY * self.asked + 1
        self.proposed = _DRAFT_DECAY * self.proposed + (drafted > 0)
        if not drafted:
            return False
        chances = np.cumprod(self.rates()[:drafted])  # of accepting so many tokens
        mean, square = float(chances.sum()), float((2 * self._positions[:drafted] + 1) @ chances)
        changed = self._change.add((accepted - mean) / math.sqrt(max(0.05, square - mean * mean)))
        if changed:
            self.forget(_KEPT_AT_CHANGE)
        self._rates = None
        self.reached = _DRAFT_DECAY * self.reached + (self._positions < min(drafted, accepted + 1))
        self.accepted = _DRAFT_DECAY * self.accepted + (self._positions < accepted)
        return changed

    def learn_matches(self, matches: Sequence[bool | None]) -> bool:
        """Count the drafts of the largest K that would have been made over the next tokens of plain steps.

        `matches`: whether the draft would have proposed each token; None: it would have proposed nothing. Return
        whether acceptance has changed.
        """
        self.compared = True
        most, changed = len(self.reached), False
        for match in matches:
            if self._next_is_bonus:
                self._next_is_bonus = False
            elif match:
                self._draft_so_far += 1
                if self._draft_so_far == most:
                    changed |= self.learn(most, most)
                    self._draft_so_far, self._next_is_bonus = 0, True
            else:
                drafted = most if match is False else self._draft_so_far
                changed |= self.learn(drafted, self._draft_so_far)
                self._draft_so_far = 0
        return changed

    def end_comparison(self) -> None:
        """Count the draft that would be under way: later tokens are not compared."""
        if self._draft_so_far:
            self.learn(self._draft_so_far, self._draft_so_far)
        self._draft_so_far, self._next_is_bonus, self.compared = 0, False, False

    def forget(self, kept: float) -> None:
        """Reduce the weight of everything counted so far."""
        self._rates = None
        self.reached, self.accepted = kept * self.reached, kept * self.accepted
        self.asked *= kept
        self.proposed *= kept

    @property
    def proposal_rate(self) -> float:
        """Share of steps that have a draft, if one is asked for."""
        return (self.proposed + 1.0) / (self.asked + 1.0)

    def rates(self) -> np.ndarray:
        """Return the acceptance rate of each position, given that it is reached."""  # [positions]
        if self._rates is None:
            reached = float(self.reached.sum()) + _PRIOR_DRAFTS
            pooled = (float(self.accepted.sum()) + _PRIOR_DRAFTS * _PRIOR_ACCEPTANCE) / reached
            self._rates = (self.accepted + _PRIOR_DRAFTS * pooled) / (self.reached + _PRIOR_DRAFTS)
        return self._rates

    def variances(self, rates: np.ndarray) -> np.ndarray:
        """Return the variance of each rate."""
        found: np.ndarray = np.maximum(rates * (1 - rates), 0.02) / (_PRIOR_DRAFTS + self.reached)
        return found


class Governor:
    """Chooser of K, updated after every step; `current` is the K of the next step."""

    def __init__(
        self,
        max_draft_tokens: int,
        layers: int,
        experts_per_layer: int,
        top_k: int,
        prior: CostPrior | None = None,
        sequences: int = 1,
    ) -> None:
        # sequences: that run together, all with the same K
        self.lengths = tuple(k for k in LENGTHS if k <= max_draft_tokens)
        self.current = 0
        self.settled = 0  # the K that is believed to be the best; `current` differs from it during a trial
        self.acceptance = AcceptanceModel(max_draft_tokens)
        self.costs = CostModel(self.lengths, layers, experts_per_layer, top_k, prior, sequences)
        self._ks = np.array(self.lengths)
        self._index = {k: i for i, k in enumerate(self.lengths)}
        self._reported: StepReport | None = None  # a step that `learn_reported` will learn from
        self._pending: list[StepReport] = []  # steps, all alike, that will be learned from together
        self._trial_steps_left = 0
        self._steps_with_current = 0  # steps since K changed
        self._steps_with_settled = 0  # steps with the settled K since it was settled on
        self._budget: float | None = None  # tokens whose time trials may lose; None: nothing is known yet
        self._trial_gap = float(_STEPS_BETWEEN_TRIALS)  # steps between two trials
        self._plain_gap = _STEPS_UNTIL_PLAIN  # steps without plain decoding after which it is tried
        self._steps_since_plain = 0
        self._first_budget = _FIRST_BUDGET
        self._comparisons = 0  # of the draft with tokens of plain steps, in this request
        self._comparison_seconds = 0.0  # of the last one; 0: not known yet
        self.plain_cost: float | None = None  # expected seconds per token of plain decoding; None: not known yet
        self.steps = 0  # that were learned from

    # ---- estimates

    def estimates(self) -> Estimates:
        """Return what is expected of every K."""
        rates, rate = self.acceptance.rates(), self.acceptance.proposal_rate
        chances = rate * np.cumprod(rates)
        totals = np.concatenate(([0.0], np.cumsum(chances)))
        tokens = 1 + totals[self._ks]
        # derivative of log tokens(K) by each rate: everything from its position on is proportional to it
        later = (totals[self._ks][:, None] - totals[None, :-1]).clip(min=0.0)
        token_gradient = later / rates / tokens[:, None]
        return Estimates(tokens, token_gradient, self.costs.steps(rate))

    def at_most(self, k: int) -> int:
        """Return the largest K of those that are considered, up to this one."""
        return max((length for length in self.lengths if length <= k), default=0)

    def _deviations(self, estimates: Estimates, other: int) -> np.ndarray:
        """Return the standard deviation of log(cost(K) / cost(other)), for every K."""
        if (known := estimates.deviations.get(other)) is not None:
            return known
        tokens = estimates.token_gradient - estimates.token_gradient[other]
        rates = self.acceptance.rates()
        variance = (tokens**2) @ self.acceptance.variances(rates)
        variance = variance + self.costs.ratio_variances(estimates.steps, other)
        estimates.deviations[other] = np.sqrt(np.maximum(variance, 0.0))
        return estimates.deviations[other]

    # ---- learning

    def wants_comparison(self, tokens: int, *, free: bool = False) -> bool:
        """Return whether to compare the draft with so many tokens that plain steps have decoded.

        `free`: no model has to read them. Otherwise a draft model reads COMPARED_TOKENS of them in one pass.
        """
        if self.plain_cost is None or tokens < min(COMPARED_TOKENS, _FIRST_COMPARED << self._comparisons):
            return False
        seconds = self._comparison_seconds or self.costs.rates.draft_pass
        return free or 0.0 < seconds < _COMPARISON_SHARE * COMPARED_TOKENS * self.plain_cost

    def learn_matches(self, matches: Sequence[bool | None], seconds: float) -> None:
        """Learn whether the draft would have proposed each of the next tokens, which plain steps have decoded.

        None: it would have proposed nothing. `seconds`: that the comparison took.
        """
        self._comparisons += 1
        self._comparison_seconds = seconds
        if self.acceptance.learn_matches(matches):
            self._expect_change()

    def begin_request(self) -> None:
        """Take note that another text begins: its acceptance and its locality may differ."""
        self.acceptance.end_comparison()
        self._comparisons, self._comparison_seconds = 0, 0.0
        self.learn_reported()
        self._pending.clear()
        self.acceptance.forget(_KEPT_OF_OTHER_TEXT)
        self.costs.begin_text()
        self._expect_change()

    def report(self, step: StepReport) -> None:
        """Report a finished step. It is learned from at once if K may change, else when `learn_reported` is called.

        Within a trial the next step begins before this one is learned from, as it does with a settled K: otherwise a
        trial would measure steps that begin too late.
        """
        self.learn_reported()
        self._reported = step
        if self._trial_steps_left == 1 or (not self._trial_steps_left and self._steps_with_settled < _NEW_STEPS):
            self.learn_reported()

    def learn_reported(self) -> None:
        """Learn from the step that was reported last, if that was not done yet."""
        step, self._reported = self._reported, None
        if step is not None:
            self.learn(step)

    def learn(self, step: StepReport) -> None:
        """Learn from a finished step; may change `current`, unless the step had another K."""
        self.steps += 1
        self._steps_with_current += step.k == self.current
        self._steps_with_settled += step.k == self.settled
        self._steps_since_plain = self._steps_since_plain + 1 if step.k else 0
        if self._pending and not _alike(step, self._pending[0]):
            self._learn_together()
        self._pending.append(step)
        steady = step.k == self.current and not self._trial_steps_left and self._steps_with_settled > _NEW_STEPS
        together = _EFFORT / (_EFFORT_SHARE * max(step.seconds, 1e-9)) if steady else 1.0
        if len(self._pending) >= min(together, _MOST_TOGETHER):
            self._learn_together()

    def _learn_together(self) -> None:
        """Learn from the steps that wait for it, as from one, and choose K."""
        steps, self._pending = self._pending, []
        step, weight = _mean_report(steps), float(len(steps))
        if step.k:
            self.acceptance.end_comparison()
            changes = [self.acceptance.learn(report.drafted, report.accepted) for report in steps]
            if any(changes):
                self._expect_change()
        elif not self.acceptance.compared:
            self.acceptance.forget(_STEP_DECAY**weight)
        if self.costs.learn(step, weight, first=self._steps_with_current == 1):
            self._expect_change()
        if self.costs.known and step.k == self.current:
            self._spend(step, weight)
            self._choose()

    def _expect_change(self) -> None:
        """Try other lengths soon."""
        self._trial_gap, self._plain_gap = _STEPS_BETWEEN_TRIALS, _STEPS_UNTIL_PLAIN

    # ---- between runs

    def state(self) -> dict[str, Any]:
        """Return what was learned, as plain values for JSON."""
        acceptance = self.acceptance
        return {
            "lengths": list(self.lengths),
            "settled": self.settled,
            "reached": acceptance.reached.tolist(),
            "accepted": acceptance.accepted.tolist(),
            "asked": acceptance.asked,
            "proposed": acceptance.proposed,
            **self.costs.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Start from what another governor has learned, with less weight; return False if the state is unusable."""
        try:
            counts = np.array([state["reached"], state["accepted"]], dtype=float)
            asked, proposed = float(state["asked"]), float(state["proposed"])
            settled = int(state["settled"])
            most = len(self.acceptance.reached)
            valid = (
                list(state["lengths"]) == list(self.lengths)
                and counts.shape == (2, most)
                and bool(np.isfinite(counts).all() and (counts >= 0).all() and (counts[1] <= counts[0]).all())
                and 0 <= proposed <= asked < math.inf
                and settled in self._index
            )
            if not valid:
                return False
            self.costs.restore(state)
        except (KeyError, TypeError, ValueError, AttributeError):
            return False
        self.acceptance.reached, self.acceptance.accepted = counts
        self.acceptance.asked, self.acceptance.proposed = asked, proposed
        self.acceptance.forget(_KEPT_OF_OTHER_RUN)
        self.current = self.settled = settled
        self._first_budget = 0.5 * _FIRST_BUDGET
        return True

    # ---- decision

    def _choose(self) -> None:
        if self._trial_steps_left:
            self._trial_steps_left -= 1
            if self._trial_steps_left:
                estimates, settled = self.estimates(), self._index[self.settled]
                if self._deviations_worse(estimates, self._index[self.current], settled) < _HOPELESS:
                    return
                self._trial_steps_left = 0
        elif self._steps_with_current < _MIN_STEPS:
            return
        estimates = self.estimates()
        costs = estimates.costs
        near = self._ks <= 2 * self.settled + 2  # much longer drafts are chosen only after a trial
        allowed = near | (self._ks == self.current)
        allowed &= costs * (1 + _CAUTION * self._deviations(estimates, 0)) <= costs[0]
        safe = np.where(allowed, costs, np.inf)
        best, settled = int(safe.argmin()), self._index[self.settled]
        if safe[best] < (1 - _MIN_GAIN) * safe[settled]:
            if not settled:
                self._plain_gap = _STEPS_UNTIL_PLAIN
            settled, self._trial_gap = best, _STEPS_BETWEEN_TRIALS
            self._steps_with_settled = 0
        self.settled = self.lengths[settled]
        self.plain_cost = float(costs[0])
        choice = settled
        if self.lengths[settled] == self.current:
            trial = self._next_trial(estimates, near | (costs < costs[settled]), settled)
            if trial is not None:
                choice, self._trial_steps_left = trial, _TRIAL_STEPS
        if self.lengths[choice] != self.current:
            self.current, self._steps_with_current = self.lengths[choice], 0

    def _spend(self, step: StepReport, weight: float) -> None:
        """Add this step's share to the budget; subtract what it has lost, if it was a trial.

        A trial loses as much as its K is now believed to cost more. The step's own time would say little: it depends
        on the experts that this part of the text happens to miss.
        """
        if self._budget is None:
            self._budget = self._first_budget
        estimates, at, settled = self.estimates(), self._index[self.current], self._index[self.settled]
        now = float(estimates.costs[settled])
        longest = OUTLIER * (1 + step.accepted) * max(float(estimates.costs[0]), now) * (1 + step.k)
        seconds = min(step.seconds, longest)
        self._budget = min(_MAX_BUDGET, self._budget + TRIAL_SHARE * weight * seconds / now)
        if self._trial_steps_left:
            lost = float(estimates.tokens[at]) * max(0.0, float(estimates.costs[at]) - now)
            if step.disturbed:  # the draft has first read the tokens of plain steps
                lost += max(0.0, seconds - float(estimates.seconds[at]))
            if self._trial_steps_left == 1:  # the device waits for what is learned
                lost += _EFFORT
            self._budget = max(-_MAX_BUDGET, self._budget - lost / now)

    def _next_trial(self, estimates: Estimates, allowed: np.ndarray, settled: int) -> int | None:
        """Return the index of the K to try now; None if none is to be tried."""
        if (
            settled and self._steps_since_plain >= self._plain_gap
        ):  # whatever is believed: nothing may be slower than plain
            worse = self._deviations_worse(estimates, 0, settled)
            if worse <= 0.0 or (worse < _CERTAIN and (self._budget or 0.0) > 0.0):  # maybe into debt, paid off later
                self._plain_gap = min(_MAX_STEPS_BETWEEN_TRIALS, 2 * self._plain_gap)
                return 0
        if self._steps_with_current < self._trial_gap:
            return None
        # without drafts nothing shows that they would be right again: try one even if little is expected of it
        due = not settled and not self.acceptance.compared and self._steps_with_current >= _STEPS_WITHOUT_DRAFT
        if (trial := self._best_trial(estimates, allowed, settled, due=due)) is None:
            return None
        self._trial_gap = min(_MAX_STEPS_BETWEEN_TRIALS, 1.5 * self._trial_gap)
        return trial

    def _deviations_worse(self, estimates: Estimates, i: int, settled: int) -> float:
        """Return by how many standard deviations a K is more expensive than the settled one."""
        deviation = max(1e-3, float(self._deviations(estimates, settled)[i]))
        return math.log(float(estimates.costs[i]) / float(estimates.costs[settled])) / deviation

    def _best_trial(self, estimates: Estimates, allowed: np.ndarray, settled: int, *, due: bool) -> int | None:
        """Return the index of the K whose trial is worth most; None if no trial is worth its loss, unless one is due.

        A trial is worth what is expected to be saved afterwards, if its result changes the choice.
        """
        costs, now = estimates.costs, float(estimates.costs[settled])
        deviations = self._deviations(estimates, settled)
        best, best_value = None, -math.inf
        for i in np.flatnonzero(allowed).tolist():
            loss = _TRIAL_STEPS * float(estimates.tokens[i]) * max(0.0, float(costs[i]) / now - 1) + _EFFORT / now
            if i == settled or loss > (self._budget or 0.0):
                continue
            variance = float(deviations[i]) ** 2
            learned = variance / math.sqrt(variance + self._step_variance(estimates, i) / _TRIAL_STEPS)
            value = _HORIZON * expected_gain(math.log(float(costs[i]) / now), learned) - loss
            if value > best_value:
                best, best_value = i, value
        return best if due or best_value > _MIN_TRIAL_GAIN * _HORIZON else None

    def _step_variance(self, estimates: Estimates, i: int) -> float:
        """Return the variance of log cost(K) as one step measures it."""
        missing = float(estimates.steps.inputs[i, 1])
        loads = self.costs.load / float(estimates.seconds[i])
        return self.costs.noise + loads**2 * self.costs.dispersion * missing + (0.15 if i else 0.0)


class Governors:
    """Governors by number of sequences that run together: each number has costs of its own.

    Numbers up to the next power of two share a governor. `make` gets such a power and returns its governor, new or one
    that has learned before.
    """

    def __init__(self, make: Callable[[int], Governor]) -> None:
        self._make = make
        self._governors: dict[int, Governor] = {}

    def of(self, sequences: int) -> Governor:
        """Return the governor of steps of so many sequences."""
        size = 1 << (sequences - 1).bit_length()
        if size not in self._governors:
            self._governors[size] = self._make(size)
        return self._governors[size]

    def begin_request(self) -> None:
        """Take note that another text begins."""
        for governor in self._governors.values():
            governor.begin_request()

    def learn_reported(self) -> None:
        """Learn from the steps that were reported last, if that was not done yet."""
        for governor in self._governors.values():
            governor.learn_reported()


def _alike(first: StepReport, second: StepReport) -> bool:
    return (first.k, first.drafted, first.disturbed) == (second.k, second.drafted, second.disturbed)


def _mean_report(steps: Sequence[StepReport]) -> StepReport:
    """Return the mean of steps that are alike, without outliers."""
    longest = OUTLIER * median(step.seconds for step in steps)
    typical = [step for step in steps if step.seconds <= longest] or steps
    accepted, seconds, needed, missing = (
        sum(values) / len(typical)
        for values in zip(*((step.accepted, step.seconds, step.needed, step.missing) for step in typical), strict=True)
    )
    return replace(steps[0], accepted=accepted, seconds=seconds, needed=needed, missing=missing)


def expected_gain(mean: float, deviation: float) -> float:
    """Return the expectation of max(0, -x) for a normal x."""
    if deviation <= 0.0:
        return max(0.0, -mean)
    z = mean / deviation
    density, tail = math.exp(-z * z / 2) / math.sqrt(2 * math.pi), 0.5 * math.erfc(z / math.sqrt(2))
    return deviation * density - mean * tail


@dataclass(frozen=True, slots=True)
class Estimates:
    """Expected tokens and seconds of a step, by index of K."""

    tokens: np.ndarray  # [lengths]
    token_gradient: np.ndarray  # [lengths, positions], of log tokens by the acceptance rates
    steps: StepSeconds
    deviations: dict[int, np.ndarray] = field(default_factory=dict)  # by the index that costs are compared with

    @property
    def seconds(self) -> np.ndarray:
        """Seconds of a step."""
        return self.steps.seconds

    @property
    def costs(self) -> np.ndarray:
        """Seconds per token."""
        found: np.ndarray = self.seconds / self.tokens
        return found
