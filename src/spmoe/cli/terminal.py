"""Reading messages from a terminal, with line editing and history; imported only when there is one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output
from prompt_toolkit.output.defaults import create_output
from prompt_toolkit.shortcuts import CompleteStyle


class _PrivateHistory(FileHistory):
    """Lines in a file that only its owner may read; a full disk does not end the conversation."""

    def store_string(self, string: str) -> None:
        with suppress(OSError):
            super().store_string(string)


def open_history(path: Path) -> History:
    """Return the history in a file; in memory if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        path.chmod(0o600)
    except OSError:
        return InMemoryHistory()
    return _PrivateHistory(str(path))


class TerminalReader:
    """Reads messages: Enter sends, Alt-Enter starts a new line, Tab completes commands.

    The prompt appears on the standard stream that is a terminal. `input` and `output` replace it in tests.
    """

    def __init__(
        self, history: Path, words: Sequence[str], input: Input | None = None, output: Output | None = None
    ) -> None:
        keys = KeyBindings()

        @keys.add("escape", "enter")
        def _insert_newline(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        self._session: PromptSession[str] = PromptSession(
            "> ",
            history=open_history(history),
            completer=WordCompleter(list(words), sentence=True),
            complete_style=CompleteStyle.READLINE_LIKE,
            complete_while_typing=False,
            reserve_space_for_menu=0,  # or the prompt would move up from the last line of the screen
            key_bindings=keys,
            input=input,
            output=output or create_output(always_prefer_tty=True),
        )

    def read(self) -> str | None:
        """Return one message; None after Ctrl-D. Ctrl-C raises KeyboardInterrupt."""
        try:
            return self._session.prompt()
        except EOFError:
            return None
