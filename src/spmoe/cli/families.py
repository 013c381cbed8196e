"""`spmoe families`: check which MoE architectures of the installed transformers work, by running each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from spmoe.cli.interrupts import import_engine
from spmoe.cli.options import Json, require_writable, stderr
from spmoe.cli.output import Console
from spmoe.errors import UsageError, suggestion
from spmoe.files import write_text

if TYPE_CHECKING:
    from spmoe.bench.families import Result


def families(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Model types, such as mixtral. Default: all.")
    ] = None,
    as_json: Json = False,
    markdown: Annotated[Path | None, typer.Option(help="Write the table as Markdown to this file.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Families to run at a time, one process each.")] = 2,
    device: Annotated[str, typer.Option(help="Device to run on: cpu or cuda.")] = "cpu",
    formats: Annotated[
        bool, typer.Option("--formats", help="Check quantized checkpoints in every format instead; takes longer.")
    ] = False,
) -> None:
    """Build a tiny random model of every MoE family that transformers knows, and check that it runs exactly.

    Takes a minute or two; with --formats, about ten times as long. The exit code is 1 only if a family named on the
    command line fails.
    """
    import_engine()
    from spmoe.backends.devices import choose_device, device_facts
    from spmoe.bench.families import check_families, checks_on, failures, formats_page, markdown_page
    from spmoe.models.families import families as known_families
    from spmoe.models.families import transformers_version as version

    if device not in ("cpu", "cuda"):
        raise UsageError(f"--device must be cpu or cuda, not {device!r}")
    require_writable(markdown)
    device_name = device_facts(choose_device(device)).name
    known = known_families()
    if unknown := [name for name in names or () if name not in known]:
        hint = suggestion(unknown[0], list(known)) or f"; it has {', '.join(known)}"
        raise UsageError(f"transformers {version} has no MoE family {unknown[0]}{hint}")
    selected, checks = list(dict.fromkeys(names or known)), checks_on(device, formats)
    page: Any = formats_page if formats else markdown_page
    done: list[Result] = []
    what = f" in {len(checks)} quantized formats" if formats else ""
    stderr().print(
        f"{len(selected)} famil{'y' if len(selected) == 1 else 'ies'} of transformers {version}{what} on {device_name}",
        soft_wrap=True,
    )

    def on_done(result: Result, seconds: float) -> None:
        done.append(result)
        answer = "ok" if result.exact else "no"
        stderr().print(f"[{len(done)}/{len(selected)}] {result.family}: {answer} ({seconds:.1f} s)", soft_wrap=True)
        for line in failures([result], checks):
            stderr().print(f"  {line}", soft_wrap=True, markup=False)
        if markdown is not None:  # an interrupted run keeps its results
            write_text(markdown, page(sorted(done, key=lambda one: one.family), version, device))

    results = check_families(selected, workers, on_done, device, formats)
    if markdown is not None:
        write_text(markdown, page(results, version, device))
    if as_json:
        rows = [result.to_dict() for result in results]
        print(json.dumps({"transformers": version, "device": device_name, "families": rows}))
    else:
        console = Console(highlight=False, markup=False, emoji=False)
        console.print(_table(results, checks))
        for line in failures(results, checks):
            console.print(line, soft_wrap=True)
    if names and not all(result.exact for result in results):
        raise typer.Exit(1)


def _table(results: list[Result], checks: tuple[str, ...]) -> Table:
    from spmoe.bench.families import OK, answers, short

    table = Table(box=None, pad_edge=False)
    for heading in ("family", *checks):
        table.add_column(heading, no_wrap=True)
    rows = [answers(result, checks) for result in results]
    for result, row in zip(results, rows, strict=True):
        table.add_row(result.family, *(short(answer) for answer in row))
    counts = [sum(answer == OK for answer in column) for column in zip(*rows, strict=True)]
    table.add_row("", *(f"{count} of {len(results)}" for count in counts))
    return table
