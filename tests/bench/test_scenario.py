"""Scenario files: what they may say, what they come to, and that those which come with the source are sound."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from spmoe.bench.jobs import Case, cases_of, make_job
from spmoe.bench.scenario import Matrix, make_matrix, read_scenario
from spmoe.bench.settings import ABLATIONS, Setting, System, settings_of
from spmoe.config import Cutoff, CutoffMode, EngineConfig, Size
from spmoe.errors import UsageError
from spmoe.models.widen import SHAPES
from spmoe.registry import EVICTION_POLICIES, PREFETCH_POLICIES

POLICIES = [*PREFETCH_POLICIES.names(), "draft-gate+next-gate"]
EVICTIONS = ["auto", *EVICTION_POLICIES.names()]

ROOT = Path(__file__).parents[2]
SCENARIOS = sorted((ROOT / "scenarios").glob("*.toml"))
QUARTER, HALF = Size(share=0.25), Size(share=0.5)
AUTO = Cutoff(CutoffMode.AUTO)


def read(tmp_path: Path, text: str, **overrides: Any) -> list[Matrix]:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    return read_scenario(file).matrices(overrides)


# ---- configurations


def test_configurations_are_the_cross_product_in_the_order_given() -> None:
    found = settings_of([HALF, Size(share=1.0)], [System("on-demand"), System("draft-gate")], [4, 0])
    assert [str(one) for one in found] == [
        "50%, on-demand, K=4",
        "50%, on-demand, K=0",
        "50%, draft-gate, K=4",
        "100%, on-demand, K=4",
        "100%, on-demand, K=0",
        "100%, draft-gate, K=4",
    ]


def test_without_a_draft_only_its_own_predictions_are_lost() -> None:
    found = settings_of([HALF], [System(policy) for policy in POLICIES], [0])
    policies = {one.prefetch for one in found}
    assert policies == {policy for policy in POLICIES if "draft-gate" not in policy}
    named = settings_of([HALF], [System("draft-gate", name="SP-MoE"), System("next-gate", name="other")], [0, 1])
    assert [(one.prefetch, one.system) for one in named] == [
        ("on-demand", None), ("draft-gate", "SP-MoE"), ("next-gate", "other"), ("next-gate", "other")
    ]  # fmt: skip


def test_cutoffs_are_for_what_the_draft_prefetches() -> None:
    cutoffs = [Cutoff(CutoffMode.FIXED, n) for n in (0, 3)]
    found = settings_of([HALF], [System("draft-gate"), System("next-gate")], [4], cutoffs)
    assert [(one.prefetch, one.cutoff) for one in found] == [
        ("draft-gate", cutoffs[0]), ("draft-gate", cutoffs[1]), ("next-gate", AUTO)
    ]  # fmt: skip


def test_an_ablation_switches_one_part_off_at_a_time() -> None:
    found = settings_of([HALF], [System("draft-gate"), System("on-demand")], [0, 4], ablation=True)
    off = {one.ablation: one for one in found if one.ablation is not None}
    assert list(off) == list(ABLATIONS)
    base = Setting(HALF, "draft-gate", 4)
    for name, one in off.items():
        differing = {key for key, value in one.changes.items() if value != base.changes[key]}
        assert len(differing) == (0 if name == "all on" else 1), name
    assert [one.prefetch for one in found if one.ablation is None] == ["on-demand", "on-demand"]


def test_a_record_is_of_one_configuration() -> None:
    several = settings_of([QUARTER, HALF], [System("draft-gate"), System("next-gate", "lru")], [0, 4], [AUTO], True)
    for one in several:
        assert [other for other in several if other.is_in(one.record)] == [one]
    assert not several[0].is_in({"expert_memory": "25%"})


# ---- files


def test_everything_a_file_may_say(tmp_path: Path) -> None:
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
        [[matrix]]
        shapes = ["none", "mixtral-8x7b"]
        systems = [
          { name = "SP-MoE", prefetch = "draft-gate" },
          { prefetch = "on-demand", eviction = "lru", draft_tokens = 0 },
        ]
        """,
    )
    assert first == Matrix(
        name="one",
        models=(str(tmp_path / "model"),),
        drafts=("none", "self:int4", "shipped", "owner/name"),
        links=(None, 16.0, 2.5),
        prompts=(str(tmp_path / "prompts.txt"), "sample", "gsm8k"),
        budgets=(QUARTER, Size(bytes=6 * 2**30)),
        systems=(System("next-gate", "lru"), System("next-gate", "lfu")),
        draft_tokens=(0, 4),
        cutoffs=(AUTO, Cutoff(CutoffMode.FIXED, 3), "every"),
        ablation=True,
        max_prompts=2,
        output_len=7,
        repeat=9,
        warmup=0,
        dtype="float32",
        device="cpu",
        projection=False,
        enforce_eager=True,
    )
    assert second.output_len == 7
    assert second.shapes == (None, "mixtral-8x7b")
    plain = System("on-demand", "lru", draft_tokens=(0,))
    assert second.systems == (System("draft-gate", name="SP-MoE"), plain), "not what is above"
    assert [(one.prefetch, one.draft_tokens) for one in settings_of([HALF], second.systems, [1, 2])] == [
        ("draft-gate", 1), ("draft-gate", 2), ("on-demand", 0)
    ]  # fmt: skip
    assert len(cases_of(first)) == 4 * 3 * 3
    assert len(cases_of(second)) == 2


