"""Prefix reuse: a prompt starts from the KV cache of an earlier one, and its text does not change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpoints import Pair, byte_tokenizer, greedy, greedy_tokens, longrope, mixtral, reference, save, seeded
from recovery import Resources
from spmoe import LLM, SamplingParams
from spmoe.config import ONE_BY_ONE
from spmoe.engine.loop import Loop
from spmoe.engine.prompts import parse_prompt
from spmoe.models.kv import KvState
from spmoe.models.kv_pool import KvPool

COUNT = 8
GREEDY = SamplingParams(max_tokens=COUNT, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=COUNT, ignore_eos=True, temperature=1.0, seed=11)
FIRST = [(17 * place + 3) % 250 for place in range(21)]
OTHER = [*FIRST[:2], *((29 * place + 1) % 250 for place in range(19))]  # the first tokens are those of every chat
QUESTION = [9, 4, 7]
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


def build(pair: Pair, draft: str | None = None, **options: Any) -> LLM:
    name = str(getattr(pair, draft)) if draft in ("good", "random") else draft
    options = {"num_speculative_tokens": 3 if draft else 0, "expert_memory": "50%", "prefill_chunk": 8, **options}
    return LLM(str(pair.target), name, dtype="float32", progress=False, **options)


def ask(llm: LLM, prompt: list[int], params: SamplingParams = GREEDY) -> tuple[list[int], int]:
    """Return the tokens of a request, and how many of its prompt were cached."""
    output = llm.generate(prompt, params)[0]
    assert output.stats.to_dict()["cached_tokens"] == output.stats.cached_tokens
    return output.token_ids, output.stats.cached_tokens


def talk(llm: LLM, prompt: list[int], turns: int, params: SamplingParams = GREEDY) -> tuple[list[list[int]], list[int]]:
    """Return the answers of a conversation, and how many tokens of each prompt were cached."""
    answers, cached = [], []
    for _ in range(turns):
        answer, found = ask(llm, prompt, params)
        answers.append(answer)
        cached.append(found)
        prompt = [*prompt, *answer, *QUESTION]
    return answers, cached


@pytest.mark.parametrize(
    ("draft", "params"),
    [(None, GREEDY), ("good", GREEDY), ("random", SAMPLED), ("ngram", GREEDY), ("self:int4", SAMPLED)],
)
def test_a_conversation_reads_only_what_is_new(mixtral_pair: Pair, draft: str | None, params: SamplingParams) -> None:
    with build(mixtral_pair, None, **ONE_BY_ONE) as llm:
        expected, cached = talk(llm, FIRST, 3, params)
        assert cached == [0, 0, 0]
    with build(mixtral_pair, draft) as llm:
        found, cached = talk(llm, FIRST, 3, params)
    assert found == expected
    read = len(FIRST) + COUNT - 1  # the model does not read the last token of an answer
    assert cached == [0, read, read + len(QUESTION) + COUNT]


def test_the_draft_reuses_its_own_kv_cache(mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[KvPool, int]] = []
    take = KvPool.take

    def noted(self: KvPool, capacity: int, tokens: list[int] | None = None, preferred: int = 0) -> KvState:
        kv = take(self, capacity, tokens, preferred)
        taken.append((self, kv.length))
        return kv

    monkeypatch.setattr(KvPool, "take", noted)
    with build(mixtral_pair, "good") as llm:
        runner = llm.engine.parts.drafter.runner
        assert runner is not None
        taken.clear()
        answers, _ = talk(llm, FIRST, 2)
        drafted = llm.engine.counters.accepted
    read = len(FIRST) + COUNT - 1
    first, second = (length for pool, length in taken if pool is runner.kv_pool)
    assert first == 0
    assert read - 4 < second <= read, "all but the end, for which there was no draft"
    assert drafted > 0
    model = reference(mixtral_pair.target)
    assert answers[1] == greedy(model, [*FIRST, *answers[0], *QUESTION], COUNT)


def test_conversations_do_not_destroy_each_others_caches(mixtral_pair: Pair) -> None:
    with build(mixtral_pair, "good") as llm:
        prompts = {0: FIRST, 1: OTHER}
        cached: dict[int, list[int]] = {0: [], 1: []}
        for _ in range(3):
            for number, prompt in prompts.items():
                answer, found = ask(llm, prompt)
                cached[number].append(found)
                assert answer == greedy_tokens(mixtral_pair.target, prompt, COUNT)
                prompts[number] = [*prompt, *answer, *QUESTION]
    for number, found in cached.items():
        assert found == [2 * number, len(FIRST) + COUNT - 1, len(FIRST) + 2 * COUNT + len(QUESTION) - 1]


def test_conversations_with_the_same_long_beginning_keep_their_own_caches(mixtral_pair: Pair) -> None:
    """A new one copies the beginning while there is place."""
    system, cached = [(31 * place + 2) % 250 for place in range(40)], list[int]()
    with build(mixtral_pair, "good") as llm:
        prompts = [[*system, *((13 * place + number) % 250 for place in range(10))] for number in range(3)]
        length = len(prompts[0])
        for _ in range(3):
            for number, prompt in enumerate(prompts):
                answer, found = ask(llm, prompt)
                cached.append(found)
                assert answer == greedy_tokens(mixtral_pair.target, prompt, COUNT)
                prompts[number] = [*prompt, *answer, *QUESTION]
    turn = COUNT + len(QUESTION)
    assert cached == [0, 40, 40, *[length + COUNT - 1] * 3, *[length + turn + COUNT - 1] * 3]


def test_the_same_prompt_again_reads_its_last_token(mixtral_pair: Pair) -> None:
    with build(mixtral_pair, "good") as llm:
        answer, cached = ask(llm, FIRST)
        assert cached == 0
        assert ask(llm, FIRST) == (answer, len(FIRST) - 1)
        shorter = FIRST[:10]
        assert ask(llm, shorter) == (greedy_tokens(mixtral_pair.target, shorter, COUNT), 9)
        assert ask(llm, FIRST[:1])[1] == 0


@pytest.mark.parametrize("draft", [None, "good", "self:int4"])
def test_completions_of_one_prompt_share_it(mixtral_pair: Pair, draft: str | None) -> None:
    params = replace(SAMPLED, n=3)
    with build(mixtral_pair, None, **ONE_BY_ONE) as llm:
        expected = [one.token_ids for one in llm.generate(FIRST, params)[0].outputs]
    with build(mixtral_pair, draft, prefill_chunk=512) as llm:
        generations = llm.new_request(parse_prompt(FIRST), params)
        llm._thread.call(lambda: [generation.start() for generation in generations])
        outputs = [generation.run() for generation in generations]
    assert [output.token_ids for output in outputs] == expected
    assert [output.stats.cached_tokens for output in outputs] == [0, len(FIRST) - 1, len(FIRST) - 1]


@pytest.mark.parametrize("draft", [None, "good"])
def test_completions_of_a_prompt_of_several_chunks_share_it(mixtral_pair: Pair, draft: str | None) -> None:
    with build(mixtral_pair, draft, prefill_chunk=8) as llm:
        generations = llm.new_request(parse_prompt(FIRST), replace(SAMPLED, n=3))
        llm._thread.call(lambda: [generation.start() for generation in generations])
        outputs = [generation.run() for generation in generations]
    assert [output.stats.cached_tokens for output in outputs] == [0, len(FIRST) - 1, len(FIRST) - 1]


def test_cached_tokens_of_several_completions_are_those_of_the_first(mixtral_pair: Pair) -> None:
    """Later completions find the whole prompt in the KV cache of the first one."""
    with build(mixtral_pair, prefill_chunk=512) as llm:
        assert ask(llm, FIRST, replace(SAMPLED, n=3))[1] == 0
        assert ask(llm, FIRST, replace(SAMPLED, n=3))[1] == len(FIRST) - 1


# ---- caches that must not be reused


@pytest.mark.parametrize(
    ("draft", "point"), [(None, "_verify"), ("good", "_judge"), ("good", "_accept"), ("self:int4", "_verify")]
)
def test_the_cache_of_a_failed_step_is_not_reused(
    mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch, draft: str | None, point: str
) -> None:
    own = getattr(Loop, point)

    def fail(self: Loop, *args: Any) -> Any:
        result = own(self, *args)
        if any(kv.length > len(FIRST) + 1 for kv in llm.engine.parts.target_kv.values()):
            raise RuntimeError("injected")
        return result

    with build(mixtral_pair, draft) as llm:
        resources = Resources(llm)
        with monkeypatch.context() as patch:
            patch.setattr(Loop, point, fail)
            with pytest.raises(RuntimeError, match="injected"):
                ask(llm, FIRST)
        assert ask(llm, FIRST) == (greedy_tokens(mixtral_pair.target, FIRST, COUNT), 0)
        assert resources.lost() == []


def test_tokens_that_a_sequence_reads_again_are_not_cached_ones(
    mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed draft a sequence starts again, and finds the chunks of its prompt that it has read itself."""
    with build(mixtral_pair, "good") as llm:
        drafter = llm.engine.parts.drafter
        own = drafter.propose

        def propose(sequences: Sequence[Any], k: int, observers: Any) -> Any:
            if k == 0 and sequences[0].tokens[: len(FIRST)] == FIRST:
                raise ZeroDivisionError
            return own(sequences, k, observers)

        monkeypatch.setattr(drafter, "propose", propose)
        generations = [llm.stream([200, 201, 202], replace(GREEDY, max_tokens=30)), llm.stream(FIRST, GREEDY)]
        llm._thread.call(lambda: [generation.start() for generation in generations])
        _, output = [generation.run() for generation in generations]
    assert output.token_ids == greedy_tokens(mixtral_pair.target, FIRST, COUNT)
    assert output.stats.cached_tokens == 0


