"""Help: panels, plain texts, and completion by the shell; none of it imports torch."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import typer.main

from spmoe.cli.main import app
from spmoe.cli.panels import PANEL_OF, PANELS
from spmoe.config import DEVICES, DTYPES
from spmoe.registry import EVICTION_POLICIES, PREFETCH_POLICIES

if TYPE_CHECKING:
    from conftest import Invoke

WIDE = "300"  # columns: help texts are not wrapped


def commands(group: Any = None, before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the words and the object of every command."""
    for name, command in (group or typer.main.get_command(app)).commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*before, name))
        else:
            yield (*before, name), command


COMMANDS = dict(commands())


def shown(text: str) -> list[tuple[str, str]]:
    """Return (panel, row) for each line of a help text that is inside of a panel."""
    found, panel = [], ""
    for line in text.splitlines():
        if title := re.match(r"╭─ (\w+) ─", line):
            panel = title[1]
        elif line.startswith("│"):
            found.append((panel, line.strip("│* ")))
    return found


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_option_is_in_its_panel(
    command: tuple[str, ...], invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", WIDE)
    text = invoke(*command, "--help").succeeded().out
    rows = shown(text)
    options = [one for one in COMMANDS[command].params if one.param_type_name == "option"]
    missing = [one.name for one in options if one.name not in PANEL_OF]
    assert not missing, f"add these to a panel in cli/panels.py: {missing}"
    for option in options:
        (panel,) = {title for title, row in rows if row.split()[0] == option.opts[0]}
        assert panel == PANEL_OF[option.name], option.name
    assert [title for title, row in rows if row.startswith("--help")] == ["Output"]
    titles = list(dict.fromkeys(title for title, _ in rows if title != "Arguments"))
    assert titles == [panel for panel in PANELS if panel in titles], "panels have one order"
    assert "<" not in text, "Python's names of types"
    assert "\\[" not in text, "escaped markup"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_option_has_a_literal_help_text(
    command: tuple[str, ...], invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", WIDE)
    text = invoke(*command, "--help").succeeded().out
    assert COMMANDS[command].help
    for parameter in COMMANDS[command].params:
        assert parameter.help, parameter.name
        assert parameter.help.replace("\\[", "[") in text


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_paragraphs_are_wrapped_by_the_terminal_alone(
    command: tuple[str, ...], invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "2000")
    before, _, _ = invoke(*command, "--help").succeeded().out.partition("╭")
    assert not re.search(r"\S *\n *\S", before), "a line break within a paragraph"


def test_short_name_of_help(invoke: Invoke) -> None:
    for words in ((), ("run",), ("cache",), ("cache", "ls")):
        assert invoke(*words, "-h").succeeded().out == invoke(*words, "--help").succeeded().out


def test_brackets_are_not_markup(invoke: Invoke) -> None:
    assert "pip install 'spmoe[report]'" in invoke("report", "--help").succeeded().out


def test_spmoe_alone_lists_commands_in_panels(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    alone = invoke().succeeded()
    assert alone.err == ""
    assert alone.out == invoke("--help").succeeded().out
    rows = [(panel, row) for panel, row in shown(alone.out) if panel != "Options"]
    by_panel = {panel: [row.split()[0] for one, row in rows if one == panel] for panel, _ in rows}
    assert list(by_panel) == ["Use", "Look", "Measure"]
    assert by_panel["Use"] == ["demo", "run", "chat", "serve"]
    assert {"info", "families"} <= set(by_panel["Look"])
    assert {"bench", "report", "profile", "predictability", "trace", "fit-predictor"} <= set(by_panel["Measure"])
    assert all(row.endswith(".") for _, row in rows), "each command fits in one line"
    inner = [row for panel, row in shown(invoke("trace").succeeded().out) if panel == "Commands"]
    assert [row.split()[0] for row in inner] == ["record", "replay"]


@pytest.mark.parametrize(
    ("words", "hint"),
    [(("rnu",), "'run'"), (("trace", "recrd"), "'record'"), (("run", "--max-token", "1"), "--max-tokens")],
)
def test_misspelt_words_are_answered_with_the_nearest(words: tuple[str, ...], hint: str, invoke: Invoke) -> None:
    invoke(*words).refused(2, hint)


def test_help_and_completion_do_not_import_torch() -> None:
    code = """
import os, sys
from test_help import COMMANDS
from spmoe.cli.main import main
def call(*words, **variables):
    sys.argv = ["spmoe", *words]
    os.environ.update(variables)
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, words
for words in COMMANDS:
    call(*words, "--help")
call("--help")
call(_SPMOE_COMPLETE="complete_bash", COMP_WORDS="spmoe run --prefetch ", COMP_CWORD="3")
assert not {"torch", "transformers"} & sys.modules.keys()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=__file__.rsplit("/", 1)[0], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("run", "--prefetch", ""), PREFETCH_POLICIES.names()),
        (("run", "--prefetch", "next-gate+dr"), ("next-gate+draft-gate",)),
        (("bench", "--prefetch", "oracle,on"), ("oracle,on-demand",)),
        (("bench", "--eviction", "l"), tuple(name for name in EVICTION_POLICIES.names() if name.startswith("l"))),
        (("info", "--dtype", ""), tuple(sorted(DTYPES))),
        (("families", "--device", "c"), tuple(name for name in DEVICES if name.startswith("c"))),
        (("run", "--draft", "self"), ("self:int4", "self:int8")),
        (("run", "--num-spec"), ("--num-speculative-tokens",)),
        (("prof",), ("profile",)),
    ],
)
def test_completion(
    words: tuple[str, ...], expected: tuple[str, ...], invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_SPMOE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(("spmoe", *words)))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    assert tuple(invoke().succeeded().out.split()) == tuple(expected)
