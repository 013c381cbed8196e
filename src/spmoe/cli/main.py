"""`spmoe`: the entry point and what all verbs share."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any

import typer
from rich.console import Console

from spmoe import __version__
from spmoe.cli.bench import bench
from spmoe.cli.chat import chat
from spmoe.cli.demo import demo
from spmoe.cli.families import families
from spmoe.cli.fit_predictor import fit_predictor
from spmoe.cli.info import info
from spmoe.cli.predictability import predictability
from spmoe.cli.profile import profile
from spmoe.cli.report import report
from spmoe.cli.run import run
from spmoe.cli.trace import trace
from spmoe.errors import SpmoeError, UsageError, reason

_BadCommandLine: type[Exception] = typer.BadParameter.__mro__[1]  # the base of all parsing errors, which has no name

app = typer.Typer(
    name="spmoe",
    help="Run Mixture-of-Experts language models that do not fit in fast memory, with exactly the model's own output.",
    epilog="`spmoe COMMAND --help` lists the options of each. Without a MODEL, commands use the small pair that ships.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_VERBS: dict[Callable[..., None], str] = {  # and what each is for, in a line of the list
    demo: "See what prefetching does, on the pair that ships.",
    run: "Complete a prompt.",
    chat: "Talk with a model.",
    info: "Show a model, its memory and how deep it prefetches.",
    predictability: "Measure whether a draft suits a target.",
    profile: "Measure what the parts of a step take here.",
    fit_predictor: "Fit maps for a draft of another width.",
    families: "Prove which MoE architectures work here.",
    bench: "Measure configurations against each other.",
    report: "Make a page, or tables, of what bench measured.",
}
for verb, purpose in _VERBS.items():
    app.command(short_help=purpose)(verb)
app.add_typer(trace, short_help="Record generations; replay them under other policies.")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"spmoe {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of spmoe itself."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def main() -> None:
    """Run the command line; a failure is one line on standard error, never a traceback."""
    if os.environ.get("SPMOE_DEBUG"):
        logging.basicConfig(format="%(name)s: %(message)s")
        logging.getLogger("spmoe").setLevel(logging.DEBUG)
    try:
        if sys.stdout is None:
            raise UsageError("standard output is closed, and the answer goes there; open it, or send it to a file")
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that lacks a character is no reason to fail
        code = app(standalone_mode=False, prog_name="spmoe") or 0
        sys.stdout.flush()  # while a failure can still be told
    except SpmoeError as error:
        code = _fail(str(error), error.exit_code)
    except _BadCommandLine as error:
        code = _fail(_as_usage(error), 2)
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        code = _drop_output()
    except OSError as error:
        _drop_output()
        code = _fail(f"a read or write failed ({reason(error)}); check the disk and where the output goes")
    except MemoryError:
        code = _fail("out of memory; lower --expert-memory or choose a smaller model")
    except Exception as error:
        if os.environ.get("SPMOE_DEBUG"):
            raise
        code = _fail(
            f"this should not happen ({type(error).__name__}: {reason(error)}); please report it, with what is printed "
            "when SPMOE_DEBUG=1 is set"
        )
    sys.exit(code)


def _fail(message: str, code: int = 1) -> int:
    console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
    console.print(f"error: {' '.join(message.splitlines())}", style="red")
    return code


def _as_usage(error: Any) -> str:
    """What typer says of a command line, in one line."""
    command = error.ctx.command_path if error.ctx is not None else "spmoe"
    return f"{error.format_message().rstrip('.')}; `{command} --help` shows what there is"


def _drop_output() -> int:
    """Let what is still buffered for standard output go nowhere, so that nothing fails again at exit."""
    with suppress(OSError, ValueError):  # a stream without a file behind it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
