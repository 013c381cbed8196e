"""The trace file: what is written is read, and nothing else is."""

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


def test_what_is_written_is_read(tmp_path: Path) -> None:
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
    assert list(tmp_path.iterdir()) == [path], "nothing else is left there"


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_part_of_a_file_is_refused(tmp_path: Path, share: float) -> None:
    path = tmp_path / "a.trace"
    make_trace().save(path)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(UsageError, match="not a whole trace"):
        Trace.load(path)


def test_damage_inside_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    make_trace().save(path)
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(64)
    path.write_bytes(data)
    with pytest.raises(UsageError, match="not a whole trace"):
        Trace.load(path)


def test_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.trace"
    monkeypatch.setattr(trace_file, "VERSION", 7)
    make_trace().save(path)
    monkeypatch.undo()
    with pytest.raises(UsageError, match="version 7, not 1"):
        Trace.load(path)


@pytest.mark.parametrize("header", ["[]", "{}", "no JSON", json.dumps({"format": "else", "version": 1})])
def test_other_archives_are_refused(tmp_path: Path, header: str) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, header=np.array(header))
    with pytest.raises(UsageError, match="is not a trace"):
        Trace.load(path)


def test_a_missing_array_and_a_missing_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    header = {"format": trace_file.FORMAT, "version": trace_file.VERSION}
    np.savez(path, header=np.array(json.dumps(header)))
    with pytest.raises(UsageError, match="lacks step_request"):
        Trace.load(path)
    with pytest.raises(UsageError, match="cannot read"):
        Trace.load(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("step_slabs", lambda values: values + 1),
        ("chosen", lambda values: values[1:]),
        ("chosen", lambda values: values + 8),
        ("step_rest", lambda values: values - 1),
        ("forward_front", lambda values: values * np.float32("nan")),
    ],
)
def test_contradictions_are_refused(name: str, change: object) -> None:
    trace = make_trace()
    with pytest.raises(UsageError, match="contradicts itself"):
        replace(trace, **{name: change(getattr(trace, name))})  # type: ignore[operator]
