"""The n-gram drafter: its proposals, and exactness of the output."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import LAYERS, TOP_K, VOCABULARY, Pair, expert_count, greedy, greedy_tokens, memory_for, reference
from spmoe import LLM, SamplingParams
from spmoe.draft import ngram
from spmoe.draft.ngram import MAX_NGRAM, MIN_NGRAM, NgramDraft
from spmoe.engine.engine import Engine
from spmoe.predict.policies.next_gate import NextGate
from spmoe.types import Draft, Sequence
from spmoe.verify.sampling import PositionNoise

GREEDY = SamplingParams()
REPEATING = [5, 9, 2, 7, 1, 5, 9, 2]
DISTINCT = list(range(40, 60))  # no token twice
COUNT = 16


def sequence(tokens: list[int], sampling: SamplingParams = GREEDY, number: int = 0) -> Sequence:
    return Sequence(number, list(tokens), len(tokens), sampling, PositionNoise(0), capacity=1000)


def propose(drafter: NgramDraft, one: Sequence, k: int) -> Draft:
    (draft,) = drafter.propose([one], k, None)  # type: ignore[arg-type]
    return draft


def fresh() -> NgramDraft:
    return NgramDraft()


def expected(tokens: list[int], k: int) -> list[int]:
    """Return the proposal by brute force: the longest n-gram first, then its latest occurrence."""
    for n in range(MAX_NGRAM, MIN_NGRAM - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if n <= len(tokens) and tokens[end - n : end] == tokens[-n:]:
                longer = list(tokens)
                for place in range(end, end + k):
                    longer.append(longer[place])
                return longer[len(tokens) :]
    return []


# ---- proposals


def test_proposes_the_tokens_that_followed_before() -> None:
    assert propose(fresh(), sequence(REPEATING), 2).tokens == [7, 1]


def test_longer_match_wins_over_later_match() -> None:
    tokens = [1, 2, 3, 4, 70, 9, 3, 4, 80, 1, 2, 3, 4]
    assert propose(fresh(), sequence(tokens), 1).tokens == [70]


def test_latest_of_equally_long_matches_wins() -> None:
    tokens = [1, 2, 70, 8, 1, 2, 80, 9, 1, 2]
    assert propose(fresh(), sequence(tokens), 1).tokens == [80]


def test_continuation_that_reaches_the_end_is_repeated() -> None:
    assert propose(fresh(), sequence([6, 7, 8, 6, 7, 8]), 7).tokens == [6, 7, 8, 6, 7, 8, 6]
    assert propose(fresh(), sequence([4, 4, 4]), 3).tokens == [4, 4, 4]


@pytest.mark.parametrize("tokens", [[1], [1, 2], DISTINCT, [1, 2, 3, 1]])
def test_nothing_is_proposed_without_a_match(tokens: list[int]) -> None:
    assert propose(fresh(), sequence(tokens), 4) == Draft([])
    assert propose(fresh(), sequence(tokens, SamplingParams(temperature=1.0)), 4) == Draft([])


def test_proposes_at_most_k_tokens() -> None:
    for k in range(6):
        assert len(propose(fresh(), sequence(REPEATING), k).tokens) == k


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.lists(st.integers(1, 5), max_size=6), st.integers(0, 6))
def test_incremental_index_equals_brute_force(tokens: list[int], steps: list[int], k: int) -> None:
    drafter, one = fresh(), sequence(tokens[:1])
    for length in [1, *np.cumsum(steps).tolist(), len(tokens)]:
        one.tokens = tokens[: max(length, len(one.tokens))]
        assert propose(drafter, one, k).tokens == expected(one.tokens, k)
        drafter.rewind({one.id: len(one.tokens) - 1})


def test_sequences_are_independent_and_released() -> None:
    drafter = fresh()
    first, second = sequence(REPEATING, number=1), sequence(DISTINCT, number=2)
    assert propose(drafter, first, 1).tokens == [7]
    assert propose(drafter, second, 1).tokens == []
    drafter.release(1)
    drafter.release(1)
    assert propose(drafter, sequence(DISTINCT, number=1), 1).tokens == []


# ---- in the engine


def build(target: Path, **options: object) -> LLM:
    return LLM(str(target), "ngram", **{"progress": False, "num_speculative_tokens": 4, **options})


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("share", [0, 1])
def test_greedy_output_equals_transformers(pair: Pair, k: int, share: int) -> None:
    slots = TOP_K if share == 0 else LAYERS * expert_count(pair.target)
    params = SamplingParams(max_tokens=COUNT, ignore_eos=True)
    with build(pair.target, num_speculative_tokens=k, expert_memory=memory_for(slots), prefill_chunk=3) as llm:
        for prompt in (REPEATING * 3, DISTINCT, [84]):
            assert llm.generate(prompt, params)[0].token_ids == greedy_tokens(pair.target, prompt, COUNT)
        assert llm.engine.counters.drafted > 0


def test_steps_without_a_match_decode_one_token(pair: Pair) -> None:
    with build(pair.target, num_speculative_tokens=4) as llm:
        completion = llm.generate(DISTINCT, SamplingParams(max_tokens=2, ignore_eos=True))[0]
        assert completion.stats.counters.drafted == 0
        assert completion.stats.counters.steps == 2


def test_repetitive_text_takes_fewer_steps() -> None:
    """The included pair continues a list of similar lines."""
    prompt = "".join(f"self.assertEqual(reader.read({i}), {i})\n" for i in range(6))
    params, found = SamplingParams(max_tokens=40, ignore_eos=True), []
    for draft, k in (("none", 0), ("ngram", 4)):
        with LLM(draft=draft, num_speculative_tokens=k, dtype="float32", progress=False) as llm:
            found.append(llm.generate(prompt, params)[0])
    plain, drafted = found
    assert drafted.token_ids == plain.token_ids
    assert drafted.stats.counters.accepted > 20
    assert drafted.stats.counters.steps < plain.stats.counters.steps / 2


def test_falls_back_to_next_gate_with_a_notice(pair: Pair) -> None:
    with build(pair.target, prefetch="draft-gate") as llm:
        engine: Engine = llm.engine
        (notice,) = llm.notices
        assert "no hidden states" in notice
        assert "the target's own layers" in notice
        assert isinstance(engine.loop.policy, NextGate)
        stats = llm.generate(REPEATING, SamplingParams(max_tokens=4))[0].stats
        assert stats.prefetch == "next-gate"
        assert stats.counters.prefetches_requested
    for prefetch in ("on-demand", "auto"):
        with build(pair.target, prefetch=prefetch) as llm:
            assert llm.notices == [], "predictions were not requested"
    with build(pair.target, num_speculative_tokens=0, prefetch="draft-gate") as llm:
        assert llm.notices == []
        assert llm.engine.loop.max_draft_tokens == 0


def test_works_without_a_tokenizer_and_stays_in_the_vocabulary(pair: Pair, tmp_path: Path) -> None:
    bare = tmp_path / "target"
    reference(pair.target).save_pretrained(bare)
    with build(bare) as llm:
        tokens = llm.generate(REPEATING, SamplingParams(max_tokens=8, temperature=1.0, seed=1))[0].token_ids
        assert all(0 <= token < VOCABULARY for token in tokens)


def test_target_with_recurrent_state(recurrent_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram._Index, "find", lambda index, tokens: 1)  # its text never repeats: force a match
    model = reference(recurrent_target)
    with build(recurrent_target, expert_memory="50%", prefill_chunk=3) as llm:
        found = llm.generate(REPEATING * 3, SamplingParams(max_tokens=COUNT, ignore_eos=True))[0]
        assert found.token_ids == greedy(model, REPEATING * 3, COUNT)
        assert found.stats.counters.drafted > 0