def test_how_many_are_drafted_may_be_left_open(tmp_path: Path) -> None:
    (found,) = read(
        tmp_path, 'draft_tokens = [4, "auto"]\nsystems = [{ prefetch = "draft-gate", draft_tokens = "auto" }]'
    )
    assert found.draft_tokens == (4, "auto")
    assert found.systems == (System("draft-gate", draft_tokens=("auto",)),)
    with pytest.raises(UsageError, match="give it a number"):
        settings_of([HALF], [System("oracle")], [4, "auto"])


def test_the_command_line_wins(tmp_path: Path) -> None:
    text = 'repeat = 2\nsystems = [{ prefetch = "draft-gate" }]\n[[matrix]]\nrepeat = 3\n'
    (plain,) = read(tmp_path, text)
    (found,) = read(tmp_path, text, repeat=1, policies=["on-demand"])
    assert (plain.repeat, found.repeat) == (3, 1)
    assert found.systems == (System("on-demand"),)
    (kept,) = read(tmp_path, text, repeat=1)
    assert kept.systems == plain.systems == (System("draft-gate"),)


def test_all_that_can_be_chosen_can_be_named() -> None:
    found = make_matrix({"policies": POLICIES, "evictions": EVICTIONS}, "here")
    assert len(found.systems) == len(POLICIES) * len(EVICTIONS)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("repaet = 3", "unknown key repaet; did you mean repeat?"),
        ("[[matrix]]\n[[matrix]]\nbudget = '25%'", "matrix 2: unknown key budget; did you mean budgets?"),
        ("zzz = 3", "the keys are name, models"),
        ("repeat = 0", "repeat: 0 is not a whole number from 1"),
        ("repeat = true", "True is not a whole number"),
        ("draft_tokens = [4, 65]", "65 is not a whole number from 0 to 64"),
        ("draft_tokens = 'many'", "'many' is not a whole number from 0 to 64, or auto"),
        ("budgets = 'much'", "budgets: 'much' is not a size"),
        ("budgets = []", "budgets: the list is empty"),
        ("policies = 'draftgate'", "policies: there is no 'draftgate'; did you mean draft-gate?"),
        ("evictions = 'belady'", "evictions: there is no 'belady'; choose one of"),
        ("systems = ['draft-gate']", "systems: 'draft-gate' is no system"),
        ("systems = [{ prefetch = 'draft-gate', draft_tokens = 99 }]", "99 is not a whole number"),
        ("systems = [{ prefetch = 'draft-gate', evict = 'lru' }]", "systems: unknown key evict"),
        ("policies = 'on-demand'\nsystems = [{ prefetch = 'draft-gate' }]", "not both"),
        ("links = -1", "links: -1 is not a speed"),
        ("cutoffs = 'deep'", "cutoffs: 'deep' is not a cutoff"),
        ("ablation = 'yes'", "ablation: 'yes' is neither true nor false"),
        ("models = 3", "models: 3 is not text"),
        ("models = './nowhere'", "models: there is no .*nowhere; paths are from where the scenario is"),
        ("dtype = 'int8'", "dtype: there is no 'int8'"),
        ("matrix = 3", r"under \[\[matrix\]\]"),
        ("[matrix]\nrepeat = 3", r"under \[\[matrix\]\]"),
        ("repeat = ", "is not TOML"),
    ],
)
def test_what_a_file_may_not_say(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read(tmp_path, text)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="check the path"):
        read_scenario(tmp_path / "nowhere.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff")
    with pytest.raises(UsageError, match="not UTF-8"):
        read_scenario(tmp_path / "bytes.toml")


