"""The model of costs that K, the cutoff and prefetch admission share; all of it is learned from finished steps.

`CostModel` expects of a step that drafts K tokens

    seconds(K) = base + p (row K + e_K) + load m_K + expert n(K + 1)      e_K: what this K differs by, as measured
    m_K        = s_K n(K + 1)                               n: experts that rows need, s_K: share that is missing

p is the share of steps that have a draft. A Kalman filter tracks each learned vector: what the values of K have in
common drifts quickly, what sets one K apart drifts slowly, so a change seen at one K moves the estimates of all. The
formulas are only the prior; a K that was measured is judged by its own steps.

`Rates` are the times of a step's parts: a draft pass, a verified layer, a copy of an expert, and how busy the link is.

Nothing here reads a clock, a device or a random number: the same reports lead to the same estimates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np

from spmoe.predict.latency import expected_experts

# seconds
_COEFFICIENTS = 4  # base, load, row, expert
_EXPERT_SHARE = 0.3  # prior: share of compute that grows with the experts that a step needs
_NOISE = 0.1  # relative standard deviation of the seconds of a step whose missing experts are known
OUTLIER = 3.0  # ratio of measured to expected seconds from which on a step counts as an outlier
_OUTLIERS_OF_A_CHANGE = 3  # outliers in a row that are no outliers but a change
_COST_DRIFT = 0.01  # relative change of base, load and row per step
_OWN_ERROR = 0.1  # standard deviation of e_K, relative to a step
_OWN_DRIFT = 0.005  # change of e_K per step, relative to a step
# missing experts
_SHARE_EXPONENT = 0.1  # prior: the missing share grows with rows to this power
_SHARE_LEVEL = 0.7  # relative standard deviation of all shares after the first step
_SHARE_DRIFT = 0.07  # relative change of all shares per step
_SHARE_SLOPE = 0.08  # relative standard deviation of the shares' dependence on log rows
_SHARE_ERROR = 0.04  # relative standard deviation of one share beside that
_SHARE_OWN_DRIFT = 0.012  # the same of one share alone
_LEAST_SHARE = 1e-5
_FEW_MISSING = 0.5  # experts
_DISPERSION = 1.5  # prior: variance of the number of missing experts, relative to independent ones
_MOST_DISPERSION = 12.0
_DISPERSION_RATE = 0.05  # weight of one step's deviation in that variance
_ROUTING_DECAY = 0.9  # weight of the experts that a step needed, per later step
# changes
_CHANGE_DECAY = 0.8  # of the sum that detects changes
_CHANGE_LIMIT = 3.2  # standard deviations of that sum which are a change
_CHANGE_OF_TEXT = 0.3  # variance that a new text adds to the differences of missing shares, relative to the prior's
_CHANGE_OF_LEVEL = 0.5  # relative change of all missing shares from one text to the next
_WIDER = 0.3  # relative uncertainty of costs that a change adds
_OTHER_RUN = 0.3  # relative change of costs and shares from one run to the next
# rates
_RATE_DECAY = 0.9  # weight of a step's times, per later step
_LOAD_DRIFT = 1.02  # largest growth of a load's time per step
_LINK_BOUND = 0.8  # share of a step in which the link is busy, from which on the step shows how fast loads are
_MIN_LOADS = 4  # of a step that says how fast loads are


@dataclass(frozen=True, slots=True)
class StepReport:
    """One finished step of a sequence that did not read a prompt."""

    k: int  # draft tokens that were asked for
    drafted: int  # draft tokens that were proposed
    accepted: float
    seconds: float  # since the end of the step before, without the time between steps
    needed: float  # routed experts, over all layers
    missing: float  # of these, experts that were loaded for this step, or computed on the CPU
    disturbed: bool = False  # contains other work, such as reading tokens that the draft has not seen
    verify_seconds: float = 0.0  # of `seconds`; 0: not measured
    stall_seconds: float = 0.0  # of `verify_seconds`, compute waited for experts
    demanded: int = 0  # of `missing`, experts that were loaded only when a router had asked for them
    computed: int = 0  # of `missing`, experts that were computed on the CPU


@dataclass(frozen=True, slots=True)
class CostPrior:
    """Costs that are known before the first step, in seconds."""

    base: float  # a step of one row, every expert resident
    load: float  # one missing expert
    row: float  # one draft token: its draft pass, and its row of the verification


@dataclass(slots=True)
class Rates:
    """Times of a step's parts, in seconds, as decayed means; 0: not known yet."""

    load: float = 0.0  # one copy of an expert
    draft_pass: float = 0.0
    layer: float = 0.0  # one verified layer, as far as the link has nothing to do that the layer waits for
    busy: float = 0.0  # share of the verification in which the link copies experts that the step needs

    @classmethod
    def of(cls, prior: CostPrior | None, layers: int) -> Self:
        """Return the rates that a prior knows."""
        return cls() if prior is None else cls(prior.load, prior.row, prior.base / layers)

    def learn(self, step: StepReport, layers: int) -> None:
        """Take note of a step, if its parts were measured."""
        if not 0.0 < step.verify_seconds <= step.seconds < math.inf:
            return
        loads = step.missing - step.computed
        if loads >= _MIN_LOADS:
            longest = step.seconds / loads  # a copy cannot have taken longer
            if not self.load or longest < self.load:
                self.load = longest
            elif self.load > _LINK_BOUND * longest:  # the link was busy all the time, so it may have become slower
                self.load = min(_LOAD_DRIFT * self.load, longest)
        compute = max(0.0, step.verify_seconds - step.stall_seconds)
        hidden = max(0.0, step.demanded * self.load - step.stall_seconds)  # copies beside compute
        self.layer = _mean(self.layer, max(0.0, compute - hidden) / layers)
        busy = min(1.0, loads * self.load / step.verify_seconds)
        self.busy = _RATE_DECAY * self.busy + (1 - _RATE_DECAY) * busy if self.busy else busy
        if step.drafted and not step.disturbed:
            self.draft_pass = _mean(self.draft_pass, (step.seconds - step.verify_seconds) / step.drafted)


