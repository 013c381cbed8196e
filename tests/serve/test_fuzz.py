"""Generated request bodies: every answer is 200 or 4xx and has the right shape, and the server works afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import PATIENCE, RunningServer, running, wait_until

from spmoe import AsyncLLM

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

TOKENS = st.integers(-2, 300)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NUMBERS = st.floats(-3, 3) | st.integers(-3, 300) | st.sampled_from([1e300, -1e300, 5e-324, 2**63, 2**64, 0, 1, None])
SAMPLING = {
    "temperature": NUMBERS,
    "top_p": st.floats(0.01, 1) | NUMBERS,
    "top_k": NUMBERS,
    "min_p": st.floats(0, 1) | NUMBERS,
    "n": st.integers(0, 3),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=2), max_size=4),
    "stop_token_ids": st.lists(TOKENS, max_size=4),
    "seed": NUMBERS,
    "presence_penalty": NUMBERS,
    "frequency_penalty": NUMBERS,
    "repetition_penalty": NUMBERS,
    "min_tokens": st.integers(-1, 4),
    "logit_bias": st.dictionaries(TOKENS.map(str), NUMBERS, max_size=4),
    "ignore_eos": st.booleans(),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}),
    "user": st.text(max_size=5),
    "model": st.sampled_from(["spmoe-pair", "other", ""]),
}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "king"])},
    optional={
        "content": st.text(max_size=10)
        | st.just("hello")
        | st.lists(st.just({"type": "text", "text": "a"}) | ANYTHING, max_size=2),
        "name": st.text(max_size=5) | ANYTHING,
        "tool_calls": st.lists(
            st.just({"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}) | ANYTHING,
            max_size=2,
        ),
        "tool_call_id": st.text(max_size=5),
    },
)
TOOLS = st.lists(st.just({"type": "function", "function": {"name": "f"}}) | ANYTHING, max_size=2)


def bodies(required: dict[str, Any], optional: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Return bodies with few optional fields, some of them unknown or of any value. Few tokens are generated."""
    fields = st.sampled_from(list(optional)).flatmap(lambda name: st.tuples(st.just(name), optional[name]))
    wrong = st.tuples(st.sampled_from(list(optional)) | st.text(max_size=8), ANYTHING)
    fields = st.one_of(fields, fields, fields, wrong)
    given = st.fixed_dictionaries({**required, "max_tokens": st.integers(1, 3)})
    return st.builds(lambda one, more: {**one, **dict(more)}, given, st.lists(fields, max_size=4))


PROMPT = st.text(max_size=20) | st.lists(TOKENS, max_size=8) | st.lists(st.text(max_size=5), max_size=3)
PROMPT |= st.lists(st.lists(TOKENS, max_size=4), max_size=3) | ANYTHING
REQUESTS = {
    "/v1/completions": bodies({"prompt": PROMPT}, {**SAMPLING, "logprobs": st.integers(-1, 22), "echo": st.booleans()}),
    "/v1/chat/completions": bodies(
        {"messages": st.just([{"role": "user", "content": "hi"}]) | st.lists(MESSAGE, max_size=3) | ANYTHING},
        {
            **SAMPLING,
            "logprobs": st.booleans(),
            "top_logprobs": st.integers(-1, 22),
            "tools": TOOLS,
            "tool_choice": st.sampled_from(["none", "auto", "required"]),
            "response_format": st.sampled_from([{"type": "text"}, {"type": "json_object"}]),
            "structured_outputs": st.dictionaries(
                st.sampled_from(["json", "regex", "choice", "grammar", "json_object"]), ANYTHING, max_size=1
            ),
            "chat_template_kwargs": st.dictionaries(st.sampled_from(["style", "messages", "x"]), ANYTHING, max_size=1),
            "reasoning_effort": st.sampled_from(["low", "high"]),
        },
    ),
    "/tokenize": st.fixed_dictionaries(
        {},
        optional={
            "prompt": st.text() | ANYTHING,
            "messages": st.lists(MESSAGE, max_size=2),
            "add_special_tokens": st.booleans(),
            "add_generation_prompt": st.booleans(),
            "return_token_strs": st.booleans(),
        },
    ),
    "/detokenize": st.fixed_dictionaries({"tokens": st.lists(TOKENS) | ANYTHING}),
}


@pytest.fixture(scope="module")
def fuzzed(tiny_llm: AsyncLLM) -> Iterator[RunningServer]:
    """A server of the tiny engine, which parses tool calls."""
    with running(tiny_llm, tool_call_parser="hermes") as server:
        yield server


@pytest.fixture(scope="module")
def http() -> Iterator[Any]:
    """A client that keeps its connection."""
    with httpx.Client(timeout=PATIENCE) as client:
        yield client


def check(answer: Any) -> None:
    """Check status and shape of an answer."""
    assert answer.status_code == 200 or 400 <= answer.status_code < 500, answer.text
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert error["message"]
    elif answer.headers["content-type"].startswith("text/event-stream"):
        *events, done = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert done == "[DONE]"
        assert all("error" not in json.loads(event) for event in events), events[-1]
    else:
        answer.json()


@pytest.mark.parametrize("path", REQUESTS)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_generated_requests(path: str, data: Any, fuzzed: RunningServer, http: Any) -> None:
    body = data.draw(REQUESTS[path])
    check(http.post(f"{fuzzed.url}{path}", content=json.dumps(body), headers={"Content-Type": "application/json"}))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    path=st.sampled_from(list(REQUESTS)),
    body=st.binary(max_size=60) | ANYTHING.map(lambda one: json.dumps(one).encode()),
)
def test_generated_bytes(path: str, body: bytes, fuzzed: RunningServer, http: Any) -> None:
    check(http.post(f"{fuzzed.url}{path}", content=body, headers={"Content-Type": "application/json"}))


def test_server_works_afterwards(fuzzed: RunningServer, http: Any) -> None:
    answer = http.post(f"{fuzzed.url}/v1/completions", json={"prompt": "x", "max_tokens": 3, "ignore_eos": True})
    assert answer.json()["usage"]["completion_tokens"] == 3
    wait_until(fuzzed.idle)
