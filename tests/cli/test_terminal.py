"""`spmoe chat` at a terminal: line editing, history, Ctrl-C and Ctrl-D."""

from __future__ import annotations

import json
import os
import signal
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from cli_terminal import Terminal
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from spmoe import LLM, SamplingParams
from spmoe.cli.chat import COMMANDS, Session
from spmoe.cli.conversation import Conversation
from spmoe.cli.terminal import TerminalReader, open_history
from spmoe.engine.request import Request

ENTER, ALT_ENTER, UP, TAB, CTRL_C, CTRL_D = "\r", "\x1b\r", "\x1b[A", "\t", "\x03", "\x04"
LEAVE = "(press Ctrl-C again, or Ctrl-D, to leave)"


@contextmanager
def typing(keys: str, history: Path) -> Iterator[Callable[[], str | None]]:
    """Yield the function that reads messages, at a terminal where these keys were typed."""
    with create_pipe_input() as pipe:
        pipe.send_text(keys)
        yield TerminalReader(history, [usage.split()[0] for usage in COMMANDS], pipe, DummyOutput()).read


@pytest.fixture
def history(tmp_path: Path) -> Path:
    return tmp_path / "new" / "chat-history"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("hello" + ENTER, "hello"),
        ("helo\x1b[Dl" + ENTER, "hello"),  # cursor left
        ("one" + ALT_ENTER + "two" + ENTER, "one\ntwo"),
        ("\x1b[200~one\ntwo\x1b[201~" + ENTER, "one\ntwo"),  # pasted
        ("/he" + TAB + ENTER, "/help"),
        ("/sy" + TAB + " be brief" + ENTER, "/system be brief"),
        ("grüße" + ENTER, "grüße"),
        (CTRL_D, None),
    ],
)
def test_keys(keys: str, message: str | None, history: Path) -> None:
    with typing(keys, history) as read:
        assert read() == message


def test_history_is_private_and_kept(history: Path) -> None:
    history.parent.mkdir()
    history.touch(0o644)
    with typing("first" + ENTER + "second" + ENTER, history) as read:
        assert [read(), read()] == ["first", "second"]
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert list(open_history(history).load_history_strings()) == ["second", "first"]


def test_history_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with typing("first" + ENTER + "second" + ENTER, tmp_path / "file" / "chat-history") as read:
        assert [read(), read()] == ["first", "second"]


