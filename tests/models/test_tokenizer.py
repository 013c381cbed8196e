"""Tokenizers: target and draft must share one, but their embeddings may have different numbers of rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from checkpoints import (
    DRAFTS,
    VOCABULARY,
    Pair,
    byte_tokenizer,
    greedy,
    greedy_tokens,
    mistral,
    mixtral,
    reference,
    save,
    seeded,
    upcycle,
)
from spmoe import LLM, SamplingParams
from spmoe.errors import CheckpointError, UsageError
from spmoe.models.checkpoint import Checkpoint
from spmoe.models.tokenizer import load_tokenizer, require_same_tokenizer

COUNT = 16


def check(target: Path, draft: Path) -> None:
    require_same_tokenizer(
        load_tokenizer(target), load_tokenizer(draft), Checkpoint.find(str(target)), Checkpoint.find(str(draft))
    )


@pytest.mark.parametrize("code", [{"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}, ["own.Tokenizer", None]])
def test_tokenizer_of_the_repositorys_own_code_is_refused(code: Any, tmp_path: Path) -> None:
    """A new download would not help."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "OwnTokenizer", "auto_map": code}))
    (tmp_path / "tokenization_own.py").write_text("raise SystemExit('it was run')\n")
    with pytest.raises(CheckpointError, match=r"Python code that comes with the model .* spmoe does not run"):
        load_tokenizer(tmp_path)


def test_equal_tokenizers_are_accepted(pair: Pair, llama_draft: Path) -> None:
    for draft in (pair.good, pair.random, llama_draft):
        check(pair.target, draft)


def test_error_names_the_first_difference(tmp_path: Path, mixtral_pair: Pair) -> None:
    draft = save(seeded(mistral, 1), tmp_path / "draft", byte_tokenizer(swap=(100, 200)))
    symbols = {index: token for token, index in byte_tokenizer().get_vocab().items()}
    with pytest.raises(UsageError) as raised:
        check(mixtral_pair.target, draft)
    message = str(raised.value)
    assert f"token 100 is {symbols[100]!r} in {mixtral_pair.target}" in message
    assert f"{symbols[200]!r} in {draft}" in message
    assert "choose a draft with the same tokenizer" in message
    with pytest.raises(UsageError, match="token 100 is"):
        LLM(str(mixtral_pair.target), str(draft), progress=False)


def test_extra_token_is_rejected(tmp_path: Path, mixtral_pair: Pair) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["extra"])
    draft = save(seeded(mistral, 1, vocab_size=VOCABULARY + 1), tmp_path / "draft", tokenizer)
    with pytest.raises(UsageError, match=f"token {VOCABULARY} is None .* but 'extra'"):
        check(mixtral_pair.target, draft)
    with pytest.raises(UsageError, match=f"token {VOCABULARY} is 'extra' .* but None"):
        check(draft, mixtral_pair.target)


