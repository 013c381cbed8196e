"""Ray Serve: several replicas of the application, and a gateway that keeps a session on its replica.

    client -> gateway -> SessionRouter -> replica: the application of `spmoe serve` with an engine of its own

`spmoe serve --ray-replicas N` runs the gateway itself, in front of a local cluster. On a real cluster `app` builds the
same from the arguments in `serve.yaml`; there the gateway is a deployment behind Ray Serve's HTTP proxies.

This module imports no torch: a replica on the CPU chooses its cores before torch counts them.
"""

from __future__ import annotations

import asyncio
import hashlib
import html
import logging
import os
import re
import secrets
import signal
import threading
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import ray
from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Counter as PrometheusCounter
from prometheus_client.core import Metric
from pydantic_core import from_json, to_json
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.types import Message, Receive, Scope, Send

from spmoe import __version__, errors
from spmoe.config import EngineConfig
from spmoe.errors import SpmoeError, UsageError, reason
from spmoe.files import read_text_file
from spmoe.models.chat_template import require_template_syntax
from spmoe.serve.config import DEFAULT_MODEL_NAME, ServeConfig, parse_body_size
from spmoe.serve.http import (
    DONE,
    LARGE_BODY,
    PROMETHEUS_TEXT,
    RETRY_AFTER_SECONDS,
    SHUTTING_DOWN,
    ApiError,
    ClientGone,
    add_access,
    error_response,
    event,
    internal_error,
    json_response,
    read_body,
    unless_gone,
)

log = logging.getLogger(__name__)

SESSION_HEADER = "X-Session-ID"  # of requests: names the session
REPLICA_HEADER = "X-Spmoe-Replica"  # of responses: the replica that made it
APPLICATION, ENGINE, GATEWAY = "spmoe", "Engine", "Gateway"  # names of the local application and of the deployments

RESPONSES_METRIC = "spmoe_http_responses"
_ENGINE_OPTIONS = {one.name for one in fields(EngineConfig)} - {"shape", "progress"}
_SERVER_OPTIONS = {one.name for one in fields(ServeConfig)} - {"host", "port"}
_PREFIX_CHARACTERS, _PREFIX_TOKENS = (
    256,
    64,
)  # of a prompt, that stand for its session; less is read again fast
_MAX_SESSIONS = 100_000  # that a router remembers
_UNLIMITED = 10**6  # requests of a replica, for Ray; the replica has a queue of its own and answers 429 when it is full
_ACCEPT_SECONDS = 10.0  # for a replica to accept a request; it takes milliseconds unless no replica runs
_HEALTH_SECONDS = 2.0  # between two checks of a replica; one that has ended is replaced after the next
_COLLECT_SECONDS = 5.0  # for answers of all replicas
_OBJECT_STORE_BYTES = 80 * 2**20  # little more than Ray's minimum: requests and responses do not go through it


# ---- sessions


def session_key(path: str, headers: Mapping[str, str], body: bytes) -> str:
    """Return the key of the session that a request belongs to; empty if it belongs to none.

    It comes from the header X-Session-ID or the field prompt_cache_key. Without them a chat is known by its messages up
    to the first one of the user, which all its turns have, and a completion by the beginning of its prompt.
    """
    if given := headers.get(SESSION_HEADER):
        return _digest("header", given)
    if path not in ("/v1/chat/completions", "/v1/completions"):
        return ""
    try:
        fields = from_json(body)
    except ValueError:  # the replica refuses it
        return ""
    if not isinstance(fields, dict):
        return ""
    if isinstance(key := fields.get("prompt_cache_key"), str):
        return _digest("key", key)
    if path == "/v1/chat/completions":
        messages = fields.get("messages")
        return _digest("chat", _opening(messages)) if isinstance(messages, list) else ""
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):  # several prompts
        prompt = prompt[0]
    if isinstance(prompt, str):
        return _digest("prompt", prompt[:_PREFIX_CHARACTERS])
    return _digest("prompt", prompt[:_PREFIX_TOKENS]) if isinstance(prompt, list) else ""


def _opening(messages: Sequence[Any]) -> list[Any]:
    """Return the messages up to the first one of the user."""
    for number, message in enumerate(messages, start=1):
        if isinstance(message, dict) and message.get("role") == "user":
            return list(messages[:number])
    return list(messages)


