"""Scenario files: validation, configurations made from them, and the files that ship with the source."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from spmoe.bench import scenario
from spmoe.bench.configs import ABLATIONS, BenchConfig, make_configs
from spmoe.bench.jobs import Workload, make_job, make_workloads
from spmoe.bench.scenario import Matrix, PolicyPair, read_scenario, validate
from spmoe.config import Cutoff, CutoffMode, EngineConfig, Size
from spmoe.errors import UsageError
from spmoe.files import config_directory, model_directory, shipped_configs
from spmoe.models.widen import SHAPES
from spmoe.registry import EVICTION_POLICIES, PREFETCH_POLICIES

ROOT = Path(__file__).parents[2]
SCENARIOS = sorted((ROOT / "src/spmoe/scenarios").glob("*.toml"))
QUARTER, HALF = Size(share=0.25), Size(share=0.5)
AUTO = Cutoff(CutoffMode.AUTO)


def pair(prefetch: str, eviction: str = "auto", **more: Any) -> PolicyPair:
    return PolicyPair(prefetch=prefetch, eviction=eviction, **more)


def read(tmp_path: Path, text: str, **overrides: Any) -> list[Matrix]:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    return read_scenario(file).matrices(validate(overrides, "options"))


# ---- configurations


def test_configurations_are_the_cross_product_in_order() -> None:
    found = make_configs([HALF, Size(share=1.0)], [pair("on-demand"), pair("draft-gate")], [4, 0])
    assert [str(one) for one in found] == [
        "50%, on-demand, K=4",
        "50%, on-demand, K=0",
        "50%, draft-gate, K=4",
        "100%, on-demand, K=4",
        "100%, on-demand, K=0",
        "100%, draft-gate, K=4",
    ]


def test_without_draft_only_draft_policies_become_on_demand() -> None:
    names = [*PREFETCH_POLICIES.names(), "draft-gate+next-gate"]
    found = make_configs([HALF], [pair(policy) for policy in names], [0])
    policies = {one.prefetch for one in found}
    assert policies == {policy for policy in names if "draft-gate" not in policy}
    named = make_configs([HALF], [pair("draft-gate", name="SP-MoE"), pair("next-gate", name="other")], [0, 1])
    assert [(one.prefetch, one.system) for one in named] == [
        ("on-demand", None), ("draft-gate", "SP-MoE"), ("next-gate", "other"), ("next-gate", "other")
    ]  # fmt: skip


def test_cutoffs_apply_to_policies_that_use_the_draft() -> None:
    cutoffs = [Cutoff(CutoffMode.FIXED, n) for n in (0, 3)]
    found = make_configs([HALF], [pair("draft-gate"), pair("next-gate")], [4], cutoffs)
    assert [(one.prefetch, one.cutoff) for one in found] == [
        ("draft-gate", cutoffs[0]), ("draft-gate", cutoffs[1]), ("next-gate", AUTO)
    ]  # fmt: skip


def test_ablation_switches_off_one_part_at_a_time() -> None:
    found = make_configs([HALF], [pair("draft-gate"), pair("on-demand")], [0, 4], ablation=True)
    off = {one.ablation: one for one in found if one.ablation is not None}
    assert list(off) == list(ABLATIONS)
    base = BenchConfig(HALF, "draft-gate", 4)
    for name, one in off.items():
        differing = {key for key, value in one.engine_options.items() if value != base.engine_options[key]}
        assert len(differing) == (0 if name == "all on" else 1), name
    assert [one.prefetch for one in found if one.ablation is None] == ["on-demand", "on-demand"]


def test_record_matches_exactly_one_configuration() -> None:
    several = make_configs([QUARTER, HALF], [pair("draft-gate"), pair("next-gate", "lru")], [0, 4], [AUTO], True)
    for one in several:
        assert [other for other in several if other.matches(one.record)] == [one]
    assert not several[0].matches({"expert_memory": "25%"})


# ---- files


def test_all_keys_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "prompts.txt").write_text("x")
    first, second = read(
        tmp_path,
        """
        description = "both"
        output_len = 7
        policies = "next-gate"
        evictions = ["lru", "lfu"]
        [[matrix]]
        name = "one"
        models = "model"
        drafts = ["none", "self:int4", "shipped", "owner/name"]
        expert_formats = ["auto", "int4-g128"]
        cpu_experts = ["off", "auto", 8]
        residency_checks = ["host", "device"]
        links = ["own", 16, 2.5]
        prompts = ["prompts.txt", "sample", "gsm8k"]
        budgets = ["25%", "6GiB"]
        draft_tokens = [0, 4]
        cutoffs = ["auto", 3, "every"]
        ablation = true
        max_prompts = 2
        repeat = 9
        warmup = 0
        dtype = "float32"
        device = "cpu"
        projection = false
        enforce_eager = true
        load_format = "dummy"
        [[matrix]]
        shapes = ["none", "mixtral-8x7b"]
        systems = [
          { name = "SP-MoE", prefetch = "draft-gate" },
          { prefetch = "on-demand", eviction = "lru", draft_tokens = 0 },
        ]
        """,
    )
    expected = {
        "name": "one",
        "models": (str(tmp_path / "model"),),
        "drafts": ("none", "self:int4", "shipped", "owner/name"),
        "expert_formats": ("auto", "int4-g128"),
        "cpu_experts": ("off", "auto", 8),
        "residency_checks": ("host", "device"),
        "links": (None, 16.0, 2.5),
        "prompts": (str(tmp_path / "prompts.txt"), "sample", "gsm8k"),
        "budgets": (QUARTER, Size(bytes=6 * 2**30)),
        "policies": ("next-gate",),
        "evictions": ("lru", "lfu"),
        "draft_tokens": (0, 4),
        "cutoffs": (AUTO, Cutoff(CutoffMode.FIXED, 3), "every"),
        "ablation": True,
        "max_prompts": 2,
        "output_len": 7,
        "repeat": 9,
        "warmup": 0,
        "dtype": "float32",
        "device": "cpu",
        "projection": False,
        "enforce_eager": True,
        "load_format": "dummy",
    }
    assert {key: getattr(first, key) for key in expected} == expected
    assert {*expected, "shapes", "systems"} == Matrix.model_fields.keys()
    assert first.policy_pairs == (pair("next-gate", "lru"), pair("next-gate", "lfu"))
    assert second.output_len == 7
    assert second.shapes == (None, "mixtral-8x7b")
    plain = pair("on-demand", "lru", draft_tokens=(0,))
    assert second.policy_pairs == (pair("draft-gate", name="SP-MoE"), plain), "replaces policies and evictions"
    assert [(one.prefetch, one.draft_tokens) for one in make_configs([HALF], second.policy_pairs, [1, 2])] == [
        ("draft-gate", 1), ("draft-gate", 2), ("on-demand", 0)
    ]  # fmt: skip
    assert len(make_workloads(first)) == 4 * 2 * 3 * 2 * 3 * 3
    assert len(make_workloads(second)) == 2


def test_draft_tokens_may_be_auto(tmp_path: Path) -> None:
    (found,) = read(
        tmp_path, 'draft_tokens = [4, "auto"]\nsystems = [{ prefetch = "draft-gate", draft_tokens = "auto" }]'
    )
    assert found.draft_tokens == (4, "auto")
    assert found.policy_pairs == (pair("draft-gate", draft_tokens=("auto",)),)
    with pytest.raises(UsageError, match="give a number"):
        make_configs([HALF], [pair("oracle")], [4, "auto"])


def test_options_override_the_file(tmp_path: Path) -> None:
    text = 'repeat = 2\nsystems = [{ prefetch = "draft-gate" }]\n[[matrix]]\nrepeat = 3\n'
    (plain,) = read(tmp_path, text)
    (found,) = read(tmp_path, text, repeat=1, policies=["on-demand"])
    assert (plain.repeat, found.repeat) == (3, 1)
    assert found.policy_pairs == (pair("on-demand"),)
    (kept,) = read(tmp_path, text, repeat=1)
    assert kept.policy_pairs == plain.policy_pairs == (pair("draft-gate"),)


def test_every_policy_is_accepted() -> None:
    policies = (*PREFETCH_POLICIES.names(), "draft-gate+next-gate")
    evictions = ("auto", *EVICTION_POLICIES.names())
    found = Matrix(policies=policies, evictions=evictions)
    assert len(found.policy_pairs) == len(policies) * len(evictions)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("repaet = 3", "unknown key repaet; did you mean repeat?"),
        ("[[matrix]]\n[[matrix]]\nbudget = '25%'", "matrix 2: unknown key budget; did you mean budgets?"),
        ("zzz = 3", "the keys are name, models"),
        ("repeat = 0", "repeat: 0 is not allowed; it must be greater than or equal to 1"),
        ("repeat = true", "repeat: True is not allowed; it must be a valid integer"),
        (
            "draft_tokens = [4, 65]",
            "draft_tokens: 65 is not a number of draft tokens; write a whole number from 0 to 64, or auto",
        ),
        ("draft_tokens = 'many'", "'many' is not a number of draft tokens"),
        ("budgets = 'much'", "budgets: 'much' is not a size"),
        ("budgets = []", "budgets: the list is empty"),
        ("policies = 'draftgate'", "policies: unknown prefetch policy 'draftgate'; did you mean draft-gate?"),
        ("evictions = 'belady'", "evictions: unknown eviction policy 'belady'; choose one of"),
        ("systems = ['draft-gate']", "systems: 'draft-gate' is not a system; write"),
        ("systems = [{ prefetch = 'draft-gate', draft_tokens = 99 }]", "systems.draft_tokens: 99 is not a number"),
        (
            "systems = [{ prefetch = 'draft-gate', evict = 'lru' }]",
            "systems: unknown key evict; did you mean eviction?",
        ),
        ("systems = [{ eviction = 'lru' }]", "systems.prefetch: the key is missing"),
        ("policies = 'on-demand'\nsystems = [{ prefetch = 'draft-gate' }]", "not both"),
        ("links = -1", "links: -1 is not a speed"),
        ("cutoffs = 'deep'", "cutoffs: 'deep' is not a cutoff"),
        ("ablation = 'yes'", "ablation: 'yes' is not allowed; it must be a valid boolean"),
        ("models = 3", "models: 3 is not allowed; it must be a valid string"),
        ("shapes = ''", "shapes: '' is not allowed"),
        ("models = './nowhere'", "models: .*nowhere does not exist; paths are relative to the scenario file"),
        ("dtype = 'int8'", "dtype: unknown dtype 'int8'; choose one of auto, float32"),
        ("matrix = 3", r"under \[\[matrix\]\]"),
        ("[matrix]\nrepeat = 3", r"under \[\[matrix\]\]"),
        ("repeat = ", "is not TOML"),
    ],
)
def test_invalid_files_are_rejected_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as raised:
        read(tmp_path, text)
    assert str(raised.value).startswith(str(tmp_path / "mine.toml"))
    assert "\n" not in str(raised.value) or "is not TOML" in str(raised.value)


def test_unreadable_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="check the path"):
        read_scenario(tmp_path / "nowhere.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff")
    with pytest.raises(UsageError, match="not UTF-8"):
        read_scenario(tmp_path / "bytes.toml")


# ---- files that ship with the source


@pytest.mark.parametrize("file", SCENARIOS, ids=lambda file: file.stem)
def test_shipped_scenario_is_valid(file: Path) -> None:
    for matrix in read_scenario(file).matrices({"device": "cpu"}):
        for workload in make_workloads(matrix):
            assert workload.engine_options["draft"] is not None
            assert workload.shape is None or workload.shape in SHAPES
            random = workload.matrix.load_format == "dummy"
            assert workload.model is None or (config_directory if random else model_directory)(workload.model)
        configs = make_configs(matrix.budgets, matrix.policy_pairs, matrix.draft_tokens, [AUTO], matrix.ablation)
        for config in configs:
            EngineConfig.make(**workload.engine_options, **config.engine_options)


def test_job_of_a_workload() -> None:
    _, fine = read_scenario(ROOT / "src/spmoe/scenarios/paper.toml").matrices(
        validate({"device": "cpu", "budgets": "25%"}, "options")
    )
    first = make_workloads(fine)[0]
    job = make_job(Workload(fine, first.model, first.draft, None, None, "sample"), False, {4: 0.1}, {"command": "c"})
    assert job.total == len(job.configs) * 4 * 3
    assert [config.system for config in job.configs[:2]] == ["SP-MoE", "SP-MoE"]
    assert (job.labels["prompt_set"], job.labels["command"]) == ("sample", "c")
    assert job.resident == {4: 0.1}
    assert str(job.configs[-1]) == "25%, on-demand, K=0, lru"


def test_example_of_the_documentation_is_valid(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "benchmarking.md").read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "extras").symlink_to(ROOT / "extras")
    (tmp_path / "scenarios").mkdir()
    first, second = read(tmp_path / "scenarios", example)
    assert len(first.policy_pairs) == 2
    assert [system.name for system in second.policy_pairs] == ["ours", "theirs", None]
    documented = set(re.findall(r"`([a-z_]+)`", text.split("| key | meaning | default |")[1].split("\n\n")[0]))
    assert Matrix.model_fields.keys() <= documented


def test_shipped_scenarios_cover_their_purpose() -> None:
    assert {file.stem for file in SCENARIOS} == {"paper", "h200", "ushape", "ablation", "quick", "full-size"}
    (mixtral, *_), *_ = (
        make_workloads(matrix)
        for matrix in read_scenario(ROOT / "src/spmoe/scenarios/ushape.toml").matrices({"device": "cpu"})
    )
    job = make_job(Workload(mixtral.matrix, None, "auto", None, None, "sample"), False, {}, {})
    depths = {one.cutoff.layers for one in job.configs if one.cutoff.mode is CutoffMode.FIXED}
    assert depths == set(range(17)), "every number of layers"
    shapes = {
        workload.shape
        for matrix in read_scenario(ROOT / "src/spmoe/scenarios/paper.toml").matrices({})
        for workload in make_workloads(matrix)
    }
    assert shapes == {"mixtral-8x7b", "phi-3.5-moe", "deepseek-v2-lite"}
    (full_size,) = read_scenario(ROOT / "src/spmoe/scenarios/full-size.toml").matrices({})
    assert sorted(full_size.models or ()) == shipped_configs()


def test_packaged_scenario_without_the_fine_grained_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package has the scenarios but no `extras/fine`."""
    installed = Path(shutil.copytree(SCENARIOS[0].parent, tmp_path / "site-packages" / "spmoe" / "scenarios"))
    monkeypatch.setattr(scenario, "PACKAGED", installed)
    assert read_scenario(installed / "quick.toml").matrices({})
    with pytest.raises(UsageError, match="extras/fine does not exist; run it from a clone"):
        read_scenario(installed / "paper.toml").matrices({})


def test_workloads_without_a_draft_do_not_speculate(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('drafts = ["none", "shipped"]\ndevice = "cpu"\n')
    (matrix,) = read_scenario(file).matrices({})
    chosen = [{one.draft_tokens for one in make_job(work, False, {}, {}).configs} for work in make_workloads(matrix)]
    assert chosen == [{0}, {0, 4}]
    (matrix,) = read_scenario(file).matrices({"draft_tokens": (4,)})
    with pytest.raises(UsageError, match="speculation needs a draft"):
        make_job(make_workloads(matrix)[0], False, {}, {})