def _mean(known: float, value: float) -> float:
    if not known:
        return value
    return _RATE_DECAY * known + (1 - _RATE_DECAY) * min(value, OUTLIER * known)


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


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Expected seconds of a step, by index of K, and their derivatives."""

    seconds: np.ndarray  # [lengths]
    inputs: np.ndarray  # [lengths, costs], of seconds by the costs
    by_share: np.ndarray  # [lengths], of seconds by the logarithm of the missing share of this K


class CostModel:
    """Expected seconds of a step for every K in `lengths`, and the rates of its parts."""

    def __init__(
        self,
        lengths: Sequence[int],
        layers: int,
        experts_per_layer: int,
        top_k: int,
        prior: CostPrior | None = None,
        sequences: int = 1,
    ) -> None:
        # sequences: that run together, each with K + 1 rows
        self.rates = Rates.of(prior, layers)
        self._sequences = sequences
        self.noise = _NOISE**2  # relative variance of a step's seconds
        self._ks = np.array(lengths)
        self._each = np.eye(len(lengths))
        self._index = {k: i for i, k in enumerate(lengths)}
        log_rows = np.log(self._ks + 1.0)
        # prior covariance of the logarithms of missing shares, beside what they have in common
        self._share_differences = _SHARE_SLOPE**2 * np.outer(log_rows, log_rows) + _SHARE_ERROR**2 * np.eye(
            len(log_rows)
        )
        self._counts_needed = False  # whether steps report the experts that they need
        self._routing = RoutingModel(layers, experts_per_layer, top_k)
        self._log_shares: LinearFilter | None = None  # of missing experts, by K
        self._costs: LinearFilter | None = None  # base, load, row, expert, then e_K by K
        self.dispersion = _DISPERSION  # as seen lately: missing experts come in bursts in some texts
        self._outliers = 0
        self._change = ChangeDetector()
        if prior is not None:
            self._start(prior.base, prior.load, prior.row, prior.base)

    @property
    def known(self) -> bool:
        """Whether anything is known of any K."""
        return self._costs is not None

    @property
    def missing_shares(self) -> np.ndarray:
        """Expected share of needed experts that is missing, by index of K."""
        return np.zeros(len(self._ks)) if self._log_shares is None else np.exp(self._log_shares.mean)

    @property
    def load(self) -> float:
        """Seconds that one more missing expert adds to a step."""
        return float(self._filter.mean[1])

    @property
    def _filter(self) -> LinearFilter:
        if self._costs is None:
            raise ValueError("no step was reported yet, so nothing is known of any K")
        return self._costs

    # ---- estimates

    def steps(self, proposal_rate: float) -> StepSeconds:
        """Return the seconds of a step with each K, if this share of steps has a draft."""
        needed = self._routing.needed(self._sequences * (self._ks + 1.0))
        missing = needed * self.missing_shares
        missing = proposal_rate * missing + (1 - proposal_rate) * missing[0]
        inputs = np.zeros((len(self._ks), _COEFFICIENTS + len(self._ks)))
        inputs[:, 0], inputs[:, 1], inputs[:, 2] = 1.0, missing, proposal_rate * self._ks
        inputs[:, 3] = proposal_rate * needed + (1 - proposal_rate) * needed[0] if self._counts_needed else 0.0
        inputs[:, _COEFFICIENTS:] = proposal_rate * self._each
        inputs[:, _COEFFICIENTS] += 1 - proposal_rate
        costs = self._filter.mean
        least = 0.1 * (inputs[:, :_COEFFICIENTS] @ costs[:_COEFFICIENTS])
        by_share = self.load * proposal_rate * needed * self.missing_shares
        return StepSeconds(np.maximum(inputs @ costs, least + 1e-9), inputs, by_share)

    def ratio_variances(self, found: StepSeconds, other: int) -> np.ndarray:
        """Return the variance of log(seconds(K) / seconds(other)) for every K; `other` is an index."""
        relative = found.inputs / found.seconds[:, None]
        relative = relative - relative[other]
        variances: np.ndarray = ((relative @ self._filter.covariance) * relative).sum(axis=1)
        if self._log_shares is not None:
            part = np.diag(found.by_share / found.seconds)
            part = part - part[other]
            variances = variances + ((part @ self._log_shares.covariance) * part).sum(axis=1)
        return variances

    # ---- learning

    def begin_text(self) -> None:
        """Take note that another text begins: its locality may differ."""
        if self._log_shares is not None:
            self._log_shares.drift(_CHANGE_OF_LEVEL**2 + _CHANGE_OF_TEXT * self._share_differences)

    def learn(self, step: StepReport, weight: float = 1.0, *, first: bool = False) -> bool:
        """Learn from a step, or from the mean of `weight` steps; return whether something has changed.

        `first`: the first step with this K, so the slots hold what another K has left.
        """
        if not (0.0 < step.seconds < math.inf and step.drafted in self._index):
            return False
        self._learn_missing(step, weight, first)
        return not step.disturbed and self._learn_seconds(step, weight)

    def _learn_missing(self, step: StepReport, weight: float, first: bool) -> None:
        if step.needed <= 0:  # every expert is resident, and nobody asks the host for them
            return
        self._counts_needed = True
        if (rows := self._sequences * (step.drafted + 1)) > 1:
            self._routing.learn(rows, step.needed)
        if self._log_shares is None:
            if not step.missing:
                return
            mean = math.log(step.missing / step.needed) + _SHARE_EXPONENT * np.log(self._ks + 1.0)
            self._log_shares = LinearFilter(mean, _SHARE_LEVEL**2 + self._share_differences)
            return
        filter, at = self._log_shares, self._index[step.drafted]
        filter.drift(weight * (_SHARE_DRIFT**2 + _SHARE_OWN_DRIFT**2 * self._each))
        expected = step.needed * math.exp(float(filter.mean[at]))
        level = max(expected, step.missing) + _FEW_MISSING  # few missing experts say little of the logarithm
        independent = max(0.05, 1 - level / step.needed) / level / weight
        variance = self.dispersion * independent
        deviation = math.log((step.missing + _FEW_MISSING) / (expected + _FEW_MISSING))
        if first:
            variance *= 4
        else:
            found = (deviation * deviation - filter.variance(self._each[at])) / independent
            self.dispersion += _DISPERSION_RATE * (min(found, 9 * self.dispersion) - self.dispersion)
            self.dispersion = max(_DISPERSION, min(_MOST_DISPERSION, self.dispersion))
        filter.condition(self._each[at], float(filter.mean[at]) + deviation, variance)
        filter.mean = np.clip(filter.mean, math.log(_LEAST_SHARE), 0.0)

    def _learn_seconds(self, step: StepReport, weight: float) -> bool:
        if self._costs is None:
            each = step.seconds / (1 + 0.1 * step.drafted)
            loads = 0.5 * each if step.missing else 0.0
            per_load = loads / step.missing if step.missing else 0.1 * each
            self._start(each - loads, per_load, 0.1 * each, each)
            return False
        costs, inputs = self._costs, np.zeros(_COEFFICIENTS + len(self._ks))
        inputs[:_COEFFICIENTS] = 1.0, step.missing, step.drafted, step.needed
        inputs[_COEFFICIENTS + self._index[step.drafted]] = 1.0
        least = 0.1 * float(costs.mean[:_COEFFICIENTS] @ inputs[:_COEFFICIENTS])
        expected = max(least, float(inputs @ costs.mean), 1e-9)
        ratio = step.seconds / expected
        if not 1 / OUTLIER < ratio < OUTLIER:
            self._outliers += 1
            if self._outliers < _OUTLIERS_OF_A_CHANGE:
                return False
            costs.mean, costs.covariance = ratio * costs.mean, ratio**2 * costs.covariance
            self._widen(_WIDER)
            self._outliers = 0
            return True
        self._outliers = 0
        deviation = math.log(ratio)
        changed = self._change.add(deviation / math.sqrt(self.noise / weight + costs.variance(inputs) / expected**2))
        if changed:
            self._widen(_WIDER)
        self.noise += 0.05 * (min(weight * deviation * deviation, 9 * self.noise) - self.noise)
        self.noise = max(0.02**2, min(0.3**2, self.noise))
        drift = np.full(len(inputs), _OWN_DRIFT * expected)
        drift[:_COEFFICIENTS] = _COST_DRIFT * expected / (1.0 + inputs[:_COEFFICIENTS])
        costs.drift(weight * np.diag(drift**2))
        costs.condition(inputs, step.seconds, self.noise * expected**2 / weight)
        for i in range(_COEFFICIENTS):  # no cost is negative
            if costs.mean[i] < 0.0:
                single = np.zeros(len(inputs))
                single[i] = 1.0
                costs.condition(single, 0.0, abs(float(costs.covariance[i, i])))
                costs.mean[i] = max(0.0, costs.mean[i])
        return changed

    def _start(self, compute: float, load: float, row: float, seconds: float) -> None:
        """Start from a step of plain decoding that takes `seconds`, of which `compute` without loads."""
        experts = float(self._routing.needed(np.full(1, self._sequences))[0])
        rates = [(1 - _EXPERT_SHARE) * compute, load, row, _EXPERT_SHARE * compute / experts]
        deviations = [0.5 * seconds, 0.5 * load, 0.2 * seconds, _EXPERT_SHARE * seconds / experts]
        own = len(self._ks)
        covariance = np.diag(np.array(deviations + [_OWN_ERROR * seconds] * own) ** 2)
        self._costs = LinearFilter(np.array(rates + [0.0] * own), covariance)

    def _widen(self, share: float) -> None:
        costs = self._filter
        common = np.zeros(len(costs.mean))
        common[:_COEFFICIENTS] = share * costs.mean[:_COEFFICIENTS]
        costs.drift(np.outer(common, common) + np.diag((0.5 * common) ** 2))

    # ---- between runs

    def state(self) -> dict[str, Any]:
        """Return what was learned, as plain values for JSON."""
        return {
            "experts_in_use": self._routing.in_use,
            "rates": asdict(self.rates),
            "costs": None if self._costs is None else self._costs.state(),
            "log_shares": None if self._log_shares is None else self._log_shares.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Start from what another run has learned, with less weight.

        Raise ValueError, KeyError, TypeError or AttributeError if the state is unusable.
        """
        costs = LinearFilter.restored(state["costs"], _COEFFICIENTS + len(self._ks))
        log_shares = state["log_shares"]
        if log_shares is not None:
            log_shares = LinearFilter.restored(log_shares, len(self._ks))
        in_use, rates = float(state["experts_in_use"]), Rates(**{k: float(v) for k, v in state["rates"].items()})
        if not 1 <= in_use < math.inf or not all(0.0 <= value < math.inf for value in asdict(rates).values()):
            raise ValueError("the state has values that are no numbers")
        self._costs, self._log_shares, self.rates = costs, log_shares, rates
        self._routing.in_use = in_use
        self._widen(_OTHER_RUN)
        if log_shares is not None:
            log_shares.drift(_OTHER_RUN**2 * (1 + 0.25 * self._each))
