"""Entry point of `spmoe` and of `python -m spmoe`: the command line, with Ctrl-C handled from import to exit."""

import os
import signal


def _exit_at_once(signum: int, frame: object) -> None:
    os._exit(130)


_own_handler = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not that of a shell or a program
if _own_handler:  # before anything else is imported
    signal.signal(signal.SIGINT, _exit_at_once)


def main() -> None:
    """Run the command line. Ctrl-C never prints a traceback; the exit code is then 130."""
    from spmoe.cli.main import main as run_command

    try:
        if _own_handler:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            run_command()
        finally:  # everything is written and closed; what is left is the end of the interpreter
            if _own_handler:
                signal.signal(signal.SIGINT, _exit_at_once)
    except KeyboardInterrupt:  # between the parts above
        os._exit(130)
    except SystemExit as end:
        if end.code == 130:  # the engine's thread may still run, and the end of the interpreter aborts inside torch
            _flush()
            os._exit(130)
        raise


def _flush() -> None:
    import sys
    from contextlib import suppress

    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # closed, or nobody reads it
            stream.flush()


if __name__ == "__main__":
    main()
