"""Contexts that grow past LongRoPE's switch, or start beyond it, decode as in transformers."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import (
    byte_tokenizer,
    longrope,
    mixtral,
    phimoe,
    qwen3_next,
    require_longrope_reference,
    save,
    seeded,
)
from spmoe import LLM, SamplingParams
from spmoe.config import EngineConfig
from spmoe.engine.memory import divide_memory
from spmoe.experts.store import BlobLayout, StoreSpec
from spmoe.models.families import reference_tokens
from spmoe.models.longrope import LongRope
from spmoe.models.runner import ModelRunner

SWITCH = 20
COUNT = 14
FAMILIES = {"phimoe": phimoe, "mixtral": mixtral, "qwen3_next": qwen3_next}
ON_CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_CUDA)]


def prompt(length: int) -> list[int]:
    return [(29 * i + 7) % 251 for i in range(length)]


@cache
def expected(target: Path, length: int, device: str) -> list[int]:
    tokens = reference_tokens(target, prompt(length), COUNT, device)
    assert len(set(tokens)) > 4
    return tokens


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, make in FAMILIES.items():
        model = seeded(make, 3, rope_parameters=longrope(SWITCH))
        found[name] = save(model, tmp_path_factory.mktemp(name), byte_tokenizer())
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("k", "chunk"), [(0, 512), (0, 3), (3, 512), (3, 3)])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_transformers(checkpoints: dict[str, Path], family: str, k: int, chunk: int, device: str) -> None:
    if family == "phimoe":
        require_longrope_reference()
    target = checkpoints[family]
    options: dict[str, Any] = {"num_speculative_tokens": k, "prefill_chunk": chunk, "device": device}
    with LLM(str(target), "self:int8" if k else None, dtype="float32", progress=False, **options) as llm:
        assert not [notice for notice in llm.notices if "captured" in notice] or family == "qwen3_next"
        for length in (SWITCH - 8, SWITCH - 1, SWITCH, SWITCH + 1, SWITCH + 5):
            completion = llm.generate(prompt(length), SamplingParams(max_tokens=COUNT, ignore_eos=True))[0]
            assert completion.token_ids == expected(target, length, device), f"after a prompt of {length} tokens"
            assert bool(completion.stats.counters.accepted) == bool(k)


@pytest.mark.parametrize("family", FAMILIES)
def test_switch_changes_the_output(checkpoints: dict[str, Path], family: str, tmp_path: Path) -> None:
    """Otherwise the test above would prove nothing."""
    late = save(seeded(FAMILIES[family], 3, rope_parameters=longrope(200)), tmp_path, byte_tokenizer())
    for length in (SWITCH - 8, SWITCH + 5):
        texts = [expected(directory, length, "cpu") for directory in (checkpoints[family], late)]
        assert texts[0] != texts[1]


def test_only_phimoe_recomputes_its_kv_cache() -> None:
    found = {name: LongRope.of(seeded(make, 3, rope_parameters=longrope(SWITCH))) for name, make in FAMILIES.items()}
    assert {name for name, rope in found.items() if rope.recomputes} == {"phimoe"}
    assert {rope.switches for rope in found.values()} == {(SWITCH,)}
    assert LongRope.of(seeded(phimoe, 3)) == LongRope()


@pytest.mark.parametrize(("enforce_eager", "limit"), [(False, 100), (False, 256), (True, 256)])
def test_rotary_tables_are_counted_in_the_memory_budget(enforce_eager: bool, limit: int) -> None:
    spec = StoreSpec("fingerprint", BlobLayout.of({"down_proj": (8, 64)}, torch.float32), (4, 4))
    config = EngineConfig("model", enforce_eager=enforce_eager)
    found = {}
    for make in (phimoe, mixtral):
        runner = ModelRunner(seeded(make, 0))
        device, runners = torch.device("cuda"), [runner, runner]
        found[make] = divide_memory(config, device, runners, spec, 2, limit, available=2**34).workspace
    table = 0 if enforce_eager else limit * 2 * 8 * 4  # cosine and sine of heads of 8, once though both share a model
    assert found[phimoe] - found[mixtral] == table


def test_distance_crossing_and_invalidation() -> None:
    rope = LongRope((10, 20), recomputes=True)
    assert [rope.distance(start) for start in (0, 9, 10, 19, 20)] == [10, 1, 10, 1, None]
    assert [rope.crosses(*ends) for ends in ((0, 10), (0, 11), (9, 11), (10, 20), (5, 30))] == [
        False, True, True, False, True,
    ]  # fmt: skip
    assert [rope.invalidates(*ends) for ends in ((9, 10), (10, 11), (11, 12), (11, 21))] == [False, True, False, True]
    assert not LongRope((10, 20)).invalidates(10, 11)
