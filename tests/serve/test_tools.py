"""Tool calls: parsers, text in pieces of any size, and calls through the API."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import running

from spmoe import AsyncLLM, RequestOutput, SamplingParams, StructuredOutputsParams
from spmoe.errors import UsageError

httpx = pytest.importorskip("httpx")
pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
SECOND = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
ARGUMENTS = {"city": "Köln", "days": 2}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "Weather", "parameters": {"type": "object", "properties": {}}},
}


def whole(parser: Any, pieces: list[tuple[str, list[int]]]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Feed a parser with an answer in pieces; return all text, reasoning and calls."""
    text, ids, content, reasoning, calls = "", [], "", "", []
    for number, (piece, tokens) in enumerate(pieces):
        text, ids = text + piece, ids + tokens
        reply = parser.read(text, ids, number == len(pieces) - 1)
        content, reasoning = content + reply.content, reasoning + reply.reasoning
        calls += [(call.name, json.loads(call.arguments)) for call in reply.calls]
    return content, reasoning, calls


def cut(text: str, cuts: list[int]) -> list[tuple[str, list[int]]]:
    """Divide a text at these places."""
    places = [0, *sorted(one % (len(text) + 1) for one in cuts), len(text)]
    return [(text[a:b], []) for a, b in pairwise(places)]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hello\n", "Hello\n", []),
        (CALL, "", [("weather", ARGUMENTS)]),
        (f"Let me see.\n\n{CALL}", "Let me see.", [("weather", ARGUMENTS)]),
        (f"{CALL}\n{SECOND}\n", "", [("weather", ARGUMENTS), ("time", {})]),
        (f"a {CALL} b {SECOND} c\n", "abc\n", [("weather", ARGUMENTS), ("time", {})]),
        ("<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", []),
        ('<tool_call>{"name": 3}</tool_call> x', '<tool_call>{"name": 3}</tool_call> x', []),
        ("<tool_call>{unfinished", "<tool_call>{unfinished", []),
        ("a < b, <tool, <tool_call", "a < b, <tool, <tool_call", []),
        ("  ", "  ", []),
    ],
)
@given(cuts=st.lists(st.integers(0, 200), max_size=30))
def test_hermes(text: str, content: str, calls: list[Any], cuts: list[int]) -> None:
    from spmoe.serve.tools import HermesParser

    assert whole(HermesParser(), cut(text, cuts)) == (content, "", calls)


@given(text=st.text(alphabet="<tool_cal>/{} \n", max_size=60), cuts=st.lists(st.integers(0, 60), max_size=20))
def test_hermes_loses_no_text(text: str, cuts: list[int]) -> None:
    from spmoe.serve.tools import HermesParser

    assert whole(HermesParser(), cut(text, cuts)) == (text, "", [])


SPECIAL = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")


@pytest.fixture(scope="module")
def harmony() -> Any:
    """A tokenizer of bytes with harmony's special tokens."""
    from checkpoints import byte_tokenizer

    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    return tokenizer


ANALYSIS = "<|channel|>analysis<|message|>The user äsks.<|end|>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f"{ANALYSIS}<|start|>assistant<|channel|>final<|message|>Hellö<|return|>",
            ("Hellö", "The user äsks.", []),
        ),
        (
            f"{ANALYSIS}<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
            '{"city": "Köln", "days": 2}<|call|>',
            ("", "The user äsks.", [("weather", ARGUMENTS)]),
        ),
        (
            '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"a": 1}<|call|>',
            ("", "", [("weather", {"a": 1})]),
        ),
        (
            "<|channel|>commentary to=functions.a<|constrain|>json<|message|>{}<|end|><|start|>assistant<|channel|>"
            "commentary to=functions.b<|message|><|call|>",
            ("", "", [("a", {}), ("b", {})]),
        ),
        ("<|channel|>commentary<|message|>First I look.<|end|>", ("First I look.", "", [])),
        ("<|channel|>commentary to=functions.a<|message|>{cut", ("{cut", "", [])),
        ("<|channel|>final<|message|>cut o", ("cut o", "", [])),
        ("plain text", ("plain text", "", [])),
        ("", ("", "", [])),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_gpt_oss(text: str, expected: tuple[str, str, list[Any]], size: int, harmony: Any) -> None:
    from spmoe.serve.tools import HarmonyParser

    ids = harmony(text)["input_ids"]
    pieces = [("", ids[start : start + size]) for start in range(0, len(ids), size)] or [("", [])]
    assert whole(HarmonyParser(harmony), pieces) == expected


def test_gpt_oss_needs_its_tokens() -> None:
    from checkpoints import byte_tokenizer
    from spmoe.serve.tools import HarmonyParser

    for tokenizer in (byte_tokenizer(), None):
        with pytest.raises(UsageError, match=r"gpt-oss needs the token <\|start\|>"):
            HarmonyParser(tokenizer)


