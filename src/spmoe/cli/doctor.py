"""`spmoe doctor`: check this machine, with a verdict and advice for each fact."""

from __future__ import annotations

import json
import sys
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from spmoe import __version__
from spmoe.cli.options import Json, stderr
from spmoe.cli.output import Console
from spmoe.errors import printable

if TYPE_CHECKING:
    from spmoe.bench.doctor import Finding

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}
_INDENT = 27  # columns before the text of a finding


def doctor(
    quick: Annotated[bool, typer.Option("--quick", help="Measure, pin and compile nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Check GPU, driver, bandwidths, memory, limits, disks, versions and caches of this machine.

    Each line has a verdict: ok, note (worth knowing, or slower than it could be) or problem (prevents running). Takes
    a few seconds, needs no network, and leaves no files. The exit code is 1 if there is a problem.
    """
    from spmoe.bench.doctor import Verdict, run_checks, worst

    findings: list[Finding] = []
    console = Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else 10_000)
    try:
        for finding in run_checks(measure=not quick):
            findings.append(finding)
            if not as_json:
                console.print(_line(finding, console.width), soft_wrap=True)
    except KeyboardInterrupt:
        stderr().print("interrupted; nothing was left on the disk")
        raise
    problems = sum(one.verdict is Verdict.PROBLEM for one in findings)
    notes = sum(one.verdict is Verdict.NOTE for one in findings)
    if as_json:
        checks = [one.to_dict() for one in findings]
        result = {"spmoe": __version__, "verdict": str(worst(findings)), "problems": problems, "notes": notes}
        print(json.dumps({**result, "checks": checks}))
    else:
        summary = "nothing prevents running"
        if problems:
            summary = "1 problem prevents running" if problems == 1 else f"{problems} problems prevent running"
        console.print(f"\n{summary}; {notes} note{'' if notes == 1 else 's'}")
    if problems:
        raise typer.Exit(1)


def _line(finding: Finding, width: int) -> Text:
    """Return a finding as lines of text, with the advice below."""
    indent = " " * _INDENT
    lines = wrap(finding.text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    if finding.advice is not None:
        advice = f"-> {finding.advice}"
        lines += wrap(advice, width, initial_indent=indent, subsequent_indent=f"{indent}   ", break_on_hyphens=False)
    verdict = f"{finding.verdict:<8}"
    check = finding.check.ljust(_INDENT - len(verdict))
    return Text.assemble((verdict, _STYLES[finding.verdict]), check, printable("\n".join(lines)[_INDENT:]))
