"""Hostile files, names and model text on the command line: one clear line, and nothing that changes the terminal."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pytest
from cli_checkpoints import copy_of, edit_json

from spmoe.bench.prompts import find_prompts
from spmoe.cli.options import stream_text
from spmoe.engine import text
from spmoe.errors import SpmoeError
from spmoe.models import tokenizer
from spmoe.observe import progress
from spmoe.observe.announce import announcer

if TYPE_CHECKING:
    from conftest import Invoke

PROMPT = ("--draft", "none", "--prompt", "hello", "--max-tokens", "4")
DEEP = "[" * 100_000
ESCAPE = "\x1b]0;owned\x07"
SHOWN = r"\x1b]0;owned\x07"


class PanicException(BaseException):
    """Stands in for the exception of libraries in Rust."""


def panic(*values: object, **options: object) -> Any:
    raise PanicException("called `Option::unwrap()` on a `None` value")


# ---- nesting


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
def test_checkpoint_with_a_deeply_nested_file(name: str, checkpoints: Path, tmp_path: Path, invoke: Invoke) -> None:
    model = copy_of(checkpoints / "target", tmp_path)
    (model / name).write_text(DEEP)
    invoke("run", model, *PROMPT).refused(1, "download it again")


def test_deeply_nested_index_and_header(checkpoints: Path, tmp_path: Path, invoke: Invoke) -> None:
    model = copy_of(checkpoints / "sharded", tmp_path)
    (model / "model.safetensors.index.json").write_text(DEEP)
    invoke("run", model, *PROMPT).refused(1, "index.json is not JSON", "nested too deeply")
    invoke("info", model).refused(1, "nested too deeply")
    (model / "model.safetensors.index.json").unlink()
    for path in model.glob("*.safetensors"):
        path.unlink()
    (model / "model.safetensors").write_bytes(len(DEEP).to_bytes(8, "little") + DEEP.encode())
    invoke("run", model, *PROMPT).refused(1, "not a safetensors file", "nested too deeply")


def _trace(path: Path) -> None:
    np.savez(path, header=np.array(DEEP))


@pytest.mark.parametrize(
    ("write", "suffix", "command", "words"),
    [
        (DEEP, ".json", ("chat", "--load"), ("not a saved conversation", "nested too deeply")),
        (f"a = {DEEP}", ".toml", ("info", "--config"), ("is not TOML", "nested too deeply")),
        (f"a = {DEEP}", ".toml", ("bench", "--scenario"), ("is not TOML", "nested too deeply")),
        (DEEP, ".jsonl", ("bench", "--max-prompts", 1, "--prompts"), ("line 1", "is not JSON")),
        (DEEP, ".json", ("report", "--markdown"), ("line 1", "is not JSON")),
        (DEEP, ".json", ("profile", "--from"), ("is not a profile",)),
        (_trace, ".npz", ("trace", "replay"), ("is not a trace",)),
    ],
)
def test_deeply_nested_input(
    write: str | Callable[[Path], None],
    suffix: str,
    command: tuple[object, ...],
    words: tuple[str, ...],
    tmp_path: Path,
    invoke: Invoke,
) -> None:
    path = tmp_path / f"deep{suffix}"
    if isinstance(write, str):
        path.write_text(write)
    else:
        write(path)
    invoke(*command, path).refused(2, *words)


def test_prompts_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"prompt": "hello"}).encode() + b"\n")
    assert find_prompts(str(path)).prompts == ("hello",)


# ---- panics of libraries in Rust


def test_tokenizer_that_panics(checkpoints: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer.AutoTokenizer, "from_pretrained", panic)
        invoke("run", checkpoints / "target", *PROMPT).refused(1, "tokenizer", "Option::unwrap", "download it again")
    with monkeypatch.context() as patch:
        patch.setattr("transformers.PreTrainedTokenizerFast._encode_plus", panic)
        invoke("run", checkpoints / "target", *PROMPT).refused(2, "the tokenizer fails on this text", "Option::unwrap")
    with monkeypatch.context() as patch:
        patch.setattr("transformers.PreTrainedTokenizerFast._decode", panic)
        invoke("run", checkpoints / "target", *PROMPT).refused(1, "the tokenizer cannot decode", "Option::unwrap")


def test_text_stream_of_a_tokenizer_that_panics() -> None:
    found = text.TextStream(type("Tokenizer", (), {"decode": panic}), [], ())
    with pytest.raises(SpmoeError, match="the tokenizer cannot decode"):
        found.push(3)


def test_any_other_panic_is_one_line(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spmoe.engine.plan.make_plan", panic)
    result = invoke("info")
    assert (result.code, result.err.count("\n")) == (1, 1)
    assert "internal error (PanicException: called `Option::unwrap()`" in result.err


# ---- terminal escapes


def test_names_with_escapes_are_shown(checkpoints: Path, tmp_path: Path, invoke: Invoke) -> None:
    for command in (
        ("run", f"./{ESCAPE}", *PROMPT),
        ("report", "--markdown", f"./{ESCAPE}"),
        ("info", "--config", f"./{ESCAPE}"),
    ):
        invoke(*command).refused(2, SHOWN)
    invoke("run", "--prefetch", ESCAPE, *PROMPT).refused(2, SHOWN)
    model = copy_of(checkpoints / "target", tmp_path).rename(tmp_path / ESCAPE)
    for command in (("info", model), ("plan", model), ("run", model, "--dtype", "bfloat16", "--prompt", "hello")):
        result = invoke(*command).succeeded()
        assert "\x1b" not in result.err
        assert command[0] == "run" or ("\x1b" not in result.out and SHOWN in "".join(result.out.split()))
    edit_json(model / "config.json", model_type=ESCAPE)
    assert "\x1b" not in invoke("info", model).err


def test_template_errors_with_escapes_are_shown(checkpoints: Path, tmp_path: Path, invoke: Invoke) -> None:
    model = copy_of(checkpoints / "target", tmp_path)
    (model / "chat_template.jinja").write_text('{{ raise_exception("\x1b[2J no") }}')
    invoke("chat", model, "--draft", "none", stdin=b"").refused(2, r"rejects these messages (\x1b[2J no)")


def test_template_that_does_not_end(checkpoints: Path, tmp_path: Path, invoke: Invoke) -> None:
    model = copy_of(checkpoints / "target", tmp_path)
    (model / "chat_template.jinja").write_text('{{ "x" * 10**12 }}')
    invoke("chat", model, "--draft", "none", stdin=b"").refused(2, "is refused", "--chat-template")


class Output(io.StringIO):
    """Standard output that is a terminal, or not."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


