"""HTML page and Markdown of results with known values, and charts."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spmoe.bench import charts
from spmoe.bench.charts import (
    Bar,
    Block,
    Fill,
    Line,
    LineChart,
    Part,
    TimelineGroup,
    Track,
    bar_chart,
    line_chart,
    ratio_chart,
    svg_document,
    timeline_chart,
)
from spmoe.bench.comparison import Column, Comparison, format_range, format_speed, paired_speeds, quantile
from spmoe.bench.configs import ABLATIONS, ALL_ON, ablated_record
from spmoe.bench.labels import PLAIN, workload_names
from spmoe.bench.markdown import markdown_report
from spmoe.bench.report import Figure, Report, html_report
from spmoe.bench.results import WorkloadResults, read_results, write_results
from spmoe.errors import UsageError

MACHINE: dict[str, Any] = {
    "type": "machine", "format": 3, "device": "a <device>", "driver": None, "device_memory_bytes": 2**34,
    "processor": "a processor", "platform": "Linux", "python": "3.11", "torch": "2.11", "transformers": "5.17",
    "spmoe": "0.1.0", "commit": "0123456789abcdef", "date": "2026-11-16T10:34:00+00:00", "cores": 8, "usable_cores": 4,
    "threads": 2, "memory_bytes": 2**35, "link_bytes_per_second": 25e9, "link_source": "pinned copies",
    "memory_bytes_per_second": 1e12, "active_read_seconds": 0.003, "draft_read_seconds": 0.001,
    "model": "somebody/model", "draft": None, "shape": None, "link_gbps": None, "enforce_eager": False, "prompts": 2,
    "output_len": 100, "warmup": 1, "prompt_set": "sample", "prompt_format": "sample", "matrix": None,
    "scenario": "mine", "scenario_text": "repeat = 3", "command": "spmoe bench --scenario mine.toml",
    "dtype": "float32", "expert_bytes": 2**20, "experts": 128,
    "layers": 16, "top_k": 2, "repeat": 3, "interrupted": False,
}  # fmt: skip


def row(prefetch: str, k: int, tpot: float, memory: str = "25%", **changes: Any) -> dict[str, Any]:
    """Return results of a configuration with this TPOT in seconds."""
    tokens, steps = 200, 200 if not k else 80
    step = tpot * tokens / steps
    counters = {"hits": 60, "late": 10, "demand_loads": 30, "demand_bytes": 30 * 2**20, "used_bytes": 20 * 2**20,
              "late_bytes": 5 * 2**20, "wasted_bytes": 2**20}  # fmt: skip
    return {
        "type": "configuration", "expert_memory": memory, "prefetch": prefetch, "num_speculative_tokens": k,
        "eviction": "auto", "cutoff": "auto", "batching": True, "overlap": True, "system": None, "ablation": None,
        "slots": 32, "cutoff_layers": 9 if "draft-gate" in prefetch else None, "layers": 16, "runs": 6,
        "tpot_seconds": {"median": tpot, "p10": 0.9 * tpot, "p90": 1.2 * tpot, "min": tpot, "max": tpot},
        "output_tokens": tokens, "steps": steps, "mean_acceptance_length": 2.5 if k else None,
        "acceptance_by_position": [0.9, 0.7, 0.5, 0.4][:k], "hit_rate": 0.6, "bytes_moved_per_token": 1e6,
        "useful_bytes_per_step": 2e6, "step_seconds": step, "stall_seconds_per_step": step / 4,
        "draft_seconds_per_step": step / 4 if k else 0.0, "verify_seconds_per_step": step / 2,
        "all_resident_step_seconds": step / 2, "all_resident_source": "measured", "ideal_step_seconds": 0.8 * step,
        "pipeline_efficiency": 0.8, "identical_share": 1.0, "counters": counters, **changes,
    }  # fmt: skip


SYSTEMS = [
    row("on-demand", 0, 0.060), row("draft-gate", 4, 0.030), row("next-gate", 4, 0.036), row("on-demand", 4, 0.045),
    row("oracle", 4, 0.025), row("draft-gate", 4, 0.020, "50%"), row("next-gate", 4, 0.018, "50%"),
]  # fmt: skip
SWEEP = [row("draft-gate", 4, 0.030 + 0.001 * abs(n - 8), cutoff=str(n), cutoff_layers=n) for n in (0, 4, 8, 16)]
FULL = row("draft-gate", 4, 0.03, ablation=ALL_ON)
ABLATED = [
    row(**{"prefetch": "draft-gate", **ablated_record(FULL, name), "k": 4, "tpot": 0.03 + 0.002 * n})
    for n, name in enumerate(ABLATIONS)
]


def with_samples(one: dict[str, Any], times: list[float], timeline: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a row whose runs had these TPOTs in seconds, the first one with a timeline."""
    samples: list[dict[str, Any]] = [
        {"prompt": number, "repeat": 0, "tpot_seconds": time} for number, time in enumerate(times)
    ]
    samples[0] |= {"timeline": timeline} if timeline else {}
    return {**one, "samples": samples, "runs": len(times)}


