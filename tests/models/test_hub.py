"""Models by hub id, found in the hub's local cache."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from spmoe.errors import CheckpointError
from spmoe.models.checkpoint import Checkpoint
from spmoe.models.load import expert_file_path
from spmoe.models.shipped import shipped_pair


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def cache_commit(hub: Path, name: str, commit: str) -> Path:
    """Write the files that a download of this commit leaves in the cache."""
    repository = hub / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    shutil.copytree(shipped_pair()[1], snapshot)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    return snapshot


def test_hub_id_is_found_in_the_cache(hub: Path) -> None:
    snapshot = cache_commit(hub, "acme/small", "a" * 40)
    found = Checkpoint.find("acme/small")
    assert found.directory == snapshot
    assert found.name == "acme/small"


def test_new_commit_keeps_the_expert_file_path_and_changes_the_fingerprint(hub: Path) -> None:
    cache_commit(hub, "acme/small", "a" * 40)
    old = Checkpoint.find("acme/small")
    os.utime(cache_commit(hub, "acme/small", "b" * 40) / "model.safetensors")  # other weights, downloaded just now
    new = Checkpoint.find("acme/small")
    assert expert_file_path(old, torch.float32) == expert_file_path(new, torch.float32)
    assert old.fingerprint != new.fingerprint


def test_uncached_hub_id_is_rejected_offline(hub: Path) -> None:
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE"):
        Checkpoint.find("acme/absent")
