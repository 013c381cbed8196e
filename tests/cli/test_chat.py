"""`spmoe chat` with messages from a pipe: commands, full contexts, errors, files and Ctrl-C."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import huggingface_hub
import pytest
from cli_checkpoints import copy_of, edit_json
from huggingface_hub.errors import LocalEntryNotFoundError

from spmoe.engine import llm, request
from spmoe.errors import TransferError

if TYPE_CHECKING:
    from conftest import Invoke, Result

PLAIN = ("--draft", "none")  # no note about the default draft
SHORT = (*PLAIN, "--max-tokens", 8, "--ignore-eos")


def answers(result: Result) -> list[dict[str, Any]]:
    """Return the JSON objects that a chat printed."""
    return [json.loads(line) for line in result.out.splitlines()]


def lengths(result: Result) -> list[int]:
    """Return the number of prompt tokens, which are bytes, of each answer."""
    return [answer["usage"]["prompt_tokens"] for answer in answers(result)]


def written(*texts: str) -> int:
    """Return the length of a conversation after the checkpoints' template, up to the next answer."""
    roles = ("user", "assistant")
    lines = [f"{roles[number % 2]}: {text}\n" for number, text in enumerate(texts)]
    return len("".join([*lines, "assistant: "]).encode())


@pytest.fixture
def chat(checkpoints: Path) -> tuple[object, ...]:
    """Return the words of a command that gives short answers."""
    return ("chat", checkpoints / "target", *SHORT)


