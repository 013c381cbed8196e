"""The CUDA engine on the pair that ships: it gives the tokens of the CPU engine and stays within its memory."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import AutoModelForCausalLM

from spmoe import LLM, SamplingParams
from spmoe.config import MAX_AUTO_DRAFT_TOKENS
from spmoe.errors import BudgetError, SpmoeError, TransferError
from spmoe.experts.cpu_path import CpuPath
from spmoe.experts.paths import PathChooser
from spmoe.models.shipped import sample_text, shipped_pair
from spmoe.models.target import Target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
PROMPTS = ("def fibonacci(n):", "import os\n\nclass Reader:\n    def __init__(self, path):\n", sample_text()[:3000])
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.8, top_k=50, seed=3)


def tokens(llm: LLM, params: SamplingParams = GREEDY, prompts: Sequence[str] = PROMPTS) -> list[list[int]]:
    """Return the tokens generated for each prompt."""
    return [completion.token_ids for completion in llm.generate(list(prompts), params)]


@cache
def expected() -> list[list[int]]:
    """Return the greedy tokens of the CPU engine without speculation."""
    with LLM(dtype="float32", device="cpu", num_speculative_tokens=0, progress=False) as llm:
        return tokens(llm)


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("options", [{"num_speculative_tokens": 0}, {}, {"enforce_eager": True}], ids=str)
def test_tokens_with_experts_on_the_cpu_equal_those_of_the_cpu_engine(
    share: float, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spmoe.engine.runtime.CpuPath", lambda thread: CpuPath(thread, PathChooser(share)))
    given = {"cpu_experts": "auto", "expert_memory": "25%", **options}
    with LLM(dtype="float32", device="cuda", progress=False, **given) as llm:
        assert tokens(llm) == expected()
        counters = llm.engine.counters
    assert counters.cpu_experts > 0
    assert counters.cpu_failures == 0


PROCESSED = replace(GREEDY, repetition_penalty=1.2, presence_penalty=0.5, logit_bias={70: 1.5}, logprobs=2)


@pytest.mark.parametrize(
    "options", [{"num_speculative_tokens": 0}, {}, {"draft": "ngram"}, {"draft": "self:int8"}], ids=str
)
def test_processed_greedy_tokens_equal_those_of_the_cpu(options: dict[str, Any]) -> None:
    with LLM(dtype="float32", device="cpu", num_speculative_tokens=0, progress=False) as llm:
        plain = llm.generate(PROMPTS[0], PROCESSED)[0].outputs[0]
    with LLM(dtype="float32", device="cuda", progress=False, **options) as llm:
        found = llm.generate(PROMPTS[0], PROCESSED)[0].outputs[0]
        assert tokens(llm) == expected(), "a request without processors is not affected"
    assert found.token_ids == plain.token_ids
    assert found.cumulative_logprob == pytest.approx(plain.cumulative_logprob, abs=1e-2)


@pytest.mark.parametrize(
    "options",
    [
        {"num_speculative_tokens": 0},
        {"num_speculative_tokens": 0, "expert_memory": "100%"},
        {"num_speculative_tokens": 0, "enforce_eager": True},
        {},
        {"enforce_eager": True},
        {"prefetch": "on-demand"},
        {"prefetch": "on-demand", "eviction": "lru"},
        {"prefetch": "next-gate", "eviction": "lru-per-layer"},
        {"prefetch": "activation"},
        {"prefetch": "adaptive"},
        {"prefetch": "draft-gate+next-gate"},
        {"num_speculative_tokens": "auto"},
        {"num_speculative_tokens": "auto", "expert_memory": "100%"},
        {"expert_memory": "100%"},
        {"expert_memory": "2%"},
        {"expert_memory": "2%", "cutoff": "all", "num_speculative_tokens": 1},
        {"expert_memory": "50%", "cutoff": "all", "num_speculative_tokens": 7},
        {"expert_memory": "90%", "cutoff": "just-in-time"},
        {"pin_memory": False},
        {"link_gbps": 5.0},
        {"cpu_experts": "auto"},
        {"cpu_experts": 2, "link_gbps": 5.0, "num_speculative_tokens": 0},
        {"device_memory": "2GiB"},
    ],
    ids=str,
)
def test_greedy_tokens_equal_those_of_the_cpu(options: dict[str, Any]) -> None:
    slots = {} if "device_memory" in options else {"expert_memory": "25%"}
    with LLM(dtype="float32", device="cuda", progress=False, **{**slots, **options}) as llm:
        assert tokens(llm) == expected()
        assert tokens(llm) == expected(), "with all graphs captured and all slots full"
        assert not [notice for notice in llm.notices if "pageable" not in notice]


@pytest.mark.parametrize(
    "options",
    [
        {"num_speculative_tokens": 0},
        {"num_speculative_tokens": 0, "expert_memory": "90%"},
        {},
        {"expert_memory": "50%", "num_speculative_tokens": 7},
        {"expert_memory": "90%"},
        {"prefetch": "on-demand", "eviction": "lru"},
        {"prefetch": "next-gate"},
        {"prefetch": "draft-gate+next-gate"},
        {"num_speculative_tokens": "auto"},
        {"draft": "ngram"},
        {"cpu_experts": "auto"},
    ],
    ids=str,
)
def test_greedy_tokens_with_experts_looked_up_on_the_device(options: dict[str, Any]) -> None:
    """With prompts one by one and all at once, in captured forwards that the host follows."""
    given = {"expert_memory": "25%", **options}
    with LLM(dtype="float32", device="cuda", residency_check="device", progress=False, **given) as llm:
        residency = llm.engine.parts.runtime.residency
        assert residency is not None, llm.notices
        before = residency.tickets
        for _ in range(2):
            assert tokens(llm) == expected()
            assert [tokens(llm, prompts=[prompt])[0] for prompt in PROMPTS] == expected()
        assert residency.tickets > before
        assert not [notice for notice in llm.notices if "pageable" not in notice]


@pytest.mark.parametrize("k", [0, 4])
def test_16_bit_text_does_not_depend_on_who_looks_experts_up(k: int) -> None:
    params, found = SamplingParams(max_tokens=160, ignore_eos=True), []
    for check in ("host", "device"):
        with LLM(
            dtype="bfloat16", device="cuda", expert_memory="40%", residency_check=check,  # type: ignore[arg-type]
            num_speculative_tokens=k, progress=False,
        ) as llm:  # fmt: skip
            found.append(tokens(llm, params))
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_text_does_not_depend_on_the_number_of_draft_tokens(dtype: str) -> None:
    """Captured forwards are batch-invariant: a row's rounding does not depend on the other rows."""
    params = SamplingParams(max_tokens=160, ignore_eos=True)
    options = {"num_speculative_tokens": MAX_AUTO_DRAFT_TOKENS, "expert_memory": "60%", "progress": False}
    with LLM(dtype=dtype, device="cuda", **options) as llm:  # type: ignore[arg-type]
        found = {}
        for k in (0, 1, 2, 3, 4, 7, 8, 12, MAX_AUTO_DRAFT_TOKENS, "auto"):
            llm.engine.reconfigure(num_speculative_tokens=k)
            found[k] = tokens(llm, params)
        assert [k for k, text in found.items() if text != found[0]] == []