@pytest.mark.parametrize("rope", [longrope(64), DYNAMIC], ids=["longrope", "dynamic"])
def test_positions_that_depend_on_the_length_are_not_reused(tmp_path: Path, rope: dict[str, Any]) -> None:
    target = save(seeded(mixtral, 5, rope_parameters=rope), tmp_path, byte_tokenizer())
    with LLM(str(target), "ngram", progress=False, num_speculative_tokens=2) as llm:
        assert [one for one in llm.notices if "reads every prompt from its start (positions depend" in one]
        answers, cached = talk(llm, FIRST, 3)
    assert cached == [0, 0, 0]
    model, prompt = reference(target), FIRST
    for answer in answers:
        assert answer == greedy(model, prompt, COUNT)
        prompt = [*prompt, *answer, *QUESTION]


def test_state_that_cannot_be_cut_is_not_reused(recurrent_target: Path) -> None:
    with LLM(str(recurrent_target), None, progress=False, num_speculative_tokens=0) as llm:
        assert [one for one in llm.notices if "reads every prompt from its start (the model keeps other state" in one]
        answers, cached = talk(llm, FIRST, 2)
    assert cached == [0, 0]
    assert answers[1] == greedy_tokens(recurrent_target, [*FIRST, *answers[0], *QUESTION], COUNT)


@pytest.mark.parametrize("draft", [None, "good"])
def test_reuse_can_be_switched_off(mixtral_pair: Pair, draft: str | None) -> None:
    with build(mixtral_pair, draft, enable_prefix_caching=False) as llm:
        assert talk(llm, FIRST, 3)[1] == [0, 0, 0]
        assert llm.engine.target.kv_pool.spare == []


def test_the_oldest_conversations_are_dropped(mixtral_pair: Pair) -> None:
    prompts = [[number, *FIRST] for number in range(3)]
    size = len(prompts[0]) + COUNT
    with build(mixtral_pair) as llm:
        llm.engine.target.kv_pool.plan(None, 2 * size, reuse_prefixes=True)
        assert [ask(llm, prompt)[1] for prompt in prompts] == [0, 0, 0]
        assert [ask(llm, prompt)[1] for prompt in prompts[::-1]] == [len(FIRST), len(FIRST), 0]
        assert sum(kv.capacity for kv in llm.engine.target.kv_pool.spare) <= 2 * size
