"""`num_speculative_tokens="auto"`: exact, reproducible when sampling, and learned per configuration."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from checkpoints import Pair, greedy_tokens, memory_for
from spmoe import LLM, SamplingParams
from spmoe.bench.runs import IsolatedConfigs
from spmoe.engine.loop import Loop
from spmoe.errors import UsageError
from spmoe.experts.prefetch import PrefetchScheduler
from spmoe.predict.costs import StepReport
from spmoe.predict.cutoff import CutoffInputs
from spmoe.predict.governor import LENGTHS, USUAL, Governor
from spmoe.types import Admission, PrefetchRequests, Speculation, Turn
from spmoe.types import Sequence as TokenSequence
from spmoe.verify.sampling import PositionNoise

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
    assert found.token_ids == greedy_tokens(mixtral_pair.target, PROMPT, 60)
    assert len(drafted) > (1 if draft == "ngram" else 3), "K did change"


@pytest.mark.parametrize("seed", [7, None])
def test_sampled_requests_use_any_k(mixtral_pair: Pair, seed: int | None) -> None:
    with load(mixtral_pair) as llm:
        assert llm.engine.loop.governor is not None
        params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.9, seed=seed)
        stats = llm.generate(PROMPT, params)[0].stats
        assert stats.speculation is not None
        assert stats.speculation.steps == stats.decode_counters.steps == llm.engine.loop.governor.steps


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

    def num_draft_tokens(self: Loop, turns: Sequence[Turn]) -> int:
        found.append(original(self, turns))
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
        assert found.token_ids == greedy_tokens(mixtral_pair.target, PROMPT, 8)
        with pytest.raises(UsageError, match="without a draft"):
            llm.engine.reconfigure(num_speculative_tokens="auto", prefetch="on-demand")


@pytest.mark.parametrize("given", ["many", "1.5", "", 2.5, True, -1, 65, "-1", "65"])
def test_invalid_number_of_draft_tokens_is_rejected(mixtral_pair: Pair, given: Any) -> None:
    with pytest.raises(UsageError, match="num_speculative_tokens must be"):
        load(mixtral_pair, num_speculative_tokens=given)


def test_experience_is_kept_for_the_next_run(
    mixtral_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPMOE_HOME", str(tmp_path))
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    with load(mixtral_pair) as llm:
        assert llm.engine.loop.governor is not None
        assert llm.engine.loop.governor.plain_cost is None, "a new governor knows nothing"
        expected = llm.generate(PROMPT, params)[0].token_ids
        state = llm.engine.loop.governor.state()
    (file,) = (tmp_path / "profiles").glob("governor-*.json")
    with load(mixtral_pair) as llm:
        assert llm.engine.loop.governor is not None
        assert llm.engine.loop.governor.current == state["settled"]
        assert llm.engine.loop.governor.state()["costs"]["mean"] == state["costs"]["mean"]
        assert llm.generate(PROMPT, params)[0].token_ids == expected
    with load(mixtral_pair, expert_memory=memory_for(4)) as llm:
        assert llm.engine.loop.governor is not None
        assert llm.engine.loop.governor.acceptance.asked == 0, "other slots, other experience"
    file.write_text("{damaged")
    with load(mixtral_pair) as llm:
        assert llm.generate(PROMPT, params)[0].token_ids == expected


def test_statistics_say_which_k_was_used_and_what_it_gained(
    mixtral_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPMOE_HOME", str(tmp_path))  # nothing is learned yet, so it begins with drafts
    with load(mixtral_pair) as llm:
        stats = llm.generate(PROMPT, SamplingParams(max_tokens=60, ignore_eos=True))[0].stats
        assert stats.speculation is not None
        found = stats.to_dict()["speculation"]
        counted = stats.decode_counters
        assert 0 <= found["k_min"] <= found["k_mean"] <= found["k_max"] <= LENGTHS[-1]
        assert stats.speculation.steps == counted.steps
        assert found["plain_tpot_seconds"] > 0
        assert stats.speculation.seconds <= stats.decode_seconds
        summary = stats.speculation.summary()
        assert summary is not None
        assert summary.startswith(f"K {found['k_min']} to {found['k_max']} (mean ")
        assert "plain would have taken" in summary
    with load(mixtral_pair, num_speculative_tokens=3) as llm:
        assert llm.generate(PROMPT, SamplingParams(max_tokens=8))[0].stats.to_dict()["speculation"] is None


def test_steps_that_never_draft_are_called_plain_decoding() -> None:
    speculation = Speculation()
    speculation.add(0, 1, 0.02, 0.03)
    assert speculation.summary() == "K 0 in all steps: plain decoding"
    speculation.add(2, 3, 0.03, 0.02)
    assert speculation.summary() == "K 0 to 2 (mean 1.0); plain would have taken 22.5 ms/token, this took 12.5"


@pytest.mark.parametrize("draft", ["good", "ngram"])
def test_steps_without_a_draft_predict_nothing(mixtral_pair: Pair, draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain step of `auto` is one of `--draft none`: no draft pass, no prediction, no prefetch."""
    monkeypatch.setattr(Governor, "learn", lambda self, step: None)  # K stays 0
    with load(mixtral_pair, draft, prefetch="draft-gate+next-gate" if draft == "good" else "next-gate") as llm:
        stats = llm.generate(PROMPT, SamplingParams(max_tokens=20, ignore_eos=True))[0].stats
    assert stats.decode_counters.drafted == 0
    assert stats.decode_counters.prefetches_requested == 0