@pytest.mark.parametrize("k", [0, 1, 4, 7])
@pytest.mark.parametrize("check", ["host", "device"])
def test_16_bit_text_does_not_depend_on_company(k: int, check: Literal["host", "device"]) -> None:
    """Eight sequences with seven draft tokens each are 64 rows, as many as a captured forward may have."""
    prompts = [sample_text()[500 * number :][: 40 + 90 * number] for number in range(8)]
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    with LLM(
        dtype="bfloat16", device="cuda", expert_memory="40%", residency_check=check,
        num_speculative_tokens=k, max_num_seqs=8, enable_prefix_caching=False, progress=False,
    ) as llm:  # fmt: skip
        assert llm.engine.target.batches
        alone = [tokens(llm, params, [prompt])[0] for prompt in prompts]
        assert tokens(llm, params, prompts) == alone


@pytest.mark.parametrize("draft", ["auto", "self:int4", None])
def test_sequences_that_wait_for_kv_memory_resume(draft: str | None) -> None:
    prompts = [prompt[:60] for prompt in PROMPTS] * 2
    with LLM(None, draft, dtype="float32", device="cuda", expert_memory="25%", progress=False) as llm:
        for runner in (llm.engine.target, llm.engine.parts.drafter.runner):
            if runner is not None:
                runner.kv_pool.plan(300, 300, reuse_prefixes=True)
        found = tokens(llm, replace(GREEDY, max_tokens=160), prompts)
        assert llm.num_preemptions > 0
    with LLM(dtype="float32", device="cpu", num_speculative_tokens=0, progress=False) as llm:
        assert found == tokens(llm, replace(GREEDY, max_tokens=160), prompts[:3]) * 2