def at_token(number: int, act: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call `act` once, after this many tokens of an answer."""
    original, calls = request.Request._take, []

    def take(self: request.Request, token: int) -> Iterator[str]:
        yield from original(self, token)
        if len(self.token_ids) == number and not calls:
            calls.append(number)
            act()

    monkeypatch.setattr(request.Request, "_take", take)


# ---- messages and commands


def test_whole_conversation_is_sent(checkpoints: Path, chat: tuple[object, ...], invoke: Invoke) -> None:
    first, second = answers(invoke(*chat, "--json", stdin=b"hi\nthere\n").succeeded())
    history = f"user: hi\nassistant: {first['text']}\nuser: there\nassistant: "
    assert second["usage"]["prompt_tokens"] == len(history.encode())
    again = invoke("run", checkpoints / "target", "--prompt", history, *SHORT, "--json").succeeded()
    assert second["token_ids"] == answers(again)[0]["token_ids"]
    shown = invoke(*chat, stdin=b"hi\nthere\n").succeeded()
    assert (shown.out, shown.err) == (f"{first['text']}\n{second['text']}\n", "")


@pytest.mark.parametrize("stdin", [b"", b"\n  \n\n"])
def test_nothing_is_said_without_messages(stdin: bytes, chat: tuple[object, ...], invoke: Invoke) -> None:
    result = invoke(*chat, stdin=stdin).succeeded()
    assert (result.out, result.err) == ("", "")


def test_empty_lines_are_ignored(chat: tuple[object, ...], invoke: Invoke) -> None:
    result = invoke(*chat, "--json", stdin=b"\nhi\n\n  \nthere\n").succeeded()
    first, _ = answers(result)
    assert lengths(result) == [written("hi"), written("hi", first["text"], "there")]


def test_commands_change_the_conversation(chat: tuple[object, ...], invoke: Invoke) -> None:
    lines = b"hi\n/system brief\nthere\n/reset\nagain\n/system\n/retry\n/exit\nnever\n"
    result = invoke(*chat, "--json", stdin=lines).succeeded()
    first, *_ = answers(result)
    system = len("system: brief\n")
    assert lengths(result) == [
        written("hi"),
        system + written("hi", first["text"], "there"),
        system + written("again"),
        written("again"),  # without the system message
    ]
    assert result.err.splitlines() == ["(system message set)", "(new conversation)", "(no system message)"]


def test_system_message_on_the_command_line(chat: tuple[object, ...], invoke: Invoke) -> None:
    result = invoke(*chat, "--system", "brief", "--json", stdin=b"hi\n").succeeded()
    assert lengths(result) == [len("system: brief\n") + written("hi")]


def test_retry_replaces_the_answer(chat: tuple[object, ...], invoke: Invoke, tmp_path: Path) -> None:
    save = tmp_path / "saved.json"
    result = invoke(*chat, "--temperature", 3, "--json", stdin=f"hi\n/retry\n/save {save}\n".encode()).succeeded()
    first, second = answers(result)
    assert first["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"] == written("hi")
    assert [message["content"] for message in json.loads(save.read_text())["messages"]] == ["hi", second["text"]]


def test_help_names_every_command(chat: tuple[object, ...], invoke: Invoke) -> None:
    result = invoke(*chat, stdin=b"/help\n").succeeded()
    assert result.out == ""
    for name in ("/help", "/reset", "/system TEXT", "/retry", "/stats", "/save FILE", "/exit"):
        assert f"{name} " in result.err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/usr/bin is a directory", ("unknown command /usr/bin", "/help", "space")),
        ("/", ("unknown command /", "/help")),
        ("/reset now", ("/reset takes no argument", "'now'")),
        ("/save", ("/save FILE",)),
        ("/save /nowhere/file.json", ("cannot write /nowhere/file.json",)),
        ("/save ~nobody-at-all/file.json", ("cannot use the path ~nobody-at-all/file.json",)),
        ("/save " + "a" * 300, ("cannot use the path",)),
        ("/retry", ("no message",)),
    ],
)
def test_wrong_command_is_one_line(line: str, words: tuple[str, ...], chat: tuple[object, ...], invoke: Invoke) -> None:
    result = invoke(*chat, "--json", stdin=f"{line}\nhi\n".encode())
    assert lengths(result) == [written("hi")]  # the conversation goes on
    (error,) = result.err.splitlines()
    assert error.startswith("error: ")
    assert not [word for word in words if word not in error], error
    assert result.code == 2


def test_space_makes_a_message_of_a_command(chat: tuple[object, ...], invoke: Invoke) -> None:
    result = invoke(*chat, "--json", stdin=b" /help\n").succeeded()
    assert lengths(result) == [written("/help")]


def test_statistics_are_shown_only_on_request(chat: tuple[object, ...], invoke: Invoke) -> None:
    assert "TTFT" not in invoke(*chat, stdin=b"hi\n").succeeded().err
    always = invoke(*chat, "-v", "--link-gbps", "0.5", stdin=b"hi\nthere\n").succeeded().err
    assert always.count("8 out; TTFT") == always.count("; emulated link, 0.5 GB/s)") == 2
    toggled = invoke(*chat, stdin=b"hi\n/stats\nthere\n/stats\nagain\n").succeeded().err.splitlines()
    assert [line.split(" ", 3)[:3] for line in toggled] == [
        ["(statistics", "after", "each"],
        [f"({written('hi')}", "tokens", "in,"],
        [toggled[2].split()[0], "tokens", "in,"],
        ["(statistics", "after", "each"],
    ]


# ---- chat templates


def without_template(checkpoints: Path, place: Path) -> Path:
    model = copy_of(checkpoints / "target", place)
    (model / "chat_template.jinja").unlink()
    return model


@pytest.fixture
def _no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if an engine is built."""

    def build(*values: object, **options: object) -> None:
        raise AssertionError("weights are loaded")

    monkeypatch.setattr(llm, "build", build)


@pytest.mark.usefixtures("_no_weights")
def test_model_without_a_template_is_refused_before_it_is_loaded(
    checkpoints: Path, tmp_path: Path, invoke: Invoke
) -> None:
    model = without_template(checkpoints, tmp_path)
    words = (str(model), "no chat template", "spmoe run", "--chat-template")
    invoke("chat", model, stdin=b"hi\n").refused(2, *words)
    edit_json(model / "tokenizer_config.json", chat_template=[{"name": "tool_use", "template": "{{ messages }}"}])
    invoke("chat", model, stdin=b"hi\n").refused(2, *words)
    (model / "tokenizer_config.json").write_text("{")
    invoke("chat", model, stdin=b"hi\n").refused(1, "tokenizer_config.json cannot be read", "download")
    (model / "tokenizer_config.json").unlink()
    invoke("chat", model, stdin=b"hi\n").refused(2, *words)


def test_refusal_imports_no_torch(checkpoints: Path, tmp_path: Path) -> None:
    code = f"""
import sys
from spmoe.cli.main import main
sys.argv = ["spmoe", "chat", {str(without_template(checkpoints, tmp_path))!r}]
try:
    main()
except SystemExit as ended:
    print(ended.code, *sorted({{"torch", "transformers", "prompt_toolkit"}} & sys.modules.keys()))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "2\n"
    assert "no chat template" in result.stderr


@pytest.mark.parametrize("form", ["text", "list"])
def test_template_in_the_tokenizer_config(form: str, checkpoints: Path, tmp_path: Path, invoke: Invoke) -> None:
    model = without_template(checkpoints, tmp_path)
    text = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    stored: Any = text if form == "text" else [{"name": "default", "template": text}]
    edit_json(model / "tokenizer_config.json", chat_template=stored)
    assert lengths(invoke("chat", model, *SHORT, "--json", stdin=b"hello\n").succeeded()) == [5]


@pytest.mark.usefixtures("_no_weights")
@pytest.mark.parametrize("config", ["{}", None], ids=["without template", "without file"])
def test_hub_model_without_a_template(
    config: str | None, invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(repository: str, name: str, **options: object) -> str:
        asked.append((repository, name))
        if config is None or name != "tokenizer_config.json":
            raise huggingface_hub.errors.EntryNotFoundError("404")
        (tmp_path / name).write_text(config)
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    invoke("chat", "some/base-model", stdin=b"hi\n").refused(2, "some/base-model has no chat template", "spmoe run")
    assert asked == [("some/base-model", "chat_template.jinja"), ("some/base-model", "tokenizer_config.json")]


@pytest.mark.parametrize("error", [LocalEntryNotFoundError("offline"), OSError("no route")])
def test_hub_that_does_not_answer_is_left_to_the_download(
    error: Exception, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(repository: str, name: str, **options: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    invoke("chat", "some/model", stdin=b"hi\n").refused(1, "local hub cache does not hold all of a model")


@pytest.mark.parametrize(
    ("template", "words"),
    [("{% for", ("chat template", "end of template")), ("{{ raise_exception('no roles') }}", ("no roles",))],
)
def test_unusable_template_is_refused_before_the_first_message(
    template: str, words: tuple[str, ...], checkpoints: Path, tmp_path: Path, invoke: Invoke
) -> None:
    model = copy_of(checkpoints / "target", tmp_path)
    (model / "chat_template.jinja").write_text(template)
    invoke("chat", model, *PLAIN, stdin=b"").refused(2, *words)


def test_template_from_a_file(checkpoints: Path, tmp_path: Path, invoke: Invoke) -> None:
    model = without_template(checkpoints, tmp_path)
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    chat = ("chat", model, *SHORT, "--json", "--chat-template")
    assert lengths(invoke(*chat, template, stdin=b"hello\n").succeeded()) == [5]
    template.write_text("\n{% for")
    invoke(*chat, template, stdin=b"hi\n").refused(2, f"{template} is not a chat template", "line 2")
    invoke(*chat, tmp_path / "nowhere", stdin=b"hi\n").refused(2, "cannot read", "nowhere")
    for path in model.glob("tokenizer*"):
        path.unlink()
    template.write_text("{{ messages }}")
    invoke(*chat, template, stdin=b"").refused(2, "ships no tokenizer")


# ---- full contexts and errors


def test_oldest_turns_are_left_out_of_a_full_context(chat: tuple[object, ...], invoke: Invoke, tmp_path: Path) -> None:
    save = tmp_path / "saved.json"
    lines = [letter * 20 for letter in "abcde"]
    stdin = "\n".join([*lines, f"/save {save}"]).encode()
    result = invoke(*chat, "--max-model-len", 120, "--system", "brief", "--json", stdin=stdin).succeeded()
    texts = [answer["text"] for answer in answers(result)]
    assert len(texts) == 5
    assert max(lengths(result)) <= 120 - 8
    notes = [line for line in result.err.splitlines() if line.startswith("note: ")]
    assert notes
    assert notes[0] == "note: the context of 120 tokens is full; the model no longer reads the oldest turn"
    saved = [message["content"] for message in json.loads(save.read_text())["messages"]]
    assert saved == ["brief", *(text for turn in zip(lines, texts, strict=True) for text in turn)]


def test_message_that_is_too_long_is_left_out(chat: tuple[object, ...], invoke: Invoke) -> None:
    stdin = b"hi\n" + b"a" * 100 + b"\nthere\n"
    result = invoke(*chat, "--max-model-len", 100, "--json", stdin=stdin)
    first, _ = answers(result)
    assert lengths(result) == [written("hi"), written("hi", first["text"], "there")]
    (error,) = result.err.splitlines()
    assert error.startswith(f"error: the message alone makes a prompt of {written('a' * 100)} tokens but the context")
    assert result.code == 2


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (TransferError("the disk is gone"), 1, "the disk is gone"),
        (RuntimeError("a surprise"), 1, "internal error (RuntimeError: a surprise)"),
    ],
)
@pytest.mark.parametrize("tokens", [0, 3])
def test_error_keeps_the_conversation(
    tokens: int,
    error: Exception,
    code: int,
    words: str,
    chat: tuple[object, ...],
    invoke: Invoke,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise error

    original, failed = llm.Engine.step, []

    def step(self: llm.Engine, *values: Any) -> Any:
        if not tokens and not failed:
            failed.append(True)
            fail()
        return original(self, *values)

    monkeypatch.setattr(llm.Engine, "step", step)
    if tokens:
        at_token(tokens, fail, monkeypatch)
    result = invoke(*chat, "--json", stdin=b"hi\nthere\n")
    assert result.code == code
    assert result.err == f"error: {words}. The conversation is kept; send the message again\n"
    *partial, last = answers(result)
    if tokens:
        assert len(partial[0]["token_ids"]) == tokens
        assert lengths(result)[-1] == written("hi", partial[0]["text"], "there")
    else:
        assert (partial, lengths(result)) == ([], [written("there")])
    assert last["finish_reason"] == "length"


def test_message_that_the_template_rejects(checkpoints: Path, tmp_path: Path, invoke: Invoke) -> None:
    model = copy_of(checkpoints / "target", tmp_path)
    template = model / "chat_template.jinja"
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    template.write_text(refusal + template.read_text())
    stdin = b"hi\n/system brief\nthere\n/system\nagain\n"
    result = invoke("chat", model, *SHORT, "--json", stdin=stdin)
    first, _ = answers(result)
    assert lengths(result) == [written("hi"), written("hi", first["text"], "again")]
    assert "rejects these messages (no system role)" in result.err
    assert result.code == 2
    invoke("chat", model, *PLAIN, "--system", "brief", stdin=b"").refused(2, "no system role")


def test_input_that_is_not_text(chat: tuple[object, ...], invoke: Invoke) -> None:
    invoke(*chat, stdin=b"caf\xe9\n").refused(2, "standard input is not UTF-8")


def test_closed_output_ends_a_saved_conversation(chat: tuple[object, ...], invoke: Invoke, tmp_path: Path) -> None:
    save = tmp_path / "saved.json"
    reading, writing = os.pipe()
    os.close(reading)
    with suppress(BrokenPipeError), open(writing, "w", encoding="utf-8") as closed:  # noqa: PTH123
        assert invoke(*chat, "--save", save, stdin=b"hi\nthere\n", stdout=closed).code == 1
    assert [message["role"] for message in json.loads(save.read_text())["messages"]] == ["user", "assistant"]


# ---- files


def test_conversation_is_saved_and_continued(chat: tuple[object, ...], invoke: Invoke, tmp_path: Path) -> None:
    save = tmp_path / "saved.json"
    invoke(*chat, "--save", save, "--system", "brief", "--json", stdin=b"hi\n").succeeded()
    saved = json.loads(save.read_text())
    assert saved["model"] == str(chat[1])
    assert [message["role"] for message in saved["messages"]] == ["system", "user", "assistant"]
    invoke(*chat, "--save", save, stdin=b"").refused(2, f"{save} exists", f"--load {save}")
    on = invoke(*chat, "--load", save, "--save", save, "--json", stdin=b"there\n").succeeded()
    texts = [message["content"] for message in saved["messages"]]
    assert lengths(on) == [len("system: brief\n") + written(*texts[1:], "there")]
    assert len(json.loads(save.read_text())["messages"]) == 5


def test_reset_keeps_the_saved_conversation(chat: tuple[object, ...], invoke: Invoke, tmp_path: Path) -> None:
    save = tmp_path / "saved.json"
    (tmp_path / "saved-2.json").write_text("another file")
    result = invoke(*chat, "--save", save, stdin=b"hi\n/reset\nthere\n").succeeded()
    assert f"the new one is saved to {tmp_path / 'saved-3.json'}" in result.err
    for name, text in (("saved.json", "hi"), ("saved-3.json", "there")):
        assert json.loads((tmp_path / name).read_text())["messages"][0]["content"] == text
    assert (tmp_path / "saved-2.json").read_text() == "another file"


def test_save_overwrites_only_its_own_file(chat: tuple[object, ...], invoke: Invoke, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("precious")
    own = tmp_path / "own.json"
    stdin = f"hi\n/save {other}\n/save {own}\nthere\n/save {own}\n".encode()
    result = invoke(*chat, stdin=stdin)
    assert result.code == 2
    assert f"error: {other} exists; choose another file" in result.err
    assert other.read_text() == "precious"
    assert len(json.loads(own.read_text())["messages"]) == 4


def test_file_that_cannot_be_saved_does_not_end_the_conversation(
    chat: tuple[object, ...], invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    at_token(1, lambda: shutil.rmtree(place), monkeypatch)
    result = invoke(*chat, "--save", place / "saved.json", "--json", stdin=b"hi\nthere\n")
    assert len(answers(result)) == 2
    assert result.err.count("error: cannot write") == 2
    assert result.code == 2


@pytest.mark.usefixtures("_no_weights")
def test_wrong_files_are_refused_before_anything_is_loaded(
    chat: tuple[object, ...], invoke: Invoke, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("hello")
    invoke(*chat, "--load", tmp_path / "text", stdin=b"").refused(2, "is not a saved conversation", "not JSON")
    invoke(*chat, "--load", tmp_path / "nowhere", stdin=b"").refused(2, "cannot read", "check the path")
    invoke(*chat, "--save", "/nowhere/file", stdin=b"").refused(2, "cannot write /nowhere/file")


# ---- Ctrl-C


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)  # until the main thread has handled it


@pytest.fixture
def _own_ctrl_c() -> Iterator[None]:
    """Set Python's own SIGINT handler, which a session started in the background may lack, and check it at the end."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler  # restored by the code


@pytest.mark.usefixtures("_own_ctrl_c")
def test_ctrl_c_stops_an_answer_but_not_the_conversation(
    chat: tuple[object, ...], invoke: Invoke, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    at_token(3, press_ctrl_c, monkeypatch)
    result = invoke(*chat, "--json", stdin=b"hi\nthere\n").succeeded()
    first, second = answers(result)
    assert (first["finish_reason"], len(first["token_ids"])) == ("interrupted", 3)
    assert lengths(result)[1] == written("hi", first["text"], "there")
    assert second["finish_reason"] == "length"
    assert result.err == "(stopped)\n"
    at_token(3, lambda: [press_ctrl_c(), press_ctrl_c()], monkeypatch)
    save = tmp_path / "saved.json"
    twice = invoke(*chat, "--save", save, stdin=b"hi\nthere\n")
    assert twice.code == 130  # a second Ctrl-C ends a conversation without a terminal
    assert [message["content"] for message in json.loads(save.read_text())["messages"]] == ["hi", first["text"]]
