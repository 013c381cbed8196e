"""The scripts in examples/ run, each on the shipped pair, and show what they promise."""

from __future__ import annotations

import io
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib import image

from spmoe import LLM, SamplingParams
from spmoe.cli.main import main

EXAMPLES = Path(__file__).parents[1] / "examples"
Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Return a function that runs an example in another directory, and returns its standard output."""
    monkeypatch.chdir(tmp_path)

    def call(name: str, *arguments: str, stdin: str = "") -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return call


def greedy(prompt: str, tokens: int) -> str:
    with LLM(expert_memory="100%", num_speculative_tokens=0) as llm:
        return "".join(llm.stream(prompt, SamplingParams(max_tokens=tokens)))


def test_every_script_is_tested_and_described() -> None:
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    assert scripts == {"generate.py", "stream.py", "chat.py", "compare_policies.py", "plot_trace.py"}
    page = (EXAMPLES / "README.md").read_text()
    assert all(f"[{name}]({name})" in page for name in scripts)


def test_generate(run: Run) -> None:
    printed = run("generate.py")
    assert printed.count("--- ") == 3
    assert "def fibonacci(n):" + greedy("def fibonacci(n):", 32) in printed


def test_stream(run: Run) -> None:
    printed = run("stream.py", "import os\n")
    assert printed.startswith("import os\n")
    assert printed.endswith("\n--- finished\n")
    assert len(printed) > 60


def test_chat(run: Run) -> None:
    printed = run("chat.py", stdin="hello\nthere\n\n")
    assert printed.count("> ") == 3
    first = greedy("# system: Answer in one sentence.\n# user: hello\n", 48)
    assert printed.startswith(f"> {first}\n> ")
    assert run("chat.py", stdin="").startswith("> "), "the end of the input ends it, too"


def test_compare_policies(run: Run) -> None:
    heading, *rows = run("compare_policies.py").splitlines()
    assert heading.split() == ["prefetch", "hit", "rate", "stall", "ms", "ms/token"]
    found = {policy: float(rate.rstrip("%")) for policy, rate, _, _ in map(str.split, rows)}
    assert found.keys() == {"on-demand", "next-gate", "draft-gate"}
    assert found["draft-gate"] > found["on-demand"] > 0


def test_plot_trace(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace, picture = tmp_path / "run.npz", tmp_path / "run.png"
    options = ["--max-prompts", "1", "--max-tokens", "8", "-o", str(trace)]
    monkeypatch.setattr(sys, "argv", ["spmoe", "trace", "record", *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    printed = run("plot_trace.py", str(trace), str(picture))
    assert printed.rstrip().endswith(f"used twice in a row: {picture}")
    assert image.imread(picture).std() > 0.05  # not blank
    with pytest.raises(SystemExit, match=r"PICTURE\.png"):
        run("plot_trace.py")
