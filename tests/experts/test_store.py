"""The expert file: contents, rebuilding, and failures while it is written."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from experts_helpers import LAYOUT, blob_of, fill, leftovers, spec_of, weights_of, within
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from spmoe.config import format_bytes
from spmoe.errors import StoreError
from spmoe.experts.store import (
    ALIGNMENT,
    BlobLayout,
    ExpertFile,
    StoreSpec,
    damaged_experts,
    ensure_expert_file,
    outdated_experts,
)
from spmoe.system.cache import delete, list_cache
from spmoe.system.origin import Origin
from spmoe.types import ExpertKey

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Path of the expert file."""
    return tmp_path / "cache" / "model.safetensors"


class RecordingFill:
    """Fill function that records its keys and can fail at one of them."""

    def __init__(self, fail_at: int | None = None, error: Exception | None = None) -> None:
        self.keys: list[ExpertKey] = []
        self._fail_at = fail_at
        self._error = error or RuntimeError("no such tensor")

    def __call__(self, key: ExpertKey, views: dict[str, Tensor]) -> None:
        if len(self.keys) == self._fail_at:
            raise self._error
        self.keys.append(key)
        fill(key, views)


def build(path: Path, spec: StoreSpec | None = None) -> list[ExpertKey]:
    """Open or build the file, check its contents, and return the experts that were written."""
    spec, filling = spec or spec_of(), RecordingFill()
    file = ensure_expert_file(path, spec, filling)
    try:
        assert file.spec == spec
        assert read_all(file) == {key: blob_of(key) for key in all_keys(spec)}
    finally:
        file.close()
    assert leftovers(path.parent) == [path.name]
    return filling.keys


def all_keys(spec: StoreSpec) -> list[ExpertKey]:
    return [ExpertKey(layer, e) for layer, count in enumerate(spec.experts) for e in range(count)]


def read_all(file: ExpertFile) -> dict[ExpertKey, bytes]:
    blobs = {key: os.pread(file.fd, file.spec.layout.nbytes, file.offset(key)) for key in all_keys(file.spec)}
    for key, blob in blobs.items():
        file.check(key, memoryview(blob))
    return blobs


# ---- layout


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    shapes=st.dictionaries(
        st.sampled_from(["gate", "up", "down", "bias"]),
        st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
        min_size=1,
    ),
    dtype=st.sampled_from(DTYPES),
)
def test_layout_round_trip(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> None:
    layout = BlobLayout.of(shapes, dtype)
    assert layout.nbytes % ALIGNMENT == 0
    assert BlobLayout.from_json(json.loads(json.dumps(asdict(layout)))) == layout
    blob = torch.zeros(layout.nbytes, dtype=torch.uint8)
    tensors = {name: (100 * torch.rand(shape)).to(dtype) for name, shape in shapes.items()}
    for name, view in layout.views(blob).items():
        view.copy_(tensors[name])
    for name, view in layout.views(blob.clone()).items():  # read back from the bytes
        assert view.dtype == dtype
        assert torch.equal(view, tensors[name]), "fields overlap"
    assert list(layout.views(blob)) == list(shapes)


def test_spec_counts_experts_of_all_layers() -> None:
    spec = spec_of((2, 0, 3))
    assert list(spec.keys()) == all_keys(spec)
    assert spec.count == 5
    assert spec.nbytes == 5 * LAYOUT.nbytes


# ---- contents


def test_file_is_a_safetensors_file(path: Path) -> None:
    spec = spec_of((2, 3))
    assert build(path, spec) == all_keys(spec)
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == {f"layers.{layer}.experts.{expert}" for layer, expert in all_keys(spec)}
        assert file.metadata()["fingerprint"] == "one"
        for key in all_keys(spec):
            blob = file.get_tensor(f"layers.{key.layer}.experts.{key.expert}")
            assert blob.numpy().tobytes() == blob_of(key)
            for name, tensor in spec.layout.views(blob.clone()).items():
                assert torch.equal(tensor, weights_of(key)[name])


def test_blobs_are_aligned_in_the_file(path: Path) -> None:
    file = ensure_expert_file(path, spec_of(), fill)
    assert [file.offset(key) % ALIGNMENT for key in all_keys(file.spec)] == [0] * file.spec.count
    file.close()
    file.close()
    assert file.fd == -1


def test_current_file_is_not_rebuilt(path: Path) -> None:
    assert build(path) != []
    before = path.stat().st_ino, path.stat().st_mtime_ns
    assert build(path) == []
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == before


def test_progress_is_reported_from_zero_to_all(path: Path) -> None:
    reported: list[tuple[int, int]] = []
    ensure_expert_file(path, spec_of((2, 2)), fill, lambda done, total: reported.append((done, total))).close()
    assert reported == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]


