"""Entry point of `spmoe` and of `python -m spmoe`: the command line, with Ctrl-C handled from import to exit."""

import os
import signal

from spmoe.cli.interrupts import INTERRUPTED, exit_at_once, nothing_to_clean_up


def main() -> None:
    """Run the command line. Ctrl-C never prints a traceback; the exit code is then 130."""
    try:
        with nothing_to_clean_up():
            from spmoe.cli.main import main as run_command
        try:
            run_command()
        finally:  # everything is written and closed; what is left is the end of the interpreter
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                signal.signal(signal.SIGINT, exit_at_once)
    except KeyboardInterrupt:  # between the parts above
        os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
