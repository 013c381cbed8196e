"""Files appear whole or not at all, whatever is in their place, and are read to the last byte."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from spmoe.errors import UsageError
from spmoe.files import read_into, replacing, write_text


def names(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for earlier in (None, "before"):
        with replacing(path) as place:
            place.write_text("half")
            assert (path.read_text() if path.exists() else None) == earlier
            place.write_text("before" if earlier is None else "after")
        assert names(tmp_path) == ["a.json"]
    assert path.read_text() == "after"


@pytest.mark.parametrize("failure", [OSError("full"), ValueError("no number"), KeyboardInterrupt()])
def test_what_was_there_stays_where_writing_fails(tmp_path: Path, failure: BaseException) -> None:
    path = tmp_path / "a.json"
    path.write_text("before")

    def write() -> None:
        with replacing(path) as place:
            place.write_text("half")
            raise failure

    with pytest.raises(type(failure)):
        write()
    assert (path.read_text(), names(tmp_path)) == ("before", ["a.json"])


def test_links_and_permissions_stay(tmp_path: Path) -> None:
    there, link = tmp_path / "there.txt", tmp_path / "link.txt"
    there.write_text("before")
    there.chmod(0o640)
    link.symlink_to(there.name)
    write_text(link, "after")
    assert link.is_symlink()
    assert there.read_text() == "after"
    assert there.stat().st_mode & 0o777 == 0o640
    assert names(tmp_path) == ["link.txt", "there.txt"]


def test_a_pipe_is_written_as_it_is(tmp_path: Path) -> None:
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


def test_a_directory_that_takes_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("before")
    monkeypatch.setattr(os, "access", lambda place, mode: Path(place) != tmp_path)  # root may write everywhere
    with replacing(path) as place:
        assert place == path


def test_a_place_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot write .*a.txt \(No such file or directory\); choose another file"):
        write_text(tmp_path / "no" / "a.txt", "words")


def test_reads_go_on_to_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(100)))
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: whole(fd, [buffers[0][:7]], at))  # as systems may
    fd = os.open(path, os.O_RDONLY)
    try:
        buffer = bytearray(40)
        assert read_into(fd, memoryview(buffer), 10) == 40
        assert buffer == bytes(range(10, 50))
        assert read_into(fd, memoryview(buffer), 90) == 10, "which is all there is"
        assert read_into(fd, memoryview(buffer)[:0], 0) == 0
    finally:
        os.close(fd)
