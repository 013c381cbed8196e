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


def test_whatever_bit_is_wrong_one_message_says_so(tmp_path: Path) -> None:
    """Most of them make the compressed data invalid; those that nobody reads change nothing."""
    path, rng, said = tmp_path / "a.trace", np.random.default_rng(0), list[str]()
    make_trace(steps=6).save(path)
    sound = path.read_bytes()
    for place in rng.integers(0, len(sound), 60):
        data = bytearray(sound)
        data[place] ^= int(rng.integers(1, 256))
        path.write_bytes(data)
        try:
            Trace.load(path)
        except UsageError as error:
            said.append(str(error))
    assert len(said) > 40
    assert all("record" in words for words in said)


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
        ("slab_layers", lambda values: values.ravel()),
        ("slab_layers", lambda values: values + 90),
        ("slab_layers", lambda values: values[:, ::-1]),
        ("slab_pass", lambda values: values - 5),
        ("forward_rows", lambda values: -values),
        ("step_accepted", lambda values: values + 9),
        ("step_drafted", lambda values: values * 0 + 9),
        ("step_request", lambda values: np.array(3)),
        ("chosen", lambda values: values.astype(float)),
        ("weight", lambda values: values.astype(str)),
    ],
)
def test_contradictions_are_refused(name: str, change: object) -> None:
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
        {"chunk_bytes": 0},
        {"link_bytes_per_second": float("nan")},
        {"link_bytes_per_second": "fast"},
    ],
)
def test_shapes_that_nothing_has_are_refused(change: dict[str, object]) -> None:
    trace = make_trace()
    with pytest.raises(UsageError, match="contradicts itself"):
        replace(trace, shape=replace(trace.shape, **change))
