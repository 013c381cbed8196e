"""`spmoe profile`: measure the parts of a step on this machine, and check how well they predict whole steps."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spmoe.cli.interrupts import import_engine
from spmoe.cli.listed import parse_list, parse_whole
from spmoe.cli.options import Json, ctrl_c_stops, load, require_writable, stderr, takes_shared_options_except
from spmoe.cli.output import is_quiet
from spmoe.config import Cutoff, CutoffMode, EngineConfig, Size
from spmoe.errors import UsageError
from spmoe.files import write_text

if TYPE_CHECKING:
    from rich.table import Table

    from spmoe.bench.charts import LineChart
    from spmoe.bench.profile import EngineProfile
    from spmoe.bench.profile_runs import Check, Workload
    from spmoe.engine.llm import LLM

_MIN_BUILT_K = 8  # K that the engine is built for at least: CUDA graphs then exist for every number of rows timed


@takes_shared_options_except("prefetch", "generation_config")  # every policy of the model is measured
def profile(
    engine: dict[str, Any],
    num_speculative_tokens: Annotated[
        str,
        typer.Option("--num-speculative-tokens", "-k", help="Draft tokens per step. --check takes several: 1,2,4."),
    ] = "4",
    expert_memory: Annotated[
        str, typer.Option(help="Memory for experts: a size or a share. --check takes several: 25%,50%.")
    ] = "25%",
    cutoff: Annotated[
        str | None, typer.Option(help="Cutoffs that --check runs: 0,4,8,16 or every. Default: five of them.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="CUDA: widen the pair to the sizes of this architecture, such as mixtral-8x7b.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Run short generations and compare their steps with predictions.")
    ] = False,
    stored: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Use this profile instead of measuring one.")
    ] = None,
    max_prompts: Annotated[int, typer.Option(min=1, help="Number of prompts to generate from.")] = 2,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens per generation.")] = 48,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each prompt with --check.")] = 2,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the profile to this JSON file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw times, and with --check cutoffs, into this SVG file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure draft passes, verification, expert loads, and the needs of generations under each prefetch policy.

    With --check, predict the time of a step for each K, cutoff and budget, run it, and print the error.
    """
    if plot is not None and plot.suffix.lower() != ".svg":
        raise UsageError(f"--plot writes SVG, not {plot.suffix or 'a file without a suffix'}; use {plot.stem}.svg")
    memories = parse_list("--expert-memory", expert_memory, Size.parse)
    lengths = parse_list("--num-speculative-tokens", num_speculative_tokens, parse_whole)
    depths = _parse_depths(cutoff)
    if stored is not None and output is not None:
        raise UsageError("--from measures no profile, so there is none to write; leave out --from or --output")
    if not check and (len(memories) > 1 or len(lengths) > 1 or cutoff is not None):
        raise UsageError("several values and --cutoff are for the check of predictions; add --check")
    require_writable(output, plot)
    engine = {**engine, "shape": shape, "prefetch": "on-demand"}
    EngineConfig.make(**{**engine, "model": engine["model"] or "", "num_speculative_tokens": max(lengths)})

    from spmoe.bench.profile import Predictor, read_engine_profile

    if plot is not None:
        from spmoe.bench.charts import require_report_extra, svg_document

        require_report_extra()
    found = read_engine_profile(stored) if stored is not None else None
    checked: Check | None = None
    if found is None or check:
        import_engine()
        from spmoe.bench import profile_runs

        checked = profile_runs.Check([], []) if check else None
        for memory in memories:
            with _load(engine, memory, lengths) as llm:
                has_draft, workload = llm.engine.parts.drafter.proposes, _workload(llm, max_prompts, output_len)
                if found is None:
                    found = profile_runs.measure_profile(llm, lengths[0] if has_draft else 0, workload)
                    if output is not None:
                        found.save(output)  # before the check, which may take long
                if checked is not None:
                    profile_runs.require_same_subject(found, llm.engine)
                    swept = _default_depths(len(llm.engine.spec.experts)) if depths == [] else depths
                    part = profile_runs.check_engine(
                        llm, Predictor(found), memory, lengths if has_draft else [0], swept, repeat, workload
                    )
                    checked.steps.extend(part.steps)
                    checked.sweeps.extend(part.sweeps)
    assert found is not None
    if plot is not None:
        write_text(plot, svg_document(list(_charts(found, checked))))
    if as_json:
        print(json.dumps({**found.to_dict(), **({"check": checked.to_dict()} if checked is not None else {})}))
    else:
        _show(found, checked)


