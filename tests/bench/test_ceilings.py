"""Measured ceilings and the description of the machine."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

from checkpoints import Pair
from spmoe import LLM
from spmoe.backends.devices import memory_bandwidth
from spmoe.bench import ceilings
from spmoe.bench.ceilings import all_experts_fit, machine, measure_ceilings

CPU = torch.device("cpu")


@pytest.mark.parametrize(("link", "source"), [(None, "expert file"), (0.5, "emulated")])
def test_ceilings_on_cpu(mixtral_pair: Pair, link: float | None, source: str) -> None:
    with LLM(str(mixtral_pair.target), None, device="cpu", progress=False, link_gbps=link) as llm:
        before = llm.engine.counters.copy()
        found = measure_ceilings(llm.engine)
        assert llm.engine.counters == before, "the measurement is not counted"
        assert all_experts_fit(CPU, llm.engine.parts.memory, llm.engine.spec.nbytes)
        assert not all_experts_fit(CPU, llm.engine.parts.memory, 2**60)
    assert found.link_source == source
    assert found.link == 0.5e9 if link else found.link > 1e6
    assert found.memory > 1e8


def test_machine_record_has_hardware_and_versions() -> None:
    found = machine(CPU)
    assert json.dumps(found)
    assert found["device"] == "cpu"
    assert found["torch"] == torch.__version__
    assert all(found[name] for name in ("spmoe", "transformers", "python", "platform", "processor"))
    assert found["threads"] == torch.get_num_threads()
    assert 1 <= found["usable_cores"] <= found["cores"]
    assert found["memory_bytes"] > 2**28
    age = datetime.now(UTC) - datetime.fromisoformat(found["date"])
    assert timedelta(0) <= age < timedelta(minutes=5)


def test_commit_only_of_the_checkout_that_tracks_the_file(tmp_path: Path) -> None:
    commit = ceilings._commit(Path(ceilings.__file__).resolve())
    assert commit is None or len(commit.removesuffix("-dirty")) == 40
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "installed.py").touch()
    assert ceilings._commit(tmp_path / "installed.py") is None


def test_machine_record_keeps_the_commit_that_the_process_started_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark that runs while the checkout changes can be resumed."""
    before = machine(CPU)["commit"]
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: pytest.fail("asked again"))
    assert machine(CPU)["commit"] == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_ceilings_on_cuda() -> None:
    from spmoe.backends.devices import empty_device_cache, link_bandwidth

    device = torch.device("cuda", 0)
    link, memory = link_bandwidth(device, 100 * 2**20), memory_bandwidth(device)
    empty_device_cache(device)
    assert 1e9 < link < memory