def _digest(*values: Any) -> str:
    return hashlib.sha256(to_json(values)).hexdigest()[:32]


def choose_replica(loads: Mapping[str, int], home: str | None, max_num_seqs: int, key: str) -> str:
    """Return the replica for a request: the session's own unless it is overloaded, else the one with the least load.

    `loads`: requests under way by replica. `home`: the replica that had the session's last request. It is overloaded if
    the request would wait there, since as many run as can run together, while another replica has a free place. Equal
    loads are told apart by a hash, so that gateways that know nothing of each other choose alike.
    """
    least = min(loads.values())
    if home is not None and home in loads and (loads[home] < max_num_seqs or least >= max_num_seqs):
        return home
    return min((name for name, load in loads.items() if load == least), key=lambda name: _digest(key, name))


class SessionRouter(RequestRouter):
    """Sends requests of a session to the replica that has its KV cache. Ray Serve runs one in each gateway."""

    queue_len_response_deadline_s = 5.0  # a replica whose interpreter is busy for a moment keeps its sessions

    def initialize_state(self, max_num_seqs: int) -> None:
        """Take the number of requests that a replica runs together."""
        self._max_num_seqs = max_num_seqs
        self._homes: OrderedDict[str, str] = OrderedDict()  # replica by session, the latest last
        self._routed: dict[str, tuple[PendingRequest, str]] = {}  # requests under way by id, with their replica

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the chosen replica, and then all others, in case that it has ended."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        request, key = pending_request.metadata.internal_request_id, pending_request.metadata.session_id
        replicas = {one.replica_id.unique_id: one for one in candidate_replicas}
        loads, home = self._loads(replicas), self._homes.get(key)
        chosen = choose_replica(loads, home, self._max_num_seqs, key or request)
        log.debug("session %s goes to replica %s; loads %s", key[:8] or "none", chosen, loads)
        self._assign(pending_request, chosen)  # now, so that requests that arrive together spread
        return [[replicas.pop(chosen)], list(replicas.values())]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Note the replica that has accepted a request."""
        if pending_request.metadata.internal_request_id in self._routed:  # else it has ended already
            self._assign(pending_request, replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Forget a request that has ended."""
        self._routed.pop(internal_request_id, None)

    def _assign(self, pending_request: PendingRequest, replica: str) -> None:
        self._routed[pending_request.metadata.internal_request_id] = pending_request, replica
        if key := pending_request.metadata.session_id:
            self._homes[key] = replica
            self._homes.move_to_end(key)
            if len(self._homes) > _MAX_SESSIONS:
                self._homes.popitem(last=False)

    def _loads(self, replicas: Mapping[str, RunningReplica]) -> dict[str, int]:
        """Return the requests under way of each replica; drop those whose clients left before they were sent."""
        for request in [name for name, (pending, _) in self._routed.items() if pending.future.cancelled()]:
            del self._routed[request]
        counts = Counter(replica for _, replica in self._routed.values())
        return {name: counts[name] for name in replicas}


# ---- replicas


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """Options that every replica is built from."""

    engine: dict[str, Any]  # of `LLM`; `device` and `max_num_seqs` are among them
    config: ServeConfig
    chat_template: str | None = None  # source of a template to use instead of the model's
    own_cores: bool = False  # restrict each replica to cores of its own


