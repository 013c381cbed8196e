"""Cached files: kinds, models, states, deletion, and files that are not ours."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from spmoe.system import cache
from spmoe.system.cache import PRUNABLE, Kind, State, build_lock, delete, list_cache, mark_in_use
from spmoe.system.origin import Origin, OriginState, converter, fingerprint, origins_to_json, parse_origins

EXPERT_FILE = "mixtral-0123456789ab-bfloat16.safetensors"
QUANTIZED = "mixtral-0123456789ab-bfloat16-int4.safetensors"
HASH = "0123456789abcdef0123"
EXPERTS_VERSION = int(cache.EXPERTS_FORMAT.rpartition("-")[2])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Cache directory of a test."""
    path = tmp_path / "home"
    monkeypatch.setenv("SPMOE_HOME", str(path))
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with the files that identify a checkpoint."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


def origin_of(model: Path) -> Origin:
    return Origin("owner/mixtral", str(model), fingerprint(model))


def write_safetensors(path: Path, metadata: dict[str, str], nbytes: int = 100) -> Path:
    """Write a safetensors file of one tensor."""
    tensor = {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}
    header = json.dumps({"__metadata__": metadata, "experts": tensor}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(nbytes))
    return path


def write_experts(
    home: Path, origin: Origin | None = None, name: str = EXPERT_FILE, version: int = EXPERTS_VERSION, **metadata: str
) -> Path:
    meta = {"format": f"spmoe-experts-{version}", **metadata}
    if origin is not None:
        meta["origin"] = json.dumps(origins_to_json([origin]))
    return write_safetensors(home / "experts" / name, meta)


def write_profile(home: Path, values: object, name: str = HASH) -> Path:
    path = home / "profiles" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))
    return path


def only_entry() -> cache.CacheEntry:
    (entry,) = list_cache()
    return entry


# ---- kinds and models


def test_every_kind_is_listed_with_its_model(home: Path, model: Path) -> None:
    origin = origin_of(model)
    origins = origins_to_json([origin])
    write_experts(home, origin)
    write_experts(home, origin, QUANTIZED)
    write_profile(home, {"free_slots": 3, "origin": origins})
    write_profile(home, {"model": "/a/model", "threads": 1}, f"threads-{HASH}")
    for name in (f"governor-{HASH}", f"governor-{HASH}-4"):  # of one sequence, and of four
        write_profile(home, {"steps": 90, "origin": origins}, name)
    meta = {"format": "spmoe-predictor-1", "origin": json.dumps(origins)}
    write_safetensors(home / "predictors" / f"{HASH}.safetensors", meta)
    (home / "experts" / f".{EXPERT_FILE}.123.partial").write_bytes(b"half")
    entries = list_cache()
    assert len(entries) == 8
    assert {(entry.kind, entry.state, entry.belongs_to) for entry in entries} == {
        (Kind.EXPERTS, State.CURRENT, "owner/mixtral"),
        (Kind.GOVERNOR, State.CURRENT, "owner/mixtral"),
        (Kind.QUANTIZED_DRAFT, State.CURRENT, "owner/mixtral"),
        (Kind.PROFILE, State.CURRENT, "owner/mixtral"),
        (Kind.PROJECTION, State.CURRENT, "owner/mixtral"),
        (Kind.THREADS, State.UNKNOWN, "/a/model"),
        (Kind.PARTIAL, State.LEFTOVER, "unknown"),
    }


@pytest.mark.parametrize("label", ["bf16-packed", "int4-g128", "int8-channel", "fp8-block8x20", "bfloat16"])
def test_damaged_files_of_packed_experts_are_listed(home: Path, model: Path, label: str) -> None:
    path = write_experts(home, origin_of(model), EXPERT_FILE.replace(".", f"-{label}."))
    assert (only_entry().kind, only_entry().state) == (Kind.EXPERTS, State.CURRENT)
    path.write_bytes(b"")
    assert (only_entry().kind, only_entry().state) == (Kind.EXPERTS, State.DAMAGED)


def test_files_without_a_recorded_model_are_kept(home: Path) -> None:
    write_experts(home)
    write_profile(home, {"free_slots": 3})
    assert {(entry.state, entry.belongs_to) for entry in list_cache()} == {(State.UNKNOWN, "unknown")}
    assert State.UNKNOWN not in PRUNABLE


@pytest.mark.parametrize(
    "data", [None, 3, "x", [3], [{"name": "x"}], [{"name": 1, "directory": "", "fingerprint": ""}]]
)
def test_malformed_origins_count_as_unknown(data: object) -> None:
    assert parse_origins(data) == ()


def test_home_that_does_not_exist_or_is_a_file_is_an_empty_cache(home: Path) -> None:
    assert list_cache() == []
    home.write_text("a file")
    assert list_cache() == []


# ---- states


def test_changed_and_deleted_models_make_files_prunable(home: Path, model: Path) -> None:
    write_experts(home, origin_of(model))
    assert only_entry().state is State.CURRENT
    (model / "model.safetensors").write_bytes(b"other weights")
    assert only_entry().state is State.STALE
    (model / "config.json").unlink()
    assert only_entry().state is State.MODEL_GONE
    assert {State.STALE, State.MODEL_GONE} <= PRUNABLE


