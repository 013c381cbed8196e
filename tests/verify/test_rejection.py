"""Statistical test of rejection sampling.

A toy target, whose next-token distribution depends on the last token, is decoded many times with several toy drafts.
Pairs of emitted tokens are counted, and a chi-square test checks them against the target's distribution. A correct
verifier would fail a comparison for one seed in a million; seeds are fixed, so the tests are deterministic. Verifiers
with one mistake each show the power of the test: it must reject all of them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from spmoe.config import SamplingParams
from spmoe.types import Draft, Sequence, VerifyResult
from spmoe.verify.base import Verifier
from spmoe.verify.filters import probabilities
from spmoe.verify.rejection import RejectionVerifier

VOCABULARY = 5
RUNS = 2000
FALSE_ALARMS = 1e-6  # probability that a correct verifier fails a comparison, over random seeds
START = 0  # the prompt's last token
PLAIN = SamplingParams(temperature=1.0)

# Row t: the target's logits after token t. The second target never emits two of the five tokens.
FULL = 1.2 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(31))
HOLED = FULL.clone()
for _t in range(VOCABULARY):
    HOLED[_t, [_t, (_t + 2) % VOCABULARY]] = -math.inf


# ---- expected distribution, in numpy


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def keep_top_k(probs: np.ndarray, k: int) -> np.ndarray:
    return probs >= np.sort(probs)[-k]


def keep_top_p(probs: np.ndarray, mass: float) -> np.ndarray:
    return np.array([probs[probs > p].sum() < mass for p in probs])  # no ties here


def keep_min_p(probs: np.ndarray, share: float) -> np.ndarray:
    return probs >= share * probs.max()


FILTERS: dict[str, tuple[SamplingParams, Callable[[np.ndarray], np.ndarray]]] = {
    "top-k": (SamplingParams(temperature=1.0, top_k=3), lambda p: keep_top_k(p, 3)),
    "top-p": (SamplingParams(temperature=1.0, top_p=0.7), lambda p: keep_top_p(p, 0.7)),
    "min-p": (SamplingParams(temperature=1.0, min_p=0.25), lambda p: keep_min_p(p, 0.25)),
}


def law_of(
    logits: Tensor, temperature: float = 1.0, keep: Callable[[np.ndarray], np.ndarray] | None = None
) -> np.ndarray:
    """Return the distribution of the token after t in row t."""
    rows = []
    for scores in logits.double().numpy():
        probs = softmax(scores / temperature)
        if keep is not None:
            probs = np.where(keep(probs), probs, 0.0)
        rows.append(probs / probs.sum())
    return np.array(rows)


# ---- drafts: row t is the draft's distribution after token t


def good(law: np.ndarray) -> np.ndarray:
    return 0.7 * law + 0.3 / VOCABULARY


def bad(law: np.ndarray) -> np.ndarray:
    unlikely = 1.0 / (law + 0.05)
    return unlikely / unlikely.sum(axis=1, keepdims=True)


def disjoint(law: np.ndarray) -> np.ndarray:
    """Propose only tokens that the target never emits."""
    never = (law == 0).astype(float)
    return never / never.sum(axis=1, keepdims=True)


def zeros(law: np.ndarray) -> np.ndarray:
    """Never propose the target's most likely token, and sometimes one that it never emits."""
    draft = 0.8 * law + 0.2 / VOCABULARY
    draft[np.arange(VOCABULARY), law.argmax(axis=1)] = 0.0
    return draft / draft.sum(axis=1, keepdims=True)


def identical(law: np.ndarray) -> np.ndarray:
    return law


def certain(law: np.ndarray) -> np.ndarray:
    """Always propose the second most likely token."""
    return np.eye(VOCABULARY)[np.argsort(law, axis=1)[:, -2]]


# ---- simulation


class Outcome(NamedTuple):
    """Counts of emitted tokens. Tokens K - 1 and K are the last draft token and the bonus token if all are accepted."""

    first_two: np.ndarray  # [V, V] emitted tokens 0 and 1
    last_two: np.ndarray  # [V, V] emitted tokens K - 1 and K
    first_accepted: np.ndarray  # [2] runs whose first draft token was rejected, and accepted


