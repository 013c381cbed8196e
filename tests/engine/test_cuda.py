"""The CUDA engine against the CPU's on the pair that ships: the same tokens, within the memory it was given."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from spmoe import LLM, SamplingParams
from spmoe.config import MAX_AUTO_DRAFT_TOKENS
from spmoe.errors import BudgetError, SpmoeError, TransferError
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
    return [completion.token_ids for completion in llm.generate(list(prompts), params)]


@cache
def expected() -> list[list[int]]:
    with LLM(dtype="float32", device="cpu", num_speculative_tokens=0, progress=False) as llm:
        return tokens(llm)


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
        {"device_memory": "2GiB"},
    ],
    ids=str,
)
def test_greedy_tokens_are_the_cpus(options: dict[str, Any]) -> None:
    with LLM(dtype="float32", device="cuda", progress=False, **options) as llm:
        assert tokens(llm) == expected()
        assert tokens(llm) == expected(), "the second time, with everything recorded and slots full"
        unexpected = [n for n in llm.notices if "pageable" not in n]
        assert not unexpected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_text_does_not_depend_on_how_it_was_drafted_in_short_types_either(dtype: str) -> None:
    """Every row of a recorded forward is rounded alike, whatever other rows it is verified with."""
    params = SamplingParams(max_tokens=160, ignore_eos=True)
    options = {"num_speculative_tokens": MAX_AUTO_DRAFT_TOKENS, "expert_memory": "60%", "progress": False}
    with LLM(dtype=dtype, device="cuda", **options) as llm:  # type: ignore[arg-type]
        found = {}
        for k in (0, 1, 2, 3, 4, 7, 8, 12, MAX_AUTO_DRAFT_TOKENS, "auto"):
            llm.engine.reconfigure(num_speculative_tokens=k)
            found[k] = tokens(llm, params)
        assert [k for k, text in found.items() if text != found[0]] == []


def test_sampling_follows_the_seed_and_stays_on_the_host() -> None:
    with LLM(dtype="float32", device="cuda", progress=False) as llm:
        assert tokens(llm, SAMPLED) == tokens(llm, SAMPLED)


def test_two_generations_in_turns_do_not_disturb_each_other() -> None:
    with LLM(dtype="float32", device="cuda", progress=False) as llm:
        first, second = (llm.stream(prompt, GREEDY) for prompt in PROMPTS[:2])
        streams = [iter(first), iter(second)]
        while streams:
            for stream in list(streams):
                if next(stream, None) is None:
                    streams.remove(stream)
        assert [first.token_ids, second.token_ids] == expected()[:2]


def test_a_budget_for_the_device_is_kept() -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    with LLM(dtype="float32", device="cuda", device_memory="2GiB", progress=False) as llm:
        tokens(llm)
        assert llm.engine.parts.memory.limit == 2 * 2**30
        assert torch.cuda.max_memory_reserved() - before <= 2 * 2**30
    with pytest.raises(BudgetError, match="leaves 0 B for experts"):
        LLM(dtype="float32", device="cuda", device_memory="100MiB", progress=False)


def test_copies_that_fail_are_reported_and_leave_nothing_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from spmoe.backends.cuda import CudaCopyStream

    sound, rng, failing = CudaCopyStream.copy, random.Random(0), False

    def copy(self: Any, pieces: Any) -> Any:
        if failing and rng.random() < 0.05:
            raise TransferError("injected: the link had a bad moment")
        return sound(self, pieces)

    with LLM(dtype="float32", device="cuda", expert_memory="10%", progress=False) as llm:
        monkeypatch.setattr(CudaCopyStream, "copy", copy)
        failures = 0
        for _ in range(30):
            failing = True
            try:
                found = tokens(llm, prompts=PROMPTS[:1])
            except SpmoeError as error:
                failures += "bad moment" in str(error)
            else:
                assert found == expected()[:1]
            failing = False
            assert tokens(llm, prompts=PROMPTS[:1]) == expected()[:1]
        assert failures


@pytest.mark.slow
@pytest.mark.parametrize("k", [0, 4])
def test_a_context_of_32k_within_a_budget(tmp_path: Path, k: int) -> None:
    """The pair that ships, told that it may read so far, against transformers on the same device."""
    limit, longest = 6 * 2**30, 33_000
    paths = [_reaching(path, longest, tmp_path) for path in shipped_pair()]
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


def _reaching(checkpoint: Path, positions: int, into: Path) -> Path:
    """The same model with another longest context in its configuration."""
    copy = into / Path(checkpoint).name
    shutil.copytree(checkpoint, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": positions}))
    return copy


@pytest.mark.slow
def test_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that are cancelled, budgets at the minimum, copies that fail; for `SPMOE_SOAK_SECONDS`, else 30 s.

    Several may run at once, each with dice of its own: `SPMOE_SOAK_SEED`.
    """
    from spmoe.backends.cuda import CudaCopyStream

    sound, rng, fault_rate = CudaCopyStream.copy, random.Random(int(os.environ.get("SPMOE_SOAK_SEED", "1"))), 0.0

    def copy(self: Any, pieces: Any) -> Any:
        if rng.random() < fault_rate:
            raise TransferError("injected: the link had a bad moment")
        return sound(self, pieces)

    monkeypatch.setattr(CudaCopyStream, "copy", copy)
    until = time.monotonic() + float(os.environ.get("SPMOE_SOAK_SECONDS", "30"))
    settled: list[tuple[int, int]] = []  # device bytes and locked host bytes after each engine
    requests = 0
    while time.monotonic() < until:
        options = {
            "expert_memory": rng.choice(["2%", "2%", "10%", "50%"]),
            "prefetch": rng.choice(["draft-gate", "draft-gate", "draft-gate+next-gate", "activation", "on-demand"]),
            "num_speculative_tokens": rng.choice([0, 1, 4, "auto"]),
            "cutoff": rng.choice(["auto", "all"]),
        }
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
                    if "bad moment" not in str(error):
                        raise
                found = generation.token_ids
                assert found == expected()[number][: len(found)], f"{options}, request {requests}"
        del llm, generation
        gc.collect()
        torch.cuda.empty_cache()
        settled.append((torch.cuda.memory_allocated(), _locked_bytes()))
    assert requests
    for kind in zip(*settled[1:], strict=True):
        assert max(kind) <= 1.1 * min(kind) + 2**20, "something is left behind by each engine"