def test_full_disk_does_not_end_the_conversation(history: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with typing("first" + ENTER + "second" + ENTER, history) as read:
        assert read() == "first"
        history.unlink()
        history.mkdir()  # so that it cannot be opened
        assert read() == "second"


# ---- the conversation


@pytest.fixture(scope="module")
def llm(checkpoints: Path, shared_home: Path) -> Iterator[LLM]:
    """An engine for all sessions of this module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPMOE_HOME", str(shared_home))
        with LLM(str(checkpoints / "target"), progress=False) as engine:
            yield engine


def converse(llm: LLM, keys: str, history: Path, *, max_tokens: int = 4) -> Conversation:
    """Hold a conversation by typing; return it when the user has left."""
    conversation = Conversation()
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    session = Session(llm, params, conversation, "model", interactive=True)
    with typing(keys, history) as read:
        session.run(read)
    assert session.exit_code == 0
    return conversation


def roles(conversation: Conversation) -> list[str]:
    return [message["role"] for message in conversation.messages]


@pytest.mark.parametrize("end", [CTRL_D, "/exit" + ENTER, CTRL_C + CTRL_C, "half a line" + CTRL_C + CTRL_C])
def test_ways_to_leave(end: str, llm: LLM, history: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = converse(llm, "hi" + ENTER + ENTER + end + "never" + ENTER, history)
    assert roles(conversation) == ["user", "assistant"]
    out, err = capsys.readouterr()
    assert out == conversation.messages[1]["content"] + "\n"
    assert err.splitlines() == ["(cut off at --max-tokens 4)", *([LEAVE] if CTRL_C in end else [])]


def test_one_ctrl_c_at_the_prompt_does_not_leave(llm: LLM, history: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = CTRL_C + "hi" + ENTER + "dropped" + CTRL_C + "there" + ENTER + CTRL_D
    conversation = converse(llm, keys, history)
    assert [message["content"] for message in conversation.messages[::2]] == ["hi", "there"]
    assert capsys.readouterr().err.count(LEAVE) == 2


def test_errors_do_not_end_the_conversation(
    llm: LLM, history: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    keys = ENTER.join(["/wrong", "hi", "a" * 600, f"/save {tmp_path / 'saved.json'}", "there", CTRL_D])
    conversation = converse(llm, keys, history)
    assert [message["content"] for message in conversation.messages[::2]] == ["hi", "there"]
    assert len(json.loads((tmp_path / "saved.json").read_text())["messages"]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert [error.split(";")[0][:30] for error in errors] == [
        "error: unknown command /wrong",
        "error: the message alone makes",
    ]


def test_answer_that_fills_the_context_says_so(llm: LLM, history: Path, capsys: pytest.CaptureFixture[str]) -> None:
    converse(llm, "a" * 485 + ENTER + CTRL_D, history, max_tokens=100)
    assert "(cut off at 512 tokens of context)" in capsys.readouterr().err


@pytest.mark.parametrize("presses", [2, 3])
def test_impatient_ctrl_c_loses_nothing(
    presses: int,
    llm: LLM,
    history: Path,
    home: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second Ctrl-C in an answer explains itself; a third one leaves at once, and the conversation is saved."""
    take, handler = Request._take, signal.getsignal(signal.SIGINT)

    def take_and_press(self: Request, token: int) -> Iterator[str]:
        yield from take(self, token)
        if len(self.token_ids) == 3:
            for _ in range(presses):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.1)  # until the main thread has handled it

    monkeypatch.setattr(Request, "_take", take_and_press)
    with nullcontext() if presses == 2 else pytest.raises(KeyboardInterrupt):
        conversation = converse(llm, "hi" + ENTER + CTRL_D, history, max_tokens=9)
    err = capfd.readouterr().err
    assert "(stopping after this step; Ctrl-C again leaves the program)" in err
    assert ("(stopped)" in err) == (presses == 2)
    assert signal.getsignal(signal.SIGINT) is handler
    saved = home / "chat-interrupted.json"
    if presses == 2:
        assert roles(conversation) == ["user", "assistant"]
        assert not saved.exists()
    else:
        assert str(saved) in err
        assert [message["role"] for message in json.loads(saved.read_text())["messages"]] == ["user", "assistant"]
        assert stat.S_IMODE(saved.stat().st_mode) == 0o600
        saved.unlink()


def test_banner(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    conversation = Conversation(None, [{"role": "user", "content": "hi"}])
    Session(llm, SamplingParams(), conversation, "my/model", interactive=True).print_banner()
    first, second, _, last = capsys.readouterr().err.splitlines()
    assert first.endswith(": my/model on cpu")
    assert second.startswith("context: 512 tokens; memory: ")
    assert second.endswith(" for 3 of 12 experts")
    assert last == "continuing a conversation of 1 messages; /retry answers the last one"


def test_chat_on_a_terminal(checkpoints: Path, own_home: Path) -> None:
    """Stop answers by Ctrl-C, ask again from the history, and leave by Ctrl-D."""
    slow = ("--max-tokens", 400, "--ignore-eos", "-k", 0, "--link-gbps", 0.002)
    with Terminal("chat", checkpoints / "target", *slow) as terminal:
        terminal.wait_for("/help lists commands; Ctrl-C stops an answer; Ctrl-D leaves\n")
        terminal.wait_for(">")
        terminal.type("hello" + ENTER)
        terminal.wait_for("hello\n")
        terminal.wait_for_answer()
        terminal.type(CTRL_C)
        assert "cut off" not in terminal.wait_for("(stopped)")
        terminal.wait_for(">")
        terminal.type_until(UP, "hello")  # the history is read while the prompt is already shown
        terminal.type(" again" + ENTER)
        terminal.wait_for(" again\n")
        terminal.wait_for_answer()
        terminal.type(CTRL_C)
        terminal.wait_for("(stopped)")
        terminal.wait_for(">")
        terminal.type("/save" + ENTER)
        terminal.wait_for("error: /save needs the name of a file")
        terminal.wait_for(">")
        terminal.type(CTRL_C)
        terminal.wait_for(LEAVE)
        terminal.wait_for(">")
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
        assert "Traceback" not in terminal.text
    assert stat.S_IMODE((own_home / "chat-history").stat().st_mode) == 0o600
