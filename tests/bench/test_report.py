"""The page and the Markdown, from records whose figures are known."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from spmoe.bench.comparison import Column, Comparison
from spmoe.bench.labels import PLAIN, case_names
from spmoe.bench.markdown import markdown_report
from spmoe.bench.plot import Bar, Line, bar_chart, line_chart
from spmoe.bench.report import html_report
from spmoe.bench.results import Group, write_results
from spmoe.bench.settings import ABLATIONS, ALL_ON, switched_off

MACHINE: dict[str, Any] = {
    "type": "machine", "format": 2, "device": "a <device>", "driver": None, "device_memory_bytes": 2**34,
    "processor": "a processor", "platform": "Linux", "python": "3.11", "torch": "2.11", "transformers": "5.17",
    "spmoe": "0.1.0", "commit": "0123456789abcdef", "link_bytes_per_second": 25e9, "link_source": "pinned copies",
    "memory_bytes_per_second": 1e12, "active_read_seconds": 0.003, "draft_read_seconds": 0.001,
    "model": "somebody/model", "draft": None, "shape": None, "link_gbps": None, "enforce_eager": False, "prompts": 2,
    "output_len": 100, "warmup": 1, "prompt_set": "sample", "prompt_form": "sample", "matrix": None,
    "scenario": "mine", "scenario_text": "repeat = 3", "command": "spmoe bench --scenario mine.toml",
    "dtype": "float32", "expert_bytes": 2**20, "experts": 128,
    "layers": 16, "top_k": 2, "repeat": 3, "interrupted": False,
}  # fmt: skip


def row(prefetch: str, k: int, tpot: float, memory: str = "25%", **changes: Any) -> dict[str, Any]:
    """A configuration that takes so many seconds per token."""
    tokens, steps = 200, 200 if not k else 80
    step = tpot * tokens / steps
    ledger = {"hits": 60, "late": 10, "demand_loads": 30, "demand_bytes": 30 * 2**20, "used_bytes": 20 * 2**20,
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
        "all_resident_step_seconds": step / 2, "resident_source": "measured", "ideal_step_seconds": 0.8 * step,
        "pipeline_efficiency": 0.8, "identical_share": 1.0, "ledger": ledger, **changes,
    }  # fmt: skip


SYSTEMS = [
    row("on-demand", 0, 0.060), row("draft-gate", 4, 0.030), row("next-gate", 4, 0.036), row("on-demand", 4, 0.045),
    row("oracle", 4, 0.025), row("draft-gate", 4, 0.020, "50%"), row("next-gate", 4, 0.018, "50%"),
]  # fmt: skip
SWEEP = [row("draft-gate", 4, 0.030 + 0.001 * abs(n - 8), cutoff=str(n), cutoff_layers=n) for n in (0, 4, 8, 16)]
WHOLE = row("draft-gate", 4, 0.03, ablation=ALL_ON)
ABLATED = [
    row(**{"prefetch": "draft-gate", **switched_off(WHOLE, name), "k": 4, "tpot": 0.03 + 0.002 * n})
    for n, name in enumerate(ABLATIONS)
]


class Page(HTMLParser):
    """What a page holds; every tag must be closed by its own."""

    VOID = ("meta",)

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.seen: list[str] = []
        self.titles: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        values = dict(attrs)
        if "id" in values:
            self.ids.append(str(values["id"]))
        self.links += [str(values[name]) for name in ("href", "src") if name in values]
        if tag == "svg":
            assert values["role"] == "img"
            assert values["aria-label"]
        if tag not in self.VOID and not (self.open and self.open[-1] == "svg" and tag in ("rect", "line", "circle")):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


# ---- comparisons


def test_systems_are_compared_where_they_meet() -> None:
    found = Comparison([Group(MACHINE, SYSTEMS)])
    quarter, half = Column("", "25%", 4), Column("", "50%", 4)
    assert found.columns == [quarter, half]
    assert found.ours == "draft-gate"
    assert found.systems == ["oracle", "draft-gate", "next-gate", "on-demand", PLAIN]
    assert found.cells[PLAIN, quarter]["tpot_seconds"]["median"] == 0.060
    assert found.rank("draft-gate", quarter) == (1, 3), "the oracle and plain decoding are not ranked"
    assert found.rank("draft-gate", half) == (2, 2)
    assert found.rank("on-demand", half) is None
    assert found.best(half) == 0.018
    bound = found.bound(quarter)
    assert bound is not None
    assert bound["prefetch"] == "oracle"
    assert found.bound(half) is None
    assert found.headline() == [
        "0.90x to 1.20x the speed of next-gate",
        "1.50x the speed of on-demand",
        "2.00x the speed of plain decoding (K=0)",
        "fastest of those that speculate in 1 of 2 comparisons",
        "1.20x the time of the oracle",
    ]


def test_sweeps_and_ablations_are_no_systems() -> None:
    found = Comparison([Group(MACHINE, [*SYSTEMS, *SWEEP, *ABLATED])])
    assert found.systems == Comparison([Group(MACHINE, SYSTEMS)]).systems
    alone = Comparison([Group(MACHINE, SWEEP)])
    assert len(alone.main_rows()) == len(SWEEP), "better than nothing"
    both = Comparison([Group(MACHINE, SYSTEMS), Group({**MACHINE, "matrix": "cutoff"}, [SYSTEMS[1], *SWEEP])])
    assert {column.case for column in both.columns} == {""}, "one system alone is compared with nothing"


def test_names_come_from_the_scenario_or_from_what_differs() -> None:
    named = [row("draft-gate", 1, 0.1, system="SP-MoE"), row("next-gate", 1, 0.2, system="other", eviction="lru")]
    assert Comparison([Group(MACHINE, named)]).ours == "SP-MoE"
    pairs = [row("draft-gate", 1, 0.1), row("draft-gate", 1, 0.2, eviction="lru")]
    assert Comparison([Group(MACHINE, pairs)]).systems == ["draft-gate / auto", "draft-gate / lru"]
    machines = [MACHINE, {**MACHINE, "link_gbps": 16.0}, {**MACHINE, "shape": "mixtral-8x7b"}]
    assert case_names([Group(machine) for machine in machines]) == [
        "somebody/model, own link", "somebody/model, 16 GB/s", "mixtral-8x7b, own link"
    ]  # fmt: skip
    assert case_names([Group(MACHINE)]) == [""]
    later = [MACHINE, {**MACHINE, "commit": "fedcba"}]
    assert case_names([Group(machine) for machine in later]) == ["0123456789", "fedcba"], "nothing else differs"
    other = {**MACHINE, "commit": "fedcba", "scenario": "another"}
    assert case_names([Group(MACHINE), Group(other)]) == ["mine", "another"]
    assert case_names([Group({**MACHINE, "model": "/home/me/secret/model"}), Group(MACHINE)])[0] == "model"


# ---- the page


def test_a_page_with_everything() -> None:
    text = html_report([Group(MACHINE, [*SYSTEMS, *SWEEP, *ABLATED])])
    page = Page(text)
    assert "Every configuration wrote the same tokens" in page.text
    assert "What to run" not in page.text
    assert "a <device>" in page.text, "escaped, and so shown as it is"
    assert "spmoe bench --scenario mine.toml" in page.text
    assert "repeat = 3" in page.text
    assert "0123456789abcdef" in page.text
    assert "1 of 3" in page.text
    assert "1.20x" in page.text
    assert "Least: 30.0 ms at 8 layers. Chosen: 9 layers, 30.0 ms." in page.text
    for name in ABLATIONS:
        assert name in page.text
    assert "38.0 ms (+26.7 %)" in page.text
    assert 'class="missing"' not in text


def test_a_page_needs_nothing_from_elsewhere() -> None:
    text = html_report([Group(MACHINE, SYSTEMS)])
    page = Page(text)
    assert not {"script", "link", "img", "iframe"} & set(page.seen)
    assert page.links
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)
    assert "http" not in text.replace("http-equiv", "")
    assert "@import" not in text
    assert "url(" not in text
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text
    used = {int(number) for number in re.findall(r"var\(--c(\d+)\)", text)}
    defined = {int(number) for number in re.findall(r"--c(\d+):", text)}
    assert used <= defined


def test_what_is_missing_says_what_to_run() -> None:
    page = Page(html_report([Group(MACHINE, [row("on-demand", 0, 0.06)])]))
    for command in ("scenarios/paper.toml", "scenarios/ushape.toml", "scenarios/ablation.toml", "spmoe bench -k 4"):
        assert command in page.text


def test_figures_of_a_bar() -> None:
    text = html_report([Group(MACHINE, SYSTEMS[:2])])
    page = Page(text)
    assert "24.0 ms" in page.text, "the floor of draft-gate: 0.8 of 30 ms"
    assert "15.0 ms" in page.text, "and with all experts in slots"
    assert "above 100 %" not in page.text.lower()
    busy = [SYSTEMS[0], {**SYSTEMS[1], "pipeline_efficiency": 1.3}]
    assert "Above 100 %" in Page(html_report([Group(MACHINE, busy)])).text


def test_tokens_that_differ_are_told() -> None:
    rows = [SYSTEMS[0], {**SYSTEMS[1], "identical_share": 0.5}]
    text = Page(html_report([Group({**MACHINE, "interrupted": True, "dtype": "bfloat16"}, rows)])).text
    assert "In 1 of 2 configurations all tokens are the first one's; forwards of other sizes round otherwise" in text
    assert "interrupted" in text
    assert "must not differ" in Page(html_report([Group(MACHINE, rows)])).text


def test_several_cases_share_a_page() -> None:
    groups = [Group(MACHINE, SYSTEMS), Group({**MACHINE, "shape": "mixtral-8x7b"}, SYSTEMS)]
    page = Page(html_report(groups))
    assert page.text.count("0.90x to 1.20x") == 3, "what ours gains, in words and case by case"
    assert page.text.count("rank of draft-gate") == 2, "and a table for each of them"
    assert page.seen.count("svg") == 2 * 2 * 5 + 1


def test_stored_results_are_reported_without_torch(tmp_path: Path) -> None:
    """Which would take seconds to import, and is not there on every machine that results are looked at on."""
    results = tmp_path / "results.jsonl"
    write_results(results, [Group(MACHINE, [*SYSTEMS, *SWEEP])])
    code = """