def test_announcement_comes_before_anything_is_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    announced: list[str] = []
    ensure_expert_file(path, spec_of(fingerprint="small"), fill, on_start=announced.append).close()
    assert announced == [], "a small file is written at once"
    path.unlink()
    monkeypatch.setattr("spmoe.experts.store.ANNOUNCED_BYTES", 1)

    def check_and_announce(text: str) -> None:
        assert leftovers(path.parent) == []
        announced.append(text)

    for _ in range(2):
        ensure_expert_file(path, spec_of(), fill, on_start=check_and_announce).close()
    (text,) = announced  # the second call finds the file
    assert text.startswith(f"writing {format_bytes(spec_of().nbytes)} of experts to {path} (once); ")
    assert text.endswith("are free there")


def test_origin_is_recorded_and_does_not_decide(path: Path) -> None:
    origin = Origin("owner/name", "/models/name", "abc")
    ensure_expert_file(path, replace(spec_of(), origins=(origin,)), fill).close()
    file = ensure_expert_file(path, spec_of(), RecordingFill(fail_at=0))  # not built again
    file.close()
    assert file.spec.origins == (origin,)


def test_file_without_an_origin_is_read(path: Path) -> None:
    build(path)
    rewrite_header(path, lambda header: header["__metadata__"].pop("origin") and None)
    file = ExpertFile.open(path)
    file.close()
    assert (file.spec, file.spec.origins) == (spec_of(), ())


def test_open_file_cannot_be_deleted_from_the_cache(tmp_path: Path) -> None:
    path = tmp_path / "experts" / "model-0123456789ab-float32.safetensors"
    file = ensure_expert_file(path, spec_of(), fill)
    (entry,) = list_cache(tmp_path)
    assert delete(entry) == "a running process uses it"
    file.close()
    assert delete(entry) is None
    assert not path.exists()


# ---- rebuilding


@pytest.mark.parametrize(
    "other",
    [
        spec_of(fingerprint="two"),
        spec_of(layout=replace(LAYOUT, nbytes=2 * LAYOUT.nbytes)),
        spec_of((3, 2)),
        spec_of((3, 3, 3)),
        spec_of((6,)),
        replace(spec_of(), converter="transformers 1"),
    ],
    ids=["fingerprint", "layout", "fewer experts", "more layers", "other layers", "converter"],
)
def test_file_of_another_spec_is_rebuilt(path: Path, other: StoreSpec) -> None:
    ensure_expert_file(path, other, lambda key, views: None).close()
    assert build(path) == all_keys(spec_of())
    assert build(path) == []


