"""The commands run, chat and info: standard output, standard error, options and help."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from cli_checkpoints import CONTEXT, EXPERTS, LAYERS, TOP_K, copy_of, edit_json
from transformers import AutoModelForCausalLM, AutoTokenizer

import spmoe
from spmoe.config import format_bytes
from spmoe.models.shipped import shipped_pair

if TYPE_CHECKING:
    from conftest import Invoke

TABLE = ("tokens", "TTFT", "TPOT", "hit rate", "stall", "slots", "prefetch")  # words of the table after a run


def answer(invoke: Invoke, *arguments: object, **options: Any) -> dict[str, Any]:
    """Return the one JSON object that a command prints."""
    result = invoke(*arguments, "--json", **options).succeeded()
    assert result.out.count("\n") == 1
    assert result.out.endswith("}\n")
    found: dict[str, Any] = json.loads(result.out)
    return found


@pytest.fixture(scope="module")
def greedy(checkpoints: Path) -> list[int]:
    """Return the tokens that transformers generates after "hello"."""
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "target")
    tokenizer = AutoTokenizer.from_pretrained(checkpoints / "target")
    ids = torch.tensor([tokenizer("hello")["input_ids"]])
    output = model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
    found: list[int] = output[0, ids.shape[1] :].tolist()
    return found


# ---- run


def test_run_prints_only_text_to_standard_output(checkpoints: Path, greedy: list[int], invoke: Invoke) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoints / "target")
    result = invoke("run", checkpoints / "target", "--prompt", "hello", "--max-tokens", 24, "--ignore-eos").succeeded()
    assert result.out == tokenizer.decode(greedy) + "\n"
    assert not [word for word in TABLE if word not in result.err]
    assert "emulated" not in result.err


def test_run_with_a_json_schema(checkpoints: Path, invoke: Invoke, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": [12, "ab"]}')
    command = ("run", checkpoints / "target", "--prompt", "hello", "--json-schema", schema)
    assert json.loads(answer(invoke, *command)["text"]) in (12, "ab")
    schema.write_text('{"type": "objekt"}')
    invoke(*command).refused(2, "structured_outputs.json cannot be used", "objekt")


@pytest.mark.parametrize("draft", ["none", "draft", "padded"])
def test_run_with_json(draft: str, checkpoints: Path, greedy: list[int], invoke: Invoke) -> None:
    name = draft if draft == "none" else checkpoints / draft
    options = ("--draft", name, *(() if draft == "none" else ("-k", 4)), "--max-tokens", 24, "--ignore-eos")
    result = invoke("run", checkpoints / "target", "--prompt", "hello", *options, "--json").succeeded()
    found = json.loads(result.out)
    assert result.out.count("\n") == 1
    assert result.err == ""
    assert found.keys() == {"text", "token_ids", "finish_reason", "usage", "stats"}
    assert found["token_ids"] == greedy
    assert found["finish_reason"] == "length"
    assert found["usage"] == {"prompt_tokens": 5, "completion_tokens": 24, "total_tokens": 29}
    stats = found["stats"]
    assert stats["link"] == "real"
    assert stats["emulated_link_gbps"] is None
    assert stats["num_speculative_tokens"] == (0 if draft == "none" else 4)
    assert (stats["mean_acceptance_length"] is None) == (draft == "none")
    assert stats["hits"] + stats["late"] + stats["demand_loads"] > 0
    assert stats["slots"] == LAYERS * EXPERTS // 4
    text = invoke("run", checkpoints / "target", "--prompt", "hello", *options).out
    assert text == found["text"] + "\n"


def test_prompt_is_read_from_standard_input(checkpoints: Path, invoke: Invoke) -> None:
    run = ("run", checkpoints / "target", "--max-tokens", 8)
    given = answer(invoke, *run, "--prompt", "grüße\n")
    assert given["usage"]["prompt_tokens"] == 8  # bytes
    assert answer(invoke, *run, "--prompt", "-", stdin="grüße\n".encode())["token_ids"] == given["token_ids"]
    assert answer(invoke, *run, stdin="grüße\n".encode())["token_ids"] == given["token_ids"]
    assert answer(invoke, *run, "-p", "grüße")["token_ids"] != given["token_ids"]


def test_stop_strings_end_the_text(checkpoints: Path, invoke: Invoke) -> None:
    run = ("run", checkpoints / "target", "--prompt", "hello", "--max-tokens", 24)
    text: str = answer(invoke, *run)["text"]
    first = text[4]
    stopped = answer(invoke, *run, "--stop", "no such text", "--stop", first)
    assert stopped["text"] == text[: text.index(first)]
    assert stopped["finish_reason"] == "stop"
    assert 0 < len(stopped["token_ids"]) < 24


def test_seed_makes_sampling_repeatable(checkpoints: Path, invoke: Invoke) -> None:
    run = ("run", checkpoints / "target", "--prompt", "hello", "--max-tokens", 16, "--temperature", 1, "--ignore-eos")
    one = answer(invoke, *run, "--seed", 1)["token_ids"]
    assert answer(invoke, *run, "--seed", 1)["token_ids"] == one
    assert answer(invoke, *run, "--seed", 2)["token_ids"] != one


def test_penalties_and_stop_tokens(checkpoints: Path, greedy: list[int], invoke: Invoke) -> None:
    run = ("run", checkpoints / "target", "--prompt", "hello", "--max-tokens", 24, "--ignore-eos")
    for option in ("--presence-penalty", "--frequency-penalty", "--repetition-penalty"):
        plain = answer(invoke, *run, option, 1.9)["token_ids"]
        assert plain != greedy
        assert answer(invoke, *run, option, 1.9, "--draft", checkpoints / "draft")["token_ids"] == plain
    stopped = answer(invoke, *run, "--stop-token-ids", 250, "--stop-token-ids", greedy[3])
    assert stopped["token_ids"] == greedy[: greedy.index(greedy[3]) + 1]
    assert stopped["finish_reason"] == "stop"
    longer = answer(invoke, *run, "--stop-token-ids", greedy[3], "--min-tokens", 12)["token_ids"]
    assert len(longer) >= 12
    assert greedy[3] not in longer[:12]


def test_options_that_are_not_given_come_from_the_generation_config(
    checkpoints: Path, tmp_path: Path, greedy: list[int], invoke: Invoke
) -> None:
    model = copy_of(checkpoints / "target", tmp_path)
    edit_json(model / "generation_config.json", do_sample=True, temperature=1.5, max_new_tokens=6)
    run = ("run", model, "--draft", "none", "--prompt", "hello", "--ignore-eos", "--json")
    sampled = invoke(*run, "--seed", 1).succeeded()
    assert len(json.loads(sampled.out)["token_ids"]) == 6
    assert json.loads(sampled.out)["token_ids"] != greedy[:6]
    assert sampled.err == (
        "note: from the model's generation_config.json: max_tokens 6, temperature 1.5; --generation-config none turns "
        "it off\n"
    )
    given = invoke(*run, "--temperature", 0, "--max-tokens", 9).succeeded()
    assert json.loads(given.out)["token_ids"] == greedy[:9]
    assert given.err == "", "everything that the file sets was given"
    off = invoke(*run, "--generation-config", "none", "--max-tokens", 9).succeeded()
    assert json.loads(off.out)["token_ids"] == greedy[:9]
    invoke(*run, "--generation-config", "vllm").refused(2, "generation_config must be one of auto, none, not 'vllm'")
    invoke(*run, "--min-tokens", 7).refused(2, "min_tokens must be at most max_tokens, 6, not 7")


def test_eos_tokens_of_the_generation_config_end_a_run(
    checkpoints: Path, tmp_path: Path, greedy: list[int], invoke: Invoke
) -> None:
    model = copy_of(checkpoints / "target", tmp_path)
    edit_json(model / "generation_config.json", eos_token_id=[256, greedy[5]])
    length = greedy.index(greedy[5]) + 1
    run = ("run", model, "--prompt", "hello", "--max-tokens", 24)
    ended = answer(invoke, *run)
    assert ended["token_ids"] == greedy[:length]
    assert ended["finish_reason"] == "stop"
    on = answer(invoke, *run, "--ignore-eos")
    assert on["token_ids"] == greedy
    assert on["finish_reason"] == "length"


def test_max_model_len_limits_the_output(checkpoints: Path, invoke: Invoke) -> None:
    found = answer(invoke, "run", checkpoints / "target", "--max-model-len", 12, "--prompt", "hello", "--ignore-eos")
    assert found["usage"]["total_tokens"] == 12
    assert found["finish_reason"] == "length"


def test_options_of_prefetching_do_not_change_tokens(checkpoints: Path, greedy: list[int], invoke: Invoke) -> None:
    run = ("run", checkpoints / "target", "--draft", checkpoints / "draft", "--prompt", "hello", "--max-tokens", 24)
    for options in (
        ("--prefetch", "on-demand"),
        ("--cutoff", "all"),
        ("--cutoff", "1"),
        ("--eviction", "lru", "--expert-memory", "100%"),
        ("--num-speculative-tokens", "0"),
    ):
        assert answer(invoke, *run, "--ignore-eos", *options)["token_ids"] == greedy


def test_without_a_model_the_included_pair_runs(invoke: Invoke) -> None:
    result = invoke("run", "--prompt", "hello", "--max-tokens", 4, "--json").succeeded()
    assert len(json.loads(result.out)["token_ids"]) <= 4
    model = json.loads(invoke("info", "--json").succeeded().out)["target"]["name"]
    assert model == shipped_pair()[0]


# ---- emulated links


def test_every_output_names_the_emulated_link(checkpoints: Path, invoke: Invoke) -> None:
    model = (checkpoints / "target", "--link-gbps", "0.25")
    table = invoke("run", *model, "--prompt", "hello", "--max-tokens", 4).succeeded()
    note, *rest = table.err.splitlines()
    assert note.startswith("note: emulated link of 0.25 GB/s")
    assert any(line.startswith("emulated link, 0.25 GB/s") for line in rest)
    for found in (
        answer(invoke, "run", *model, "--prompt", "hello", "--max-tokens", 4)["stats"],
        answer(invoke, "chat", *model, "--max-tokens", 4, stdin=b"hi\n")["stats"],
        answer(invoke, "info", *model),
    ):
        assert (found["link"], found["emulated_link_gbps"]) == ("emulated", 0.25)
    info = invoke("info", *model).succeeded()
    assert "emulated link, 0.25 GB/s" in info.out
    assert "emulated link" in info.err
    measured = invoke("info", *model, "--draft", checkpoints / "draft", "--measure").succeeded()
    assert "per expert (emulated link)" in " ".join(measured.out.split())


# ---- info


@pytest.mark.parametrize(
    ("options", "policy"), [((), "auto (draft-gate)"), (("-k", 4, "--prefetch", "draft-gate"), "draft-gate")]
)
def test_info_before_and_after_a_measurement(
    options: tuple[object, ...], policy: str, checkpoints: Path, own_home: Path, invoke: Invoke
) -> None:
    pair = (checkpoints / "target", "--draft", checkpoints / "draft", "--expert-memory", "50%", *options)
    before = answer(invoke, "info", *pair)
    assert not own_home.exists()  # info writes no files
    target, memory, prefetch = before["target"], before["memory"], before["prefetch"]
    assert target["architecture"] == "MixtralForCausalLM"
    assert before["draft"]["architecture"] == "MistralForCausalLM"
    assert (target["decoder_layers"], target["moe_layers"]) == (LAYERS, LAYERS)
    assert (target["experts_per_layer"], target["top_k"], target["max_length"]) == (EXPERTS, TOP_K, CONTEXT)
    assert memory["slots"] == LAYERS * EXPERTS // 2
    assert memory["slots_bytes"] == memory["slots"] * target["expert_bytes"]
    assert target["all_experts_bytes"] == 2 * memory["slots_bytes"]
    assert memory["resident_bytes"] == target["resident_bytes"] + before["draft"]["resident_bytes"]
    assert (prefetch["policy"], prefetch["profile"], prefetch["cutoff_layers"]) == (policy, None, None)
    assert not target["expert_file_exists"]
    unmeasured = invoke("info", *pair).succeeded().out
    assert "auto: not measured yet" in unmeasured
    assert "--measure" in unmeasured

    after = answer(invoke, "info", *pair, "--measure")
    assert after["target"]["expert_file_exists"]
    assert Path(after["target"]["expert_file"]).is_relative_to(own_home)
    assert after["prefetch"]["profile"]["draft_layers"] == LAYERS
    cutoff = after["prefetch"]["cutoff_layers"]
    assert 0 <= cutoff <= LAYERS
    table = " ".join(invoke("info", *pair).succeeded().out.split())
    for shown in (
        f"{LAYERS} of them with {EXPERTS} experts, {TOP_K} per token",
        f"{format_bytes(memory['slots_bytes'])} expert slots ({memory['slots']} slots, 50% of experts)",
        f"{format_bytes(target['resident_bytes'])} target without experts",
        f"{format_bytes(after['draft']['resident_bytes'])} draft",
        "ms per expert (store to slot)",
        f"cutoff auto: {cutoff} of {LAYERS} layers",
    ):
        assert shown in table


def test_info_counts_every_parameter(checkpoints: Path, invoke: Invoke) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "target")
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    found = answer(invoke, "info", checkpoints / "target")["target"]
    assert found["resident_bytes"] == 4 * (model.num_parameters() - experts)
    assert found["all_experts_bytes"] >= 4 * experts  # blobs are padded


def test_info_with_a_fixed_cutoff_needs_no_profile(checkpoints: Path, own_home: Path, invoke: Invoke) -> None:
    pair = (checkpoints / "target", "--draft", checkpoints / "draft")
    for cutoff, layers in ((2, 2), ("all", LAYERS)):
        assert answer(invoke, "info", *pair, "--cutoff", cutoff)["prefetch"]["cutoff_layers"] == layers
    assert "\ncutoff" not in invoke("info", *pair, "--prefetch", "on-demand").succeeded().out
    assert not own_home.exists()


# ---- the process


def test_version(invoke: Invoke) -> None:
    assert invoke("--version").succeeded().out == f"spmoe {spmoe.__version__}\n"


def test_spmoe_debug_prints_log_messages() -> None:
    code = """