TIMELINE: dict[str, Any] = {
    "step": 3, "steps": 9, "seconds": 0.02, "omitted": 0,
    "spans": [
        ["draft", 0.0, 0.005, ""], ["request", 0.001, 0.00101, "12"], ["prefetch", 0.001, 0.004, "3.1"],
        ["verify", 0.005, 0.02, ""], ["layer", 0.006, 0.01, "experts of layer 0"], ["copy", 0.006, 0.009, "0.5"],
        ["stall", 0.007, 0.009, ""],
    ],
}  # fmt: skip


class Page(HTMLParser):
    """Parsed page; checks that every tag is closed."""

    VOID = ("meta",)

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.tips: list[str] = []  # shown where the pointer is
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = dict(attrs)
        if "id" in values:
            self.ids.append(str(values["id"]))
        self.links += [str(values[name]) for name in ("href", "src") if name in values]
        if tag == "svg":
            assert values["role"] == "img"
            assert values["aria-label"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open[-2:] == ["g", "title"]:
            self.tips.append(data)


# ---- comparisons


def test_comparison_of_systems() -> None:
    found = Comparison([WorkloadResults(MACHINE, SYSTEMS)])
    quarter, half = Column("", "25%", 4), Column("", "50%", 4)
    assert found.columns == [quarter, half]
    assert found.highlighted == "draft-gate"
    assert found.systems == ["oracle", "draft-gate", "next-gate", "on-demand", PLAIN]
    assert found.cells[PLAIN, quarter]["tpot_seconds"]["median"] == 0.060
    assert found.rank("draft-gate", quarter) == (1, 3), "the oracle and plain decoding are not ranked"
    assert found.rank("draft-gate", half) == (2, 2)
    assert found.rank("on-demand", half) is None
    assert found.best_tpot(half) == 0.018
    oracle = found.oracle_row(quarter)
    assert oracle is not None
    assert oracle["prefetch"] == "oracle"
    assert found.oracle_row(half) is None
    assert found.summary() == [
        "0.90x (slower) to 1.20x the speed of next-gate",
        "1.50x the speed of on-demand",
        "2.00x the speed of plain decoding (K=0)",
        "fastest speculating system in 1 of 2 comparisons",
        "0.83x the speed of the oracle (slower)",
    ]


def test_sweeps_and_ablations_are_not_systems() -> None:
    found = Comparison([WorkloadResults(MACHINE, [*SYSTEMS, *SWEEP, *ABLATED])])
    assert found.systems == Comparison([WorkloadResults(MACHINE, SYSTEMS)]).systems
    alone = Comparison([WorkloadResults(MACHINE, SWEEP)])
    assert len(alone.main_rows) == len(SWEEP), "shown if there is nothing else"
    both = Comparison(
        [WorkloadResults(MACHINE, SYSTEMS), WorkloadResults({**MACHINE, "matrix": "cutoff"}, [SYSTEMS[1], *SWEEP])]
    )
    assert {column.workload for column in both.columns} == {""}, "one system alone is not compared"


def test_names_come_from_the_scenario_or_from_differing_fields() -> None:
    named = [row("draft-gate", 1, 0.1, system="SP-MoE"), row("next-gate", 1, 0.2, system="other", eviction="lru")]
    assert Comparison([WorkloadResults(MACHINE, named)]).highlighted == "SP-MoE"
    pairs = [row("draft-gate", 1, 0.1), row("draft-gate", 1, 0.2, eviction="lru")]
    assert Comparison([WorkloadResults(MACHINE, pairs)]).systems == ["draft-gate / auto", "draft-gate / lru"]
    machines = [MACHINE, {**MACHINE, "link_gbps": 16.0}, {**MACHINE, "shape": "mixtral-8x7b"}]
    assert workload_names([WorkloadResults(machine) for machine in machines]) == [
        "somebody/model, own link", "somebody/model, 16 GB/s", "mixtral-8x7b, own link"
    ]  # fmt: skip
    assert workload_names([WorkloadResults(MACHINE)]) == [""]
    later = [MACHINE, {**MACHINE, "commit": "fedcba"}]
    assert workload_names([WorkloadResults(machine) for machine in later]) == ["0123456789", "fedcba"], (
        "only the commit differs"
    )
    other = {**MACHINE, "commit": "fedcba", "scenario": "another"}
    assert workload_names([WorkloadResults(MACHINE), WorkloadResults(other)]) == ["mine", "another"]
    assert (
        workload_names([WorkloadResults({**MACHINE, "model": "/home/me/secret/model"}), WorkloadResults(MACHINE)])[0]
        == "model"
    )


# ---- the page


def test_page_with_all_sections() -> None:
    rows = [with_samples(one, [0.03] * 6, TIMELINE) for one in SYSTEMS]
    text = html_report([WorkloadResults(MACHINE, [*rows, *SWEEP, *ABLATED])])
    page = Page(text)
    assert "All configurations generated the same tokens" in page.text
    assert "a <device>" in page.text, "escaped"
    assert "spmoe bench --scenario mine.toml" in page.text
    assert "repeat = 3" in page.text
    assert "0123456789abcdef" in page.text
    assert "1 of 3" in page.text
    assert "0.83x (slower)" in page.text, "relative to the oracle"
    assert "Best: 30.0 ms at 8 layers. Auto: 9 layers, 30.0 ms." in page.text
    for name in ABLATIONS:
        assert name in page.text
    assert "38.0 ms (+26.7 %)" in page.text
    assert 'class="missing"' not in text


def test_page_is_self_contained() -> None:
    text = html_report([WorkloadResults(MACHINE, SYSTEMS)])
    page = Page(text)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert not re.search(r"\son\w+=", text), "no event handlers"
    assert page.links
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)
    assert "http" not in text.replace("http-equiv", "")
    assert "@import" not in text
    assert "url(" not in text
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text
    used, defined = set(re.findall(r"var\(--(\w+)\)", text)), set(re.findall(r"--(\w+):", text))
    assert used <= defined
    assert len(set(page.ids)) == len(page.ids), "ids of charts do not collide"
    assert page.tags.count("svg") == page.text.count("Table of these values"), "a table for every chart"


