"""Structured outputs: valid, and equal to plain decoding with every draft, K, seed and company."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoints import Pair, byte_tokenizer, mixtral, save, seeded
from spmoe import LLM, SamplingParams, StructuredOutputsParams
from spmoe.errors import UsageError

PROMPT = "def add(a, b):"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["a", "bc", None]},
        "flags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "count", "kind", "flags"],
    "additionalProperties": False,
}
REGEX = "[a-c]{3,5}-[0-9]{2}"
CHOICES = ["yes", "no", "maybe not"]
CONSTRAINTS = [
    StructuredOutputsParams(json=SCHEMA),
    StructuredOutputsParams(regex=REGEX),
    StructuredOutputsParams(choice=CHOICES),
    StructuredOutputsParams(grammar='start: "(" (start | "x") ")"'),
]


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    """Check a value against the keywords that these tests use."""
    if "enum" in schema:
        return any(value == one and type(value) is type(one) for one in schema["enum"])
    kind = schema["type"]
    if kind == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    if kind == "integer":
        whole = isinstance(value, int) and not isinstance(value, bool)
        return whole and schema["minimum"] <= value <= schema["maximum"]
    if kind == "boolean":
        return isinstance(value, bool)
    if kind == "array":
        items = isinstance(value, list) and len(value) <= schema["maxItems"]
        return items and all(is_valid(one, schema["items"]) for one in value)
    return (
        isinstance(value, dict)
        and list(value) == list(schema["properties"])
        and all(is_valid(value[name], one) for name, one in schema["properties"].items())
    )


def fulfils(text: str, constraint: StructuredOutputsParams) -> bool:
    if constraint.json is not None:
        return is_valid(json.loads(text), json.loads(str(constraint.json)))
    if constraint.regex is not None:
        return re.fullmatch(constraint.regex, text) is not None
    if constraint.choice is not None:
        return text in constraint.choice
    half = len(text) // 2
    return half > 0 and text == "(" * half + "x" + ")" * half


def build(draft: Any, k: int, model: Any = None, **options: Any) -> LLM:
    draft = draft if k else None
    return LLM(model, draft, num_speculative_tokens=k, dtype="float32", expert_memory="60%", progress=False, **options)


def requests(max_tokens: int = 60) -> list[SamplingParams]:
    """Return greedy and sampled requests of every kind of constraint."""
    greedy = [SamplingParams(max_tokens=max_tokens, structured_outputs=one) for one in CONSTRAINTS]
    return [*greedy, *(replace(one, temperature=1.0, seed=7) for one in greedy)]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    """Return the tokens of plain decoding, each request alone, by the shipped model."""
    with build(None, 0) as llm:
        outputs = [llm.generate(PROMPT, params)[0] for params in requests()]
    for params, output in zip(requests(), outputs, strict=True):
        assert params.structured_outputs is not None
        assert output.finish_reason == "stop"
        assert fulfils(output.text, params.structured_outputs), output.text
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize(("draft", "k"), [("auto", 4), ("ngram", 4), ("self:int4", 4)])
def test_output_equals_plain_decoding(plain: list[list[int]], draft: str, k: int) -> None:
    with build(draft, k) as llm:
        if draft == "auto":
            assert [llm.generate(PROMPT, params)[0].token_ids for params in requests()] == plain
        company = [SamplingParams(max_tokens=20), SamplingParams(max_tokens=20, temperature=0.9, seed=2)]
        together = llm.generate([PROMPT] * (len(plain) + 2), [*requests(), *company])
        assert [output.token_ids for output in together][: len(plain)] == plain
        assert llm.engine.counters.drafted > 0
        if draft == "auto":  # its tokens obey the grammar too
            assert llm.engine.counters.accepted > llm.engine.counters.drafted / 2


def test_options_of_requests() -> None:
    sampled = SamplingParams(
        max_tokens=80, temperature=0.8, seed=3, n=3, structured_outputs=StructuredOutputsParams(json=SCHEMA)
    )
    with build("auto", 3) as llm:
        outputs = llm.generate(PROMPT, sampled)[0].outputs
        assert len({output.text for output in outputs}) == 3
        assert all(is_valid(json.loads(output.text), SCHEMA) for output in outputs)

        cut = llm.generate(PROMPT, replace(sampled, n=1, max_tokens=5))[0].outputs[0]
        assert (cut.token_ids, cut.finish_reason) == (outputs[0].token_ids[:5], "length")

        choice = replace(sampled, n=1, structured_outputs=StructuredOutputsParams(choice=["yes"]))
        output = llm.generate(PROMPT, replace(choice, min_tokens=30, logprobs=1, repetition_penalty=1.5))[0].outputs[0]
        assert (output.text, output.finish_reason) == ("yes", "stop")
        best = [max(one.values(), key=lambda one: one.logprob) for one in output.logprobs or []]
        assert any(one.decoded_token not in ("y", "e", "s", "ye", "es", "yes") for one in best), "of the model itself"
        stop = llm.get_tokenizer()("#")["input_ids"][0]
        ended = llm.generate(PROMPT, replace(choice, stop_token_ids=[stop], logit_bias={stop: 100.0}))[0].outputs[0]
        assert (ended.text, ended.stop_reason) == ("yes", stop)

        any_object = replace(sampled, n=1, structured_outputs=StructuredOutputsParams(json_object=True))
        assert llm.generate(PROMPT, any_object)[0].text.startswith("{")
        for wrong in ({"json": {"type": "objekt"}}, {"regex": "("}, {"grammar": "start: x"}):
            params = replace(sampled, n=1, structured_outputs=StructuredOutputsParams(**wrong))
            with pytest.raises(UsageError, match="cannot be used"):
                llm.stream(PROMPT, params)  # before it runs


LEAVES = st.one_of(
    st.integers(0, 6).map(lambda length: {"type": "string", "maxLength": length}),
    st.tuples(st.integers(-50, 50), st.integers(0, 90)).map(
        lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[0] + pair[1]}
    ),
    st.just({"type": "boolean"}),
    st.lists(st.sampled_from(["", "x", 'ä"\\', 3, None, True]), min_size=1, max_size=3).map(lambda one: {"enum": one}),
)


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from(["a", "b c", "ü"])
    return st.dictionaries(names, inner, max_size=2).map(
        lambda found: {
            "type": "object",
            "properties": found,
            "required": list(found),
            "additionalProperties": False,
        }
    ) | st.tuples(inner, st.integers(0, 2)).map(lambda two: {"type": "array", "items": two[0], "maxItems": two[1]})


SCHEMAS = st.recursive(LEAVES, objects, max_leaves=3)


@pytest.fixture(scope="module")
def tiny(mixtral_pair: Pair) -> Any:
    """Engines of a random model: without a draft, with a good one, and with n-grams."""
    made = [build(draft, k, mixtral_pair.target) for draft, k in ((None, 0), (mixtral_pair.good, 4), ("ngram", 3))]
    yield made
    for llm in made:
        llm.close()


def test_random_schemas(tiny: list[LLM]) -> None:
    finished = 0

    @settings(deadline=None, max_examples=12, suppress_health_check=list(HealthCheck), database=None)
    @given(schema=SCHEMAS, seed=st.integers(0, 9), temperature=st.sampled_from([0.0, 1.0]))
    def check(schema: dict[str, Any], seed: int, temperature: float) -> None:
        nonlocal finished
        params = SamplingParams(
            max_tokens=120,
            temperature=temperature,
            seed=seed,
            structured_outputs=StructuredOutputsParams(json=schema),
        )
        first, *others = (llm.generate("x = ", params)[0] for llm in tiny)
        assert all(other.token_ids == first.token_ids for other in others)
        if first.finish_reason == "stop":
            finished += 1
            assert is_valid(json.loads(first.text), schema)

    check()
    assert finished > 6


def test_padded_vocabulary(tmp_path: Path) -> None:
    """Tokens beyond the tokenizer's vocabulary are never generated."""
    path = save(seeded(mixtral, 5, vocab_size=300), tmp_path / "padded", byte_tokenizer())
    with build("ngram", 3, path) as llm:
        params = SamplingParams(max_tokens=40, temperature=5.0, seed=1, structured_outputs=CONSTRAINTS[1])
        for seed in range(4):
            assert re.fullmatch(REGEX, llm.generate("x", replace(params, seed=seed))[0].text)


def test_model_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with build(None, 0, save(seeded(mixtral, 5), tmp_path / "bare")) as llm:
        params = SamplingParams(structured_outputs=CONSTRAINTS[1])
        with pytest.raises(UsageError, match="ships no tokenizer, which structured_outputs needs"):
            llm.generate([1, 2], params)