import logging, sys
from spmoe.cli.main import main
logging.getLogger("spmoe.models").debug("unheard")
sys.argv = ["spmoe", "--version"]
try:
    main()
except SystemExit as ended:
    assert not ended.code
logging.getLogger("spmoe.models").debug("heard")
logging.getLogger("others").debug("unheard")
"""
    for value, said in (("1", "spmoe.models: heard\n"), ("", "")):
        environment = {**os.environ, "SPMOE_DEBUG": value}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stderr == said


def test_runs_as_a_module_and_as_a_script() -> None:
    script = Path(sys.executable).with_name("spmoe")
    for command in ([sys.executable, "-m", "spmoe"], [str(script)]):
        version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
        assert version.stdout == f"spmoe {spmoe.__version__}\n"
    wrong = subprocess.run([sys.executable, "-m", "spmoe", "run", "--wobble"], capture_output=True, text=True)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.count("\n") == 1


def test_run_in_a_new_process(checkpoints: Path, greedy: list[int]) -> None:
    arguments = ["run", checkpoints / "target", "--draft", checkpoints / "draft", "--max-tokens", 24, "--ignore-eos"]
    command = [sys.executable, "-m", "spmoe", *map(str, arguments), "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, input=b"hello", capture_output=True, env=environment, check=True)
    assert json.loads(result.stdout)["token_ids"] == greedy
    assert result.stdout.count(b"\n") == 1
    assert result.stderr == b""


def test_families_suggests_the_nearest_name(invoke: Invoke) -> None:
    invoke("families", "mixtrl").refused(2, "has no MoE family mixtrl; did you mean mixtral?")
    invoke("families", "wobble").refused(2, "has no MoE family wobble; it has afmoe", "zaya")


def test_info_keeps_paths_whole_in_a_pipe(checkpoints: Path, invoke: Invoke, own_home: Path) -> None:
    shown = invoke("info", checkpoints / "target", "--device", "cpu").succeeded().out
    (line,) = [line for line in shown.splitlines() if "expert file" in line]
    assert line.rstrip().endswith(".safetensors (written at the first run)")
