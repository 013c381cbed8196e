"""The command doctor: lines, JSON, exit codes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from spmoe.bench import doctor
from spmoe.bench.doctor import Finding, Verdict

if TYPE_CHECKING:
    from conftest import Invoke

FINE = Finding("ram", Verdict.OK, "64.0 GiB", values={"total_bytes": 64 * 2**30})
SLOW = Finding("link", Verdict.NOTE, "3.0 GB/s", "use a slot with more lanes")
BROKEN = Finding("torch", Verdict.PROBLEM, "not installed", "pip install torch")


def use(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> list[bool]:
    """Replace all checks by these findings; return the list that receives `measure` of each call."""
    calls: list[bool] = []

    def run_checks(*, measure: bool) -> Iterator[Finding]:
        calls.append(measure)
        yield from findings

    monkeypatch.setattr(doctor, "run_checks", run_checks)
    return calls


def test_lines_with_verdict_and_advice(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    calls = use(monkeypatch, FINE, SLOW)
    result = invoke("doctor").succeeded()
    assert [line.split() for line in result.out.splitlines()] == [
        ["ok", "ram", "64.0", "GiB"],
        ["note", "link", "3.0", "GB/s"],
        ["->", "use", "a", "slot", "with", "more", "lanes"],
        [],
        ["nothing", "prevents", "running;", "1", "note"],
    ]
    assert calls == [True]
    invoke("doctor", "--quick").succeeded()
    assert calls == [True, False]


def test_problem_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    use(monkeypatch, FINE, BROKEN)
    result = invoke("doctor")
    assert result.code == 1
    assert "1 problem prevents running; 0 notes" in result.out
    result = invoke("doctor", "--json")
    assert result.code == 1
    found = json.loads(result.out)
    assert (found["verdict"], found["problems"], found["notes"]) == ("problem", 1, 0)
    assert found["checks"][0] == {
        "check": "ram",
        "verdict": "ok",
        "text": "64.0 GiB",
        "advice": None,
        "values": {"total_bytes": 64 * 2**30},
    }


def test_all_checks_as_json(invoke: Invoke) -> None:
    result = invoke("doctor", "--quick", "--json")
    assert result.err == ""
    found = json.loads(result.out)
    assert found.keys() == {"spmoe", "verdict", "problems", "notes", "checks"}
    assert {check["verdict"] for check in found["checks"]} <= {"ok", "note", "problem"}
    assert result.code == (1 if found["problems"] else 0)


def test_wrong_arguments(invoke: Invoke) -> None:
    invoke("doctor", "mixtral").refused(2, "mixtral", "spmoe doctor --help")
    invoke("doctor", "--fast").refused(2, "--fast")
