"""Reconfiguring a loaded engine between requests, and the decoding part of its statistics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from checkpoints import Pair
from spmoe import LLM, SamplingParams
from spmoe.config import Cutoff
from spmoe.draft.model import DraftModel
from spmoe.draft.none import NoDraft
from spmoe.engine.profiling import read_profile
from spmoe.engine.runtime import ExpertRuntime
from spmoe.errors import UsageError
from spmoe.observe.ledger import Counters
from spmoe.predict.policies.draft_gate import DraftGate
from spmoe.predict.policies.on_demand import OnDemand

PROMPT = "the cat"
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
OPTIONS: dict[str, Any] = {"expert_memory": "50%", "progress": False}


@pytest.fixture
def llm(mixtral_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    monkeypatch.setenv("SPMOE_HOME", str(tmp_path / "home"))
    pair = (str(mixtral_pair.target), str(mixtral_pair.random))
    with LLM(*pair, **OPTIONS, num_speculative_tokens=4, prefetch="draft-gate") as llm:
        yield llm


@pytest.mark.parametrize(("prefetch", "k"), [("on-demand", 0), ("draft-gate", 0), ("on-demand", 2), ("draft-gate", 4)])
def test_reconfigured_engine_equals_a_newly_built_one(llm: LLM, mixtral_pair: Pair, prefetch: str, k: int) -> None:
    drafter = llm.engine.loop.drafter
    pair = (str(mixtral_pair.target), str(mixtral_pair.random))
    with LLM(*pair, **OPTIONS, num_speculative_tokens=k, prefetch=prefetch, cutoff="auto") as built:
        expected = built.generate(PROMPT, PARAMS)[0]
        policy = type(built.engine.loop.policy)
        budget = built.engine.experts.scheduler.step_budget
    llm.engine.reconfigure(prefetch="on-demand", num_speculative_tokens=3)
    llm.engine.reconfigure(prefetch=prefetch, num_speculative_tokens=k)
    found = llm.generate(PROMPT, PARAMS)[0]
    assert found.token_ids == expected.token_ids
    assert found.stats.draft_tokens == expected.stats.draft_tokens == k
    assert found.stats.prefetch == expected.stats.prefetch
    assert found.stats.cutoff_layers == expected.stats.cutoff_layers
    assert found.stats.counters.accepted_at == expected.stats.counters.accepted_at
    assert type(llm.engine.loop.policy) is policy
    assert llm.engine.experts.scheduler.step_budget == budget
    assert llm.engine.loop.drafter is drafter if k else isinstance(llm.engine.loop.drafter, NoDraft)


def test_profile_is_kept_per_number_of_draft_tokens(llm: LLM) -> None:
    engine = llm.engine
    learned: dict[int, Any] = {}
    for k in (4, 2):
        engine.reconfigure(prefetch="draft-gate", num_speculative_tokens=k)
        assert isinstance(engine.loop.policy, DraftGate)
        assert engine.prefetching.profile is not None
        assert engine.prefetching.profile.missing_per_layer is None
        for _ in range(3):
            llm.generate(PROMPT, PARAMS)
        engine.reconfigure(prefetch="on-demand", num_speculative_tokens=k)
        assert isinstance(engine.loop.policy, OnDemand)
        assert engine.prefetching.cutoff is engine.prefetching.profile is None
        llm.generate(PROMPT, PARAMS)
    assert len(engine.learned.profiles) == 2
    for k in (4, 2):
        engine.reconfigure(prefetch="draft-gate", num_speculative_tokens=k)
        profile = engine.prefetching.profile
        assert profile is not None
        assert profile.missing_per_layer is not None
        own = engine.counters.minus(engine.prefetching.since)
        assert own.verified >= 16
        assert profile.missing_per_layer == pytest.approx(own.missing / own.verified / len(engine.target.moe))
        learned[k] = profile
    assert learned[4].missing_per_layer != learned[2].missing_per_layer
    files = list(engine.learned.profiles)
    llm.close()
    assert [read_profile(file) for file in files] == [profile for profile, _ in engine.learned.profiles.values()]


@pytest.mark.parametrize(
    "change",
    [{"eviction": "lru"}, {"batching": False}, {"overlap": False}, {"prefetch": "draft-gate+next-gate"}],
    ids=str,
)
def test_other_configuration_has_its_own_profile(llm: LLM, change: dict[str, Any]) -> None:
    engine = llm.engine
    engine.reconfigure(prefetch="draft-gate", num_speculative_tokens=4)
    for _ in range(3):
        llm.generate(PROMPT, PARAMS)
    before = engine.prefetching.profile_file
    engine.reconfigure(**change)
    assert engine.prefetching.profile_file != before
    assert engine.prefetching.profile is not None
    assert engine.prefetching.profile.missing_per_layer is None


def test_reconfigure_without_changes_keeps_the_policy(llm: LLM) -> None:
    policy = llm.engine.loop.policy
    llm.engine.reconfigure(prefetch="draft-gate", num_speculative_tokens=4)
    assert llm.engine.loop.policy is policy
    assert isinstance(llm.engine.loop.drafter, DraftModel)


@pytest.mark.parametrize(
    "changes",
    [
        {"batching": False},
        {"overlap": False},
        {"eviction": "lru"},
        {"cutoff": Cutoff.parse(1)},
        {"cutoff": Cutoff.parse("all"), "batching": False, "overlap": False},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_switches_do_not_change_tokens(llm: LLM, changes: dict[str, Any]) -> None:
    expected = llm.generate(PROMPT, PARAMS)[0]
    pool = llm.engine.experts.pool
    eviction = pool._cache.eviction
    llm.engine.reconfigure(**changes)
    found = llm.generate(PROMPT, PARAMS)[0]
    assert found.token_ids == expected.token_ids
    assert found.stats.counters.prefetches_requested > 0
    assert pool._loads.batching is changes.get("batching", True)
    overlap = llm.engine.experts.scheduler.overlap
    assert overlap is changes.get("overlap", True)
    if not overlap:
        assert found.stats.counters.late == 0, "every prefetch has finished before verification"
        assert found.stats.counters.stall_seconds > 0
    assert (pool._cache.eviction is not eviction) == ("eviction" in changes)
    if changes.get("cutoff") == Cutoff.parse(1):
        assert found.stats.cutoff_layers == 1
    llm.engine.reconfigure(batching=True, overlap=True, eviction="auto", cutoff=Cutoff.parse("auto"))
    assert pool._cache.eviction is eviction, "keeps its learned state"
    assert llm.generate(PROMPT, PARAMS)[0].token_ids == expected.token_ids


def test_dtype_cannot_be_reconfigured(llm: LLM) -> None:
    with pytest.raises(UsageError, match="dtype cannot be changed"):
        llm.engine.reconfigure(dtype="bfloat16")


def test_learning_policies_are_reused(llm: LLM) -> None:
    engine, policies, evictions = llm.engine, {}, {}
    for _ in range(2):
        for prefetch in ("activation", "adaptive", "on-demand"):
            engine.reconfigure(prefetch=prefetch)
            assert policies.setdefault(prefetch, engine.loop.policy) is engine.loop.policy or prefetch == "on-demand"
            eviction = engine.experts.pool._cache.eviction
            assert evictions.setdefault(prefetch, eviction) is eviction
            llm.generate(PROMPT, PARAMS)
    assert len({*map(id, evictions.values())}) == 3, "one eviction policy each"
    engine.reconfigure(prefetch="activation", num_speculative_tokens=2)
    assert engine.loop.policy is not policies["activation"], "not shared between values of K"


def test_oracle_needs_a_recording(llm: LLM, mixtral_pair: Pair) -> None:
    before = llm.engine.loop.policy
    with pytest.raises(UsageError, match="recorded"):
        llm.engine.reconfigure(prefetch="oracle")
    assert llm.engine.loop.policy is before
    assert llm.engine.config.prefetch == "draft-gate"
    with pytest.raises(UsageError, match="recorded"):
        LLM(str(mixtral_pair.target), None, prefetch="oracle", **OPTIONS)


def test_unknown_policy_and_missing_draft_are_rejected(llm: LLM, mixtral_pair: Pair) -> None:
    with pytest.raises(UsageError, match="prefetch"):
        llm.engine.reconfigure(prefetch="guess", num_speculative_tokens=4)
    with LLM(str(mixtral_pair.target), None, **OPTIONS) as alone, pytest.raises(UsageError, match="without a draft"):
        alone.engine.reconfigure(prefetch="on-demand", num_speculative_tokens=1)


def test_decode_counters_exclude_the_prompt(llm: LLM) -> None:
    for k in (0, 4):
        llm.engine.reconfigure(prefetch="on-demand", num_speculative_tokens=k)
        stats = llm.generate(PROMPT, PARAMS)[0].stats
        prompt, decoded = stats.prompt_counters, stats.decode_counters
        assert prompt.steps == prompt.tokens == 1
        assert prompt.asked > 0
        assert decoded.steps == stats.counters.steps - 1
        assert decoded.tokens == 19
        assert prompt.drafted == 0
        assert decoded.asked + prompt.asked == stats.counters.asked
        assert stats.decode_seconds == pytest.approx(19 * (stats.tpot_seconds or 0))
    only = llm.generate(PROMPT, SamplingParams(max_tokens=1))[0].stats
    assert asdict(only.decode_counters) == asdict(Counters()) | {
        name: [0] * len(getattr(only.counters, name)) for name in ("drafted_at", "accepted_at")
    }


def test_stream_counts_nothing_before_it_starts(llm: LLM) -> None:
    stream = llm.stream(PROMPT, PARAMS)
    assert stream.completion.stats.prompt_counters.steps == 0
    assert not stream.stopped
    stream.stop()
    assert stream.stopped


def test_store_taken_from_the_runtime_is_not_closed() -> None:
    class Store:
        closed = False

        def close(self) -> None:
            self.closed = True

    given, kept = Store(), Store()
    runtime_class: Any = ExpertRuntime
    runtime = runtime_class(slots=None, transfer=None, backend=None, store=given)
    assert runtime.take_store() is given
    assert runtime.take_store() is None
    runtime.close()
    runtime_class(slots=None, transfer=None, backend=None, store=kept).close()
    assert (given.closed, kept.closed) == (False, True)