def _load(engine: dict[str, Any], memory: Size, lengths: list[int]) -> Any:
    from spmoe.engine.llm import with_default_pair

    drafts = EngineConfig.make(**with_default_pair(engine)).draft is not None and max(lengths) > 0
    k = max(_MIN_BUILT_K, *lengths) if drafts else 0
    return load({**engine, "expert_memory": memory, "num_speculative_tokens": k})


def _workload(llm: LLM, max_prompts: int, output_len: int) -> Workload:
    from spmoe.bench.profile_runs import Workload, make_prompts
    from spmoe.observe.progress import progress_bar

    return Workload(
        make_prompts(llm.engine, max_prompts),
        output_len,
        ctrl_c_stops,
        lambda message: stderr().print(message, soft_wrap=True),
        partial(progress_bar, enabled=not is_quiet()),
    )


def _parse_depths(text: str | None) -> list[int] | None:
    """Return the cutoffs to run; None: every one; empty: the option was not given."""
    if text is None:
        return []
    if text.strip().lower() == "every":
        return None
    found = parse_list("--cutoff", text, Cutoff.parse)
    if any(one.mode is not CutoffMode.FIXED for one in found):
        raise UsageError(
            f"--cutoff takes numbers of layers or 'every' here, not {text!r}; --check runs auto and just-in-time anyway"
        )
    return [one.layers for one in found]


def _default_depths(layers: int) -> list[int]:
    """Return 0, a quarter, half, three quarters and all of the layers."""
    return sorted({round(layers * quarter / 4) for quarter in range(5)})


# ---- charts and tables


def _charts(profile: EngineProfile, check: Check | None) -> Iterator[LineChart]:
    from spmoe.bench.charts import Line, LineChart

    def line(name: str, seconds: Mapping[int, float], colour: int, dashed_at: int | None = None) -> Line:
        points = tuple((float(x), 1e3 * y) for x, y in sorted(seconds.items()))
        return Line(name, points, colour, () if dashed_at is None else (float(dashed_at),))

    yield LineChart("Verification", "rows", "ms", (line("verify", profile.verify_seconds, 0),), 0.0)
    if profile.load_seconds:
        loads = line("load", profile.load_seconds, 0)
        yield LineChart("Loads of one layer", "experts demanded together", "ms", (loads,), 0.0)
    for sweep in check.sweeps if check is not None else ():
        lines = (
            line("measured; dashed: auto", sweep.measured, 0, sweep.auto),
            line("predicted; dashed: just-in-time", sweep.predicted, 1, sweep.just_in_time),
        )
        title = f"Step by cutoff, {sweep.expert_memory}, K={sweep.draft_tokens}"
        yield LineChart(title, "layers prefetched for", "ms per step", lines)


_ERRORS = {
    "step": "Steps predicted from the profile",
    "from_run": "Steps predicted from the run's own compute and missing experts",
    "ratio": "Ratio to the on-demand step",
}


def _show(profile: EngineProfile, check: Check | None) -> None:
    from spmoe.cli.output import Console

    console = Console(highlight=False, markup=False, emoji=False)
    tables = (*_profile_tables(profile), *(_check_tables(check) if check is not None else ()))
    for number, table in enumerate(tables):
        if number:
            console.print()
        console.print(table.title or "", soft_wrap=True)
        table.title = None
        console.print(table)
    if check is not None:
        console.print()
        for name, title in _ERRORS.items():
            errors = check.errors[name]
            console.print(
                f"{title}: mean error {100 * errors.mean:.1f} %, worst {100 * errors.worst:.1f} %", soft_wrap=True
            )


