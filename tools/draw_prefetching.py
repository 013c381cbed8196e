"""Draw docs/images/prefetching.svg: the same decode steps with experts loaded on demand and with prefetching.

    python tools/draw_prefetching.py

Records a short generation of the fine-grained target in `extras/fine`, replays it on the virtual clock at the sizes and
speeds of a large model (see REPLAY) and draws the last steps of both replays. It needs matplotlib and no GPU; it takes
about half a minute. The picture carries its own background and follows the reader's light or dark mode.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import Patch

ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "docs" / "images" / "prefetching.svg"

RECORD = "extras/fine --draft src/spmoe/pair/draft --max-prompts 2 --max-tokens 64 --ignore-eos -k 4 --dtype float32"
REPLAY = (  # DeepSeek-V2-Lite's sizes, times measured on an H200, 90 % of the experts in slots
    "--prefetch on-demand,draft-gate --eviction draft-informed --cutoff all --expert-memory 90% --link-gbps 55"
    " --expert-size 17MB --draft-pass-ms 1.2 --verify-layer-ms 0.19 --transfer cuda --workers 1"
)
TITLES = {"on-demand": "on demand", "draft-gate": "prefetched from the draft"}
STEPS = 3  # consecutive decode steps that are drawn

# Colours that the style sheet below replaces; matplotlib only needs them to be distinct.
INK, PAPER = "#010101", "#fefefe"
COLOURS = {
    "draft": ("#4c8dd6", "draft proposes tokens"),
    "verify": ("#3fa66a", "target verifies"),
    "stall": ("#d9534f", "target waits (stall)"),
    "copy": ("#e8973a", "expert copied on demand"),
    "prefetch": ("#9b72cf", "expert copied ahead"),
}
STYLE = """<style>
:root { --ink: #1f2328; --paper: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #161b22; } }
</style>
"""


class Span(NamedTuple):
    """One activity on the timeline, in milliseconds."""

    kind: str
    start: float
    end: float


def spmoe(*arguments: str) -> None:
    """Run the command line of this checkout."""
    subprocess.run([sys.executable, "-m", "spmoe", *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def replayed_spans(folder: Path) -> dict[str, list[Span]]:
    """Record, replay and return each policy's spans."""
    trace, chrome = folder / "trace.npz", folder / "chrome.json"
    spmoe("trace", "record", *RECORD.split(), "-o", str(trace))
    spmoe("trace", "replay", str(trace), *REPLAY.split(), "--chrome", str(chrome))
    return read_chrome(json.loads(chrome.read_text())["traceEvents"])


def read_chrome(events: list[dict[str, Any]]) -> dict[str, list[Span]]:
    """Group Chrome trace events by policy, asynchronous begin and end events joined."""
    policy_of = {e["pid"]: e["args"]["name"].split()[0] for e in events if e["name"] == "process_name"}
    spans: dict[str, list[Span]] = defaultdict(list)
    begun: dict[str, float] = {}
    for event in events:
        policy, kind, at = policy_of[event["pid"]], event.get("cat", ""), event.get("ts", 0.0) / 1e3
        if event["ph"] == "X":
            spans[policy].append(Span(kind, at, at + event["dur"] / 1e3))
        elif event["ph"] == "b":
            begun[event["id"]] = at
        elif event["ph"] == "e":
            spans[policy].append(Span(kind, begun.pop(event["id"]), at))
    return spans


def step_bounds(spans: list[Span]) -> list[tuple[float, float]]:
    """Return (start, end) of every step; a step ends with its verification, and the next one starts there."""
    ends = sorted(span.end for span in spans if span.kind == "verify")
    return list(zip([0.0, *ends], ends, strict=False))


def typical_steps(runs: dict[str, list[Span]]) -> int:
    """Return the first of STEPS consecutive steps, each with a draft, whose gain is closest to the mean gain."""
    times = {policy: [end - start for start, end in step_bounds(spans)] for policy, spans in runs.items()}
    demand, ahead = times["on-demand"], times["draft-gate"]
    usual = 2 * sorted(demand)[len(demand) // 2]  # steps that read a prompt take longer than this
    drafts = [span.start for span in runs["on-demand"] if span.kind == "draft"]
    drafted = [any(start <= at < end for at in drafts) for start, end in step_bounds(runs["on-demand"])]
    windows = [slice(i, i + STEPS) for i in range(len(demand) - STEPS)]
    starts = [w.start for w in windows if max(demand[w]) < usual and all(drafted[w])]
    gains = {i: sum(demand[i : i + STEPS]) / sum(ahead[i : i + STEPS]) for i in starts}
    mean = sum(gains.values()) / len(gains)
    return min(starts, key=lambda i: abs(gains[i] - mean))


def draw(runs: dict[str, list[Span]]) -> str:
    """Return the picture as SVG text."""
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "spmoe", "font.family": "sans-serif", "font.size": 10})
    first = typical_steps(runs)
    figure = Figure(figsize=(8.6, 3.5), facecolor=PAPER)
    axes = figure.subplots(len(TITLES), 1, sharex=True)
    longest = 0.0
    for axis, (policy, title) in zip(axes, TITLES.items(), strict=True):
        bounds = step_bounds(runs[policy])[first : first + STEPS]
        start, end = bounds[0][0], bounds[-1][1]
        longest = max(longest, end - start)
        for kind, (colour, _) in COLOURS.items():
            lane = 0 if kind in ("copy", "prefetch") else 1
            bars = [
                (max(span.start, start) - start, min(span.end, end) - max(span.start, start))
                for span in runs[policy]
                if span.kind == kind and span.end > start and span.start < end
            ]
            axis.broken_barh(bars, (lane + 0.1, 0.8), facecolors=colour, linewidth=0)
        for _, edge in bounds:
            axis.axvline(edge - start, color=INK, linewidth=0.8, linestyle=":")
        axis.set_title(f"{title}: {STEPS} steps in {end - start:.1f} ms", loc="left", color=INK, fontsize=11)
        axis.set_yticks([1.5, 0.5], ["GPU", "link"], color=INK)
        axis.set_ylim(0, 2)
        axis.set_facecolor(PAPER)
        axis.tick_params(colors=INK, length=0)
        for side in axis.spines.values():
            side.set_visible(False)
    axes[-1].set_xlim(0, longest * 1.005)
    axes[-1].set_xlabel("milliseconds", color=INK)
    handles = [Patch(color=colour, label=label) for colour, label in COLOURS.values()]
    figure.legend(
        handles=handles,
        loc="lower center",
        ncols=5,
        frameon=False,
        labelcolor=INK,
        fontsize=8.5,
        handlelength=1.2,
        columnspacing=1.4,
    )
    figure.subplots_adjust(left=0.07, right=0.985, top=0.92, bottom=0.22, hspace=0.45)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "picture.svg")
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        return follow_colour_scheme(path.read_text())


def follow_colour_scheme(svg: str) -> str:
    """Replace the ink and paper colours by variables that the reader's light or dark mode sets."""
    svg = re.sub(r"<!DOCTYPE.*?>", "", svg, flags=re.DOTALL)
    svg = svg.replace(INK, "var(--ink)").replace(PAPER, "var(--paper)")
    opening = re.search(r"<svg[^>]*>\n?", svg)
    assert opening is not None, "matplotlib wrote no <svg> element"
    return svg[: opening.end()] + STYLE + svg[opening.end() :]


def main() -> None:
    """Write the picture."""
    with tempfile.TemporaryDirectory() as folder:
        runs = replayed_spans(Path(folder))
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.write_text(draw(runs))
    print(f"{OUTPUT.relative_to(ROOT)}: {OUTPUT.stat().st_size / 1e3:.0f} KB")


if __name__ == "__main__":
    main()
