"""Fingerprints of checkpoints, and the checks of indexes and headers before anything is read."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmoe.errors import CheckpointError
from spmoe.system import origin
from spmoe.system.headers import INDEX, StoredTensor, parse_header, read_header, weight_files
from spmoe.system.origin import Origin, OriginState, fingerprint

EXPERTS, ROWS, COLUMNS = 8, 64, 512  # of F32: 128 KiB per expert, 1 MiB per fused tensor
EXPERT_BYTES = 4 * ROWS * COLUMNS
PER_EXPERT = {f"experts.{expert}.{part}": [ROWS, COLUMNS] for expert in range(EXPERTS) for part in ("up", "down")}
FUSED = {f"experts.{part}": [EXPERTS, ROWS, COLUMNS] for part in ("up", "down")}


def write_checkpoint(directory: Path, shapes: dict[str, list[int]]) -> Path:
    """Write a checkpoint of one file, larger than what is hashed whole."""
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 4
        for count in shape:
            size *= count
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + os.urandom(end))
    return directory


def replace_keeping_times(path: Path, offset: int, content: bytes) -> None:
    """Overwrite a part of a file and give it its times back, as `cp -p` and image builders do."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


# ---- fingerprints


@pytest.mark.parametrize("shapes", [PER_EXPERT, FUSED], ids=["per expert", "fused"])
def test_any_replaced_expert_changes_the_fingerprint(tmp_path: Path, shapes: dict[str, list[int]]) -> None:
    model = write_checkpoint(tmp_path / "model", shapes)
    weights = model / "model.safetensors"
    assert weights.stat().st_size > origin._WHOLE_BYTES
    first = min(tensor.offset for tensor in read_header(model, weights.name).values())
    found = {fingerprint(model)}
    for part in range(2 * EXPERTS):
        replace_keeping_times(weights, first + part * EXPERT_BYTES, os.urandom(EXPERT_BYTES))
        found.add(fingerprint(model))
    assert len(found) == 1 + 2 * EXPERTS
    assert fingerprint(model) in found


def test_every_byte_of_a_small_file_counts(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", {"experts.0.up": [4, 4]})
    before = fingerprint(model)
    replace_keeping_times(model / "model.safetensors", (model / "model.safetensors").stat().st_size - 1, b"\x7f")
    assert fingerprint(model) != before


def test_config_index_time_and_header_count(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", PER_EXPERT)
    weights = model / "model.safetensors"
    found = [fingerprint(model)]
    (model / "config.json").write_text('{"top_k": 2}')
    found.append(fingerprint(model))
    (model / INDEX).write_text(json.dumps({"weight_map": {"experts.0.up": weights.name}}))
    found.append(fingerprint(model))
    os.utime(weights, ns=(0, 1))
    found.append(fingerprint(model))
    replace_keeping_times(weights, 0, weights.read_bytes()[:200].replace(b"experts.0.up", b"experts.0.UP"))
    found.append(fingerprint(model))
    assert len(set(found)) == len(found)


def test_copy_with_its_times_has_the_same_fingerprint(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", FUSED)
    copy = shutil.copytree(model, tmp_path / "copy")
    (copy / "README.md").write_text("not read")
    assert fingerprint(copy) == fingerprint(model)


def test_few_bytes_are_read_of_a_large_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_checkpoint(tmp_path / "model", PER_EXPERT)
    read: list[int] = []
    read_into = origin.read_into

    def count(fd: int, buffer: memoryview, offset: int) -> int:
        read.append(len(buffer))
        return read_into(fd, buffer, offset)

    monkeypatch.setattr(origin, "read_into", count)
    fingerprint(model)
    assert read == [4096] * len(PER_EXPERT)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 40_000), min_size=1, max_size=4), st.integers(1, 6), st.integers(1, 3))
def test_sampled_pages_lie_inside_their_experts(sizes: list[int], experts: int, dimensions: int) -> None:
    tensors, end = {}, 1000
    for number, size in enumerate(sizes):
        shape = (experts, *(1,) * (dimensions - 1))
        tensors[str(number)] = StoredTensor("U8", shape, "file", end, size * experts)
        end += size * experts
    pages = list(origin._pages(tensors))
    for tensor in tensors.values():
        parts = experts if dimensions == 3 and tensor.nbytes >= 4096 * experts else 1
        for part in range(parts):
            size = tensor.nbytes // parts
            first, page = tensor.offset + part * size, pages.pop(0)
            assert first <= page <= first + max(0, size - 4096)
    assert pages == []


