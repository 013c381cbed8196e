"""The estimate of `spmoe plan`, on configurations of Mixtral-8x7B's sizes and on the shipped pair."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sparse_checkpoints import EXPERTS, HIDDEN, INTERMEDIATE, LAYERS, VOCABULARY, mistral_7b, mixtral_8x7b
from spmoe.backends.devices import DeviceFacts
from spmoe.config import ONE_BY_ONE, EngineConfig
from spmoe.engine import hardware as hardware_module
from spmoe.engine.estimate import ROUTING, Case, Estimate, make_estimate
from spmoe.engine.hardware import find_hardware
from spmoe.engine.profiling import cutoff_inputs, profile_path, profile_settings, write_profile
from spmoe.experts.store import BlobLayout, StoreSpec
from spmoe.models.checkpoint import Checkpoint
from spmoe.models.kv_pool import SCRATCH_POSITIONS
from spmoe.models.shipped import shipped_pair
from spmoe.predict.cutoff import Profile

GIB = 2**30
BLOB = 3 * HIDDEN * INTERMEDIATE * 2  # bytes of one expert in bfloat16
DESKTOP = {
    "device_memory": 24 * GIB,
    "host_memory": 64 * GIB,
    "link_gbps": 25.0,
    "device_gbps": 1000.0,
    "host_gbps": 60.0,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return directories of checkpoints with real sizes and no data."""
    root: Path = tmp_path_factory.mktemp("models")
    return {"target": str(mixtral_8x7b(root / "mixtral")), "draft": str(mistral_7b(root / "mistral"))}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPMOE_HOME", str(tmp_path / "home"))


def plan(models: dict[str, str], draft: str | None = None, k: int | None = None, **hardware: Any) -> Estimate:
    config = EngineConfig.make(model=models["target"], **ONE_BY_ONE)
    return make_estimate(config, models.get(str(draft), draft), k, **{**DESKTOP, **hardware})


def case(estimate: Estimate, draft: str | None) -> Case:
    (found,) = (one for one in estimate.cases if one.draft == draft)
    return found


# ---- memory


def test_memory_of_mixtral_on_a_desktop(models: dict[str, str]) -> None:
    estimate = plan(models)
    memory = case(estimate, None).memory
    assert memory is not None
    attention = LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * 1024 + EXPERTS * HIDDEN + 2 * HIDDEN)
    assert memory.resident == estimate.dense_bytes == 2 * (attention + 2 * VOCABULARY * HIDDEN + HIDDEN)
    assert estimate.all_experts_bytes == LAYERS * EXPERTS * BLOB
    assert memory.kv == (8192 + SCRATCH_POSITIONS) * LAYERS * 2 * 1024 * 2
    assert memory.limit == round(0.95 * 24 * GIB)
    assert memory.slots == (memory.limit - memory.resident - memory.kv - memory.workspace) // BLOB
    assert 40 < memory.slots < 64
    assert estimate.host_missing == estimate.all_experts_bytes + 2 * GIB - 64 * GIB
    assert "host memory lacks 22.0 GiB" in estimate.advice[0]
    assert plan(models, host_memory=128 * GIB).host_missing == 0


def test_draft_model_takes_its_memory_only_where_it_drafts(models: dict[str, str]) -> None:
    estimate = plan(models, "draft", device_memory=48 * GIB)
    plain, drafted = case(estimate, None).memory, case(estimate, models["draft"]).memory
    assert plain is not None
    assert drafted is not None
    assert 13 * GIB < drafted.resident - plain.resident < 14 * GIB
    assert drafted.kv == 2 * plain.kv
    assert drafted.slots < plain.slots


def test_self_draft_needs_all_quantized_experts_on_the_device(models: dict[str, str]) -> None:
    small, large = (case(plan(models, device_memory=size * GIB), "self:int4") for size in (24, 80))
    assert small.memory is None
    assert small.problem is not None
    assert large.memory is not None
    assert large.memory.resident > LAYERS * EXPERTS * BLOB / 4