def rewrite_header(path: Path, change: Callable[[dict], object]) -> None:
    """Replace the header by a changed one, padded to the old length."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    changed = change(header)
    text = json.dumps(header if changed is None else changed).encode().ljust(length)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "a few bytes": lambda path: path.write_bytes(b"\x10\0\0"),
    "one byte short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "no blobs": lambda path: os.truncate(path, ALIGNMENT),
    "one byte long": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "huge header": lambda path: path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:]),
    "no header": lambda path: path.write_bytes(bytes(8) + path.read_bytes()[8:]),
    "header not text": lambda path: path.write_bytes(path.read_bytes()[:8] + b"\xff" * 4096),
    "header not an object": lambda path: rewrite_header(path, lambda header: [1, 2]),
    "no metadata": lambda path: rewrite_header(path, lambda header: header.pop("__metadata__") and None),
    "other format": lambda path: rewrite_header(path, lambda header: header["__metadata__"].update(format="x")),
    "no checksums": lambda path: rewrite_header(path, lambda header: header["__metadata__"].update(crc32="")),
    "checksums not hex": lambda path: rewrite_header(
        path, lambda header: header["__metadata__"].update(crc32="zz" * 24)
    ),
    "layout not an object": lambda path: rewrite_header(path, lambda header: header["__metadata__"].update(layout="3")),
    "layout not json": lambda path: rewrite_header(path, lambda header: header["__metadata__"].update(layout="{")),
    "experts not numbers": lambda path: rewrite_header(
        path, lambda header: header["__metadata__"].update(experts='["a", "b"]')
    ),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_file_is_rejected_and_rebuilt(path: Path, damage: Callable[[Path], object]) -> None:
    build(path)
    damage(path)
    with pytest.raises(StoreError, match="not a usable expert file") as caught:
        ExpertFile.open(path)
    assert str(path) in str(caught.value)
    assert build(path) == all_keys(spec_of())


def test_missing_file_is_a_store_error(path: Path) -> None:
    with pytest.raises(StoreError, match="not a usable expert file"):
        ExpertFile.open(path)


def test_flipped_bit_fails_the_checksum(path: Path) -> None:
    build(path)
    bad = ExpertKey(1, 1)
    file = ExpertFile.open(path)
    data = bytearray(path.read_bytes())
    data[file.offset(bad) + 100] ^= 4
    path.write_bytes(data)
    for key in all_keys(file.spec):
        blob = memoryview(os.pread(file.fd, LAYOUT.nbytes, file.offset(key)))
        if key == bad:
            for _ in range(2):
                with pytest.raises(StoreError, match=r"expert 1 of layer 1 .* checksum"):
                    file.check(key, blob)
        else:
            file.check(key, blob)
    file.close()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda spec: replace(spec, fingerprint="two"), "the checkpoint has changed"),
        (lambda spec: replace(spec, converter="transformers 6"), "it was made with transformers 5, and this is transf"),
        (lambda spec: replace(spec, experts=(6,)), "the checkpoint has changed"),
    ],
)
def test_rebuilding_says_why(path: Path, change: Callable[[StoreSpec], StoreSpec], why: str) -> None:
    spec = replace(spec_of(), converter="transformers 5")
    ensure_expert_file(path, spec, fill).close()
    announced: list[str] = []
    for _ in range(2):
        ensure_expert_file(path, change(spec), fill, on_start=announced.append).close()
    (text,) = announced  # also of small files, and once
    assert f"to {path} (again: {why}" in text
    assert "\n" not in text


def test_file_of_an_older_version_is_rebuilt(path: Path) -> None:
    build(path)
    rewrite_header(path, lambda header: header["__metadata__"].update(format="spmoe-experts-1"))
    announced: list[str] = []
    ensure_expert_file(path, spec_of(), fill, on_start=announced.append).close()
    assert "(again: the file is damaged or of an older format)" in announced[0]
    assert build(path) == []


# ---- verification


def flip(path: Path, file: ExpertFile, key: ExpertKey) -> None:
    """Change one bit of an expert in place."""
    with path.open("r+b") as opened:
        opened.seek(file.offset(key) + 100)
        byte = opened.read(1)[0]
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte ^ 4]))


def reads_until_noticed(path: Path, verify: str, limit: int = 100) -> int | None:
    """Return how many reads a change that comes after the first read goes unnoticed."""
    file, bad = ensure_expert_file(path, spec_of(), fill, verify=verify), ExpertKey(1, 1)
    try:
        read_all(file)
        flip(path, file, bad)
        for number in range(limit):
            blob = memoryview(os.pread(file.fd, LAYOUT.nbytes, file.offset(bad)))
            try:
                file.check(bad, blob)
            except StoreError:
                return number
    finally:
        file.close()
    return None


def test_changes_after_the_first_read_are_noticed_as_asked(path: Path) -> None:
    assert reads_until_noticed(path, "always") == 0
    sampled = reads_until_noticed(path, "sample")
    assert sampled is not None
    assert sampled < 16
    assert reads_until_noticed(path, "once") is None


def test_file_with_a_wrong_checksum_is_deleted_and_rebuilt(path: Path) -> None:
    build(path)
    file = ExpertFile.open(path)
    flip(path, file, ExpertKey(0, 2))
    with pytest.raises(StoreError, match="the file was deleted, and the next run writes it again"):
        read_all(file)
    assert not path.exists()
    assert build(path) == all_keys(spec_of())
    before = path.read_bytes()
    with pytest.raises(StoreError, match="the file was deleted"):
        read_all(file)
    file.close()
    assert path.read_bytes() == before, "the new file stays"


def test_file_that_cannot_be_deleted_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(path)
    file = ExpertFile.open(path)
    flip(path, file, ExpertKey(0, 0))

    def refuse(self: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(StoreError, match="delete that file to have it rebuilt"):
        read_all(file)
    file.close()


def test_damaged_and_outdated_experts_are_listed(path: Path) -> None:
    build(path)
    file, bad = ExpertFile.open(path), ExpertKey(1, 2)
    reported: list[tuple[int, int]] = []

    def other_fill(key: ExpertKey, views: dict[str, Tensor]) -> None:
        fill(ExpertKey(0, 0) if key == bad else key, views)

    def report(done: int, total: int) -> None:
        reported.append((done, total))

    assert (damaged_experts(file, report), outdated_experts(file, fill, report)) == ([], [])
    assert outdated_experts(file, other_fill, report) == [bad]
    assert reported == [(done, 6) for done in range(7)] * 3
    flip(path, file, bad)
    assert damaged_experts(file, report) == [bad]
    assert path.exists()
    os.truncate(path, file.offset(ExpertKey(1, 1)))
    assert damaged_experts(file, report) == [ExpertKey(1, 1), bad]
    file.close()


# ---- building


@pytest.mark.parametrize("at", [0, 3, 5])
def test_failed_build_leaves_no_file(path: Path, at: int) -> None:
    with pytest.raises(RuntimeError, match="no such tensor"):
        ensure_expert_file(path, spec_of(), RecordingFill(fail_at=at))
    assert leftovers(path.parent) == []
    assert build(path) == all_keys(spec_of()), "the lock is free again"


def test_failed_rebuild_keeps_the_previous_file(path: Path) -> None:
    build(path, spec_of(fingerprint="old"))
    before = path.read_bytes()
    with pytest.raises(RuntimeError, match="no such tensor"):
        ensure_expert_file(path, spec_of(), RecordingFill(fail_at=4))
    assert leftovers(path.parent) == [path.name]
    assert path.read_bytes() == before


def test_file_appears_when_it_is_complete(path: Path) -> None:
    def check_and_fill(key: ExpertKey, views: dict[str, Tensor]) -> None:
        assert not path.exists()
        assert len(leftovers(path.parent)) == 1
        fill(key, views)

    ensure_expert_file(path, spec_of(), check_and_fill, lambda done, total: None).close()
    assert leftovers(path.parent) == [path.name]


def test_partial_file_of_a_killed_build_is_removed(path: Path) -> None:
    path.parent.mkdir()
    (path.parent / f".{path.name}.99999.partial").write_bytes(b"half")
    other = path.parent / ".other.safetensors.99999.partial"
    other.write_bytes(b"another file")
    ensure_expert_file(path, spec_of(), fill).close()
    assert leftovers(path.parent) == [other.name, path.name]


BUILDER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from experts_helpers import blob_of, fill, spec_of
from spmoe.experts.store import ensure_expert_file
import os

path, name = Path(sys.argv[1]), sys.argv[2]
logs = path.parent.parent

def slow_fill(key, views):
    with (logs / "built").open("a") as log:
        log.write(f"{name} {key.layer} {key.expert}\\n")
    until = time.monotonic() + 60
    while len(list(logs.glob("calling-*"))) < 2 and time.monotonic() < until:
        time.sleep(0.01)  # until both processes have started
    fill(key, views)

(logs / f"calling-{name}").touch()
file = ensure_expert_file(path, spec_of(), slow_fill)
for key in spec_of().keys():
    blob = os.pread(file.fd, file.spec.layout.nbytes, file.offset(key))
    assert blob == blob_of(key)
    file.check(key, memoryview(blob))
print("good")
"""


