"""The command cache: what is listed, what is deleted, and what is refused."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer

from spmoe.cli.main import main
from spmoe.system.cache import list_cache, mark_in_use

if TYPE_CHECKING:
    from conftest import Invoke

PROMPT = ("--prompt", "hello", "--max-tokens", 1)


@pytest.fixture(scope="module")
def made(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the files of real runs, and the model that they belong to beside it."""
    root = tmp_path_factory.mktemp("cache")
    model = shutil.copytree(checkpoints / "target", root / "model")
    arguments = ["run", model, "--draft", "self:int8", "-k", 2, *PROMPT]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPMOE_HOME", str(root / "home"))
        patch.setattr(sys, "argv", ["spmoe", *map(str, arguments)])
        patch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO()))
        patch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO()))
        with pytest.raises(SystemExit) as ended:
            main()
    assert not ended.value.code
    return root


@pytest.fixture
def filled(made: Path, own_home: Path) -> Path:
    """A copy of that cache, as the home of this test."""
    shutil.copytree(made / "home", own_home)
    return own_home


def listed(invoke: Invoke) -> dict[str, dict[str, Any]]:
    """Return the cached files by kind."""
    result = json.loads(invoke("cache", "ls", "--json").succeeded().out)
    return {entry["kind"]: entry for entry in result["entries"]}


