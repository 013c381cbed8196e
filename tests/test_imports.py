"""Structure of the source: import order, module docstrings, and the list of files in docs/architecture.md."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "spmoe"
FILES = sorted(SOURCE.rglob("*.py"))

# a package may import packages of earlier tiers, itself, and the leaves
TIERS = (
    {"types"},
    {"formats"},
    {"verify", "predict", "experts"},
    {"backends"},
    {"models"},
    {"draft"},
    {"engine"},
    {"replay"},
    {"bench", "serve"},
    {"cli"},
    {"__init__", "__main__"},
)
LEAVES = {  # importable from anywhere, each with the packages that it may import
    "interpreter": set(),
    "registry": {"errors"},
    "config": {"errors", "registry"},
    "errors": set(),
    "files": {"errors"},
    "observe": {"config", "errors", "files", "types"},
    "system": {"config", "errors", "files"},
}
MODEL_LIBRARIES = {"transformers", "tokenizers", "safetensors", "huggingface_hub"}  # only models/ may import these
SERVER_LIBRARIES = {"fastapi", "starlette", "uvicorn", "prometheus_client", "ray"}  # only serve/ may import these
TIER = {package: tier for tier, packages in enumerate(TIERS) for package in packages}


class Import(NamedTuple):
    """One imported module and the line of the import."""

    name: str
    line: int


def module_name(path: Path) -> str:
    """Return a file's dotted module name; the package's name for an `__init__.py`."""
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def package_of(module: str) -> str:
    """Return the top-level package (or leaf module) of spmoe that a module belongs to."""
    return module.split(".")[1] if "." in module else "__init__"


@cache
def parse(path: Path) -> ast.Module:
    """Return a file's syntax tree."""
    return ast.parse(path.read_text())


def imports(path: Path) -> Iterator[Import]:
    """Yield every import of a file, including imports inside functions and for type checkers only."""

    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write absolute imports"
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found = {name if name in MODULES else str(node.module) for name in names}
            yield from (Import(name, node.lineno) for name in sorted(found))


def allowed(importer: str, imported: str) -> bool:
    """Return whether a package may import from another one."""
    if importer == imported:
        return True
    if importer in LEAVES:
        return imported in LEAVES[importer]
    return imported in LEAVES or TIER[imported] < TIER[importer]


@pytest.fixture(params=FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def file(request: pytest.FixtureRequest) -> Path:
    """Each source file in turn."""
    path: Path = request.param
    return path


def test_every_package_has_a_tier() -> None:
    assert len(FILES) > 40
    assert {package_of(module) for module in MODULES} - TIER.keys() <= LEAVES.keys()


def test_packages_import_only_earlier_tiers(file: Path) -> None:
    package = package_of(module_name(file))
    wrong = [
        f"{file.relative_to(ROOT)}:{found.line}: {package} imports {found.name}"
        for found in imports(file)
        if found.name.split(".")[0] == "spmoe"
        and found.name != "spmoe"  # for example the version; its own imports are lazy
        and not allowed(package, package_of(found.name))
    ]
    assert not wrong


def test_import_order_allows_and_forbids() -> None:
    assert allowed("predict", "types")
    assert allowed("models", "experts")
    assert allowed("experts", "observe")
    assert allowed("cli", "bench")
    for importer, imported in [
        ("predict", "experts"),
        ("experts", "models"),
        ("experts", "verify"),
        ("engine", "cli"),
        ("engine", "serve"),
        ("bench", "serve"),
        ("backends", "models"),
        ("observe", "experts"),
        ("config", "types"),
        ("types", "engine"),
    ]:
        assert not allowed(importer, imported)


def test_only_models_imports_transformers(file: Path) -> None:
    names = {found.name.split(".")[0] for found in imports(file)}
    assert package_of(module_name(file)) == "models" or not names & MODEL_LIBRARIES


def test_only_serve_imports_server_libraries(file: Path) -> None:
    names = {found.name.split(".")[0] for found in imports(file)}
    assert package_of(module_name(file)) == "serve" or not names & SERVER_LIBRARIES


def test_only_backends_use_torch_cuda(file: Path) -> None:
    tree = parse(file)
    named = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    named |= {found.name for found in imports(file)}
    named |= {
        f"torch.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if node.module == "torch"
    }
    assert package_of(module_name(file)) == "backends" or not any(re.match(r"torch\.cuda\b", name) for name in named)


def test_no_import_cycles() -> None:
    graph = {
        module: {found.name for found in imports(path) if found.name in MODULES and found.name not in ("spmoe", module)}
        for module, path in MODULES.items()
    }
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join([*above[above.index(module) :], module])
        if module not in done:
            for imported in sorted(graph[module]):
                visit(imported, (*above, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_every_module_has_a_docstring(file: Path) -> None:
    assert ast.get_docstring(parse(file))


def test_architecture_page_lists_every_file_and_no_other() -> None:
    """Compare with the tree in docs/architecture.md, which may omit packages' own `__init__.py`."""
    lines = (ROOT / "docs" / "architecture.md").read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.strip() == "src/spmoe/")
    listed: set[str] = set()
    folders: list[tuple[int, str]] = []
    for line in lines[start + 1 :]:
        if line and not line.startswith("    "):
            break
        words = re.split(r"\s{2,}", line.strip())[0].split()
        indent = len(line) - len(line.lstrip())
        folders = [(depth, name) for depth, name in folders if depth < indent]
        for word in words:
            if word.endswith("/"):
                folders.append((indent, word))
            elif word.endswith(".py"):
                listed.add("".join(name for _, name in folders) + word)
    existing = {str(path.relative_to(SOURCE)) for path in FILES}
    assert not sorted(name for name in existing - listed if not name.endswith("/__init__.py"))
    assert not sorted(listed - existing)


def test_help_does_not_import_torch() -> None:
    code = """
import sys
import spmoe
print(*sorted({"torch", "transformers", "numpy", "fastapi", "uvicorn"} & sys.modules.keys()))
import typer.main
from spmoe.cli.main import app, main
verbs = [[verb] for verb in typer.main.get_command(app).commands] + [["trace", "record"], ["trace", "replay"]]
for words in [[], *verbs]:
    sys.argv = ["spmoe", *words, "--help"]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code
print(*sorted({"torch", "transformers", "numpy", "fastapi", "uvicorn"} & sys.modules.keys()))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, *shown, last = result.stdout.split("\n")[:-1]
    for option in ("--expert-memory", "--scenario", "--verify-layer-ms", "--markdown"):
        assert option in "".join(shown)
    assert (first, last) == ("", "")


@pytest.mark.parametrize(
    "words",
    [
        ["run", "/nowhere", "--prompt", "x"],
        ["info", "/nowhere"],
        ["run", "--draft", "/x/y"],
        ["bench", "/nowhere"],
        ["bench", "--draft", "/x/y"],
    ],
)
def test_wrong_path_is_rejected_without_importing_torch(words: list[str]) -> None:
    code = f"""
import sys
from spmoe.cli.main import main
sys.argv = ["spmoe", *{words!r}]
try:
    main()
except SystemExit as ended:
    print(ended.code, *sorted({{"torch", "transformers"}} & sys.modules.keys()))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "2\n"
    assert "there is no directory" in result.stderr
