"""The automatic cutoff learns the number of missing experts from requests and caches it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spmoe import LLM, SamplingParams
from spmoe.config import EngineConfig
from spmoe.engine.profiling import governor_path, profile_path, profile_settings, read_profile
from spmoe.models.checkpoint import Checkpoint
from spmoe.models.shipped import shipped_pair
from spmoe.predict.cutoff import CutoffInputs

DRAFT_GATE = {"num_speculative_tokens": 4, "prefetch": "draft-gate"}


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPMOE_HOME", str(tmp_path))
    return tmp_path


def test_learns_missing_experts_from_requests_and_caches_them(own_home: Path) -> None:
    options = {**DRAFT_GATE, "expert_memory": "25%", "dtype": "float32", "link_gbps": 1.0}
    long = SamplingParams(max_tokens=96, ignore_eos=True)
    with LLM(**options) as llm:
        profile = llm.engine.prefetching.profile
        assert profile is not None
        assert profile.missing_per_layer is None
        llm.generate("def f(x):", long)
        counters = llm.engine.counters
        assert counters.verified >= 16, "enough steps to learn from"
        llm.generate("x", SamplingParams(max_tokens=1))
        learned = llm.engine.prefetching.profile.missing_per_layer
        layers = len(llm.engine.target.moe)
        assert learned == pytest.approx(counters.missing / counters.verified / layers)
        assert 0 < learned <= 8
        cutoff = llm.engine.prefetching.cutoff
        assert llm.engine.loop.policy.cutoff == cutoff
    (cached,) = (own_home / "profiles").glob("*.json")
    found = read_profile(cached)
    assert found is not None
    assert found.missing_per_layer == pytest.approx(learned, rel=0.2)
    with LLM(**options) as again:
        assert again.engine.prefetching.profile == found


def test_engines_that_compute_on_the_cpu_keep_profiles_of_their_own() -> None:
    """They miss other experts, and their steps take other times."""

    def files(**options: Any) -> set[Path]:
        config = EngineConfig.make(model=shipped_pair()[0], **options)
        settings = profile_settings(config, Checkpoint.find(config.model), None, CutoffInputs(2, 8, 2, 8, 4))
        return {profile_path(settings), governor_path(settings)}

    found = [files(**options) for options in ({}, {"cpu_experts": "auto"}, {"cpu_experts": 2}, {"cpu_experts": 3})]
    assert len(set.union(*found)) == 2 * len(found)
    assert files(cpu_experts="off") == found[0]


def test_cached_profile_with_an_invalid_value_is_not_read(tmp_path: Path) -> None:
    valid = {
        "draft_seconds_per_layer": 1e-3,
        "draft_layers": 2,
        "verify_seconds_per_layer": 1e-3,
        "seconds_per_expert": 1e-3,
        "free_slots": 4,
    }
    path = tmp_path / "profile.json"
    for missing, usable in ((None, True), (1.5, True), (-1.0, False), ("many", False), (True, False)):
        path.write_text(json.dumps({**valid, "missing_per_layer": missing}))
        assert (read_profile(path) is not None) == usable


def test_fixed_cutoff_learns_nothing(own_home: Path) -> None:
    with LLM(expert_memory="25%", dtype="float32", cutoff=3, **DRAFT_GATE) as llm:
        llm.generate("def f(x):", SamplingParams(max_tokens=80, ignore_eos=True))
        llm.generate("x", SamplingParams(max_tokens=1))
        assert llm.engine.prefetching.cutoff == 3
    assert not list(own_home.glob("profiles/*.json"))
