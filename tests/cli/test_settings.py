"""Options from a file and from the environment, -v and -q, and silence of other libraries."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from transformers import tokenization_utils_base

from spmoe.cli import output
from spmoe.models.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from conftest import Invoke

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes a settings file and returns its path."""

    def write_file(text: str) -> Path:
        path = tmp_path / "spmoe.toml"
        path.write_text(text)
        return path

    return write_file


def tokens(invoke: Invoke, *arguments: object) -> int:
    """Return how many tokens `spmoe run` generates."""
    found: dict[str, Any] = json.loads(invoke("run", *arguments, "--json").succeeded().out)
    return len(found["token_ids"])


def test_command_line_over_environment_over_file_over_default(
    checkpoints: Path, invoke: Invoke, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(f'prompt = "hello"\nmodel = "{checkpoints / "target"}"\nignore_eos = true\nmax-tokens = 3\n')
    assert tokens(invoke, "--config", file) == 3
    monkeypatch.setenv("SPMOE_MAX_TOKENS", "4")
    assert tokens(invoke, "--config", file) == 4
    assert tokens(invoke, "--config", file, "--max-tokens", 5) == 5
    monkeypatch.delenv("SPMOE_MAX_TOKENS")
    monkeypatch.setenv("SPMOE_CONFIG", str(file))
    assert tokens(invoke) == 3
    monkeypatch.setenv("SPMOE_MAX_TOKENS", "")
    assert tokens(invoke) == 3, "an empty variable is not set"


def test_tables_of_commands_win_over_keys_of_all(checkpoints: Path, invoke: Invoke, write: Write) -> None:
    file = write(
        f"""
        prompt = "hello"
        ignore-eos = true
        max_tokens = 3
        draft = "{checkpoints / "draft"}"
        [run]
        max_tokens = 2
        [bench]
        repeat = 1
        [trace.record]
        max_tokens = 9
        """
    )
    assert tokens(invoke, checkpoints / "target", "--config", file) == 2
    info = json.loads(invoke("info", checkpoints / "target", "--config", file, "--json").succeeded().out)
    assert info["draft"]["name"] == str(checkpoints / "draft"), "info has no --prompt, but a --draft"


def test_flags_lists_and_required_options(
    checkpoints: Path, invoke: Invoke, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.loads(invoke("run", checkpoints / "target", "-p", "hello", "--max-tokens", 24, "--json").out)["text"]
    run = ("run", checkpoints / "target", "-p", "hello", "--max-tokens", 24)
    later = [one for one in text[4:] if one not in text[:4]]
    file = write(f"stop = [{json.dumps(later[2])}, {json.dumps(later[0])}]\njson = true\noverlap = false\n")
    stopped = json.loads(invoke(*run, "--config", file).succeeded().out)
    assert stopped["text"] == text[: text.index(later[0])]
    monkeypatch.setenv("SPMOE_JSON", "0")
    assert invoke(*run, "--config", file).succeeded().out == stopped["text"] + "\n"
    monkeypatch.setenv("SPMOE_JSON", "TRUE")
    assert json.loads(invoke(*run).succeeded().out)["text"] == text
    monkeypatch.delenv("SPMOE_JSON")
    trace, prompts = tmp_path / "a.trace", tmp_path / "prompts.txt"
    prompts.write_text("hello\n")
    monkeypatch.setenv("SPMOE_OUTPUT", str(trace))
    monkeypatch.setenv("SPMOE_PROMPTS", str(prompts))
    invoke("trace", "record", checkpoints / "target", "--max-tokens", 4).succeeded()
    assert trace.stat().st_size > 0


def test_switches_of_all_commands_are_no_files(
    checkpoints: Path, invoke: Invoke, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPMOE_JSON", "1")
    wrong = ("bench", checkpoints / "target", "--config", write("json = true\n"), "-k", "0", "--prompts", "/nowhere")
    invoke(*wrong).refused(2, "/nowhere")  # and not --json, whose value is a file in this command
    invoke(*wrong[:3], write("[bench]\njson = true\n")).refused(2, "[bench]", "json must be a text")
    assert [path.name for path in tmp_path.iterdir()] == ["spmoe.toml"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('drfat = "ngram"', ("spmoe.toml", "unknown key drfat", "did you mean draft?")),
        ("wobble = 1", ("spmoe.toml", "unknown key wobble", "--help")),
        ("[run]\nrepeat = 1", ("[run]", "unknown key repeat")),
        ("[bench]\nmax_tokns = 1", ("[bench]", "unknown key max_tokns")),  # also for other commands
        ("[rnu]\ndraft = 'x'", ("unknown table [rnu]", "did you mean [run]?")),
        ("[trace.recod]\ndraft = 'x'", ("[trace]", "[recod]", "[record]")),
        ("[run.draft]\na = 1", ("[run]", "unknown table [draft]")),
        ("overlap = 'no'", ("spmoe.toml", "overlap must be true or false", "'no'")),
        ("draft = true", ("spmoe.toml", "draft must be a text", "True")),
        ("prefetch = ['a', 'b']", ("spmoe.toml", "prefetch must be", "commas")),
        ("max_tokens = 2020-01-01", ("spmoe.toml", "max-tokens must be a number")),
        ("stop = [[1]]", ("spmoe.toml", "stop must be a text or a list")),
        ("max_tokens = 'many'", ("--max-tokens", "integer", "max-tokens is set by", "spmoe.toml")),
        ("max_tokens = 0", ("at least 1, not 0", "max-tokens is set by")),
        ("dtype = 'float31'", ("'float31'", "dtype is set by")),
        ("[run\ndraft = 1", ("spmoe.toml", "is not TOML", "line 1")),
    ],
)
def test_bad_files_are_refused_in_one_line(text: str, words: tuple[str, ...], invoke: Invoke, write: Write) -> None:
    invoke("run", "--prompt", "x", "--config", write(text)).refused(2, *words)


def test_missing_and_unreadable_files(invoke: Invoke, tmp_path: Path) -> None:
    invoke("run", "--config", tmp_path / "none.toml").refused(2, "cannot read", "none.toml", "--config")
    invoke("run", "--config", tmp_path).refused(2, "cannot read", str(tmp_path))
    (tmp_path / "a.toml").write_bytes(b"\xff")
    invoke("bench", "--config", tmp_path / "a.toml").refused(2, "a.toml", "not UTF-8")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("SPMOE_OVERLAP", "maybe", ("SPMOE_OVERLAP must be 1 or 0, not 'maybe'",)),
        ("SPMOE_MAX_TOKENS", "many", ("--max-tokens", "set by SPMOE_MAX_TOKENS")),
        ("SPMOE_DTYPE", "float31", ("'float31'", "set by SPMOE_DTYPE")),
        ("SPMOE_MODEL", "/no/such/model", ("/no/such/model",)),
    ],
)
def test_bad_variables_are_refused_in_one_line(
    name: str, value: str, words: tuple[str, ...], invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    invoke("run", "--prompt", "x").refused(2, *words)


def test_errors_of_the_command_line_blame_nothing_else(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPMOE_DTYPE", "float32")
    result = invoke("run", "--prompt", "x", "--max-tokens", 0)
    result.refused(2, "max_tokens must be at least 1")
    assert "set by" not in result.err


def test_misspelt_variable_gets_a_note(checkpoints: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPMOE_EXPERT_MEMROY", "50%")
    monkeypatch.setenv("SPMOE_SOMETHING_ELSE", "1")
    run = ("run", checkpoints / "target", "--draft", "none", "-p", "hello", "--max-tokens", 2, "--json")
    (note,) = invoke(*run).succeeded().err.splitlines()
    assert note.startswith("note: SPMOE_EXPERT_MEMROY")
    assert note.endswith("did you mean SPMOE_EXPERT_MEMORY?")
    assert invoke(*run, "-q").succeeded().err == ""


# ---- -v and -q


@pytest.mark.parametrize("arguments", [("-q", "run"), ("run", "--quiet")])
def test_quiet_prints_only_the_result(arguments: tuple[str, ...], checkpoints: Path, invoke: Invoke) -> None:
    options = (checkpoints / "target", "-p", "hello", "--max-tokens", 4, "--link-gbps", 1)
    result = invoke(*arguments, *options).succeeded()
    assert result.err == ""
    assert result.out == invoke("run", *options).succeeded().out
    invoke(*arguments, "--max-tokens", 0).refused(2, "max_tokens")


def test_verbose_names_settings(
    checkpoints: Path, invoke: Invoke, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "log_debug_messages", lambda: asked.append(True))
    asked: list[bool] = []
    monkeypatch.setenv("SPMOE_MAX_TOKENS", "2")
    file = write("seed = 1\n")
    run = (checkpoints / "target", "-p", "hello", "--config", file)
    for words in (("run", *run, "-v"), ("-v", "run", *run)):
        lines = invoke(*words).succeeded().err.splitlines()
        assert {f"note: seed = 1 ({file})", "note: max-tokens = 2 (SPMOE_MAX_TOKENS)"} <= set(lines)
    assert len(asked) == 2
    assert "seed" not in invoke("run", *run).succeeded().err
    invoke("-v", "run", "-q").refused(2, "--verbose and --quiet")


# ---- other libraries


def test_warnings_of_libraries_are_hidden(checkpoints: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_text(prompt: str) -> str:
        warnings.warn("of no use to anybody", stacklevel=1)
        return prompt

    monkeypatch.setattr("spmoe.cli.run.read_text", read_text)
    run = ("run", checkpoints / "target", "-p", "hello", "--max-tokens", 2)
    with warnings.catch_warnings(record=True) as shown:
        assert "of no use" not in invoke(*run, "--json").succeeded().err
    assert not shown
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        invoke(*run, "-v").succeeded()
    assert [str(one.message) for one in shown] == ["of no use to anybody"]


def test_long_texts_cause_no_warning_of_the_tokenizer(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr(tokenization_utils_base.logger, "warning", warned.append)
    tokenizer = load_tokenizer(checkpoints / "target")
    assert tokenizer is not None
    tokenizer.model_max_length = 4
    assert len(tokenizer("hello there")["input_ids"]) == 11
    assert not warned