def _profile_tables(profile: EngineProfile) -> Iterator[Table]:
    subject, drafted = profile.subject, profile.draft_pass_seconds
    passes = [
        ["verify", rows, _ms(seconds), _ms(seconds / subject.layers)]
        for rows, seconds in profile.verify_seconds.items()
    ]
    if drafted is not None:
        passes.insert(0, ["draft", 1, _ms(drafted), _ms(drafted / max(1, subject.draft_layers))])
    yield _table(
        f"Passes without stalls; experts take {100 * profile.expert_share:.0f} % of a verified layer",
        ("pass", "rows", "ms", "ms per layer"),
        passes,
    )
    if profile.load_seconds:
        link = f", emulated link of {subject.emulated_link_gbps:g} GB/s" if subject.emulated_link_gbps else ""
        yield _table(
            f"Loads of experts that one layer demands together{link}",
            ("experts", "ms", "ms per expert", "GB/s"),
            (
                [
                    count,
                    _ms(seconds),
                    _ms(seconds / count),
                    f"{count * subject.expert_bytes / seconds / 1e9:.3g}" if seconds else "-",
                ]
                for count, seconds in profile.load_seconds.items()
            ),
        )
    yield _table(
        f"Generations, {subject.slots} slots, K={profile.policies[0].draft_tokens}, cutoff all; ms per step, "
        "experts per layer",
        ("policy", "step", "draft", "verify", "stall", "needed", "missing", "recall", "precision"),
        (
            [
                one.policy,
                _ms(one.step_seconds),
                _ms(one.draft_seconds),
                _ms(one.verify_seconds),
                _ms(one.stall_seconds),
                f"{one.needed:.2f}",
                f"{one.missing:.2f}",
                _shares(one.draft_recall, one.verify_recall),
                _shares(one.draft_precision, one.verify_precision),
            ]
            for one in profile.policies
        ),
    )


def _check_tables(check: Check) -> Iterator[Table]:
    yield _table(
        "Check, ms per step: measured, predicted from the profile, predicted from the run's own parts",
        ("memory", "K", "policy", "cutoff", "measured", "predicted", "error", "from run", "error"),
        (
            [
                one.expert_memory,
                one.draft_tokens,
                one.policy,
                "-" if one.cutoff is None else one.cutoff,
                _ms(one.measured),
                _ms(one.predicted),
                _percent(one.error),
                _ms(one.predicted_from_run),
                _percent(one.error_from_run),
            ]
            for one in check.steps
        ),
    )
    if check.sweeps:
        yield _table(
            "Cutoffs, in layers, and how much slower the chosen ones are than the best one",
            ("memory", "K", "best", "auto", "slower", "just-in-time", "slower"),
            (
                [
                    one.expert_memory,
                    one.draft_tokens,
                    one.best,
                    one.auto,
                    _percent(one.slowdown(one.auto)),
                    one.just_in_time,
                    _percent(one.slowdown(one.just_in_time)),
                ]
                for one in check.sweeps
            ),
        )


def _table(title: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    from rich.table import Table

    table = Table(title=title, box=None, pad_edge=False, collapse_padding=True)
    for head in heads:
        is_text = head in ("pass", "policy", "memory")
        table.add_column(head, justify="left" if is_text else "right", no_wrap=is_text)
    for row in rows:
        table.add_row(*map(str, row))
    return table


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:.0f}"


def _percent(share: float) -> str:
    return f"{100 * share:+.1f}%"


def _shares(draft: float, verify: float) -> str:
    """Format the shares of both stages as draft+verify; a stage that predicts nothing is left out."""
    return "+".join(f"{100 * one:.0f}" for one in (draft, verify) if one) + "%" if draft or verify else "-"
