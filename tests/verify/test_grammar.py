"""Compiling constraints, their limits, and masks that follow any history."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import VOCABULARY, byte_tokenizer
from spmoe.config import SamplingParams, StructuredOutputsParams
from spmoe.errors import UsageError
from spmoe.models.tokenizer import tokenizer_json
from spmoe.verify import grammar as module
from spmoe.verify.grammar import GrammarCompiler, GrammarMask
from spmoe.verify.logits import LogitsProcessors

TOKENIZER = byte_tokenizer()
END = VOCABULARY - 1
PADDED = VOCABULARY + 15  # width of logits
DIGITS = StructuredOutputsParams(regex="a[0-9]{1,2}")


def compiler(eos: Sequence[int] = (END,), vocab_size: int = PADDED) -> GrammarCompiler:
    return GrammarCompiler(lambda: tokenizer_json(TOKENIZER), eos, vocab_size)


COMPILER = compiler()


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER(text)["input_ids"]
    return found


def allowed(scores: torch.Tensor) -> list[str]:
    """Return the allowed tokens of each row, as text; `$` is the end."""
    rows = []
    for row in scores:
        tokens = row.isfinite().nonzero()[:, 0].tolist()
        rows.append("".join(sorted("$" if token == END else TOKENIZER.decode([token]) for token in tokens)))
    return rows


def masked(mask: GrammarMask, output: str, draft: Sequence[int] = (), rows: int | None = None) -> list[str]:
    scores = torch.zeros(len(draft) + 1 if rows is None else rows, PADDED)
    mask.apply(scores, ids(output), list(draft))
    return allowed(scores)


# ---- masks


def test_each_row_follows_its_own_history() -> None:
    mask = GrammarMask(COMPILER.compile(DIGITS), [END])
    assert masked(mask, "") == ["a"]
    assert masked(mask, "", ids("a12")) == ["a", "0123456789", "$0123456789", "$"]
    assert masked(mask, "a", ids("1"), rows=1) == ["$0123456789"]
    assert masked(mask, "a1", ids("2")) == ["$0123456789", "$"]


def test_rows_behind_a_forbidden_draft_token_are_left_alone() -> None:
    mask = GrammarMask(COMPILER.compile(DIGITS), [END])
    for draft in (ids("axx"), [*ids("a"), END, *ids("1")], [*ids("a"), VOCABULARY + 3, 0]):
        first, second, *others = masked(mask, "", draft)
        assert (first, second) == ("a", "0123456789")
        assert all(len(row) > 200 for row in others)
    assert masked(mask, "a", ids("1")) == ["0123456789", "$0123456789"]


@settings(deadline=None, max_examples=30)
@given(paths=st.lists(st.text(alphabet="a12", max_size=4), max_size=8))
def test_masks_do_not_depend_on_earlier_calls(paths: list[str]) -> None:
    used = GrammarMask(COMPILER.compile(DIGITS), [END])
    for path in paths:
        valid = re.match("(a[12]{0,2})?", path)
        assert valid is not None
        for output in range(valid.end() + 1):
            fresh = GrammarMask(COMPILER.compile(DIGITS), [END])
            call = (path[:output], ids(path[output:]))
            assert masked(used, *call) == masked(fresh, *call)


def test_stop_tokens_may_follow_a_complete_output() -> None:
    semicolon = ids(";")[0]
    mask = GrammarMask(COMPILER.compile(StructuredOutputsParams(choice=["a", "ab"])), [END, semicolon, PADDED + 1])
    assert masked(mask, "", ids("ab")) == ["a", "$;b", "$;"]


def test_minimum_length_yields_to_a_complete_grammar() -> None:
    params = SamplingParams(min_tokens=4)
    mask = GrammarMask(COMPILER.compile(DIGITS), [END])
    processors = LogitsProcessors.of(params, [END], 2, PADDED, mask)
    assert processors is not None
    tokens = [0, 0, *ids("a1")]
    assert allowed(processors.process(torch.zeros(2, PADDED), tokens, ids("2"))) == ["0123456789", "$"]


def test_a_grammar_that_exceeds_a_limit_ends_only_outputs_that_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LEXER_STATES", 60)
    grammar = compiler().compile(StructuredOutputsParams(regex="[ab]*a[ab]{6}c|x"))
    mask = GrammarMask(grammar, [END])
    assert masked(mask, "") == ["abx"]
    output = ""
    for character in random.Random(0).choices("ab", k=200):
        if masked(mask, output) == ["$"]:
            break
        mask.require_within_limits([*ids(output), 0])
        output += character
    else:
        pytest.fail("no limit was exceeded")
    mask.require_within_limits(ids(output))
    assert masked(mask, output, ids("a"))[0] == "$"
    with pytest.raises(UsageError, match=f"exceeded a limit of llguidance after {len(output)} tokens"):
        mask.require_within_limits([*ids(output), END])
    other = GrammarMask(grammar, [END])
    assert masked(other, "x") == ["$"]
    assert masked(other, "ab") == ["ab"]
    other.require_within_limits([*ids("ab"), END])


# ---- compiling


def test_grammars_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    own = compiler()
    monkeypatch.setattr(module, "_CACHED", 2)
    first = own.compile(DIGITS)
    assert own.compile(StructuredOutputsParams(regex="a[0-9]{1,2}")) is first
    for text in ("x", "y"):
        own.compile(StructuredOutputsParams(regex=text))
    assert own.compile(DIGITS) is not first


@pytest.mark.parametrize(
    ("grammar", "text"),
    [('start: "a" b\nb: /[0-9]/', "a1"), ('root ::= "a" b\nb ::= [0-9]', "a1"), ("%llguidance {}\nstart: /a1/", "a1")],
)
def test_grammars_are_lark_or_gbnf(grammar: str, text: str) -> None:
    mask = GrammarMask(COMPILER.compile(StructuredOutputsParams(grammar=grammar)), [END])
    rows = masked(mask, "", ids(text))
    assert [character in row for character, row in zip(f"{text}$", rows, strict=True)] == [True] * 3


def references(count: int) -> dict[str, Any]:
    """Return a schema with a chain of references."""
    links = {f"a{i}": {"items": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}]}} for i in range(count)}
    return {"$defs": {**links, f"a{count}": {}}, "$ref": "#/$defs/a0"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"regex": "(a"}, "structured_outputs.regex cannot be used .*unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": r"[^\s\S]"}, "structured_outputs.regex cannot be used"),
        ({"json": {"type": "objekt"}}, "structured_outputs.json cannot be used .*Invalid type: objekt"),
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"$ref": "#"}}, "structured_outputs.json cannot be used"),
        ({"json": {"$ref": "https://example.org/schema"}}, "not fetch resources"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable schema"),
        ({"json": {"enum": ["x" * 100] * 1000}}, "characters, and the limit is"),
        ({"json": {"allOf": [{"anyOf": [{"required": [f"{i}.{j}"]} for j in range(4)]} for i in range(12)]}}, "json"),
        ({"regex": "\ud800"}, "structured_outputs.regex cannot be used"),
        ({"grammar": "start: nothing"}, "unknown name"),
        ({"grammar": 'root ::= "a'}, "structured_outputs.grammar cannot be used"),
        ({"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}, "structured_outputs.grammar cannot be used"),
        ({"grammar": "root ::= " + '"a" ' * 5000}, "characters, and the limit is"),
        ({"grammar": 'start: "a"\n' + "\n" * 500}, "has 501 lines, and the limit is 500"),
        ({"grammar": "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(60)) + '\nA60: "x"'}, "big"),
    ],
)
def test_bad_constraints_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        COMPILER.compile(StructuredOutputsParams(**options))


def test_deep_references_do_not_overflow_the_stack() -> None:
    """An overflow would end the process, so that another process tries it."""
    schema = json.dumps(references(1000))
    assert len(schema) < module.MAX_SOURCE_LENGTH
    code = f"""