def simulate(
    verifier: Verifier, logits: Tensor, sampling: SamplingParams, draft: np.ndarray, k: int, seed: int
) -> Outcome:
    """Decode K + 1 tokens speculatively, RUNS times."""
    sequence = Sequence(0, [START], 1, sampling, torch.Generator().manual_seed(seed), capacity=1000)
    rng = random.Random(seed)
    tokens = range(VOCABULARY)
    cumulative = draft.cumsum(axis=1).tolist()
    draft_probs = torch.from_numpy(draft).float()
    outcome = Outcome(*(np.zeros(shape, dtype=int) for shape in ((VOCABULARY,) * 2, (VOCABULARY,) * 2, 2)))
    for _ in range(RUNS):
        text = [START]
        while len(text) <= max(k, 1) + 1:
            context = text[-1:]
            for _ in range(k):
                context += rng.choices(tokens, cum_weights=cumulative[context[-1]])
            proposed = Draft(context[1:], draft_probs[context[:-1]])
            result = verifier.verify(sequence, proposed, logits[context])
            if len(text) == 1:
                outcome.first_accepted[int(result.accepted > 0)] += 1
            text += [*proposed.tokens[: result.accepted], result.next_token]
        outcome.first_two[text[1], text[2]] += 1
        last = max(k, 1) + 1
        outcome.last_two[text[last - 1], text[last]] += 1
    return outcome


def pair_law(law: np.ndarray, skipped: int) -> np.ndarray:
    """Return the joint distribution of two tokens after the start and `skipped` others."""
    before = np.eye(VOCABULARY)[START] @ np.linalg.matrix_power(law, skipped + 1)
    return before[:, None] * law


