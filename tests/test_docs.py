"""What the documentation tells people to type works: Python blocks run, commands run, links lead somewhere."""

from __future__ import annotations

import io
import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import typer.main

from spmoe.cli.main import app, main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


class Block(NamedTuple):
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    run: bool

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page; `<!-- not run -->` on the line before says that one is not to be run."""
    found: list[Block] = []
    lines = page.read_text().splitlines()
    pinned: tuple[int, str] | None = None
    for number, line in enumerate(lines):
        if not line.lstrip().startswith("```"):
            continue
        if pinned is None:
            pinned = (number, line.strip().removeprefix("```").strip())
        else:
            start, language = pinned
            text = "\n".join(lines[start + 1 : number])
            found.append(Block(page, start + 1, language, text, lines[start - 1].strip() != "<!-- not run -->"))
            pinned = None
    assert pinned is None, f"{page}: a block is not closed"
    return found


BLOCKS = [block for page in PAGES for block in blocks(page)]
PYTHON = [block for block in BLOCKS if block.language == "python" and block.run]


def commands(page: Path, *, all_of_them: bool = False) -> list[str]:
    """The `spmoe` commands of a page's shell blocks, a line each; of those that are not run too, if asked for."""
    shell = [block for block in BLOCKS if block.page == page and block.language in ("bash", "console")]
    shell = [block for block in shell if block.run or all_of_them]
    lines = [line for block in shell for line in block.text.replace("\\\n", " ").splitlines()]
    return [line.removeprefix("$ ") for line in lines if line.removeprefix("$ ").startswith("spmoe ")]


def is_pattern(command: str) -> bool:
    """Whether the reader has to put something in: `<model>` or MODEL_DIR."""
    return bool(re.search(r"<[^>]*>|\b[A-Z][A-Z_]+\b", command))


def names_hub_model(command: str) -> bool:
    """Whether a model would have to be downloaded."""
    words = shlex.split(command, comments=True)
    return any(re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", word) and not Path(word).exists() for word in words)


COMMANDS = commands(ROOT / "README.md")
RUNNABLE = [command for command in COMMANDS if not is_pattern(command) and not names_hub_model(command)]


@pytest.fixture(scope="module")
def docs_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache directory for everything that the pages run."""
    return tmp_path_factory.mktemp("docs-home")


@pytest.fixture(autouse=True)
def _elsewhere(docs_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPMOE_HOME", str(docs_home))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)


def test_there_is_something_to_check() -> None:
    assert PYTHON
    assert RUNNABLE


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_block_runs(block: Block) -> None:
    exec(compile(block.text, str(block), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("command", RUNNABLE)
def test_command_runs(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = shlex.split(command, comments=True)
    if arguments[1] == "run" and "--max-tokens" not in arguments:
        arguments += ["--max-tokens", "8"]  # the default only takes longer
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_exist(page: Path) -> None:
    """Also of the commands that are not run."""
    verbs = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for command in commands(page, all_of_them=True):
        verb, *words = shlex.split(command, comments=True)[1:]
        if verb.startswith("-") or is_pattern(verb):
            continue
        found = verbs[verb]
        if hasattr(found, "commands"):  # a verb of verbs
            found, words = found.commands[words[0]], words[1:]
        known = {name for parameter in found.params for name in parameter.opts} | {"--help"}
        assert {word.split("=")[0] for word in words if word.startswith("--")} <= known, command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)\s#]+)[^)]*\)", prose)
    broken = [link for link in targets if not re.match(r"\w+:", link) and not (page.parent / link).exists()]
    assert not broken
