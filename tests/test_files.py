"""Atomic writes and complete reads."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from spmoe.errors import UsageError
from spmoe.files import atomic_write, decode_json, decode_toml, read_into, write_text


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for earlier in (None, "before"):
        with atomic_write(path) as partial:
            partial.write_text("half")
            assert (path.read_text() if path.exists() else None) == earlier
            partial.write_text("before" if earlier is None else "after")
        assert names(tmp_path) == ["a.json"]
    assert path.read_text() == "after"


def test_content_and_name_are_on_the_disk_before_the_write_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the first sync, a crash of the machine may leave an empty file under the name; without the last, none."""
    happened: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def record_sync(fd: int) -> None:
        happened.append(("sync", Path(f"/proc/self/fd/{fd}").readlink().name))
        fsync(fd)

    def record_replace(source: Path, target: Path) -> None:
        happened.append(("replace", Path(target).name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", record_replace)
    write_text(tmp_path / "a.json", "words")
    partial = f".a.json.{os.getpid()}.partial"
    assert happened == [("sync", partial), ("replace", "a.json"), ("sync", tmp_path.name)]


@pytest.mark.parametrize("failure", [OSError("full"), ValueError("no number"), KeyboardInterrupt()])
def test_failed_write_keeps_the_previous_file(tmp_path: Path, failure: BaseException) -> None:
    path = tmp_path / "a.json"
    path.write_text("before")

    def write() -> None:
        with atomic_write(path) as partial:
            partial.write_text("half")
            raise failure

    with pytest.raises(type(failure)):
        write()
    assert (path.read_text(), names(tmp_path)) == ("before", ["a.json"])


def test_symbolic_links_and_permissions_are_kept(tmp_path: Path) -> None:
    target, link = tmp_path / "there.txt", tmp_path / "link.txt"
    target.write_text("before")
    target.chmod(0o640)
    link.symlink_to(target.name)
    write_text(link, "after")
    assert link.is_symlink()
    assert target.read_text() == "after"
    assert target.stat().st_mode & 0o777 == 0o640
    assert names(tmp_path) == ["link.txt", "there.txt"]


def test_pipes_and_devices_are_written_directly(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "through")
    reader.join(10)
    assert read == ["through"]
    assert pipe.is_fifo()
    write_text(Path(os.devnull), "nothing")
    assert Path(os.devnull).is_char_device()


def test_file_in_a_read_only_directory_is_written_directly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("before")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write everywhere
    with atomic_write(path) as partial:
        assert partial == path


def test_missing_directory_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot write .*a.txt \(No such file or directory\); choose another file"):
        write_text(tmp_path / "no" / "a.txt", "words")


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(100)))
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:7]], offset))
    fd = os.open(path, os.O_RDONLY)
    try:
        buffer = bytearray(40)
        assert read_into(fd, memoryview(buffer), 10) == 40
        assert buffer == bytes(range(10, 50))
        assert read_into(fd, memoryview(buffer), 90) == 10, "the file ends there"
        assert read_into(fd, memoryview(buffer)[:0], 0) == 0
    finally:
        os.close(fd)


def test_json_and_toml_that_are_nested_too_deeply() -> None:
    for text in ("[" * 100_000, '{"a":' * 100_000):
        with pytest.raises(ValueError, match="nested too deeply"):
            decode_json(text)
    with pytest.raises(ValueError, match="nested too deeply"):
        decode_toml("a = " + "[" * 100_000)


def test_json_and_toml_may_have_a_byte_order_mark() -> None:
    assert decode_json('\ufeff{"a": 1}') == decode_json('\ufeff{"a": 1}'.encode()) == {"a": 1}
    assert decode_toml("\ufeffa = 1") == {"a": 1}
