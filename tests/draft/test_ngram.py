"""The draft that looks up what followed before: what it proposes, and that the output stays the target's."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import EXPERTS, LAYERS, TOP_K, VOCABULARY, Pair, greedy, memory_for, reference
from spmoe import LLM, SamplingParams
from spmoe.draft import ngram
from spmoe.draft.ngram import LONGEST, SHORTEST, NgramDraft
from spmoe.engine.engine import Engine
from spmoe.predict.policies.next_gate import NextGate
from spmoe.types import Draft, Sequence
from spmoe.verify.filters import probabilities
from spmoe.verify.rejection import RejectionVerifier

GREEDY = SamplingParams()
REPEATING = [5, 9, 2, 7, 1, 5, 9, 2]
UNLIKE = list(range(40, 60))  # no token twice
COUNT = 16


def sequence(tokens: list[int], sampling: SamplingParams = GREEDY, number: int = 0) -> Sequence:
    return Sequence(number, list(tokens), len(tokens), sampling, torch.Generator().manual_seed(3), capacity=1000)


def propose(drafter: NgramDraft, one: Sequence, k: int) -> Draft:
    (draft,) = drafter.propose([one], k, None)
    return draft


def fresh(vocabulary: int = 100) -> NgramDraft:
    return NgramDraft(vocabulary, torch.device("cpu"))


def expected(tokens: list[int], k: int) -> list[int]:
    """The same by looking through all of it, the longest n-gram and the latest place first."""
    for n in range(LONGEST, SHORTEST - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if n <= len(tokens) and tokens[end - n : end] == tokens[-n:]:
                longer = list(tokens)
                for place in range(end, end + k):
                    longer.append(longer[place])
                return longer[len(tokens) :]
    return []


# ---- what is proposed


def test_what_followed_before_is_proposed_again() -> None:
    assert propose(fresh(), sequence(REPEATING), 2).tokens == [7, 1]


def test_a_longer_match_is_preferred_to_a_later_one() -> None:
    tokens = [1, 2, 3, 4, 70, 9, 3, 4, 80, 1, 2, 3, 4]
    assert propose(fresh(), sequence(tokens), 1).tokens == [70]


def test_of_equally_long_ones_the_latest() -> None:
    tokens = [1, 2, 70, 8, 1, 2, 80, 9, 1, 2]
    assert propose(fresh(), sequence(tokens), 1).tokens == [80]


def test_a_continuation_that_reaches_the_end_repeats_itself() -> None:
    assert propose(fresh(), sequence([6, 7, 8, 6, 7, 8]), 7).tokens == [6, 7, 8, 6, 7, 8, 6]
    assert propose(fresh(), sequence([4, 4, 4]), 3).tokens == [4, 4, 4]


@pytest.mark.parametrize("tokens", [[1], [1, 2], UNLIKE, [1, 2, 3, 1]])
def test_nothing_is_proposed_where_nothing_matches(tokens: list[int]) -> None:
    assert propose(fresh(), sequence(tokens), 4) == Draft([])
    assert propose(fresh(), sequence(tokens, SamplingParams(temperature=1.0)), 4) == Draft([])


def test_no_more_than_asked_for() -> None:
    for k in range(6):
        assert len(propose(fresh(), sequence(REPEATING), k).tokens) == k


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.lists(st.integers(1, 5), max_size=6), st.integers(0, 6))
def test_growing_step_by_step_finds_what_a_search_through_everything_does(
    tokens: list[int], steps: list[int], k: int
) -> None:
    drafter, one = fresh(), sequence(tokens[:1])
    for length in [1, *np.cumsum(steps).tolist(), len(tokens)]:
        one.tokens = tokens[: max(length, len(one.tokens))]
        assert propose(drafter, one, k).tokens == expected(one.tokens, k)
        drafter.rewind({one.id: len(one.tokens) - 1})


def test_sequences_are_kept_apart_and_forgotten() -> None:
    drafter = fresh()
    first, second = sequence(REPEATING, number=1), sequence(UNLIKE, number=2)
    assert propose(drafter, first, 1).tokens == [7]
    assert propose(drafter, second, 1).tokens == []
    drafter.release(1)
    drafter.release(1)
    assert propose(drafter, sequence(UNLIKE, number=1), 1).tokens == []


# ---- sampling


def test_the_distribution_of_a_certain_proposal_is_one_hot() -> None:
    draft = propose(fresh(11), sequence(REPEATING, SamplingParams(temperature=1.0)), 3)
    assert draft.probs is not None
    assert draft.probs.dtype is torch.float32
    assert draft.probs.tolist() == np.eye(11)[draft.tokens].tolist()


@pytest.mark.parametrize("honest", [True, False])
def test_sampled_output_follows_the_targets_law(honest: bool) -> None:
    """Chi-square over the token that comes where one was looked up; a draft that lies about q fails it."""
    logits = 1.5 * torch.randn(3, 11, generator=torch.Generator().manual_seed(8))
    params = SamplingParams(temperature=0.8)
    drafter, one, runs, found = fresh(11), sequence(REPEATING, params), 6000, Counter[int]()
    for _ in range(runs):
        draft = propose(drafter, one, 2)
        assert draft.probs is not None
        if not honest:
            draft = Draft(draft.tokens, draft.probs * 0.3 + 0.7 / 11)
        result = RejectionVerifier().verify(one, draft, logits)
        found[draft.tokens[0] if result.accepted else result.next_token] += 1
    law = probabilities(logits[:1], params)[0]
    statistic = sum((found[t] - runs * p) ** 2 / (runs * p) for t, p in enumerate(law.tolist()))
    assert (statistic < 44.0) == honest  # ten degrees of freedom: one false alarm in 300 000 seeds


# ---- in the engine


def build(target: Path, **options: object) -> LLM:
    return LLM(str(target), "ngram", progress=False, **options)


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("share", [0, 1])
def test_greedy_output_is_that_of_transformers(pair: Pair, k: int, share: int) -> None:
    model = reference(pair.target)
    slots = TOP_K if share == 0 else LAYERS * EXPERTS[model.config.model_type]
    params = SamplingParams(max_tokens=COUNT, ignore_eos=True)
    with build(pair.target, num_speculative_tokens=k, expert_memory=memory_for(slots), prefill_chunk=3) as llm:
        for prompt in (REPEATING * 3, UNLIKE, [84]):
            assert llm.generate(prompt, params)[0].token_ids == greedy(model, prompt, COUNT)
        assert llm.engine.loop.counters.drafted > 0


def test_steps_without_a_match_are_plain_ones(pair: Pair) -> None:
    with build(pair.target, num_speculative_tokens=4) as llm:
        completion = llm.generate(UNLIKE, SamplingParams(max_tokens=2, ignore_eos=True))[0]
        assert completion.stats.counters.drafted == 0
        assert completion.stats.counters.steps == 2


def test_text_that_repeats_itself_is_accepted_and_takes_fewer_steps() -> None:
    """The pair that ships continues a list of like lines."""
    prompt = "".join(f"self.assertEqual(reader.read({i}), {i})\n" for i in range(6))
    params, found = SamplingParams(max_tokens=40, ignore_eos=True), []
    for draft in ("none", "ngram"):
        with LLM(draft=draft, dtype="float32", progress=False) as llm:
            found.append(llm.generate(prompt, params)[0])
    plain, drafted = found
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.counters.accepted > 20
    assert drafted.stats.counters.steps < plain.stats.counters.steps / 2


def test_the_targets_own_layers_predict_and_it_says_so(pair: Pair) -> None:
    with build(pair.target) as llm:
        engine: Engine = llm.engine
        (notice,) = llm.notices
        assert "no hidden states" in notice
        assert "the target's own layers" in notice
        assert isinstance(engine.loop.policy, NextGate)
        stats = llm.generate(REPEATING, SamplingParams(max_tokens=4))[0].stats
        assert stats.prefetch == "next-gate"
        assert stats.counters.prefetches_requested
    with build(pair.target, prefetch="on-demand") as llm:
        assert llm.notices == [], "nobody asked for prefetching"
    with build(pair.target, num_speculative_tokens=0) as llm:
        assert llm.notices == []
        assert llm.engine.loop.draft_tokens == 0


def test_no_tokenizer_is_needed_and_tokens_stay_in_the_vocabulary(pair: Pair, tmp_path: Path) -> None:
    bare = tmp_path / "target"
    reference(pair.target).save_pretrained(bare)
    with build(bare) as llm:
        tokens = llm.generate(REPEATING, SamplingParams(max_tokens=8, temperature=1.0, seed=1))[0].token_ids
        assert all(0 <= token < VOCABULARY for token in tokens)


def test_a_target_with_a_state_of_another_kind(recurrent_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram._Index, "find", lambda index, tokens: 1)  # its text never repeats: find it anyway
    model = reference(recurrent_target)
    with build(recurrent_target, expert_memory="50%", prefill_chunk=3) as llm:
        found = llm.generate(REPEATING * 3, SamplingParams(max_tokens=COUNT, ignore_eos=True))[0]
        assert found.token_ids == greedy(model, REPEATING * 3, COUNT)
        assert found.stats.counters.drafted > 0
