"""`num_speculative_tokens="auto"`: exact, reproducible when sampling, and learned per configuration."""

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
from spmoe.predict.governor import LENGTHS, USUAL, Governor, StepReport
from spmoe.types import Sequence

PROMPT = [(29 * i + 7) % 251 for i in range(11)]


def load(pair: Pair, draft: Path | str | None = "good", **options: Any) -> LLM:
    given = {"expert_memory": memory_for(6), "num_speculative_tokens": "auto", "progress": False, **options}
    return LLM(str(pair.target), str(pair.good) if draft == "good" else draft, **given)


@pytest.mark.parametrize("draft", ["good", "ngram", "self:int8"])
def test_changing_k_at_every_step_changes_no_token(
    mixtral_pair: Pair, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, drafted = random.Random(5), set[int]()

    def learn(self: Governor, step: StepReport) -> None:
        drafted.add(step.drafted)
        self.current = rng.choice(LENGTHS)

    monkeypatch.setattr(Governor, "learn", learn)
    with load(mixtral_pair, draft) as llm:
        found = llm.generate(PROMPT, SamplingParams(max_tokens=60, ignore_eos=True))[0]
        assert found.stats.draft_tokens == "auto"
    assert found.token_ids == greedy(reference(mixtral_pair.target), PROMPT, 60)
    assert len(drafted) > (1 if draft == "ngram" else 3), "K did change"


def test_sampled_tokens_do_not_depend_on_the_learned_k(mixtral_pair: Pair) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.9, seed=7)
    with load(mixtral_pair, num_speculative_tokens=USUAL) as llm:
        expected = llm.generate(PROMPT, params)[0].token_ids
    with load(mixtral_pair) as llm:
        assert llm.engine.loop.governor is not None
        for current in (0, 4, 16):
            llm.engine.loop.governor.current = current
            assert llm.generate(PROMPT, params)[0].token_ids == expected
            assert llm.engine.loop.governor.current == current, "sampling does not change it"


def test_prompt_step_is_not_learned_from(mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    learned: list[StepReport] = []
    monkeypatch.setattr(Governor, "learn", lambda self, step: learned.append(step))
    with load(mixtral_pair) as llm:
        stats = llm.generate(PROMPT, SamplingParams(max_tokens=20, ignore_eos=True))[0].stats
    decoded = stats.decode_counters
    assert len(learned) == decoded.steps
    assert sum(step.drafted for step in learned) == decoded.drafted
    assert sum(step.accepted for step in learned) == decoded.accepted
    assert sum(step.needed for step in learned) == decoded.asked
    assert sum(step.missing for step in learned) == decoded.useful_loads
    assert 0 < sum(step.seconds for step in learned) <= stats.latency_seconds


def test_k_of_the_launched_draft_is_used_in_the_next_step(mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    original = Loop._num_draft_tokens

    def num_draft_tokens(self: Loop, sequence: Sequence, max_new_tokens: int) -> int:
        found.append(original(self, sequence, max_new_tokens))
        return found[-1]

    monkeypatch.setattr(Loop, "_num_draft_tokens", num_draft_tokens)
    with load(mixtral_pair) as llm:
        llm.generate(PROMPT, SamplingParams(max_tokens=40, ignore_eos=True))
    launched, used = found[1::2], found[2::2]
    assert launched[: len(used)] == used, "the launched draft is the one that is used"


def test_isolated_configurations_learn_separately(mixtral_pair: Pair) -> None:
    with load(mixtral_pair, num_speculative_tokens=16, prefetch="on-demand") as llm:
        assert llm.engine.loop.governor is None
        configs, changes = IsolatedConfigs(llm.engine), {"num_speculative_tokens": "auto"}
        lengths = []
        for name in ("one", "other", "one"):
            configs.select(name, changes)
            lengths.append(llm.engine.loop.governor)
        assert lengths[0] is lengths[2] is not lengths[1]
        configs.select("fixed", {"num_speculative_tokens": 3})
        assert llm.engine.loop.governor is None
        assert llm.engine.loop.max_draft_tokens == 3


def test_auto_and_a_fixed_k_have_separate_profiles_and_policies(mixtral_pair: Pair) -> None:
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


def test_automatic_cutoff_uses_the_present_k(mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies must arrive during a draft of two tokens, not of the sixteen that are allowed."""
    used: list[int] = []

    def choose_cutoff(cutoff: object, profile: object, inputs: CutoffInputs) -> int:
        used.append(inputs.draft_tokens)
        return 1

    monkeypatch.setattr("spmoe.engine.prefetching.choose_cutoff", choose_cutoff)
    monkeypatch.setattr(Governor, "learn", lambda self, step: setattr(self, "current", 2))
    with load(mixtral_pair) as llm:
        llm.generate([PROMPT] * 2, SamplingParams(max_tokens=60, ignore_eos=True))
        llm.engine.learn_cutoff()
    assert (used[0], used[-1]) == (USUAL, 2)


def test_auto_without_a_draft_decodes_plainly(mixtral_pair: Pair) -> None:
    with load(mixtral_pair, draft=None) as llm:
        assert llm.engine.loop.governor is None
        found = llm.generate(PROMPT, SamplingParams(max_tokens=8, ignore_eos=True))[0]
        assert found.token_ids == greedy(reference(mixtral_pair.target), PROMPT, 8)
        with pytest.raises(UsageError, match="without a draft"):
            llm.engine.reconfigure(num_speculative_tokens="auto", prefetch="on-demand")


@pytest.mark.parametrize("given", ["many", "1.5", "", 2.5, True, -1, 65, "-1", "65"])
def test_invalid_number_of_draft_tokens_is_rejected(mixtral_pair: Pair, given: Any) -> None:
    with pytest.raises(UsageError, match="num_speculative_tokens must be"):
        load(mixtral_pair, num_speculative_tokens=given)
