"""The `spmoe` command: entry point, list of commands, and how errors are reported."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from spmoe import __version__
from spmoe.cli.bench import bench
from spmoe.cli.cache import cache
from spmoe.cli.chat import chat
from spmoe.cli.demo import demo
from spmoe.cli.doctor import doctor
from spmoe.cli.families import families
from spmoe.cli.fit_predictor import fit_predictor
from spmoe.cli.info import info
from spmoe.cli.interrupts import INTERRUPTED, watched_interrupts
from spmoe.cli.output import Console, reset_verbosity, set_verbosity
from spmoe.cli.panels import Command, Group, arranged
from spmoe.cli.plan import plan
from spmoe.cli.predictability import predictability
from spmoe.cli.profile import profile
from spmoe.cli.report import report
from spmoe.cli.run import run
from spmoe.cli.serve import serve
from spmoe.cli.settings import name_source, reset_settings
from spmoe.cli.trace import trace
from spmoe.cli.verify import verify
from spmoe.errors import SpmoeError, UsageError, is_panic, reason

# the base class of all parsing errors, which typer does not export
_BadCommandLine: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="spmoe",
    cls=Group,
    help="Run Mixture-of-Experts language models whose experts do not fit in GPU memory, with exact output.",
    epilog="`spmoe COMMAND --help` lists the options of a command. Without MODEL, the small included pair runs.",
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
_COMMANDS: dict[str, dict[Callable[..., None] | typer.Typer, str]] = {  # by panel, with the line of `spmoe --help`
    "Use": {
        demo: "Show the effect of prefetching on the included pair.",
        run: "Complete a prompt.",
        chat: "Talk with a model.",
        serve: "Serve a model with OpenAI's API.",
    },
    "Look": {
        info: "Show a model, its memory and its prefetch cutoff.",
        plan: "Say what fits where and how fast a model will be.",
        doctor: "Check this machine: GPU, memory, disks, versions, caches.",
        verify: "Compare tokens with transformers on a checkpoint.",
        cache: "List and delete cached files.",
        families: "Test which MoE architectures work here.",
    },
    "Measure": {
        bench: "Compare configurations by measurement.",
        report: "Make an HTML page or tables from bench results.",
        profile: "Measure the parts of a step on this machine.",
        predictability: "Measure how well a draft predicts a target's experts.",
        trace: "Record generations and replay them.",
        fit_predictor: "Fit a projection for a draft of another width.",
    },
}


def _register(command: Callable[..., None] | typer.Typer, panel: str, purpose: str) -> None:
    """Add a command, or a group of commands."""
    if not isinstance(command, typer.Typer):
        app.command(cls=Command, short_help=purpose, rich_help_panel=panel)(arranged(command))
        return
    for one in command.registered_commands:
        assert one.callback is not None
        one.cls, one.callback = Command, arranged(one.callback)
    app.add_typer(command, cls=Group, short_help=purpose, rich_help_panel=panel)


for title, commands in _COMMANDS.items():
    for command, purpose in commands.items():
        _register(command, title, purpose)


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
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="The same as after COMMAND.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="The same as after COMMAND.")] = False,
) -> None:
    """Handle the options of spmoe itself."""
    set_verbosity(verbose=verbose, quiet=quiet)
    if context.invoked_subcommand is None:
        print(context.get_help())


def main() -> None:
    """Run the command line; report a failure as one line on standard error, without a traceback."""
    reset_verbosity()
    reset_settings()
    with watched_interrupts() as interrupted:
        code = _run(interrupted)
    sys.exit(code)


def _run(interrupted: Callable[[], bool]) -> int:
    """Run the command line, and return the exit code."""
    try:
        if sys.stdout is None:
            raise UsageError("standard output is closed; open it or redirect it to a file")
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # print what the terminal's encoding lacks as escapes
        code: int = app(standalone_mode=False, prog_name="spmoe") or 0
        sys.stdout.flush()  # here, so that a failure is reported below
        return code
    except UsageError as error:
        return _fail(name_source(str(error)), error.exit_code)
    except SpmoeError as error:
        return INTERRUPTED if _failed_import(error) and interrupted() else _fail(str(error), error.exit_code)
    except _BadCommandLine as error:
        return _fail(name_source(_as_usage(error)), 2)
    except BrokenPipeError:  # the reader of our output has closed it, as `head` does
        return _drop_output()
    except OSError as error:
        _drop_output()
        return _fail(f"a read or write failed ({reason(error)}); check the disk and where the output goes")
    except MemoryError:
        return _fail("out of memory; lower --expert-memory or choose a smaller model")
    except KeyboardInterrupt:
        return INTERRUPTED
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        if interrupted():
            return INTERRUPTED
        if os.environ.get("SPMOE_DEBUG"):
            raise
        return _fail(
            f"internal error ({type(error).__name__}: {reason(error)}); run again with SPMOE_DEBUG=1 and report the "
            "output"
        )


def _fail(message: str, code: int = 1) -> int:
    console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)
    console.print(f"error: {' '.join(message.splitlines())}", style="red")
    return code


def _failed_import(error: BaseException | None) -> bool:
    """Return whether a module that could not be imported caused an error."""
    while error is not None and not isinstance(error, ImportError):
        error = error.__cause__ or error.__context__
    return error is not None


def _as_usage(error: Any) -> str:
    """Return typer's message about a wrong command line, as one line."""
    command, message = error.ctx.command_path if error.ctx is not None else "spmoe", error.format_message()
    if isinstance(cause := error.__cause__, ValidationError):  # its message lacks the value
        message = re.sub("Input should|, unable to.*", lambda found: "must" if found[0][0] == "I" else "", message)
        message = f"{message.rstrip('.')}, not {cause.errors()[0]['input']!r}"
    return message if message.endswith("?") else f"{message.rstrip('.')}; see `{command} --help`"


def _drop_output() -> int:
    """Discard what is still buffered for standard output, so that flushing it at exit does not fail again."""
    with suppress(OSError, ValueError):  # a stream without a file descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
