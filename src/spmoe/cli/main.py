"""`spmoe`: the entry point and what all verbs share."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from rich.console import Console

from spmoe import __version__
from spmoe.cli.chat import chat
from spmoe.cli.info import info
from spmoe.cli.run import run
from spmoe.errors import SpmoeError

app = typer.Typer(
    name="spmoe",
    help="Run Mixture-of-Experts language models that do not fit in fast memory, with exactly the model's own output.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(run)
app.command()(chat)
app.command()(info)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"spmoe {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of spmoe itself."""


def main() -> None:
    """Run the command line; a failure is one line on standard error, never a traceback."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        app()
    except SpmoeError as error:
        console.print(f"error: {error}", style="red", markup=False)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        console.print("interrupted")
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except MemoryError:
        console.print("error: out of memory; lower --expert-memory or choose a smaller model", style="red")
        sys.exit(1)
