"""`spmoe serve` itself: options that are refused, warnings, keys in messages, SIGTERM and Ctrl-C."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from serving import PATIENCE, serve_process

from spmoe import AsyncLLM
from spmoe.cli import main, serve
from spmoe.serve import config as serve_config
from spmoe.serve.address import bind, url_of
from spmoe.serve.config import ServeConfig

httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

KEY = "key-that-must-stay-secret"


def call(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """Run `spmoe serve` in this process and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["spmoe", "serve", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main.main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--port", 70000), "port must be from 0"),
        (("--host", "no.such.host.invalid"), "host 'no.such.host.invalid' cannot be found"),
        (("--api-key", ""), "api_key must be printable"),
        (("--served-model-name", ""), "served_model_name must not be empty"),
        (("--max-queued-requests", 0), "max_queued_requests must be at least 1"),
        (("--max-body-size", "50%"), "max_body_size must be a size such as 8MiB"),
        (("--shutdown-timeout", -1), "shutdown_timeout must be 0 seconds or more"),
        (("--tool-call-parser", "llama"), "tool_call_parser must be one of hermes, gpt-oss, not 'llama'"),
        (("--chat-template", "/nowhere"), "cannot read /nowhere"),
        (("--ray-replicas", 0), "ray_replicas must be at least 1, not 0"),
    ],
)
def test_bad_options(
    words: tuple[object, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, *words) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_port_in_use(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert call(monkeypatch, "--port", taken.getsockname()[1]) == 2
    assert "choose another --port" in capsys.readouterr().err


def test_missing_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(serve_config, "find_spec", lambda name: None)
    assert call(monkeypatch) == 2
    assert "install with pip install 'spmoe[serve]'" in capsys.readouterr().err


def test_missing_ray_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(serve_config, "find_spec", lambda name: None if name == "ray" else name)
    assert call(monkeypatch, "--ray-replicas", 2) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "--ray-replicas needs ray, not installed here; install with pip install 'spmoe[ray]'" in error


@pytest.mark.parametrize(
    ("words", "warns"),
    [
        (("--host", "127.0.0.1"), False),
        (("--host", "localhost"), False),
        (("--host", "0.0.0.0"), True),
        (("--host", "0.0.0.0", "--api-key", KEY), False),
    ],
)
def test_open_servers_warn(
    words: tuple[str, ...], warns: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def load(engine: dict[str, Any]) -> Iterator[None]:
        yield None

    configs: list[Any] = []
    monkeypatch.setattr(serve, "load", load)
    monkeypatch.setattr(serve, "_run", lambda llm, config, bound: configs.append(config))
    assert call(monkeypatch, "--port", 0, *words) == 0
    assert ("set --api-key" in capsys.readouterr().err) == warns
    assert len(configs) == 1


def test_process_ends_after_sigterm_when_requests_have_finished(spmoe_home: Path) -> None:
    words = ("-v", "--served-model-name", "pair")
    with serve_process(spmoe_home, *words, SPMOE_API_KEY=KEY) as (server, url, lines):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=PATIENCE)
        options = {"model": "pair", "prompt": "def add(a, b):", "max_tokens": 24}
        stream = client.completions.create(**options, stream=True, extra_body={"ignore_eos": True})
        chunks = [next(stream)]
        server.send_signal(signal.SIGTERM)
        chunks += list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert server.wait(PATIENCE) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
    text = "".join(lines)
    assert "Traceback" not in text
    assert "api-key = (hidden) (SPMOE_API_KEY)" in text
    assert KEY not in text


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals need the main thread")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda one: one.name)
def test_signals_end_the_server(number: signal.Signals, tiny_llm: AsyncLLM) -> None:
    from spmoe.serve.app import make_app
    from spmoe.serve.server import serve as serve_app

    config = ServeConfig(port=0, shutdown_timeout=PATIENCE)
    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)]
    bound = bind(config)
    url, statuses = url_of(bound), list[int]()

    def use() -> None:
        body = {"prompt": "x", "max_tokens": 100, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=PATIENCE) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(os.getpid(), number)
            statuses.append(stream.status_code if list(lines)[-2] == "data: [DONE]" else 0)

    client = threading.Thread(target=use)
    serve_app(make_app(tiny_llm, config), config, bound, access_log=False, ready=client.start)
    client.join()
    assert statuses == [200]
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)] == before