class Replica:
    """An engine with the application of `spmoe serve`, in a process of Ray Serve."""

    def __init__(self, options: ReplicaOptions) -> None:
        context = serve.get_replica_context()
        self.name = context.replica_id.unique_id
        if options.own_cores:
            _use_own_cores(context.rank.local_rank)
        from spmoe.engine.async_llm import AsyncLLM
        from spmoe.serve.app import make_app

        llm = AsyncLLM(**{**options.engine, "progress": False})
        tokenizer = llm.llm.engine.parts.tokenizer
        if options.chat_template is not None and tokenizer is not None:
            tokenizer.chat_template = options.chat_template
        self._app = make_app(llm, options.config)
        self._service = self._app.state.service
        self._llm = llm

    async def respond(self, scope: dict[str, Any], body: bytes) -> AsyncGenerator[Message | str, None]:
        """Answer a request: yield the replica's name at once, and then the messages of ASGI.

        Ray cancels the generator when the client leaves; the application then ends as for a closed connection.
        """
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        gone = asyncio.Event()

        async def receive() -> Message:
            if requests:
                return requests.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self._app(scope, receive, messages.put)
            except Exception as error:  # the application has answered with status 500
                log.error("a request failed: %s", reason(error), exc_info=error)
            finally:
                messages.put_nowait(None)

        yield self.name
        running = asyncio.ensure_future(run())
        try:
            while (message := await messages.get()) is not None:
                yield message
        finally:
            gone.set()
            await running

    async def failure(self) -> tuple[str, str | None]:
        """Return the replica's name, and the reason why it cannot work; None while it can."""
        return self.name, self._llm.failure

    async def metrics(self) -> tuple[str, list[Metric]]:
        """Return the replica's name and metrics, without counts of HTTP responses: the gateway has them."""
        found = self._service.metrics.registry.collect()
        return self.name, [metric for metric in found if metric.name != RESPONSES_METRIC]

    async def dashboard_data(self, replica: str) -> dict[str, Any] | None:
        """Return the figures of the dashboard if this is the replica; None if it is another one."""
        return self._app.state.dashboard.data() if replica == self.name else None

    def check_health(self) -> None:
        """Raise an exception if the engine cannot work any more; Ray Serve then starts another replica."""
        if (failure := self._llm.failure) is not None:
            raise RuntimeError(failure)

    def __del__(self) -> None:
        # Ray Serve calls this once the replica's requests have ended
        with suppress(AttributeError):  # the engine could not be built
            self._llm.close()


def _use_own_cores(local_rank: int) -> None:
    """Restrict this process to as many cores as Ray has assigned it, other ones than its neighbours'.

    Ray sets OMP_NUM_THREADS to the same number, which would keep the engine from choosing fewer threads by measurement.
    """
    count = int(ray.get_runtime_context().get_assigned_resources()["CPU"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[(local_rank * count + number) % len(cores)] for number in range(count)})
    os.environ.pop("OMP_NUM_THREADS", None)


def _deployment(options: ReplicaOptions, **more: Any) -> Any:
    """Return the deployment of the replicas, bound to its options."""
    open_config = replace(options.config, api_keys=(), allowed_origins=())  # the gateway checks keys and origins
    limit = {"max_num_seqs": options.engine["max_num_seqs"]}
    router = RequestRouterConfig(request_router_class=SessionRouter, request_router_kwargs=limit)
    deployment = serve.deployment(
        Replica,
        name=ENGINE,
        max_ongoing_requests=_UNLIMITED,
        request_router_config=router,
        health_check_period_s=_HEALTH_SECONDS,
        graceful_shutdown_timeout_s=options.config.shutdown_timeout,
        graceful_shutdown_wait_loop_s=0.2,
        **more,
    )
    return deployment.bind(replace(options, config=open_config))


# ---- the gateway


class Gateway:
    """Requests under way of a gateway, and its way to the replicas. Methods run on one event loop."""

    def __init__(self, replicas: DeploymentHandle[Any], config: ServeConfig) -> None:
        self.config = config
        self.draining = asyncio.Event()
        self.registry = CollectorRegistry()
        self._responses = PrometheusCounter(
            RESPONSES_METRIC, "HTTP responses, by status.", ("model_name", "status"), registry=self.registry
        )
        self._replicas = replicas
        self._under_way: set[_ForwardedRequest] = set()

    async def forward(self, request: Request) -> Response:
        """Have a replica answer a request, and return the response when it has begun."""
        if self.draining.is_set():
            raise ApiError(503, SHUTTING_DOWN)
        limit = self.config.max_body_size
        body = await read_body(request, limit, self.draining) if request.method == "POST" else b""
        arguments = request.url.path, request.headers, body
        key = session_key(*arguments) if len(body) <= LARGE_BODY else await asyncio.to_thread(session_key, *arguments)
        copied = ("type", "http_version", "method", "path", "raw_path", "root_path", "query_string")
        scope = {name: request.scope[name] for name in copied if name in request.scope}
        scope["headers"] = [one for one in request.scope["headers"] if one[0] != b"authorization"]  # keys stay here
        forwarded = _ForwardedRequest(
            self._replicas.options(method_name="respond", stream=True, session_id=key).remote(scope, body)
        )
        self._under_way.add(forwarded)
        try:
            await unless_gone(request.receive, forwarded.begin())
        except BaseException:
            self._end(forwarded)
            raise
        return _ForwardedResponse(forwarded, self._end)

    def _end(self, forwarded: _ForwardedRequest) -> None:
        self._under_way.discard(forwarded)
        forwarded.cancel()

    async def ask_all(self, method: str, *arguments: Any) -> list[Any]:
        """Return the answers of all replicas that run; those that fail or take too long have none."""
        try:
            asked = self._replicas.broadcast(method, *arguments)
            answers = await asked.results_async(timeout_s=_COLLECT_SECONDS, return_exceptions=True)
        except (TimeoutError, DeploymentUnavailableError):
            return []
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    def count_response(self, status: int) -> None:
        """Count a response of the gateway or of a replica."""
        self._responses.labels(self.config.served_model_names[0], str(status)).inc()

    async def abort_all(self) -> None:
        """End all requests under way; their clients get an error."""
        for forwarded in list(self._under_way):
            forwarded.abort()

    def close(self) -> None:
        """Do nothing: a gateway has no threads."""


