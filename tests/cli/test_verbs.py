"""The verbs as people use them: what goes to standard output, what to standard error, and what the options do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import typer.main
from cli_checkpoints import CONTEXT, EXPERTS, LAYERS, TOP_K, copy_of, edit_json
from transformers import AutoModelForCausalLM, AutoTokenizer

import spmoe
from spmoe import config
from spmoe.cli.main import app
from spmoe.models.shipped import shipped_pair

if TYPE_CHECKING:
    from conftest import Invoke

TABLE = ("tokens", "TTFT", "TPOT", "hit rate", "stall", "slots", "cutoff")  # words of the table after a run


def answer(invoke: Invoke, *arguments: object, **options: Any) -> dict[str, Any]:
    """The one JSON object that a command prints."""
    result = invoke(*arguments, "--json", **options).succeeded()
    assert result.out.count("\n") == 1
    assert result.out.endswith("}\n")
    found: dict[str, Any] = json.loads(result.out)
    return found


@pytest.fixture(scope="module")
def greedy(checkpoints: Path) -> list[int]:
    """What transformers itself continues "hello" with."""
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "target")
    tokenizer = AutoTokenizer.from_pretrained(checkpoints / "target")
    ids = torch.tensor([tokenizer("hello")["input_ids"]])
    output = model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
    found: list[int] = output[0, ids.shape[1] :].tolist()
    return found


# ---- run


def test_run_prints_text_and_only_text(checkpoints: Path, greedy: list[int], invoke: Invoke) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoints / "target")
    result = invoke("run", checkpoints / "target", "--prompt", "hello", "--max-tokens", 24, "--ignore-eos").succeeded()
    assert result.out == tokenizer.decode(greedy) + "\n"
    assert not [word for word in TABLE if word not in result.err]
    assert "emulated" not in result.err


@pytest.mark.parametrize("draft", ["none", "draft", "padded"])
def test_run_as_json(draft: str, checkpoints: Path, greedy: list[int], invoke: Invoke) -> None:
    name = draft if draft == "none" else checkpoints / draft
    options = ("--draft", name, "--max-tokens", 24, "--ignore-eos")
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


def test_prompt_from_standard_input(checkpoints: Path, invoke: Invoke) -> None:
    run = ("run", checkpoints / "target", "--max-tokens", 8)
    given = answer(invoke, *run, "--prompt", "grüße\n")
    assert given["usage"]["prompt_tokens"] == 8  # bytes
    assert answer(invoke, *run, "--prompt", "-", stdin="grüße\n".encode())["token_ids"] == given["token_ids"]
    assert answer(invoke, *run, stdin="grüße\n".encode())["token_ids"] == given["token_ids"]
    assert answer(invoke, *run, "-p", "grüße")["token_ids"] != given["token_ids"]


def test_stop_strings(checkpoints: Path, invoke: Invoke) -> None:
    run = ("run", checkpoints / "target", "--prompt", "hello", "--max-tokens", 24)
    text: str = answer(invoke, *run)["text"]
    first = text[4]
    stopped = answer(invoke, *run, "--stop", "no such text", "--stop", first)
    assert stopped["text"] == text[: text.index(first)]
    assert stopped["finish_reason"] == "stop"
    assert 0 < len(stopped["token_ids"]) < 24


def test_seeds(checkpoints: Path, invoke: Invoke) -> None:
    run = ("run", checkpoints / "target", "--prompt", "hello", "--max-tokens", 16, "--temperature", 1, "--ignore-eos")
    one = answer(invoke, *run, "--seed", 1)["token_ids"]
    assert answer(invoke, *run, "--seed", 1)["token_ids"] == one
    assert answer(invoke, *run, "--seed", 2)["token_ids"] != one


def test_end_of_text(checkpoints: Path, tmp_path: Path, greedy: list[int], invoke: Invoke) -> None:
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


def test_context_bounds_the_output(checkpoints: Path, invoke: Invoke) -> None:
    found = answer(invoke, "run", checkpoints / "target", "--max-model-len", 12, "--prompt", "hello", "--ignore-eos")
    assert found["usage"]["total_tokens"] == 12
    assert found["finish_reason"] == "length"


def test_policies_change_no_token(checkpoints: Path, greedy: list[int], invoke: Invoke) -> None:
    run = ("run", checkpoints / "target", "--draft", checkpoints / "draft", "--prompt", "hello", "--max-tokens", 24)
    for options in (
        ("--prefetch", "on-demand"),
        ("--cutoff", "all"),
        ("--cutoff", "1"),
        ("--eviction", "lru", "--expert-memory", "100%"),
        ("--num-speculative-tokens", "0"),
    ):
        assert answer(invoke, *run, "--ignore-eos", *options)["token_ids"] == greedy


def test_default_model(invoke: Invoke) -> None:
    result = invoke("run", "--prompt", "hello", "--max-tokens", 4, "--json").succeeded()
    assert len(json.loads(result.out)["token_ids"]) <= 4
    model = json.loads(invoke("info", "--json").succeeded().out)["model"]
    assert model == shipped_pair()[0]


# ---- an emulated link is never passed off as a real one


def test_emulated_link_is_said_everywhere(checkpoints: Path, invoke: Invoke) -> None:
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


# ---- chat


def test_chat_keeps_the_conversation(checkpoints: Path, invoke: Invoke) -> None:
    chat = ("chat", checkpoints / "target", "--max-tokens", 12, "--ignore-eos")
    lines = invoke(*chat, "--json", stdin=b"hi\nthere\n").succeeded().out.splitlines()
    first, second = map(json.loads, lines)
    history = f"user: hi\nassistant: {first['text']}\nuser: there\nassistant: "
    assert second["usage"]["prompt_tokens"] == len(history.encode())
    again = answer(invoke, "run", checkpoints / "target", "--prompt", history, "--max-tokens", 12, "--ignore-eos")
    assert second["token_ids"] == again["token_ids"]
    assert invoke(*chat, stdin=b"hi\nthere\n").out == f"{first['text']}\n{second['text']}\n"


@pytest.mark.parametrize("stdin", [b"", b"\nhi\n"])
def test_chat_ends_at_the_end_of_input_or_an_empty_line(stdin: bytes, checkpoints: Path, invoke: Invoke) -> None:
    assert invoke("chat", checkpoints / "target", stdin=stdin).succeeded().out == ""


# ---- info


def test_info_before_and_after_a_measurement(checkpoints: Path, own_home: Path, invoke: Invoke) -> None:
    pair = (checkpoints / "target", "--draft", checkpoints / "draft", "--expert-memory", "50%")
    before = answer(invoke, "info", *pair)
    assert not own_home.exists()  # looking writes nothing
    assert before["architecture"] == "MixtralForCausalLM"
    assert before["draft_architecture"] == "MistralForCausalLM"
    assert (before["decoder_layers"], before["moe_layers"]) == (LAYERS, LAYERS)
    assert (before["experts_per_layer"], before["top_k"], before["context"]) == (EXPERTS, TOP_K, CONTEXT)
    assert before["slots"] == LAYERS * EXPERTS // 2
    assert before["slots_bytes"] == before["slots"] * before["expert_bytes"]
    assert before["all_experts_bytes"] == 2 * before["slots_bytes"]
    assert (before["profile"], before["cutoff_layers"], before["expert_file_built"]) == (None, None, False)
    unmeasured = invoke("info", *pair).succeeded().out
    assert "auto: not known" in unmeasured
    assert "--measure" in unmeasured

    after = answer(invoke, "info", *pair, "--measure")
    assert after["expert_file_built"]
    assert Path(after["expert_file"]).is_relative_to(own_home)
    assert after["profile"]["draft_layers"] == LAYERS
    assert 0 <= after["cutoff_layers"] <= LAYERS
    table = " ".join(invoke("info", *pair).succeeded().out.split())
    for shown in (
        f"{LAYERS} of them with {EXPERTS} experts, {TOP_K} per token",
        f"{config.format_bytes(after['slots_bytes'])} expert slots ({after['slots']} slots, 50% of experts)",
        f"{config.format_bytes(after['resident_bytes'])} target without experts",
        f"{config.format_bytes(after['draft_bytes'])} draft",
        "ms per expert (store to slot)",
        f"cutoff auto: {after['cutoff_layers']} of {LAYERS} layers",
    ):
        assert shown in table


def test_info_counts_every_parameter(checkpoints: Path, invoke: Invoke) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "target")
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    found = answer(invoke, "info", checkpoints / "target")
    assert found["resident_bytes"] == 4 * (model.num_parameters() - experts)
    assert found["all_experts_bytes"] >= 4 * experts  # blobs are padded


def test_info_with_a_fixed_cutoff_needs_no_profile(checkpoints: Path, own_home: Path, invoke: Invoke) -> None:
    pair = (checkpoints / "target", "--draft", checkpoints / "draft")
    assert answer(invoke, "info", *pair, "--cutoff", 2)["cutoff_layers"] == 2
    assert answer(invoke, "info", *pair, "--cutoff", "all")["cutoff_layers"] == LAYERS
    assert "\ncutoff" not in invoke("info", *pair, "--prefetch", "on-demand").succeeded().out
    assert not own_home.exists()


# ---- help


def test_spmoe_alone_shows_help(invoke: Invoke) -> None:
    alone = invoke().succeeded()
    assert alone.err == ""
    assert alone.out == invoke("--help").succeeded().out
    for verb in ("run", "chat", "info"):
        assert f"\n  {verb} " in alone.out


@pytest.mark.parametrize("verb", [(), ("trace",)], ids=["spmoe", "spmoe trace"])
def test_verbs_are_listed_in_whole_sentences(
    verb: tuple[str, ...], invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    listed = invoke(*verb, "--help").succeeded().out.split("Commands:")[1].split("\n\n")[0].strip().splitlines()
    assert len(listed) >= 2
    assert all(line.endswith(".") and not line.endswith("...") for line in listed)


def test_every_option_has_a_help_text(invoke: Invoke) -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert {"run", "chat", "info"} <= commands.keys()
    for verb, command in commands.items():
        assert command.help
        shown = " ".join(invoke(verb, "--help").succeeded().out.split())
        for parameter in command.params:
            assert parameter.help, f"{verb} {parameter.name}"
            assert parameter.help.split(";")[0][:30] in shown
            assert parameter.param_type_name == "argument" or parameter.opts[0] in shown


def test_version(invoke: Invoke) -> None:
    assert invoke("--version").succeeded().out == f"spmoe {spmoe.__version__}\n"


def test_debugging_shows_what_is_logged() -> None:
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


def test_as_a_module_and_as_a_command() -> None:
    script = Path(sys.executable).with_name("spmoe")
    for command in ([sys.executable, "-m", "spmoe"], [str(script)]):
        version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
        assert version.stdout == f"spmoe {spmoe.__version__}\n"
    wrong = subprocess.run([sys.executable, "-m", "spmoe", "run", "--wobble"], capture_output=True, text=True)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.count("\n") == 1


def test_run_in_a_process_of_its_own(checkpoints: Path, greedy: list[int]) -> None:
    arguments = ["run", checkpoints / "target", "--draft", checkpoints / "draft", "--max-tokens", 24, "--ignore-eos"]
    command = [sys.executable, "-m", "spmoe", *map(str, arguments), "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, input=b"hello", capture_output=True, env=environment, check=True)
    assert json.loads(result.stdout)["token_ids"] == greedy
    assert result.stdout.count(b"\n") == 1
    assert result.stderr == b""