@pytest.mark.parametrize(
    "name", ["fp8-block128", "fp8-channel", "int8-channel", "int8-g32", "int4-g32", "int4-asym-g32", "mxfp4", "nvfp4"]
)
def test_packed_experts_give_the_tokens_of_the_cpu(name: str) -> None:
    with LLM(dtype="float32", device="cpu", expert_format=name, num_speculative_tokens=0, progress=False) as llm:
        plain = tokens(llm)
    for options in ({}, {"residency_check": "device"}, {"cpu_experts": "auto"}, {"enforce_eager": True}):
        given: dict[str, Any] = {"expert_memory": "25%", **options}
        with LLM(dtype="float32", device="cuda", expert_format=name, progress=False, **given) as llm:
            assert tokens(llm) == plain, options


def test_bf16_packed_experts_give_the_text_of_bfloat16() -> None:
    params, found = SamplingParams(max_tokens=160, ignore_eos=True), []
    for name in ("bfloat16", "bf16-packed"):
        with LLM(dtype="bfloat16", device="cuda", expert_format=name, expert_memory="40%", progress=False) as llm:
            found.append(tokens(llm, params))
    assert found[0] == found[1]


def test_sampled_tokens_depend_on_the_seed_only() -> None:
    with LLM(dtype="float32", device="cuda", expert_memory="25%", progress=False) as llm:
        assert tokens(llm, SAMPLED) == tokens(llm, SAMPLED)


def test_interleaved_generations_do_not_affect_each_other() -> None:
    with LLM(dtype="float32", device="cuda", expert_memory="25%", progress=False) as llm:
        first, second = (llm.stream(prompt, GREEDY) for prompt in PROMPTS[:2])
        streams = [iter(first), iter(second)]
        while streams:
            for stream in list(streams):
                if next(stream, None) is None:
                    streams.remove(stream)
        assert [first.token_ids, second.token_ids] == expected()[:2]


def test_device_memory_limit_is_kept() -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    with LLM(dtype="float32", device="cuda", device_memory="2GiB", progress=False) as llm:
        tokens(llm)
        assert llm.engine.parts.memory.limit == 2 * 2**30
        assert torch.cuda.max_memory_reserved() - before <= 2 * 2**30
    with pytest.raises(BudgetError, match="--device-memory 100"):
        LLM(dtype="float32", device="cuda", device_memory="100MiB", progress=False)


def test_free_memory_is_divided_by_default() -> None:
    with LLM(dtype="float32", device="cuda", progress=False) as llm:
        assert tokens(llm) == expected()
        assert llm.engine.slots == llm.engine.spec.count, "the small pair fits as a whole"
        limit = llm.engine.parts.memory.limit
        assert limit is not None
        assert limit < torch.cuda.mem_get_info()[1]


@pytest.mark.parametrize("check", ["host", "device"])
def test_failed_copies_are_reported_and_corrupt_nothing(
    check: Literal["host", "device"], monkeypatch: pytest.MonkeyPatch
) -> None:
    from spmoe.backends.cuda import CudaCopyStream

    original, rng, failing = CudaCopyStream.copy, random.Random(0), False

    def copy(self: Any, ranges: Any) -> Any:
        if failing and rng.random() < 0.05:
            raise TransferError("injected failure")
        return original(self, ranges)

    with LLM(dtype="float32", device="cuda", expert_memory="10%", residency_check=check, progress=False) as llm:
        monkeypatch.setattr(CudaCopyStream, "copy", copy)
        failures = 0
        for _ in range(30):
            failing = True
            try:
                found = tokens(llm, prompts=PROMPTS[:1])
            except SpmoeError as error:
                failures += "injected failure" in str(error)
            else:
                assert found == expected()[:1]
            failing = False
            assert tokens(llm, prompts=PROMPTS[:1]) == expected()[:1]
        assert failures


@pytest.mark.slow
@pytest.mark.parametrize("k", [0, 4])
def test_context_of_32k_tokens_within_a_memory_limit(tmp_path: Path, k: int) -> None:
    """The pair that ships, configured for more positions, gives the tokens of transformers on the same device."""
    limit, longest = 6 * 2**30, 33_000
    paths = [_with_max_positions(Path(path), longest, tmp_path) for path in shipped_pair()]
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    with LLM(
        *map(str, paths), dtype="float32", device="cuda", device_memory="6GiB", max_model_len=longest,
        num_speculative_tokens=k, progress=False,
    ) as llm:  # fmt: skip
        text = sample_text()
        text *= 1 + 200_000 // len(text)
        prompt = llm.engine.parts.tokenizer(text)["input_ids"][:32_700]
        found = llm.generate([prompt], GREEDY)[0].token_ids
        assert torch.cuda.max_memory_reserved() - before <= limit
    model = AutoModelForCausalLM.from_pretrained(paths[0], dtype=torch.float32).cuda().eval()
    ids = torch.tensor([prompt], device="cuda")
    with torch.inference_mode():
        expected_ids = model.generate(ids, max_new_tokens=40, min_new_tokens=40, do_sample=False, eos_token_id=-1)
    assert found == expected_ids[0, len(prompt) :].tolist()


