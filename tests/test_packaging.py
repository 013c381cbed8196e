"""Packaging: package data, dependencies, files of the sdist, Dockerfile. `.ci/package` builds and runs the wheel."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "spmoe"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WITH_TORCH = {"triton", "matplotlib"}  # triton comes with torch's CUDA builds; matplotlib with the `report` extra
# the `serve` and `ray` extras; starlette is fastapi's, h11 uvicorn's
WITH_SERVER = {"fastapi", "starlette", "uvicorn", "h11", "prometheus_client", "llguidance", "ray"}


def normalized(name: str) -> str:
    """Return a distribution's name as dependencies are compared."""
    return name.lower().replace("-", "_")


def test_package_data_covers_every_file() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["spmoe"]
    covered = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    others = {path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    missing = {path for path in others if path.suffix != ".py"} - covered
    assert not sorted(str(path.relative_to(PACKAGE)) for path in missing)
    assert all(any(PACKAGE.glob(pattern)) for pattern in patterns)


def test_every_imported_distribution_is_declared() -> None:
    declared = {
        re.split(r"[<>=;\[ ]", line)[0].lower().replace("-", "_") for line in PROJECT["project"]["dependencies"]
    }
    imported = {
        name.split(".")[0]
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)])
    }
    others = imported - set(sys.stdlib_module_names) - {"spmoe"} - WITH_TORCH - WITH_SERVER
    distributions = packages_distributions()
    undeclared = {
        name for name in others if not {normalized(found) for found in distributions.get(name, [])} & declared
    }
    # parts of declared ones: pydantic_core comes with pydantic
    assert undeclared <= {"pydantic_core"}


def test_sdist_names_what_exists() -> None:
    for line in (ROOT / "MANIFEST.in").read_text().splitlines():
        verb, *names = line.split()
        if verb in ("include", "graft"):
            assert not [name for name in names if not (ROOT / name).exists()]


def test_dockerfile_copies_what_is_sent_to_it() -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        name
        for words in re.findall(r"^COPY (.+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
        for name in words.split()[:-1]
    }
    assert copied == sent
    assert all((ROOT / name).exists() for name in copied)


def test_prompt_toolkit_is_imported_only_at_a_terminal() -> None:
    """Only `spmoe chat` at a terminal needs it, so that no other command waits for its import."""
    importers: dict[str, set[str]] = {"prompt_toolkit": set(), "spmoe.cli.terminal": set()}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:  # at the top, not inside functions
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                for library, files in importers.items():
                    if name == library or name.startswith(f"{library}."):
                        files.add(str(path.relative_to(PACKAGE)))
    assert importers == {"prompt_toolkit": {"cli/terminal.py"}, "spmoe.cli.terminal": set()}