def _locked_bytes() -> int:
    """Host memory of this process that is locked or pinned."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return sum(int(fields.get(name, "0 kB").split()[0]) * 1024 for name in ("VmLck", "VmPin"))


def test_replays_write_to_no_memory_but_their_own() -> None:
    with LLM(dtype="float32", device="cuda", expert_memory="100%", progress=False) as llm:
        first = tokens(llm)
        # all the small blocks that are free, also those that were let go of while forwards were recorded
        held = [torch.full((1 + n % 64,), 7, device="cuda") for n in range(20_000)]
        assert tokens(llm) == first == expected()
        assert bool((torch.cat(held) == 7).all())


def test_a_recorded_draft_and_a_target_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "capture_forwards", lambda self, *args: "not in this test")
    for memory in ("100%", "30%"):
        with LLM(dtype="float32", device="cuda", expert_memory=memory, progress=False) as llm:
            assert [tokens(llm) for _ in range(2)] == [expected()] * 2


def test_engines_that_come_and_go_leave_no_memory_behind() -> None:
    def once() -> int:
        with LLM(dtype="float32", device="cuda", progress=False) as llm:
            generation = llm.stream(PROMPTS[0], GREEDY)
            next(iter(generation))
            generation.stop()
            tokens(llm, prompts=PROMPTS[:1])
        del llm, generation
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    once()
    settled = once()
    left = [once() - settled for _ in range(3)]
    assert max(left) <= 0, f"bytes left behind: {left}"