def test_missing_results_name_the_command() -> None:
    page = Page(html_report([WorkloadResults(MACHINE, [row("on-demand", 0, 0.06)])]))
    for command in ("--scenario paper", "--scenario ushape", "--scenario ablation", "spmoe bench -k 4"):
        assert command in page.text


def test_floor_and_implausible_efficiency() -> None:
    text = html_report([WorkloadResults(MACHINE, SYSTEMS[:2])])
    page = Page(text)
    assert "24.0 ms" in page.text, "the floor of draft-gate: 0.8 of 30 ms"
    assert "15.0 ms" in page.text, "with all experts in slots"
    assert "above 100 %" not in page.text.lower()
    busy = [SYSTEMS[0], {**SYSTEMS[1], "pipeline_efficiency": 1.3}]
    assert "Above 100 %" in Page(html_report([WorkloadResults(MACHINE, busy)])).text


def test_different_tokens_are_reported() -> None:
    rows = [SYSTEMS[0], {**SYSTEMS[1], "identical_share": 0.5}]
    text = Page(html_report([WorkloadResults({**MACHINE, "interrupted": True, "dtype": "bfloat16"}, rows)])).text
    assert "1 of 2 configurations generated the same tokens as the first one; 16-bit forwards" in text
    assert "interrupted" in text
    assert "must not differ" in Page(html_report([WorkloadResults(MACHINE, rows)])).text


def test_several_workloads_on_one_page() -> None:
    results = [WorkloadResults(MACHINE, SYSTEMS), WorkloadResults({**MACHINE, "shape": "mixtral-8x7b"}, SYSTEMS)]
    page = Page(html_report(results))
    assert page.text.count("0.90x (slower) to 1.20x") == 3, "in the summary and for each workload"
    assert page.text.count("rank of draft-gate") == 2, "one table for each workload"
    assert page.tags.count("svg") == 2 * 2 * 6 + 2, "a chart per budget, and accepted tokens"


