"""Fixtures: the command line, called in this process, and tiny checkpoints to call it with."""

from __future__ import annotations

import io
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple, TextIO

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the hub client is first imported

import cli_checkpoints
from huggingface_hub import constants

from spmoe.cli.main import main


class Result(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    def refused(self, code: int, *words: str) -> None:
        """Check the exit code, for one line on standard error with all these words, and for no standard output.

        Notes of an engine that was built before the error are ignored, and the announcement of its expert file.
        """
        lines = [line for line in self.err.splitlines() if not line.startswith(("note: ", "writing "))]
        assert len(lines) == 1, self.err
        assert lines[0].startswith("error: ")
        assert "internal error" not in lines[0]
        assert not [word for word in words if word not in lines[0]], lines[0]
        assert (self.code, self.out) == (code, "")

    def succeeded(self) -> Result:
        """Check for exit code 0, and return the result."""
        assert self.code == 0, self.err
        return self


Invoke = Callable[..., Result]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the tiny checkpoints."""
    root = tmp_path_factory.mktemp("checkpoints")
    cli_checkpoints.build_all(root)
    return root


@pytest.fixture(scope="session")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache directory that tests share, so that experts are converted once."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(autouse=True)
def home(shared_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the engine use the shared cache directory, no network and no options of the user's environment."""
    for name in [one for one in os.environ if one.startswith("SPMOE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SPMOE_HOME", str(shared_home))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return shared_home


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the engine use an empty cache directory of this test's own, and return it."""
    path = tmp_path / "home"
    monkeypatch.setenv("SPMOE_HOME", str(path))
    return path


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Return a function that calls `spmoe` with arguments and bytes on standard input."""

    def call(*arguments: object, stdin: bytes = b"", stdout: TextIO | None = None) -> Result:
        out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["spmoe", *map(str, arguments)])
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
            patch.setattr(sys, "stdout", out if stdout is None else stdout)
            patch.setattr(sys, "stderr", err)
            with pytest.raises(SystemExit) as ended:
                main()
        return Result(int(ended.value.code or 0), _written(out), _written(err))

    return call


@pytest.fixture
def public_place() -> Iterator[Path]:
    """Yield a directory that every user may read, unlike pytest's own."""
    place = Path(tempfile.mkdtemp())
    place.chmod(0o755)
    yield place
    for path in place.iterdir():
        path.chmod(0o755)
    shutil.rmtree(place)


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Run as a user without root's rights, so that file permissions apply."""
    if os.geteuid() != 0:
        yield
        return
    try:
        os.seteuid(65534)
    except OSError:
        pytest.skip("runs as root, and cannot change the user")
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def as_ordinary_user() -> Callable[[], AbstractContextManager[None]]:
    """Return `ordinary_user`."""
    return ordinary_user


def _written(stream: io.TextIOWrapper) -> str:
    stream.flush()
    buffer = stream.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue().decode()
