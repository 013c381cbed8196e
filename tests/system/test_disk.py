"""Disks: space, read speed, and the hub's cache."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path

import pytest

from spmoe.system import disk
from spmoe.system.disk import disk_of, hub_cache, hub_cache_size, measure_read_speed

MIB = 2**20


def test_directory_that_does_not_exist_yet(tmp_path: Path) -> None:
    found = disk_of(tmp_path / "a" / "b")
    assert (found.directory, found.existing, found.writable) == (tmp_path / "a" / "b", tmp_path, True)
    assert 0 < found.free <= found.total
    assert not (tmp_path / "a").exists()


def test_file_in_place_of_the_directory_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert not disk_of(tmp_path / "file").writable
    assert disk_of(tmp_path / "file" / "below").existing == tmp_path


def test_file_system_is_that_of_the_longest_mount_point() -> None:
    assert disk_of(Path("/proc/self")).file_system == "proc"


def test_read_speed_leaves_no_file(tmp_path: Path) -> None:
    speed = measure_read_speed(tmp_path, 16 * MIB)
    assert speed.bytes_per_second > 0
    assert list(tmp_path.iterdir()) == []


def test_read_speed_without_direct_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = fcntl.fcntl

    def refuse(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return call(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    speed = measure_read_speed(tmp_path, 16 * MIB)
    assert not speed.direct
    assert speed.bytes_per_second > 0


def test_interrupted_measurement_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(fd: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        measure_read_speed(tmp_path, 16 * MIB)
    assert list(tmp_path.iterdir()) == []


def test_nearly_full_disk_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: usage._replace(free=100 * MIB))
    with pytest.raises(OSError, match="too little free space"):
        measure_read_speed(tmp_path)


def test_hub_cache_is_measured_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HUGGINGFACE_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert hub_cache() == tmp_path / "hub"
    assert hub_cache_size() == disk.HubCacheSize(0, 0, 0)
    blobs = tmp_path / "hub" / "models--owner--name" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "abc").write_bytes(bytes(1000))
    (blobs / "def.incomplete").write_bytes(bytes(10))
    snapshot = blobs.parent / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(blobs / "abc")
    assert hub_cache_size() == disk.HubCacheSize(1, 1010, 10)