class _ForwardedRequest:
    """A request that a replica answers, as messages of ASGI."""

    def __init__(self, messages: DeploymentResponseGenerator[Any]) -> None:
        self._messages = messages
        self._aborted = False
        self.replica = ""
        self.first: list[Message] = []  # start of the response and first part of its body

    async def begin(self) -> None:
        """Wait for the beginning of the response; raise ApiError if there is none."""
        try:
            async with asyncio.timeout(_ACCEPT_SECONDS):
                self.replica = await self._next()
        except TimeoutError as error:
            retry = {"Retry-After": str(RETRY_AFTER_SECONDS)}
            raise ApiError(503, "no replica is ready; try again later", headers=retry) from error
        self.first = [await self._next(), await self._next()]

    async def rest(self) -> AsyncGenerator[Message, None]:
        """Yield the messages after the beginning; raise ApiError if the replica ends."""
        message = self.first[-1]
        while message.get("more_body", False):
            message = await self._next()
            yield message

    async def _next(self) -> Any:
        try:
            return await anext(self._messages)
        except RayActorError as error:
            log.error("a replica ended: %s", reason(error))
            retry = {"Retry-After": str(RETRY_AFTER_SECONDS)}
            raise ApiError(503, "the replica of this request ended; send the request again", headers=retry) from error
        except DeploymentUnavailableError as error:
            raise ApiError(503, "the replicas cannot be started; the server's log has details") from error
        except BaseException as error:
            if self._aborted:
                raise ApiError(
                    503, "the server ended the request because it is shutting down; send it to another one"
                ) from error
            raise

    def abort(self) -> None:
        """End the request with an error for its client."""
        self._aborted = True
        self.cancel()

    def cancel(self) -> None:
        """End the request on its replica, if it has not ended."""
        self._messages.cancel()


