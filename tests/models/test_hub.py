"""Models by hub id: in the local cache, looked at without a download, and downloaded, with the real hub client."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from hub_server import COMMIT, HubServer, hub_server
from quantized_checkpoints import is_expert, write_pair
from spmoe.errors import CheckpointError, SpmoeError, UsageError
from spmoe.models import hub
from spmoe.models.checkpoint import Checkpoint
from spmoe.models.load import expert_file_path
from spmoe.models.loaded import find_target
from spmoe.models.shipped import shipped_pair
from spmoe.system.headers import INDEX

NAME = "acme/small"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty hub cache, used offline."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Serve the shipped target as `acme/small`, in two shards, beside files that no run needs."""
    with hub_server(tmp_path / "cache", monkeypatch) as server:
        server.repositories[NAME] = shard(Path(shipped_pair()[0]), tmp_path / "repository")
        yield server


def shard(source: Path, place: Path) -> Path:
    """Copy a checkpoint, with its tensors in two files and an index, and add duplicates in other formats."""
    shutil.copytree(source, place)
    tensors = load_file(place / "model.safetensors")
    (place / "model.safetensors").unlink()
    names, weight_map = sorted(tensors), {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, place / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (place / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (place / "original").mkdir()
    for file in ("consolidated.safetensors", "extra.safetensors", "pytorch_model.bin", "model.onnx", "model.Q4.gguf"):
        (place / file).write_bytes(b"x" * 1000)
    for file in ("original/consolidated.00.pth", "original/params.json", "consolidated.params.json"):
        (place / file).write_bytes(b"x" * 1000)
    return place


def cache_commit(hub: Path, name: str, commit: str) -> Path:
    """Write the files that a download of this commit leaves in the cache."""
    repository = hub / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    shutil.copytree(shipped_pair()[1], snapshot)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    return snapshot


# ---- the local cache


@pytest.mark.parametrize("weights", [True, False])
def test_hub_id_is_found_in_the_cache(cache: Path, weights: bool) -> None:
    snapshot = cache_commit(cache, NAME, "a" * 40)
    found = Checkpoint.find(NAME, weights=weights)
    assert found.directory == snapshot
    assert (found.name, found.download_bytes) == (NAME, 0)


def test_new_commit_keeps_the_expert_file_path_and_changes_the_fingerprint(cache: Path) -> None:
    cache_commit(cache, NAME, "a" * 40)
    old = Checkpoint.find(NAME)
    os.utime(cache_commit(cache, NAME, "b" * 40) / "model.safetensors")  # other weights, downloaded just now
    new = Checkpoint.find(NAME)
    assert expert_file_path(old, torch.float32) == expert_file_path(new, torch.float32)
    assert old.fingerprint != new.fingerprint


@pytest.mark.parametrize("weights", [True, False])
def test_uncached_hub_id_is_rejected_offline(cache: Path, weights: bool) -> None:
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE"):
        Checkpoint.find("acme/absent", weights=weights)


def test_cache_without_all_weights_does_not_count(cache: Path) -> None:
    snapshot = cache_commit(cache, NAME, "a" * 40)
    assert hub.cached_model(NAME) == snapshot
    (snapshot / "model.safetensors").unlink()
    assert hub.cached_model(NAME) is None
    with pytest.raises(CheckpointError, match="does not hold all"):
        Checkpoint.find(NAME)


# ---- looking at a model without its weights


def test_headers_are_those_of_the_files(server: HubServer) -> None:
    local, remote = Checkpoint.find(str(server.repositories[NAME])), Checkpoint.find(NAME, weights=False)
    assert remote.tensors == local.tensors
    assert remote.config.to_dict().keys() == local.config.to_dict().keys()
    assert remote.dtype("auto") == local.dtype("auto")
    files = [p for p in server.repositories[NAME].iterdir() if p.name.startswith(("model-", "tokenizer"))]
    assert remote.download_bytes >= sum(path.stat().st_size for path in files)


def test_no_weight_file_is_fetched(server: HubServer, tmp_path: Path) -> None:
    Checkpoint.find(NAME, weights=False)
    weights = {path.name: path.stat().st_size for path in server.repositories[NAME].glob("model-*.safetensors")}
    assert all(0 < server.served[name] <= 100_001 < size for name, size in weights.items())  # the client's first range
    assert server.served.keys() <= {"config.json", "generation_config.json", INDEX, *weights}
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_declaration_in_its_own_file_is_fetched(server: HubServer, tmp_path: Path) -> None:
    pair = write_pair(Path(shipped_pair()[0]), tmp_path / "quantized", "gptq-own-file", select=is_expert)
    server.repositories["acme/quantized"] = pair.packed
    remote, local = Checkpoint.find("acme/quantized", weights=False), Checkpoint.find(str(pair.packed))
    assert remote.quantization == local.quantization
    assert remote.matrices.keys() == set(pair.quantized)


def test_dense_target_is_refused_before_the_download(server: HubServer) -> None:
    server.repositories["acme/dense"] = Path(shipped_pair()[1])
    with pytest.raises(UsageError, match="dense model"):
        find_target("acme/dense")
    assert server.served["model.safetensors"] < (Path(shipped_pair()[1]) / "model.safetensors").stat().st_size


# ---- downloads


def test_download_leaves_duplicates_out_and_is_announced_once(
    server: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Checkpoint.find(NAME, weights=False).download_bytes
    found = find_target(NAME)
    assert found.directory.name == COMMIT
    assert found.tensors == Checkpoint.find(str(server.repositories[NAME])).tensors
    present = {str(path.relative_to(found.directory)) for path in found.directory.rglob("*") if path.is_file()}
    assert {"config.json", INDEX, "tokenizer.json", "model-00001-of-00002.safetensors"} <= present
    left_out = ("consolidated", "extra", "original", "pytorch_model", "model.onnx", "model.Q4")
    assert not [file for file in present if file.startswith(left_out)]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"downloading {expected / 1e6:.1f} MB of {NAME} (")
    assert line.endswith("GB free")

    requests = server.requests
    assert Checkpoint.find(NAME, weights=False).directory == found.directory  # from the cache, without the network
    assert server.requests == requests
    served = server.served.total()
    assert Checkpoint.find(NAME).directory == found.directory
    assert server.served.total() == served
    assert capsys.readouterr().err == ""

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert Checkpoint.find(NAME).directory == found.directory


def test_download_without_a_terminal_reports_progress(
    server: HubServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_LINE_SECONDS", 0.02)
    server.delay = 0.1
    Checkpoint.find(NAME)
    first, *lines = capsys.readouterr().err.splitlines()
    total = first.removeprefix("downloading ").partition(" of ")[0]
    assert lines
    assert all(line.startswith(f"downloading {NAME}: ") and line.endswith(f" of {total}") for line in lines)


def test_interrupted_download_continues(server: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    directory = find_target(NAME).directory
    second = directory / "model-00002-of-00002.safetensors"
    size = second.stat().st_size
    second.resolve().unlink()
    second.unlink()
    capsys.readouterr()
    assert hub.cached_model(NAME) is None
    assert find_target(NAME).directory == directory
    assert f"{size / 1e6:.1f} MB of {NAME} (1 file)" in capsys.readouterr().err


def test_new_version_downloads_only_what_has_changed(server: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    old = find_target(NAME).directory
    server.commit = "d" * 40
    config = server.repositories[NAME] / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_max_length": 77}))
    capsys.readouterr()
    assert Checkpoint.find(NAME, weights=False).directory == old  # looking at a model uses the cache
    new = find_target(NAME).directory
    assert new.name == server.commit
    assert json.loads((new / "tokenizer_config.json").read_text())["model_max_length"] == 77
    assert f"of {NAME} (1 file)" in capsys.readouterr().err


def test_cached_model_is_used_when_the_hub_is_down(server: HubServer) -> None:
    directory = find_target(NAME).directory
    server.repositories.clear()
    assert Checkpoint.find(NAME).directory == directory


def test_download_that_does_not_fit_is_refused(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage: Any = type("Usage", (), {"total": 10**9, "free": 500_000})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"needs more than the 0\.5 MB .* HF_HOME"):
        Checkpoint.find(NAME)
    assert not list((tmp_path / "cache").rglob("model-*.safetensors"))


# ---- failures


def explain(name: str) -> str:
    """Return the message of looking at a model, which must be that of downloading it."""
    messages = []
    for weights in (False, True):
        with pytest.raises(SpmoeError) as caught:
            Checkpoint.find(name, weights=weights)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert "\n" not in messages[0]
    return messages[0]


def test_missing_repository(server: HubServer) -> None:
    assert "no public model of that name; check the spelling" in explain("acme/absent")


def test_gated_repository(server: HubServer) -> None:
    server.gated.add(NAME)
    assert f"is gated: accept its terms on {server.endpoint}/{NAME}" in explain(NAME)


def test_unreachable_hub(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # no server listens there
    assert "the hub cannot be reached" in explain(NAME)


def test_repository_of_gguf_files_names_its_origin(server: HubServer, tmp_path: Path) -> None:
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "model-Q4.gguf").write_bytes(b"GGUF")
    server.repositories["acme/gguf"] = tmp_path / "gguf"
    server.cards["acme/gguf"] = {"base_model": "acme/original"}
    message = explain("acme/gguf")
    assert "only GGUF files" in message
    assert "acme/original" in message


def test_repository_without_config_or_safetensors(server: HubServer, tmp_path: Path) -> None:
    place = tmp_path / "pickled"
    place.mkdir()
    server.repositories["acme/pickled"] = place
    assert "no config.json" in explain("acme/pickled")
    shutil.copy(Path(shipped_pair()[0]) / "config.json", place)
    (place / "pytorch_model.bin").write_bytes(b"x")
    assert "only safetensors are supported" in explain("acme/pickled")


def test_index_of_an_absent_file(server: HubServer) -> None:
    (server.repositories[NAME] / "model-00002-of-00002.safetensors").unlink()
    assert "lacks model-00002-of-00002.safetensors, which its index names" in explain(NAME)


def test_damaged_files_on_the_hub(server: HubServer) -> None:
    place = server.repositories[NAME]
    for file, data in (("model-00002-of-00002.safetensors", b"hello " * 100), (INDEX, b"{")):
        (place / file).write_bytes(data)
        with pytest.raises(CheckpointError, match=f"a file of {NAME} on the hub is damaged"):
            Checkpoint.find(NAME, weights=False)
        server.commit = "d" * 40
