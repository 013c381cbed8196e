"""Commands in processes of their own, forked from a server that has imported torch once for all of them."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
from multiprocessing.reduction import DupFd
from typing import Any, BinaryIO, Self

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["spmoe.cli.main", "spmoe.engine.llm"])


class _Pipe:
    """The writing end of a pipe, on its way to another process."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> tuple[Any, ...]:
        return (_detach, (DupFd(self._fd),))


def _detach(passed: Any) -> int:
    fd: int = passed.detach()
    return fd


class Command:
    """A running `spmoe` command; reads of `stdout` and `stderr` end when it does."""

    def __init__(self, *arguments: object, max_file_bytes: int | None = None) -> None:
        self.stdout, out = _pipe()
        self.stderr, err = _pipe()
        argv = ["spmoe", *map(str, arguments)]
        options = (argv, dict(os.environ), _Pipe(out), _Pipe(err), max_file_bytes)
        self._process = _CONTEXT.Process(target=_run, args=options)
        self._process.start()
        os.close(out)
        os.close(err)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.join()
        for stream in (self.stdout, self.stderr):
            stream.close()

    def interrupt(self) -> None:
        """Send SIGINT, as Ctrl-C does."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGINT)

    def wait(self) -> int:
        """Return the exit code."""
        self._process.join(60)
        assert self._process.exitcode is not None, "it does not end"
        return self._process.exitcode


def _pipe() -> tuple[BinaryIO, int]:
    reading, writing = os.pipe()
    return open(reading, "rb", buffering=0), writing  # noqa: PTH123


def _run(argv: list[str], environment: dict[str, str], out: int, err: int, max_file_bytes: int | None) -> None:
    """Run the command line in this process as the shell would have started it."""
    from spmoe.cli.main import main

    os.environ.clear()
    os.environ.update(environment)
    os.dup2(out, 1)
    os.dup2(err, 2)
    for fd in (out, err):
        os.close(fd)
    sys.argv = argv
    sys.stdin = open(os.devnull)  # noqa: PTH123, SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if max_file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
    main()
