"""`response_format`, `structured_outputs` and required tool calls, through the `openai` client."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from serving import RunningServer, running

from spmoe import AsyncLLM, SamplingParams, StructuredOutputsParams

openai = pytest.importorskip("openai")

MODEL = "spmoe-pair"
MESSAGES: list[Any] = [{"role": "user", "content": "a point"}]
SCHEMA = {
    "type": "object",
    "properties": {"x": {"type": "integer", "maximum": 99, "minimum": 0}, "name": {"enum": ["p", "q"]}},
    "required": ["x", "name"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "point", "schema": SCHEMA, "strict": True}}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Köln", "Paris"]}},
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "::= //", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "time"}},
]


def require_point(text: str) -> None:
    found = json.loads(text)
    assert list(found) == ["x", "name"]
    assert 0 <= found["x"] <= 99
    assert found["name"] in ("p", "q")


def test_response_format(client: Any, llm: AsyncLLM) -> None:
    request = {"model": MODEL, "messages": MESSAGES, "max_tokens": 60, "response_format": FORMAT}
    choice = client.chat.completions.create(**request).choices[0]
    assert choice.finish_reason == "stop"
    require_point(choice.message.content)
    params = SamplingParams(max_tokens=60, structured_outputs=StructuredOutputsParams(json=SCHEMA))
    assert llm.llm.chat(MESSAGES, params)[0].text == choice.message.content
    chunks = client.chat.completions.create(**request, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    several = client.chat.completions.create(**request, n=2, temperature=1.0, seed=1)
    for one in several.choices:
        require_point(one.message.content)


def test_completions_take_a_format_too(client: Any) -> None:
    request = {"model": MODEL, "prompt": "x = ", "max_tokens": 60}
    require_point(client.completions.create(**request, extra_body={"response_format": FORMAT}).choices[0].text)
    text = client.completions.create(**request, extra_body={"response_format": {"type": "json_object"}})
    assert text.choices[0].text.startswith("{")


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [({"choice": ["red", "green"]}, "red|green"), ({"regex": "[0-9]{3}", "json": None}, "[0-9]{3}")],
)
def test_structured_outputs(client: Any, constraint: dict[str, Any], pattern: str) -> None:
    for text in (
        client.completions.create(
            model=MODEL, prompt="x = ", max_tokens=9, extra_body={"structured_outputs": constraint}
        )
        .choices[0]
        .text,
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=9, extra_body={"structured_outputs": constraint}
        )
        .choices[0]
        .message.content,
    ):
        assert re.fullmatch(pattern, text)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "must be 'text', 'json_object' or 'json_schema'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "response_format.json_schema is missing"),
        (
            {"response_format": {**FORMAT, "type": "text"}},
            "response_format",
            "response_format.json_schema must be left out with the type 'text'",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format",
            "response_format.json_schema.schema is missing",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objekt"}}}},
            "response_format",
            "response_format cannot be used (Invalid type: objekt)",
        ),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "structured_outputs.regex cannot be used"),
        ({"structured_outputs": {}}, "structured_outputs", "must have exactly one of json, regex"),
        ({"structured_outputs": "json"}, "structured_outputs", "structured_outputs must be an object"),
        ({"structured_outputs": {"xml": 1}}, "structured_outputs", "structured_outputs: unknown option xml"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "response_format",
            "give one of them",
        ),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "structured_outputs", "ignore_eos"),
        ({"response_format": FORMAT, "ignore_eos": True}, "response_format", "response_format needs ignore_eos false"),
    ],
)
def test_bad_constraints_are_refused(client: Any, fields: dict[str, Any], param: str, words: str) -> None:
    for create, prompt in (
        (client.completions.create, {"prompt": "x"}),
        (client.chat.completions.create, {"messages": MESSAGES}),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            create(model=MODEL, **prompt, max_tokens=1, extra_body=fields)
        assert words in caught.value.body["message"]
        assert caught.value.body["param"] == param


@pytest.fixture(scope="module")
def hermes(tiny_llm: AsyncLLM) -> Any:
    """A server of the tiny engine, which parses tool calls."""
    with running(tiny_llm, tool_call_parser="hermes") as server:
        yield server


def calls(server: RunningServer, **options: Any) -> list[tuple[str, Any]]:
    request = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS, "max_tokens": 400, **options}
    choice = server.client().chat.completions.create(**request).choices[0]
    if choice.finish_reason != "length":  # a random model need not stop to call
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    return [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]


def test_required_calls(hermes: RunningServer) -> None:
    found = calls(hermes, tool_choice="required")
    assert found
    for name, arguments in found:
        assert name in ("weather", "time")
        assert arguments == {} if name == "time" else arguments["city"] in ("Köln", "Paris")
    assert len(calls(hermes, tool_choice="required", parallel_tool_calls=False)) == 1
    for name in ("time", "weather"):
        named = calls(hermes, tool_choice={"type": "function", "function": {"name": name}})
        assert [call[0] for call in named] == [name]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "names the function 'f', which tools"),
        ({"tool_choice": {"type": "function"}}, "tool_choice must have the form"),
        ({"tool_choice": "always"}, "tool_choice must be 'none', 'auto', 'required' or"),
        ({"tool_choice": "required", "response_format": FORMAT}, "response_format leaves no place for tool calls"),
        ({"response_format": FORMAT}, "response_format leaves no place for tool calls"),
    ],
)
def test_bad_choices_are_refused(hermes: RunningServer, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        calls(hermes, extra_body=fields)
    assert words in caught.value.body["message"]
