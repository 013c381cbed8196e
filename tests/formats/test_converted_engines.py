"""Engines with converted experts: tokens, the expert file, and what reports say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import (
    Pair,
    byte_tokenizer,
    dense_model,
    greedy,
    greedy_tokens,
    mixtral,
    reference,
    save,
    save_pair,
    seeded,
)
from spmoe import LLM, SamplingParams
from spmoe.errors import UsageError
from spmoe.formats.int4 import Int4
from spmoe.models import families
from spmoe.models.experts_seam import experts_modules

# one of every family and kind of scales; tests of single matrices cover the others
NAMES = [
    *("bf16-packed", "bfloat16", "fp8-block128", "fp8-channel", "int4-g32", "int4-asym-g64"),
    *("int8-channel", "int8-g128", "mxfp4", "nvfp4"),
]
PROMPTS = [[84], [(29 * i + 7) % 251 for i in range(11)]]
COUNT = 10
ROOT = Path(__file__).resolve().parents[2]
PARAMS = SamplingParams(max_tokens=COUNT, ignore_eos=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target and drafts whose weights bfloat16 holds, declared as bfloat16."""
    directory = tmp_path_factory.mktemp("converted")
    made = save_pair(directory, "mixtral")
    for path in (made.target, made.good, made.random):
        model = reference(path).bfloat16()
        model.save_pretrained(path)
    return made


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory."""
    monkeypatch.setenv("SPMOE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def generate(model: Path, draft: Path | None, **options: Any) -> tuple[list[list[int]], LLM]:
    draft_name = None if draft is None else str(draft)
    with LLM(str(model), draft_name, progress=False, cutoff="all", **{"dtype": "float32", **options}) as llm:
        return [completion.token_ids for completion in llm.generate(PROMPTS, PARAMS)], llm


@pytest.mark.parametrize("name", NAMES)
def test_tokens_equal_transformers_on_dequantized_weights(name: str, pair: Pair) -> None:
    model = dense_model(pair.target, name)
    expected = [greedy(model, prompt, COUNT) for prompt in PROMPTS]
    for k, draft, memory in ((0, None, "30%"), (3, pair.good, "100%")):
        tokens, llm = generate(pair.target, draft, expert_format=name, num_speculative_tokens=k, expert_memory=memory)
        assert tokens == expected
        lossless = name in ("bf16-packed", "bfloat16")
        assert llm.engine.parts.models.lossless == lossless
        assert any("lossless: no" in notice for notice in llm.notices) == (not lossless)


@pytest.mark.parametrize("name", ["mxfp4", "bf16-packed", "int4-asym-g32"])
def test_transposed_experts_with_biases(name: str, tmp_path: Path) -> None:
    model = families.tiny_model("gpt_oss").bfloat16()
    families.save(model, tmp_path)
    expected = greedy(dense_model(tmp_path, name), PROMPTS[0], COUNT)
    with LLM(str(tmp_path), None, progress=False, dtype="float32", expert_format=name, expert_memory="50%") as llm:
        assert llm.generate(PROMPTS[0], PARAMS)[0].token_ids == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bf16_packed_generates_the_text_of_bfloat16(pair: Pair, dtype: str) -> None:
    plain, _ = generate(pair.target, pair.good, dtype=dtype, num_speculative_tokens=2)
    packed, llm = generate(pair.target, pair.good, dtype=dtype, num_speculative_tokens=2, expert_format="bf16-packed")
    assert packed == plain
    assert llm.engine.spec.layout.format == "bf16-packed"


@pytest.mark.parametrize("target", ["src/spmoe/pair/target", "extras/fine", "extras/diverse"])
def test_bf16_packed_of_trained_targets(target: str) -> None:
    if not (ROOT / target / "model.safetensors").exists():
        pytest.skip(f"{target} has no weights")
    params, found = SamplingParams(max_tokens=8, ignore_eos=True, logprobs=1), []
    for name in ("bfloat16", "bf16-packed"):
        options: dict[str, Any] = {"dtype": "bfloat16", "expert_format": name, "progress": False}
        with LLM(str(ROOT / target), None, **options) as llm:
            output = llm.generate("import os\n\ndef main(", params)[0].outputs[0]
            found.append((output.token_ids, output.logprobs, llm.engine.spec.layout.format))
    assert found[0][:2] == found[1][:2]
    assert [one[2] for one in found] == ["bfloat16", "bf16-packed"]


def test_statistics_name_the_format(pair: Pair) -> None:
    with LLM(str(pair.target), None, progress=False, expert_format="int8-channel") as llm:
        stats = llm.generate(PROMPTS[0], PARAMS)[0].to_dict()["stats"]
    assert (stats["lossless"], stats["expert_format"]) == (False, "int8-channel")
    with LLM(str(pair.target), None, progress=False) as llm:
        stats = llm.generate(PROMPTS[0], PARAMS)[0].to_dict()["stats"]
    assert (stats["lossless"], stats["expert_format"]) == (True, "bfloat16")


# ---- the expert file


def expert_files(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "experts").glob("*.safetensors"))


def test_each_format_has_a_file(pair: Pair, home: Path) -> None:
    sizes = {}
    for name in ("auto", "bf16-packed", "int4-g32"):
        generate(pair.target, None, expert_format=name, dtype="bfloat16")
        (new,) = set(expert_files(home)) - {file for file, _ in sizes.values()}
        assert new.endswith("-bfloat16.safetensors" if name == "auto" else f"-bfloat16-{name}.safetensors")
        sizes[name] = (new, (home / "experts" / new).stat().st_size)
    header = (home / "experts" / sizes["int4-g32"][0]).read_bytes()[8:]
    layout = json.loads(
        json.loads(header[: header.index(b"}}") + 200].split(b'"layout": ')[1].split(b', "experts"')[0])
    )
    assert (layout["format"], layout["version"]) == ("int4-g32", 1)


def written(model: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> tuple[list[list[int]], str]:
    """Return the tokens and what was said about writing experts."""
    with LLM(str(model), None, dtype="float32", **options) as llm:
        tokens = [completion.token_ids for completion in llm.generate(PROMPTS, PARAMS)]
    return tokens, capsys.readouterr().err


def test_file_of_another_format_is_written_again(
    pair: Pair, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = written(pair.target, capsys, expert_format="int4-g32")
    written(pair.target, capsys, expert_format="int8-g32")
    four, eight = (next((home / "experts").glob(f"*int{bits}-g32.safetensors")) for bits in (4, 8))
    four.write_bytes(eight.read_bytes())
    tokens, said = written(pair.target, capsys, expert_format="int4-g32")
    assert tokens == expected
    assert "again: it holds int8-g32, version 1, and this is int4-g32, version 1" in said
    monkeypatch.setattr(Int4, "version", 2)
    from spmoe.formats import expert

    expert._layout.cache_clear()
    tokens, said = written(pair.target, capsys, expert_format="int4-g32")
    expert._layout.cache_clear()
    assert tokens == expected
    assert "again: it holds int4-g32, version 1, and this is int4-g32, version 2" in said


def test_file_of_an_older_release_is_written_again(pair: Pair, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected, _ = written(pair.target, capsys)
    (file,) = (home / "experts").glob("*.safetensors")
    file.write_bytes(file.read_bytes().replace(b"spmoe-experts-3", b"spmoe-experts-2", 1))
    tokens, said = written(pair.target, capsys)
    assert tokens == expected
    assert "the file is damaged or of an older format" in said


# ---- bf16-packed with many rare exponents


def diverse(directory: Path, spread: int, share: float = 1.0) -> Path:
    """Save a model of which one matrix has a share of weights of `spread` binary orders of magnitude."""
    model = seeded(mixtral, 3, intermediate_size=128)  # a whole block
    for _, module in experts_modules(model):
        weight = module.down_proj.data[1]  # type: ignore[index, operator, union-attr]
        generator = torch.Generator().manual_seed(0)
        smaller = 2.0 ** -torch.randint(0, spread, weight.shape, generator=generator)
        weight *= torch.where(torch.rand(weight.shape, generator=generator) < share, smaller, 1.0)
        break
    return save(model.bfloat16(), directory, byte_tokenizer())


def test_more_escapes_than_usual_are_kept(tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = diverse(tmp_path / "diverse", 60, 0.008)
    expected = [greedy_tokens(model, prompt, COUNT) for prompt in PROMPTS]
    tokens, _ = written(model, capsys, expert_format="bf16-packed")
    assert tokens == expected
    (file,) = (home / "experts").glob("*.safetensors")
    before = file.stat()
    tokens, said = written(model, capsys, expert_format="bf16-packed")
    assert tokens == expected
    assert "again" not in said
    assert file.stat().st_mtime_ns == before.st_mtime_ns  # the second run knows the number of escapes from the file
    assert b"bf16-packed-e" in file.read_bytes()


def test_weights_that_packing_does_not_shrink_are_refused(tmp_path: Path, home: Path) -> None:
    model = diverse(tmp_path / "diverse", 60)
    with pytest.raises(UsageError, match=r"would not make the experts of .* smaller"):
        generate(model, None, expert_format="bf16-packed")


def test_weights_that_bf16_packed_would_round_are_refused(tmp_path: Path) -> None:
    model = save(seeded(mixtral, 1), tmp_path, byte_tokenizer())
    with pytest.raises(UsageError, match=r"packs bfloat16 weights without loss, .* add --dtype bfloat16"):
        generate(model, None, expert_format="bf16-packed")
    tokens, _ = generate(model, None, expert_format="bf16-packed", dtype="bfloat16")
    assert tokens == generate(model, None, dtype="bfloat16")[0]


def test_dtype_of_experts_decides_what_is_lossless(tmp_path: Path) -> None:
    families.save(families.tiny_model("mixtral", vocab_size=8192), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):  # most bytes of the file
        stored[name] = stored[name].bfloat16()
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match="packs bfloat16 weights without loss"):
        generate(tmp_path, None, expert_format="bf16-packed")
    with LLM(str(tmp_path), None, dtype="float32", expert_format="bfloat16", progress=False) as llm:
        assert not llm.engine.parts.models.lossless


def test_odd_sizes_are_refused_before_anything_is_written(tmp_path: Path, home: Path) -> None:
    model = save(seeded(mixtral, 1, intermediate_size=33), tmp_path, byte_tokenizer())
    with pytest.raises(
        UsageError, match=r"int4-g32 cannot hold the experts of .* 33 inputs cannot be stored in 4 bits"
    ):
        generate(model, None, expert_format="int4-g32")
    assert not (home / "experts").exists()


def test_self_draft_of_converted_experts(pair: Pair) -> None:
    """A draft with quantized experts reads the checkpoint's own weights, whatever the target's format."""
    model = dense_model(pair.target, "int8-channel")
    expected = [greedy(model, prompt, COUNT) for prompt in PROMPTS]
    options: dict[str, Any] = {
        "dtype": "float32",
        "expert_format": "int8-channel",
        "num_speculative_tokens": 3,
        "progress": False,
    }
    with LLM(str(pair.target), "self:int4", **options) as llm:
        completions = llm.generate(PROMPTS, PARAMS)
    assert [completion.token_ids for completion in completions] == expected
    assert completions[-1].stats.counters.accepted > 0