class ScriptedLLM(AsyncLLM):
    """An engine whose answers are replaced by a text that comes in pieces."""

    answer = ""

    def generate(self, *arguments: Any, **options: Any) -> AsyncGenerator[RequestOutput, None]:
        return self._scripted(super().generate(*arguments, **options))

    async def _scripted(self, results: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[RequestOutput, None]:
        async with aclosing(results):
            last = [result async for result in results][-1]
        for end in range(0, len(self.answer), 7):
            part = replace(last.outputs[0], text=self.answer[:end], finish_reason="interrupted")
            yield replace(last, outputs=[part], finished=False)
        yield replace(last, outputs=[replace(last.outputs[0], text=self.answer, finish_reason="stop")])


@pytest.fixture
def scripted(tiny_llm: AsyncLLM) -> ScriptedLLM:
    """The tiny engine with scripted answers."""
    return ScriptedLLM(llm=tiny_llm.llm)


def test_calls_through_the_api(scripted: ScriptedLLM) -> None:
    scripted.answer = f"I look.\n{CALL}\n{SECOND}"
    request = {"model": "spmoe-pair", "messages": [{"role": "user", "content": "weather?"}], "max_tokens": 2}
    with running(scripted, tool_call_parser="hermes") as server:
        client = server.client()
        choice = client.chat.completions.create(**request, tools=[TOOL], tool_choice="auto").choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look."
        assert [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls] == [
            ("weather", ARGUMENTS),
            ("time", {}),
        ]
        chunks = list(client.chat.completions.create(**request, tools=[TOOL], stream=True))
        calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
        assert [(call.index, call.function.name) for call in calls] == [(0, "weather"), (1, "time")]
        assert json.loads(calls[0].function.arguments) == ARGUMENTS
        assert len({call.id for call in calls}) == 2
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "I look."
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        # without tools, or with "none", the answer is text
        for options in ({}, {"tools": [TOOL], "tool_choice": "none"}):
            choice = client.chat.completions.create(**request, **options).choices[0]
            assert (choice.message.content, choice.finish_reason) == (scripted.answer, "stop")
            assert choice.message.tool_calls is None


def test_only_the_first_of_parallel_calls_is_kept(scripted: ScriptedLLM) -> None:
    scripted.answer = f"I look.\n{CALL}\n{SECOND}"  # as if min_tokens had kept the engine from stopping
    request = {"model": "spmoe-pair", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    options = {"tools": [TOOL], "parallel_tool_calls": False}
    with running(scripted, tool_call_parser="hermes") as server:
        client = server.client()
        choice = client.chat.completions.create(**request, **options).choices[0]
        assert [call.function.name for call in choice.message.tool_calls] == ["weather"]
        chunks = list(client.chat.completions.create(**request, **options, stream=True))
        calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
        assert [call.function.name for call in calls] == ["weather"]
        assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_generation_stops_after_the_only_call(tiny_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from spmoe.serve.protocol import ChatCompletionRequest

    both_calls = StructuredOutputsParams(grammar=f"start: {json.dumps(CALL + SECOND)}")
    plain = ChatCompletionRequest.sampling_params

    def with_grammar(request: ChatCompletionRequest, *arguments: Any) -> SamplingParams:
        return replace(plain(request, *arguments), structured_outputs=both_calls)

    monkeypatch.setattr(ChatCompletionRequest, "sampling_params", with_grammar)
    messages = [{"role": "user", "content": "x"}]
    with running(tiny_llm, tool_call_parser="hermes") as server:
        client = server.client()
        request = {"model": "spmoe-pair", "messages": messages, "max_tokens": 400, "tools": [TOOL]}
        both = client.chat.completions.create(**request)
        assert [call.function.name for call in both.choices[0].message.tool_calls] == ["weather", "time"]
        one = client.chat.completions.create(**request, parallel_tool_calls=False)
        choice = one.choices[0]
        assert [call.function.name for call in choice.message.tool_calls] == ["weather"]
        assert json.loads(choice.message.tool_calls[0].function.arguments) == ARGUMENTS
        assert (choice.message.content, choice.finish_reason, choice.stop_reason) == (None, "tool_calls", None)
        assert one.usage.completion_tokens == len(CALL.encode())
        chunks = list(client.chat.completions.create(**request, parallel_tool_calls=False, stream=True))
        calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
        assert [call.function.name for call in calls] == ["weather"]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ""


def test_strict_functions_of_the_openai_client(scripted: ScriptedLLM) -> None:
    import openai
    from pydantic import BaseModel

    class Weather(BaseModel):
        """Weather of a city."""

        city: str
        days: int

    tools = [openai.pydantic_function_tool(Weather, name="weather")]
    assert tools[0]["function"]["strict"] is True
    scripted.answer = CALL
    request: Any = {"model": "spmoe-pair", "messages": [{"role": "user", "content": "x"}], "max_tokens": 300}
    with running(scripted, tool_call_parser="hermes") as server:
        for choice in ("auto", "required"):
            answer = server.client().chat.completions.parse(**request, tools=tools, tool_choice=choice)
            (call,) = answer.choices[0].message.tool_calls
            assert call.function.parsed_arguments == Weather(city="Köln", days=2)


def test_tools_and_results_reach_the_template(tiny_llm: AsyncLLM) -> None:
    call: dict[str, Any] = {"id": "1", "type": "function"}
    call["function"] = {"name": "weather", "arguments": '{"city": "Köln"}'}
    messages = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    with running(tiny_llm, tool_call_parser="hermes") as server:
        client = server.client()
        request = {"model": "spmoe-pair", "messages": messages, "max_tokens": 1}
        plain = client.chat.completions.create(**request).usage.prompt_tokens
        with_tools = client.chat.completions.create(**request, tools=[TOOL]).usage.prompt_tokens
        strict = [{"type": "function", "function": {**TOOL["function"], "strict": True}}]
        assert client.chat.completions.create(**request, tools=strict).usage.prompt_tokens == with_tools
        counted = httpx.post(f"{server.url}/tokenize", json={"messages": messages, "tools": strict}).json()
        assert counted["count"] == with_tools
        styled = client.chat.completions.create(**request, extra_body={"chat_template_kwargs": {"style": "brief "}})
        call["function"] = {"name": "weather", "arguments": ""}
        no_arguments = client.chat.completions.create(**request).usage.prompt_tokens
    text = 'user: weather?\nassistant: {"name": "weather", "arguments": {"city": "Köln"}}\ntool: rain\nassistant: '
    assert plain == len(text.encode())
    assert with_tools == plain + len(f"tools: {json.dumps([TOOL])}\n".encode())
    assert no_arguments == plain - len('"city": "Köln"'.encode())
    assert styled.usage.prompt_tokens == plain + len("brief ")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function is missing"),
        ({"tools": [{"type": "search", "function": {"name": "f"}}]}, "tools[0].type must be 'function'"),
        ({"tools": [{**TOOL, "cache": 1}]}, "unknown field tools[0].cache"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}]}
                ]
            },
            "messages: arguments of tool_calls must be a JSON object",
        ),
    ],
)
def test_bad_tools_are_refused(tiny_llm: AsyncLLM, fields: dict[str, Any], words: str) -> None:
    import openai

    with running(tiny_llm, tool_call_parser="hermes") as server:
        request = {"model": "spmoe-pair", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        with pytest.raises(openai.BadRequestError) as caught:
            server.client().chat.completions.create(**request, extra_body=fields)
    assert words in caught.value.body["message"]
    assert caught.value.body["param"] in fields


def test_server_does_not_start_with_a_parser_that_cannot_work(tiny_llm: AsyncLLM) -> None:
    from spmoe.serve.app import make_app
    from spmoe.serve.config import ServeConfig

    with pytest.raises(UsageError, match="tool_call_parser gpt-oss needs the token"):
        make_app(tiny_llm, ServeConfig(tool_call_parser="gpt-oss"))


class ScriptedTokensLLM(AsyncLLM):
    """An engine whose answers are replaced by tokens that come a few at a time."""

    tokens: tuple[int, ...] = ()
    stop_reason: int | None = None

    def generate(self, *arguments: Any, **options: Any) -> AsyncGenerator[RequestOutput, None]:
        return self._scripted(super().generate(*arguments, **options))

    async def _scripted(self, results: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[RequestOutput, None]:
        async with aclosing(results):
            last = [result async for result in results][-1]
        for end in range(1, len(self.tokens), 5):
            part = replace(last.outputs[0], token_ids=list(self.tokens[:end]), finish_reason="interrupted")
            yield replace(last, outputs=[part], finished=False)
        end = replace(last.outputs[0], token_ids=list(self.tokens), finish_reason="stop", stop_reason=self.stop_reason)
        yield replace(last, outputs=[end])


def test_gpt_oss_through_the_api(harmony: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    import openai

    from checkpoints import mixtral, save, seeded

    target = seeded(mixtral, 13, vocab_size=len(harmony))
    path = save(target, tmp_path_factory.mktemp("harmony"), harmony)
    call = "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{}<|call|>"
    request = {"model": "spmoe-pair", "messages": [{"role": "user", "content": "weather?"}], "max_tokens": 1}
    with (
        ScriptedTokensLLM(path, draft="none", progress=False) as llm,
        running(llm, tool_call_parser="gpt-oss") as server,
    ):
        client = server.client()
        llm.tokens = tuple(harmony(f"{ANALYSIS}{call}")["input_ids"])
        choice = client.chat.completions.create(**request).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert (choice.message.content, choice.message.reasoning_content) == (None, "The user äsks.")
        assert [one.function.name for one in choice.message.tool_calls] == ["weather"]
        deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**request, stream=True)]
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "The user äsks."
        assert [one.function.name for delta in deltas for one in delta.tool_calls or []] == ["weather"]
        llm.tokens = tuple(harmony("<|channel|>final<|message|>Hello!")["input_ids"])
        llm.stop_reason = llm.tokens[-1]  # the exclamation mark is a stop token
        choice = client.chat.completions.create(**request).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("Hello", "stop")
        with pytest.raises(openai.BadRequestError, match="stop is not supported with --tool-call-parser gpt-oss"):
            client.chat.completions.create(**request, stop="x")
