"""`spmoe report`: stored results as a page, or as Markdown."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from spmoe.cli.options import require_writable, stderr
from spmoe.errors import UsageError
from spmoe.files import write_text


def report(
    results: Annotated[list[Path], typer.Argument(metavar="RESULTS...", help="Files that `spmoe bench --json` wrote.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Where the page (HTML) goes; or Markdown.")
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Tables in Markdown, on standard output unless --output is given.")
    ] = False,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw what is predicted from this profile (`spmoe profile`) over cutoffs."),
    ] = None,
) -> None:
    """Make one page of plots and tables of what was measured, or tables in Markdown."""
    if output is None and not markdown:
        raise UsageError("say where the page goes, as -o report.html; or --markdown for tables on standard output")
    if profile is not None and markdown:
        raise UsageError("--profile is drawn on the page, and --markdown has no plots; leave out one of them")
    require_writable(output)
    from spmoe.bench.profile import read_engine_profile
    from spmoe.bench.results import read_results

    known = read_engine_profile(profile) if profile is not None else None
    groups = [group for file in results for group in read_results(file) if group.rows]
    if not groups:
        raise UsageError(f"{results[0]} holds no configuration that was run; continue it with `spmoe bench --resume`")
    if markdown:
        from spmoe.bench.markdown import markdown_report

        text = markdown_report(groups)
    else:
        from spmoe.bench.report import html_report

        text = html_report(groups, known)
    if output is None:
        sys.stdout.write(text)
        return
    write_text(output, text)
    stderr().print(f"report: {output}", soft_wrap=True)
