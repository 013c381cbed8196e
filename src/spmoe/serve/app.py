"""The FastAPI application: routes, access, body limits, and every error in OpenAI's shape."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spmoe import __version__
from spmoe.engine.async_llm import AsyncLLM
from spmoe.errors import PromptError
from spmoe.serve.chat import ChatCompletion
from spmoe.serve.completions import Completion
from spmoe.serve.config import ServeConfig
from spmoe.serve.dashboard import Dashboard, dashboard_page
from spmoe.serve.protocol import (
    ApiError,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse_request,
)
from spmoe.serve.responses import (
    ClientGone,
    EventStream,
    NoResponse,
    error_response,
    internal_error,
    json_response,
    unless_gone,
)
from spmoe.serve.service import Service, Submission

_BODY_SECONDS = 60.0  # longest time that a client may take to send a request
_LARGE_BODY = 2**16  # bytes; parsing more of them would hold up the event loop
# for probes, Prometheus and browsers, which send no key; the dashboard page is static and asks for the key
_OPEN_PATHS = ("/health", "/version", "/metrics", "/dashboard")
_PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"


def make_app(llm: AsyncLLM, config: ServeConfig) -> FastAPI:
    """Return the application; its `state.service` is the `Service` that the endpoints use."""
    service = Service(llm, config)
    app = FastAPI(title="spmoe", version=__version__, openapi_url=None)  # no pages that load scripts from elsewhere
    app.state.service = service
    _add_error_handlers(app)
    _add_generation_routes(app, service)
    _add_tokenizer_routes(app, service)
    _add_information_routes(app, service)
    _add_dashboard_routes(app, service)
    app.add_middleware(AccessMiddleware, service=service)
    if config.allowed_origins:  # outermost: preflight requests have no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # clients in browsers send headers of their own
        )
    return app


# ---- access


class AccessMiddleware:
    """Refuses requests without a valid API key, and counts responses."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._metrics = service.metrics
        self._keys = [_digest(key.encode()) for key in service.config.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def count_and_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.count_response(message["status"])
            await send(message)

        if self._keys and scope["path"] not in _OPEN_PATHS and not self._has_key(scope):
            refusal = ApiError(
                401,
                "the API key is missing or wrong; send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                kind="authentication_error",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error_response(refusal)(scope, receive, count_and_send)
            return
        await self._app(scope, receive, count_and_send)

    def _has_key(self, scope: Scope) -> bool:
        """Compare with every key in constant time."""
        given = b""
        for name, value in scope["headers"]:
            if name == b"authorization":
                given = value
        scheme, _, key = given.partition(b" ")
        found = [hmac.compare_digest(_digest(key.strip()), one) for one in self._keys]
        return scheme.lower() == b"bearer" and any(found)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()  # of equal length: the comparison does not show the length of a key


# ---- errors


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def _refused(request: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(ClientGone)
    async def _gone(request: Request, error: ClientGone) -> Response:
        return NoResponse()

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        texts = {
            404: f"there is no {request.url.path[:200]!r}; the API is under /v1",
            405: f"{request.url.path[:200]} does not take {request.method}",
        }
        message = texts.get(error.status_code, str(error.detail))
        return error_response(ApiError(error.status_code, message, headers=error.headers))

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> Response:
        return error_response(ApiError(400, f"the request is invalid: {error.errors()[0]['msg']}"))

    @app.exception_handler(Exception)
    async def _failed(request: Request, error: Exception) -> Response:
        # Starlette raises the exception again, so that its traceback is in the server's log
        return error_response(internal_error(error))


# ---- bodies


async def read_body(request: Request, limit: int) -> bytes:
    """Return the body of a JSON request; raise ApiError if it is too large, too slow, or not declared as JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # other types reach the server from any web page, without CORS
        raise ApiError(415, "the body must be JSON; send the header Content-Type: application/json")
    too_large = ApiError(413, f"the body is larger than {limit} bytes; shorten it", code="body_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    chunks, size = [], 0
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunk = message.get("body", b"")
                chunks.append(chunk)
                size += len(chunk)
                if size > limit:
                    raise too_large
                if not message.get("more_body", False):
                    return b"".join(chunks)
    except TimeoutError as error:
        raise ApiError(408, f"the body did not arrive within {_BODY_SECONDS:g} s; send it again") from error


# ---- routes


def _add_generation_routes(app: FastAPI, service: Service) -> None:
    async def generate(request: Request, make: Callable[[bytes], Completion | ChatCompletion]) -> Response:
        body = await read_body(request, service.config.max_body_size)

        async def work() -> Response:
            if len(body) > _LARGE_BODY:
                job = await service.in_thread(lambda: make(body))
            else:
                with service.refusals():
                    job = make(body)
            submission = await service.submit(job)
            if job.streams:
                return await _start_stream(job, submission)
            try:
                return json_response(await job.respond(submission), headers={"X-Request-Id": job.id})
            finally:
                await submission.close()

        return await unless_gone(request.receive, work())

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await generate(request, lambda body: Completion(service, parse_request(CompletionRequest, body)))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await generate(request, lambda body: ChatCompletion(service, parse_request(ChatCompletionRequest, body)))


async def _start_stream(job: Completion | ChatCompletion, submission: Submission) -> EventStream:
    """Wait for the first event, so that an error before it has a status of its own."""
    events = job.stream(submission)
    try:
        return EventStream(await anext(events), events, submission)
    except BaseException:
        await events.aclose()
        await submission.close()
        raise


def _add_tokenizer_routes(app: FastAPI, service: Service) -> None:
    def tokenize_body(body: bytes) -> dict[str, Any]:
        request = parse_request(TokenizeRequest, body)
        service.require_model(request.model)
        if request.messages is not None:
            messages = [message.to_template() for message in request.messages]
            prompt = service.render_chat(messages, add_generation_prompt=request.add_generation_prompt)
            ids = prompt.token_ids or []
        else:
            ids = service.tokenize(request.prompt or "", add_special_tokens=request.add_special_tokens)
        tokens = service.llm.llm.get_tokenizer().convert_ids_to_tokens(ids) if request.return_token_strs else None
        return {"count": len(ids), "max_model_len": service.max_model_len, "tokens": ids, "token_strs": tokens}

    def detokenize_body(body: bytes) -> dict[str, Any]:
        request = parse_request(DetokenizeRequest, body)
        service.require_model(request.model)
        vocabulary = service.llm.llm.engine.target.vocab_size
        if not all(0 <= token < vocabulary for token in request.tokens):
            raise PromptError(f"tokens has ids outside the model's vocabulary of {vocabulary}; remove them")
        return {"prompt": service.llm.llm.get_tokenizer().decode(request.tokens)}

    async def answer(request: Request, function: Callable[[bytes], dict[str, Any]]) -> Response:
        body = await read_body(request, service.config.max_body_size)
        return json_response(await service.in_thread(lambda: function(body)))

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        return await answer(request, tokenize_body)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return await answer(request, detokenize_body)


def _add_information_routes(app: FastAPI, service: Service) -> None:
    def model_card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "spmoe",
            "max_model_len": service.max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response(
            {"object": "list", "data": [model_card(name) for name in service.config.served_model_names]}
        )

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.require_model(name)
        return json_response(model_card(name))

    @app.get("/health")
    async def health() -> Response:
        failure = service.llm.failure
        if failure is None and service.draining:
            failure = "the server is shutting down"
        if failure is not None:
            return error_response(ApiError(503, failure))
        return json_response({"status": "ok"})

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type=_PROMETHEUS_TEXT)


def _add_dashboard_routes(app: FastAPI, service: Service) -> None:
    page, headers = dashboard_page()
    dashboard = Dashboard(service)

    @app.get("/dashboard")
    async def show_dashboard() -> Response:
        return Response(page, headers=headers, media_type="text/html; charset=utf-8")

    @app.get("/dashboard/data")
    async def dashboard_data() -> Response:
        return json_response(dashboard.data(), headers={"Cache-Control": "no-store"})
