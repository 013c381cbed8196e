"""`--expert-format` on the command line: what is shown, verified, measured and refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from spmoe.bench.verification import conversion_cost

if TYPE_CHECKING:
    from conftest import Invoke

INT4 = ("--expert-format", "int4-g32")
SHORT = ("--prompt-token-ids", "5,9,3,17", "--max-tokens", 6, "--device", "cpu")


def pair(checkpoints: Path) -> tuple[Any, ...]:
    return (checkpoints / "target", "--draft", checkpoints / "draft")


@pytest.mark.parametrize("method", ["generate", "layers"])
def test_verify_compares_with_the_dequantized_weights(invoke: Invoke, checkpoints: Path, method: str) -> None:
    words = ("verify", *pair(checkpoints), *SHORT, *INT4, "-k", "0,2", "--reference", method)
    found = json.loads(invoke(*words, "--json").succeeded().out)
    assert (found["verdict"], found["expert_format"], found["lossless"]) == ("equal", "int4-g32", False)
    assert found["conversion"] is None
    shown = invoke(*words, "--cost", "--windows", 2, "--window", 32).succeeded()
    assert "lossless: no; transformers ran the weights that int4-g32 holds" in shown.out
    assert "against the original weights, on 64 tokens of text: greedy agreement" in shown.out
    assert "note: lossless: no" in shown.err


def test_verify_finds_that_the_weights_are_not_the_original_ones(
    invoke: Invoke, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison can fail: with the original weights in transformers, tokens or logits differ."""
    from spmoe.models import reference

    monkeypatch.setattr(reference, "_convert_experts", lambda model, format: None)
    found = invoke("verify", *pair(checkpoints), *SHORT, "--expert-format", "mxfp4", "--max-tokens", 24, "-k", "0")
    assert found.code == 1
    assert "DIFFERENT" in found.out


def test_cost_is_measured_on_a_text(invoke: Invoke, checkpoints: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 20)
    words = ("verify", *pair(checkpoints), *SHORT, "-k", "0", "--text", text)
    found = json.loads(invoke(*words, *INT4, "--cost", "--windows", 3, "--window", 48, "--json").succeeded().out)
    cost = found["conversion"]
    assert cost["tokens"] == 3 * 48
    assert 0 < cost["kl_divergence"] < cost["kl_divergence_p99"]
    assert 0 < cost["greedy_agreement"] < 1
    assert cost["perplexity"] != cost["original_perplexity"]
    exact = invoke(*words, "--cost", "--json").succeeded()
    assert json.loads(exact.out)["conversion"] is None
    assert "--cost has nothing to measure" in exact.err
    invoke(*words).refused(2, "--text", "add --cost")


def test_cost_of_a_known_difference() -> None:
    generator = np.random.default_rng(0)
    windows = [generator.integers(0, 7, 5).tolist() for _ in range(2)]
    p, q = (generator.normal(size=(2, 5, 7)) for _ in range(2))
    cost = conversion_cost(windows, torch.from_numpy(p).float(), torch.from_numpy(q).float())

    def probabilities(logits: np.ndarray) -> np.ndarray:
        return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)

    a, b = probabilities(p), probabilities(q)
    kl = [sum(a[w, t, v] * math.log(a[w, t, v] / b[w, t, v]) for v in range(7)) for w in range(2) for t in range(5)]
    loss = {
        name: -np.mean([math.log(one[w, t, windows[w][t + 1]]) for w in range(2) for t in range(4)])
        for name, one in (("original", a), ("converted", b))
    }
    assert cost.tokens == 10
    assert cost.kl_divergence == pytest.approx(np.mean(kl), rel=1e-5)
    assert cost.kl_divergence_p99 == pytest.approx(np.quantile(kl, 0.99), rel=1e-5)
    assert cost.greedy_agreement == pytest.approx(float((a.argmax(-1) == b.argmax(-1)).mean()))
    assert cost.original_perplexity == pytest.approx(math.exp(loss["original"]), rel=1e-5)
    assert cost.perplexity == pytest.approx(math.exp(loss["converted"]), rel=1e-5)


def test_info_and_plan_show_the_format(invoke: Invoke, checkpoints: Path) -> None:
    plain = json.loads(invoke("info", *pair(checkpoints), "--json").succeeded().out)["target"]
    packed = json.loads(invoke("info", *pair(checkpoints), *INT4, "--json").succeeded().out)["target"]
    assert (plain["expert_format"], plain["lossless"]) == ("float32", True)
    assert (packed["expert_format"], packed["lossless"]) == ("int4-g32", False)
    assert packed["expert_bytes"] < plain["expert_bytes"]
    assert packed["parameters"] == plain["parameters"]
    assert packed["expert_file"] != plain["expert_file"]
    assert "int4-g32 (lossless: no)" in invoke("info", *pair(checkpoints), *INT4).succeeded().out
    shown = invoke("plan", checkpoints / "target", *INT4, "--device-memory", "8GiB").succeeded().out
    assert "in int4-g32 (lossless: no)" in shown
    assert "--expert-format int4-g32" in shown


def test_bench_names_the_format(invoke: Invoke, checkpoints: Path, tmp_path: Path) -> None:
    file, prompts = tmp_path / "results.jsonl", tmp_path / "prompts.txt"
    prompts.write_text("hello world\n")
    words = ("--prefetch", "on-demand", "-k", "0", "--repeat", 1, "--prompts", prompts, "--output-len", 2)
    found = invoke(
        "bench", *pair(checkpoints), *words, "--expert-format", "int8-g32,auto", "--warmup", 0, "--json", file
    ).succeeded()
    machines = [json.loads(line) for line in file.read_text().splitlines()]
    machines = [one for one in machines if one["type"] == "machine"]
    assert [(one["expert_format"], one["lossless"]) for one in machines] == [("int8-g32", False), ("float32", True)]
    assert "experts in int8-g32 (lossless: no)" in found.out


def test_predictability_and_traces_say_what_is_lossy(invoke: Invoke, checkpoints: Path, tmp_path: Path) -> None:
    text, trace = tmp_path / "text", tmp_path / "trace"
    text.write_text("the quick brown fox jumps over the lazy dog\n")
    measure = ("predictability", *pair(checkpoints), *INT4, "--text", text, "--windows", 1, "--window", 16)
    assert "lossless: no (experts in int4-g32)" in invoke(*measure).succeeded().out
    record = (
        "trace",
        "record",
        *pair(checkpoints),
        *INT4,
        "--prompts",
        text,
        "--max-tokens",
        3,
        "-k",
        "0",
        "-o",
        trace,
    )
    assert json.loads(invoke(*record, "--json").succeeded().out)["lossless"] is False
    replay = ("trace", "replay", trace, "--prefetch", "on-demand", "--link-gbps", 1)
    assert json.loads(invoke(*replay, "--json").succeeded().out)["lossless"] is False
    assert "experts in int4-g32 (lossless: no)" in invoke(*replay).succeeded().out


def test_wrong_formats_are_refused(invoke: Invoke, checkpoints: Path) -> None:
    run = ("run", checkpoints / "target", "--prompt", "x", "--expert-format")
    invoke(*run, "int3").refused(2, "expert_format must be one of auto, bf16-packed", "not 'int3'")
    invoke(*run, "bf16-packed").refused(2, "packs bfloat16 weights without loss", "--dtype bfloat16")
    invoke("bench", checkpoints / "target", "--expert-format", "int4-g3").refused(2, "did you mean int4-g32?")