class _ForwardedResponse(Response):
    """The response of a replica, passed on as it comes."""

    def __init__(self, forwarded: _ForwardedRequest, end: Callable[[_ForwardedRequest], None]) -> None:
        super().__init__()
        self._forwarded = forwarded
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response until it ends or the client leaves."""
        try:
            with suppress(ClientGone):
                await unless_gone(receive, self._send_all(send))
        finally:
            self._end(self._forwarded)

    async def _send_all(self, send: Send) -> None:
        start, body = self._forwarded.first
        replica = REPLICA_HEADER.lower().encode(), self._forwarded.replica.encode()
        await send({**start, "headers": [*start["headers"], replica]})
        await send(body)
        try:
            async for message in self._forwarded.rest():
                await send(message)
        except Exception as error:  # only streams have a body of several parts
            if not isinstance(error, ApiError):
                log.error("a stream failed: %s", reason(error), exc_info=error)
                error = internal_error(error)
            await send({"type": "http.response.body", "body": event(error.to_dict()) + DONE, "more_body": False})


def make_gateway(replicas: DeploymentHandle[Any], config: ServeConfig) -> FastAPI:
    """Return the application of a gateway; its `state.service` is the `Gateway`."""
    app = FastAPI(title="spmoe", version=__version__, openapi_url=None)
    gateway = app.state.service = Gateway(replicas, config)

    @app.get("/health")
    async def health() -> Response:
        failures = dict(await gateway.ask_all("failure"))
        states = {name: failure or "ok" for name, failure in sorted(failures.items())}
        if gateway.draining.is_set():
            return error_response(ApiError(503, "the server is shutting down"))
        if "ok" not in states.values():
            return error_response(ApiError(503, f"no replica works: {states or 'none runs'}"))
        return json_response({"status": "ok", "replicas": states})

    @app.get("/metrics")
    async def metrics() -> Response:
        by_replica = dict(await gateway.ask_all("metrics"))
        by_replica["gateway"] = list(gateway.registry.collect())
        return Response(render_metrics(by_replica), media_type=PROMETHEUS_TEXT)

    @app.get("/dashboard")
    async def dashboard(request: Request) -> Response:
        if "replica" in request.query_params:
            return await gateway.forward(request)  # the page is the same on all replicas
        names = sorted(name for name, _ in await gateway.ask_all("failure"))
        return Response(_dashboard_index(names), media_type="text/html; charset=utf-8")

    @app.get("/dashboard/data")
    async def dashboard_data(replica: str = "") -> Response:
        found = [one for one in await gateway.ask_all("dashboard_data", replica) if one is not None]
        if not found:
            raise ApiError(404, f"there is no replica {replica!r}; /dashboard lists them", param="replica")
        return json_response({"replica": replica, **found[0]}, headers={"Cache-Control": "no-store"})

    @app.api_route("/{path:path}", methods=["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
    async def forward(request: Request) -> Response:
        return await gateway.forward(request)

    add_access(app, config, gateway.count_response)
    return app


def render_metrics(by_replica: Mapping[str, Sequence[Metric]]) -> bytes:
    """Return the metrics of all replicas in the text format of Prometheus, with the label `replica`."""
    merged: dict[str, Metric] = {}
    for replica, metrics in sorted(by_replica.items()):
        for metric in metrics:
            family = merged.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type, metric.unit))
            for sample in metric.samples:
                family.samples.append(sample._replace(labels={**sample.labels, "replica": replica}))

    class Collected:
        def collect(self) -> Iterator[Metric]:
            yield from merged.values()

    registry = CollectorRegistry()
    registry.register(Collected())
    return generate_latest(registry)


def _dashboard_index(names: Sequence[str]) -> str:
    """Return a page with a link to the dashboard of each replica."""
    links = "".join(f'<li><a href="?replica={html.escape(name)}">{html.escape(name)}</a></li>' for name in names)
    return f'<!doctype html><meta charset="utf-8"><title>spmoe</title><h1>Replicas</h1><ul>{links}</ul>'


# ---- a local cluster


@contextmanager
def local_replicas(options: ReplicaOptions, count: int, *, verbose: bool = False) -> Iterator[DeploymentHandle[Any]]:
    """Start Ray on this machine with replicas, one per GPU on CUDA; yield a handle, and end all of it afterwards."""
    from spmoe.backends.devices import choose_device

    device = choose_device(options.engine["device"]).type
    own_cores = device == "cpu" and not os.environ.get("OMP_NUM_THREADS")
    options = replace(options, engine={**options.engine, "device": device}, own_cores=own_cores)
    cores = max(1, len(os.sched_getaffinity(0)) // count)
    # nothing is reported to Ray's makers, and Ray's ports, which are open to the network, need a secret
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    logging.getLogger("ray.serve").setLevel(logging.INFO if verbose else logging.ERROR)
    try:
        with _held_signals() as received:
            ray.init(
                address="local",
                num_cpus=cores * count,
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                log_to_driver=verbose,
                logging_level=logging.INFO if verbose else logging.ERROR,
                _node_ip_address="127.0.0.1",
            )
        if received:
            raise KeyboardInterrupt
        found = int(ray.cluster_resources().get("GPU", 0))
        if device == "cuda" and found < count:
            raise UsageError(f"ray_replicas must be at most the number of GPUs, {found}, not {count}")
        serve.start(proxy_location="Disabled")  # the gateway takes their place
        actor_options = {"num_cpus": cores, "num_gpus": 1 if device == "cuda" else 0}
        more = {"num_replicas": count, "max_constructor_retry_count": 1, "ray_actor_options": actor_options}
        yield _deploy(_deployment(options, **more))
    finally:
        with _held_signals():
            if ray.is_initialized():
                with suppress(RayServeException, RayError):  # Serve has not started or has failed
                    serve.delete(APPLICATION)  # ends the engines
            ray.shutdown()


@contextmanager
def _held_signals() -> Iterator[list[int]]:
    """Hold SIGINT and SIGTERM back; yield a list of those that came. Afterwards SIGTERM acts as SIGINT does.

    Ray leaves processes behind if its start or its end is interrupted.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = signal.getsignal(signal.SIGINT)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: received.append(number))
    try:
        yield received
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, before)