def test_report_does_not_import_torch(tmp_path: Path) -> None:
    """Importing torch takes seconds, and the machine that shows results may lack it."""
    results = tmp_path / "results.jsonl"
    write_results(results, [WorkloadResults(MACHINE, [*SYSTEMS, *SWEEP])])
    code = """
import sys
from spmoe.cli.main import main
for words in (["--markdown", "-o", "tables.md"], ["-o", "page.html"]):
    sys.argv = ["spmoe", "report", "results.jsonl", *words]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code
    print(*sorted({"torch", "transformers", "numpy", "matplotlib", "jinja2"} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    markdown, page = done.stdout.splitlines()
    assert markdown == "", "Markdown needs no extra"
    assert page == "jinja2 matplotlib numpy"
    assert "draft-gate" in (tmp_path / "page.html").read_text()
    assert "draft-gate" in (tmp_path / "tables.md").read_text()


INJECTIONS = [
    "<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "a & b's $x$ {{ 1 }}", "</title><script>1</script>",
    "-->]]><svg onload=1>", 'id="tip-0" fill: #0072b2 <g id="tip-0">',
]  # fmt: skip


@pytest.mark.parametrize("text", INJECTIONS)
def test_values_are_escaped(text: str) -> None:
    rows = [{**one, "system": text, "eviction": text, "all_resident_source": text} for one in SYSTEMS[1:3]] + SWEEP
    machine = {**MACHINE, "model": text, "command": text, "scenario": text, "scenario_text": text, "device": text}
    results = [WorkloadResults({**machine, "matrix": name}, rows) for name in (text, None)]
    page = Page(html_report(results))
    assert not {"script", "img"} & set(page.tags)
    assert page.text.count(text) > 10, "shown as it is"


@pytest.mark.parametrize("text", INJECTIONS[:2])
def test_every_text_of_a_file_is_escaped(text: str, tmp_path: Path) -> None:
    def injected(record: dict[str, Any]) -> dict[str, Any]:
        return {name: text if isinstance(one, str) and name not in FIXED else one for name, one in record.items()}

    rows = [injected(with_samples(one, [0.03], TIMELINE)) for one in (SYSTEMS[0], SYSTEMS[1])]
    file = tmp_path / "results.jsonl"
    write_results(file, [WorkloadResults(injected(MACHINE), rows)])
    page = Page(html_report(read_results(file)))
    assert not {"script", "img"} & set(page.tags)
    assert page.text.count(text) > 20


FIXED = ("type", "cutoff")  # fields whose text is checked


@pytest.mark.parametrize("text", INJECTIONS)
def test_new_fields_are_escaped(text: str) -> None:
    timeline = {**TIMELINE, "spans": [*TIMELINE["spans"], ["layer", 0.001, 0.002, text]]}
    rows = [with_samples(one, [0.03], timeline) for one in (SYSTEMS[1], SYSTEMS[3])]
    facts = dict.fromkeys(("date", "processor", "platform", "commit", "torch", "driver", "link_source"), text)
    page = Page(html_report([WorkloadResults({**MACHINE, **facts}, rows)]))
    assert not {"script", "img"} & set(page.tags)
    assert page.tags.count("svg") == page.text.count("Table of these values"), "none is added"
    assert page.text.count(text) > 5, "shown as it is"
    assert text[:40] in "".join(page.tips), "also under the pointer"


@pytest.mark.parametrize("missing", ["matplotlib", "jinja2"])
def test_missing_extra_is_reported_in_one_line(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "find_spec", lambda name: None if name == missing else object())
    with pytest.raises(UsageError, match=rf"need {missing}, not installed.*pip install 'spmoe\[report\]'"):
        html_report([WorkloadResults(MACHINE, SYSTEMS)])
    assert markdown_report([WorkloadResults(MACHINE, SYSTEMS)])


# ---- speeds, spreads, timelines and colours of the page


def test_speeds_below_one_are_called_slower() -> None:
    assert [format_speed(ratio) for ratio in (0.5, 0.994, 0.996, 1.0, 1.25)] == [
        "0.50x (slower)", "0.99x (slower)", "1.00x", "1.00x", "1.25x",
    ]  # fmt: skip
    assert format_range([0.8, 0.9]) == "0.80x to 0.90x (slower)"
    assert format_range([0.8, 1.2]) == "0.80x (slower) to 1.20x"
    assert format_range([1.1, 1.1]) == "1.10x"
    slow = [row("on-demand", 0, 0.03), row("draft-gate", 4, 0.06), row("next-gate", 4, 0.04)]
    page = Page(html_report([WorkloadResults(MACHINE, slow)]))
    assert "0.50x (slower)" in page.text
    assert "0.75x (slower)" in page.text
    assert not re.search(r"\b(2\.00|1\.33)x", page.text), "no slow-down looks like a speed-up"
    assert "draft-gate, K=4: 0.50x (slower)" in page.tips


@pytest.mark.parametrize(
    ("rows", "label"),
    [
        (SYSTEMS[:5], PLAIN),
        (SYSTEMS[1:5], "on-demand, K=4"),
        (SYSTEMS[1:3], "next-gate, K=4"),
    ],
)
def test_baseline_of_speeds(rows: list[dict[str, Any]], label: str) -> None:
    results = [WorkloadResults(MACHINE, rows)]
    found = Comparison(results)
    assert found.labels.label(found.baseline("", "25%")) == label
    assert f"relative to the baseline, {label}:" in Page(html_report(results)).text


def test_paired_runs_tell_a_difference_from_noise() -> None:
    plain = with_samples(row("on-demand", 0, 0.06), [0.05, 0.06, 0.07, 0.06])
    faster = with_samples(row("draft-gate", 4, 0.03), [0.025, 0.03, 0.035, 0.03])
    assert paired_speeds(faster, plain) == pytest.approx([2.0] * 4), "differences between prompts cancel out"
    assert paired_speeds(row("draft-gate", 4, 0.03), plain) == []
    assert [quantile([1.0, 2.0, 4.0], share) for share in (0, 0.25, 0.5, 1)] == [1.0, 1.5, 2.0, 4.0]
    full = with_samples(ABLATED[0], [0.05, 0.06, 0.07, 0.06])
    noise = with_samples({**ABLATED[1]}, [0.06, 0.05, 0.07, 0.06])
    effect = with_samples({**ABLATED[2]}, [0.06, 0.07, 0.08, 0.07])
    names = list(ABLATIONS)
    page = Page(html_report([WorkloadResults(MACHINE, [full, noise, effect])]))
    assert f"No clear difference from all on: {names[1]}." in page.text
    assert "n = 4 runs each" in page.text


@pytest.mark.parametrize(
    ("runs", "repeat", "words"),
    [
        (1, 1, "One run each: there is no spread"),
        (2, 1, "n = 2 runs each, one run of each prompt"),
        (6, 3, "n = 6 runs"),
    ],
)
def test_number_of_runs_is_stated(runs: int, repeat: int, words: str) -> None:
    rows = [{**one, "runs": runs} for one in [*SYSTEMS, *SWEEP, *ABLATED]]
    text = html_report([WorkloadResults({**MACHINE, "repeat": repeat}, rows)])
    page = Page(text)
    sections = dict(texts_of_sections(text))
    for name in ("tpot", "cutoff", "ablation"):
        assert words in sections[name]
    assert ("10 to 90 %:" in "".join(page.tips)) == (runs > 1)
    assert ("(one run)" in page.text) == (runs == 1)


def texts_of_sections(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of every section of a page, without its charts."""
    for part in text.split('<section id="')[1:]:
        name, _, rest = part.partition('"')
        yield name, re.sub(r"<svg.*?</svg>|<[^>]*>", " ", rest.partition(">")[2].partition("</section>")[0], flags=re.S)