import sys
from spmoe.config import StructuredOutputsParams
from spmoe.verify.grammar import GrammarCompiler
compiler = GrammarCompiler(sys.stdin.read, [{END}], {PADDED})
compiler.compile(StructuredOutputsParams(json={schema!r})).new_matcher().compute_bitmask()
print("compiled")
"""
    command, text = [sys.executable, "-c", code], tokenizer_json(TOKENIZER)
    result = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "compiled\n"), result.stderr


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UsageError, match=r"needs llguidance.*pip install 'spmoe\[guidance\]'"):
        compiler().compile(DIGITS)


def test_models_and_tokenizers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="needs an end-of-text token"):
        compiler(eos=()).compile(DIGITS)
    with pytest.raises(UsageError, match="llguidance cannot read its tokenizer"):
        GrammarCompiler(lambda: '{"version": "9"}', [END], PADDED).compile(DIGITS)
    with pytest.raises(UsageError, match=r"tokenizer\.json; object is in Python"):
        tokenizer_json(object())


# ---- parameters


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object, not none"),
        ({"regex": "a", "json_object": True}, "not regex and json_object"),
        ({"regex": ""}, "structured_outputs.regex must be text that is not empty"),
        ({"grammar": 3}, "structured_outputs.grammar must be text"),
        ({"choice": []}, "structured_outputs.choice must be a list of texts"),
        ({"choice": "yes"}, "structured_outputs.choice must be a list of texts"),
        ({"choice": ["a", 3]}, "structured_outputs.choice must be a list of texts"),
        ({"json": "{"}, "structured_outputs.json is not JSON"),
        ({"json": "[1]"}, "structured_outputs.json must be a JSON schema"),
        ({"json": {"const": {1}}}, "structured_outputs.json is not JSON"),
        ({"json": "[" * 100_000}, "structured_outputs.json is not JSON"),
        ({"json_object": 1}, "structured_outputs.json_object must be true or false"),
        ({"json_schema": {}}, "unknown option json_schema"),
    ],
)
def test_wrong_parameters_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        StructuredOutputsParams(**options)


def test_schemas_are_text_or_mappings() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    assert StructuredOutputsParams(json=schema) == StructuredOutputsParams(json=json.dumps(schema))


def test_sampling_params_take_a_constraint() -> None:
    assert SamplingParams(structured_outputs=DIGITS).structured_outputs is DIGITS
    with pytest.raises(UsageError, match="must be a StructuredOutputsParams, not dict"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="needs ignore_eos false"):
        SamplingParams(structured_outputs=DIGITS, ignore_eos=True)