def test_model_that_does_not_fit_at_all(models: dict[str, str]) -> None:
    estimate = plan(models, device_memory=4 * GIB)
    assert (estimate.best, estimate.command) == (None, None)
    assert all(one.memory is None and one.problem for one in estimate.cases)


# ---- times


def test_floor_is_the_longer_of_link_and_memory(models: dict[str, str]) -> None:
    estimate = plan(models)
    plain = case(estimate, None)
    assert plain.memory is not None
    share = plain.memory.slots / (LAYERS * EXPERTS)
    time = plain.times["even"]
    assert time.hit_rate == pytest.approx(share)
    assert time.link_bytes == pytest.approx(LAYERS * 2 * (1 - share) * BLOB)
    assert time.device_bytes == pytest.approx(estimate.dense_bytes - 2 * VOCABULARY * HIDDEN + LAYERS * 2 * BLOB)
    assert time.floor_seconds == pytest.approx(time.link_bytes / 25e9)
    assert time.floor_seconds < time.seconds < time.floor_seconds + 2 * time.device_bytes / 1000e9
    assert time.limit == "link"
    assert plain.times["recorded"].seconds < time.seconds


@pytest.mark.parametrize(
    ("host", "least", "most"), [(200.0, 3.5, 8.0), (60.0, 1.7, 2.4), (30.0, 1.0, 1.1), (25.0, 1, 1)]
)
def test_experts_on_the_cpu_gain_what_the_host_memory_leaves(
    models: dict[str, str], host: float, least: float, most: float
) -> None:
    """A desktop whose link takes 25 GB/s of the host memory's bandwidth."""
    estimate = plan(models, host_memory=128 * GIB, host_gbps=host)
    plain = case(estimate, None)
    with_cpu = plain.likely_with_cpu
    gain = 1.0 if with_cpu is None else plain.likely.seconds / with_cpu.seconds
    assert least <= gain <= most
    assert (with_cpu is None) == (host <= 25.0)
    advised = [text for text in estimate.advice if text.startswith("--cpu-experts auto")]
    assert len(advised) == (gain >= 1.1)
    if with_cpu is not None:
        assert with_cpu.link_bytes < plain.likely.link_bytes
    for text in advised:
        assert f"instead of {1e3 * plain.likely.seconds:.3g} ms per token ({gain:.2g}x); in bfloat16" in text


@pytest.mark.parametrize(
    ("name", "host", "host_gbps", "gains"),
    [("int4-g128", 128, 60, True), ("int4-g128", 24, 60, False), ("mxfp4", 256, 200, True), ("mxfp4", 64, 60, False)],
)
def test_packed_experts_gain_from_the_cpu_if_there_is_memory_for_copies(
    models: dict[str, str], name: str, host: int, host_gbps: float, gains: bool
) -> None:
    """Copies for the int4 operator have the size of the experts; dense ones are four times as large as MXFP4."""
    config = EngineConfig.make(model=models["target"], expert_format=name, **ONE_BY_ONE)
    hardware = {**DESKTOP, "device_memory": 12 * GIB, "host_memory": host * GIB, "host_gbps": host_gbps}
    estimate = make_estimate(config, None, 0, **hardware)  # type: ignore[arg-type]
    plain = case(estimate, None)
    assert plain.likely_with_cpu is not None
    assert plain.memory is not None
    gain = plain.likely.seconds / plain.likely_with_cpu.seconds
    assert (gain > 1.2) == gains
    relative = 0.65 if name == "int4-g128" else estimate.expert_bytes / BLOB  # rate, to that of dense experts
    assert 1.0 <= gain <= 1 + relative * 0.85 * (host_gbps - 25) / 25, "the sum of both rates"
    assert any("copies take up to" in text for text in estimate.advice) == gains
    weights = BLOB // 2  # of one expert; the operator has 4 bytes of scale and zero for a group
    copies = LAYERS * EXPERTS * weights * (0.5 + 4 / 128 if name == "int4-g128" else 2)
    free = host * GIB - estimate.all_experts_bytes - 2 * GIB
    assert plain.memory.cpu_copies == pytest.approx(max(0, min(copies, free / 2)), rel=0.001)
    assert estimate.to_dict()["cases"][0]["memory"]["cpu_copies_bytes"] == plain.memory.cpu_copies


