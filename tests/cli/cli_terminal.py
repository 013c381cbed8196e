"""Commands on a terminal of their own (a pty), forked from the server of `cli_process`."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from typing import Self

from cli_process import _CONTEXT, _Pipe

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]")  # sequences that move the cursor or set colours
_SECONDS = 30


class Terminal:
    """A terminal with a running `spmoe` command: type keys, and wait for text."""

    def __init__(self, *arguments: object) -> None:
        self._fd, theirs = pty.openpty()
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 200, 0, 0))
        self._bytes = b""
        self._seen = 0  # characters of `text` that were waited for
        argv = ["spmoe", *map(str, arguments)]
        environment = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}  # nobody answers cursor queries
        self._process = _CONTEXT.Process(target=_run, args=(argv, environment, _Pipe(theirs)))
        self._process.start()
        os.close(theirs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.join()
        os.close(self._fd)

    @property
    def text(self) -> str:
        """All output so far, without control sequences."""
        return _CONTROL.sub("", self._bytes.decode(errors="replace")).replace("\r", "")

    def type(self, keys: str) -> None:
        """Send keys."""
        os.write(self._fd, keys.encode())

    def type_until(self, key: str, text: str) -> None:
        """Send a key, again every second, until a text appears."""
        for _ in range(_SECONDS):
            self.type(key)
            self._read()
            if text in self.text[self._seen :]:
                break
        self.wait_for(text)

    def wait_for(self, text: str) -> str:
        """Return new output up to and including a text."""
        deadline = time.monotonic() + _SECONDS
        while (found := self.text.find(text, self._seen)) < 0:
            assert time.monotonic() < deadline, f"{text!r} does not appear in {self.text!r}"
            assert self._read(), f"it ended without {text!r}: {self.text!r}"
        shown, self._seen = self.text[self._seen : found + len(text)], found + len(text)
        return shown

    def wait_for_answer(self) -> None:
        """Wait for a few characters, whatever they are: from then on Ctrl-C is a signal and no key."""
        deadline = time.monotonic() + _SECONDS
        while len(self.text) < self._seen + 5:
            assert time.monotonic() < deadline, f"no answer in {self.text!r}"
            assert self._read(), f"it ended without an answer: {self.text!r}"

    def wait(self) -> int:
        """Return the exit code."""
        while self._read():
            pass
        self._process.join(_SECONDS)
        assert self._process.exitcode is not None, "it does not end"
        return self._process.exitcode

    def _read(self) -> bool:
        """Append what arrives within a second; return False after the end."""
        if not select.select([self._fd], [], [], 1)[0]:
            return True
        new = b""
        with contextlib.suppress(OSError):  # EIO: the other side is closed
            new = os.read(self._fd, 65536)
        self._bytes += new
        return bool(new)


def _run(argv: list[str], environment: dict[str, str], terminal: int) -> None:
    """Run the command line in a session of its own, which the terminal controls."""
    from spmoe.cli.main import main

    os.environ.clear()
    os.environ.update(environment)
    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    for fd in (0, 1, 2):
        os.dup2(terminal, fd)
    os.close(terminal)
    sys.argv = argv
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
