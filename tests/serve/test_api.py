"""The API, driven by the official `openai` client: completions, chat, streams, log-probabilities, errors."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from spmoe import AsyncLLM, SamplingParams

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

MODEL = "spmoe-pair"
PROMPT = "def add(a, b):"
MESSAGES = [{"role": "user", "content": "write add"}]
CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


def direct(llm: AsyncLLM, prompt: Any, **params: Any) -> Any:
    """Return the first completion of the engine itself."""
    return llm.llm.generate(prompt, SamplingParams(**params))[0].outputs[0]


def test_completion_is_the_engines_text(client: Any, llm: AsyncLLM) -> None:
    expected = direct(llm, PROMPT, max_tokens=8)
    response = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8)
    assert response.choices[0].text == expected.text
    assert response.choices[0].finish_reason == "length"
    prompt_tokens = len(llm.llm.get_tokenizer()(PROMPT)["input_ids"])
    usage = response.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (prompt_tokens, 8, prompt_tokens + 8)
    assert usage.prompt_tokens_details.cached_tokens >= 0
    assert response.model == MODEL
    statistics = response.spmoe
    assert statistics["hits"] + statistics["late"] + statistics["demand_loads"] > 0
    assert statistics["drafted"] > 0


def test_prompts_of_every_form(client: Any, llm: AsyncLLM) -> None:
    other = "import os"
    ids = [llm.llm.get_tokenizer()(text)["input_ids"] for text in (PROMPT, other)]
    texts = [direct(llm, text, max_tokens=4).text for text in (PROMPT, other)]
    for prompt, expected in [(ids[0], texts[:1]), ([PROMPT, other], texts), (ids, texts), ([PROMPT], texts[:1])]:
        response = client.completions.create(model=MODEL, prompt=prompt, max_tokens=4)
        assert [choice.text for choice in response.choices] == expected
        assert [choice.index for choice in response.choices] == list(range(len(expected)))
        assert response.usage.completion_tokens == 4 * len(expected)


def test_default_number_of_tokens_is_that_of_openai(client: Any) -> None:
    response = client.completions.create(model=MODEL, prompt=PROMPT, extra_body={"ignore_eos": True})
    assert response.usage.completion_tokens == 16


def test_stream_gives_the_same_text(client: Any) -> None:
    request = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "logprobs": 2}
    client.completions.create(**request)  # its KV cache is where the next two start from
    whole = client.completions.create(**request)
    chunks = list(client.completions.create(**request, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert not any(chunk.choices[0].finish_reason for chunk in chunks[:-1])
    assert len(chunks) > 1
    assert chunks[-1].spmoe["hits"] > 0
    assert not any(hasattr(chunk, "spmoe") for chunk in chunks[:-1])
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs is not None]
    expected = whole.choices[0].logprobs
    assert [token for part in parts for token in part.tokens] == expected.tokens
    assert [offset for part in parts for offset in part.text_offset] == expected.text_offset
    values = [value for part in parts for value in part.token_logprobs]
    assert values == expected.token_logprobs


def test_stream_with_usage(client: Any) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    for chunks in (
        list(client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4, **options)),
        list(client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4, **options)),
    ):
        *others, last = chunks
        assert last.choices == []
        assert last.usage.completion_tokens == 4
        assert last.spmoe["steps"] > 0
        assert all(chunk.usage is None for chunk in others)
        assert sum(bool(chunk.choices[0].finish_reason) for chunk in others) == 1


def test_stream_with_usage_in_each_chunk(client: Any) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    for chunks in (
        list(client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6, **options)),
        list(client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=6, **options)),
    ):
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[0] < counts[-1] == 6
        assert len({chunk.usage.prompt_tokens for chunk in chunks}) == 1
    with pytest.raises(openai.BadRequestError, match="continuous_usage_stats needs include_usage"):
        client.completions.create(
            model=MODEL, prompt=PROMPT, stream=True, extra_body={"stream_options": {"continuous_usage_stats": True}}
        )


def test_chat_is_the_engines_answer(client: Any, llm: AsyncLLM) -> None:
    expected = llm.llm.chat(MESSAGES, SamplingParams(max_tokens=8))[0]
    response = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=8)
    choice = response.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert choice.finish_reason == "length"
    assert response.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert response.spmoe["hits"] > 0


def test_content_in_parts_is_joined(client: Any) -> None:
    parts = [{"type": "text", "text": "write"}, {"type": "text", "text": "add"}]
    texts = {
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": content}], max_tokens=4
        ).usage.prompt_tokens
        for content in (parts, "write\nadd")
    }
    assert len(texts) == 1


def test_chat_stream_gives_the_same_text(client: Any) -> None:
    request = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8}
    whole = client.chat.completions.create(**request).choices[0].message.content
    chunks = list(client.chat.completions.create(**request, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == whole
    assert [delta.role for delta in deltas if delta.role] == ["assistant"]
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].spmoe["steps"] > 0


def test_several_completions(client: Any, llm: AsyncLLM) -> None:
    sampling = {"max_tokens": 6, "temperature": 1.5, "seed": 5}
    expected = [output.text for output in llm.llm.generate(PROMPT, SamplingParams(n=3, **sampling))[0].outputs]
    response = client.completions.create(model=MODEL, prompt=PROMPT, n=3, **sampling)
    assert [choice.text for choice in response.choices] == expected
    assert len(set(expected)) > 1
    texts = ["", "", ""]
    for chunk in client.completions.create(model=MODEL, prompt=PROMPT, n=3, stream=True, **sampling):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected
    prompt_tokens = len(llm.llm.get_tokenizer()(PROMPT)["input_ids"])
    assert response.usage.prompt_tokens == prompt_tokens
    assert response.usage.completion_tokens == 18


def test_logprobs_of_completions(client: Any, llm: AsyncLLM) -> None:
    expected = direct(llm, PROMPT, max_tokens=4, logprobs=3)
    found = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4, logprobs=3).choices[0].logprobs
    chosen = [next(iter(position.values())) for position in expected.logprobs]
    assert found.tokens == [one.decoded_token for one in chosen]
    assert found.token_logprobs == pytest.approx([one.logprob for one in chosen], abs=1e-4)
    assert all(len(top) >= 3 for top in found.top_logprobs)
    assert "".join(found.tokens) == expected.text
    lengths = [len(token) for token in found.tokens]
    assert found.text_offset == [sum(lengths[:i]) for i in range(4)]


def test_logprobs_of_chat(client: Any) -> None:
    request = {"model": MODEL, "messages": MESSAGES, "max_tokens": 4, "logprobs": True, "top_logprobs": 2}
    choice = client.chat.completions.create(**request).choices[0]
    content = choice.logprobs.content
    assert "".join(one.token for one in content) == choice.message.content
    for one in content:
        assert [top.logprob for top in one.top_logprobs] == sorted((t.logprob for t in one.top_logprobs), reverse=True)
        assert one.top_logprobs[0].token == one.token  # greedy
        assert bytes(one.bytes).decode() == one.token
    streamed = [
        one.token
        for chunk in client.chat.completions.create(**request, stream=True)
        if chunk.choices[0].logprobs
        for one in chunk.choices[0].logprobs.content
    ]
    assert streamed == [one.token for one in content]


def test_logprobs_of_tokens_that_are_part_of_a_character(client: Any) -> None:
    text = "a漢é😀b"
    options = {"model": MODEL, "max_tokens": 20, "extra_body": {"structured_outputs": {"choice": [text]}}}
    request = {**options, "prompt": PROMPT, "logprobs": 20}
    choice = client.completions.create(**request).choices[0]
    assert choice.text == text
    found = choice.logprobs
    names = [name for name in found.tokens if name.startswith("bytes:")]
    assert names[:3] == [r"bytes:\xe6", r"bytes:\xbc", r"bytes:\xa2"]
    assert len(names) == 9
    assert found.text_offset[:11] == [0, 1, 1, 1, 2, 2, 3, 3, 3, 3, 4]
    assert all(len(top) >= 20 for top in found.top_logprobs)  # distinct keys
    assert not any("\N{REPLACEMENT CHARACTER}" in name for top in found.top_logprobs for name in top)
    chunks = list(client.completions.create(**request, stream=True))
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs is not None]
    assert [offset for part in parts for offset in part.text_offset] == found.text_offset
    choice = client.chat.completions.create(**options, messages=MESSAGES, logprobs=True, top_logprobs=5).choices[0]
    content = choice.logprobs.content
    assert bytes(byte for one in content for byte in one.bytes).decode().startswith(text)
    assert {tuple(one.bytes) for one in content} >= {(0xE6,), (0xBC,), (0xA2,)}


@pytest.mark.parametrize(
    ("symbols", "text", "expected"),
    [
        ("<0xE6>", "\ufffd", b"\xe6"),
        ("\u0120\u00e6", " \ufffd", b" \xe6"),
        ("\u0143", "\ufffd", b"\xad"),
        (b"\xf0\x9f", "\ufffd", b"\xf0\x9f"),
        ("\u6f22", "\ufffd", "\ufffd".encode()),
        ("\u0120a", " a", b" a"),
    ],
)
def test_bytes_of_tokens(symbols: Any, text: str, expected: bytes) -> None:
    from spmoe.serve.completions import token_bytes

    class Tokenizer:
        def convert_ids_to_tokens(self, token: int) -> Any:
            return symbols

    assert token_bytes(Tokenizer(), 0, text) == expected


def test_stop_strings(client: Any, llm: AsyncLLM) -> None:
    text = direct(llm, PROMPT, max_tokens=12).text
    stop = text[len(text) // 2 :][:3]
    response = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, stop=[stop, "\0"])
    assert response.choices[0].text == text[: text.index(stop)]
    assert response.choices[0].finish_reason == "stop"
    assert response.choices[0].stop_reason == stop
    chunks = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == text[: text.index(stop)]


def test_sampling_fields_reach_the_engine(client: Any, llm: AsyncLLM) -> None:
    tokenizer = llm.llm.get_tokenizer()
    token = tokenizer("return")["input_ids"][0]
    response = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=3, logit_bias={str(token): 100})
    assert response.choices[0].text == tokenizer.decode([token] * 3)
    fields = {"top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.5, "temperature": 0.8, "seed": 3}
    extra = {"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True}
    expected = direct(llm, PROMPT, max_tokens=6, **fields, **extra).text
    response = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6, **fields, extra_body=extra)
    assert response.choices[0].text == expected


def test_requests_at_once_give_the_text_of_each_alone(client: Any) -> None:
    prompts = [PROMPT, "import os", "class A:", "for i in", "x = 1", "def main", "return", "while True:"]

    def complete(prompt: str) -> str:
        seeded = {"temperature": 0.9, "seed": len(prompt)} if len(prompt) % 2 else {}
        text: str = client.completions.create(model=MODEL, prompt=prompt, max_tokens=8, **seeded).choices[0].text
        return text

    alone = [complete(prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(complete, prompts)) == alone


# ---- errors


@pytest.mark.parametrize(
    ("fields", "words", "param"),
    [
        ({"prompt": ""}, "the prompt is empty", None),
        ({"prompt": []}, "empty list", "prompt"),
        ({"prompt": [[]]}, "the prompt is empty", None),
        ({"prompt": [1, "a"]}, "prompt must be text, a list of texts, a list of token ids, or a list of", "prompt"),
        ({"prompt": ["a", 1]}, "prompt must be text, a list of texts, a list of token ids, or a list of", "prompt"),
        ({"prompt": {"a": 1}}, "prompt must be", "prompt"),
        ({"prompt": ["a"] * 8193}, "prompt must have at most 8192 texts or lists of token ids, not 8193", "prompt"),
        ({"prompt": [[1]] * 8193}, "prompt must have at most 8192 texts or lists of token ids, not 8193", "prompt"),
        ({"prompt": [10**9]}, "vocabulary", None),
        ({"prompt": "a " * 5000}, "This model's maximum context length is 4096 tokens, but", "prompt"),
        ({"prompt": "a " * 2_000_000}, "maximum context length is at most 262144 characters", "prompt"),
        ({"temperature": "hot"}, "temperature must be a number, not 'hot'", "temperature"),
        ({"temperature": -1}, "temperature must be 0 or more", "temperature"),
        ({"max_tokens": 0}, "max_tokens must be at least 1", "max_tokens"),
        ({"max_tokens": "3"}, "max_tokens must be a whole number", "max_tokens"),
        ({"n": 2}, "n must be 1 with temperature 0", "n"),
        ({"n": 1000, "temperature": 1}, "n must be at most 128", "n"),
        ({"logprobs": 21}, "logprobs must be a whole number from 0 to 20", "logprobs"),
        ({"logprobs": True}, "logprobs must be", "logprobs"),
        ({"stop": ["a"] * 17}, "stop must have at most 16", "stop"),
        ({"stop": "a" * 2000}, "at most 1024 characters", "stop"),
        ({"stop": 3}, "stop must be text", "stop"),
        ({"stop": ""}, "stop must not contain an empty string", "stop"),
        ({"stream": "yes"}, "stream must be a valid boolean", "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options is for streams", "stream_options"),
        ({"stream": True, "stream_options": {"usage": True}}, "unknown field stream_options.usage", "stream_options"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "outside the model's vocabulary", "logit_bias"),
        ({"temprature": 1}, "unknown field 'temprature'; did you mean temperature?", "temprature"),
        ({"guided_json": {}}, "unknown field 'guided_json'", "guided_json"),
        ({"echo": True}, "echo is not supported", "echo"),
        ({"best_of": 3}, "best_of is not supported; use n", "best_of"),
        ({"suffix": "x"}, "suffix is not supported", "suffix"),
    ],
)
def test_bad_completions_are_refused(client: Any, fields: dict[str, Any], words: str, param: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{"model": MODEL, "prompt": PROMPT, "max_tokens": 1}, extra_body=fields)
    body = caught.value.body
    assert words in body["message"]
    assert (body["type"], body["param"]) == ("invalid_request_error", param)
    assert len(body["message"]) <= 500


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "messages is empty; give at least one"),
        ({"messages": [{"role": "user", "content": "a " * 2_000_000}]}, "maximum context length is at most"),
        ({"messages": [{"role": "user", "content": ""}] * 8193}, "at most 8192 messages and tool calls, not 8193"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 1025}, "at most 1024 functions, not 1025"),
        ({"messages": [{"role": "assistant", "tool_calls": CALLS}]}, "messages have tool_calls, which"),
        ({"messages": [{"role": "tool", "content": "42"}]}, "messages have the role tool, which"),
        ({"messages": "hello"}, "messages must be a valid list"),
        ({"messages": [{"content": "x"}]}, "messages[0].role is missing"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role must be"),
        ({"messages": [{"role": "user"}]}, "content of a message with the role user is missing"),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "unknown field messages[0].mood"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'image_url' are not supported"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages: content must be text"),
        ({"max_completion_tokens": 2}, "give one of them"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
        ({"logprobs": 2}, "logprobs must be a valid boolean"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs must be"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "--tool-call-parser"),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"tool_choice": "auto"}, "tool_choice needs tools"),
        ({"functions": [{"name": "f"}]}, "functions is not supported; use tools"),
        ({"reasoning_effort": "high"}, "reasoning_effort has no effect"),
        ({"chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs.thinking has no effect"),
        ({"chat_template_kwargs": {"messages": []}}, "must not have messages"),
        ({"metadata": {"a": "b"}}, "metadata is not supported"),
        ({"modalities": ["audio"]}, "modalities is not supported"),
        ({"prompt": "x"}, "unknown field 'prompt'"),
    ],
)
def test_bad_chats_are_refused(client: Any, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, "max_tokens": 1}, extra_body=fields)
    assert words in caught.value.body["message"]
    if "messages" in fields:
        assert caught.value.body["param"] == "messages"


def test_prompts_that_are_too_long_have_a_code(client: Any) -> None:
    for create, field, prompt in (
        (client.completions.create, "prompt", [5] * 4096),
        (client.completions.create, "prompt", "a " * 2_000_000),
        (client.chat.completions.create, "messages", [{"role": "user", "content": "a " * 5000}]),
        (client.chat.completions.create, "messages", [{"role": "user", "content": "a " * 2_000_000}]),
    ):
        with pytest.raises(openai.BadRequestError, match="maximum context length is") as caught:
            create(model=MODEL, **{field: prompt})
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", field)


def test_values_without_effect_are_accepted(client: Any) -> None:
    neutral = {
        "service_tier": "auto",
        "store": False,
        "modalities": ["text"],
        "response_format": {"type": "text"},
        "user": "me",
        "seed": None,
        "tools": None,
        "parallel_tool_calls": True,
    }
    response = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1, extra_body=neutral)
    assert response.usage.completion_tokens == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"safety_identifier": "hash"},
        {"max_completion_tokens": 1},
        {"top_logprobs": 0},
        {"logprobs": False, "top_logprobs": 0},
        {"stream_options": {"include_obfuscation": False}, "stream": True},
        {"skip_special_tokens": True, "spaces_between_special_tokens": True, "include_stop_str_in_output": False},
        {"add_generation_prompt": True, "continue_final_message": False, "use_beam_search": False},
        {"length_penalty": 1.0, "priority": 0, "cache_prompt": True, "return_token_ids": False},
    ],
)
def test_defaults_of_other_servers_are_accepted(fields: dict[str, Any], client: Any) -> None:
    """Clients of OpenAI's API, vLLM and llama-server send them without being asked."""
    plain = {"model": MODEL, "messages": MESSAGES, "max_tokens": 1}
    expected = client.chat.completions.create(**plain).choices[0].message.content
    answer = client.chat.completions.create(**plain, extra_body=fields, stream=fields.get("stream", False))
    if "stream" in fields:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in answer) == expected
    else:
        assert answer.choices[0].message.content == expected
        assert answer.choices[0].logprobs is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"skip_special_tokens": False}, "skip_special_tokens is not supported"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output is not supported"),
        ({"continue_final_message": True}, "continue_final_message is not supported"),
        ({"add_generation_prompt": False}, "add_generation_prompt is not supported"),
        ({"use_beam_search": True}, "use_beam_search is not supported"),
        ({"stream_options": {"include_obfuscation": True}, "stream": True}, "include_obfuscation must be False"),
    ],
)
def test_other_values_are_refused(fields: dict[str, Any], words: str, client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1, extra_body=fields)
    assert words in caught.value.body["message"]


def test_wrong_model_name_is_not_found(client: Any) -> None:
    for create in (
        lambda: client.completions.create(model="gpt-9", prompt=PROMPT),
        lambda: client.chat.completions.create(model="gpt-9", messages=MESSAGES),
        lambda: client.models.retrieve("gpt-9"),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            create()
        assert caught.value.body["code"] == "model_not_found"
        assert MODEL in caught.value.body["message"]


def test_models(client: Any) -> None:
    (found,) = client.models.list().data
    assert (found.id, found.object, found.max_model_len) == (MODEL, "model", 4096)
    assert client.models.retrieve(MODEL).id == MODEL