def test_everything_resident_is_limited_by_device_memory(models: dict[str, str]) -> None:
    time = case(plan(models, device_memory=141 * GIB), None).times["even"]
    assert (time.hit_rate, time.link_bytes) == (1.0, 0.0)
    assert time.floor_seconds == pytest.approx(time.device_bytes / 1000e9)
    assert time.limit == "device memory bandwidth"


def test_more_of_anything_is_faster(models: dict[str, str]) -> None:
    slow = case(plan(models), None).likely.seconds
    for better in ({"link_gbps": 50.0}, {"device_memory": 48 * GIB}, {"device_gbps": 2000.0}):
        assert case(plan(models, **better), None).likely.seconds < slow


def test_acceptance_decides_between_drafting_and_not(models: dict[str, str]) -> None:
    config = EngineConfig.make(model=models["target"], **ONE_BY_ONE)
    bad, good = (
        make_estimate(config, models["draft"], 4, acceptance, **{**DESKTOP, "device_memory": 48 * GIB})
        for acceptance in (0.1, 0.95)
    )
    assert bad.best is not None
    assert bad.best.draft is None
    assert good.best is not None
    assert good.best.draft == models["draft"]
    assert good.command is not None
    assert f"--draft {models['draft']} -k 4" in good.command


# misses per needed expert, of replays on demand with the default eviction policy: docs/planning.md
RECORDED = {
    (8, 2, 1): {0.25: 0.671, 0.5: 0.395, 0.75: 0.165, 0.9: 0.054},
    (8, 2, 5): {0.25: 0.740, 0.5: 0.445, 0.75: 0.192, 0.9: 0.067},
    (64, 8, 1): {0.25: 0.637, 0.5: 0.367, 0.75: 0.148, 0.9: 0.034},
    (64, 8, 5): {0.25: 0.668, 0.5: 0.378, 0.75: 0.150, 0.9: 0.044},
}
NEEDED = {(8, 2, 5): 5.38, (64, 8, 5): 27.58}  # experts per layer and step of the same replays


@pytest.mark.parametrize("shape", RECORDED, ids=str)
def test_recorded_routing_follows_the_replays(shape: tuple[int, int, int]) -> None:
    experts, top_k, rows = shape
    spec = StoreSpec("", BlobLayout.of({"w": (1,)}, torch.float32), (experts,) * 16)
    demand = ROUTING["recorded"].demand(spec, top_k, rows)
    assert demand.needed == pytest.approx(NEEDED.get(shape, top_k), rel=0.02)
    for share, missed in RECORDED[shape].items():
        assert demand.missing_for(rows, round(share * spec.count)) / demand.needed == pytest.approx(missed, abs=0.06)


# ---- this machine


def test_values_that_are_not_given_are_measured_or_assumed() -> None:
    gpu = find_hardware("cuda", BLOB, device_memory=8 * GIB, device_gbps=500.0)
    assert gpu.sources["device_memory"] == gpu.sources["device_gbps"] == "given"
    assert gpu.sources["link_gbps"] in ("measured", "assumed")
    assert not gpu.is_here
    cpu = find_hardware("cpu", BLOB)
    assert {name for name, source in cpu.sources.items() if source != "measured"} == {"link_gbps"}
    assert 0 < cpu.device_memory < cpu.host_memory
    assert cpu.device_gbps > 0.1
    assert cpu.is_here