def files(home: Path) -> list[str]:
    return sorted(path.name for path in home.rglob("*") if path.is_file() and path.suffix != ".lock")


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that prepares a terminal on standard input and the answer typed there."""

    def prepare(text: str) -> None:
        def confirm(question: str, err: bool) -> bool:
            if text == "^C":
                raise typer.Abort
            return text == "y"

        monkeypatch.setattr("spmoe.cli.cache._asks", lambda: True)
        monkeypatch.setattr(typer, "confirm", confirm)

    return prepare


# ---- ls


def test_files_of_a_run_are_listed_with_their_model(filled: Path, made: Path, invoke: Invoke) -> None:
    found = listed(invoke)
    assert {"experts", "quantized draft", "profile"} <= found.keys()
    for entry in found.values():
        assert entry["models"][0] == str(made / "model")
        assert entry["bytes"] == Path(entry["path"]).stat().st_size
        assert entry["last_used"] >= entry["modified"]
    assert found["experts"]["state"] == found["profile"]["state"] == "current"


def test_table_shows_every_file_and_the_total(filled: Path, made: Path, invoke: Invoke) -> None:
    result = invoke("cache", "ls").succeeded()
    for entry in list_cache():
        (line,) = (line for line in result.out.splitlines() if line.split()[0] == entry.name)
        assert str(made / "model") in line
        assert "current" in line
    assert f"{len(list_cache())} files" in result.out
    assert "prune" not in result.out


def test_empty_cache(own_home: Path, invoke: Invoke) -> None:
    assert invoke("cache", "ls").succeeded().out == f"0 files (0 B) in {own_home}\n"
    assert json.loads(invoke("cache", "ls", "--json").succeeded().out)["entries"] == []
    assert invoke("cache", "prune").succeeded().out == "deleted 0 files (0 B)\n"
    assert not own_home.exists()


def test_linked_folder_is_not_followed(filled: Path, tmp_path: Path, invoke: Invoke) -> None:
    (filled / "experts").rename(tmp_path / "elsewhere")
    (filled / "experts").symlink_to(tmp_path / "elsewhere")
    result = invoke("cache", "rm", "--all", "--yes").succeeded()
    assert "symbolic link" in result.err
    assert len(files(tmp_path / "elsewhere")) == 2


def test_unreadable_home_is_one_line(
    public_place: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch, as_ordinary_user: Callable[[], Any]
) -> None:
    home = public_place / "home"
    (home / "experts").mkdir(parents=True)
    home.chmod(0)
    monkeypatch.setenv("SPMOE_HOME", str(home))
    with as_ordinary_user():
        result = invoke("cache", "ls")
    result.refused(2, str(home), "Permission denied", "SPMOE_HOME")


# ---- rm


def test_rm_by_name_and_by_model(filled: Path, made: Path, invoke: Invoke) -> None:
    (profile,) = (entry for entry in list_cache() if entry.kind == "profile")
    result = invoke("cache", "rm", profile.name, "--yes").succeeded()
    assert "deleted 1 file " in result.out
    assert not profile.path.exists()
    rest = len(list_cache())
    result = invoke("cache", "rm", made / "model", "--yes", "--json").succeeded()
    assert len(json.loads(result.out)["deleted"]) == rest
    assert files(filled) == []


def test_rm_all(filled: Path, invoke: Invoke) -> None:
    (filled / "chat-history").write_text("mine")
    invoke("cache", "rm", "--all", "--yes").succeeded()
    assert files(filled) == ["chat-history"]


def test_rm_asks(filled: Path, invoke: Invoke, answer: Callable[[str], None]) -> None:
    before = files(filled)
    for text in ("n", "^C"):
        answer(text)
        result = invoke("cache", "rm", "--all")
        assert (result.code, files(filled)) == (1, before)
        assert all(entry.name in result.err for entry in list_cache()), "it shows the files before it asks"
        assert "nothing was deleted" in result.err
    answer("y")
    invoke("cache", "rm", "--all").succeeded()
    assert files(filled) == []


def test_rm_without_a_terminal_needs_yes(filled: Path, invoke: Invoke) -> None:
    before = files(filled)
    invoke("cache", "rm", "--all").refused(2, "--yes", "confirmation")
    assert files(filled) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("--all", "spmoe cache ls")),
        (("x", "--all"), ("--all",)),
        (("nothing-like-it",), ("nothing-like-it", "spmoe cache ls")),
        (("",), ("''",)),
    ],
)
def test_rm_of_unknown_names_is_refused(filled: Path, invoke: Invoke, arguments: tuple[str, ...], words: Any) -> None:
    before = files(filled)
    invoke("cache", "rm", *arguments, "--yes").refused(2, *words)
    assert files(filled) == before


def test_misspelled_name_is_corrected(filled: Path, invoke: Invoke) -> None:
    (name,) = (entry.name for entry in list_cache() if entry.kind == "experts")
    invoke("cache", "rm", name[:-1], "--yes").refused(2, f"did you mean {name}?")


def test_file_in_use_is_kept(filled: Path, invoke: Invoke) -> None:
    (experts,) = (entry for entry in list_cache() if entry.kind == "experts")
    fd = os.open(experts.path, os.O_RDONLY)
    try:
        mark_in_use(fd)
        result = invoke("cache", "rm", "--all", "--yes")
    finally:
        os.close(fd)
    assert result.code == 1
    assert f"kept {experts.name}: a running process uses it" in result.err
    assert files(filled) == [experts.path.name]


# ---- prune


def test_prune_deletes_only_what_is_useless(filled: Path, made: Path, invoke: Invoke) -> None:
    (experts,) = (entry for entry in list_cache() if entry.kind == "experts")
    leftover = filled / "experts" / f".{experts.path.name}.99.partial"
    leftover.write_bytes(b"half")
    assert "1 file (4 B) can be deleted with `spmoe cache prune`" in invoke("cache", "ls").succeeded().out
    before = files(filled)
    result = invoke("cache", "prune", "--dry-run").succeeded()
    assert f"{leftover.name}  4 B  leftover" in result.out
    assert files(filled) == before
    invoke("cache", "prune").refused(2, "--yes")
    assert files(filled) == before
    invoke("cache", "prune", "--yes").succeeded()
    assert files(filled) == sorted(set(before) - {leftover.name})


def test_prune_after_the_model_is_gone(filled: Path, made: Path, invoke: Invoke) -> None:
    (made / "model").rename(made / "moved")
    try:
        dry = json.loads(invoke("cache", "prune", "--dry-run", "--json").succeeded().out)
        assert {entry["state"] for entry in dry["would_delete"]} == {"model gone"}
        invoke("cache", "prune", "--yes").succeeded()
    finally:
        (made / "moved").rename(made / "model")
    assert files(filled) == []


def test_prune_by_age(filled: Path, invoke: Invoke) -> None:
    old, *others = list_cache()
    then = time.time() - 40 * 24 * 3600
    os.utime(old.path, (then, then))
    result = invoke("cache", "prune", "--older-than", "30d", "--dry-run").succeeded()
    assert f"{old.name}  " in result.out
    assert "not used for 40 days" in result.out
    invoke("cache", "prune", "--older-than", "6w", "--yes").succeeded()
    assert old.path.exists()
    invoke("cache", "prune", "--older-than", "900h", "--yes").succeeded()
    assert {entry.path for entry in list_cache()} == {entry.path for entry in others}


@pytest.mark.parametrize("age", ["30", "d", "30 days", "-1d", "1y", ""])
def test_wrong_age_is_refused(own_home: Path, invoke: Invoke, age: str) -> None:
    invoke("cache", "prune", "--older-than", age).refused(2, "--older-than", "30d", repr(age))


def test_deleted_experts_are_converted_again(filled: Path, made: Path, invoke: Invoke) -> None:
    invoke("cache", "rm", "--all", "--yes").succeeded()
    invoke("run", made / "model", *PROMPT, "--draft", "none").succeeded()
    assert [entry.kind for entry in list_cache()].count("experts") == 1


# ---- verify


def verified(invoke: Invoke, *arguments: object) -> dict[str, Any]:
    """Return the results of the verification by kind, after checking the exit code."""
    result = invoke("cache", "verify", *arguments, "--json")
    found = json.loads(result.out)
    assert result.code == (0 if found["sound"] else 1)
    return {entry["kind"]: entry for entry in found["entries"]}


def test_verify_finds_the_damaged_expert(filled: Path, invoke: Invoke) -> None:
    found = verified(invoke)
    assert {kind: (one["problem"], one["damaged"], one["differing"]) for kind, one in found.items()} == {
        kind: (None, [], None) for kind in ("experts", "quantized draft")
    }
    path = Path(found["experts"]["path"])
    data = bytearray(path.read_bytes())
    data[-10_000] ^= 1
    path.write_bytes(data)
    found = verified(invoke)
    assert (found["experts"]["damaged"], found["quantized draft"]["damaged"]) == ([[2, 3]], [])
    result = invoke("cache", "verify")
    assert result.code == 1
    assert f"{path.stem}  is damaged: expert 3 of layer 2\n" in result.out
    assert "`spmoe cache rm NAME`" in result.out
    assert path.exists(), "nothing is changed"


def test_verify_compares_with_the_model(filled: Path, made: Path, invoke: Invoke) -> None:
    name = listed(invoke)["experts"]["name"]
    assert verified(invoke, name, "--against-model")["experts"]["differing"] == []
    assert f"{name}  sound, and equal to its model\n" in invoke("cache", "verify", name, "--against-model").out
    weights = made / "model" / "model.safetensors"
    before = weights.read_bytes()
    try:
        header, end = json.loads(before[8 : 8 + int.from_bytes(before[:8], "little")]), len(before)
        start = 8 + int.from_bytes(before[:8], "little")
        expert = next(n for n in sorted(header) if ".experts.1." in n or n.endswith("down_proj"))
        position = start + header[expert]["data_offsets"][1] - 1  # the exponent of its last value
        weights.write_bytes(before[:position] + bytes([before[position] ^ 1]) + before[position + 1 : end])
        found = verified(invoke, name, "--against-model")["experts"]
        assert len(found["differing"]) == 1
        assert found["problem"].startswith("differs from its model: expert ")
        shutil.move(made / "model", made / "elsewhere")
        assert "no directory" in verified(invoke, name, "--against-model")["experts"]["problem"]
        shutil.move(made / "elsewhere", made / "model")
    finally:
        weights.write_bytes(before)


def test_verify_refuses_names_without_experts(filled: Path, invoke: Invoke) -> None:
    profile = listed(invoke)["threads" if "threads" in listed(invoke) else "profile"]["name"]
    invoke("cache", "verify", profile).refused(2, profile, "has no cached experts")
    invoke("cache", "verify", "nosuch").refused(2, "nosuch", "spmoe cache ls")


def test_verify_experts_option(checkpoints: Path, own_home: Path, invoke: Invoke) -> None:
    arguments = ("run", checkpoints / "target", *PROMPT)
    expected = invoke(*arguments).succeeded().out
    for value in ("once", "sample", "always"):
        assert invoke(*arguments, "--verify-experts", value).succeeded().out == expected
    invoke(*arguments, "--verify-experts", "never").refused(2, "verify_experts must be one of once, sample, always")
