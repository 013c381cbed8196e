"""Documentation: Python blocks and README commands run, links and options exist, pages keep their form."""

from __future__ import annotations

import importlib.util
import io
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import typer.main

from spmoe.bench.scenario import read_scenario
from spmoe.cli.main import app, main
from spmoe.registry import DRAFTERS, EVICTION_POLICIES, PREFETCH_POLICIES

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
CARDS = [ROOT / name / "README.md" for name in ("src/spmoe/pair", "extras/fine", "extras/diverse", "examples")]

MAX_README_LINES = 170
MAX_PROSE_COLUMNS = 100
MAX_TABLE_COLUMNS = 8
MAX_IMAGE_BYTES = 100_000


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
    """Return the fenced blocks of a page; `<!-- not run -->` on the line before a block means that it is not run."""
    found: list[Block] = []
    lines = page.read_text().splitlines()
    opened: tuple[int, str] | None = None
    for number, line in enumerate(lines):
        if not line.lstrip().startswith("```"):
            continue
        if opened is None:
            opened = (number, line.strip().removeprefix("```").strip())
        else:
            start, language = opened
            text = "\n".join(lines[start + 1 : number])
            found.append(Block(page, start + 1, language, text, lines[start - 1].strip() != "<!-- not run -->"))
            opened = None
    assert opened is None, f"{page}: a block is not closed"
    return found


BLOCKS = [block for page in PAGES for block in blocks(page)]
PYTHON = [block for block in BLOCKS if block.language == "python" and block.run]


def commands(page: Path, *, include_not_run: bool = False) -> list[str]:
    """Return the `spmoe` commands of a page's shell blocks, one line each."""
    shell = [block for block in BLOCKS if block.page == page and block.language in ("bash", "console")]
    shell = [block for block in shell if block.run or include_not_run]
    lines = [line for block in shell for line in block.text.replace("\\\n", " ").splitlines()]
    return [line.removeprefix("$ ") for line in lines if line.removeprefix("$ ").startswith("spmoe ")]


def is_pattern(command: str) -> bool:
    """Return whether the reader has to replace something: `<model>` or MODEL_DIR."""
    return bool(re.search(r"<[^>]*>|\b[A-Z][A-Z_]+\b", command))


def names_hub_model(command: str) -> bool:
    """Return whether the command would download a model."""
    words = shlex.split(command, comments=True)
    return any(re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", word) and not Path(word).exists() for word in words)


COMMANDS = commands(README)
RUNNABLE = [command for command in COMMANDS if not is_pattern(command) and not names_hub_model(command)]


@pytest.fixture(scope="module")
def docs_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one cache directory for everything that the pages run."""
    return tmp_path_factory.mktemp("docs-home")


@pytest.fixture(autouse=True)
def _run_in_empty_directory(docs_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPMOE_HOME", str(docs_home))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)


def test_pages_have_python_blocks_and_commands() -> None:
    assert PYTHON
    assert RUNNABLE


@pytest.fixture
def _registries_restored() -> Iterator[None]:
    """Unregister afterwards what a block has registered."""
    registries = (PREFETCH_POLICIES, EVICTION_POLICIES, DRAFTERS)
    before = [set(registry.names()) for registry in registries]
    yield
    for registry, names in zip(registries, before, strict=True):
        for name in set(registry.names()) - names:
            del registry._classes[name]


@pytest.mark.usefixtures("_registries_restored")
@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_block_runs(block: Block) -> None:
    exec(compile(block.text, str(block), "exec"), {"__name__": "__main__"})


TOML = [block for block in BLOCKS if block.language == "toml"]


@pytest.mark.parametrize("block", [block for block in TOML if "configuration.md" in str(block)], ids=str)
def test_settings_example_is_valid(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "spmoe.toml"
    file.write_text(block.text)
    monkeypatch.setattr(sys, "argv", ["spmoe", "run", "--config", str(file), "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code


@pytest.mark.parametrize("block", [block for block in TOML if "configuration.md" not in str(block)], ids=str)
def test_scenario_example_is_valid(block: Block, tmp_path: Path) -> None:
    (tmp_path / "extras").symlink_to(ROOT / "extras")
    file = tmp_path / "scenarios" / "example.toml"
    file.parent.mkdir()
    file.write_text(block.text)
    assert read_scenario(file)


@pytest.mark.parametrize("command", RUNNABLE)
def test_command_runs(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = shlex.split(command, comments=True)
    if arguments[1] == "run" and "--max-tokens" not in arguments:
        arguments += ["--max-tokens", "8"]  # the default only takes longer
    if arguments[1] == "bench":
        arguments += ["--output-len", "4", "--repeat", "1"]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_exist(page: Path) -> None:
    """Commands that are not run count too."""
    verbs = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for command in commands(page, include_not_run=True):
        verb, *words = shlex.split(command, comments=True)[1:]
        if verb.startswith("-") or is_pattern(verb):
            continue
        found = verbs[verb]
        if hasattr(found, "commands"):  # a command group
            found, words = found.commands[words[0]], words[1:]
        known = {name for parameter in found.params for name in (*parameter.opts, *parameter.secondary_opts)}
        known |= {"--help"}
        assert {word.split("=")[0] for word in words if word.startswith("--")} <= known, command


def prose_lines(page: Path) -> list[tuple[int, str]]:
    """Return the numbered lines of a page outside of fenced and indented code and tables."""
    found, fenced = [], False
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith(("|", "    ", "<!--")):
            found.append((number, line))
    return found


@pytest.mark.parametrize("page", [*PAGES, *CARDS], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)\s#]+)[^)]*\)", prose)
    broken = [link for link in targets if not re.match(r"\w+:", link) and not (page.parent / link).exists()]
    assert not broken


@pytest.mark.parametrize("page", [*PAGES, *CARDS], ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_is_wrapped(page: Path) -> None:
    """A longer line may hold only a link or inline code, which cannot be broken."""
    unbreakable = re.compile(r"!?\[[^\]]*\]\([^)]*\)|`[^`]*`")
    long_lines = [(number, line) for number, line in prose_lines(page) if len(line) > MAX_PROSE_COLUMNS]
    assert not [(number, line) for number, line in long_lines if " " in unbreakable.sub("", line).strip()]


@pytest.mark.parametrize("page", [*PAGES, *CARDS], ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_are_narrow(page: Path) -> None:
    rules = [line for line in page.read_text().splitlines() if re.fullmatch(r"\|( *:?-+:? *\|)+", line)]
    assert all(line.count("|") - 1 <= MAX_TABLE_COLUMNS for line in rules)


def test_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= MAX_README_LINES


def test_readme_picture_is_small() -> None:
    (picture,) = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README.read_text())
    assert (ROOT / picture).stat().st_size <= MAX_IMAGE_BYTES


def load_tool(name: str) -> ModuleType:
    """Import a script from tools/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_command_line_reference_is_up_to_date() -> None:
    tool = load_tool("cli_reference")
    assert tool.PAGE.read_text() == tool.render(), "run python tools/cli_reference.py"
