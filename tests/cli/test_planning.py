"""`spmoe plan`, and `spmoe info` and `spmoe run` of models on the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hub_server import HubServer, hub_server
from sparse_checkpoints import mixtral_8x7b

if TYPE_CHECKING:
    from conftest import Invoke

DESKTOP = ("--device-memory", "24GiB", "--host-memory", "64GiB", "--link-gbps", "25", "--device-gbps", "1000")
DESKTOP += ("--host-gbps", "60")
NAME, DRAFT = "acme/target", "acme/draft"


@pytest.fixture
def server(checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Serve a tiny pair on a hub."""
    with hub_server(tmp_path / "cache", monkeypatch) as server:
        server.repositories = {NAME: checkpoints / "sharded", DRAFT: checkpoints / "draft"}
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        yield server


def answer(invoke: Invoke, *arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(invoke(*arguments, "--json").succeeded().out)
    return found


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint with the sizes of Mixtral-8x7B and no data."""
    return mixtral_8x7b(tmp_path_factory.mktemp("models") / "Mixtral-8x7B-v0.1")


def test_output_says_what_fits_how_fast_and_what_to_run(mixtral: Path, invoke: Invoke) -> None:
    result = invoke("plan", mixtral, *DESKTOP).succeeded()
    lines = result.out.splitlines()
    assert len(lines) <= 30
    assert result.err == ""
    text = " ".join(result.out.split())
    assert "46.7 B parameters" in text
    assert "given: 24.0 GiB device memory, 64.0 GiB host memory, link 25 GB/s" in text
    assert "assumed:" not in text
    assert "of 256 experts (" in text
    assert "84.0 GiB for all experts: does not fit, 22.0 GiB missing" in text
    assert "self:int4 - - does not fit on the device" in text
    (none,) = (line.split() for line in lines if line.split()[:2] == ["none", "0"])
    assert none[-1] == "link"
    assert "advice --cpu-experts auto also computes missing experts on the CPU: about" in text
    assert lines[-2].startswith("recommended, once it fits:")
    assert lines[-1].split()[:3] == ["spmoe", "run", str(mixtral)]


def test_json_is_one_object_with_the_same_values(mixtral: Path, invoke: Invoke) -> None:
    found = answer(invoke, "plan", mixtral, *DESKTOP, "--draft", "ngram", "-k", "4")
    assert found["hardware"]["sources"] == dict.fromkeys(
        ("device_memory", "host_memory", "link_gbps", "device_gbps", "host_gbps"), "given"
    )
    assert [(one["draft"], one["num_speculative_tokens"]) for one in found["cases"]] == [(None, 0), ("ngram", 4)]
    best = found["cases"][found["best"]]
    assert best["memory"]["slots_bytes"] == best["memory"]["slots"] * found["expert_bytes"]
    assert best["times"]["even"]["floor_seconds"] <= best["times"]["even"]["seconds"]
    assert found["command"].startswith(f"spmoe run {mixtral}")


@pytest.mark.parametrize("memory", ["1GiB", "460KiB"])
def test_recommended_command_runs(memory: str, checkpoints: Path, invoke: Invoke) -> None:
    found = answer(invoke, "plan", checkpoints / "target", "--device", "cpu", "--host-memory", memory)
    assert (found["cases"][0]["memory"]["slots"] == 12) == (memory == "1GiB")
    *words, flag, prompt = found["command"].split()
    assert (words[:2], flag) == (["spmoe", "run"], "--prompt")
    invoke(*words[1:], flag, prompt.strip("'"), "--max-tokens", "4").succeeded()


def test_hardware_that_is_not_given_is_marked_as_assumed(checkpoints: Path, invoke: Invoke) -> None:
    shown = invoke("plan", checkpoints / "target", "--device", "cpu", "--host-memory", "1GiB").succeeded().out
    assert "given: 1.0 GiB host memory" in shown
    assert "assumed: disk 3 GB/s" in shown
    assert "(set --link-gbps)" in shown


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--device-memory", "lots"), ("'lots' is not a size", "6GiB")),
        (("--device-memory", "50%"), ("--device-memory must be a size such as 24GiB", "'50%'")),
        (("--device-memory", "24"), ("--device-memory must be a size such as 24GiB, not '24', which is 24 B",)),
        (("--host-memory", "0"), ("'0' is not a size",)),
        (("--link-gbps", "0"), ("--link-gbps must be a speed above 0", "not 0")),
        (("--device-gbps", "-5"), ("--device-gbps must be a speed above 0", "not -5")),
        (("--device-gbps", "inf"), ("--device-gbps", "not inf")),
        (("--device", "tpu"), ("device must be cuda or cpu", "'tpu'")),
        (("--device", "cpu", "--device-memory", "8GiB"), ("--host-memory",)),
        (("--acceptance", "1.5"), ("--acceptance must be from 0 to 1", "1.5")),
        (("--draft", "self:int3"), ("self:int8 or self:int4", "'self:int3'")),
        (("--draft", "/no/such/draft"), ("no directory /no/such/draft",)),
        (("-k", "many"), ("num_speculative_tokens", "'many'")),
        (("--dtype", "int8"), ("dtype must be one of", "'int8'")),
    ],
    ids=str,
)
def test_bad_options(options: tuple[str, ...], words: tuple[str, ...], checkpoints: Path, invoke: Invoke) -> None:
    invoke("plan", checkpoints / "target", *options).refused(2, *words)


# ---- models on the hub


@pytest.mark.parametrize("command", [("plan", *DESKTOP), ("info",)])
def test_hub_model_is_shown_without_a_download(
    command: tuple[str, ...], server: HubServer, checkpoints: Path, tmp_path: Path, invoke: Invoke
) -> None:
    remote = answer(invoke, command[0], NAME, "--draft", DRAFT, *command[1:])
    local = answer(invoke, command[0], checkpoints / "sharded", "--draft", checkpoints / "draft", *command[1:])
    served = {name: count for name, count in server.served.items() if name.endswith(".safetensors")}
    headers = sum(count for name, count in served.items())
    assert served  # headers, by ranges: the client asks for 100 kB at once, and these files are smaller
    assert headers <= len(served) * 100_001
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    if command[0] == "plan":
        assert remote["download_bytes"] > 0
        assert local["download_bytes"] == 0
        assert [one["times"] for one in remote["cases"]] == [one["times"] for one in local["cases"]]
        assert [one["memory"] for one in remote["cases"]] == [one["memory"] for one in local["cases"]]
    else:
        assert remote["memory"] == local["memory"]
        assert remote["target"]["parameters"] == local["target"]["parameters"]
        assert remote["target"]["name"] == NAME
        assert remote["target"]["download_bytes"] > local["target"]["download_bytes"] == 0


def test_run_announces_the_download_once_and_then_works_offline(
    server: HubServer, checkpoints: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = ("--prompt", "hello", "--max-tokens", "4")
    first = invoke("run", NAME, *prompt).succeeded()
    assert first.out == invoke("run", checkpoints / "sharded", *prompt).succeeded().out
    assert first.err.startswith("downloading ")
    assert f"of {NAME} (" in first.err.splitlines()[0]
    served = server.served.total()
    server.close()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for command in (("run", NAME, *prompt), ("info", NAME), ("plan", NAME, *DESKTOP)):
        assert "downloading" not in invoke(*command).succeeded().err
    assert server.served.total() == served


def test_dense_hub_model_is_refused_before_its_download(server: HubServer, tmp_path: Path, invoke: Invoke) -> None:
    invoke("run", DRAFT, "--prompt", "hello").refused(2, "is a dense model (MistralForCausalLM)", "--draft")
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_misspelled_hub_id(server: HubServer, invoke: Invoke) -> None:
    for command in (("run", "acme/tarjet", "--prompt", "hello"), ("info", "acme/tarjet"), ("plan", "acme/tarjet")):
        invoke(*command).refused(2, "acme/tarjet", "check the spelling", "HF_TOKEN")
