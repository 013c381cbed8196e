"""The governor: choose K, the number of draft tokens of each step, so that speculation never costs time.

`-k auto` asks it before every step and reports every finished step to it. docs/governor.md explains the formulas:

    cost(K)    = seconds(K) / tokens(K)                     seconds per output token, which the governor minimizes
    tokens(K)  = 1 + p (a_1 + a_1 a_2 + .. + a_1 .. a_K)    p: share of steps with a draft, a_i: acceptance by position
    seconds(K) = base + p (row K + e_K) + load m_K + expert n(K + 1)      e_K: what this K differs by, as measured
    m_K        = s_K n(K + 1)                               n: experts that rows need, s_K: share that is missing

All of it is learned from finished steps. A Kalman filter tracks each learned vector: what the values of K have in
common drifts quickly, what sets one K apart drifts slowly, so a change seen at one K moves the estimates of all. The
formulas are only the prior; a K that was measured is judged by its own steps. A K that may be better than the present
one is tried for a few steps if the time that the trial may lose fits in a budget. Plain decoding is tried again and
again in any case.

Nothing here reads a clock, a device or a random number: the same reports lead to the same choices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from spmoe.predict.latency import expected_experts

LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 15)  # values of K that are considered
USUAL = 4  # K that memory, threads and profiles are planned for

# trials
TRIAL_SHARE = 0.015  # share of the time that trials may lose
_FIRST_BUDGET = 3.0  # further time that the trials of a new governor may lose, in tokens of plain decoding
_MAX_BUDGET = 4.0  # largest budget that is saved up, in tokens of plain decoding
_TRIAL_STEPS = 3
_HOPELESS = 1.5  # standard deviations that a K is worse by when its trial ends early
_CERTAIN = 2.5  # the same of plain decoding when it is not tried again
_STEPS_BETWEEN_TRIALS = 4  # after a trial that changed nothing; half as many again after the next, and so on
_STEPS_UNTIL_PLAIN = 8  # of drafting until plain decoding is tried again; twice as many the next time, and so on
_STEPS_WITHOUT_DRAFT = 24  # after which one is tried even if little is expected of it
_MAX_STEPS_BETWEEN_TRIALS = 64
_NEW_STEPS = 8  # with one K, after which it is considered only now and then whether to change it
_STEPS_BETWEEN_CHOICES = 4  # then; a choice takes a tenth of a millisecond
_MIN_STEPS = 2  # steps with one K before another one is chosen
_MIN_GAIN = 0.02  # expected gain for which K changes
_MIN_TRIAL_GAIN = 0.005  # expected gain of a trial, per token of the horizon
_CAUTION = 0.35  # standard deviations by which drafting must beat plain decoding
_HORIZON = 64.0  # tokens for which a better K is expected to stay better

# seconds
_RATES = 4  # base, load, row, expert
_EXPERT_SHARE = 0.3  # prior: share of compute that grows with the experts that a step needs
_NOISE = 0.1  # relative standard deviation of the seconds of a step whose missing experts are known
_OUTLIER = 3.0  # ratio of measured to expected seconds from which on a step counts as an outlier
_OUTLIERS_OF_A_CHANGE = 3  # outliers in a row that are no outliers but a change
_COST_DRIFT = 0.01  # relative change of base, load and row per step
_OWN_ERROR = 0.1  # standard deviation of e_K, relative to a step
_OWN_DRIFT = 0.005  # change of e_K per step, relative to a step
# missing experts
_SHARE_EXPONENT = 0.15  # prior: the missing share grows with rows to this power
_SHARE_DRIFT = 0.07  # relative change of all shares per step
_SHARE_SLOPE = 0.18  # relative standard deviation of the shares' dependence on log rows
_SHARE_ERROR = 0.08  # relative standard deviation of one share beside that
_SHARE_OWN_DRIFT = 0.012  # the same of one share alone
_OVERDISPERSION = 1.5  # variance of the number of missing experts, relative to independent ones
_ROUTING_DECAY = 0.9  # weight of the experts that a step needed, per later step
# acceptance
_DRAFT_DECAY = 0.98  # weight of an acceptance result, per later draft
_STEP_DECAY = 0.992  # the same, per later step without a draft
_PRIOR_DRAFTS = 2.0  # drafts that the prior of an acceptance rate counts for
_PRIOR_ACCEPTANCE = 0.7
# changes
_CHANGE_DECAY = 0.8  # of the sum that detects changes
_CHANGE_LIMIT = 3.2  # standard deviations of that sum which are a change
_KEPT_AT_CHANGE = 0.2  # weight of what was learned before a change
_KEPT_OF_OTHER_TEXT = 0.5  # weight of acceptance in earlier requests
_CHANGE_OF_TEXT = 0.3  # variance that a new text adds to the differences of missing shares, relative to the prior
_CHANGE_OF_LEVEL = 0.5  # relative change of all missing shares from one text to the next
_OTHER_RUN = 0.3  # relative change of costs and shares from one run to the next


@dataclass(frozen=True, slots=True)
class StepReport:
    """One finished step of a sequence that did not read a prompt."""

    k: int  # draft tokens that were asked for
    drafted: int  # draft tokens that were proposed
    accepted: int
    seconds: float  # since the end of the step before, without the time between steps
    needed: float  # routed experts, over all layers
    missing: float  # of these, experts that were loaded for this step
    disturbed: bool = False  # contains work of another K, such as reading tokens that the draft has not seen


@dataclass(frozen=True, slots=True)
class CostPrior:
    """Costs that are known before the first step, in seconds."""

    base: float  # a step of one row, every expert resident
    load: float  # one missing expert
    row: float  # one draft token: its draft pass, and its row of the verification


class LinearFilter:
    """Kalman filter of a vector that drifts: `condition` learns from one measured linear combination of it."""

    def __init__(self, mean: np.ndarray, covariance: np.ndarray) -> None:
        self.mean = mean  # [n]
        self.covariance = covariance  # [n, n]

    def drift(self, covariance: np.ndarray) -> None:
        """Let the vector change by noise of this covariance."""
        self.covariance = self.covariance + covariance

    def condition(self, inputs: np.ndarray, value: float, variance: float) -> None:
        """Learn that `inputs` @ vector is `value`, measured with this variance."""
        gain = self.covariance @ inputs
        total = variance + float(inputs @ gain)
        if total > 0.0:
            self.mean = self.mean + gain * ((value - float(inputs @ self.mean)) / total)
            self.covariance = self.covariance - np.outer(gain, gain / total)

    def variance(self, inputs: np.ndarray) -> float:
        """Return the variance of `inputs` @ vector."""
        return max(0.0, float(inputs @ self.covariance @ inputs))

    def state(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {"mean": self.mean.tolist(), "covariance": self.covariance.tolist()}

    @classmethod
    def restored(cls, state: Mapping[str, Any], size: int) -> Self:
        """Return the filter of a state; raise ValueError if its values are unusable."""
        mean, covariance = np.array(state["mean"], dtype=float), np.array(state["covariance"], dtype=float)
        if mean.shape != (size,) or covariance.shape != (size, size):
            raise ValueError("the state has another size")
        if not (np.isfinite(mean).all() and np.isfinite(covariance).all() and (covariance.diagonal() >= 0).all()):
            raise ValueError("the state has values that are no numbers")
        return cls(mean, covariance)


class ChangeDetector:
    """Decaying sum of normalized deviations; reports when it is too large to be chance."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._limit = _CHANGE_LIMIT / math.sqrt(1 - _CHANGE_DECAY**2)

    def add(self, deviation: float) -> bool:
        """Add a deviation in standard deviations; return whether something has changed, and start again if so."""
        self._sum = _CHANGE_DECAY * self._sum + max(-3.0, min(3.0, deviation))
        changed = abs(self._sum) > self._limit
        if changed:
            self._sum = 0.0
        return changed


