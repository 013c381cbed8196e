"""Registries: policies from outside the package, registered by a call or found as entry points."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from checkpoints import LAYERS, Pair
from spmoe import LLM, SamplingParams
from spmoe.config import EngineConfig
from spmoe.errors import UsageError
from spmoe.experts.eviction import ScoredEviction, make_eviction
from spmoe.predict.policies import make_policy
from spmoe.predict.policies.base import Need, PolicyContext, PrefetchPolicy
from spmoe.registry import DRAFTERS, EVICTION_POLICIES, PREFETCH_POLICIES, WEIGHT_FORMATS, Registry
from spmoe.types import ExpertKey, PrefetchRequest, PrefetchRequests

PROMPTS = ["the cat", "a dog and"]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


class Repeat(PrefetchPolicy):
    """Requests, as a step begins, the experts that the last step used."""

    needs = frozenset({Need.ROUTING})
    learns = True
    eviction = "first-come"

    def __init__(self, layers: int) -> None:
        self._last: list[set[int]] = [set() for _ in range(layers)]

    @classmethod
    def build(cls, context: PolicyContext) -> Self:
        return cls(len(context.experts_per_layer))

    def begin_step(self, sequence_id: int) -> PrefetchRequests:
        keys = [ExpertKey(layer, expert) for layer, experts in enumerate(self._last) for expert in sorted(experts)]
        return PrefetchRequests.of(PrefetchRequest(key, 0.5, key.layer) for key in keys)

    def on_routed(self, layer: int, experts: Sequence[int]) -> PrefetchRequests:
        self._last[layer] = {*experts}
        return PrefetchRequests.of([])


class FirstCome(ScoredEviction):
    """Evicts experts with high indices first, and counts how often it was asked."""

    computed = 0

    def compute_scores(self) -> np.ndarray:
        type(self).computed += 1
        return np.broadcast_to(-np.arange(self.shape[1], dtype=float), self.shape)

    def score(self, key: ExpertKey) -> float:
        return 1.0


@pytest.fixture
def registered() -> Iterator[None]:
    """Register both toy policies for one test."""
    PREFETCH_POLICIES.register("repeat")(Repeat)
    EVICTION_POLICIES.register("first-come")(FirstCome)
    yield
    del PREFETCH_POLICIES._classes["repeat"], EVICTION_POLICIES._classes["first-come"]


def generate(pair: Pair, **options: Any) -> tuple[list[list[int]], Any]:
    """Return the tokens of each prompt, and the engine's statistics of the last."""
    fixed = {"num_speculative_tokens": 3, "expert_memory": "50%", "cutoff": "all", "progress": False}
    with LLM(str(pair.target), str(pair.good), **{**fixed, **options}) as llm:
        completions = llm.generate(PROMPTS, PARAMS)
        assert llm.notices == []
        return [completion.token_ids for completion in completions], completions[-1].stats


@pytest.fixture(scope="module")
def expected(mixtral_pair: Pair) -> list[list[int]]:
    return generate(mixtral_pair, prefetch="on-demand")[0]


# ---- the register call


def test_registered_policies_run_and_keep_the_output(
    registered: None, mixtral_pair: Pair, expected: list[list[int]]
) -> None:
    FirstCome.computed = 0
    tokens, stats = generate(mixtral_pair, prefetch="repeat", eviction="first-come")
    assert tokens == expected
    assert stats.prefetch == "repeat"
    assert stats.counters.prefetches_requested > 0
    assert stats.counters.prefetch_loads > 0
    assert FirstCome.computed > 0


def test_registered_policies_join_others(registered: None, mixtral_pair: Pair, expected: list[list[int]]) -> None:
    tokens, stats = generate(mixtral_pair, prefetch="draft-gate+repeat", eviction="lru")
    assert tokens == expected
    assert stats.prefetch == "draft-gate+repeat"


def test_a_policy_may_use_the_cutoff_without_a_draft(
    registered: None, monkeypatch: pytest.MonkeyPatch, mixtral_pair: Pair, expected: list[list[int]]
) -> None:
    cutoffs: list[int] = []
    monkeypatch.setattr(Repeat, "uses_cutoff", True)
    monkeypatch.setattr(Repeat, "set_cutoff", lambda self, layers: cutoffs.append(layers))
    for cutoff, layers in (("auto", LAYERS), (1, 1)):
        options = {"prefetch": "repeat", "cutoff": cutoff, "expert_memory": "50%", "progress": False}
        with LLM(str(mixtral_pair.target), None, **options) as llm:
            assert [completion.token_ids for completion in llm.generate(PROMPTS, PARAMS)] == expected
            assert llm.engine.prefetching.cutoff == layers == cutoffs[-1]


def test_registered_names_are_listed_and_accepted(registered: None) -> None:
    assert "repeat" in PREFETCH_POLICIES.names()
    assert "first-come" in EVICTION_POLICIES.names()
    config = EngineConfig.make(model="target", prefetch="repeat")
    assert config.eviction_policy == "first-come", "declared by the prefetch policy"
    assert EngineConfig.make(model="target", prefetch="next-gate+repeat", eviction="first-come").prefetch
    with pytest.raises(UsageError, match=r"prefetch must be one of .* repeat, "):
        EngineConfig.make(model="target", prefetch="repeated")


