"""Replicas with Ray Serve: sessions, routing, failures and the end, with two replicas of the shipped pair."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from serving import PATIENCE, serve_process, wait_until

from spmoe import AsyncLLM, SamplingParams
from spmoe.errors import UsageError

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
pytest.importorskip("ray.serve")

from ray.exceptions import RayActorError  # noqa: E402

from spmoe.serve import ray as spmoe_ray  # noqa: E402
from spmoe.serve.config import ServeConfig  # noqa: E402

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
KEY = "key-of-the-test"
MAX_NUM_SEQS = 2
ENDLESS = {"prompt": "x = 1", "max_tokens": 4000, "ignore_eos": True, "stream": True}


# ---- sessions


def key_of(path: str, body: Any, **headers: str) -> str:
    return spmoe_ray.session_key(path, httpx.Headers(headers), json.dumps(body).encode())


def test_turns_of_a_chat_have_one_key() -> None:
    opening = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    more = [*opening, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Who are you?"}]
    first = key_of(CHAT, {"messages": opening})
    assert first
    assert key_of(CHAT, {"messages": more, "max_tokens": 3, "stream": True}) == first
    other = [opening[0], {"role": "user", "content": "Good morning"}]
    assert key_of(CHAT, {"messages": other}) != first


def test_long_prompts_with_one_beginning_have_one_key() -> None:
    text, ids = "line\n" * 100, list(range(100))
    for prompt in (text, ids):
        assert key_of(COMPLETIONS, {"prompt": prompt}) == key_of(COMPLETIONS, {"prompt": prompt + prompt})
        assert key_of(COMPLETIONS, {"prompt": [prompt, prompt]}) == key_of(COMPLETIONS, {"prompt": prompt})
    assert key_of(COMPLETIONS, {"prompt": text}) != key_of(COMPLETIONS, {"prompt": ids})


def test_header_and_field_name_a_session() -> None:
    texts = [{"prompt": "one"}, {"prompt": "two"}]
    assert len({key_of(COMPLETIONS, body) for body in texts}) == 2
    assert len({key_of(COMPLETIONS, body, **{"x-session-id": "s"}) for body in texts}) == 1
    assert len({key_of(COMPLETIONS, {**body, "prompt_cache_key": "s"}) for body in texts}) == 1


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"messages": 3}', b'{"prompt": null}', b"\xff"])
def test_wrong_requests_have_no_key(body: bytes) -> None:
    for path in (CHAT, COMPLETIONS, "/tokenize"):
        assert spmoe_ray.session_key(path, httpx.Headers(), body) == ""


def test_session_stays_unless_its_replica_is_overloaded() -> None:
    def choose(a: int, b: int, home: str | None) -> str:
        return spmoe_ray.choose_replica({"a": a, "b": b}, home, 4, "session")

    assert choose(3, 0, "a") == "a"
    assert choose(4, 3, "a") == "b"
    assert choose(9, 4, "a") == "a"  # it would wait elsewhere, too
    assert choose(2, 1, None) == "b"
    assert choose(2, 1, "a replica that has ended") == "b"


def test_new_sessions_spread_over_idle_replicas() -> None:
    idle = {"a": 0, "b": 0, "c": 0}
    chosen = [spmoe_ray.choose_replica(idle, None, 4, f"session {number}") for number in range(60)]
    assert set(chosen) == set(idle)
    again = [spmoe_ray.choose_replica(idle, None, 4, f"session {number}") for number in range(60)]
    assert chosen == again


# ---- the gateway without replicas


class Messages:
    """Answer of a replica that ends with an error, or never comes."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error
        self.cancelled = False

    async def __anext__(self) -> Any:
        if self._error is None:
            await asyncio.Event().wait()
        raise self._error

    def cancel(self) -> None:
        self.cancelled = True


