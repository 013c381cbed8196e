"""The `spmoe` command: entry point, list of commands, and how errors are reported."""

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
from spmoe.cli.verify import verify
from spmoe.errors import SpmoeError, UsageError, reason

# the base class of all parsing errors, which typer does not export
_BadCommandLine: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="spmoe",
    help="Run Mixture-of-Experts language models whose experts do not fit in GPU memory, with exact output.",
    epilog="`spmoe COMMAND --help` lists the options of a command. Without MODEL, the small included pair runs.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_COMMANDS: dict[Callable[..., None], str] = {  # with the line that `spmoe --help` shows
    demo: "Show the effect of prefetching on the included pair.",
    run: "Complete a prompt.",
    chat: "Talk with a model.",
    info: "Show a model, its memory and its prefetch cutoff.",
    predictability: "Measure how well a draft predicts a target's experts.",
    profile: "Measure the parts of a step on this machine.",
    fit_predictor: "Fit a projection for a draft of another width.",
    verify: "Compare tokens with transformers on a checkpoint.",
    families: "Test which MoE architectures work here.",
    bench: "Compare configurations by measurement.",
    report: "Make an HTML page or tables from bench results.",
}
for command, purpose in _COMMANDS.items():
    app.command(short_help=purpose)(command)
app.add_typer(trace, short_help="Record generations and replay them.")


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
    """Handle the options of spmoe itself."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def main() -> None:
    """Run the command line; report a failure as one line on standard error, without a traceback."""
    if os.environ.get("SPMOE_DEBUG"):
        logging.basicConfig(format="%(name)s: %(message)s")
        logging.getLogger("spmoe").setLevel(logging.DEBUG)
    try:
        if sys.stdout is None:
            raise UsageError("standard output is closed; open it or redirect it to a file")
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # print what the terminal's encoding lacks as escapes
        code = app(standalone_mode=False, prog_name="spmoe") or 0
        sys.stdout.flush()  # here, so that a failure is reported below
    except SpmoeError as error:
        code = _fail(str(error), error.exit_code)
    except _BadCommandLine as error:
        code = _fail(_as_usage(error), 2)
    except BrokenPipeError:  # the reader of our output has closed it, as `head` does
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
            f"internal error ({type(error).__name__}: {reason(error)}); run again with SPMOE_DEBUG=1 and report the "
            "output"
        )
    sys.exit(code)


def _fail(message: str, code: int = 1) -> int:
    console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
    console.print(f"error: {' '.join(message.splitlines())}", style="red")
    return code


def _as_usage(error: Any) -> str:
    """Return typer's message about a wrong command line, as one line."""
    command = error.ctx.command_path if error.ctx is not None else "spmoe"
    return f"{error.format_message().rstrip('.')}; see `{command} --help`"


def _drop_output() -> int:
    """Discard what is still buffered for standard output, so that flushing it at exit does not fail again."""
    with suppress(OSError, ValueError):  # a stream without a file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
