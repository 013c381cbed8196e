"""How many tokens to draft per step: as many as have turned out to give the most tokens a second.

A longer draft costs its passes and the experts that more rows need, and gives tokens as long as they are accepted.
Where the link decides, rows that share most of their experts come nearly for nothing, and eight or twelve tokens pay;
where everything is resident and the draft is half of a step, one or none does. Both sides are learnt as steps end:

    tokens(K)  =  1 + a_1 + a_1 a_2 + ... + a_1 ... a_K          a_i: how often the i-th was kept where it was reached
    seconds(K) =  K d + f + g n(K) + h (K + 1)                   d: a draft pass, n: experts that K + 1 rows need

n is that of even routing; f, g and h are fitted to what verification took lately, on the assumption, until lengths
have varied enough to tell, that it is the experts that take the time. Only lengths of a short list are used, since
forwards are recorded for each.
"""

from __future__ import annotations

import numpy as np

from spmoe.predict.latency import evenly_needed

LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 15)
FIRST = 4  # until something is known, and where outputs must not depend on how long steps take
_ENOUGH = 3  # steps of one length, before another is considered
_GAIN = 1.03  # that another must promise
_STALE = 40  # steps with one choice, after which a neighbour is tried to see whether it still holds; and with none:
_LONG_STALE = 160  # a draft that was left behind has much to read
_MEMORY = 0.97  # of a verification's time, one step later
_DRAFT_MEMORY = 0.95  # of a draft that was judged, one draft later
_ODD = 3.0  # times as long as expected: what takes longer is something else, as a recording or another process
_INSTANT = 1e-9  # seconds; what takes less was not timed
_DOUBT = 2.0  # drafted tokens that what is assumed of each position counts for
_ASSUMED = 0.7  # that a drafted token is kept, before any was
_NOISE = 0.1  # of a verification's time
_ASSUMED_PARTS = np.array([0.0, 1.0, 0.0])  # of a verification of `FIRST` tokens: f, g n and h (K + 1)
_LATITUDE = 0.5  # how far from that each may well be


class DraftLength:
    """Chooses K, step by step."""

    def __init__(self, experts_per_layer: int, top_k: int, most: int) -> None:
        self._lengths = [length for length in LENGTHS if length <= most]
        self.current = max(length for length in self._lengths if length <= FIRST)
        needed = [evenly_needed(experts_per_layer, top_k, k + 1) for k in range(max(most, FIRST) + 1)]
        self._parts = [  # of each length: what does not grow, experts and rows, all in terms of `FIRST`
            np.array([1.0, one / needed[FIRST], (k + 1) / (FIRST + 1)]) for k, one in enumerate(needed)
        ]
        self._tried = [0.0] * most  # drafted tokens that were reached, by position
        self._kept = [0.0] * most
        self._pass = 0.0  # seconds
        self._squares, self._products = np.zeros((3, 3)), np.zeros(3)  # of parts with parts, and with seconds
        self._sums = np.zeros(2)  # seconds, and how many there would be if experts alone took 1 of them
        self._level = 1.0  # seconds of a verification of `FIRST` tokens, if they did
        self._fit = _ASSUMED_PARTS  # seconds of each part
        self._steps = 0  # since the length was chosen, that were timed
        self._met: set[int] = set()  # how many were drafted in some step before

    def learn(self, drafted: int, accepted: int, draft_seconds: float, verify_seconds: float) -> None:
        """A step is over; `current` may be another now."""
        if drafted:
            self._learn_acceptance(drafted, accepted)
        if drafted not in self._met or not _INSTANT < verify_seconds < np.inf:  # the first may have to be recorded
            self._met.add(drafted)
            return
        if drafted:
            each = draft_seconds / drafted
            if not self._pass or _ODD * each < self._pass:  # nothing makes it so much faster: what was known was odd
                self._pass = each
            self._pass += (min(each, _ODD * self._pass) - self._pass) * (1 - _MEMORY)
        expected = self._verify(drafted) if self._sums[1] else np.inf
        self._learn_verification(self._parts[drafted], min(verify_seconds, _ODD * expected))
        self._steps += 1
        if self._steps >= _ENOUGH:
            self._consider()

    def tokens(self, length: int) -> float:
        """Expected of a step that drafts so many."""
        everywhere = (sum(self._kept) + _DOUBT * _ASSUMED) / (sum(self._tried) + _DOUBT)
        found = chance = 1.0
        for tried, kept in zip(self._tried[:length], self._kept[:length], strict=True):
            chance *= (kept + _DOUBT * everywhere) / (tried + _DOUBT)
            found += chance
        return found

    def seconds(self, length: int) -> float:
        """Expected of such a step."""
        return length * self._pass + self._verify(length)

    def _verify(self, length: int) -> float:
        least = 0.1 * self._level * self._parts[length][1]
        return float(max(least, self._fit @ self._parts[length]))

    def _learn_acceptance(self, drafted: int, accepted: int) -> None:
        """What was seen of a position counts less with every draft, also with those that did not get there."""
        reached = min(drafted, accepted + 1)
        for position in range(len(self._tried)):
            self._tried[position] = self._tried[position] * _DRAFT_MEMORY + (position < reached)
            self._kept[position] = self._kept[position] * _DRAFT_MEMORY + (position < accepted)

    def _learn_verification(self, parts: np.ndarray, seconds: float) -> None:
        """Least squares of relative errors, old ones counting less, with what is assumed as if it had been seen."""
        expected = parts[1]
        self._squares = _MEMORY * self._squares + np.outer(parts, parts) / expected**2
        self._products = _MEMORY * self._products + parts * seconds / expected**2
        self._sums = _MEMORY * self._sums + (seconds, expected)
        self._level = float(self._sums[0] / self._sums[1])
        certainty = (_NOISE / _LATITUDE) ** 2
        self._fit = np.linalg.solve(
            self._squares + certainty * np.eye(3), self._products + certainty * self._level * _ASSUMED_PARTS
        )

    def _consider(self) -> None:
        near = [k for k in self._lengths if self.current // 2 <= k <= max(2, 2 * self.current) and k != self.current]
        if not near:
            return
        best = max(near, key=self._rate)
        stale = self._steps >= (_STALE if self.current else _LONG_STALE)
        if stale or self._rate(best) > _GAIN * self._rate(self.current):
            self.current, self._steps = best, 0

    def _rate(self, length: int) -> float:
        return self.tokens(length) / self.seconds(length)