def test_cutoffs_within_the_spread_are_no_finding() -> None:
    sweep = [
        row("draft-gate", 4, time, cutoff=str(n), cutoff_layers=n) for n, time in ((0, 0.06), (4, 0.030), (8, 0.031))
    ]
    page = Page(html_report([WorkloadResults(MACHINE, sweep)]))
    assert "Best: 30.0 ms at 4 layers. No clear difference from the best: 8 layers." in page.text
    assert any(tip.startswith("8 layers: 31.0 ms (10 to 90 %: 27.9 ms to 37.2 ms, 6 runs)") for tip in page.tips)


def test_misses_are_absence_and_have_a_legend() -> None:
    text = html_report([WorkloadResults(MACHINE, SYSTEMS[:2])]).split('id="hits"')[1].split("</section>")[0]
    assert all(f"</i>{name}" in text for name in ("hit: in a slot", "late: its copy", "miss: loaded on demand"))
    assert 'class="hatched" style="color:var(--absent)"' in text
    assert "fill: var(--absent)" not in text, "not a solid area"
    (hit, *_) = paths(text, "fill: var(--c0)")
    assert max(x for x, _ in hit) == pytest.approx(0.6 * 440)
    assert "<title>draft-gate, K=4: 30 % miss: loaded on demand</title>" in text


def test_one_colour_stands_for_one_configuration() -> None:
    report = Report(Comparison([WorkloadResults(MACHINE, [*SYSTEMS, *SWEEP, *ABLATED])]), None)
    keys = {key.name: key.colour for key in report.colour_keys()}
    assert keys == {"draft-gate": "c0", "next-gate": "c1", "on-demand": "c2", f"oracle, {PLAIN}": "c5"}

    def colours(figures: list[Figure]) -> set[str]:
        return {one for figure in figures for one in re.findall(r"var\(--(c\d)\)", figure.svg)}

    charts_of_systems = [report.tpot(), report.hit_rate(), report.efficiency(), report.speedup_charts()]
    for figures in charts_of_systems:
        assert colours(figures[""]) <= {"c0", "c1", "c2", "c5"}
    for figures in (report.time_by_stage(), report.bytes_moved(), report.acceptance()):
        assert colours(figures[""]) == set(), "parts of a step have other colours"
    assert colours(report.cutoff_sweeps()) == colours(report.ablations()) == {"c0"}, "that of their system"


def test_bars_are_ordered_by_speed_and_further_systems_are_neutral() -> None:
    policies = [f"policy-{number}" for number in range(20)]
    rows = [row(name, 4, 0.05 - 0.001 * number) for number, name in enumerate(policies)]
    report = Report(Comparison([WorkloadResults(MACHINE, rows)]), None)
    (figure,) = report.tpot()[""]
    shown, more = (
        re.findall(r"<text [^>]*text-anchor: start[^>]*>([^<]*)</text>", svg) for svg in (figure.svg, figure.more)
    )
    assert shown == [*(f"{name}, K=4" for name in policies[:-13:-1]), "policy-0, K=4"], "the slowest is the baseline"
    assert more == [f"{name}, K=4" for name in policies[7:0:-1]], "folded"
    assert figure.num_more == 7
    assert len(figure.table.rows) == 20
    keys = report.colour_keys()
    assert [key.colour for key in keys] == ["c0", "c1", "c2", "c3", "c4", "c5"]
    assert keys[-1].name == "policy-14, and 14 others, named in the charts"


