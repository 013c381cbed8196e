"""HTML page and Markdown of results with known values, and charts."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from spmoe.bench import charts
from spmoe.bench.charts import Bar, Line, LineChart, bar_chart, line_chart, svg_document
from spmoe.bench.comparison import Column, Comparison
from spmoe.bench.configs import ABLATIONS, ALL_ON, ablated_record
from spmoe.bench.labels import PLAIN, workload_names
from spmoe.bench.markdown import markdown_report
from spmoe.bench.report import html_report
from spmoe.bench.results import WorkloadResults, write_results
from spmoe.errors import UsageError

MACHINE: dict[str, Any] = {
    "type": "machine", "format": 3, "device": "a <device>", "driver": None, "device_memory_bytes": 2**34,
    "processor": "a processor", "platform": "Linux", "python": "3.11", "torch": "2.11", "transformers": "5.17",
    "spmoe": "0.1.0", "commit": "0123456789abcdef", "link_bytes_per_second": 25e9, "link_source": "pinned copies",
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


class Page(HTMLParser):
    """Parsed page; checks that every tag is closed."""

    VOID = ("meta",)

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.titles: list[str] = []
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
        "0.90x to 1.20x the speed of next-gate",
        "1.50x the speed of on-demand",
        "2.00x the speed of plain decoding (K=0)",
        "fastest speculating system in 1 of 2 comparisons",
        "1.20x the time of the oracle",
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
    text = html_report([WorkloadResults(MACHINE, [*SYSTEMS, *SWEEP, *ABLATED])])
    page = Page(text)
    assert "All configurations generated the same tokens" in page.text
    assert "a <device>" in page.text, "escaped"
    assert "spmoe bench --scenario mine.toml" in page.text
    assert "repeat = 3" in page.text
    assert "0123456789abcdef" in page.text
    assert "1 of 3" in page.text
    assert "1.20x" in page.text
    assert "Best: 30.0 ms at 8 layers. Auto: 9 layers, 30.0 ms." in page.text
    for name in ABLATIONS:
        assert name in page.text
    assert "38.0 ms (+26.7 %)" in page.text
    assert 'class="missing"' not in text


def test_page_is_self_contained() -> None:
    text = html_report([WorkloadResults(MACHINE, SYSTEMS)])
    page = Page(text)
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
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
    for command in ("scenarios/paper.toml", "scenarios/ushape.toml", "scenarios/ablation.toml", "spmoe bench -k 4"):
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
    assert page.text.count("0.90x to 1.20x") == 3, "in the summary and for each workload"
    assert page.text.count("rank of draft-gate") == 2, "one table for each workload"
    assert page.tags.count("svg") == 2 * 2 * 5 + 1


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


@pytest.mark.parametrize("text", ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "a & b's $x$ {{ 1 }}"])
def test_values_are_escaped(text: str) -> None:
    rows = [{**one, "system": text, "eviction": text} for one in SYSTEMS[1:3]] + SWEEP
    machine = {**MACHINE, "model": text, "command": text, "scenario": text, "scenario_text": text, "device": text}
    results = [WorkloadResults({**machine, "matrix": name}, rows) for name in (text, None)]
    page = Page(html_report(results))
    assert not {"script", "img"} & set(page.tags)
    assert page.text.count(text) > 10, "shown as it is"


@pytest.mark.parametrize("missing", ["matplotlib", "jinja2"])
def test_missing_extra_is_reported_in_one_line(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "find_spec", lambda name: None if name == missing else object())
    with pytest.raises(UsageError, match=rf"need {missing}, not installed.*pip install 'spmoe\[report\]'"):
        html_report([WorkloadResults(MACHINE, SYSTEMS)])
    assert markdown_report([WorkloadResults(MACHINE, SYSTEMS)])


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
    bars = [Bar("a", ((1.0, 0), (1.0, 1)), "2"), Bar("<b>", ((1.0, 2),), "1", (0.5, 4.0), 3.0)]
    chart = bar_chart("t", bars, chart_id="one")

    def extent(colour: str) -> tuple[float, float]:
        ((*_, (low, _), (high, _)),) = [
            sorted(path)[:1] + sorted(path)[-1:] for path in paths(chart, f"var(--{colour})")
        ]
        return low / 440, high / 440

    assert extent("c0") == (0, 0.25)
    assert extent("c1") == (0.25, 0.5)
    assert extent("c2") == (0, 0.25)
    spread, mark = paths(chart, "var(--ink)")
    assert [x for x, _ in spread] == [55, 440]
    assert [x for x, _ in mark] == [330, 330]
    assert "&lt;b&gt;" in chart
    wide = bar_chart("t", [Bar("a", ((1.0, 0),), "1")], x_max=8.0)
    assert max(x for x, _ in paths(wide, "var(--c0)")[0]) == 55
    ids = set(re.findall(r'\bid="([^"]*)"', chart))
    assert all(one.startswith("one-") for one in ids)


def test_line_points_and_dashed_line() -> None:
    line = Line("a", ((0, 10.0), (4, 20.0)), 3, (2,))
    chart = line_chart(LineChart("t", "x", "y", (line,), 0.0, 20.0), chart_id="one")
    (vertical,) = paths(chart, "stroke-dasharray")
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
    assert "| draft-gate | 30.0 ms (1.00x) | 20.0 ms (1.11x) |" in speedups
    assert "| rank of draft-gate | 1 of 3 | 2 of 2 |" in speedups
    assert "| draft-gate / oracle | 1.20x | - |" in speedups
    assert len(metrics) == 2 + len(SYSTEMS) + len(SWEEP)
    assert any(line.startswith("| draft-gate, cutoff 0 |") for line in metrics)
    assert "```bash\nspmoe bench --scenario mine.toml\n```" in text
    assert "a <device>, torch 2.11" in text
