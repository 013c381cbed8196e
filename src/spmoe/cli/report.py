"""`spmoe report`: stored results as an HTML page or as Markdown."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from spmoe.cli.options import require_writable, stderr
from spmoe.errors import UsageError
from spmoe.files import write_text


def report(
    results: Annotated[list[Path], typer.Argument(metavar="RESULTS...", help="Files written by `spmoe bench --json`.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="File to write: HTML, or with --markdown text."),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Write Markdown tables, to standard output unless --output is given.")
    ] = False,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw predictions from this profile (`spmoe profile`) into cutoff sweeps."),
    ] = None,
) -> None:
    """Make one page of charts and tables from stored results, or Markdown tables.

    The page needs matplotlib and jinja2: pip install 'spmoe[report]'.
    """
    if output is None and not markdown:
        raise UsageError("no output file given; use -o report.html, or --markdown for tables on standard output")
    if profile is not None and markdown:
        raise UsageError("--profile is drawn into charts, which --markdown does not have; leave out one of them")
    if output is not None and any(output.exists() and file.exists() and output.samefile(file) for file in results):
        raise UsageError(f"{output} contains the results and would be overwritten; name another file with -o")
    require_writable(output)
    from spmoe.bench.charts import require_report_extra
    from spmoe.bench.profile import read_engine_profile
    from spmoe.bench.results import read_results

    if not markdown:
        require_report_extra()
    engine_profile = read_engine_profile(profile) if profile is not None else None
    found = [one for file in results for one in read_results(file) if one.rows]
    if not found:
        raise UsageError(f"{results[0]} contains no finished configuration; continue with `spmoe bench --resume`")
    if markdown:
        from spmoe.bench.markdown import markdown_report

        text = markdown_report(found)
    else:
        from spmoe.bench.report import html_report

        text = html_report(found, engine_profile)
    if output is None:
        sys.stdout.write(text)
        return
    write_text(output, text)
    stderr().print(f"report: {output}", soft_wrap=True)