def test_device_that_is_here_is_measured(monkeypatch: pytest.MonkeyPatch, models: dict[str, str]) -> None:
    here = torch.device("cuda", 0)
    monkeypatch.setattr(hardware_module, "choose_device", lambda wanted: here)
    monkeypatch.setattr(hardware_module, "device_facts", lambda device: DeviceFacts("NVIDIA Test", None, 40 * GIB))
    monkeypatch.setattr(hardware_module, "free_memory", lambda device: 39 * GIB)
    monkeypatch.setattr(hardware_module, "link_bandwidth", lambda device, size: 20e9 if size == BLOB else 1e9)
    monkeypatch.setattr(hardware_module, "memory_bandwidth", lambda device: 1500e9)
    config = EngineConfig.make(model=models["target"], **ONE_BY_ONE)
    hardware = make_estimate(config, "none", None, host_memory=128 * GIB).hardware
    assert (hardware.device_name, hardware.device_memory, hardware.link_gbps) == ("NVIDIA Test", 39 * GIB, 20.0)
    assert hardware.device_gbps == 1500.0
    limited = make_estimate(config, "none", None, device_memory=30 * GIB, host_memory=128 * GIB)
    memory = limited.cases[0].memory
    assert memory is not None
    assert memory.limit == 30 * GIB  # as `spmoe run --device-memory 30GiB` limits it
    assert limited.command is not None
    assert "--device-memory 30.0GiB" in limited.command


def test_profile_of_this_machine_replaces_assumptions(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = shipped_pair()
    config = EngineConfig.make(model=target)
    before = make_estimate(config, draft, 4, device="cpu")
    assert "measured" not in before.cases[1].times
    memory = before.cases[1].memory
    assert memory is not None
    inputs = cutoff_inputs(StoreSpec("", BlobLayout.of({"w": (1,)}, torch.float32), (8,) * 16), 2, memory.slots, 4)
    settings = profile_settings(
        replace(config, draft=draft, num_speculative_tokens=4), Checkpoint.find(target), Checkpoint.find(draft), inputs
    )
    write_profile(
        profile_path(settings), Profile(1e-3, 4, 2e-3, 1e-4, 100, missing_per_layer=0.0, expert_share=0.5), ()
    )
    after = make_estimate(config, draft, 4, device="cpu").cases[1]
    assert after.times.keys() == {"measured"}
    assert after.likely.seconds == pytest.approx((4 * 4e-3 + 16 * 2e-3) / after.tokens_per_step)
    other = make_estimate(config, draft, 4, device="cpu", link_gbps=1.0).cases[1]  # not this machine
    assert other.times.keys() == ROUTING.keys()


def test_half_precision_is_recommended_for_float32(tmp_path: Path, models: dict[str, str]) -> None:
    config = EngineConfig.make(model=models["target"], dtype="float32")
    assert not any("bfloat16" in one for one in make_estimate(config, "none", None, **DESKTOP).advice)  # asked for
    wide = Path(models["target"]) / "config.json"
    text = wide.read_text()
    wide.write_text(text.replace('"bfloat16"', '"float32"'))
    try:
        estimate = plan(models, "none", device_memory=48 * GIB)
    finally:
        wide.write_text(text)
    assert estimate.dtype == "float32"
    assert any("--dtype bfloat16 halves" in one for one in estimate.advice)


def test_smaller_format_is_recommended_where_the_link_decides(models: dict[str, str]) -> None:
    """Four bits are lossy, so they are advice and not part of the command."""
    estimate = plan(models)
    (text,) = [one for one in estimate.advice if one.startswith("--expert-format int4-g128")]
    config = EngineConfig.make(model=models["target"], expert_format="int4-g128", **ONE_BY_ONE)
    packed = make_estimate(config, "none", None, **DESKTOP)  # type: ignore[arg-type]
    seconds = case(packed, None).likely.seconds
    assert f"about {1e3 * seconds:.3g} instead of" in text
    assert "lossy" in text
    assert "--expert-format" not in estimate.command
    assert "a smaller --expert-format or model" in estimate.advice[0]
    for other in (packed, plan(models, device_memory=141 * GIB)):
        assert not any("--expert-format int4" in one for one in other.advice)
