"""Sections of a report that need runs made for them, and the one that says where and how all was measured."""

from __future__ import annotations

from html import escape

from spmoe.bench import page
from spmoe.bench.comparison import Comparison, Place, milliseconds, tokens_per_step, tpot
from spmoe.bench.labels import Row, model_name
from spmoe.bench.plot import Bar, Line, bar_chart, line_chart
from spmoe.bench.profile import PROFILED_POLICIES, EngineProfile, Predictor
from spmoe.bench.settings import ABLATIONS, ALL_ON, switched_off
from spmoe.config import format_bytes
from spmoe.errors import UsageError


def acceptance_section(found: Comparison) -> str:
    """How far drafts are kept."""
    lines: dict[str, Line] = {}
    rows = []
    for case, row in found.main_rows():
        if not (shares := row["acceptance_by_position"]):
            continue
        name = ", ".join([*([case] if case else []), f"K={row['num_speculative_tokens']}"])
        if name in lines:
            continue  # drafts do not depend on the policy
        points = tuple((place + 1.0, 100 * share) for place, share in enumerate(shares))
        lines[name] = Line(name, points, len(lines))
        rows.append([name, *(f"{100 * share:.1f} %" for share in shares)])
    if not lines:
        return page.missing("Nothing was drafted.", "spmoe bench -k 4 --json results.jsonl")
    most = max(len(row) for row in rows) - 1
    data = page.table(["", *map(str, range(1, most + 1))], ([*row, *[""] * (most + 1 - len(row))] for row in rows))
    chart = line_chart("Accepted draft tokens", "position in the draft", "% kept", list(lines.values()), 0.0, 100.0)
    return page.figure(
        chart, "Share of drafts that were kept up to and with this position.",
        page.legend([(line.name, line.colour) for line in lines.values()]) if len(lines) > 1 else "", data,
    )  # fmt: skip


def require_profile_of(found: Comparison, profile: EngineProfile) -> None:
    """Refuse a profile that there is nothing to draw beside, or that is of none of what was swept."""
    machines = [_machine_of(found, place) for place in found.sweeps]
    if not machines:
        raise UsageError(
            "no cutoffs were swept in these results, so that there is nothing to draw a profile's predictions beside; "
            "leave out --profile, or sweep some with `spmoe bench --scenario scenarios/ushape.toml`"
        )
    others = [other for machine in machines if (other := _other_than(profile, machine)) is not None]
    if len(others) == len(machines):
        own, theirs = others[0]
        raise UsageError(
            f"the profile is of {own}, and these results are of {theirs}; make one with `spmoe profile -o FILE` and "
            "the options that they were measured with, or leave out --profile"
        )


def _machine_of(found: Comparison, place: Place) -> Row:
    return found.groups[found.cases.index(place.case)].machine


def _other_than(profile: EngineProfile, machine: Row) -> tuple[str, str] | None:
    """What the profile is of, and what the results are of, in words; None where both are of the same."""
    ours, theirs = str(profile.machine.get("device")), str(machine["device"])
    if ours != theirs:
        return f"the device {ours}", f"the device {theirs}"
    alike = {name: machine[name] for name in ("shape", "dtype", "layers", "top_k", "expert_bytes")}
    return profile.subject.difference({**alike, "emulated_link_gbps": machine["link_gbps"]})


def cutoff_section(found: Comparison, profile: EngineProfile | None = None) -> str:
    """Time over depth, for every place that was swept; with what a profile of the same pair predicts."""
    if not found.sweeps:
        return page.missing(
            "No cutoffs were swept in these runs.", "spmoe bench --scenario scenarios/ushape.toml --json results.jsonl"
        )
    parts = [
        page.paragraph(
            "How many layers, from the first, the draft stage may prefetch for. The dashed line is what the latency "
            "model chose by itself."
        )
    ]
    for place, by_depth in found.sweeps.items():
        own = found.chosen.get(place, {})
        automatic = own.get("auto")
        depths = sorted(by_depth)
        line = Line(
            "measured", tuple((depth, 1e3 * tpot(by_depth[depth])) for depth in depths), 0,
            (automatic["cutoff_layers"],) if automatic is not None else (),
        )  # fmt: skip
        best = min(depths, key=lambda depth: tpot(by_depth[depth]))
        caption = f"{place}. Least: {milliseconds(tpot(by_depth[best]))} at {best} layers."
        if automatic is not None:
            caption += f" Chosen: {automatic['cutoff_layers']} layers, {milliseconds(tpot(automatic))}."
        rows = [[f"{depth} layers", *_times(by_depth[depth])] for depth in depths]
        rows += [[f"{word} ({row['cutoff_layers']} layers)", *_times(row)] for word, row in own.items()]
        title = f"Time per output token over the cutoff, {place}"
        lines = [line]
        if profile is not None:
            if (other := _other_than(profile, _machine_of(found, place))) is not None:
                caption += f" Not predicted: the profile is of {other[0]}."
            else:
                lines += _predicted(profile, by_depth)
        legend = page.legend([("measured", 0), ("predicted from the profile", 1)]) if len(lines) > 1 else ""
        chart = line_chart(title, "layers prefetched for", "ms per token", lines)
        parts.append(page.figure(chart, caption, legend, page.table(["", "10 %", "median", "90 %"], rows)))
    return "".join(parts)