def _with_max_positions(checkpoint: Path, positions: int, into: Path) -> Path:
    """Copy a checkpoint and set `max_position_embeddings` in its configuration."""
    copy = into / checkpoint.name
    shutil.copytree(checkpoint, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": positions}))
    return copy


@pytest.mark.slow
def test_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancel requests, use the smallest budgets and inject failed copies for `SPMOE_SOAK_SECONDS` (default: 30 s).

    Several processes may run at once, each with its own `SPMOE_SOAK_SEED`.
    """
    from spmoe.backends.cuda import CudaCopyStream

    original, rng, fault_rate = CudaCopyStream.copy, random.Random(int(os.environ.get("SPMOE_SOAK_SEED", "1"))), 0.0

    def copy(self: Any, ranges: Any) -> Any:
        if rng.random() < fault_rate:
            raise TransferError("injected failure")
        return original(self, ranges)

    monkeypatch.setattr(CudaCopyStream, "copy", copy)
    until = time.monotonic() + float(os.environ.get("SPMOE_SOAK_SECONDS", "30"))
    settled: list[tuple[int, int]] = []  # device bytes and pinned host bytes after each engine
    requests = 0
    while time.monotonic() < until:
        options = {
            "expert_memory": rng.choice(["2%", "2%", "10%", "50%"]),
            "prefetch": rng.choice(["draft-gate", "draft-gate", "draft-gate+next-gate", "activation", "on-demand"]),
            "num_speculative_tokens": rng.choice([0, 1, 4, "auto"]),
            "cutoff": rng.choice(["auto", "all"]),
            "residency_check": rng.choice(["host", "device"]),
        }
        fault_rate = 0.0  # while an engine is built
        with LLM(dtype="float32", device="cuda", progress=False, **options) as llm:  # type: ignore[arg-type]
            ends = min(until, time.monotonic() + 20)
            first = requests
            while requests == first or time.monotonic() < ends:
                requests += 1
                number = rng.randrange(len(PROMPTS))
                fault_rate = rng.choice([0.0, 0.0, 0.002])
                generation = llm.stream(PROMPTS[number], GREEDY)
                try:
                    for _ in generation:
                        if rng.random() < 0.02:
                            generation.stop()
                except SpmoeError as error:
                    if "injected failure" not in str(error):
                        raise
                found = generation.token_ids
                assert found == expected()[number][: len(found)], f"{options}, request {requests}"
        del llm, generation
        gc.collect()
        torch.cuda.empty_cache()
        settled.append((torch.cuda.memory_allocated(), _pinned_host_bytes()))
    assert requests
    for kind in zip(*settled[1:], strict=True):
        assert max(kind) <= 1.1 * min(kind) + 2**20, "every engine leaks memory"


def _pinned_host_bytes() -> int:
    """Return the bytes of this process's host memory that are locked or pinned."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return sum(int(fields.get(name, "0 kB").split()[0]) * 1024 for name in ("VmLck", "VmPin"))


def test_replays_write_only_to_their_own_memory() -> None:
    with LLM(dtype="float32", device="cuda", expert_memory="100%", progress=False) as llm:
        first = tokens(llm)
        # takes every small block that is free, also those that were freed during captures
        held = [torch.full((1 + n % 64,), 7, device="cuda") for n in range(20_000)]
        assert tokens(llm) == first == expected()
        assert bool((torch.cat(held) == 7).all())


def test_captured_draft_with_an_eager_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "capture_forwards", lambda self, *args, **kwargs: "disabled by this test")
    for memory in ("100%", "30%"):
        with LLM(dtype="float32", device="cuda", expert_memory=memory, progress=False) as llm:
            assert [tokens(llm) for _ in range(2)] == [expected()] * 2


def test_closed_engines_free_their_device_memory() -> None:
    def bytes_after_one_engine() -> int:
        with LLM(dtype="float32", device="cuda", expert_memory="25%", progress=False) as llm:
            generation = llm.stream(PROMPTS[0], GREEDY)
            next(iter(generation))
            generation.stop()
            tokens(llm, prompts=PROMPTS[:1])
        del llm, generation
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    bytes_after_one_engine()  # libraries allocate their workspaces once
    before = bytes_after_one_engine()
    leaked = [bytes_after_one_engine() - before for _ in range(3)]
    assert max(leaked) <= 0, f"leaked bytes: {leaked}"