# ---- indexes


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "../other/model.safetensors", "a/../../b.safetensors", "..", ".", "", "a\0b", "C:\\x", "\\x"],
)
def test_index_that_leads_out_of_the_directory_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="no file inside its directory"):
        weight_files("model", [], {"weight_map": {"a": "model.safetensors", "b": name}})
    model = write_checkpoint(tmp_path / "model", {"a": [1]})
    recorded = Origin("model", str(model), fingerprint(model))
    (model / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    assert recorded.state() is OriginState.UNREADABLE


def test_files_in_subdirectories_and_links_are_allowed(tmp_path: Path) -> None:
    """The hub's cache holds links to files beside the snapshot."""
    model = write_checkpoint(tmp_path / "model", {"a": [1]})
    (tmp_path / "blobs").mkdir()
    (model / "parts").mkdir()
    (model / "model.safetensors").rename(tmp_path / "blobs" / "0123")
    (model / "parts" / "one.safetensors").symlink_to("../../blobs/0123")
    (model / INDEX).write_text(json.dumps({"weight_map": {"a": "parts/one.safetensors"}}))
    assert weight_files("model", [], {"weight_map": {"a": "parts/one.safetensors"}}) == ["parts/one.safetensors"]
    assert len(fingerprint(model)) == 64


# ---- headers

ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
DAMAGED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "beyond the file": (lambda e: {**e, "shape": [2, 200], "data_offsets": [0, 1600]}, "and should have"),
    "far beyond": (lambda e: {**e, "shape": [2**60], "data_offsets": [0, 2**62]}, "and should have"),
    "another size": (lambda e: {**e, "shape": [2, 200]}, "do not fit F32 of shape"),
    "backwards": (lambda e: {**e, "data_offsets": [16, 0]}, "do not fit F32"),
    "negative": (lambda e: {**e, "data_offsets": [-16, 0]}, "does not describe a"),
    "one offset": (lambda e: {**e, "data_offsets": [16]}, "does not describe a"),
    "no numbers": (lambda e: {**e, "shape": ["2", "2"]}, "does not describe a"),
    "infinite": (lambda e: {**e, "shape": [float("inf")]}, "does not describe a"),
    "many dimensions": (lambda e: {**e, "shape": [1] * 100_000}, "does not describe a"),
    "no dtype": (lambda e: {**e, "dtype": None}, "does not describe a"),
    "a list": (lambda e: [e], "does not describe a"),
    "nothing": (lambda e: None, "does not describe a"),
}


@pytest.mark.parametrize("case", DAMAGED, ids=DAMAGED.keys())
def test_header_that_does_not_fit_its_file_is_refused(tmp_path: Path, case: str) -> None:
    change, says = DAMAGED[case]
    text = json.dumps({"a": change(ENTRY)}).encode()
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
    with pytest.raises(ValueError, match=says):
        read_header(tmp_path, "m.safetensors")


def test_deeply_nested_header_is_refused(tmp_path: Path) -> None:
    text = b'{"a":' * 100_000
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(ValueError, match=r"nested|Expecting"):
        read_header(tmp_path, "m.safetensors")


def test_offsets_are_those_in_the_file(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", {"a": [3], "b": [2, 5]})
    tensors = read_header(model, "model.safetensors")
    size = (model / "model.safetensors").stat().st_size
    assert [(t.offset, t.nbytes) for t in tensors.values()] == [(size - 52, 12), (size - 40, 40)]


def test_header_is_parsed_once_while_the_file_stays_the_same(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", PER_EXPERT)
    parse_header.cache_clear()
    tensors = read_header(model, "model.safetensors")
    fingerprint(model)
    assert read_header(model, "model.safetensors") is tensors
    assert parse_header.cache_info().misses == 1
    shutil.rmtree(model)
    write_checkpoint(model, FUSED)
    assert set(read_header(model, "model.safetensors")) == set(FUSED)