def _predicted(profile: EngineProfile, by_depth: dict[int, Row]) -> list[Line]:
    """What the latency model makes of a profile at every depth, for the policies that it knows."""
    row = by_depth[min(by_depth)]
    if row["prefetch"] not in PROFILED_POLICIES or row["num_speculative_tokens"] == "auto":
        return []
    predictor, k = Predictor(profile), row["num_speculative_tokens"]
    points = []
    for depth in range(row["layers"] + 1):
        step = predictor.step(row["prefetch"], k, depth, row["slots"])
        points.append((float(depth), 1e3 * step.seconds / tokens_per_step(row)))
    return [Line("predicted", tuple(points), 1)]


def _times(row: Row) -> list[str]:
    return [milliseconds(row["tpot_seconds"][key]) for key in ("p10", "median", "p90")]


def ablation_section(found: Comparison) -> str:
    """What is lost where one part is switched off."""
    places = _ablated(found)
    if not places:
        return page.missing(
            "Nothing was switched off in these runs.",
            "spmoe bench --scenario scenarios/ablation.toml --json results.jsonl",
        )
    parts = [
        page.paragraph(
            "The same system with one part switched off. No asynchrony: every prefetch is waited for when the draft is "
            "over; no batching: one copy per submission; no cutoff: all layers are prefetched for."
        )
    ]
    for place, rows in places.items():
        whole = tpot(rows[ALL_ON])
        bars, data = [], []
        for name in (one for one in ABLATIONS if one in rows):
            row = rows[name]
            more = "" if name == ALL_ON else f" ({100 * (tpot(row) / whole - 1):+.1f} %)"
            spread = (row["tpot_seconds"]["p10"], row["tpot_seconds"]["p90"])
            bars.append(
                Bar(name, ((tpot(row), 0 if name == ALL_ON else 6),), milliseconds(tpot(row)) + more, spread, whole)
            )
            data.append([name, *_times(row), f"{tpot(row) / whole:.3f}x"])
        numbers = page.table(["", "10 %", "median", "90 %", "of all on"], data)
        parts.append(page.figure(bar_chart(f"Ablation, {place}", bars), place, data=numbers))
    return "".join(parts)


def _ablated(found: Comparison) -> dict[str, dict[str, Row]]:
    """By the name of what has everything on: rows of the same with one part switched off, by that part."""
    places: dict[str, dict[str, Row]] = {}
    for case, group in zip(found.cases, found.groups, strict=True):
        for whole in (row for row in group.rows if row["ablation"] == ALL_ON):
            wanted = {name: switched_off(whole, name) for name in ABLATIONS}
            rows = {name: row for name, one in wanted.items() for row in group.rows if one.items() <= row.items()}
            if len(rows) > 1:
                name = ", ".join([*([case] if case else []), found.label(whole), whole["expert_memory"]])
                places[name] = rows
    return places


def machine_section(found: Comparison) -> str:
    """Where, on what, with what, and the commands."""
    rows: dict[str, list[str]] = {}
    for group in found.groups:
        for name, value in _facts(group.machine).items():
            rows.setdefault(name, []).append(value)
    names = [case or "measured" for case in found.cases]
    alike = [name for name, values in rows.items() if len(set(values)) == 1]
    parts = [page.facts(["", ""], ([name, rows[name][0]] for name in alike))]
    if differing := [name for name in rows if name not in alike]:
        parts.append(page.facts(["", *names], ([name, *rows[name]] for name in differing)))
    commands = dict.fromkeys(
        str(group.machine.get("command")) for group in found.groups if group.machine.get("command")
    )
    if commands:
        parts.append("<h3>Commands</h3><pre><code>" + escape("\n".join(commands)) + "</code></pre>")
    texts = {
        str(m["scenario"]): str(m["scenario_text"]) for m in (g.machine for g in found.groups) if m.get("scenario_text")
    }
    parts += [
        f"<details><summary>Scenario: {escape(name)}</summary><pre><code>{escape(text)}</code></pre></details>"
        for name, text in texts.items()
    ]
    return "".join(parts)


def _facts(machine: Row) -> dict[str, str]:
    link = f"{machine['link_bytes_per_second'] / 1e9:.3g} GB/s ({machine['link_source']})"
    memory = machine["device_memory_bytes"]
    versions = f"spmoe {machine['spmoe']}, torch {machine['torch']}, transformers {machine['transformers']}"
    return {
        "device": str(machine["device"]) + (f", {format_bytes(memory)}" if memory else ""),
        "driver": str(machine["driver"] or "-"),
        "processor": str(machine["processor"]),
        "system": str(machine["platform"]),
        "versions": f"{versions}, Python {machine['python']}",
        "commit": str(machine["commit"] or "-"),
        "model": model_name(machine),
        "experts": f"{machine['experts']} in {machine['layers']} layers, top {machine['top_k']}, "
        f"{format_bytes(machine['expert_bytes'])} each, {machine['dtype']}",
        "link, at best": link,
        "memory, at best": f"{machine['memory_bytes_per_second'] / 1e9:.3g} GB/s",
        "reading one row's weights once": milliseconds(machine["active_read_seconds"]),
        "reading the draft once": milliseconds(machine["draft_read_seconds"]),
        "prompts": f"{machine['prompts']} ({machine.get('prompt_set')}, {machine.get('prompt_form')}), each "
        f"{machine['repeat']} times after {machine['warmup']} to warm up, {machine['output_len']} tokens",
    }
