"""Errors of the command line: one line that says what is wrong and what to do, and never a wrong answer."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import torch
from cli_checkpoints import CONTEXT, DENSE, EXPERT, byte_tokenizer, copy_of, edit_json, edit_weights
from cli_process import Command
from torch import Tensor

from spmoe.engine import request
from spmoe.experts import store
from spmoe.models import expert_reader

if TYPE_CHECKING:
    from conftest import Invoke

Change = Callable[[Path], object]
PROMPT = ("--prompt", "hello", "--max-tokens", "4")
PLAIN = ("--draft", "none")  # no note about the default draft


def weights(change: Callable[[dict[str, Tensor]], object]) -> Change:
    return lambda directory: edit_weights(directory, change)


def config(**changes: Any) -> Change:
    return lambda directory: edit_json(directory / "config.json", **changes)


def generation_config(**changes: Any) -> Change:
    return lambda directory: edit_json(directory / "generation_config.json", **changes)


def write(name: str, data: str) -> Change:
    return lambda directory: (directory / name).write_text(data)


def delete(name: str) -> Change:
    return lambda directory: (directory / name).unlink()


def put(name: str, value: float) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name][0, 0] = value

    return weights(change)


def drop(*parts: str) -> Change:
    """Return a change that deletes the tensors whose names contain all of these."""

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if all(part in n for part in parts)]:
            del tensors[name]

    return weights(change)


def index_another_tensor(directory: Path) -> None:
    path = directory / "model.safetensors.index.json"
    known = json.loads(path.read_text())["weight_map"]
    edit_json(path, weight_map={**known, "model.absent.weight": next(iter(known.values()))})


def predict_further_tokens(directory: Path) -> None:
    """Add a layer after the last one, as models with multi-token prediction have it; decoding does not use it."""
    edit_json(directory / "config.json", num_nextn_predict_layers=1)
    edit_weights(directory, lambda tensors: tensors.update({"model.layers.3.eh_proj.weight": torch.ones(32, 64)}))


# damage: (checkpoint, change, words of the error)
DAMAGED: dict[str, tuple[str, Change, tuple[str, ...]]] = {
    "a dense tensor deleted": ("target", drop(DENSE), (DENSE, "lacks", "download it again")),
    "an expert's tensor deleted": ("target", drop(EXPERT), ("model.layers.1.mlp.experts", "3 experts", "says 4")),
    "a projection deleted": ("target", drop("layers.1.", ".w1."), ("model.layers.1.mlp.experts", "lacks a part")),
    "a layer's experts deleted": ("target", drop("layers.2.", ".experts."), ("lacks model.layers.2.mlp.experts",)),
    "a shard deleted": ("sharded", delete("model-00004-of-00011.safetensors"), ("00004-of-00011", "missing")),
    "no weights": ("target", delete("model.safetensors"), ("no safetensors files", "download it again")),
    "only pickled weights": (
        "target",
        lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"),
        ("only safetensors are supported", "convert it"),
    ),
    "an index of other tensors": ("sharded", index_another_tensor, ("model.absent.weight", "no file holds")),
    "an index that is not JSON": ("sharded", write("model.safetensors.index.json", "{"), ("index.json", "not JSON")),
    "an index of nothing": ("sharded", write("model.safetensors.index.json", '{"weight_map": [1]}'), ("which file",)),
    "truncated weights": ("target", lambda d: os.truncate(d / "model.safetensors", 200_000), ("truncated",)),
    "empty weights": ("target", lambda d: os.truncate(d / "model.safetensors", 0), ("truncated",)),
    "no safetensors in it": ("target", write("model.safetensors", "hello " * 100), ("not a safetensors file",)),
    "not a number in a dense weight": ("target", put(DENSE, float("nan")), (DENSE, "not finite", "damaged")),
    "infinity in an expert": ("target", put(EXPERT, float("inf")), ("experts", "(expert 2)", "not finite")),
    "another hidden size": ("target", config(hidden_size=64), ("disagree", "[257, 32]", "[257, 64]")),
    "another intermediate size": ("target", config(intermediate_size=64), ("disagree", "[96, 32]", "[128, 32]")),
    "fewer experts": ("target", config(num_local_experts=2), ("disagree", "gate.weight", "[4, 32]", "[2, 32]")),
    "more experts": ("target", config(num_local_experts=8), ("disagree", "gate.weight", "[4, 32]", "[8, 32]")),
    "fewer layers": ("target", config(num_hidden_layers=2), ("disagree", "holds model.layers.2.", "no place")),
    "more layers": (
        "target",
        config(num_hidden_layers=4),
        ("lacks model.layers.3.", "config.json does not belong to it"),
    ),
    "a bias the config denies": (
        "target",
        weights(lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)})),
        ("disagree", "q_proj.bias", "no place"),
    ),
    "more experts per token than there are": ("target", config(num_experts_per_tok=5), ("cannot be loaded",)),
    "no experts per token": ("target", config(num_experts_per_tok=0), ("no expert at all",)),
    "no attention heads": ("target", config(num_attention_heads=0), ("cannot be loaded", "config.json")),
    "a size that is no number": ("target", config(hidden_size="wide"), ("config.json", "'hidden_size'")),
    "an activation nobody knows": ("target", config(hidden_act="wobble"), ("cannot be loaded", "wobble")),
    "an unknown architecture": ("target", config(model_type="wobble"), ("does not know", "'wobble'", "upgrade")),
    "an architecture with code of its own": (
        "target",
        config(model_type="wobble", auto_map={"AutoConfig": "wobble.Config"}),
        ("does not know", "'wobble'"),
    ),
    "no model type": ("target", config(model_type=None), ("does not know", "check config.json")),
    "a config that is not JSON": ("target", write("config.json", "hello"), ("config.json is not JSON", "download")),
    "a config that is a list": ("target", write("config.json", "[]"), ("config.json", "JSON object")),
    "no config": ("target", delete("config.json"), ("has no config.json", "check the path")),
    "a quantized checkpoint": (
        "target",
        config(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
        ("quantized", "bitsandbytes", "16-bit checkpoint", "awq"),
    ),
    "a dtype it cannot run": ("target", config(dtype="float8_e4m3fn"), ("float8_e4m3fn", "--dtype bfloat16")),
    "a generation config that is not JSON": ("target", write("generation_config.json", "{"), ("not JSON",)),
    "a generation config that is a list": ("target", write("generation_config.json", "[]"), ("JSON object",)),
    "a last token that is a word": ("target", generation_config(eos_token_id="end"), ("eos_token_id", "'end'")),
    "a negative temperature": ("target", generation_config(temperature=-5.0), ("-5.0", "--generation-config none")),
    "last tokens in a list too deep": ("target", generation_config(eos_token_id=[[1]]), ("eos_token_id", "[[1]]")),
    "a tokenizer that is not JSON": ("target", write("tokenizer.json", "{"), ("tokenizer", "download it again")),
    "a tokenizer without parts": ("target", write("tokenizer.json", "{}"), ("tokenizer", "download it again")),
    "a tokenizer config that is not JSON": ("target", write("tokenizer_config.json", "{"), ("tokenizer",)),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_run_rejects_damaged_checkpoints(
    damage: str, checkpoints: Path, tmp_path: Path, own_home: Path, invoke: Invoke
) -> None:
    base, change, words = DAMAGED[damage]
    model = copy_of(checkpoints / base, tmp_path)
    change(model)
    invoke("run", model, *PROMPT).refused(1, *words)
    assert not list(own_home.rglob("*.safetensors"))  # no expert file is left behind
    assert not list(own_home.rglob("*.partial"))


REJECTED_BY_INFO = ["no weights", "a shard deleted", "truncated weights", "no config", "a config that is not JSON"]
REJECTED_BY_INFO += ["more experts per token than there are", "no experts per token", "no attention heads"]
REJECTED_BY_INFO += ["an activation nobody knows", "an unknown architecture", "a quantized checkpoint"]
REJECTED_BY_INFO += ["a size that is no number"]


@pytest.mark.parametrize("damage", REJECTED_BY_INFO)
def test_info_rejects_damaged_checkpoints(damage: str, checkpoints: Path, tmp_path: Path, invoke: Invoke) -> None:
    base, change, words = DAMAGED[damage]
    model = copy_of(checkpoints / base, tmp_path)
    change(model)
    invoke("info", model).refused(1, *words)


@pytest.mark.parametrize("damage", ["a dense tensor deleted", "fewer layers", "another hidden size", "empty weights"])
def test_run_rejects_damaged_drafts(damage: str, checkpoints: Path, tmp_path: Path, invoke: Invoke) -> None:
    _, change, words = DAMAGED[damage]
    draft = copy_of(checkpoints / "draft", tmp_path)
    change(draft)
    invoke("run", checkpoints / "target", "--draft", draft, *PROMPT).refused(1, *words)


@pytest.mark.parametrize(
    "change",
    [
        generation_config(eos_token_id=[1, 2, 256]),
        generation_config(eos_token_id=100_000),
        generation_config(do_sample=False, temperature=-5.0, top_p=7.0, max_length="long", wobble=True),
        delete("generation_config.json"),
        config(auto_map={"AutoConfig": "wobble.Config"}),  # code that a known architecture does not need
        predict_further_tokens,
    ],
)
def test_unusual_but_valid_checkpoints_run(change: Change, checkpoints: Path, tmp_path: Path, invoke: Invoke) -> None:
    expected = invoke("run", checkpoints / "target", *PROMPT).succeeded().out
    model = copy_of(checkpoints / "target", tmp_path)
    change(model)
    assert invoke("run", model, *PROMPT).succeeded().out == expected


# ---- models of another kind


@pytest.mark.parametrize("command", [("run", *PROMPT), ("info",), ("plan",), ("verify",)])
def test_dense_model_is_called_dense(command: tuple[str, ...], checkpoints: Path, invoke: Invoke) -> None:
    result = invoke(command[0], checkpoints / "dense", *command[1:])
    result.refused(2, "is a dense model (LlamaForCausalLM), without experts", "--draft")


@pytest.mark.parametrize("command", [("run", *PROMPT), ("info",), ("plan",)])
def test_gguf_is_answered_with_the_supported_formats(
    command: tuple[str, ...], checkpoints: Path, tmp_path: Path, invoke: Invoke
) -> None:
    words = ("GGUF", "safetensors checkpoints", "fp8, mxfp4, gptq", "original model")
    (tmp_path / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    for name in (tmp_path / "model-Q4_K_M.gguf", tmp_path, "./absent.gguf", "owner/model.gguf"):
        invoke(command[0], name, *command[1:]).refused(2, *words)
    invoke(command[0], checkpoints / "target", "--draft", tmp_path, *command[1:]).refused(2, *words)


# ---- model names


def test_model_that_is_a_file(checkpoints: Path, invoke: Invoke) -> None:
    invoke("run", checkpoints / "target" / "config.json", *PROMPT).refused(2, "is a file", "give the directory")


def test_prompt_in_the_place_of_a_model(invoke: Invoke) -> None:
    invoke("run", "def add(a, b):").refused(2, "no directory def add(a, b):", "give a prompt with --prompt")


def test_hub_id_that_is_not_cached_offline(checkpoints: Path, invoke: Invoke) -> None:
    words = ("no directory nobody/nothing", "check the spelling", "HF_HUB_OFFLINE")
    invoke("run", "nobody/nothing", *PROMPT).refused(1, *words)
    invoke("info", "nobody/nothing").refused(1, *words)
    invoke("run", checkpoints / "target", "--draft", "nobody/nothing", *PROMPT).refused(1, *words)


@pytest.mark.parametrize("name", ["/no/such/directory", "~nobody-of-that-name/model", "a" * 5000, "/" + "a" * 5000])
def test_path_that_cannot_exist(name: str, invoke: Invoke) -> None:
    invoke("run", name, *PROMPT).refused(2, name[:50], "check")


# ---- drafts


def test_draft_with_another_tokenizer(checkpoints: Path, tmp_path: Path, invoke: Invoke) -> None:
    draft = copy_of(checkpoints / "draft", tmp_path)
    byte_tokenizer(first="<other>").save_pretrained(draft)
    result = invoke("run", checkpoints / "target", "--draft", draft, *PROMPT)
    result.refused(2, "tokenizer differs", "token 0 is '!'", "'<other>'", "choose a draft")


def test_draft_without_a_tokenizer(checkpoints: Path, tmp_path: Path, invoke: Invoke) -> None:
    draft = copy_of(checkpoints / "draft", tmp_path)
    for path in draft.glob("tokenizer*"):
        path.unlink()
    result = invoke("run", checkpoints / "target", "--draft", draft, *PROMPT)
    result.refused(2, "cannot be shown to share a tokenizer", "choose a draft")


def test_draft_with_a_padded_vocabulary_is_fine(checkpoints: Path, invoke: Invoke) -> None:
    alone = invoke("run", checkpoints / "target", *PROMPT).succeeded()
    result = invoke("run", checkpoints / "target", "--draft", checkpoints / "padded", "-k", 4, *PROMPT).succeeded()
    assert result.out == alone.out
    assert "acceptance" in result.err


# ---- budgets


@pytest.mark.parametrize("verb", ["run", "info"])
@pytest.mark.parametrize("budget", ["1KiB", "8%"])
def test_budget_below_one_layers_experts(
    verb: str, budget: str, checkpoints: Path, own_home: Path, invoke: Invoke
) -> None:
    prompt = PROMPT if verb == "run" else ()
    result = invoke(verb, checkpoints / "target", "--expert-memory", budget, *prompt)
    result.refused(2, "--expert-memory", "needs 2 of a layer at once", "give at least")
    assert not own_home.exists()  # rejected before the experts are converted, which takes long


def test_the_minimum_budget_in_the_error_works(checkpoints: Path, invoke: Invoke) -> None:
    def run(budget: str) -> Any:
        return invoke(
            "run", checkpoints / "target", "--expert-memory", budget, "--prompt", "hello", "--max-tokens", 16, "--json"
        )

    stated = re.search(r"at least (\S+) or (\S+%)", run("1KiB").err)
    assert stated
    everything = json.loads(run("100%").succeeded().out)
    for budget in stated.groups():
        least = json.loads(run(budget).succeeded().out)
        assert least["stats"]["slots"] == 2
        assert least["token_ids"] == everything["token_ids"]
    number = int(stated[1].removesuffix("KiB"))
    run(f"{number - 1}KiB").refused(2, "holds 1 expert of")


def test_slots_that_cannot_be_allocated(checkpoints: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(*shape: int, **options: Any) -> NoReturn:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("spmoe.experts.slots.torch", type("Torch", (), {"empty": empty, "uint8": torch.uint8}))
    invoke("run", checkpoints / "target", *PROMPT).refused(2, "cannot allocate", "lower --expert-memory")


# ---- prompts


def test_empty_prompts(checkpoints: Path, invoke: Invoke) -> None:
    invoke("run", checkpoints / "target", "--prompt", "").refused(2, "prompt is empty")
    invoke("run", checkpoints / "target").refused(2, "prompt is empty")  # from an empty standard input


def test_prompt_longer_than_the_context(checkpoints: Path, invoke: Invoke) -> None:
    words = (f"{CONTEXT + 1} tokens", f"holds {CONTEXT}", "shorten")
    invoke("run", checkpoints / "target", *PLAIN, "--prompt", "a" * (CONTEXT + 1)).refused(2, *words)
    result = invoke("run", checkpoints / "target", *PLAIN, "--max-model-len", 9, "--prompt", "a" * 9)
    result.refused(2, "9 tokens", "holds 9")


def test_max_model_len_above_the_models_limit_is_lowered_with_a_note(checkpoints: Path, invoke: Invoke) -> None:
    result = invoke("run", checkpoints / "target", "--max-model-len", CONTEXT + 1, *PROMPT).succeeded()
    assert f"note: the model reads {CONTEXT} positions, so --max-model-len {CONTEXT + 1} is lowered" in result.err


def test_input_that_is_not_text(checkpoints: Path, invoke: Invoke) -> None:
    for verb in ("run", "chat"):
        invoke(verb, checkpoints / "target", *PLAIN, stdin=b"caf\xe9\n").refused(2, "standard input is not UTF-8")
    invoke("run", checkpoints / "target", *PLAIN, "--prompt", os.fsdecode(b"caf\xe9")).refused(
        2, "prompt is not text", "UTF-8"
    )


def test_model_without_a_tokenizer(checkpoints: Path, tmp_path: Path, invoke: Invoke) -> None:
    model = copy_of(checkpoints / "target", tmp_path)
    for path in model.glob("tokenizer*"):
        path.unlink()
    invoke("run", model, *PLAIN, *PROMPT).refused(2, "ships no tokenizer", "token ids")


# ---- options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--temperature", "-1"), ("temperature", "0 or more", "-1")),
        (("--temperature", "nan"), ("temperature", "nan")),
        (("--temperature", "hot"), ("'--temperature': must be a valid number, not 'hot'; see", "--help")),
        (("--max-tokens", "1.5"), ("'--max-tokens': must be a valid integer, not '1.5'; see", "--help")),
        (("--top-p", "0"), ("top_p", "above 0")),
        (("--top-k", "-2"), ("top_k", "-1 or 0 (off) or more")),
        (("--repetition-penalty", "0"), ("repetition_penalty", "above 0")),
        (("--presence-penalty", "3"), ("presence_penalty", "from -2 to 2")),
        (("--min-tokens", "9", "--max-tokens", "8"), ("min_tokens", "at most max_tokens, 8")),
        (("--stop-token-ids", "-1"), ("stop_token_ids", "list of token ids")),
        (("--generation-config", "foo"), ("generation_config", "auto, none")),
        (("--min-p", "2"), ("min_p", "between 0 and 1")),
        (("--cutoff", "x"), ("'x' is not a cutoff", "just-in-time, all or a number")),
        (("--cutoff", "-1"), ("'-1' is not a cutoff",)),
        (("--expert-memory", "foo"), ("'foo' is not a size", "6GiB")),
        (("--expert-memory", "0"), ("'0' is not a size",)),
        (("--expert-memory", "200%"), ("'200%' is not a size",)),
        (("--prefetch", "foo"), ("prefetch", "'foo'", "next-gate, on-demand")),
        (("--eviction", "foo"), ("eviction", "'foo'", "auto", "lru-per-layer")),
        (("--dtype", "foo"), ("dtype", "'foo'", "bfloat16")),
        (("--max-tokens", "0"), ("max_tokens", "at least 1")),
        (("--max-model-len", "1"), ("max_model_len", "at least 2")),
        (("--num-speculative-tokens", "65"), ("num_speculative_tokens", "from 0 to 64")),
        (("--link-gbps", "0"), ("link_gbps", "above 0")),
        (("--seed", "-1"), ("seed", "from 0")),
        (("--stop", ""), ("stop", "empty string")),
        (("--prefetch", "on-demand+draftgate"), ("'on-demand+draftgate'; did you mean draft-gate?",)),
        (("--eviction", "lr"), ("'lr'; did you mean lru?",)),
        (("--dtype", "half"), ("'half'; did you mean float16?",)),
        (("--device", "gpu"), ("'gpu'; did you mean cuda?",)),
        (("--expert-format", "int4g32"), ("'int4g32'; did you mean int4-g32?",)),
        (("--draft", "ngrm"), ("'ngrm'; did you mean ngram?",)),
        (("--draft", "self-int4"), ("'self-int4'; did you mean self:int4?",)),
        (("--wobble",), ("--wobble", "`spmoe run --help`")),
        (("--max-tokens",), ("--max-tokens", "--help")),
        (("one", "too many"), ("one too many", "--help")),
    ],
)
def test_bad_option(options: tuple[str, ...], words: tuple[str, ...], invoke: Invoke) -> None:
    invoke("run", "no-such-model", "--prompt", "hello", *options).refused(2, *words)


def test_policy_that_needs_recorded_routing(mixtral_pair: Any, invoke: Invoke) -> None:
    for verb in (("run", "--prompt", "hello"), ("info",)):
        refused = invoke(verb[0], str(mixtral_pair.target), *verb[1:], "--prefetch", "oracle")
        refused.refused(2, "oracle", "spmoe bench", "choose another policy")


def test_size_without_a_unit(checkpoints: Path, invoke: Invoke) -> None:
    invoke("run", checkpoints / "target", *PROMPT, "--expert-memory", "25").refused(
        2, "--expert-memory 25 B (a number without a unit is in bytes) holds 0 experts"
    )


def test_unknown_command(invoke: Invoke) -> None:
    invoke("wobble").refused(2, "'wobble'", "`spmoe --help`")
    invoke("--wobble").refused(2, "--wobble", "`spmoe --help`")


# ---- files, permissions and disks


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "."])
def test_unreadable_file(
    name: str,
    checkpoints: Path,
    public_place: Path,
    as_ordinary_user: Callable[[], AbstractContextManager[None]],
    invoke: Invoke,
) -> None:
    model = copy_of(checkpoints / "target", public_place)
    for path in model.iterdir():
        path.chmod(0o644)
    (model / name).chmod(0o000)
    with as_ordinary_user():
        result = invoke("run", model, *PROMPT)
    result.refused(1, str(model), "cannot be read", "Permission denied", "check its permissions")


@pytest.mark.parametrize("mode", [0o555, 0o000])
def test_cache_directory_without_write_permission(
    mode: int,
    checkpoints: Path,
    public_place: Path,
    as_ordinary_user: Callable[[], AbstractContextManager[None]],
    invoke: Invoke,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = copy_of(checkpoints / "target", public_place)
    for path in model.iterdir():
        path.chmod(0o644)
    home = public_place / "home"
    home.mkdir(mode)
    home.chmod(mode)
    monkeypatch.setenv("SPMOE_HOME", str(home))
    with as_ordinary_user():
        with_model = invoke("run", model, *PROMPT)
        without = invoke("run", *PROMPT)
    with_model.refused(1, str(home), "Permission denied", "SPMOE_HOME")
    without.refused(1, str(home), "Permission denied", "SPMOE_HOME")


def test_cache_directory_that_is_a_file(
    checkpoints: Path, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("SPMOE_HOME", str(file))
    invoke("run", checkpoints / "target", *PROMPT).refused(1, str(file), "SPMOE_HOME", "writable directory")
    invoke("run", *PROMPT).refused(1, str(file), "SPMOE_HOME", "writable directory")
    invoke("info", checkpoints / "target").succeeded()  # info writes no files


def test_disk_too_small_for_the_experts(
    checkpoints: Path, own_home: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 1000))
    invoke("run", checkpoints / "target", *PROMPT).refused(1, "disk is full", "240.0 KiB", "1000 B free", "SPMOE_HOME")
    assert not list(own_home.rglob("*.partial"))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_write_that_fails_during_conversion(
    number: int, checkpoints: Path, own_home: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = iter(range(100))
    original = store._write_all

    def write_all(fd: int, data: memoryview) -> None:
        if next(writes) == 5:
            raise OSError(number, os.strerror(number))
        original(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(store, "_write_all", write_all)
        invoke("run", checkpoints / "target", *PROMPT).refused(1, os.strerror(number), "SPMOE_HOME")
    assert not [path for path in own_home.rglob("*") if path.is_file() and path.suffix != ".lock"]
    invoke("run", checkpoints / "target", *PROMPT).succeeded()


def test_standard_output_that_cannot_be_written(checkpoints: Path, invoke: Invoke) -> None:
    for options in ((), ("--json",)):
        with Path("/dev/full").open("wb", buffering=0) as raw:
            full = io.TextIOWrapper(raw, encoding="utf-8", write_through=True)
            result = invoke("run", checkpoints / "target", *PLAIN, *PROMPT, *options, stdout=full)
        result.refused(1, "No space left", "where the output goes")


# ---- damaged caches


@pytest.fixture
def expert_file(checkpoints: Path, own_home: Path, invoke: Invoke) -> Path:
    """Return the target's expert file, in this test's own cache directory."""
    invoke("run", checkpoints / "target", *PROMPT).succeeded()
    (path,) = own_home.rglob("*.safetensors")
    return path


@pytest.mark.parametrize("harm", ["header", "length", "fingerprint", "truncated", "empty"])
def test_expert_file_with_a_damaged_header_is_rebuilt(
    harm: str, expert_file: Path, checkpoints: Path, invoke: Invoke
) -> None:
    expected = invoke("run", checkpoints / "target", *PROMPT).out
    sound = expert_file.read_bytes()
    harmed = {
        "header": sound[:8] + b"x" + sound[9:],
        "length": b"\xff" * 8 + sound[8:],
        "fingerprint": re.sub(rb'("fingerprint": ").', rb"\1x", sound, count=1),
        "truncated": sound[:-1],
        "empty": b"",
    }[harm]
    expert_file.write_bytes(harmed)
    assert invoke("run", checkpoints / "target", *PROMPT).succeeded().out == expected
    assert expert_file.read_bytes() == sound


@pytest.mark.parametrize("draft", ["none", "draft"])
def test_flipped_byte_in_an_expert(draft: str, expert_file: Path, checkpoints: Path, invoke: Invoke) -> None:
    data = bytearray(expert_file.read_bytes())
    data[-10_000] ^= 1  # the last expert
    expert_file.write_bytes(data)
    options = ("--draft", checkpoints / draft if draft != "none" else "none")
    result = invoke("run", checkpoints / "target", *options, "--prompt", "hello " * 20, "--json")
    result.refused(
        1, "expert 3 of layer 2", str(expert_file), "checksum", "the file was deleted, and the next run writes it again"
    )


@pytest.mark.parametrize("options", [(), ("--json",), ("--link-gbps", "1")])
def test_read_that_fails_mid_generation(
    options: tuple[str, ...], expert_file: Path, checkpoints: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = invoke("run", checkpoints / "target", "--prompt", "hello", "--max-tokens", "40").out
    _at_token(6, lambda: os.truncate(expert_file, 30_000), monkeypatch)
    result = invoke("run", checkpoints / "target", "--prompt", "hello", "--max-tokens", "40", *options)
    assert result.code == 1
    *notes, error = result.err.splitlines()
    assert error.startswith("error: expert ")
    assert "ends" in error
    assert "check the disk" in error
    assert all(note.startswith("note: ") for note in notes)
    assert result.out.endswith("\n") or "--json" in options
    assert whole.startswith(result.out.strip("\n\N{REPLACEMENT CHARACTER}"))
    assert bool(result.out) == ("--json" not in options)


@pytest.mark.parametrize(
    "harm",
    [
        lambda text: "{",
        lambda text: "[]",
        lambda text: "{}",
        lambda text: "\0",
        lambda text: text.replace(": 0.", ": -0."),
        lambda text: text.replace('"draft_layers": 3', '"draft_layers": "three"'),
        lambda text: text.replace('"draft_layers": 3', '"draft_layers": NaN'),
        lambda text: text.replace('"draft_layers": 3', '"wobble": 3'),
    ],
)
def test_damaged_profile_is_measured_again(
    harm: Callable[[str], str], checkpoints: Path, own_home: Path, invoke: Invoke
) -> None:
    pair = (checkpoints / "target", "--draft", checkpoints / "draft")
    expected = invoke("run", *pair, *PROMPT).succeeded().out
    (path,) = own_home.rglob("profiles/*.json")
    sound = json.loads(path.read_text())
    harmed = harm(path.read_text())
    assert harmed != path.read_text()
    path.write_text(harmed)
    assert json.loads(invoke("info", *pair, "--json").succeeded().out)["prefetch"]["profile"] is None
    assert invoke("run", *pair, *PROMPT).succeeded().out == expected
    again = json.loads(path.read_text())
    assert again.keys() == sound.keys()
    assert again["draft_layers"] == sound["draft_layers"]


# ---- interruptions


def _at_token(number: int, act: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call `act` after this many tokens."""
    original = request.Request._take

    def take(self: request.Request, token: int) -> Iterator[str]:
        yield from original(self, token)
        if len(self.token_ids) == number:
            act()

    monkeypatch.setattr(request.Request, "_take", take)


