"""The trace file: saving, loading, and refusing damaged or contradictory files."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from traces import make_trace

from spmoe.errors import UsageError
from spmoe.replay import trace as trace_file
from spmoe.replay.trace import Trace


def test_saved_trace_is_loaded_unchanged(tmp_path: Path) -> None:
    written, path = make_trace(), tmp_path / "a.trace"
    replace(written, about={"model": "a model"}).save(path)
    read = Trace.load(path)
    assert read.shape == written.shape
    assert read.about == {"model": "a model"}
    for field in fields(Trace):
        if field.name not in ("shape", "about"):
            ours, theirs = getattr(read, field.name), getattr(written, field.name)
            assert ours.dtype == theirs.dtype
            assert np.array_equal(ours, theirs), field.name
    assert list(tmp_path.iterdir()) == [path], "no temporary file is left"


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_truncated_file_is_refused(tmp_path: Path, share: float) -> None:
    path = tmp_path / "a.trace"
    make_trace().save(path)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(UsageError, match="not a complete trace"):
        Trace.load(path)


def test_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    make_trace().save(path)
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(64)
    path.write_bytes(data)
    with pytest.raises(UsageError, match="not a complete trace"):
        Trace.load(path)


def test_every_flipped_byte_is_harmless_or_reported(tmp_path: Path) -> None:
    """Most flips make the compressed data invalid; the others are in bytes that are never read."""
    path, rng, messages = tmp_path / "a.trace", np.random.default_rng(0), list[str]()
    make_trace(steps=6).save(path)
    intact = path.read_bytes()
    for place in rng.integers(0, len(intact), 60):
        data = bytearray(intact)
        data[place] ^= int(rng.integers(1, 256))
        path.write_bytes(data)
        try:
            Trace.load(path)
        except UsageError as error:
            messages.append(str(error))
    assert len(messages) > 40
    assert all("record" in words for words in messages)


def test_unknown_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.trace"
    monkeypatch.setattr(trace_file, "VERSION", 7)
    make_trace().save(path)
    monkeypatch.undo()
    with pytest.raises(UsageError, match="version 7, not 2"):
        Trace.load(path)


def test_version_1_is_read(tmp_path: Path) -> None:
    """Version 1 had other names for ten arrays."""
    path, trace = tmp_path / "a.trace", make_trace()
    trace.save(path)
    with np.load(path) as file:
        header = {**json.loads(str(file["header"])), "version": 1}
        names = {name: trace_file._VERSION_1_NAMES.get(name, name) for name in file.files if name != "header"}
        np.savez(tmp_path / "old.npz", header=np.array(json.dumps(header)), **{names[n]: file[n] for n in names})
    read = Trace.load(tmp_path / "old.npz")
    assert all(np.array_equal(getattr(read, name), getattr(trace, name)) for name in names)


@pytest.mark.parametrize("header", ["[]", "{}", "no JSON", json.dumps({"format": "else", "version": 1})])
def test_other_archives_are_refused(tmp_path: Path, header: str) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, header=np.array(header))
    with pytest.raises(UsageError, match="is not a trace"):
        Trace.load(path)


def test_missing_array_or_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    header = {"format": trace_file.FORMAT, "version": trace_file.VERSION}
    np.savez(path, header=np.array(json.dumps(header)))
    with pytest.raises(UsageError, match="lacks step_sequence"):
        Trace.load(path)
    with pytest.raises(UsageError, match="cannot read"):
        Trace.load(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("step_chunks", lambda values: values + 1),
        ("routed", lambda values: values[1:]),
        ("routed", lambda values: values + 8),
        ("step_rest", lambda values: values - 1),
        ("forward_front", lambda values: values * np.float32("nan")),
        ("chunk_layers", lambda values: values.ravel()),
        ("chunk_layers", lambda values: values + 90),
        ("chunk_layers", lambda values: values[:, ::-1]),
        ("chunk_pass", lambda values: values - 5),
        ("forward_rows", lambda values: -values),
        ("step_accepted", lambda values: values + 9),
        ("step_drafted", lambda values: values * 0 + 9),
        ("step_sequence", lambda values: np.array(3)),
        ("routed", lambda values: values.astype(float)),
        ("routed_weight", lambda values: values.astype(str)),
    ],
)
def test_contradictory_arrays_are_refused(name: str, change: object) -> None:
    trace = make_trace()
    with pytest.raises(UsageError, match="contradicts itself"):
        replace(trace, **{name: change(getattr(trace, name))})  # type: ignore[operator]


@pytest.mark.parametrize(
    "change",
    [
        {"experts": ()},
        {"experts": ("many",) * 6},
        {"top_k": 0},
        {"expert_bytes": -1},
        {"slots": 0},
        {"depth": "two"},
        {"draft_tokens": True},
        {"draft_tokens": 10**9},
        {"experts": (10**9,) * 6},
        {"experts": (4,) * 10**5},
        {"slots": 10**12},
        {"chunk_bytes": 0},
        {"link_bytes_per_second": float("nan")},
        {"link_bytes_per_second": "fast"},
    ],
)
def test_impossible_shapes_are_refused(change: dict[str, object]) -> None:
    trace = make_trace()
    with pytest.raises(UsageError, match="contradicts itself"):
        replace(trace, shape=replace(trace.shape, **change))