def test_tables_have_at_most_ten_columns() -> None:
    rows = [row("draft-gate", k, 0.03, acceptance_by_position=[0.5] * 16) for k in range(1, 11)]
    text = html_report([WorkloadResults(MACHINE, [row("on-demand", 0, 0.04), *rows])])
    widths = [line.count("<th ") for line in re.findall(r"<thead>.*?</thead>", text)]
    assert max(widths) == 10
    many = [WorkloadResults({**MACHINE, "matrix": f"m{number}"}, SYSTEMS) for number in range(12)]
    report = Report(Comparison(many), None)
    tables = [*report.facts(), report.overview()]
    parts = [list(table.split()) for table in tables if table is not None]
    assert [[len(part.head) for part in one] for one in parts] == [[2], [10, 4]]
    assert [one[0] for one in parts[1][1].rows] == [one[0] for one in parts[1][0].rows], "rows keep their names"


def test_timeline_of_prefetching_against_loading_on_demand() -> None:
    rows = [with_samples(one, [0.03], TIMELINE) for one in SYSTEMS]
    report = Report(Comparison([WorkloadResults(MACHINE, rows)]), None)
    (figure,) = report.timelines()[""]
    assert [one[0] for one in figure.table.rows] == ["next-gate, K=4"], "nothing on demand in its budget"
    (figure,) = Report(Comparison([WorkloadResults(MACHINE, rows[:5])]), None).timelines()[""]
    assert [one[0] for one in figure.table.rows] == ["draft-gate, K=4", "on-demand, K=4"], "not the oracle"
    assert list(figure.table.rows[0][1:]) == [
        "20.0 ms", "5.00 ms", "15.0 ms", "2.00 ms", "1", "1", "30 %", "3 of 9",
    ]  # fmt: skip
    page = Page(html_report([WorkloadResults(MACHINE, rows[:5])]))
    for tip in (
        "draft: 0.00 to 5.00 ms (5.00 ms)",
        "12 prefetch requests: 1.00 to 1.01 ms (0.01 ms)",
        "prefetch of layer.expert 3.1: 1.00 to 4.00 ms (3.00 ms)",
        "experts of layer 0: 6.00 to 10.00 ms (4.00 ms)",
        "demand load of layer.expert 0.5: 6.00 to 9.00 ms (3.00 ms)",
        "stall: compute waits for experts: 7.00 to 9.00 ms (2.00 ms)",
    ):
        assert page.tips.count(tip) == 2, "in both configurations"
    assert "contain no timeline" not in page.text
    assert "contain no timeline" in Page(html_report([WorkloadResults(MACHINE, SYSTEMS)])).text


def test_machine_facts_are_shown_if_they_are_recorded() -> None:
    page = Page(html_report([WorkloadResults(MACHINE, SYSTEMS[:2])]))
    for words in (
        "2026-11-16 10:34 UTC, a processor, 4 of 8 cores, 32.0 GiB RAM; spmoe 0.1.0, torch 2.11",
        "commit 0123456789ab.",
        "4 of 8 cores, 2 threads per operation",
    ):
        assert words in page.text
    new = ("date", "cores", "usable_cores", "threads", "memory_bytes")
    old = {name: value for name, value in MACHINE.items() if name not in new}
    page = Page(html_report([WorkloadResults(old, SYSTEMS[:2])]))
    assert "a processor; spmoe 0.1.0" in page.text
    assert "RAM" not in page.text
    later = {**MACHINE, "matrix": "b", "date": "2026-11-17T00:00:00+01:00"}
    page = Page(html_report([WorkloadResults(one, SYSTEMS[:2]) for one in (MACHINE, later)]))
    assert "2026-11-16 10:34 UTC to 2026-11-16 23:00 UTC" in page.text


# ---- charts


