"""`spmoe run`: complete a prompt, streaming."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from spmoe.cli.options import Json, load, read_text, stderr, takes_shared_options
from spmoe.config import SamplingParams


@takes_shared_options
def run(
    engine: dict[str, Any],
    params: SamplingParams,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Text to complete; '-' reads standard input.")] = "-",
    as_json: Json = False,
) -> None:
    """Complete a prompt, and say where the time went."""
    text = read_text(prompt)
    interrupted = False
    with load(engine, progress=not as_json) as llm:
        generation = llm.stream(text, params)
        try:
            for piece in generation:
                if not as_json:
                    sys.stdout.write(piece)
                    sys.stdout.flush()
        except KeyboardInterrupt:
            interrupted = True
        completion = generation.completion
        if as_json:
            print(json.dumps(completion.to_dict()))
        else:
            from spmoe.cli.report import stats_table

            print(flush=True)
            stderr().print(stats_table(completion.stats))
    if interrupted:
        raise typer.Exit(130)
