"""`spmoe families`: which MoE architectures work with the installed transformers, shown by running each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from spmoe.cli.options import Json, require_writable, stderr
from spmoe.errors import UsageError
from spmoe.files import write_text

if TYPE_CHECKING:
    from spmoe.bench.families import VerifyResult


def families(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Model types, such as mixtral; default: all.")
    ] = None,
    as_json: Json = False,
    markdown: Annotated[Path | None, typer.Option(help="Write the table as Markdown to this file.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Families run at a time, each in a process.")] = 2,
    device: Annotated[str, typer.Option(help="Where they run: cpu or cuda.")] = "cpu",
) -> None:
    """Build a tiny random model of every MoE family that transformers knows, and check that it runs exactly.

    Takes a minute or two. Fails only where a family that was asked for by name does.
    """
    from spmoe.backends.devices import choose_device, device_facts
    from spmoe.bench import families as proof
    from spmoe.bench import families_page as page
    from spmoe.models.families import families as known
    from spmoe.models.families import transformers_version as version

    if device not in ("cpu", "cuda"):
        raise UsageError(f"--device must be cpu or cuda, not {device!r}")
    require_writable(markdown)
    name = device_facts(choose_device(device)).name
    there = known()
    if unknown := [name for name in names or () if name not in there]:
        raise UsageError(f"transformers {version} has no MoE family {unknown[0]}; it has {', '.join(there)}")
    chosen, checks = list(dict.fromkeys(names or there)), page.checks_on(device)
    told: list[VerifyResult] = []
    stderr().print(f"{len(chosen)} families of transformers {version} on {name}", soft_wrap=True)

    def tell(result: VerifyResult, seconds: float) -> None:
        told.append(result)
        said = "ok" if result.holds else "no"
        stderr().print(f"[{len(told)}/{len(chosen)}] {result.family}: {said} ({seconds:.1f} s)", soft_wrap=True)
        for line in _reasons([result], checks):
            stderr().print(f"  {line}", soft_wrap=True, markup=False)
        if markdown is not None:  # what is known is kept, however this ends
            write_text(markdown, page.markdown(sorted(told, key=lambda one: one.family), version, device))

    verdicts = proof.prove_all(chosen, workers, tell, device)
    if markdown is not None:
        write_text(markdown, page.markdown(verdicts, version, device))
    if as_json:
        print(json.dumps({"transformers": version, "device": name, "families": [v.to_dict() for v in verdicts]}))
    else:
        console = Console(highlight=False, markup=False, emoji=False)
        console.print(_table(verdicts, checks))
        for line in _reasons(verdicts, checks):
            console.print(line, soft_wrap=True)
    if names and not all(result.holds for result in verdicts):
        raise typer.Exit(1)


def _table(verdicts: list[VerifyResult], checks: tuple[str, ...]) -> Table:
    from spmoe.bench.families_page import short

    table = Table(box=None, pad_edge=False)
    for heading in ("family", *checks):
        table.add_column(heading, no_wrap=True)
    for result in verdicts:
        answers = result.to_dict()
        table.add_row(result.family, *(short(answers[check]) for check in checks))
    counts = [sum(result.to_dict()[check] == "ok" for result in verdicts) for check in checks]
    table.add_row("", *(f"{count} of {len(verdicts)}" for count in counts))
    return table


def _reasons(verdicts: list[VerifyResult], checks: tuple[str, ...]) -> list[str]:
    answers = [(v.family, check, v.to_dict()[check]) for v in verdicts for check in checks]
    return [f"{family}, {check}: {answer}" for family, check, answer in answers if answer != "ok"]