def p_value(counts: np.ndarray, law: np.ndarray) -> float:
    """Return the p-value of Pearson's chi-square test."""
    observed, expected = counts.ravel(), counts.sum() * law.ravel()
    possible = expected > 1e-6
    if observed[~possible].any():
        return 0.0
    observed, expected = observed[possible], expected[possible]
    rare = expected < 10  # the chi-square approximation needs cells of this size
    if rare.any():
        observed = np.append(observed[~rare], observed[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    if len(expected) == 1:
        return 1.0
    statistic = ((observed - expected) ** 2 / expected).sum()
    halves = torch.tensor([len(expected) - 1, statistic], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(*halves))  # upper tail of the chi-square distribution


def follows(outcome: Outcome, law: np.ndarray, k: int) -> bool:
    """Return whether both pairs of tokens pass the test against the target's distribution."""
    first, last = pair_law(law, skipped=0), pair_law(law, skipped=max(k, 1) - 1)
    return p_value(outcome.first_two, first) > FALSE_ALARMS and p_value(outcome.last_two, last) > FALSE_ALARMS


def test_p_values_of_known_counts() -> None:
    fair = np.array([0.5, 0.5, 0.0])
    assert p_value(np.array([50, 50, 0]), fair) == 1.0
    assert p_value(np.array([50, 49, 1]), fair) == 0.0  # an impossible token
    assert p_value(np.array([5098, 4902, 0]), fair) == pytest.approx(0.05, rel=0.01)  # 1.96 standard deviations
    assert p_value(np.array([105, 95, 100, 120, 80]), np.full(5, 0.2)) == pytest.approx(
        0.0752, rel=0.01
    )  # 8.5, 4 degrees


# ---- the output follows the target


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize(
    ("propose", "logits"),
    [(good, FULL), (bad, FULL), (identical, FULL), (certain, FULL), (disjoint, HOLED), (zeros, HOLED)],
    ids=["good", "bad", "identical", "certain", "disjoint", "zeros"],
)
def test_tokens_follow_the_target(propose: Callable[[np.ndarray], np.ndarray], logits: Tensor, k: int) -> None:
    law = law_of(logits)
    draft = propose(law)
    outcome = simulate(RejectionVerifier(), logits, PLAIN, draft, k, seed=41 + k)
    assert follows(outcome, law, k)
    # the acceptance rate is the mass that p and q share
    accepted = float(np.minimum(law[START], draft[START]).sum())
    assert p_value(outcome.first_accepted, np.array([1 - accepted, accepted])) > FALSE_ALARMS


@pytest.mark.parametrize(("propose", "k"), [(good, 4), (bad, 1), (disjoint, 2)])
@pytest.mark.parametrize("name", FILTERS)
def test_tokens_follow_the_filtered_target(name: str, propose: Callable[[np.ndarray], np.ndarray], k: int) -> None:
    sampling, keep = FILTERS[name]
    law = law_of(FULL, keep=keep)
    assert (law == 0).any(axis=1).all()
    outcome = simulate(RejectionVerifier(), FULL, sampling, propose(law), k, seed=51 + k)
    assert follows(outcome, law, k)


def test_tokens_follow_the_target_with_all_filters() -> None:
    sampling = SamplingParams(temperature=1.5, top_k=4, top_p=0.9, min_p=0.3)
    law = law_of(FULL, temperature=1.5, keep=lambda p: keep_top_k(p, 4))
    law = np.array([np.where(keep_top_p(row, 0.9), row, 0.0) for row in law])
    law = np.array([np.where(keep_min_p(row, 0.3), row, 0.0) for row in law])
    law /= law.sum(axis=1, keepdims=True)
    # drafters apply the same filters
    draft = probabilities(FULL.flip(1), sampling).double().numpy()
    draft /= draft.sum(axis=1, keepdims=True)
    outcome = simulate(RejectionVerifier(), FULL, sampling, draft, 2, seed=61)
    assert follows(outcome, law, 2)


def test_tokens_follow_the_target_without_a_draft() -> None:
    outcome = simulate(RejectionVerifier(), FULL, PLAIN, good(law_of(FULL)), 0, seed=62)
    assert follows(outcome, law_of(FULL), 0)
    assert outcome.first_accepted.tolist() == [RUNS, 0]


# ---- power of the test


class NumpyVerifier:
    """Rejection sampling in numpy; wrong verifiers override one of its methods."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(71)

    def verify(self, sequence: Sequence, draft: Draft, logits: Tensor) -> VerifyResult:
        assert draft.probs is not None
        target = self.target(sequence, logits)
        for position, token in enumerate(draft.tokens):
            p, q = target[position + self.row_offset], draft.probs[position].double().numpy()
            if self._rng.random() >= self.acceptance(p[token], q[token]):
                return VerifyResult(position, self.draw(self.recovered(p, q)))
        return VerifyResult(len(draft.tokens), self.draw(self.bonus(target, draft)))

    row_offset = 0

    def target(self, sequence: Sequence, logits: Tensor) -> np.ndarray:
        return probabilities(logits, sequence.sampling).double().numpy()

    def acceptance(self, p: float, q: float) -> float:
        return min(1.0, p / q)

    def recovered(self, p: np.ndarray, q: np.ndarray) -> np.ndarray:
        return np.maximum(p - q, 0.0)

    def bonus(self, target: np.ndarray, draft: Draft) -> np.ndarray:
        return target[-1]

    def draw(self, weights: np.ndarray) -> int:
        edges = np.cumsum(weights)
        return int(np.searchsorted(edges, self._rng.random() * edges[-1], side="right"))


class RecoversFromTarget(NumpyVerifier):
    def recovered(self, p: np.ndarray, q: np.ndarray) -> np.ndarray:
        return p


class RecoversFromDistance(NumpyVerifier):
    def recovered(self, p: np.ndarray, q: np.ndarray) -> np.ndarray:
        return np.abs(p - q)


class AcceptsByTargetOnly(NumpyVerifier):
    def acceptance(self, p: float, q: float) -> float:
        return p


class AcceptsDeterministically(NumpyVerifier):
    def acceptance(self, p: float, q: float) -> float:
        return float(p >= q)


class AcceptsEverything(NumpyVerifier):
    def acceptance(self, p: float, q: float) -> float:
        return 1.0


class UsesTheNextRow(NumpyVerifier):
    row_offset = 1


class BonusFromThePreviousRow(NumpyVerifier):
    def bonus(self, target: np.ndarray, draft: Draft) -> np.ndarray:
        return target[-2]


class IgnoresFilters(NumpyVerifier):
    def target(self, sequence: Sequence, logits: Tensor) -> np.ndarray:
        return probabilities(logits, PLAIN).double().numpy()


def test_numpy_verifier_passes() -> None:
    law = law_of(FULL)
    assert follows(simulate(NumpyVerifier(), FULL, PLAIN, bad(law), 2, seed=72), law, 2)


@pytest.mark.parametrize(
    ("wrong", "propose"),
    [
        (RecoversFromTarget, bad),
        (RecoversFromDistance, bad),
        (AcceptsByTargetOnly, bad),
        (AcceptsDeterministically, good),
        (AcceptsEverything, good),
        (UsesTheNextRow, good),
        (BonusFromThePreviousRow, identical),
    ],
)
@pytest.mark.parametrize("k", [1, 4])
def test_wrong_verifier_fails(wrong: type[NumpyVerifier], propose: Callable[[np.ndarray], np.ndarray], k: int) -> None:
    law = law_of(FULL)
    assert not follows(simulate(wrong(), FULL, PLAIN, propose(law), k, seed=73), law, k)


@pytest.mark.parametrize("name", FILTERS)
def test_verifier_without_filters_fails(name: str) -> None:
    sampling, keep = FILTERS[name]
    law = law_of(FULL, keep=keep)
    assert not follows(simulate(IgnoresFilters(), FULL, sampling, good(law), 1, seed=74), law, 1)


# ---- edge cases


def make_sequence(sampling: SamplingParams = PLAIN, seed: int = 81) -> Sequence:
    return Sequence(0, [START], 1, sampling, torch.Generator().manual_seed(seed), capacity=1000)


def test_draft_with_the_targets_probabilities_is_always_accepted() -> None:
    rng = torch.Generator().manual_seed(82)
    sampling = SamplingParams(temperature=0.7, top_p=0.95, min_p=0.01)
    sequence = make_sequence(sampling)
    for _ in range(300):
        logits = 3 * torch.randn(5, 50, generator=rng)
        probs = probabilities(logits, sampling)
        tokens = torch.multinomial(probs[:4], 1, generator=rng).flatten().tolist()
        result = RejectionVerifier().verify(sequence, Draft(tokens, probs[:4]), logits)
        assert result.accepted == 4
        assert probs[4, result.next_token] > 0


def test_impossible_token_is_neither_accepted_nor_recovered() -> None:
    logits = torch.tensor([[0.0, -math.inf, 1.0], [0.0, 0.0, 0.0]])
    sequence = make_sequence()
    for _ in range(500):
        result = RejectionVerifier().verify(sequence, Draft([1], torch.tensor([[0.1, 0.9, 0.0]])), logits)
        assert result.accepted == 0
        assert result.next_token in (0, 2)


def test_impossible_token_is_rejected_even_if_the_random_number_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.zeros((), dtype=torch.float64))
    logits = torch.tensor([[0.0, -math.inf, 1.0], [0.0, 0.0, 0.0]])
    result = RejectionVerifier().verify(make_sequence(), Draft([1], torch.tensor([[0.1, 0.9, 0.0]])), logits)
    assert result.accepted == 0


def test_recovers_from_the_target_if_the_residual_is_zero() -> None:
    # rounding may give p <= q everywhere; doubling q makes rejections frequent
    law = law_of(FULL)
    outcome = simulate(RejectionVerifier(), FULL, PLAIN, law, 1, seed=83)
    doubled = simulate(_DoublesDraft(), FULL, PLAIN, law, 1, seed=83)
    assert outcome.first_accepted.tolist() == [0, RUNS]
    assert p_value(doubled.first_accepted, np.array([0.5, 0.5])) > FALSE_ALARMS
    assert follows(doubled, law, 1)


class _DoublesDraft(RejectionVerifier):
    def verify(self, sequence: Sequence, draft: Draft, logits: Tensor) -> VerifyResult:
        assert draft.probs is not None
        return super().verify(sequence, Draft(draft.tokens, 2 * draft.probs), logits)


def test_results_depend_on_the_seed_only() -> None:
    def results(seed: int) -> list[VerifyResult]:
        sequence = make_sequence(seed=seed)
        draft = Draft([1, 2], torch.full((2, VOCABULARY), 0.2))
        return [RejectionVerifier().verify(sequence, draft, FULL[:3]) for _ in range(40)]

    assert results(84) == results(84)
    assert results(84) != results(85)


def test_inputs_are_not_modified() -> None:
    logits, probs = FULL[:3].clone(), torch.full((2, VOCABULARY), 0.2)
    draft = Draft([1, 2], probs)
    for seed in range(20):
        RejectionVerifier().verify(make_sequence(seed=seed), draft, logits)
    assert torch.equal(logits, FULL[:3])
    assert torch.equal(probs, torch.full((2, VOCABULARY), 0.2))
    assert draft.tokens == [1, 2]


def test_draft_without_probabilities_raises_an_error() -> None:
    with pytest.raises(ValueError, match="no probabilities"):
        RejectionVerifier().verify(make_sequence(), Draft([1]), FULL[:2])


def test_empty_draft_needs_no_probabilities() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf]])
    assert RejectionVerifier().verify(make_sequence(), Draft([]), logits) == VerifyResult(0, 1)