# ---- those that come with the source


@pytest.mark.parametrize("file", SCENARIOS, ids=lambda file: file.stem)
def test_scenarios_of_the_source_are_sound(file: Path) -> None:
    for matrix in read_scenario(file).matrices({"device": "cpu"}):
        for case in cases_of(matrix):
            assert case.engine["draft"] is not None
            assert case.shape is None or case.shape in SHAPES
            assert case.model is None or Path(case.model).is_dir()
        settings = settings_of(matrix.budgets, matrix.systems, matrix.draft_tokens, [AUTO], matrix.ablation)
        for setting in settings:
            EngineConfig.make(**case.engine, **setting.changes)


def test_a_case_becomes_a_job() -> None:
    _, fine = read_scenario(ROOT / "scenarios/paper.toml").matrices({"device": "cpu", "budgets": "25%"})
    case = cases_of(fine)[0]
    job = make_job(Case(fine, case.model, case.draft, None, None, "sample"), False, {4: 0.1}, {"command": "c"})
    assert job.total == len(job.settings) * 4 * 3
    assert [setting.system for setting in job.settings[:2]] == ["SP-MoE", "SP-MoE"]
    assert (job.labels["prompt_set"], job.labels["command"]) == ("sample", "c")
    assert job.resident == {4: 0.1}
    assert str(job.settings[-1]) == "25%, on-demand, K=0, lru"


def test_the_example_of_the_documentation_is_sound(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "benchmarking.md").read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "extras").symlink_to(ROOT / "extras")
    (tmp_path / "scenarios").mkdir()
    first, second = read(tmp_path / "scenarios", example)
    assert len(first.systems) == 2
    assert [system.name for system in second.systems] == ["ours", "theirs", None]
    told = set(re.findall(r"`([a-z_]+)`", text.split("| key | what | default |")[1].split("\n\n")[0]))
    keys = {field.name for field in fields(Matrix)} | {"policies", "evictions"}
    assert keys <= told, "every key is explained"


def test_there_is_one_for_each_end() -> None:
    assert {file.stem for file in SCENARIOS} == {"paper", "h200", "ushape", "ablation", "quick"}
    (mixtral, *_), *_ = (
        cases_of(matrix) for matrix in read_scenario(ROOT / "scenarios/ushape.toml").matrices({"device": "cpu"})
    )
    job = make_job(Case(mixtral.matrix, None, None, None, None, "sample"), False, {}, {})
    depths = {one.cutoff.layers for one in job.settings if one.cutoff.mode is CutoffMode.FIXED}
    assert depths == set(range(17)), "every number of layers"
    shapes = {
        case.shape for matrix in read_scenario(ROOT / "scenarios/paper.toml").matrices({}) for case in cases_of(matrix)
    }
    assert shapes == {"mixtral-8x7b", "phi-3.5-moe", "deepseek-v2-lite"}