def test_a_registered_class_knows_its_name(registered: None) -> None:
    assert Repeat.name == "repeat"
    assert make_policy("repeat", PolicyContext([4, 4]))[0].name == "repeat"
    assert isinstance(make_eviction("first-come", [4, 4]), FirstCome)


def test_a_later_registration_replaces_an_earlier_one() -> None:
    registry: Registry[Any] = Registry("thing", "spmoe.no_such_package", "spmoe.no_such_group")
    assert registry.names() == ()
    for cls in (type("First", (), {}), type("Second", (), {})):
        registry.register("one")(cls)
        assert registry.load("one") is cls
    assert registry.names() == ("one",)


# ---- entry points

PLUGIN = """
    import numpy as np

    from spmoe.experts.eviction import ScoredEviction
    from spmoe.predict.policies.base import Need, PrefetchPolicy
    from spmoe.types import ExpertKey, PrefetchRequest, PrefetchRequests


    class FirstExperts(PrefetchPolicy):
        def begin_step(self, sequence_id):
            return PrefetchRequests.of(PrefetchRequest(ExpertKey(layer, 0), 1.0, layer) for layer in range(3))


    class Constant(ScoredEviction):
        def compute_scores(self):
            return np.zeros(self.shape)

        def score(self, key):
            return 1.0
"""
ENTRY_POINTS = """
    [spmoe.prefetch_policies]
    first-experts = toy_policies:FirstExperts

    [spmoe.eviction_policies]
    constant = toy_policies:Constant
"""


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Install a distribution with two entry points, for one test."""
    metadata = tmp_path / "toy_policies-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-policies\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(textwrap.dedent(ENTRY_POINTS))
    (tmp_path / "toy_policies.py").write_text(textwrap.dedent(PLUGIN))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    PREFETCH_POLICIES._classes.pop("first-experts", None)
    EVICTION_POLICIES._classes.pop("constant", None)
    sys.modules.pop("toy_policies", None)


def test_entry_points_are_found_without_importing_them(distribution: Path) -> None:
    assert "first-experts" in PREFETCH_POLICIES.names()
    assert "constant" in EVICTION_POLICIES
    assert "toy_policies" not in sys.modules
    assert PREFETCH_POLICIES.load("first-experts").name == "first-experts"
    assert "toy_policies" in sys.modules


def test_distribution_that_is_installed_later_is_found(distribution: Path) -> None:
    assert "installed-later" not in PREFETCH_POLICIES
    later = distribution / "later-1.0.dist-info"
    later.mkdir()
    (later / "METADATA").write_text("Metadata-Version: 2.1\nName: later\nVersion: 1.0\n")
    (later / "entry_points.txt").write_text("[spmoe.prefetch_policies]\ninstalled-later = later:Policy\n")
    assert "installed-later" in PREFETCH_POLICIES
    shutil.rmtree(later)
    assert "installed-later" not in PREFETCH_POLICIES


def test_policies_of_entry_points_run_and_keep_the_output(
    distribution: Path, mixtral_pair: Pair, expected: list[list[int]]
) -> None:
    tokens, stats = generate(mixtral_pair, prefetch="first-experts", eviction="constant")
    assert tokens == expected
    assert stats.prefetch == "first-experts"
    assert stats.counters.prefetches_requested > 0


# ---- names


@pytest.mark.parametrize(
    ("registry", "kind", "name"),
    [(PREFETCH_POLICIES, "prefetch policy", "draft-gate"), (EVICTION_POLICIES, "eviction policy", "draft-informed")],
)
def test_unknown_names_are_refused_with_the_names_that_exist(registry: Registry[Any], kind: str, name: str) -> None:
    for use in (registry.load, registry.require):
        with pytest.raises(UsageError) as caught:
            use("magic")
        assert str(caught.value) == f"unknown {kind} 'magic'; choose one of {', '.join(registry.names())}"
        assert name in str(caught.value)
    assert "magic" not in registry
    assert name in registry
    assert registry.require(name) == name


def test_every_module_registers_its_own_name() -> None:
    for registry in (PREFETCH_POLICIES, EVICTION_POLICIES):
        for name in registry.names():
            cls = registry.load(name)
            assert cls.name == name
            assert cls.__module__.rpartition(".")[2] == name.replace("-", "_")


def test_every_family_registers_the_names_that_its_module_lists() -> None:
    for name in WEIGHT_FORMATS.names():
        cls = WEIGHT_FORMATS.load(name)
        assert name in sys.modules[cls.__module__].NAMES
        assert cls.from_name(name).name == name


def test_listing_and_checking_names_imports_no_torch() -> None:
    code = """
import sys
from spmoe.config import EngineConfig
from spmoe.registry import DRAFTERS, EVICTION_POLICIES, PREFETCH_POLICIES, WEIGHT_FORMATS
print(*PREFETCH_POLICIES.names(), *EVICTION_POLICIES.names(), *DRAFTERS.names(), *WEIGHT_FORMATS.names())
EngineConfig.make(model="target", prefetch="draft-gate+next-gate", eviction="lru", expert_format="int4-g64")
print(*sorted({"torch", "transformers", "numpy"} & sys.modules.keys()))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names, heavy = result.stdout.splitlines()
    here = {*PREFETCH_POLICIES.names(), *EVICTION_POLICIES.names(), *DRAFTERS.names(), *WEIGHT_FORMATS.names()}
    assert {"draft-gate", "lru", "ngram", "mxfp4"} < {*names.split()} <= here, "other tests may have registered more"
    assert heavy == ""
