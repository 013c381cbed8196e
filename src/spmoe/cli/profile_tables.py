"""A profile, and how well it predicts, as tables and as plots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from spmoe.bench.plot import Chart, Line, standalone
from spmoe.bench.profile import EngineProfile
from spmoe.bench.profile_check import Check, Sweep
from spmoe.config import format_bytes


def show(profile: EngineProfile, check: Check | None) -> None:
    """Print everything."""
    console = Console(highlight=False, markup=False, emoji=False)
    for table in (*_profile_tables(profile), *(_check_tables(check) if check is not None else ())):
        console.print(table.title or "", soft_wrap=True)
        table.title = None
        console.print(table)
        console.print()
    if check is not None:
        for name, words in _ERRORS.items():
            one = check.errors[name]
            off = f"{100 * one.mean:.1f} % off on average, {100 * one.worst:.1f} % at worst"
            console.print(f"{words}: {off}", soft_wrap=True)


_ERRORS = {
    "step": "steps as predicted",
    "given_parts": "from the compute and the loads that there were",
    "ratio": "against on-demand steps run beside them",
}


def _profile_tables(profile: EngineProfile) -> Iterable[Table]:
    subject = profile.subject
    if profile.draft:
        yield _table(
            f"draft pass, {subject.draft_layers} layers",
            ("rows", "ms at best", "ms", "ms per layer"),
            ([one.rows, _ms(one.best), _ms(one.median), _ms(one.per_layer)] for one in profile.draft),
        )
    yield _table(
        f"verification, {subject.layers} layers, without waiting; {100 * profile.expert_share:.0f} % is experts",
        ("rows", "ms at best", "ms", "ms per layer"),
        ([one.rows, _ms(one.best), _ms(one.median), _ms(one.per_layer)] for one in profile.verify),
    )
    link = f", emulated link of {subject.emulated_link_gbps:g} GB/s" if subject.emulated_link_gbps else ""
    yield _table(
        f"one copy after the other{link}",
        ("experts", "size", "ms at best", "ms", "GB/s"),
        (
            [f"{c.experts:g}", format_bytes(c.bytes), _ms(c.best), _ms(c.median), f"{c.bytes_per_second / 1e9:.3g}"]
            for c in profile.copies
        ),
    )
    if profile.loads:
        yield _table(
            "loads of a layer's experts, asked for at once",
            ("experts", "ms at best", "ms", "ms per expert", "GB/s"),
            (
                [
                    f"{c.experts:g}",
                    _ms(c.best),
                    _ms(c.median),
                    _ms(c.median / c.experts),
                    f"{c.bytes_per_second / 1e9:.3g}",
                ]
                for c in profile.loads
            ),
        )
    if (both := profile.contention) is not None:
        yield _table(
            "at once",
            ("", "ms alone", "ms together", "times"),
            [
                [
                    "a pass of one row",
                    _ms(both.pass_alone),
                    _ms(both.pass_while_copying),
                    f"{both.compute_slowdown:.2f}",
                ],
                ["an expert's load", _ms(both.load_alone), _ms(both.load_while_computing), f"{both.link_slowdown:.2f}"],
            ],
        )
    plan = profile.memory
    yield _table(
        "memory",
        ("", "bytes"),
        [
            ["weights of target and draft", format_bytes(plan.resident)],
            [f"{plan.slots} expert slots", format_bytes(plan.slots * plan.slot_bytes)],
            [f"attention states of {plan.context} tokens", format_bytes(plan.kv)],
            ["workspace", format_bytes(plan.workspace)],
            *([["limit", format_bytes(plan.limit)]] if plan.limit is not None else []),
        ],
    )
    yield _table(
        f"generations, {profile.subject.slots} slots, every layer prefetched for; ms per step, experts per layer",
        ("policy", "K", "step", "draft", "verify", "stall", "loads", "need", "miss", "recall", "right"),
        (
            [
                one.policy, one.draft_tokens, _ms(one.step_seconds), _ms(one.draft_seconds), _ms(one.compute_seconds),
                _ms(one.stall_seconds), f"{one.loads:.1f}", f"{one.needed:.2f}", f"{one.missing:.2f}",
                _shares(one.draft_recall, one.own_recall), _shares(one.draft_precision, one.own_precision),
            ]
            for one in profile.behaviours
        ),
    )  # fmt: skip


def _check_tables(check: Check) -> Iterable[Table]:
    yield _table(
        "ms per step, measured, by the model, and by the model knowing the run's own parts; missing experts per layer",
        ("memory", "K", "policy", "cutoff", "ms", "model", "error", "known", "error", "miss", "model"),
        (
            [
                row.memory, row.case.draft_tokens, row.case.policy, "-" if row.case.cutoff is None else row.case.cutoff,
                _ms(row.measured), _ms(row.predicted), _percent(row.error), _ms(row.given_parts),
                _percent(row.error_given_parts), f"{row.missing:.2f}", f"{row.predicted_missing:.2f}",
            ]
            for row in check.rows
        ),
    )  # fmt: skip
    if check.sweeps:
        yield _table(
            "over the cutoff: layers, and how much slower than the best of those run",
            ("memory", "K", "best", "auto", "slower", "just-in-time", "slower"),
            (
                [
                    one.memory, one.draft_tokens, one.best, one.analytic, _percent(one.slower(one.analytic)),
                    one.just_in_time, _percent(one.slower(one.just_in_time)),
                ]
                for one in check.sweeps
            ),
        )  # fmt: skip


def plots(profile: EngineProfile, check: Check | None) -> str:
    """One SVG document."""
    passes = [Line("verify", tuple((one.rows, 1e3 * one.median) for one in profile.verify), 0)]
    if profile.draft:
        passes.append(Line("draft", tuple((one.rows, 1e3 * one.median) for one in profile.draft), 1))
    copies = [Line("copies alone", tuple((one.experts, 1e3 * one.median) for one in profile.copies), 0)]
    if profile.loads:
        copies.append(Line("through the engine", tuple((one.experts, 1e3 * one.median) for one in profile.loads), 1))
    return standalone(
        [
            Chart("Passes over rows", "rows", "ms", tuple(passes), 0.0),
            Chart("Copies over size", "experts", "ms", tuple(copies), 0.0),
            *(_sweep_chart(one) for one in (check.sweeps if check is not None else ())),
        ]
    )


def _sweep_chart(sweep: Sweep) -> Chart:
    measured, predicted = (
        tuple((depth, 1e3 * seconds) for depth, seconds in sorted(by_depth.items()))
        for by_depth in (sweep.measured, sweep.predicted)
    )
    lines = (
        Line("measured; dashed: auto", measured, 0, (sweep.analytic,)),
        Line("predicted; dashed: just-in-time", predicted, 1, (sweep.just_in_time,)),
    )
    title = f"Step over the cutoff, {sweep.memory}, K={sweep.draft_tokens}"
    return Chart(title, "layers prefetched for", "ms per step", lines)


def _table(title: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    table = Table(title=title, box=None, pad_edge=False, collapse_padding=True)
    for number, head in enumerate(heads):
        words = head in ("policy", "memory") or (not number and head not in ("rows", "experts"))
        table.add_column(head, justify="left" if words else "right", no_wrap=words)
    for row in rows:
        table.add_row(*map(str, row))
    return table


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"


def _percent(share: float) -> str:
    return f"{100 * share:+.1f}%"


def _shares(first: float, second: float) -> str:
    return "+".join(f"{100 * one:.0f}" for one in (first, second) if one) + "%" if first or second else "-"
