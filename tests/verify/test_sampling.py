"""Sampling: the output follows the target's distribution, and depends on the seed alone.

A toy target, whose next-token distribution depends on the last token, is decoded many times with several toy drafts.
Pairs of emitted tokens are counted, and a chi-square test checks them against the target's distribution. A correct
verifier would fail a comparison for one seed in a million; seeds are fixed, so the tests are deterministic. Verifiers
with one mistake each show the power of the test: it must reject all of them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from itertools import cycle, repeat

import numpy as np
import pytest
import torch
from torch import Tensor

from spmoe.config import SamplingParams
from spmoe.types import Draft, Sequence, VerifyResult
from spmoe.verify.sampling import PositionNoise, verify_sampled

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


# ---- drafts: the next token after a sequence and the tokens drafted so far

Propose = Callable[[Sequence, list[int]], int]
Verify = Callable[[Sequence, Draft, Tensor], VerifyResult]


def drawn_from(law: np.ndarray) -> Propose:
    """Draw from row t of a distribution after token t, with the noise of the sequence, as a draft model does."""
    rows = torch.from_numpy(law)

    def propose(sequence: Sequence, draft: list[int]) -> int:
        last = [*sequence.tokens, *draft][-1]
        return sequence.noise.pick(rows[last], len(sequence.tokens) + len(draft))

    return propose


def good(law: np.ndarray) -> Propose:
    return drawn_from(0.7 * law + 0.3 / VOCABULARY)


def bad(law: np.ndarray) -> Propose:
    unlikely = 1.0 / (law + 0.05)
    return drawn_from(unlikely / unlikely.sum(axis=1, keepdims=True))


def identical(law: np.ndarray) -> Propose:
    return drawn_from(law)


def likely(law: np.ndarray) -> Propose:
    """Propose the most likely token, whatever the noise is, as n-grams do."""
    return lambda sequence, draft: int(law[[*sequence.tokens, *draft][-1]].argmax())


def arbitrary(law: np.ndarray) -> Propose:
    rng = random.Random(3)
    return lambda sequence, draft: rng.randrange(VOCABULARY)


DRAFTS = (good, bad, identical, likely, arbitrary)


# ---- simulation


def decode(
    verify: Verify,
    logits: Tensor,
    sampling: SamplingParams,
    propose: Propose,
    lengths: Iterator[int],
    noise: PositionNoise,
    count: int,
) -> tuple[list[int], int, int]:
    """Decode tokens with drafts of these lengths; return them, and the numbers of draft tokens and accepted ones."""
    sequence, drafted, accepted = Sequence(0, [START], 1, sampling, noise, capacity=1000), 0, 0
    while len(sequence.tokens) <= count:
        draft: list[int] = []
        for _ in range(next(lengths)):
            draft.append(propose(sequence, draft))
        result = verify(sequence, Draft(draft), logits[[sequence.tokens[-1], *draft]])
        sequence.tokens += [*draft[: result.accepted], result.next_token]
        drafted += min(len(draft), result.accepted + 1)
        accepted += result.accepted
    return sequence.tokens[1 : count + 1], drafted, accepted


def follows(
    verify: Verify,
    logits: Tensor,
    sampling: SamplingParams,
    propose: Propose,
    k: int,
    law: np.ndarray,
    noise: Callable[[int], PositionNoise] = PositionNoise,
) -> bool:
    """Return whether two pairs of tokens, at the begin and after K others, pass the test against a distribution."""
    first, last = (np.zeros((VOCABULARY, VOCABULARY), dtype=int) for _ in range(2))
    for seed in range(RUNS):
        text, _, _ = decode(verify, logits, sampling, propose, repeat(k), noise(seed), k + 2)
        first[text[0], text[1]] += 1
        last[text[-2], text[-1]] += 1
    return (
        p_value(first, pair_law(law, skipped=0)) > FALSE_ALARMS
        and p_value(last, pair_law(law, skipped=k)) > FALSE_ALARMS
    )


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


def test_p_values_of_known_counts() -> None:
    fair = np.array([0.5, 0.5, 0.0])
    assert p_value(np.array([50, 50, 0]), fair) == 1.0
    assert p_value(np.array([50, 49, 1]), fair) == 0.0  # an impossible token
    assert p_value(np.array([5098, 4902, 0]), fair) == pytest.approx(0.05, rel=0.01)  # 1.96 standard deviations
    assert p_value(np.array([105, 95, 100, 120, 80]), np.full(5, 0.2)) == pytest.approx(
        0.0752, rel=0.01
    )  # 8.5, 4 degrees


# ---- the output follows the target


@pytest.mark.parametrize("logits", [FULL, HOLED], ids=["full", "holed"])
@pytest.mark.parametrize(("propose", "k"), [(good, 3), (likely, 2), (arbitrary, 1), (good, 0)])
def test_tokens_follow_the_target(propose: Callable[[np.ndarray], Propose], logits: Tensor, k: int) -> None:
    law = law_of(logits)
    assert follows(verify_sampled, logits, PLAIN, propose(law), k, law)


@pytest.mark.parametrize("name", FILTERS)
def test_tokens_follow_the_filtered_target(name: str) -> None:
    sampling, keep = FILTERS[name]
    law = law_of(FULL, keep=keep)
    assert (law == 0).any(axis=1).all()
    assert follows(verify_sampled, FULL, sampling, good(law), 2, law)


def test_tokens_follow_the_target_with_all_filters() -> None:
    sampling = SamplingParams(temperature=1.5, top_k=4, top_p=0.9, min_p=0.3)
    law = law_of(FULL, temperature=1.5, keep=lambda p: keep_top_k(p, 4))
    law = np.array([np.where(keep_top_p(row, 0.9), row, 0.0) for row in law])
    law = np.array([np.where(keep_min_p(row, 0.3), row, 0.0) for row in law])
    law /= law.sum(axis=1, keepdims=True)
    assert follows(verify_sampled, FULL, sampling, good(law), 2, law)


# ---- the output does not depend on the draft


@pytest.mark.parametrize("propose", DRAFTS)
@pytest.mark.parametrize("sampling", [PLAIN, SamplingParams(temperature=0.7, top_p=0.9)], ids=["plain", "top-p"])
def test_text_depends_on_neither_the_draft_nor_k(
    propose: Callable[[np.ndarray], Propose], sampling: SamplingParams
) -> None:
    for seed in range(20):

        def text(lengths: Iterator[int], seed: int = seed) -> list[int]:
            return decode(verify_sampled, HOLED, sampling, propose(law_of(HOLED)), lengths, PositionNoise(seed), 40)[0]

        plain = text(repeat(0))
        assert len(set(plain)) > 1
        for lengths in (repeat(1), repeat(4), repeat(15), cycle([0, 3, 1, 7])):
            assert text(lengths) == plain


def test_draft_with_the_targets_distribution_is_always_accepted() -> None:
    _, drafted, accepted = decode(
        verify_sampled, FULL, PLAIN, identical(law_of(FULL)), repeat(4), PositionNoise(82), 500
    )
    assert drafted == accepted > 300


def test_similar_distributions_mostly_agree() -> None:
    """The share is at least (1 - d) / (1 + d), and at most 1 - d."""
    law, rng = law_of(FULL), np.random.default_rng(5)
    other = law * rng.uniform(0.6, 1.4, law.shape)
    other /= other.sum(axis=1, keepdims=True)
    distances = np.abs(law - other).sum(axis=1) / 2
    _, drafted, accepted = decode(verify_sampled, FULL, PLAIN, drawn_from(other), repeat(1), PositionNoise(83), 6000)
    assert (1 - distances.max()) / (1 + distances.max()) < accepted / drafted < 1 - distances.min()


# ---- power of the test


def accept_everything(sequence: Sequence, draft: Draft, logits: Tensor) -> VerifyResult:
    last = verify_sampled(sequence, Draft([]), logits[-1:])
    return VerifyResult(len(draft.tokens), last.next_token)


def use_the_next_row(sequence: Sequence, draft: Draft, logits: Tensor) -> VerifyResult:
    return verify_sampled(sequence, draft, torch.cat([logits[1:], logits[-1:]]))


def ignore_filters(sequence: Sequence, draft: Draft, logits: Tensor) -> VerifyResult:
    plain = Sequence(0, sequence.tokens, 1, PLAIN, sequence.noise, capacity=1000)
    return verify_sampled(plain, draft, logits)


class SameNoiseEverywhere(PositionNoise):
    def pick(self, probs: Tensor, position: int) -> int:
        return super().pick(probs, 0)

    def forget(self, position: int) -> None:
        pass


@pytest.mark.parametrize("wrong", [accept_everything, use_the_next_row])
def test_wrong_verifier_fails(wrong: Verify) -> None:
    law = law_of(FULL)
    assert not follows(wrong, FULL, PLAIN, arbitrary(law), 2, law)


@pytest.mark.parametrize("name", FILTERS)
def test_verifier_without_filters_fails(name: str) -> None:
    sampling, keep = FILTERS[name]
    law = law_of(FULL, keep=keep)
    assert not follows(ignore_filters, FULL, sampling, good(law), 1, law)


def test_noise_that_is_the_same_at_every_position_fails() -> None:
    law = law_of(FULL)
    assert not follows(verify_sampled, FULL, PLAIN, good(law), 1, law, SameNoiseEverywhere)


# ---- noise


def test_noise_belongs_to_seed_and_position() -> None:
    probs = torch.full((1000,), 0.001)

    def tokens(seed: int | None) -> list[int]:
        noise = PositionNoise(seed)
        return [noise.pick(probs, position) for position in range(20)]

    assert tokens(84) == tokens(84)
    assert len(set(tokens(84))) > 15
    assert tokens(84) != tokens(85)
    assert tokens(None) != tokens(None)
    assert tokens(2**64 - 1) != tokens(2**63), "all bits of a seed count"


def test_noise_of_a_token_does_not_depend_on_the_size_of_the_vocabulary() -> None:
    """A draft may have fewer tokens than the target."""
    for seed in range(50):
        few, many = torch.full((100,), 0.01), torch.full((120,), 0.01)
        many[100:] = 0.0
        assert PositionNoise(seed).pick(few, 3) == PositionNoise(seed).pick(many, 3)
        noise = PositionNoise(seed)
        assert noise.pick(few, 3) == noise.pick(many, 3), "also if it is kept"


def test_impossible_token_is_never_drawn() -> None:
    for seed in range(200):
        assert PositionNoise(seed).pick(torch.tensor([0.0, 1e-12, 0.0]), 7) == 1


def test_noise_of_decided_positions_is_dropped() -> None:
    noise = PositionNoise(1)
    decode(verify_sampled, FULL, PLAIN, good(law_of(FULL)), repeat(4), noise, 100)
    assert len(noise._known) <= 5


def test_inputs_are_not_modified() -> None:
    logits, draft = FULL[:3].clone(), Draft([1, 2])
    for seed in range(20):
        sequence = Sequence(0, [START], 1, PLAIN, PositionNoise(seed), capacity=1000)
        verify_sampled(sequence, draft, logits)
    assert torch.equal(logits, FULL[:3])
    assert draft.tokens == [1, 2]


def test_empty_draft() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf]])
    sequence = Sequence(0, [START], 1, PLAIN, PositionNoise(0), capacity=1000)
    assert verify_sampled(sequence, Draft([]), logits) == VerifyResult(0, 1)