def test_one_of_two_processes_builds_and_both_read_the_file(path: Path, tmp_path: Path) -> None:
    builders = [
        subprocess.Popen(
            [sys.executable, "-c", BUILDER, str(path), name, str(Path(__file__).parent)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("one", "two")
    ]
    try:
        for builder in builders:
            out, err = builder.communicate(timeout=100)
            assert builder.returncode == 0, err
            assert out.strip() == "good"
    finally:
        for builder in builders:
            builder.kill()
            builder.wait()
    lines = [line.split() for line in (tmp_path / "built").read_text().splitlines()]
    assert len({name for name, _, _ in lines}) == 1, "only one builds"
    assert [ExpertKey(int(layer), int(expert)) for _, layer, expert in lines] == all_keys(spec_of())
    assert leftovers(path.parent) == [path.name]


# ---- storage failures


@contextlib.contextmanager
def full_disk_error() -> Iterator[pytest.ExceptionInfo[StoreError]]:
    with pytest.raises(StoreError, match="disk is full") as caught:
        yield caught
    assert "SPMOE_HOME" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("writes", [0, 3])
def test_disk_that_fills_up_is_a_one_line_error(
    path: Path, monkeypatch: pytest.MonkeyPatch, writes: int, code: int
) -> None:
    write, done = os.write, []

    def fill_up(fd: int, data: memoryview) -> int:
        if len(data) >= LAYOUT.nbytes:  # only blobs are written in such sizes
            done.append(len(data))
            if len(done) > writes:
                raise OSError(code, os.strerror(code))
        return write(fd, data)

    monkeypatch.setattr(os, "write", fill_up)
    with full_disk_error():
        ensure_expert_file(path, spec_of(), fill)
    assert leftovers(path.parent) == []
    monkeypatch.undo()
    build(path)


def test_short_writes_are_continued(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:1000]))
    build(path)