def test_fingerprint_follows_the_index(model: Path) -> None:
    (model / "extra.safetensors").write_bytes(b"named by the index alone")
    before = fingerprint(model)
    weights = {"a": "model.safetensors", "b": "extra.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    with_index = fingerprint(model)
    assert with_index != before
    origin = Origin("m", str(model), with_index)
    (model / "other.safetensors").write_bytes(b"not in the index")
    assert origin.state() is OriginState.UNCHANGED
    (model / "extra.safetensors").unlink()
    assert origin.state() is OriginState.CHANGED
    (model / "model.safetensors.index.json").write_text("[")
    assert origin.state() is OriginState.UNREADABLE


def test_unreadable_origin_is_not_prunable(home: Path, model: Path) -> None:
    origin = origin_of(model)
    (model / "model.safetensors.index.json").write_text("[")
    write_experts(home, origin)
    assert only_entry().state is State.UNKNOWN


@pytest.mark.parametrize(
    ("version", "state"),
    [
        (EXPERTS_VERSION - 1, State.OLD_FORMAT),
        (EXPERTS_VERSION, State.CURRENT),
        (EXPERTS_VERSION + 1, State.UNKNOWN),
    ],
    ids=["older", "same", "newer"],
)
def test_formats_of_other_versions(home: Path, model: Path, version: int, state: State) -> None:
    write_experts(home, origin_of(model), version=version)
    assert only_entry().state is state


@pytest.mark.parametrize(
    ("made_with", "state"), [(converter(), State.CURRENT), ("transformers 5.0.0.dev0", State.STALE)]
)
def test_experts_converted_by_another_version_are_stale(home: Path, model: Path, made_with: str, state: State) -> None:
    write_experts(home, origin_of(model), converter=made_with)
    assert only_entry().state is state


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "huge header": lambda path: path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:]),
    "no json": lambda path: path.write_bytes(path.read_bytes()[:8] + b"\xff" * 300),
    "other format": lambda path: write_safetensors(path, {"format": "x"}),
    "a list": lambda path: path.write_bytes(struct.pack("<Q", 3) + b"[1]"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_expert_file(home: Path, model: Path, damage: Callable[[Path], object]) -> None:
    damage(write_experts(home, origin_of(model)))
    assert only_entry().state is State.DAMAGED


def test_listing_does_not_count_as_use(home: Path, model: Path) -> None:
    path = write_experts(home, origin_of(model))
    os.utime(path, (1000, 2000))
    list_cache()
    assert path.stat().st_atime == 1000
    assert only_entry().last_used == 2000, "the later one of both times"
    fd = os.open(path, os.O_RDONLY)
    mark_in_use(fd)
    os.close(fd)
    assert (only_entry().modified, time.time() - only_entry().last_used < 60) == (2000, True)


# ---- files that are not ours


def test_other_files_and_links_are_not_listed(home: Path, tmp_path: Path, model: Path) -> None:
    elsewhere = write_experts(tmp_path / "elsewhere", origin_of(model))
    (home / "experts").mkdir(parents=True)
    (home / "profiles").mkdir()
    (home / "experts" / EXPERT_FILE).symlink_to(elsewhere)
    (home / "predictors").symlink_to(elsewhere.parent)
    (home / "experts" / "folder.safetensors").mkdir()
    (home / "experts" / "notes.safetensors").write_text("mine")
    (home / "experts" / "model.lock").touch()
    (home / "profiles" / "mine.json").write_text("{}")
    (home / "profiles" / "mine.partial").write_text("mine")
    (home / "chat-history").write_text("hello")
    assert list_cache() == []
    assert cache.linked_folders() == [home / "predictors"]


# ---- deletion


def test_deleted_file_is_gone(home: Path, model: Path) -> None:
    path = write_experts(home, origin_of(model))
    assert delete(only_entry()) is None
    assert not path.exists()


def test_file_in_use_is_kept(home: Path, model: Path) -> None:
    path = write_experts(home, origin_of(model))
    fd = os.open(path, os.O_RDONLY)
    try:
        mark_in_use(fd)
        assert delete(only_entry()) == "a running process uses it"
        assert path.exists()
    finally:
        os.close(fd)
    assert delete(only_entry()) is None


def test_file_that_is_being_built_is_kept(home: Path, model: Path) -> None:
    path = write_experts(home, origin_of(model))
    partial = path.with_name(f".{path.name}.123.partial")
    partial.write_bytes(b"half")
    with build_lock(path):
        states = {entry.path: entry.state for entry in list_cache()}
        assert states[partial] is State.BEING_WRITTEN
        assert State.BEING_WRITTEN not in PRUNABLE
        assert {delete(entry) for entry in list_cache()} == {"a running process uses it"}
    assert partial.exists()
    assert {delete(entry) for entry in list_cache()} == {None}
    assert not partial.exists()


def test_partial_profile_is_a_leftover_after_a_minute(home: Path) -> None:
    partial = write_profile(home, {}).with_name(f".{HASH}.json.123.partial")
    partial.write_text("{")
    assert State.BEING_WRITTEN in {entry.state for entry in list_cache()}
    os.utime(partial, (time.time() - 100,) * 2)
    (entry,) = (entry for entry in list_cache() if entry.path == partial)
    assert entry.state is State.LEFTOVER
    assert delete(entry) is None


def test_failed_deletion_says_why(home: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_experts(home, origin_of(model))

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    assert delete(only_entry()) == "Permission denied"