@pytest.mark.parametrize("prefetch", ["draft-gate", "auto"])
def test_a_draft_after_plain_steps_predicts_from_the_newest_token_only(
    mixtral_pair: Pair, prefetch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens that the draft has to catch up on are past: their experts are not needed again."""
    steps = iter([0, 0, 0, 0, 3, 0, 3] + [3] * 40)
    requested: list[int] = []

    def learn(self: Governor, step: StepReport) -> None:
        self.current = next(steps)

    original = PrefetchScheduler.request

    def request(self: PrefetchScheduler, requests: PrefetchRequests, admission: Admission | None = None) -> None:
        requested.append(len(requests))
        original(self, requests, admission)

    monkeypatch.setattr(Governor, "learn", learn)
    monkeypatch.setattr(PrefetchScheduler, "request", request)
    with load(mixtral_pair, prefetch=prefetch, cutoff="all") as llm:
        layers, top_k = len(llm.engine.target.moe), llm.engine.target.top_k
        requested.clear()
        found = llm.generate(PROMPT, SamplingParams(max_tokens=30, ignore_eos=True))[0]
        assert llm.notices == [], "no draft has failed"
    assert found.token_ids == greedy_tokens(mixtral_pair.target, PROMPT, 30)
    assert found.stats.decode_counters.drafted > 6
    assert max(requested[10:]) <= 2 * layers * top_k, "two rows at most: the newest token, and one accepted before it"


@pytest.mark.parametrize("draft", ["good", "random", "ngram"])
def test_acceptance_is_learned_from_plain_steps(
    mixtral_pair: Pair, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While K is 0, the draft is compared with what was decoded; its proposals would have been the same."""
    matches: list[bool | None] = []
    reports: list[StepReport] = []
    monkeypatch.setattr(Governor, "learn", lambda self, step: reports.append(step))  # K stays 0
    monkeypatch.setattr(Governor, "wants_comparison", lambda self, tokens, free=False: tokens >= 5)
    monkeypatch.setattr(Governor, "learn_matches", lambda self, found, seconds: matches.extend(found))
    with load(mixtral_pair, str(mixtral_pair.random) if draft == "random" else draft) as llm:
        found = llm.generate(PROMPT, SamplingParams(max_tokens=60, ignore_eos=True))[0]
        assert found.token_ids == greedy_tokens(mixtral_pair.target, PROMPT, 60)
        llm.engine.reconfigure(num_speculative_tokens=1, prefetch="on-demand")
        proposed = propose_each(llm, [*PROMPT, *found.token_ids], len(PROMPT))
    assert {step.k for step in reports} == {0}
    compared = sum(step.disturbed for step in reports)
    assert compared == (0 if draft == "ngram" else 58 // 5), "a model reads five tokens at a time"
    expected = [None if one is None else one == token for one, token in zip(proposed, found.token_ids, strict=True)]
    first = 0 if draft == "ngram" else 1  # a model has read the prompt when the first token comes
    assert matches == expected[first : first + len(matches)]
    assert len(matches) >= 45
    assert True in matches or draft == "random"
    assert set(matches) & {False, None}


def propose_each(llm: LLM, tokens: list[int], start: int) -> list[int | None]:
    """Return what the drafter proposes for each token from a place on, after the text before it."""
    drafter, observers = llm.engine.loop.drafter, llm.engine.loop._observers
    found: list[int | None] = []
    for end in range(start, len(tokens)):
        one = TokenSequence(
            10_000 + end, tokens[:end], start, SamplingParams(), PositionNoise(0), capacity=len(tokens) + 8
        )
        (draft,) = drafter.propose([one], 1, observers)
        found.append(draft.tokens[0] if draft.tokens else None)
        drafter.release(one.id)
    return found