class Pieces(list[str]):
    """Stands in for a generation."""

    @property
    def completion(self) -> Any:
        return SimpleNamespace(text="".join(self) + "\x1b[1mheld back")


@pytest.mark.parametrize(
    ("terminal", "expected"),
    [(True, "a\\x1b[31m\tb\n漢\\x1b[1mheld back\n"), (False, "a\x1b[31m\tb\n漢\x1b[1mheld back\n")],
)
def test_model_text_is_escaped_on_a_terminal_only(
    terminal: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", Output(terminal))
    pieces: Any = Pieces(["a\x1b", "[31m", "\tb\n", "漢"])
    stream_text(pieces, quiet=False)
    assert sys.stdout.getvalue() == expected  # type: ignore[attr-defined]


def test_progress_and_announcements_show_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Output(terminal=False))
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    with progress.progress_bar(f"converting {ESCAPE}") as report:
        report(0, 2)
        report(1, 2, ESCAPE)
    announcer(True)(f"writing {ESCAPE}")
    shown = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert "\x1b" not in shown
    assert shown.count(SHOWN) >= 3


# ---- Ctrl-C where no command runs

_INTERRUPT_AT_IMPORT = """
import os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
sys.argv = ["spmoe", "--version"]
runpy.run_module("spmoe", run_name="__main__")
"""
_INTERRUPT_AT_EXIT = """
import atexit, os, runpy, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)

if {in_thread}:
    threading.Thread(target=lambda: (threading.main_thread().join(), interrupt())).start()
else:
    atexit.register(interrupt)
sys.argv = ["spmoe", "--version"]
runpy.run_module("spmoe", run_name="__main__")
"""


def _interrupted(code: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "")
    return done


@pytest.mark.parametrize("module", ["typer", "spmoe.cli.bench", "spmoe.registry"])
def test_ctrl_c_during_imports(module: str) -> None:
    assert _interrupted(_INTERRUPT_AT_IMPORT.replace("{module!r}", repr(module))).stdout == ""


@pytest.mark.parametrize("in_thread", [False, True])
def test_ctrl_c_at_the_very_end(in_thread: bool) -> None:
    assert _interrupted(_INTERRUPT_AT_EXIT.replace("{in_thread}", str(in_thread))).stdout.startswith("spmoe ")


def test_ctrl_c_that_an_import_turns_into_another_error(
    checkpoints: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*values: object, **options: object) -> NoReturn:
        before = signal.signal(signal.SIGINT, lambda *_: None)  # a KeyboardInterrupt that a library swallows
        os.kill(os.getpid(), signal.SIGINT)
        signal.signal(signal.SIGINT, before)
        raise ModuleNotFoundError("Could not import module")

    for place in ("spmoe.engine.plan.make_plan", "spmoe.models.checkpoint.AutoConfig.from_pretrained"):
        with monkeypatch.context() as patch:
            patch.setattr(place, lost)
            result = invoke("info", checkpoints / "target")
        assert (result.code, result.out, result.err) == (130, "", "")


def test_ctrl_c_at_random_moments() -> None:
    code = "import spmoe.__main__ as entry; print('ready', flush=True); entry.main()"
    for delay in (random.uniform(0, 0.5) for _ in range(3)):
        with subprocess.Popen(
            [sys.executable, "-c", code, "--version"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"  # before, Python itself starts
            time.sleep(delay)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        assert (process.returncode in (0, 130, -signal.SIGINT), err) == (True, "")
