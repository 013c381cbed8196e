"""Behaviour of the server: access, limits, clients that leave, failures, the end, metrics."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from typing import Any

import pytest
from serving import PATIENCE, RunningServer, running, wait_until

from spmoe import AsyncLLM, RequestOutput
from spmoe.engine.async_llm import _Inbox
from spmoe.errors import TransferError

httpx = pytest.importorskip("httpx")
pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

ENDLESS = {"prompt": "x = 1", "max_tokens": 4000, "ignore_eos": True}
SHORT = {"prompt": "x = 1", "max_tokens": 2}
PREFIX = "def count(words):\n" * 8  # long enough for a KV cache to be used again


def post(server: RunningServer, body: Any, path: str = "/v1/completions", **options: Any) -> Any:
    """Send a request."""
    return httpx.post(f"{server.url}{path}", json=body, timeout=PATIENCE, **options)


def metrics(server: RunningServer) -> dict[str, float]:
    """Return all samples by name with labels."""
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


class ChangedLLM(AsyncLLM):
    """An engine whose requests subclasses change."""

    def __init__(self, llm: AsyncLLM) -> None:
        super().__init__(llm=llm.llm)

    def generate(self, *arguments: Any, **options: Any) -> AsyncGenerator[RequestOutput, None]:
        return self.changed(super().generate(*arguments, **options))

    async def changed(self, results: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[RequestOutput, None]:
        async with aclosing(results):
            async for result in results:
                yield result


# ---- access


def test_api_keys(llm: AsyncLLM) -> None:
    import openai

    with running(llm, api_keys=("first", "second")) as server:
        for key in ("first", "second"):
            assert server.client(key).models.list().data
        for key in ("third", "firs", "FIRST", "none"):
            with pytest.raises(openai.AuthenticationError) as caught:
                server.client(key).completions.create(model="spmoe-pair", prompt="x")
            assert caught.value.body["code"] == "invalid_api_key"
        for headers in ({}, {"Authorization": "first"}, {"Authorization": "Basic first"}, {"Authorization": ""}):
            assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 401
        for path in ("/health", "/version", "/metrics"):
            assert httpx.get(f"{server.url}{path}").status_code == 200
        for path in ("/tokenize", "/detokenize", "/nothing"):
            assert post(server, {}, path).status_code == 401


def test_cors_is_off_unless_asked_for(llm: AsyncLLM, server: RunningServer) -> None:
    preflight = {"Origin": "http://page.example", "Access-Control-Request-Method": "POST"}
    answer = httpx.options(f"{server.url}/v1/completions", headers=preflight)
    assert answer.status_code == 405
    assert "access-control-allow-origin" not in answer.headers
    with running(llm, allowed_origins=("http://page.example",), api_keys=("key",)) as other:
        answer = httpx.options(f"{other.url}/v1/completions", headers=preflight)
        assert answer.headers["access-control-allow-origin"] == "http://page.example"
        foreign = {**preflight, "Origin": "http://other.example"}
        answer = httpx.options(f"{other.url}/v1/completions", headers=foreign)
        assert "access-control-allow-origin" not in answer.headers


# ---- wrong requests


def test_errors_of_http_have_openais_shape(server: RunningServer) -> None:
    for method, path, status in [("GET", "/nothing", 404), ("GET", "/v1/completions", 405), ("POST", "/health", 405)]:
        answer = httpx.request(method, f"{server.url}{path}")
        assert answer.status_code == status
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b'{"prompt": NaN}', b"[" * 10_000, b'{"prompt": "\\ud800"}'],
)
def test_bodies_that_are_no_requests(body: bytes, server: RunningServer) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        answer = httpx.post(f"{server.url}{path}", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_other_content_types_are_refused(server: RunningServer) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        answer = httpx.post(f"{server.url}/v1/completions", content=b"{}", headers={"Content-Type": kind})
        assert answer.status_code == 415


def test_large_bodies_are_refused(llm: AsyncLLM) -> None:
    with running(llm, max_body_size=1000) as server:
        assert post(server, SHORT).status_code == 200
        answer = post(server, {"prompt": "x" * 1000})
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "body_too_large"
        pieces = (b"x" * 600 for _ in range(3))  # of no declared length
        headers = {"Content-Type": "application/json"}
        assert httpx.post(f"{server.url}/v1/completions", content=pieces, headers=headers).status_code == 413


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
def test_offers_of_other_protocols_are_ignored(server: RunningServer, protocol: str) -> None:
    """Java's client offers HTTP/2 with its first request."""
    headers = {
        "Connection": "Upgrade, HTTP2-Settings",
        "Upgrade": protocol,
        "HTTP2-Settings": "AAMAAABkAAQAoAAAAAIAAAAA",
    }
    answer = httpx.post(f"{server.url}/v1/completions", json=SHORT, headers=headers, timeout=PATIENCE)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == SHORT["max_tokens"]