def test_tokenizers_are_not_compared_without_speculation(tmp_path: Path, mixtral_pair: Pair) -> None:
    draft = save(seeded(mistral, 1), tmp_path / "draft", byte_tokenizer(swap=(100, 200)))
    with LLM(str(mixtral_pair.target), str(draft), num_speculative_tokens=0, progress=False) as llm:
        assert len(llm.generate([5, 6], SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2


def test_without_tokenizers_vocabulary_sizes_must_be_equal(tmp_path: Path, mixtral_pair: Pair) -> None:
    target = save(seeded(mixtral, 1), tmp_path / "target")
    same_size = save(seeded(mistral, 1), tmp_path / "same")
    other = save(seeded(mistral, 1, vocab_size=VOCABULARY + 7), tmp_path / "other")
    check(target, same_size)
    for draft in (other, mixtral_pair.good):
        with pytest.raises(UsageError, match="cannot be shown to share a tokenizer"):
            check(target, draft)
    with pytest.raises(UsageError, match="cannot be shown to share a tokenizer"):
        check(mixtral_pair.target, same_size)


# ---- embeddings padded beyond the vocabulary

SIZES = {"smaller": VOCABULARY, "same": VOCABULARY + 40, "bigger": VOCABULARY + 90}


@pytest.fixture(scope="module")
def padded_target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int], list[int]]:
    """Save a target with 40 unused embedding rows, and find a prompt after which it generates some of them."""
    draft = seeded(mistral, 90, vocab_size=SIZES["same"])
    target = seeded(mixtral, 91, vocab_size=SIZES["same"])
    upcycle(target, draft, noise=0.15)
    directory = save(target, tmp_path_factory.mktemp("padded") / "target", byte_tokenizer())
    model = reference(directory)
    for first in range(60):
        prompt = [first, 2 * first, 11]
        tokens = greedy(model, prompt, COUNT)
        if sum(token >= VOCABULARY for token in tokens[:-1]) >= 2 and len(set(tokens)) > 6:
            return directory, prompt, tokens
    raise AssertionError("no prompt makes this target generate padding tokens; choose other seeds")


def collect_drafts(llm: LLM) -> list[int]:
    """Return a list that will hold every token that the draft proposes."""
    proposed: list[int] = []
    own = llm.engine.loop.drafter.propose

    def propose(*args: Any) -> Any:
        drafts = own(*args)
        proposed.extend(drafts[0].tokens)
        return drafts

    llm.engine.loop.drafter.propose = propose  # type: ignore[method-assign]
    return proposed


@pytest.mark.parametrize("temperature", [0.0, 3.0])
@pytest.mark.parametrize("size", SIZES)
def test_draft_with_another_embedding_size_is_exact(
    tmp_path: Path, padded_target: tuple[Path, list[int], list[int]], size: str, temperature: float
) -> None:
    """The target or prompt may contain tokens that the draft has no row for; the draft's extra rows are never used."""
    target, prompt, tokens = padded_target
    draft = save(seeded(mistral, 90, vocab_size=SIZES[size]), tmp_path / size, byte_tokenizer())
    check(target, draft)
    with LLM(str(target), str(draft), num_speculative_tokens=3, progress=False) as llm:
        proposed = collect_drafts(llm)
        params: dict[str, Any] = {"max_tokens": COUNT, "ignore_eos": True, "temperature": temperature, "seed": 3}
        completion = llm.generate(prompt, SamplingParams(**params))[0]
        assert all(0 <= token < SIZES["same"] for token in completion.token_ids)
        assert len(completion.token_ids) == COUNT
        assert len(proposed) > 10
        assert max(proposed) < min(SIZES[size], SIZES["same"])
        if temperature == 0:
            assert completion.token_ids == tokens
            longer = [*prompt, *tokens[:8]]  # the prompt now contains tokens that only the target has
            again = llm.generate(longer, SamplingParams(max_tokens=COUNT - 8, ignore_eos=True))[0]
            assert again.token_ids == tokens[8:]


def test_draft_never_proposes_tokens_beyond_the_targets_vocabulary(tmp_path: Path) -> None:
    """The draft's most likely tokens are beyond the target's vocabulary, so the best token within it is proposed."""
    target = save(seeded(mixtral, 1), tmp_path / "target", byte_tokenizer())
    model = seeded(DRAFTS["mistral"], 2, vocab_size=SIZES["bigger"])
    model.lm_head.weight.data[VOCABULARY:] *= 50.0
    draft = save(model, tmp_path / "draft", byte_tokenizer())
    with LLM(str(target), str(draft), num_speculative_tokens=3, progress=False) as llm:
        proposed = collect_drafts(llm)
        tokens = llm.generate([1, 2, 3], SamplingParams(max_tokens=COUNT, ignore_eos=True))[0].token_ids
    assert tokens == greedy_tokens(target, [1, 2, 3], COUNT)
    assert proposed
    assert max(proposed) < VOCABULARY