class AcceptanceModel:
    """Acceptance rate of every draft position, given that it is reached, and the share of drafts that exist."""

    def __init__(self, most: int) -> None:
        self.reached = np.zeros(most)  # drafts that reached each position, decayed
        self.accepted = np.zeros(most)
        self.asked = self.proposed = 0.0
        self._change = ChangeDetector()
        self._positions = np.arange(most)

    def learn(self, drafted: int, accepted: int) -> bool:
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
        self.reached = _DRAFT_DECAY * self.reached + (self._positions < min(drafted, accepted + 1))
        self.accepted = _DRAFT_DECAY * self.accepted + (self._positions < accepted)
        return changed

    def forget(self, kept: float) -> None:
        """Reduce the weight of everything counted so far."""
        self.reached, self.accepted = kept * self.reached, kept * self.accepted
        self.asked *= kept
        self.proposed *= kept

    @property
    def proposal_rate(self) -> float:
        """Share of steps that have a draft, if one is asked for."""
        return (self.proposed + 1.0) / (self.asked + 1.0)

    def rates(self) -> np.ndarray:
        """Return the acceptance rate of each position, given that it is reached."""  # [positions]
        pooled = (self.accepted.sum() + _PRIOR_DRAFTS * _PRIOR_ACCEPTANCE) / (self.reached.sum() + _PRIOR_DRAFTS)
        rates: np.ndarray = (self.accepted + _PRIOR_DRAFTS * pooled) / (self.reached + _PRIOR_DRAFTS)
        return rates

    def variances(self, rates: np.ndarray) -> np.ndarray:
        """Return the variance of each rate."""
        found: np.ndarray = np.maximum(rates * (1 - rates), 0.02) / (_PRIOR_DRAFTS + self.reached)
        return found