class Replicas:
    """Handle of replicas that all answer alike."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages

    def options(self, **options: Any) -> Replicas:
        return self

    def remote(self, scope: dict[str, Any], body: bytes) -> Messages:
        assert b"authorization" not in dict(scope["headers"])
        return self._messages


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (None, 503, "no replica is ready"),
        (RayActorError(), 503, "the replica of this request ended"),
        (ValueError(), 500, "internal error (ValueError)"),
    ],
)
def test_failures_of_replicas(
    error: Exception | None, status: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from starlette.testclient import TestClient

    monkeypatch.setattr(spmoe_ray, "_ACCEPT_SECONDS", 0.05)
    messages = Messages(error)
    gateway = spmoe_ray.make_gateway(Replicas(messages), ServeConfig(api_keys=(KEY,)))
    client = TestClient(gateway, raise_server_exceptions=False, headers={"Authorization": f"Bearer {KEY}"})
    answer = client.post(COMPLETIONS, json={"prompt": "x"})
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]
    assert answer.headers.get("retry-after") == ("1" if status == 503 else None)
    assert messages.cancelled


# ---- serve.yaml


def serve_yaml() -> Any:
    """Return the contents of serve.yaml in the documentation."""
    import yaml

    page = (Path(__file__).parents[2] / "docs" / "ray.md").read_text()
    return yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])


def test_documented_serve_yaml_is_valid_and_builds() -> None:
    from ray.serve import Application
    from ray.serve.schema import ServeDeploySchema

    (application,) = ServeDeploySchema.model_validate(serve_yaml()).applications
    assert application.import_path == f"{spmoe_ray.app.__module__}:{spmoe_ray.app.__name__}"
    assert [one.name for one in application.deployments] == [spmoe_ray.ENGINE]
    assert isinstance(spmoe_ray.app(application.args), Application)
    options = spmoe_ray.parse_args(application.args)
    assert options.engine == {"model": "/models/mixtral-8x7b", "draft": "ngram", "device": "cuda", "max_num_seqs": 8}
    assert options.config.served_model_names == ("my-model",)


def test_args_of_serve_yaml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPMOE_API_KEY", "secret")
    options = spmoe_ray.parse_args({"device": "cpu", "max_num_batched_tokens": 64, "max_body_size": "1MiB"})
    assert options.engine == {"device": "cpu", "prefill_chunk": 64, "max_num_seqs": 8}
    assert (options.config.api_keys, options.config.max_body_size) == (("secret",), 2**20)
    assert options.config.served_model_names == ("spmoe-pair",)
    assert spmoe_ray.parse_args({"api_key": ["a", "b"]}).config.api_keys == ("a", "b")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"max_num_seq": 3}, "unknown option 'max_num_seq'"),
        ({"port": 80}, "unknown option 'port'"),
        ({"device": "auto"}, "device must be cuda"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"tool_call_parser": "llama"}, "tool_call_parser must be one of"),
        ({"chat_template": "/nowhere"}, "cannot read /nowhere"),
    ],
)
def test_wrong_args_of_serve_yaml(args: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        spmoe_ray.app(args)


# ---- the cluster


class Cluster(NamedTuple):
    """A server with two replicas."""

    process: Any
    url: str
    lines: list[str]  # of its standard error

    def request(self, body: Any, path: str = COMPLETIONS, **headers: str) -> Any:
        headers = {"Authorization": f"Bearer {KEY}", **headers}
        return httpx.post(f"{self.url}{path}", json=body, headers=headers, timeout=PATIENCE)

    def get(self, path: str, **headers: str) -> Any:
        return httpx.get(f"{self.url}{path}", headers=headers, timeout=PATIENCE)

    def stream(self, held: ExitStack, body: Any, **headers: str) -> tuple[str, Iterator[str]]:
        """Begin a stream; return its replica and its lines after the first one."""
        headers = {"Authorization": f"Bearer {KEY}", **headers}
        request = httpx.stream("POST", f"{self.url}{COMPLETIONS}", json=body, headers=headers, timeout=PATIENCE)
        response = held.enter_context(request)
        assert response.status_code == 200
        lines = response.iter_lines()
        held.callback(lines.close)  # without a reference to it, the connection would be closed
        next(lines)
        return response.headers["x-spmoe-replica"], lines

    def running(self) -> dict[str, float]:
        """Return the number of running completions by replica."""
        found = {}
        for line in self.get("/metrics").text.splitlines():
            if line.startswith("vllm:num_requests_running{"):
                labels, value = line.rsplit(" ", 1)
                found[labels.partition('replica="')[2].partition('"')[0]] = float(value)
        return found


def descendants(pid: int) -> dict[int, str]:
    """Return the command lines of all processes below a process."""
    parents, titles = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                status = (entry / "stat").read_text()
                titles[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # it has just ended
                continue
            parents[int(entry.name)] = int(status.rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return {one: titles.get(one, "") for one in found - {pid}}


@pytest.fixture(scope="module")
def cluster(spmoe_home: Path) -> Iterator[Cluster]:
    options = ("--dtype", "float32", "--expert-memory", "60%", "-k", "2", "--max-num-seqs", str(MAX_NUM_SEQS))
    options += ("--max-queued-requests", "4", "--max-body-size", "64KiB", "--shutdown-timeout", "0.2")
    place = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # paths of sockets must be short
    environment = {"SPMOE_API_KEY": KEY, "RAY_TMPDIR": place, "OMP_NUM_THREADS": ""}
    try:
        with serve_process(spmoe_home, "--ray-replicas", "2", *options, **environment) as (process, url, lines):
            yield Cluster(process, url, lines)
    finally:
        shutil.rmtree(place, ignore_errors=True)


@pytest.mark.slow  # the cluster starts
def test_requests_spread_and_give_the_engines_text(cluster: Cluster, llm: AsyncLLM) -> None:
    prompts = ["def add(a, b):", "import os", "class Stack:", "for i in range(10):"]
    expected = [one.outputs[0].text for one in llm.llm.generate(prompts, SamplingParams(max_tokens=12))]
    with ThreadPoolExecutor(len(prompts)) as clients:
        answers = list(clients.map(lambda prompt: cluster.request({"prompt": prompt, "max_tokens": 12}), prompts))
    assert [answer.json()["choices"][0]["text"] for answer in answers] == expected
    assert {answer.headers["x-spmoe-replica"] for answer in answers} == set(cluster.get("/health").json()["replicas"])


def test_chat_stays_on_its_replica_and_reuses_its_kv_cache(cluster: Cluster) -> None:
    for number in range(3):
        messages = [{"role": "user", "content": f"write add number {number}"}]
        first = cluster.request({"messages": messages, "max_tokens": 8}, CHAT)
        text = first.json()["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and subtract"}]
        second = cluster.request({"messages": messages, "max_tokens": 8}, CHAT)
        assert second.headers["x-spmoe-replica"] == first.headers["x-spmoe-replica"]
        assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_overloaded_replica_loses_a_session(cluster: Cluster) -> None:
    session = {"X-Session-ID": "busy"}
    with ExitStack() as held:
        homes = {cluster.stream(held, ENDLESS, **session)[0] for _ in range(MAX_NUM_SEQS)}
        assert len(homes) == 1
        other = cluster.request({"prompt": "x = 1", "max_tokens": 2}, **session).headers["x-spmoe-replica"]
        assert other not in homes
        again = cluster.request({"prompt": "x = 1", "max_tokens": 2}, **session).headers["x-spmoe-replica"]
        assert again == other  # it has moved
    wait_until(lambda: set(cluster.running().values()) == {0.0})  # clients have left: their sequences have ended


def test_full_queues_are_refused(cluster: Cluster) -> None:
    several = {**ENDLESS, "prompt": ["x = 1"] * 4}  # two run, and two of four places in the queue are taken
    with ExitStack() as held:
        replicas = {cluster.stream(held, several, **{"X-Session-ID": name})[0] for name in ("one", "two")}
        assert len(replicas) == 2
        answer = cluster.request(several)
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "queue_full"
        assert answer.headers["retry-after"] == "1"
    wait_until(lambda: set(cluster.running().values()) == {0.0})


def test_gateway_refuses_what_a_server_refuses(cluster: Cluster) -> None:
    assert cluster.get("/v1/models").status_code == 401
    assert cluster.request({"prompt": "x"}, Authorization="Bearer wrong").json()["error"]["code"] == "invalid_api_key"
    assert cluster.request({"prompt": "x" * 70_000}).json()["error"]["code"] == "body_too_large"
    assert cluster.request({"prompt": "x"}, **{"Content-Type": "text/plain"}).status_code == 415
    assert cluster.request({"prompt": "x", "wrong": 1}).json()["error"]["param"] == "wrong"
    assert cluster.request({"prompt": "x"}, "/nothing").status_code == 404
    assert cluster.get(COMPLETIONS, Authorization=f"Bearer {KEY}").status_code == 405


def test_information_is_of_every_replica(cluster: Cluster) -> None:
    health = cluster.get("/health").json()
    names = set(health["replicas"])
    assert health == {"status": "ok", "replicas": dict.fromkeys(names, "ok")}
    assert len(names) == 2
    assert set(cluster.running()) == names
    metrics = cluster.get("/metrics").text
    assert metrics.count("# TYPE vllm:num_requests_running gauge") == 1
    responses = [line for line in metrics.splitlines() if line.startswith("spmoe_http_responses_total")]
    assert responses
    assert all('replica="gateway"' in line for line in responses)
    page = cluster.get("/dashboard").text
    assert all(f'href="?replica={name}"' in page for name in names)
    authorized = {"Authorization": f"Bearer {KEY}"}
    for name in names:
        assert "dashboard/data" in cluster.get(f"/dashboard?replica={name}").text
        assert cluster.get(f"/dashboard/data?replica={name}", **authorized).json()["replica"] == name
    assert cluster.get("/dashboard/data?replica=none", **authorized).status_code == 404


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_replicas_have_cores_of_their_own(cluster: Cluster) -> None:
    every, restricted = os.sched_getaffinity(0), []
    for pid, title in descendants(cluster.process.pid).items():
        if title.startswith("ray::ServeReplica"):
            threads = [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
            (cores,) = {frozenset(os.sched_getaffinity(one)) for one in threads} - {frozenset(every)}
            restricted.append(cores)
    assert len(restricted) == 2
    assert all(len(cores) == len(every) // 2 for cores in restricted)
    assert not restricted[0] & restricted[1]


def test_killed_replica_is_replaced(cluster: Cluster) -> None:
    before = set(cluster.get("/health").json()["replicas"])
    with ExitStack() as held:
        streams = dict(cluster.stream(held, ENDLESS, **{"X-Session-ID": name}) for name in ("one", "two"))
        assert set(streams) == before
        titles = descendants(cluster.process.pid)
        os.kill(next(pid for pid, title in titles.items() if title.startswith("ray::ServeReplica")), signal.SIGKILL)
        wait_until(lambda: len(cluster.get("/health").json()["replicas"]) == 1)
        (left,) = cluster.get("/health").json()["replicas"]
        (killed,) = before - {left}
        events = [line for line in streams[killed] if line]
        assert json.loads(events[-2].removeprefix("data: "))["error"]["type"] == "server_error"
        assert events[-1] == "data: [DONE]"
        assert next(line for line in streams[left] if line).startswith("data: {")  # the other one goes on
        answer = cluster.request({"prompt": "x = 1", "max_tokens": 2})
        assert (answer.status_code, answer.headers["x-spmoe-replica"]) == (200, left)
    wait_until(lambda: len(cluster.get("/health").json()["replicas"]) == 2)
    (new,) = set(cluster.get("/health").json()["replicas"]) - {left}
    sessions = ({"X-Session-ID": f"session {number}"} for number in count())  # new ones, which no replica has
    short = {"prompt": "x", "max_tokens": 1}
    wait_until(lambda: cluster.request(short, **next(sessions)).headers["x-spmoe-replica"] == new)


def test_sigterm_ends_requests_and_all_processes(cluster: Cluster) -> None:
    processes = descendants(cluster.process.pid)
    assert any("raylet" in title for title in processes.values())
    with ExitStack() as held:
        _, lines = cluster.stream(held, ENDLESS)
        cluster.process.send_signal(signal.SIGTERM)
        events = [line for line in lines if line]
    assert "shutting down" in json.loads(events[-2].removeprefix("data: "))["error"]["message"]
    assert cluster.process.wait(PATIENCE) == 0
    assert not {pid: title for pid, title in processes.items() if Path(f"/proc/{pid}").exists()}
    text = "".join(cluster.lines)
    assert "Traceback" not in text
    assert KEY not in text