def _deploy(deployment: Any) -> DeploymentHandle[Any]:
    """Start the replicas and return a handle; raise the error of a replica that could not start."""
    try:
        return serve.run(deployment, name=APPLICATION, route_prefix=None)
    except RuntimeError as error:
        message = serve.status().applications[APPLICATION].deployments[ENGINE].message
        found = re.search(r"^spmoe\.errors\.(\w+): (.*)", message, re.MULTILINE)
        kind = getattr(errors, found[1], SpmoeError) if found else SpmoeError
        raise kind(found[2] if found else f"a replica could not start: {message}") from error


# ---- a real cluster


def app(args: Mapping[str, Any]) -> Any:
    """Return the application for Ray Serve, from the options of `spmoe serve` (`args` in serve.yaml).

    Names have underscores. `host`, `port` and `ray_replicas` are not among them: `serve.yaml` has fields for them.
    """
    options = parse_args(args)
    gpus = 1 if options.engine["device"] == "cuda" else 0
    replicas = _deployment(options, ray_actor_options={"num_cpus": 1, "num_gpus": gpus})
    gateway = serve.deployment(
        serve.ingress()(_GatewayDeployment),
        name=GATEWAY,
        max_ongoing_requests=_UNLIMITED,
        ray_actor_options={"num_cpus": 0.1},
        graceful_shutdown_timeout_s=options.config.shutdown_timeout,
    )
    return gateway.bind(replicas, options.config)


def parse_args(args: Mapping[str, Any]) -> ReplicaOptions:
    """Return the options that `args` of serve.yaml give; raise UsageError for unknown ones and wrong values."""
    given = {"device": "cuda", **args}
    if given["device"] == "auto":  # this may run on a machine without a GPU
        raise UsageError("device must be cuda (the default here) or cpu in serve.yaml, not 'auto'")
    if "max_num_batched_tokens" in given:
        given["prefill_chunk"] = given.pop("max_num_batched_tokens")
    engine = {name: given.pop(name) for name in list(given) if name in _ENGINE_OPTIONS}
    checked = EngineConfig.make(**{**engine, "model": engine.get("model") or ""})
    template = given.pop("chat_template", None)
    if template is not None:
        path, template = template, read_text_file(Path(template))
        require_template_syntax(template, path)
    body_size = given.pop("max_body_size", None)
    for name, option in (
        ("served_model_name", "served_model_names"),
        ("api_key", "api_keys"),
        ("allowed_origins", "allowed_origins"),
    ):
        if name in given:
            value = given.pop(name)
            given[option] = (value,) if isinstance(value, str) else tuple(value)
    if "api_keys" not in given and (key := os.environ.get("SPMOE_API_KEY")):
        given["api_keys"] = (key,)
    given.setdefault("served_model_names", (engine.get("model") or DEFAULT_MODEL_NAME,))
    if unknown := sorted(given.keys() - _SERVER_OPTIONS):
        raise UsageError(f"args of serve.yaml has the unknown option {unknown[0]!r}; `spmoe serve --help` lists them")
    if body_size is not None:
        given["max_body_size"] = parse_body_size(str(body_size))
    return ReplicaOptions(
        {**engine, "max_num_seqs": checked.max_num_seqs},
        ServeConfig(**given),
        template,
    )


class _GatewayDeployment:
    """The gateway in a process of Ray Serve."""

    def __init__(self, replicas: DeploymentHandle[Any], config: ServeConfig) -> None:
        self._app = make_gateway(replicas, config)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app
