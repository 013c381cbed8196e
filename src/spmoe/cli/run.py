"""`spmoe run`: complete a prompt, streaming."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from spmoe.cli.options import Json, ctrl_c_stops, load, read_text, show, stderr, takes_shared_options
from spmoe.cli.output import require_writable
from spmoe.config import SamplingParams


@takes_shared_options
def run(
    engine: dict[str, Any],
    params: SamplingParams,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Text to complete; '-' reads standard input.")] = "-",
    chrome: Annotated[
        Path | None, typer.Option(help="Write a timeline as Chrome trace events (for Perfetto) to this file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Complete a prompt, and say where the time went. Ctrl-C stops it early."""
    require_writable(chrome)
    text = read_text(prompt)
    with load(engine, progress=not as_json) as llm:
        generation = llm.stream(text, params)
        llm.engine.source.timeline.recording = chrome is not None
        with suppress(KeyboardInterrupt), ctrl_c_stops(generation):
            show(generation, silent=as_json)
        completion = generation.completion
        if chrome is not None:
            from spmoe.observe.chrome import write_chrome

            write_chrome(chrome, {"run": llm.engine.source.timeline.spans})
        if as_json:
            print(json.dumps(completion.to_dict()))
        else:
            from spmoe.cli.stats_table import stats_table

            stderr().print(stats_table(completion.stats))
    if completion.finish_reason == "interrupted":
        raise typer.Exit(130)