import sys
from spmoe.cli.main import main
for words in (["-o", "page.html"], ["--markdown", "-o", "tables.md"]):
    sys.argv = ["spmoe", "report", "results.jsonl", *words]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code
print(*sorted({"torch", "transformers", "numpy"} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == "\n", "none of them"
    assert "draft-gate" in (tmp_path / "page.html").read_text()
    assert "draft-gate" in (tmp_path / "tables.md").read_text()


# ---- plots


def test_bars_are_as_long_as_they_say() -> None:
    chart = bar_chart("t", [Bar("a", ((1.0, 0), (1.0, 1)), "2"), Bar("<b>", ((1.0, 2),), "1", (0.5, 4.0), 3.0)])
    rects = re.findall(r'<rect x="([\d.]+)%" y="\d+" width="([\d.]+)%"[^>]*fill="var\(--c(\d)\)"', chart)
    assert rects == [("0.00", "25.00", "0"), ("25.00", "25.00", "1"), ("0.00", "25.00", "2")]
    assert 'class="spread" x1="12.50%" x2="100.00%"' in chart
    assert 'class="mark" x1="75.00%"' in chart
    assert "&lt;b&gt;" in chart
    assert 'width="12.50%"' in bar_chart("t", [Bar("a", ((1.0, 0),), "1")], most=8.0)


def test_lines_go_where_their_points_are() -> None:
    chart = line_chart("t", "x", "y", [Line("a", ((0, 10.0), (4, 20.0)), 3, (2,))], 0.0, 20.0)
    (points,) = re.findall(r'<polyline points="([^"]*)"', chart)
    (x0, y0), (x1, y1) = (tuple(map(float, point.split(","))) for point in points.split())
    (marked,) = re.findall(r'class="marked" x1="([\d.]+)"', chart)
    assert float(marked) == pytest.approx((x0 + x1) / 2)
    heights = {label: float(y) for y, label in re.findall(r'y="([\d.]+)" text-anchor="end">([\d.]+)<', chart)}
    assert heights["10"] == pytest.approx(y0 + 4)
    assert heights["20"] == pytest.approx(y1 + 4)
    assert line_chart("t", "x", "y", [Line("a", ((1, 5.0),), 0)]).count("<circle") == 1


# ---- Markdown


def test_markdown_tables_can_be_pasted() -> None:
    text = markdown_report([Group(MACHINE, [*SYSTEMS, *SWEEP])])
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 2
    for table in tables:
        assert len({line.count("|") for line in table}) == 1
        assert set(table[1]) <= set("| -")
    speedups, figures = tables
    assert "| draft-gate | 30.0 ms (1.00x) | 20.0 ms (1.11x) |" in speedups
    assert "| rank of draft-gate | 1 of 3 | 2 of 2 |" in speedups
    assert "| draft-gate / oracle | 1.20x | - |" in speedups
    assert len(figures) == 2 + len(SYSTEMS) + len(SWEEP)
    assert any(line.startswith("| draft-gate, cutoff 0 |") for line in figures)
    assert "```bash\nspmoe bench --scenario mine.toml\n```" in text
    assert "a <device>, torch 2.11" in text