def paths(svg: str, style: str) -> list[list[tuple[float, float]]]:
    """Return the points of every path whose style contains this text."""
    found = re.findall(r'<path d="([^"]*)"[^>]*style="([^"]*)"', svg)
    return [
        [(float(x), float(y)) for x, y in re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", points)]
        for points, found_style in found
        if style in found_style
    ]


def test_bar_lengths_spread_and_mark() -> None:
    bars = [
        Bar("a", (Part(1.0, "c0", tip="first <&>"), Part(1.0, "c1", Fill.PALE)), "2"),
        Bar("<b>", (Part(1.0, "c2"),), "1", (0.5, 4.0), 3.0, "whole"),
    ]
    chart = bar_chart("t", bars, chart_id="one")

    def extent(colour: str) -> tuple[float, float]:
        ((*_, (low, _), (high, _)),) = [
            sorted(path)[:1] + sorted(path)[-1:] for path in paths(chart, f"var(--{colour})")
        ]
        return low / 440, high / 440

    assert extent("c0") == (0, 0.25)
    assert extent("c1") == (0.25, 0.5)
    assert extent("c2") == (0, 0.25)
    assert re.search(r"fill: var\(--c1\); opacity: 0.42", chart), "pale"
    spread, mark = paths(chart, "var(--ink)")
    assert [x for x, _ in spread[:2]] == [55, 440]
    assert [x for x, _ in mark] == [330, 330]
    assert "&lt;b&gt;" in chart
    assert "<title>first &lt;&amp;&gt;</title>" in chart
    assert chart.count("<title>whole</title>") == 3, "of the row, its error bar and its mark"
    wide = bar_chart("t", [Bar("a", (Part(1.0, "c0"),), "1")], x_max=8.0)
    assert max(x for x, _ in paths(wide, "var(--c0)")[0]) == 55
    ids = set(re.findall(r'\bid="([^"]*)"', chart))
    assert all(one.startswith("one-") for one in ids)


def test_hatched_area_is_drawn_as_lines_inside_of_it() -> None:
    chart = bar_chart("t", [Bar("a", (Part(3.0, "c0"), Part(1.0, "absent", Fill.HATCHED, "miss")), "75 %")])
    (outline,) = paths(chart, "stroke: var(--absent)")
    assert len(outline) > 5 + 2 * 15, "an outline and diagonals"
    assert (min(x for x, _ in outline), max(x for x, _ in outline)) == pytest.approx((330, 440))
    assert not paths(chart, "fill: var(--absent)")
    assert chart.count("<title>miss</title>") == 2


def test_ratios_below_one_are_left_of_the_line() -> None:
    bars = [Bar("fast", (Part(1.0, "c0"),), "2.00x"), Bar("slow", (Part(-1.0, "c1"),), "0.50x (slower)")]
    chart = ratio_chart("t", bars)
    (line,) = paths(chart, "stroke: var(--rule)")
    (fast,), (slow,) = (paths(chart, f"fill: var(--{colour})") for colour in ("c0", "c1"))
    middle = line[0][0]
    assert middle == pytest.approx(220)
    assert min(x for x, _ in fast) == max(x for x, _ in slow) == pytest.approx(middle)
    assert (min(x for x, _ in slow), max(x for x, _ in fast)) == pytest.approx((0, 440))
    assert [word for word in ("0.5x", "1x", "2x") if f">{word}</text>" in chart] == ["0.5x", "1x", "2x"]
    tiny = ratio_chart("t", [Bar("a", (Part(0.01, "c0"),), "1.01x")])
    ((low, *_, high),) = (sorted(x for x, _ in path) for path in paths(tiny, "fill: var(--c0)"))
    assert high - low < 10, "a small difference looks small"


def test_overlapping_blocks_of_a_timeline_have_lanes() -> None:
    blocks = tuple(Block(start, start + 4.0, "prefetch", f"block {start:g}") for start in (0.0, 1.0, 4.0, 5.0))
    tracks = (Track("compute", (Block(0, 10, "verify", "v"), Block(2, 3, "stall", "s")), True), Track("link", blocks))
    chart = timeline_chart("t", [TimelineGroup("one: 10 ms", 10.0, tracks)])
    drawn = [sorted(path) for path in paths(chart, "fill: var(--prefetch)")]
    tops = [path[0][1] for path in drawn]
    assert tops[0] == tops[2] < tops[1] == tops[3], "two lanes"
    verify, stall = (paths(chart, f"fill: var(--{colour})")[0] for colour in ("verify", "stall"))
    assert {y for _, y in verify} == {y for _, y in stall}, "drawn over each other"
    for tip in ("block 0", "block 1", "block 4", "block 5", "v", "s"):
        assert f"<title>{tip}</title>" in chart
    many = tuple(Block(0.0, 1.0, "demand", str(number)) for number in range(100))
    crowded = timeline_chart("t", [TimelineGroup("many", 1.0, (Track("link", many),))])
    height = float(re.search(r'viewBox="0 0 \S+ (\S+)"', crowded)[1])  # type: ignore[index]
    assert height < 200, "bounded"


COLOUR_BLINDNESS = {  # linear RGB of a dichromat, after Machado, Oliveira and Fernandes (2009), severity 1
    "none": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def lab(colour: str, blindness: str) -> Any:
    """Return a colour in CIE L*a*b* as it is seen."""
    coded = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(coded <= 0.04045, coded / 12.92, ((coded + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(COLOUR_BLINDNESS[blindness]) @ linear, 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ seen
    x, y, z = np.where((white := xyz / [0.9505, 1, 1.089]) > 0.008856, np.cbrt(white), 7.787 * white + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("blindness", COLOUR_BLINDNESS)
@pytest.mark.parametrize("palette", [charts._LIGHT, charts._DARK], ids=["light", "dark"])
@pytest.mark.parametrize(
    "together", [charts.SERIES, ("draft", "verify", "stall", "other"), ("prefetch", "late", "demand", "track")]
)
def test_colours_of_a_chart_stay_distinct(palette: dict[str, str], together: tuple[str, ...], blindness: str) -> None:
    """Two colours that differ by 10 in L*a*b* are told apart at a glance."""
    seen = {name: lab(palette[name], blindness) for name in together}
    for one, other in combinations(together, 2):
        assert np.linalg.norm(seen[one] - seen[other]) > 14, (one, other)


def test_no_colour_has_two_meanings() -> None:
    for palette in (charts._LIGHT, charts._DARK):
        assert len(set(palette.values())) == len(palette)
    assert charts._LIGHT.keys() == charts._DARK.keys()


def test_line_points_and_dashed_line() -> None:
    line = Line("a", ((0, 10.0), (4, 20.0)), 3, (2,))
    chart = line_chart(LineChart("t", "x", "y", (line,), 0.0, 20.0), chart_id="one")
    (vertical,) = paths(chart, "stroke-dasharray")
    assert vertical in paths(chart, "stroke: var(--c3)"), "in the colour of its line"
    neutral = Line("a", ((0, 10.0), (4, 20.0)), 3, (2,), dashed_colour="rule")
    assert len(paths(line_chart(LineChart("t", "x", "y", (neutral,))), "stroke: var(--rule)")) == 1
    (points,) = (path for path in paths(chart, "stroke: var(--c3)") if len(path) == 2 and path != vertical)
    (x0, y0), (x1, y1) = points
    assert [x for x, _ in vertical] == pytest.approx([(x0 + x1) / 2] * 2)
    top, bottom = sorted(y for _, y in vertical)
    assert y0 == pytest.approx((top + bottom) / 2, abs=0.01), "10 of 0 to 20"
    assert y1 == pytest.approx(top, abs=0.01)
    ids, used = set(re.findall(r'\bid="([^"]*)"', chart)), set(re.findall(r'href="#([^"]*)"', chart))
    assert used <= ids
    assert all(one.startswith("one-") for one in ids)
    assert "<svg" in line_chart(LineChart("t", "x", "y", (Line("a", ((1, 5.0),)),)))


def test_line_has_error_bars_and_values_under_the_pointer() -> None:
    line = Line("a", ((0, 10.0), (4, 20.0)), "c1", spreads=((5.0, 15.0), (20.0, 20.0)), tips=("ten", "twenty"))
    chart = line_chart(LineChart("t", "x", "y", (line,), 0.0, 20.0))
    vertical = [
        path for path in paths(chart, "stroke: var(--ink)") if len({x for x, _ in path}) == 1 and len(path) == 2
    ]
    heights = sorted(abs(path[0][1] - path[1][1]) for path in vertical)
    assert heights[-1] == pytest.approx((270 - 46 - 12) / 2, abs=0.1), "10 of 0 to 20"
    assert [chart.count(f"<title>{tip}</title>") for tip in ("ten", "twenty")] == [1, 1]


def test_svg_document_has_titles_and_legends() -> None:
    chart = LineChart(
        "Copies <over> size", "experts", "ms", (Line("alone", ((0, 1.0), (2, 3.0))), Line("both", ((0, 2.0),)))
    )
    text = svg_document([chart, chart])
    root = ElementTree.fromstring(text.encode())
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    for word in ("Copies <over> size", "experts", "ms", "alone", "both"):
        assert words.count(word) == 2
    assert "var(" not in text, "viewers without CSS variables show it too"
    assert text == svg_document([chart, chart])


# ---- Markdown


def test_markdown_tables() -> None:
    text = markdown_report([WorkloadResults(MACHINE, [*SYSTEMS, *SWEEP])])
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 2
    for table in tables:
        assert len({line.count("|") for line in table}) == 1
        assert set(table[1]) <= set("| -")
    speedups, metrics = tables
    assert "| draft-gate | 30.0 ms, 2.00x | 20.0 ms, baseline |" in speedups
    assert "| plain decoding (K=0) | 60.0 ms, baseline | - |" in speedups
    assert "| rank of draft-gate | 1 of 3 | 2 of 2 |" in speedups
    assert "| draft-gate, relative to the oracle | 0.83x (slower) | - |" in speedups
    assert all(table[0].count("|") - 1 <= 10 for table in tables), "at most ten columns"
    assert len(metrics) == 2 + len(SYSTEMS) + len(SWEEP)
    assert any(line.startswith("| draft-gate, cutoff 0 |") for line in metrics)
    assert "```bash\nspmoe bench --scenario mine.toml\n```" in text
    assert "2026-11-16 10:34 UTC, a <device>, a processor, 4 of 8 cores, 32.0 GiB RAM, torch 2.11" in text


def test_markdown_table_of_many_columns_is_split() -> None:
    rows = [row(policy, 4, 0.03, f"{share}%") for share in range(5, 95, 5) for policy in ("draft-gate", "on-demand")]
    text = markdown_report([WorkloadResults(MACHINE, rows)])
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert max(line.count("|") - 1 for line in lines) == 10
    assert sum(line.startswith("| draft-gate | 30.0 ms, 1.00x") for line in lines) == 2