class RoutingModel:
    """Number of experts that several rows need: that of even routing over as many experts as this text seems to use."""

    def __init__(self, layers: int, experts_per_layer: int, top_k: int) -> None:
        self.in_use = float(experts_per_layer)  # from top_k, if all rows share their experts, to all experts
        self._layers, self._most, self._top_k = layers, float(experts_per_layer), float(top_k)
        self._weight = 0.0

    def learn(self, rows: int, needed: float) -> None:
        """Count a step of several rows that needed so many experts, over all layers."""
        low, high, each = self._top_k, self._most, needed / self._layers
        for _ in range(8):  # `needed` grows with the experts in use
            middle = (low + high) / 2
            low, high = (middle, high) if expected_experts(middle, self._top_k, rows) < each else (low, middle)
        self._weight = _ROUTING_DECAY * self._weight + 1
        self.in_use += (high - self.in_use) / self._weight

    def needed(self, rows: np.ndarray) -> np.ndarray:
        """Return the experts that so many rows need, over all layers."""
        found: np.ndarray = self._layers * self.in_use * (1 - (1 - self._top_k / self.in_use) ** rows)
        return found


class Governor:
    """Chooser of K, updated after every step; `current` is the K of the next step."""

    def __init__(
        self, most: int, layers: int, experts_per_layer: int, top_k: int, prior: CostPrior | None = None
    ) -> None:
        self.lengths = tuple(k for k in LENGTHS if k <= most)
        self.current = 0
        self.acceptance = AcceptanceModel(most)
        self._ks = np.array(self.lengths)
        self._index = {k: i for i, k in enumerate(self.lengths)}
        log_rows = np.log(self._ks + 1.0)
        # prior covariance of the missing shares, beside what they have in common, relative to their square
        self._share_differences = _SHARE_SLOPE**2 * np.outer(log_rows, log_rows) + _SHARE_ERROR**2 * np.eye(
            len(log_rows)
        )
        self._counts_needed = False  # whether steps report the experts that they need
        self._routing = RoutingModel(layers, experts_per_layer, top_k)
        self._shares: LinearFilter | None = None  # of missing experts, by K
        self._costs: LinearFilter | None = None  # base, load, row, expert, then e_K by K
        self._noise = _NOISE**2
        self._outliers = 0
        self._change = ChangeDetector()
        self._plain_steps: list[StepReport] = []  # not learned from yet
        self._settled = 0  # the K that is not a trial
        self._trial_left = 0  # steps
        self._steps_at = 0  # steps since K changed
        self._budget: float | None = None  # seconds that trials may lose; None: not known yet
        self._trial_gap = float(_STEPS_BETWEEN_TRIALS)  # steps between two trials
        self._plain_gap = _STEPS_UNTIL_PLAIN  # steps without plain decoding after which it is tried
        self._since_plain = 0
        self._first_budget = _FIRST_BUDGET
        self._settled_cost = 0.0  # seconds per token with the settled K
        self.plain_cost: float | None = None  # expected seconds per token of plain decoding; None: not known yet
        self.steps = 0  # that were learned from
        if prior is not None:
            self._start_costs(prior.base, prior.load, prior.row, prior.base)

    # ---- estimates

    @property
    def _known_costs(self) -> LinearFilter:
        if self._costs is None:
            raise ValueError("no step was reported yet, so nothing is known of any K")
        return self._costs

    def estimates(self) -> Estimates:
        """Return what is expected of every K."""
        rates, rate = self.acceptance.rates(), self.acceptance.proposal_rate
        chances = rate * np.cumprod(rates)
        totals = np.concatenate(([0.0], np.cumsum(chances)))
        tokens = 1 + totals[self._ks]
        # derivative of log tokens(K) by each rate: everything from its position on is proportional to it
        later = (totals[self._ks][:, None] - totals[None, :-1]).clip(min=0.0)
        token_gradient = later / rates / tokens[:, None]
        needed = self._routing.needed(self._ks + 1.0)
        shares = self._shares.mean if self._shares is not None else np.zeros(len(self._ks))
        missing = needed * shares
        missing = rate * missing + (1 - rate) * missing[0]
        inputs = np.zeros((len(self._ks), _RATES + len(self._ks)))
        inputs[:, 0], inputs[:, 1], inputs[:, 2] = 1.0, missing, rate * self._ks
        inputs[:, 3] = rate * needed + (1 - rate) * needed[0] if self._counts_needed else 0.0
        inputs[:, _RATES:] = rate * np.eye(len(self._ks))
        inputs[:, _RATES] += 1 - rate
        costs = self._known_costs.mean
        plain = inputs[:, :_RATES] @ costs[:_RATES]
        seconds = np.maximum(inputs @ costs, 0.1 * plain + 1e-9)
        return Estimates(tokens, seconds, token_gradient, inputs, needed)

    def cost(self, k: int) -> float:
        """Return the expected seconds per token with K draft tokens."""
        return float(self.estimates().costs[self._index[k]])

    def seconds(self, k: int) -> float:
        """Return the expected seconds of a step with K draft tokens."""
        return float(self.estimates().seconds[self._index[k]])

    @property
    def settled(self) -> int:
        """The K that is believed to be the best; `current` differs from it during a trial."""
        return self._settled

    def tokens(self, k: int) -> float:
        """Return the expected tokens of a step with K draft tokens."""
        return 1 + self.acceptance.proposal_rate * float(np.cumprod(self.acceptance.rates()[:k]).sum())

    def _deviations(self, found: Estimates, other: int) -> np.ndarray:
        """Return the standard deviation of log(cost(K) / cost(other)), for every K."""
        tokens = found.token_gradient - found.token_gradient[other]
        rates = self.acceptance.rates()
        variance = (tokens**2) @ self.acceptance.variances(rates)
        relative = found.inputs / found.seconds[:, None]
        relative = relative - relative[other]
        variance = variance + ((relative @ self._known_costs.covariance) * relative).sum(axis=1)
        if self._shares is not None:
            load = self._known_costs.mean[1] * self.acceptance.proposal_rate
            part = np.diag(load * found.needed / found.seconds)
            part = part - part[other]
            variance = variance + ((part @ self._shares.covariance) * part).sum(axis=1)
        deviations: np.ndarray = np.sqrt(np.maximum(variance, 0.0))
        return deviations

    # ---- learning

    def begin_request(self) -> None:
        """Take note that another text begins: its acceptance and its locality may differ."""
        self._plain_steps.clear()
        self.acceptance.forget(_KEPT_OF_OTHER_TEXT)
        if self._shares is not None:
            mean = self._shares.mean
            differences = _CHANGE_OF_TEXT * float(mean.mean()) ** 2 * self._share_differences
            self._shares.drift(_CHANGE_OF_LEVEL**2 * np.outer(mean, mean) + differences)
        self._expect_change()

    def learn(self, step: StepReport) -> None:
        """Record a finished step; may change `current`."""
        self.steps += 1
        self._steps_at += 1
        self._since_plain = self._since_plain + 1 if step.k else 0
        weight = 1.0
        if not step.k and not self.current and not self._trial_left and self._steps_at > _NEW_STEPS:
            self._plain_steps.append(step)  # plain steps may be short, so they are learned from together
            if len(self._plain_steps) < _STEPS_BETWEEN_CHOICES:
                return
            step, weight = _mean_report(self._plain_steps), float(len(self._plain_steps))
        self._plain_steps.clear()
        if step.k:
            if self.acceptance.learn(step.drafted, step.accepted):
                self._expect_change()
        else:
            self.acceptance.forget(_STEP_DECAY**weight)
        if 0.0 < step.seconds < math.inf and step.drafted in self._index:
            self._learn_missing(step, weight)
            if not step.disturbed:
                self._learn_seconds(step, weight)
        if self._costs is not None:
            self._spend(step, weight)
            self._choose()

    def _learn_missing(self, step: StepReport, weight: float) -> None:
        if step.needed <= 0:  # every expert is resident, and nobody asks the host for them
            return
        self._counts_needed = True
        if step.drafted:
            self._routing.learn(step.drafted + 1, step.needed)
        share = step.missing / step.needed
        if self._shares is None:
            if not step.missing:
                return
            scale = share**2
            covariance = scale * (0.5 + self._share_differences)
            self._shares = LinearFilter(share * (self._ks + 1.0) ** _SHARE_EXPONENT, covariance)
            return
        filter, at = self._shares, self._index[step.drafted]
        mean = filter.mean
        level = max((float(mean[at]) + share) / 2, 0.25 / step.needed)
        drift = _SHARE_DRIFT**2 * np.outer(mean, mean) + np.diag((_SHARE_OWN_DRIFT * mean) ** 2)
        filter.drift(weight * drift)
        variance = _OVERDISPERSION * level * max(0.05, 1 - level) / step.needed / weight
        if self._steps_at == 1:  # the slots hold what another K has left
            variance *= 4
        inputs = np.zeros(len(self._ks))
        inputs[at] = 1.0
        filter.condition(inputs, share, variance)
        filter.mean = np.clip(filter.mean, 0.0, 1.0)

    def _inputs(self, step: StepReport) -> np.ndarray:
        inputs = np.zeros(_RATES + len(self._ks))
        inputs[:_RATES] = 1.0, step.missing, step.drafted, step.needed
        inputs[_RATES + self._index[step.drafted]] = 1.0
        return inputs

    def _learn_seconds(self, step: StepReport, weight: float) -> None:
        if self._costs is None:
            each = step.seconds / (1 + 0.1 * step.drafted)
            loads = 0.5 * each if step.missing else 0.0
            per_load = loads / step.missing if step.missing else 0.1 * each
            self._start_costs(each - loads, per_load, 0.1 * each, each)
            return
        costs, inputs = self._costs, self._inputs(step)
        expected = max(0.1 * float(costs.mean[:_RATES] @ inputs[:_RATES]), float(inputs @ costs.mean), 1e-9)
        ratio = step.seconds / expected
        if not 1 / _OUTLIER < ratio < _OUTLIER:
            self._outliers += 1
            if self._outliers < _OUTLIERS_OF_A_CHANGE:
                return
            costs.mean, costs.covariance = ratio * costs.mean, ratio**2 * costs.covariance
            self._widen(0.3)
            self._outliers = 0
            return
        self._outliers = 0
        deviation = math.log(ratio)
        if self._change.add(deviation / math.sqrt(self._noise / weight + costs.variance(inputs) / expected**2)):
            self._widen(0.3)
        self._noise += 0.05 * (min(weight * deviation * deviation, 9 * self._noise) - self._noise)
        self._noise = max(0.02**2, min(0.3**2, self._noise))
        drift = np.full(len(inputs), _OWN_DRIFT * expected)
        drift[:_RATES] = _COST_DRIFT * expected / (1.0 + inputs[:_RATES])
        costs.drift(weight * np.diag(drift**2))
        costs.condition(inputs, step.seconds, self._noise * expected**2 / weight)
        for i in range(_RATES):  # no cost is negative
            if costs.mean[i] < 0.0:
                single = np.zeros(len(inputs))
                single[i] = 1.0
                costs.condition(single, 0.0, abs(float(costs.covariance[i, i])))
                costs.mean[i] = max(0.0, costs.mean[i])

    def _start_costs(self, compute: float, load: float, row: float, seconds: float) -> None:
        """Start from a step of plain decoding that takes `seconds`, of which `compute` without loads."""
        experts = float(self._routing.needed(np.ones(1))[0])
        rates = [(1 - _EXPERT_SHARE) * compute, load, row, _EXPERT_SHARE * compute / experts]
        deviations = [0.5 * seconds, 0.5 * load, 0.2 * seconds, _EXPERT_SHARE * seconds / experts]
        own = len(self._ks)
        covariance = np.diag(np.array(deviations + [_OWN_ERROR * seconds] * own) ** 2)
        self._costs = LinearFilter(np.array(rates + [0.0] * own), covariance)

    def _widen(self, share: float) -> None:
        costs = self._known_costs
        common = np.zeros(len(costs.mean))
        common[:_RATES] = share * costs.mean[:_RATES]
        self._expect_change()
        costs.drift(np.outer(common, common) + np.diag((0.5 * common) ** 2))

    def _expect_change(self) -> None:
        """Try other lengths soon."""
        self._trial_gap, self._plain_gap = _STEPS_BETWEEN_TRIALS, _STEPS_UNTIL_PLAIN

    # ---- between runs

    def state(self) -> dict[str, Any]:
        """Return what was learned, as plain values for JSON."""
        acceptance, costs, shares = self.acceptance, self._costs, self._shares
        return {
            "lengths": list(self.lengths),
            "settled": self._settled,
            "experts_in_use": self._routing.in_use,
            "reached": acceptance.reached.tolist(),
            "accepted": acceptance.accepted.tolist(),
            "asked": acceptance.asked,
            "proposed": acceptance.proposed,
            "costs": None if costs is None else costs.state(),
            "shares": None if shares is None else shares.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> bool:
        """Start from what another governor has learned, with less weight; return False if the state is unusable."""
        try:
            costs = LinearFilter.restored(state["costs"], _RATES + len(self._ks))
            shares = None if state["shares"] is None else LinearFilter.restored(state["shares"], len(self._ks))
            counts = np.array([state["reached"], state["accepted"]], dtype=float)
            asked, proposed, in_use = (float(state[name]) for name in ("asked", "proposed", "experts_in_use"))
            settled = int(state["settled"])
        except (KeyError, TypeError, ValueError):
            return False
        most = len(self.acceptance.reached)
        valid = (
            list(state["lengths"]) == list(self.lengths)
            and counts.shape == (2, most)
            and bool(np.isfinite(counts).all() and (counts >= 0).all() and (counts[1] <= counts[0]).all())
            and 0 <= proposed <= asked < math.inf
            and 1 <= in_use < math.inf
            and settled in self._index
        )
        if not valid:
            return False
        self._costs, self._shares = costs, shares
        self._widen(_OTHER_RUN)
        if shares is not None:
            shares.drift(
                np.outer(shares.mean, shares.mean) * _OTHER_RUN**2 + np.diag((0.5 * _OTHER_RUN * shares.mean) ** 2)
            )
        self.acceptance.reached, self.acceptance.accepted = counts
        self.acceptance.asked, self.acceptance.proposed = asked, proposed
        self.acceptance.forget(_KEPT_AT_CHANGE)
        self._routing.in_use = in_use
        self.current = self._settled = settled
        self._first_budget = 0.5 * _FIRST_BUDGET
        return True

    # ---- decision

    def _choose(self) -> None:
        if self._trial_left:
            self._trial_left -= 1
            if self._trial_left:
                found, settled = self.estimates(), self._index[self._settled]
                if self._deviations_worse(found, self._index[self.current], settled) < _HOPELESS:
                    return
                self._trial_left = 0
        else:
            seldom = self.current > 0 and self._steps_at > _NEW_STEPS  # plain steps are reported together by then
            if self._steps_at < _MIN_STEPS or (seldom and self._steps_at % _STEPS_BETWEEN_CHOICES):
                return
        found = self.estimates()
        costs = found.costs
        near = self._ks <= 2 * self._settled + 2  # much longer drafts are chosen only after a trial
        allowed = near | (self._ks == self.current)
        cautious = np.where(allowed, costs * (1 + _CAUTION * self._deviations(found, 0)), np.inf)
        best, settled = int(cautious.argmin()), self._index[self._settled]
        if cautious[best] < (1 - _MIN_GAIN) * cautious[settled]:
            if not settled:
                self._plain_gap = _STEPS_UNTIL_PLAIN
            settled, self._trial_gap = best, _STEPS_BETWEEN_TRIALS
        self._settled, self._settled_cost = self.lengths[settled], float(costs[settled])
        self.plain_cost = float(costs[0])
        choice = settled
        if self.lengths[settled] == self.current:
            trial = self._next_trial(found, near | (costs < costs[settled]), settled)
            if trial is not None:
                choice, self._trial_left = trial, _TRIAL_STEPS
        if self.lengths[choice] != self.current:
            self.current, self._steps_at = self.lengths[choice], 0

    def _spend(self, step: StepReport, weight: float) -> None:
        """Add this step's share to the budget; subtract what it has lost, if it was a trial."""
        if self.plain_cost is None or self._budget is None:
            self.plain_cost = self._settled_cost = self.cost(0)
            self._budget = self._first_budget * self.plain_cost
        longest = _OUTLIER * (1 + step.accepted) * max(self.plain_cost, self._settled_cost) * (1 + step.k)
        seconds = min(step.seconds, longest)
        self._budget = min(_MAX_BUDGET * self._settled_cost, self._budget + TRIAL_SHARE * weight * seconds)
        if self._trial_left:
            self._budget -= max(0.0, seconds - self.tokens(step.k) * self._settled_cost)

    def _next_trial(self, found: Estimates, allowed: np.ndarray, settled: int) -> int | None:
        """Return the index of the K to try now; None if none is to be tried."""
        if settled and self._since_plain >= self._plain_gap:  # whatever is believed: nothing may be slower than plain
            worse = self._deviations_worse(found, 0, settled)
            if worse <= 0.0 or (worse < _CERTAIN and (self._budget or 0.0) > 0.0):  # maybe into debt, paid off later
                self._plain_gap = min(_MAX_STEPS_BETWEEN_TRIALS, 2 * self._plain_gap)
                return 0
        if self._steps_at < self._trial_gap:
            return None
        # without drafts nothing shows that they would be right again: try one even if little is expected of it
        due = not settled and self._steps_at >= _STEPS_WITHOUT_DRAFT
        if (trial := self._best_trial(found, allowed, settled, due=due)) is None:
            return None
        self._trial_gap = min(_MAX_STEPS_BETWEEN_TRIALS, 1.5 * self._trial_gap)
        return trial

    def _deviations_worse(self, found: Estimates, i: int, settled: int) -> float:
        """Return by how many standard deviations a K is more expensive than the settled one."""
        deviation = max(1e-3, float(self._deviations(found, settled)[i]))
        return math.log(float(found.costs[i]) / float(found.costs[settled])) / deviation

    def _best_trial(self, found: Estimates, allowed: np.ndarray, settled: int, *, due: bool) -> int | None:
        """Return the index of the K whose trial is worth most; None if no trial is worth its loss, unless one is due.

        A trial is worth what is expected to be saved afterwards, if its result changes the choice.
        """
        costs, now = found.costs, float(found.costs[settled])
        deviations = self._deviations(found, settled)
        best, best_value = None, -math.inf
        for i in np.flatnonzero(allowed).tolist():
            loss = _TRIAL_STEPS * float(found.tokens[i]) * max(0.0, float(costs[i]) / now - 1)
            if i == settled or loss * now > (self._budget or 0.0):
                continue
            variance = float(deviations[i]) ** 2
            learned = variance / math.sqrt(variance + self._step_variance(found, i) / _TRIAL_STEPS)
            value = _HORIZON * expected_gain(math.log(float(costs[i]) / now), learned) - loss
            if value > best_value:
                best, best_value = i, value
        return best if due or best_value > _MIN_TRIAL_GAIN * _HORIZON else None

    def _step_variance(self, found: Estimates, i: int) -> float:
        """Return the variance of log cost(K) as one step measures it."""
        missing = float(found.inputs[i, 1])
        loads = float(self._known_costs.mean[1]) / float(found.seconds[i])
        return self._noise + loads**2 * _OVERDISPERSION * missing + (0.15 if i else 0.0)


def _mean_report(steps: Sequence[StepReport]) -> StepReport:
    """Return the mean of steps without a draft."""
    seconds, needed, missing = (
        sum(values) / len(steps) for values in zip(*((s.seconds, s.needed, s.missing) for s in steps), strict=True)
    )
    return StepReport(0, 0, 0, seconds, needed, missing)


def expected_gain(mean: float, deviation: float) -> float:
    """Return the expectation of max(0, -x) for a normal x."""
    if deviation <= 0.0:
        return max(0.0, -mean)
    z = mean / deviation
    density, tail = math.exp(-z * z / 2) / math.sqrt(2 * math.pi), 0.5 * math.erfc(z / math.sqrt(2))
    return deviation * density - mean * tail


@dataclass(frozen=True, slots=True)
class Estimates:
    """Expected tokens and seconds of a step, by index of K, and their derivatives."""

    tokens: np.ndarray  # [lengths]
    seconds: np.ndarray  # [lengths]
    token_gradient: np.ndarray  # [lengths, positions], of log tokens by the acceptance rates
    inputs: np.ndarray  # [lengths, costs], of seconds by the costs
    needed: np.ndarray  # [lengths], experts

    @property
    def costs(self) -> np.ndarray:
        """Seconds per token."""
        found: np.ndarray = self.seconds / self.tokens
        return found
