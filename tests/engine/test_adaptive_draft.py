"""Drafts of a length that is chosen as steps go: exact, repeatable where dice are thrown, learnt by each for itself."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from checkpoints import Pair, greedy, memory_for, reference
from spmoe import LLM, SamplingParams
from spmoe.bench.runs import IsolatedConfigs
from spmoe.engine.loop import Loop
from spmoe.errors import UsageError
from spmoe.predict.cutoff import CutoffInputs
from spmoe.predict.draft_length import FIRST, LENGTHS, DraftLength
from spmoe.types import Sequence

PROMPT = [(29 * i + 7) % 251 for i in range(11)]


def load(pair: Pair, draft: Path | str | None = "good", **options: Any) -> LLM:
    given = {"expert_memory": memory_for(6), "num_speculative_tokens": "auto", "progress": False, **options}
    return LLM(str(pair.target), str(pair.good) if draft == "good" else draft, **given)


@pytest.mark.parametrize("draft", ["good", "ngram", "self:int8"])
def test_lengths_that_change_at_every_step_change_no_token(
    mixtral_pair: Pair, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice, drafted = random.Random(5), set[int]()

    def learn(self: DraftLength, drafted_now: int, *rest: Any) -> None:
        drafted.add(drafted_now)
        self.current = dice.choice(LENGTHS)

    monkeypatch.setattr(DraftLength, "learn", learn)
    with load(mixtral_pair, draft) as llm:
        found = llm.generate(PROMPT, SamplingParams(max_tokens=60, ignore_eos=True))[0]
        assert found.stats.draft_tokens == "auto"
    assert found.token_ids == greedy(reference(mixtral_pair.target), PROMPT, 60)
    assert len(drafted) > (1 if draft == "ngram" else 3), "lengths did change"


def test_what_is_drawn_at_random_does_not_depend_on_what_was_learnt(mixtral_pair: Pair) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.9, seed=7)
    with load(mixtral_pair, num_speculative_tokens=FIRST) as llm:
        expected = llm.generate(PROMPT, params)[0].token_ids
    with load(mixtral_pair) as llm:
        assert llm.engine.loop.draft_length is not None
        for current in (0, 4, 16):
            llm.engine.loop.draft_length.current = current
            assert llm.generate(PROMPT, params)[0].token_ids == expected
            assert llm.engine.loop.draft_length.current == current, "nor does it teach anything"


def test_the_step_that_reads_the_prompt_teaches_nothing(mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(DraftLength, "learn", lambda self, k, kept, *seconds: told.append((k, kept)))
    with load(mixtral_pair) as llm:
        stats = llm.generate(PROMPT, SamplingParams(max_tokens=20, ignore_eos=True))[0].stats
    decoded = stats.decode_counters
    assert len(told) == decoded.steps
    assert (sum(one[0] for one in told), sum(one[1] for one in told)) == (decoded.drafted, decoded.accepted)


def test_a_length_holds_from_the_end_of_one_step_through_the_next(
    mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    length = Loop._draft_length

    def note(self: Loop, sequence: Sequence, room: int) -> int:
        asked.append(length(self, sequence, room))
        return asked[-1]

    monkeypatch.setattr(Loop, "_draft_length", note)
    with load(mixtral_pair) as llm:
        llm.generate(PROMPT, SamplingParams(max_tokens=40, ignore_eos=True))
    begun, used = asked[1::2], asked[2::2]
    assert begun[: len(used)] == used, "a draft that was begun is the one that is used"


def test_configurations_that_are_kept_apart_learn_apart(mixtral_pair: Pair) -> None:
    with load(mixtral_pair, num_speculative_tokens=16, prefetch="on-demand") as llm:
        assert llm.engine.loop.draft_length is None
        apart, changes = IsolatedConfigs(llm.engine), {"num_speculative_tokens": "auto"}
        lengths = []
        for whose in ("one", "other", "one"):
            apart.select(whose, changes)
            lengths.append(llm.engine.loop.draft_length)
        assert lengths[0] is lengths[2] is not lengths[1]
        apart.select("fixed", {"num_speculative_tokens": 3})
        assert llm.engine.loop.draft_length is None
        assert llm.engine.loop.max_draft_tokens == 3


def test_what_is_learnt_for_it_is_not_what_is_learnt_for_the_most(mixtral_pair: Pair) -> None:
    with load(mixtral_pair, num_speculative_tokens=16) as llm:
        files, policies = [llm.engine.prefetching.profile_file], []
        for k in ("auto", 4):
            llm.engine.reconfigure(num_speculative_tokens=k, prefetch="draft-gate")
            files.append(llm.engine.prefetching.profile_file)
        for k in ("auto", 16):
            llm.engine.reconfigure(num_speculative_tokens=k, prefetch="activation")
            policies.append(llm.engine.loop.policy)
    assert len(set(files)) == 3
    assert policies[0] is not policies[1]


def test_no_copy_may_be_late_for_the_drafts_there_are(mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Just in time for two tokens, and not for the sixteen that there might be."""
    asked: list[int] = []

    def note(cutoff: object, profile: object, inputs: CutoffInputs) -> int:
        asked.append(inputs.draft_tokens)
        return 1

    monkeypatch.setattr("spmoe.engine.engine.choose_cutoff", note)
    monkeypatch.setattr("spmoe.engine.prefetching.choose_cutoff", note)
    monkeypatch.setattr(DraftLength, "learn", lambda self, *step: setattr(self, "current", 2))
    with load(mixtral_pair) as llm:
        llm.generate([PROMPT] * 2, SamplingParams(max_tokens=60, ignore_eos=True))
        llm.engine.learn_cutoff()
    assert (asked[0], asked[-1]) == (FIRST, 2)


def test_without_a_draft_there_is_nothing_to_choose(mixtral_pair: Pair) -> None:
    with load(mixtral_pair, draft=None) as llm:
        assert llm.engine.loop.draft_length is None
        found = llm.generate(PROMPT, SamplingParams(max_tokens=8, ignore_eos=True))[0]
        assert found.token_ids == greedy(reference(mixtral_pair.target), PROMPT, 8)
        with pytest.raises(UsageError, match="without a draft"):
            llm.engine.reconfigure(num_speculative_tokens="auto", prefetch="on-demand")


@pytest.mark.parametrize("given", ["many", "1.5", "", 2.5, True, -1, 65, "-1", "65"])
def test_what_is_neither_a_number_nor_auto(mixtral_pair: Pair, given: Any) -> None:
    with pytest.raises(UsageError, match="num_speculative_tokens must be"):
        load(mixtral_pair, num_speculative_tokens=given)
