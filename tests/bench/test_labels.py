"""Labels: different configurations have different labels, and a report shows every configuration."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_report import MACHINE, SWEEP, SYSTEMS, row

from spmoe.bench.comparison import Column, Comparison
from spmoe.bench.configs import ABLATIONS, ALL_ON, BenchConfig, ablated_record
from spmoe.bench.labels import PLAIN, Labels, make_distinct, workload_names
from spmoe.bench.markdown import markdown_report
from spmoe.bench.report import Report, html_report
from spmoe.bench.results import WorkloadResults
from spmoe.config import Cutoff, CutoffMode, Size
from spmoe.registry import EVICTION_POLICIES, PREFETCH_POLICIES

CUTOFFS = [Cutoff(mode) for mode in CutoffMode if mode is not CutoffMode.FIXED]
CUTOFFS += [Cutoff(CutoffMode.FIXED, layers) for layers in (0, 4, 16)]
# names in scenarios, including some that look like generated labels
NAMES = [
    None, "SP-MoE", "draft-gate", PLAIN, "draft-gate, cutoff 4", "draft-gate, no batching", "on-demand / lru", "a",
    "a (2)", "a, K=4", "a (next-gate / lru)",
]  # fmt: skip
A_CONFIG = st.builds(
    BenchConfig,
    memory=st.one_of(
        st.sampled_from([Size(share=0.25), Size(share=0.5)]),
        st.integers(1, 2**45).map(lambda count: Size(bytes=count)),
        st.integers(1, 10**9).map(lambda part: Size.parse(f"{part / 1e7:.7f}%")),
    ),
    prefetch=st.sampled_from([*PREFETCH_POLICIES.names(), "draft-gate+next-gate"]),
    draft_tokens=st.sampled_from([0, 0, 1, 4]),
    eviction=st.sampled_from(["auto", *EVICTION_POLICIES.names()]),
    cutoff=st.sampled_from(CUTOFFS),
    batching=st.booleans(),
    overlap=st.booleans(),
    system=st.sampled_from(NAMES),
    ablation=st.sampled_from([None, None, *ABLATIONS]),
)
CONFIGS = st.lists(A_CONFIG, min_size=1, max_size=12, unique=True)
ONE_MEMORY = st.lists(
    st.builds(
        BenchConfig, st.just(Size(share=0.25)), st.sampled_from(["draft-gate", "on-demand", "next-gate"]),
        st.sampled_from([0, 4]), st.sampled_from(["auto", "lru"]), st.sampled_from(CUTOFFS),
        system=st.sampled_from(NAMES[:5]),
    ),
    min_size=1, max_size=12, unique=True,
)  # fmt: skip


def results_of(found: list[BenchConfig], **machine: Any) -> WorkloadResults:
    """Return made-up results of these configurations."""
    rows = []
    for number, one in enumerate(found):
        record = one.record
        rows.append({**row(record["prefetch"], record["num_speculative_tokens"], 0.01 * (number + 1)), **record})
    return WorkloadResults({**MACHINE, **machine}, rows)


def config(prefetch: str, k: int, **changes: Any) -> BenchConfig:
    return BenchConfig(Size(share=0.25), prefetch, k, **changes)


@given(CONFIGS)
@settings(max_examples=200, deadline=None)
def test_different_configurations_have_different_records(found: list[BenchConfig]) -> None:
    records = [tuple(one.record.values()) for one in found]
    assert len(set(records)) == len(records)


@given(st.one_of(CONFIGS, ONE_MEMORY))
@example([config("on-demand", 0), config("on-demand", 0, eviction="lru")])
@example([config("draft-gate", 4), config("draft-gate", 4, cutoff=Cutoff(CutoffMode.FIXED, 4))])
@example([config("draft-gate", 4), config("draft-gate", 4, ablation="all on")])
@example([config("next-gate", 4, system="draft-gate"), config("draft-gate", 4)])
@example([config("on-demand", 4, system=PLAIN), config("on-demand", 0)])
@settings(max_examples=300, deadline=None)
def test_different_configurations_have_different_labels(found: list[BenchConfig]) -> None:
    rows = results_of(found).rows
    labels = Labels(rows)
    shown = [(one["expert_memory"], labels.label(one)) for one in rows]
    assert len(set(shown)) == len(shown)
    tables = [(one["expert_memory"], one["num_speculative_tokens"], labels.system(one)) for one in rows]
    assert len(set(tables)) == len(tables)


@given(st.one_of(CONFIGS, ONE_MEMORY))
@settings(max_examples=100, deadline=None)
def test_every_row_of_a_comparison_has_its_own_cell(found: list[BenchConfig]) -> None:
    compared = Comparison([results_of(found)])
    if not compared.cells:
        return  # only plain decoding
    cells = {id(one) for one in compared.cells.values()}
    budgets = {column.memory for column in compared.columns}
    for _, one in compared.main_rows:
        assert id(one) in cells or one["expert_memory"] not in budgets, "plain decoding without another system"
    shown = {id(one) for _, one in compared.main_rows}
    shown |= {id(one) for rows in compared.cutoff_sweeps.values() for one in rows.values()}
    full = [one for _, one in compared.rows() if one["ablation"] is None]
    modes = {id(one) for rows in compared.cutoff_modes.values() for one in rows.values()}
    assert {id(one) for one in full} <= shown | (modes if compared.cutoff_sweeps else set())


@given(st.one_of(CONFIGS, ONE_MEMORY))
@settings(max_examples=25, deadline=None)
def test_charts_and_markdown_show_every_label(found: list[BenchConfig]) -> None:
    results = [results_of(found)]
    compared = Comparison(results)
    lines = markdown_report(results).split("\n\n")[-2].splitlines()[2:]
    first_columns = [tuple(line.split(" | ")[:3]) for line in lines]
    assert len(set(first_columns)) == len(first_columns) == len(found)
    figures = [figure for figures in Report(compared, None).hit_rate().values() for figure in figures]
    bars = [
        bar
        for figure in figures
        for bar in re.findall(r"<text [^>]*text-anchor: start[^>]*>([^<]*)</text>", figure.svg + figure.more)
    ]
    assert sorted(map(unescape, bars)) == sorted(compared.labels.label(one) for _, one in compared.main_rows)


def test_cutoff_is_in_the_label_except_in_a_sweep() -> None:
    cutoffs = [row("draft-gate", 4, 0.03 + 0.01 * n, cutoff=text) for n, text in enumerate(("auto", "all", "4"))]
    compared = Comparison([WorkloadResults(MACHINE, cutoffs)])
    assert compared.systems == ["draft-gate", "draft-gate, cutoff all", "draft-gate, cutoff 4"]
    assert compared.highlighted == "draft-gate"
    assert [compared.labels.label(one) for one in cutoffs][2] == "draft-gate, cutoff 4, K=4"
    turned = Comparison([WorkloadResults(MACHINE, cutoffs[::-1])])
    assert turned.highlighted == "draft-gate", "the one with the default cutoff, in any order"
    swept = Comparison([WorkloadResults(MACHINE, [*SYSTEMS, *SWEEP])])
    assert [sorted(rows) for rows in swept.cutoff_sweeps.values()] == [[0, 4, 8, 16]]
    assert not any("cutoff" in system for system in swept.systems)


def test_prefetching_without_draft_has_its_own_column() -> None:
    rows = [row("on-demand", 0, 0.06), row("next-gate", 0, 0.05), row("draft-gate", 4, 0.03)]
    compared = Comparison([WorkloadResults(MACHINE, rows)])
    drafted, plain = Column("", "25%", 4), Column("", "25%", 0)
    assert compared.columns == [plain, drafted]
    assert compared.cells["next-gate", plain] is rows[1]
    assert compared.cells[PLAIN, plain] is compared.cells[PLAIN, drafted] is rows[0]
    assert ("next-gate", drafted) not in compared.cells
    assert "| next-gate | 50.0 ms, 1.20x | - |" in markdown_report([WorkloadResults(MACHINE, rows)])
    assert compared.highlighted == "draft-gate"
    assert compared.rank("draft-gate", plain) is None


def test_plain_decoding_with_two_eviction_policies_is_two_systems() -> None:
    rows = [
        row("on-demand", 0, 0.07, eviction="lru"), row("on-demand", 0, 0.06, eviction="lfu"),
        row("draft-gate", 4, 0.03, eviction="lru"), row("draft-gate", 4, 0.04, eviction="lfu"),
    ]  # fmt: skip
    compared = Comparison([WorkloadResults(MACHINE, rows)])
    assert compared.systems == ["draft-gate / lru", "draft-gate / lfu", f"{PLAIN} / lfu", f"{PLAIN} / lru"]
    fastest = compared.plain_row(Column("", "25%", 4))
    assert fastest is rows[1]
    assert compared.rank("draft-gate / lru", Column("", "25%", 4)) == (1, 2), "plain decoding is not ranked"


def test_ablations_of_two_systems_are_two_figures() -> None:
    both = [
        row(policy, 4, 0.03, ablation=name, batching=name == "all on")
        for policy in ("draft-gate", "draft-gate+next-gate")
        for name in ("all on", "no batching")
    ]
    text = html_report([WorkloadResults(MACHINE, both)]).split('id="ablation"')[1].split('id="efficiency"')[0]
    assert text.count("<figcaption>draft-gate, K=4, 25%. ") == 1
    assert text.count("<figcaption>draft-gate+next-gate, K=4, 25%. ") == 1


def test_ablation_label_is_not_repeated() -> None:
    full = row("draft-gate", 4, 0.03, ablation=ALL_ON)
    rows = [{**full, **ablated_record(full, name)} for name in ABLATIONS]
    labels = Labels(rows)
    assert [labels.label(one) for one in rows] == [
        "draft-gate, K=4", "draft-gate, no cutoff, K=4", "draft-gate, no batching, K=4",
        "draft-gate, no overlap, K=4", "on-demand, no prefetch, K=4",
    ]  # fmt: skip


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["float32", "bfloat16"]),
                "enforce_eager": st.booleans(),
                "output_len": st.sampled_from([8, 100]),
                "commit": st.sampled_from([None, "abc"]),
                "matrix": st.sampled_from([None, "depths", "depths, eager"]),
                "requested": st.sampled_from([{"projection": True}, {"projection": False}]),
                "torch": st.sampled_from(["2.11", "2.13"]),
            }
        ),
        min_size=1,
        max_size=5,
    )
)
@settings(max_examples=100, deadline=None)
def test_every_workload_has_its_own_name(machines: list[dict[str, Any]]) -> None:
    names = workload_names([WorkloadResults({**MACHINE, **machine}) for machine in machines])
    assert len(set(names)) == len(names), "even if all recorded fields are equal"


def test_workload_names_use_few_fields() -> None:
    def named(*machines: dict[str, Any]) -> list[str]:
        return workload_names([WorkloadResults({**MACHINE, **machine}) for machine in machines])

    assert named({}, {"dtype": "bfloat16", "commit": "abc"}) == ["float32", "bfloat16"]
    assert named({}, {"torch": "2.13", "commit": "abc"}) == ["0123456789", "abc"]
    assert named({}, {"torch": "2.13"}) == ["torch 2.11", "torch 2.13"]
    assert named({}, {}) == ["", "(2)"]


@given(st.lists(st.tuples(st.sampled_from(["a", "a (2)", "a (2) (2)", "b"]), st.integers(0, 5)), unique=True))
def test_taken_names_get_a_number(things: list[tuple[str, int]]) -> None:
    found = make_distinct(things, lambda thing: thing[0])
    assert list(found) == things
    assert len(set(found.values())) == len(things)