def _press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)  # until the main thread has handled it


@pytest.fixture
def own_ctrl_c() -> Iterator[None]:
    """Set Python's own SIGINT handler, which a session started in the background may lack, and check it at the end."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler  # restored by the code


@pytest.mark.usefixtures("own_ctrl_c")
@pytest.mark.parametrize("presses", [1, 2])
@pytest.mark.parametrize("draft", ["none", "draft"])
def test_ctrl_c_stops_a_run(
    presses: int, draft: str, checkpoints: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--draft", checkpoints / draft if draft != "none" else "none")
    run = ("run", checkpoints / "target", *options, "--prompt", "hello", "--max-tokens", 60)
    whole = json.loads(invoke(*run, "--json").succeeded().out)
    _at_token(7, lambda: [_press_ctrl_c() for _ in range(presses)], monkeypatch)

    result = invoke(*run, "--json")
    assert result.code == 130
    stopped = json.loads(result.out)
    assert stopped["finish_reason"] == "interrupted"
    assert 7 <= len(stopped["token_ids"]) < 60
    assert stopped["token_ids"] == whole["token_ids"][: len(stopped["token_ids"])]
    assert stopped["text"]
    assert stopped["usage"]["completion_tokens"] == len(stopped["token_ids"])

    shown = invoke(*run)
    assert (shown.code, shown.out) == (130, stopped["text"] + "\n")
    assert "hit rate" in shown.err  # the statistics


@pytest.mark.usefixtures("own_ctrl_c")
def test_ctrl_c_during_conversion_leaves_nothing_behind(
    checkpoints: Path, own_home: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = expert_reader.ExpertReader.fill
    partials: list[Path] = []

    def fill(self: Any, key: Any, views: Any) -> None:
        original(self, key, views)
        if tuple(key) == (1, 2):
            partials.extend(own_home.rglob(".*.partial"))
            _press_ctrl_c()

    with monkeypatch.context() as patch:
        patch.setattr(expert_reader.ExpertReader, "fill", fill)
        result = invoke("run", checkpoints / "target", *PROMPT)
    assert (result.code, result.out) == (130, "")
    assert "Traceback" not in result.err
    assert len(partials) == 1  # the conversion had started
    assert not [path for path in own_home.rglob("*") if path.is_file() and path.suffix != ".lock"]
    invoke("run", checkpoints / "target", *PROMPT).succeeded()


# ---- in a process of its own


def test_ctrl_c_from_outside(checkpoints: Path) -> None:
    slow = ("--link-gbps", 0.0005, "--max-tokens", 400, "--ignore-eos")
    with Command("run", checkpoints / "target", "--prompt", "hello", *slow) as command:
        first = command.stdout.read(1)  # it generates
        command.interrupt()
        out, err = command.stdout.read(), command.stderr.read()
        assert command.wait() == 130
    assert first
    assert out.endswith(b"\n")
    assert b"emulated link" in err
    assert b"hit rate" in err
    assert b"Traceback" not in err


def test_reader_that_closes_the_pipe_early(checkpoints: Path) -> None:
    with Command("run", checkpoints / "target", *PLAIN, *PROMPT, "--max-tokens", 400, "--ignore-eos") as command:
        assert command.stdout.read(1)
        command.stdout.close()
        err = command.stderr.read()
        assert command.wait() == 1
    assert err == b""


def test_disk_that_fills_during_conversion(checkpoints: Path, own_home: Path) -> None:
    with Command("run", checkpoints / "target", *PROMPT, max_file_bytes=100_000) as command:
        out, err = command.stdout.read(), command.stderr.read()
        assert command.wait() == 1
    assert out == b""
    (line,) = err.decode().splitlines()
    assert line.startswith("error: the disk is full: ")
    assert "SPMOE_HOME" in line
    assert not [path for path in own_home.rglob("*") if path.is_file() and path.suffix != ".lock"]