def test_disk_with_too_little_space_is_not_written_to(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(path.parent.parent)
    filling = RecordingFill()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=spec_of().nbytes - 1))
    announced: list[str] = []
    with full_disk_error() as caught:
        ensure_expert_file(path, spec_of(), filling, on_start=announced.append)
    for words in (format_bytes(spec_of().nbytes), "1 B missing", "spmoe cache prune", "--dtype bfloat16"):
        assert words in str(caught.value)
    assert (filling.keys, announced) == ([], [])
    assert leftovers(path.parent) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=spec_of().nbytes))
    build(path)


def test_file_in_place_of_the_directory_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(StoreError, match="SPMOE_HOME") as caught:
        ensure_expert_file(tmp_path / "cache" / "model.safetensors", spec_of(), fill)
    assert "\n" not in str(caught.value)


@contextlib.contextmanager
def without_root() -> Iterator[None]:
    """Drop root privileges, which override directory permissions."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("mode", [0o555, 0o000], ids=["not writable", "not searchable"])
def test_inaccessible_directory_is_a_one_line_error(mode: int) -> None:
    directory = Path(tempfile.mkdtemp())  # not below pytest's own, which other users cannot enter
    filling = RecordingFill()
    try:
        directory.chmod(mode)

        def attempt() -> None:
            with without_root(), pytest.raises(StoreError, match=r"cannot write the expert file.*SPMOE_HOME") as caught:
                ensure_expert_file(directory / "model.safetensors", spec_of(), filling)
            assert "\n" not in str(caught.value)

        within(30.0, attempt)
    finally:
        directory.chmod(0o755)
        assert list(directory.iterdir()) == []
        directory.rmdir()
    assert filling.keys == []
