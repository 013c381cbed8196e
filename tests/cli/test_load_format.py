"""`--load-format dummy` on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hub_server import hub_server
from spmoe.config import RANDOM_WEIGHTS_NOTE

if TYPE_CHECKING:
    from conftest import Invoke

DUMMY = ("--load-format", "dummy", "--device", "cpu")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Write a directory that holds a config.json alone."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 400}
    (tmp_path / "model").mkdir()
    text = json.dumps({"model_type": "mixtral", "max_position_embeddings": 4096, **sizes, **experts})
    (tmp_path / "model" / "config.json").write_text(text)
    return tmp_path / "model"


def test_run_says_that_weights_are_random(config: Path, invoke: Invoke) -> None:
    result = invoke("run", config, *DUMMY, "--prompt", "x", "--max-tokens", 4, "--dtype", "float32").succeeded()
    assert result.out
    assert f"note: {RANDOM_WEIGHTS_NOTE}" in result.err
    assert "random weights; routing is nearly uniform" in result.err
    as_json = invoke("run", config, *DUMMY, "--prompt", "x", "--max-tokens", 4, "--json").succeeded()
    stats = json.loads(as_json.out)["stats"]
    assert (stats["weights"], stats["weights_note"]) == ("random", RANDOM_WEIGHTS_NOTE)


def test_info_and_plan_of_a_configuration_that_ships(invoke: Invoke) -> None:
    info = json.loads(invoke("info", "gpt-oss-120b", *DUMMY, "--json").succeeded().out)
    assert info["target"]["weights"] == "random"
    assert info["target"]["expert_format"] == "mxfp4"
    assert 60e9 < info["target"]["all_experts_bytes"] < 62e9
    shown = " ".join(invoke("info", "gpt-oss-120b", *DUMMY).succeeded().out.split())
    assert "weights random (--load-format dummy); routing is nearly uniform" in shown
    assert "expert store host memory, filled when the model is loaded" in shown
    plan = invoke("plan", "gpt-oss-120b", "--load-format", "dummy", "--device-memory", "24GiB").succeeded().out
    assert "random weights (--load-format dummy): routing is nearly uniform" in plan
    assert plan.splitlines()[-1].split()[:3] == ["spmoe", "run", "gpt-oss-120b"]
    assert "--load-format dummy" in plan.splitlines()[-1]


def test_bench_says_that_weights_are_random(config: Path, tmp_path: Path, invoke: Invoke) -> None:
    file = tmp_path / "results.jsonl"
    options = ("-k", 0, "--output-len", 2, "--max-prompts", 1, "--repeat", 1, "--warmup", 0, "--json", file)
    result = invoke("bench", config, *DUMMY, *options).succeeded()
    assert RANDOM_WEIGHTS_NOTE in result.out
    machine, row = (json.loads(line) for line in file.read_text().splitlines())
    assert (machine["weights"], machine["link_source"]) == ("random", "host memory")
    assert row["hit_rate"] is not None
    assert RANDOM_WEIGHTS_NOTE in invoke("report", file, "--markdown").succeeded().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "mixtral8x7b", *DUMMY), "did you mean mixtral-8x7b?"),
        (("run", "./nowhere", *DUMMY), "there is no directory"),
        (("info", "gpt-oss-20b", "--load-format", "random"), "load_format must be one of auto, dummy, not 'random'"),
        (("bench", "gpt-oss-2", *DUMMY), "did you mean gpt-oss-20b?"),
        (("plan", "gpt-oss-20b", "--load-format", "dummy", "--draft", "mixtral"), "did you mean mixtral-8x7b?"),
    ],
)
def test_refusals(arguments: tuple[str, ...], words: str, invoke: Invoke) -> None:
    invoke(*arguments).refused(2, words)


def test_configuration_of_a_hub_model(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, invoke: Invoke
) -> None:
    with hub_server(tmp_path / "cache", monkeypatch) as server:
        server.repositories = {"acme/moe": config}
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        info = json.loads(invoke("info", "acme/moe", *DUMMY, "--json").succeeded().out)
    assert info["target"]["weights"] == "random"
