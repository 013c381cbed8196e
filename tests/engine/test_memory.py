"""Division of a CUDA device's memory, with models of real sizes on the meta device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import MistralConfig, MixtralConfig

from checkpoints import Pair
from spmoe.config import EngineConfig, Size
from spmoe.draft.base import Drafter
from spmoe.engine import build as building
from spmoe.engine import memory
from spmoe.engine.memory import MemoryPlan, divide_memory, max_sequence_length
from spmoe.errors import BudgetError, UsageError
from spmoe.experts.store import StoreSpec
from spmoe.formats.base import weight_format
from spmoe.formats.expert import ExpertFormat
from spmoe.models.checkpoint import Checkpoint
from spmoe.models.load import load_skeleton, store_spec
from spmoe.models.loaded import draft_skeleton
from spmoe.models.runner import ModelRunner
from spmoe.models.target import Target

GIB = 2**30
CUDA, BF16 = torch.device("cuda"), torch.bfloat16


class Models(NamedTuple):
    """Mixtral-8x7B, its experts and Mistral-7B."""

    target: Target
    spec: StoreSpec
    draft: ModelRunner


def checkpoint(name: str, config: Any) -> Checkpoint:
    return Checkpoint(name, Path("/nowhere"), config, {}, name)


@pytest.fixture(scope="module")
def models() -> Models:
    mixtral = checkpoint("mixtral", MixtralConfig(dtype="bfloat16"))
    target = Target(load_skeleton(mixtral))
    spec = store_spec(mixtral, target.model, [layer.path for layer in target.moe], BF16)
    return Models(target, spec, draft_skeleton(checkpoint("mistral", MistralConfig(dtype="bfloat16"))))


def plan(models: Models, gib: float, draft: str | None = "mistral", **options: Any) -> MemoryPlan:
    config = EngineConfig.make(model="mixtral", draft=draft, **options)
    dtype = torch.float32 if config.dtype == "float32" else BF16
    runners = [models.target, models.draft] if draft == "mistral" else [models.target]
    spec = models.spec
    if dtype == torch.float32:
        paths = [layer.path for layer in models.target.moe]
        spec = store_spec(checkpoint("mixtral", models.target.model.config), models.target.model, paths, dtype)
    length = max_sequence_length(config, models.target)
    return divide_memory(config, CUDA, runners, spec, 2, length, dtype=dtype, available=round(gib * GIB))


def total(found: MemoryPlan) -> int:
    return found.resident + found.kv + found.workspace + found.slots * found.slot_bytes


def test_mixtral_with_a_7b_draft_fits_on_a_card_of_24_gib(models: Models) -> None:
    found = plan(models, 23.5)
    assert found.limit == round(0.95 * 23.5 * GIB)
    assert total(found) <= found.limit < total(found) + found.slot_bytes, "slots get all that is left"
    assert found.resident > 15 * GIB
    assert (found.slots, found.context) == (13, 2048)
    shorter, few = found.notices
    assert "2048 tokens instead of 8192" in shorter
    assert "--max-model-len" in shorter
    assert "13 expert slots are left, and steps run well from 14" in few, "two layers of 7 experts, which 5 rows need"
    found = plan(models, 24)
    assert (found.slots, found.context, len(found.notices)) == (14, 2048, 1)


def test_context_shrinks_only_while_slots_are_few(models: Models) -> None:
    contexts = {gib: plan(models, gib).context for gib in (22.4, 23.5, 24.5, 26, 48)}
    assert contexts == {22.4: 2048, 23.5: 2048, 24.5: 4096, 26: 8192, 48: 8192}
    assert plan(models, 48).notices == ()
    alone = plan(models, 23.5, "ngram")
    assert (alone.context, alone.notices) == (8192, ())
    assert alone.slots > 40
    given = plan(models, 23.5, max_model_len=8192)
    assert given.context == 8192, "a length that was asked for is kept"
    assert given.slots < 14
    (notice,) = given.notices
    assert f"{given.slots} expert slots are left, and steps run well from 14" in notice


def test_few_slots_are_enough_without_speculation(models: Models) -> None:
    tight = plan(models, 24.4, num_speculative_tokens=0)
    assert tight.notices == ()
    assert tight.context == 8192


def test_memory_that_does_not_suffice_is_itemized(models: Models) -> None:
    with pytest.raises(BudgetError) as caught:
        plan(models, 16)
    text = str(caught.value)
    parts = ["the draft mistral 13.5 GiB", "the target mixtral without its experts 3.0 GiB", "2 expert slots"]
    assert [text.index(part) for part in parts] == sorted(text.index(part) for part in parts), "the largest first"
    assert "KV caches for 2048 tokens" in text
    assert "15.2 GiB of the 16.0 GiB that are free can be used" in text
    assert "GiB too little; use a smaller draft, --draft ngram" in text
    assert "self:int4" not in text, "its experts would need more than the draft"
    assert "--dtype" not in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"dtype": "float32"}, "or run in --dtype bfloat16"),
        ({"max_model_len": 16384}, "or lower --max-model-len"),
        ({"device_memory": "12GiB"}, "or raise --device-memory to 190"),
        ({"draft": "none", "device_memory": "1GiB"}, "raise --device-memory to"),
        ({"draft": "none"}, "free memory on the device, or use a larger one"),
    ],
)
def test_the_remedy_names_the_option(models: Models, options: dict[str, Any], remedy: str) -> None:
    with pytest.raises(BudgetError) as caught:
        plan(models, 2 if options == {"draft": "none"} else 16, **options)
    assert remedy in str(caught.value)


def test_expert_memory_sizes_the_slots_within_the_limit(models: Models) -> None:
    slot = models.spec.layout.nbytes
    found = plan(models, 60, expert_memory=20 * slot, device_memory="30GiB")
    assert (found.slots, found.limit, found.context) == (20, 30 * GIB, 8192)
    assert plan(models, 60, expert_memory="25%").slots == 64
    few = plan(models, 23.5, expert_memory=4 * slot)
    assert (few.slots, few.notices) == (4, ()), "asked for, so there is nothing to say"
    shorter = plan(models, 23.5, expert_memory=13 * slot)
    assert (shorter.slots, shorter.context) == (13, 2048)
    with pytest.raises(BudgetError) as caught:
        plan(models, 60, expert_memory=20 * slot, device_memory="22GiB")
    fitting = int(str(caught.value).split("lower --expert-memory to ")[1].split("MiB")[0])
    assert "20 expert slots 6.6 GiB" in str(caught.value)
    assert plan(models, 60, expert_memory=fitting * 2**20, device_memory="22GiB").slots >= 2


def test_packed_experts_have_room_for_one_dense_matrix(models: Models) -> None:
    """Prompts multiply with dequantized matrices, one at a time."""
    paths, model = [layer.path for layer in models.target.moe], models.target.model
    format = ExpertFormat(weight_format("int4-g128"), BF16)
    packed = store_spec(checkpoint("mixtral", model.config), model, paths, BF16, format)
    dense_plan, packed_plan = plan(models, 60), plan(models._replace(spec=packed), 60)
    matrix = 2 * 2 * model.config.intermediate_size * model.config.hidden_size
    more_rows = packed_plan.workspace - dense_plan.workspace - matrix  # of the kernels, since slots are smaller
    assert 0 <= more_rows < matrix / 2
    assert dense_plan.slots < 256 == packed_plan.slots


@pytest.mark.parametrize(("k", "rows"), [(0, 2 + 4 + 8), (1, 2 + 4 + 8 + 16), ("auto", 2 + 4 + 8 + 16 + 32 + 48 + 64)])
def test_logits_of_captured_batches_are_planned_for(models: Models, k: Any, rows: int) -> None:
    alone, together, eager = (
        plan(models, 200, num_speculative_tokens=k, **options).workspace
        for options in ({"max_num_seqs": 1}, {}, {"enforce_eager": True})
    )
    assert together - alone == rows * models.target.vocab_size * 2
    assert eager <= alone, "nothing is captured, so no logits are kept"


def test_device_memory_is_no_option_of_the_cpu(models: Models) -> None:
    def on_cpu(**options: Any) -> MemoryPlan:
        config = EngineConfig.make(model="mixtral", **options)
        return divide_memory(config, torch.device("cpu"), [models.target], models.spec, 2, 8192, dtype=BF16)

    found = on_cpu(device_memory="auto")
    assert (found.slots, found.limit, found.workspace) == (64, None, 0)
    with pytest.raises(UsageError, match="--expert-memory"):
        on_cpu(device_memory="20GiB")


def test_an_engine_is_refused_before_its_draft_is_loaded(mixtral_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(mixtral_pair.target)
    loaded = building.load_target(EngineConfig.make(model=model), Checkpoint.find(model), torch.device("cpu"))
    on_cuda = replace(loaded, device=CUDA)
    monkeypatch.setattr(memory, "free_memory", lambda device: 200 * 2**20)
    monkeypatch.setattr(memory, "allocated_memory", lambda device: 0)
    for draft in (str(mixtral_pair.good), "self:int8"):
        config = EngineConfig.make(model=model, draft=draft)
        found = Checkpoint.find(draft) if config.draft_model is not None else None
        with pytest.raises(BudgetError, match=r"190.* MiB of the .* that are free can be used"):
            building._require_memory(config, on_cuda, Drafter, found, 256)


def test_sizes_are_options_as_text() -> None:
    config = EngineConfig.make(model="m", expert_memory="6GiB", device_memory="20GiB")
    assert (config.expert_memory, config.device_memory) == (Size(bytes=6 * GIB), Size(bytes=20 * GIB))
