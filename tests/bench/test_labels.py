"""Labels: different configurations have different ones, and every configuration is somewhere in a report."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_report import MACHINE, SWEEP, SYSTEMS, row

from spmoe.bench.comparison import Column, Comparison
from spmoe.bench.labels import PLAIN, Labels, case_names, distinct
from spmoe.bench.markdown import markdown_report
from spmoe.bench.report import html_report
from spmoe.bench.results import Group
from spmoe.bench.settings import ABLATIONS, ALL_ON, Setting, switched_off
from spmoe.config import Cutoff, CutoffMode, Size
from spmoe.registry import EVICTION_POLICIES, PREFETCH_POLICIES

CUTOFFS = [Cutoff(mode) for mode in CutoffMode if mode is not CutoffMode.FIXED]
CUTOFFS += [Cutoff(CutoffMode.FIXED, layers) for layers in (0, 4, 16)]
# names that people may give to systems, among them such as a label could be mistaken for
NAMES = [
    None, "SP-MoE", "draft-gate", PLAIN, "draft-gate, cutoff 4", "draft-gate, unbatched", "on-demand / lru", "a",
    "a (2)", "a, K=4", "a (next-gate / lru)",
]  # fmt: skip
A_SETTING = st.builds(
    Setting,
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
SOME = st.lists(A_SETTING, min_size=1, max_size=12, unique=True)
FEW_MEMORIES = st.lists(
    st.builds(
        Setting, st.just(Size(share=0.25)), st.sampled_from(["draft-gate", "on-demand", "next-gate"]),
        st.sampled_from([0, 4]), st.sampled_from(["auto", "lru"]), st.sampled_from(CUTOFFS),
        system=st.sampled_from(NAMES[:5]),
    ),
    min_size=1, max_size=12, unique=True,
)  # fmt: skip


def group_of(found: list[Setting], **machine: Any) -> Group:
    """As if these had been measured."""
    rows = []
    for number, one in enumerate(found):
        record = one.record
        rows.append(
            {**row(record["prefetch"], record["num_speculative_tokens"], 0.01 * (number + 1)), **record}
        )  # fmt: skip
    return Group({**MACHINE, **machine}, rows)


def setting(prefetch: str, k: int, **changes: Any) -> Setting:
    return Setting(Size(share=0.25), prefetch, k, **changes)


@given(SOME)
@settings(max_examples=200, deadline=None)
def test_different_configurations_have_different_records(found: list[Setting]) -> None:
    records = [tuple(one.record.values()) for one in found]
    assert len(set(records)) == len(records)


@given(st.one_of(SOME, FEW_MEMORIES))
@example([setting("on-demand", 0), setting("on-demand", 0, eviction="lru")])
@example([setting("draft-gate", 4), setting("draft-gate", 4, cutoff=Cutoff(CutoffMode.FIXED, 4))])
@example([setting("draft-gate", 4), setting("draft-gate", 4, ablation="all on")])
@example([setting("next-gate", 4, system="draft-gate"), setting("draft-gate", 4)])
@example([setting("on-demand", 4, system=PLAIN), setting("on-demand", 0)])
@settings(max_examples=300, deadline=None)
def test_different_settings_have_different_labels(found: list[Setting]) -> None:
    rows = group_of(found).rows
    labels = Labels(rows)
    shown = [(one["expert_memory"], labels.label(one)) for one in rows]
    assert len(set(shown)) == len(shown)
    tables = [(one["expert_memory"], one["num_speculative_tokens"], labels.system(one)) for one in rows]
    assert len(set(tables)) == len(tables)


@given(st.one_of(SOME, FEW_MEMORIES))
@settings(max_examples=100, deadline=None)
def test_every_row_of_a_comparison_has_a_cell_of_its_own(found: list[Setting]) -> None:
    compared = Comparison([group_of(found)])
    if not compared.cells:
        return  # plain decoding alone
    cells = {id(one) for one in compared.cells.values()}
    budgets = {column.memory for column in compared.columns}
    for _, one in compared.main_rows():
        assert id(one) in cells or one["expert_memory"] not in budgets, "plain decoding has nothing to be compared with"
    shown = {id(one) for _, one in compared.main_rows()}
    shown |= {id(one) for rows in compared.sweeps.values() for one in rows.values()}
    whole = [one for _, one in compared.rows() if one["ablation"] is None]
    elsewhere = {id(one) for rows in compared.chosen.values() for one in rows.values()} if compared.sweeps else set()
    assert {id(one) for one in whole} <= shown | elsewhere, "none is left out"


@given(st.one_of(SOME, FEW_MEMORIES))
@settings(max_examples=25, deadline=None)
def test_pages_and_tables_show_each_under_its_own_label(found: list[Setting]) -> None:
    groups = [group_of(found)]
    compared = Comparison(groups)
    figures = markdown_report(groups).split("\n\n")[-2].splitlines()[2:]
    first_columns = [tuple(line.split(" | ")[:3]) for line in figures]
    assert len(set(first_columns)) == len(first_columns) == len(found)
    chart = html_report(groups).split('id="hits"')[1].split('id="ledger"')[0]
    bars = re.findall(r'<text x="0" y="\d+">([^<]*)</text>', chart)
    assert sorted(map(unescape, bars)) == sorted(compared.label(one) for _, one in compared.main_rows())


def test_a_cutoff_is_in_the_label_and_a_sweep_in_its_section() -> None:
    cutoffs = [row("draft-gate", 4, 0.03 + 0.01 * n, cutoff=text) for n, text in enumerate(("auto", "all", "4"))]
    compared = Comparison([Group(MACHINE, cutoffs)])
    assert compared.systems == ["draft-gate", "draft-gate, cutoff none", "draft-gate, cutoff 4"]
    assert compared.ours == "draft-gate"
    assert [compared.label(one) for one in cutoffs][2] == "draft-gate, cutoff 4, K=4"
    turned = Comparison([Group(MACHINE, cutoffs[::-1])])
    assert turned.ours == "draft-gate", "with the usual cutoff, whichever came first"
    swept = Comparison([Group(MACHINE, [*SYSTEMS, *SWEEP])])
    assert [sorted(rows) for rows in swept.sweeps.values()] == [[0, 4, 8, 16]]
    assert not any("cutoff" in system for system in swept.systems)


def test_what_does_not_draft_has_a_column() -> None:
    rows = [row("on-demand", 0, 0.06), row("next-gate", 0, 0.05), row("draft-gate", 4, 0.03)]
    compared = Comparison([Group(MACHINE, rows)])
    drafted, plain = Column("", "25%", 4), Column("", "25%", 0)
    assert compared.columns == [plain, drafted]
    assert compared.cells["next-gate", plain] is rows[1]
    assert compared.cells[PLAIN, plain] is compared.cells[PLAIN, drafted] is rows[0]
    assert ("next-gate", drafted) not in compared.cells
    assert "| next-gate | 50.0 ms (1.00x) | - |" in markdown_report([Group(MACHINE, rows)])
    assert compared.ours == "draft-gate"
    assert compared.rank("draft-gate", plain) is None


def test_plain_decoding_under_two_rules_is_two_systems() -> None:
    rows = [
        row("on-demand", 0, 0.07, eviction="lru"), row("on-demand", 0, 0.06, eviction="lfu"),
        row("draft-gate", 4, 0.03, eviction="lru"), row("draft-gate", 4, 0.04, eviction="lfu"),
    ]  # fmt: skip
    compared = Comparison([Group(MACHINE, rows)])
    assert compared.systems == ["draft-gate / lru", "draft-gate / lfu", f"{PLAIN} / lfu", f"{PLAIN} / lru"]
    fastest = compared.plain(Column("", "25%", 4))
    assert fastest is rows[1]
    assert compared.rank("draft-gate / lru", Column("", "25%", 4)) == (1, 2), "plain decoding is not ranked"


def test_ablations_of_several_systems_are_apart() -> None:
    both = [
        row(policy, 4, 0.03, ablation=name, batching=name == "all on")
        for policy in ("draft-gate", "draft-gate+next-gate")
        for name in ("all on", "no batching")
    ]
    text = html_report([Group(MACHINE, both)]).split('id="ablation"')[1].split('id="efficiency"')[0]
    assert text.count("<figcaption>draft-gate, K=4, 25%</figcaption>") == 1
    assert text.count("<figcaption>draft-gate+next-gate, K=4, 25%</figcaption>") == 1


def test_what_an_ablation_says_is_not_said_twice() -> None:
    whole = row("draft-gate", 4, 0.03, ablation=ALL_ON)
    rows = [{**whole, **switched_off(whole, name)} for name in ABLATIONS]
    labels = Labels(rows)
    assert [labels.label(one) for one in rows] == [
        "draft-gate, K=4", "draft-gate, no cutoff, K=4", "draft-gate, no batching, K=4",
        "draft-gate, no asynchrony, K=4", "on-demand, no prefetch, K=4",
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
                "asked": st.sampled_from([{"projection": True}, {"projection": False}]),
                "torch": st.sampled_from(["2.11", "2.13"]),
            }
        ),
        min_size=1,
        max_size=5,
    )
)
@settings(max_examples=100, deadline=None)
def test_every_case_has_a_name_of_its_own(machines: list[dict[str, Any]]) -> None:
    names = case_names([Group({**MACHINE, **machine}) for machine in machines])
    assert len(set(names)) == len(names), "also where all that is noted is the same"


def test_cases_are_told_apart_by_what_can_be_remembered() -> None:
    def named(*machines: dict[str, Any]) -> list[str]:
        return case_names([Group({**MACHINE, **machine}) for machine in machines])

    assert named({}, {"dtype": "bfloat16", "commit": "abc"}) == ["float32", "bfloat16"]
    assert named({}, {"torch": "2.13", "commit": "abc"}) == ["0123456789", "abc"]
    assert named({}, {"torch": "2.13"}) == ["torch 2.11", "torch 2.13"]
    assert named({}, {}) == ["", "(2)"]


@given(st.lists(st.tuples(st.sampled_from(["a", "a (2)", "a (2) (2)", "b"]), st.integers(0, 5)), unique=True))
def test_names_that_are_taken_get_a_number(things: list[tuple[str, int]]) -> None:
    found = distinct(things, lambda thing: thing[0])
    assert list(found) == things
    assert len(set(found.values())) == len(things)