def test_slow_bodies_are_refused(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from spmoe.serve import http

    monkeypatch.setattr(http, "_BODY_SECONDS", 0.1)
    go_on = threading.Event()

    def pieces() -> Iterator[bytes]:
        yield b"{"
        go_on.wait(1.0)  # longer than the limit
        yield b"}"

    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{server.url}/v1/completions", content=pieces(), headers=headers, timeout=PATIENCE)
    assert answer.status_code == 408


@contextmanager
def half_request(server: RunningServer, data: bytes) -> Iterator[socket.socket]:
    """Send part of a request."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
        connection.sendall(data)
        yield connection


HALF_BODY = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{"
)


def everything(connection: socket.socket) -> bytes:
    """Return all that the server sends until it closes the connection."""
    return b"".join(iter(lambda: connection.recv(2**16), b""))


def test_idle_connections_stay_open(server: RunningServer) -> None:
    """Clients keep connections for 5 s and more; a request must not meet one that is just being closed."""
    with httpx.Client(timeout=PATIENCE, limits=httpx.Limits(keepalive_expiry=PATIENCE)) as client:
        streams = []
        for pause in (6, 0):
            with client.stream("GET", f"{server.url}/version") as answer:
                streams.append(answer.extensions["network_stream"])
                answer.read()
            time.sleep(pause)
    assert streams[0] is streams[1]


@pytest.mark.parametrize(
    "data",
    [
        b"hello\r\n\r\n",
        b"GET /version HTTP/1.1\r\n\r\n",  # no Host
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: -1\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\nz\r\n",
    ],
)
def test_what_is_not_http_is_refused(data: bytes, server: RunningServer) -> None:
    with half_request(server, data) as connection:
        head, _, body = everything(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in head.lower()
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_wrong_body_after_the_answer_closes_the_connection(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n"
    with half_request(server, head) as connection:
        answer = connection.recv(2**16)
        while not answer.endswith(b"}}"):  # comes before the body
            answer += connection.recv(2**16)
        assert answer.startswith(b"HTTP/1.1 415 ")
        connection.sendall(b"z\r\n")
        assert everything(connection) == b""
    assert not [record for record in caplog.records if record.exc_info]


def test_connections_without_a_request_are_closed(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from spmoe.serve import server as serve_server

    monkeypatch.setattr(serve_server, "_HEADER_SECONDS", 0.3)
    held, request = HeldLLM(llm), b"GET /version HTTP/1.1\r\nHost: x\r\n"
    with running(held) as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, server, SHORT)  # a request under way may take longer
        for data in (b"", request, request + b"\r\n" + request):
            with half_request(server, data) as connection:
                assert everything(connection).count(b"200 OK") == data.count(b"\r\n\r\n")
        held.held = False
        assert answer.result().status_code == 200


# ---- load


class HeldLLM(ChangedLLM):
    """Requests wait until `held` is false."""

    held = True

    async def changed(self, results: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[RequestOutput, None]:
        while self.held:
            await asyncio.sleep(0.01)
        async with aclosing(results):
            async for result in results:
                yield result


def test_full_queue_answers_429(llm: AsyncLLM) -> None:
    held = HeldLLM(llm)
    with running(held, max_queued_requests=3) as server, ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(post, server, {**SHORT, "n": n, "temperature": 1}) for n in (1, 2)]
        wait_until(lambda: server.service.waiting == 3)
        assert metrics(server)['vllm:num_requests_waiting{model_name="spmoe-pair"}'] == 3
        answer = post(server, SHORT)
        assert answer.status_code == 429
        assert int(answer.headers["Retry-After"]) >= 1
        assert answer.json()["error"]["code"] == "queue_full"
        assert post(server, {**SHORT, "prompt": ["x"] * 4}).status_code in (400, 429)
        held.held = False
        assert [one.result().status_code for one in waiting] == [200, 200]
        assert post(server, {**SHORT, "prompt": ["x"] * 4}).status_code == 400  # never fits
        assert post(server, SHORT).status_code == 200
        assert server.idle()


def test_stream_ends_when_its_client_leaves(server: RunningServer) -> None:
    before = metrics(server).get('vllm:request_success_total{finished_reason="abort",model_name="spmoe-pair"}', 0.0)
    for body in (ENDLESS, {**ENDLESS, "n": 2, "temperature": 1}):
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json={**body, "stream": True}, timeout=PATIENCE) as stream:
            lines = stream.iter_lines()  # dropping it closes the connection
            assert next(lines).startswith("data: ")
            assert server.llm.load.running > 0
        wait_until(server.idle)
    after = metrics(server)['vllm:request_success_total{finished_reason="abort",model_name="spmoe-pair"}']
    assert after - before == 3


def test_request_ends_when_its_client_leaves(server: RunningServer) -> None:
    for body in (ENDLESS, {**ENDLESS, "prompt": ["x", "y"]}):
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            content = httpx.Request("POST", server.url, json=body).content
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            wait_until(lambda: server.llm.load.running > 0)
        wait_until(server.idle)


def test_request_that_waits_ends_when_its_client_leaves(llm: AsyncLLM) -> None:
    with running(HeldLLM(llm)) as server:
        for stream in (False, True):
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{server.url}/v1/completions", json={**SHORT, "stream": stream}, timeout=0.5)
            wait_until(lambda: server.service._accepted == 0)


def test_slow_readers_get_only_the_newest_result() -> None:
    async def read() -> dict[int, Any]:
        inbox = _Inbox(2)
        for number in range(100):
            inbox.take(number % 2, "item", number)
        return await inbox.receive()

    assert asyncio.run(read()) == {0: 98, 1: 99}


# ---- failures


class FailingLLM(ChangedLLM):
    """Requests fail after some results."""

    error: Exception | None = None
    after = 0

    async def changed(self, results: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[RequestOutput, None]:
        number = 0
        async with aclosing(results):
            async for result in results:
                if self.error is not None and number == self.after:
                    raise self.error
                number += 1
                yield result


@pytest.mark.parametrize("error", [TransferError("the disk failed"), RuntimeError("boom"), KeyError("x")])
def test_engine_error_fails_its_request_only(llm: AsyncLLM, error: Exception) -> None:
    failing = FailingLLM(llm)
    with running(failing) as server:
        failing.error = error
        for body in (SHORT, {**SHORT, "stream": True}, {**SHORT, "n": 2, "temperature": 1}):
            answer = post(server, body)
            assert answer.status_code == 500
            assert answer.json()["error"]["type"] == "server_error"
            assert "Traceback" not in answer.text
        failing.after = 1
        answer = post(server, {**SHORT, "max_tokens": 8, "stream": True})
        assert answer.status_code == 200
        *_, last, done = [line for line in answer.text.splitlines() if line]
        assert '"type":"server_error"' in last
        assert done == "data: [DONE]"
        failing.error = None
        assert post(server, SHORT).status_code == 200
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert server.idle()


def test_notices_of_requests_are_logged_once(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("on Wednesdays")

    engine = llm.llm.engine
    monkeypatch.setattr(engine, "notices", ["known before the start"])
    monkeypatch.setattr(engine.parts.drafter, "propose", fail)
    with running(llm) as server:
        for _ in range(2):
            assert post(server, {**SHORT, "max_tokens": 8}).status_code == 200
    (message,) = [record.getMessage() for record in caplog.records if record.name.startswith("spmoe.serve")]
    assert message == "note: the draft failed (on Wednesdays); a request goes on without drafts"


def test_bug_inside_a_stream_is_an_event(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from spmoe.serve.service import Submission

    monkeypatch.setattr(Submission, "usage", lambda self: 1 / 0)
    answer = post(server, {**SHORT, "stream": True, "stream_options": {"include_usage": True}})
    assert "internal error (ZeroDivisionError)" in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")
    answer = post(server, SHORT)
    assert answer.status_code == 500
    assert "ZeroDivisionError" in answer.json()["error"]["message"]
    assert "Traceback" not in answer.text


def test_client_sees_an_error_inside_a_stream(llm: AsyncLLM) -> None:
    import openai

    failing = FailingLLM(llm)
    failing.error, failing.after = TransferError("the disk failed"), 1
    with running(failing) as server:
        stream = server.client().completions.create(model="spmoe-pair", prompt="x", max_tokens=8, stream=True)
        with pytest.raises(openai.APIError, match="the disk failed"):
            list(stream)


def test_health_says_that_the_engine_cannot_work(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(llm) as server:
        assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
        monkeypatch.setattr(llm.llm.engine, "failure", RuntimeError("device lost"))
        for answer in (httpx.get(f"{server.url}/health"), post(server, SHORT)):
            assert answer.status_code == 503
            assert "device lost" in answer.json()["error"]["message"]
        monkeypatch.undo()
        assert post(server, SHORT).status_code == 200


def test_closed_engine_is_unhealthy(mixtral_pair: Any) -> None:
    closed = AsyncLLM(mixtral_pair.target, draft="none", progress=False)
    with running(closed) as server:
        assert post(server, SHORT).status_code == 200
        closed.close()
        assert httpx.get(f"{server.url}/health").status_code == 503
        assert post(server, SHORT).status_code == 503
        assert httpx.get(f"{server.url}/metrics").status_code == 200


# ---- the end


def test_requests_under_way_are_finished(llm: AsyncLLM) -> None:
    held = HeldLLM(llm)
    with running(held, shutdown_timeout=PATIENCE) as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, server, SHORT)
        wait_until(lambda: server.service.waiting == 1)
        server.begin_to_stop()
        wait_until(lambda: server.service.draining.is_set())
        held.held = False
        assert answer.result().status_code == 200
        server.join()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")


def test_requests_end_after_the_shutdown_timeout(llm: AsyncLLM) -> None:
    with running(llm, shutdown_timeout=0.0) as server, ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(post, server, {**ENDLESS, "stream": stream}) for stream in (False, True)]
        wait_until(lambda: llm.load.running == 2)
        server.begin_to_stop()
        whole, stream = (answer.result() for answer in answers)
        assert whole.status_code == 503
        assert "shutting down" in whole.json()["error"]["message"]
        assert "shutting down" in stream.text
        server.join()
        assert tuple(llm.load) == (0, 0)


def test_requests_that_are_not_complete_do_not_delay_the_end(llm: AsyncLLM, caplog: pytest.LogCaptureFixture) -> None:
    with running(llm, shutdown_timeout=PATIENCE) as server, half_request(server, HALF_BODY) as body:
        with half_request(server, HALF_BODY[:20]) as header:
            wait_until(lambda: len(server._server.server_state.connections) == 2)
            wait_until(lambda: len(server._server.server_state.tasks) == 1)
            server.begin_to_stop()
            answer = everything(body)
            assert everything(header) == b""
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b'"message":"the server is shutting down' in answer
        server.join()
    assert not caplog.records


# ---- information


def test_tokenize_and_detokenize(server: RunningServer, llm: AsyncLLM) -> None:
    tokenizer = llm.llm.get_tokenizer()
    text = "def add(a, b): # ä"
    ids = tokenizer(text)["input_ids"]
    answer = post(server, {"prompt": text, "return_token_strs": True}, "/tokenize").json()
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, len(ids), 4096)
    assert answer["token_strs"] == tokenizer.convert_ids_to_tokens(ids)
    assert post(server, {"tokens": ids}, "/detokenize").json() == {"prompt": text}
    chat = post(server, {"messages": [{"role": "user", "content": "hi"}]}, "/tokenize").json()
    assert chat["tokens"] == tokenizer("# user: hi\n")["input_ids"]
    chat = post(server, {"messages": [{"role": "developer", "content": "hi"}]}, "/tokenize").json()
    assert chat["tokens"] == tokenizer("# system: hi\n")["input_ids"]  # the template does not name `developer`
    for path, body in [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("/tokenize", {"prompt": "x", "messages": []}),
        ("/tokenize", {"prompt": "x", "what": 1}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [10**9]}),
        ("/detokenize", {"tokens": "x"}),
    ]:
        assert post(server, body, path).status_code == 400


def test_tokenize_adds_special_tokens_to_messages_if_asked(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spmoe.serve import service

    seen: list[Any] = []
    plain = service.encode
    monkeypatch.setattr(service, "encode", lambda *given, **options: seen.append(options) or plain(*given, **options))
    messages = [{"role": "user", "content": "hi"}]
    for fields in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
        assert post(server, {"messages": messages, **fields}, "/tokenize").status_code == 200
    assert [one["add_special_tokens"] for one in seen] == [False, True, False]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (
            "{{ raise_exception('no system role') }}",
            "the model's chat template rejects these messages (no system role)",
        ),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "chat template is refused"),
        ("{{ 'x' * 999999 }}", "maximum context length"),
        ("", "messages need a chat template, which the model lacks"),
    ],
)
def test_errors_of_templates_show_neither_paths_nor_commands(
    template: str, words: str, tiny_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spmoe.serve import service

    monkeypatch.setattr(tiny_llm.llm.get_tokenizer(), "chat_template", template)
    monkeypatch.setattr("spmoe.models.template_limits.MAX_SECONDS", 1.0)
    monkeypatch.setattr(service, "encode", lambda *given, **options: pytest.fail("the text is encoded"))
    with running(tiny_llm) as server:
        answer = post(server, {"messages": [{"role": "user", "content": "x"}]}, "/v1/chat/completions")
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert words in error["message"]
    assert error["param"] == "messages"
    assert not any(word in error["message"] for word in (str(tiny_llm.llm.engine.config.model), "spmoe run", "--"))


def test_metrics_count_requests(llm: AsyncLLM) -> None:
    with running(llm) as server:
        post(server, {"prompt": PREFIX, "max_tokens": 1})
        before = metrics(server)
        usage = post(server, {"prompt": PREFIX, "max_tokens": 5, "ignore_eos": True}).json()["usage"]
        after = metrics(server)
    model = '{model_name="spmoe-pair"}'

    def difference(name: str) -> float:
        return after[f"{name}{model}"] - before.get(f"{name}{model}", 0.0)

    assert difference("vllm:prompt_tokens_total") == usage["prompt_tokens"]
    assert difference("vllm:generation_tokens_total") == usage["completion_tokens"] == 5
    assert difference("vllm:time_to_first_token_seconds_count") == 1
    assert 0 < difference("vllm:inter_token_latency_seconds_count") <= 4
    assert difference("vllm:request_time_per_output_token_seconds_count") == 1
    per_token = difference("vllm:request_time_per_output_token_seconds_sum")
    assert 0 < per_token <= difference("vllm:e2e_request_latency_seconds_sum")
    assert not any("vllm:time_per_output_token" in name for name in after)
    assert difference("vllm:prefix_cache_queries_total") == usage["prompt_tokens"]
    assert 0 < difference("vllm:prefix_cache_hits_total") == usage["prompt_tokens_details"]["cached_tokens"]
    drafts = difference("vllm:spec_decode_num_drafts_total")
    assert 0 < drafts <= difference("vllm:spec_decode_num_draft_tokens_total")
    assert difference("vllm:spec_decode_num_accepted_tokens_total") >= 0
    assert difference("spmoe_expert_hits_total") > 0
    assert difference("spmoe_stall_seconds_total") >= 0
    assert after['vllm:request_success_total{finished_reason="length",model_name="spmoe-pair"}'] == 2
    assert 0 < after[f"spmoe_expert_slots_in_use{model}"] <= after[f"spmoe_expert_slots{model}"]
    assert after[f"vllm:num_requests_running{model}"] == after[f"vllm:num_requests_waiting{model}"] == 0
    for name in ("issued", "used", "late", "wasted"):
        assert difference(f"spmoe_prefetch_{name}_bytes_total") >= 0


def test_head_has_no_body(llm: AsyncLLM, server: RunningServer) -> None:
    for path in ("/health", "/version", "/metrics", "/dashboard", "/dashboard/data", "/v1/models"):
        answer = httpx.head(f"{server.url}{path}")
        assert answer.status_code == 200
        assert answer.content == b""
    assert httpx.head(f"{server.url}/v1/models/other").status_code == 404
    assert httpx.head(f"{server.url}/v1/completions").status_code == 405
    with running(llm, api_keys=("key",)) as other:
        assert httpx.head(f"{other.url}/health").status_code == 200
        assert httpx.head(f"{other.url}/v1/models").status_code == 401


def test_version(server: RunningServer) -> None:
    from spmoe import __version__

    assert httpx.get(f"{server.url}/version").json() == {"version": __version__}
