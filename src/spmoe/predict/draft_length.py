"""Choice of K, the number of draft tokens per step, for `-k auto`: the K with the most tokens per second.

A longer draft costs more draft passes and needs more experts; it yields more tokens as long as they are accepted.
Where the link limits speed, rows that share most of their experts are nearly free, and K = 8 or 12 is best. Where every
expert is resident and drafting takes half of a step, K = 1 or 0 is best. Both sides are learned from finished steps:

    tokens(K)  =  1 + a_1 + a_1 a_2 + ... + a_1 ... a_K      a_i: acceptance rate of draft position i, if it was reached
    seconds(K) =  K d + f + g n(K) + h (K + 1)               d: one draft pass, n: experts that K + 1 rows need

n assumes uniform routing. f, g and h are fitted to recent verification times. Until K has varied enough to separate
them, the fit assumes that the time is spent on experts alone. K is taken from a short list, since CUDA graphs are
captured for each K.
"""

from __future__ import annotations

import numpy as np

from spmoe.predict.latency import expected_experts

LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 15)
FIRST = 4  # initial K; also K for sampled requests, whose output must not depend on timing
_MIN_STEPS = 3  # timed steps with one K before another K is considered
_MIN_GAIN = 1.03  # predicted speedup that another K must reach
_RETRY_STEPS = 40  # steps with one K after which a neighbour is tried again, in case conditions have changed
_RETRY_STEPS_FROM_ZERO = 160  # for K = 0: the draft must first process the tokens since its last draft, which is slow
_VERIFY_DECAY = 0.97  # weight of a verification time, per later step
_DRAFT_DECAY = 0.95  # weight of an acceptance result, per later draft
_OUTLIER = 3.0  # times longer than expected is attributed to a graph capture or another process, and clipped
_MIN_SECONDS = 1e-9  # shorter steps were not timed
_PRIOR_WEIGHT = 2.0  # draft tokens that the prior of each position's acceptance rate counts for
_PRIOR_ACCEPTANCE = 0.7  # acceptance rate before any token was drafted
_NOISE = 0.1  # relative standard deviation of a verification time
_PRIOR_FIT = np.array([0.0, 1.0, 0.0])  # prior of f, g n and h (K + 1) at K = `FIRST`, as shares of the verification
_PRIOR_DEVIATION = 0.5  # standard deviation of each of the three shares


class DraftLength:
    """Chooser of K, updated after every step; `current` is the K to use next."""

    def __init__(self, experts_per_layer: int, top_k: int, most: int) -> None:
        self._lengths = [length for length in LENGTHS if length <= most]
        self.current = max(length for length in self._lengths if length <= FIRST)
        needed = [expected_experts(experts_per_layer, top_k, k + 1) for k in range(max(most, FIRST) + 1)]
        # regressors of each K, relative to `FIRST`: constant, experts, rows
        self._regressors = [np.array([1.0, one / needed[FIRST], (k + 1) / (FIRST + 1)]) for k, one in enumerate(needed)]
        self._reached = [0.0] * most  # draft tokens that were verified, by position
        self._accepted = [0.0] * most
        self._draft_pass = 0.0  # seconds
        self._squares, self._products = np.zeros((3, 3)), np.zeros(3)  # normal equations of the fit
        self._sums = np.zeros(2)  # seconds, and the expert regressor
        self._scale = 1.0  # seconds of a verification at K = `FIRST`, if experts took all of the time
        self._fit = _PRIOR_FIT  # seconds per regressor
        self._steps = 0  # timed steps since K was chosen
        self._run_before: set[int] = set()  # draft lengths of earlier steps

    def learn(self, drafted: int, accepted: int, draft_seconds: float, verify_seconds: float) -> None:
        """Record a finished step; may change `current`."""
        if drafted:
            self._learn_acceptance(drafted, accepted)
        # the first step of each length may include the capture of its CUDA graphs
        if drafted not in self._run_before or not _MIN_SECONDS < verify_seconds < np.inf:
            self._run_before.add(drafted)
            return
        if drafted:
            each = draft_seconds / drafted
            if not self._draft_pass or _OUTLIER * each < self._draft_pass:  # the known value was the outlier
                self._draft_pass = each
            self._draft_pass += (min(each, _OUTLIER * self._draft_pass) - self._draft_pass) * (1 - _VERIFY_DECAY)
        expected = self._verify_seconds(drafted) if self._sums[1] else np.inf
        self._learn_verification(self._regressors[drafted], min(verify_seconds, _OUTLIER * expected))
        self._steps += 1
        if self._steps >= _MIN_STEPS:
            self._choose()

    def tokens(self, length: int) -> float:
        """Return the expected tokens of a step that drafts `length` tokens."""
        overall = (sum(self._accepted) + _PRIOR_WEIGHT * _PRIOR_ACCEPTANCE) / (sum(self._reached) + _PRIOR_WEIGHT)
        total = chance = 1.0
        for reached, accepted in zip(self._reached[:length], self._accepted[:length], strict=True):
            chance *= (accepted + _PRIOR_WEIGHT * overall) / (reached + _PRIOR_WEIGHT)
            total += chance
        return total

    def seconds(self, length: int) -> float:
        """Return the expected seconds of a step that drafts `length` tokens."""
        return length * self._draft_pass + self._verify_seconds(length)

    def _verify_seconds(self, length: int) -> float:
        lower_bound = 0.1 * self._scale * self._regressors[length][1]
        return float(max(lower_bound, self._fit @ self._regressors[length]))

    def _learn_acceptance(self, drafted: int, accepted: int) -> None:
        """Update acceptance by position; old results decay with every draft, also at positions it did not reach."""
        reached = min(drafted, accepted + 1)
        for position in range(len(self._reached)):
            self._reached[position] = self._reached[position] * _DRAFT_DECAY + (position < reached)
            self._accepted[position] = self._accepted[position] * _DRAFT_DECAY + (position < accepted)

    def _learn_verification(self, regressors: np.ndarray, seconds: float) -> None:
        """Update the fit: least squares of relative errors with decaying weights and a Gaussian prior."""
        expected = regressors[1]
        self._squares = _VERIFY_DECAY * self._squares + np.outer(regressors, regressors) / expected**2
        self._products = _VERIFY_DECAY * self._products + regressors * seconds / expected**2
        self._sums = _VERIFY_DECAY * self._sums + (seconds, expected)
        self._scale = float(self._sums[0] / self._sums[1])
        prior = (_NOISE / _PRIOR_DEVIATION) ** 2
        self._fit = np.linalg.solve(
            self._squares + prior * np.eye(3), self._products + prior * self._scale * _PRIOR_FIT
        )

    def _choose(self) -> None:
        """Switch to the best neighbour of K if it is clearly faster, or if no other K was tried for long."""
        near = [k for k in self._lengths if self.current // 2 <= k <= max(2, 2 * self.current) and k != self.current]
        if not near:
            return
        best = max(near, key=self._tokens_per_second)
        retry = self._steps >= (_RETRY_STEPS if self.current else _RETRY_STEPS_FROM_ZERO)
        if retry or self._tokens_per_second(best) > _MIN_GAIN * self._tokens_per_second(self.current):
            self.current, self._steps = best, 0

    def _tokens_per_second(self, length: int) -> float:
        return self.tokens(length) / self.seconds(length)
