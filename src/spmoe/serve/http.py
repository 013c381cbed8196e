"""HTTP without an engine: access, body limits, errors in OpenAI's shape, JSON, and clients that leave."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spmoe.serve.config import ServeConfig

T = TypeVar("T")

LARGE_BODY = 2**16  # bytes; parsing more of them would hold up the event loop
RETRY_AFTER_SECONDS = 1
DONE = b"data: [DONE]\n\n"
PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"
SHUTTING_DOWN = "the server is shutting down; send the request to another one"
_BODY_SECONDS = 60.0  # longest time that a client may take to send a request
_MAX_MESSAGE = 500  # characters of an error message, which may quote a value of the request
# for probes, Prometheus and browsers, which send no key; the dashboard page is static and asks for the key
_OPEN_PATHS = ("/health", "/version", "/metrics", "/dashboard")


# ---- responses


class ApiError(Exception):
    """A failed request: HTTP status and the error that its client gets."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= _MAX_MESSAGE else f"{message[: _MAX_MESSAGE - 3]}..."
        self.param = param
        self.code = code
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")
        self.headers = dict(headers or {})

    def to_dict(self) -> dict[str, Any]:
        """Return the response body."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


class ClientGone(Exception):
    """The client has closed the connection."""


def encode_json(value: Any) -> bytes:
    """Return JSON; numbers that JSON lacks are null."""
    return to_json(value, inf_nan_mode="null")


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response of JSON."""
    return Response(encode_json(value), status, dict(headers or {}), "application/json")


def error_response(error: ApiError) -> Response:
    """Return a response in OpenAI's shape."""
    return json_response(error.to_dict(), error.status, error.headers)


def internal_error(error: Exception) -> ApiError:
    """Return the answer to a request that met a bug; details are for the server's log."""
    return ApiError(500, f"internal error ({type(error).__name__}); the server's log has details")


def event(value: Any) -> bytes:
    """Return a server-sent event."""
    return b"data: %b\n\n" % encode_json(value)


class NoResponse(Response):
    """The response to a client that is gone: nothing."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send nothing."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine; cancel it and raise ClientGone when the client leaves. The body must have been read."""
    tasks = asyncio.ensure_future(work), asyncio.ensure_future(_wait_until_gone(receive))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientGone
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# ---- access


def add_access(app: FastAPI, config: ServeConfig, count_response: Callable[[int], None]) -> None:
    """Add API keys, CORS, HEAD and errors in OpenAI's shape; `count_response` gets the status of every response.

    Call this when all routes are there.
    """
    _add_error_handlers(app)
    for route in app.routes:
        if isinstance(route, Route) and route.methods and "GET" in route.methods:
            route.methods.add("HEAD")  # for probes of load balancers; uvicorn sends no body
    app.add_middleware(AccessMiddleware, api_keys=config.api_keys, count_response=count_response)
    if config.allowed_origins:  # outermost: preflight requests have no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],  # clients in browsers send headers of their own
        )


class AccessMiddleware:
    """Refuses requests without a valid API key, and counts responses."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], count_response: Callable[[int], None]) -> None:
        self._app = app
        self._count_response = count_response
        self._keys = [_digest(key.encode()) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def count_and_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count_response(message["status"])
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


async def read_body(request: Request, limit: int, draining: asyncio.Event) -> bytes:
    """Return the body of a JSON request; raise ApiError if it is too large, too slow, or not declared as JSON.

    A body that is incomplete when the server ends is refused too: nobody knows when the rest comes.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # other types reach the server from any web page, without CORS
        raise ApiError(415, "the body must be JSON; send the header Content-Type: application/json")
    reading, ending = asyncio.ensure_future(_receive_body(request, limit)), asyncio.ensure_future(draining.wait())
    try:
        await asyncio.wait((reading, ending), timeout=_BODY_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            return reading.result()
        status, text = 408, f"the body did not arrive within {_BODY_SECONDS:g} s; send it again"
        if ending.done():
            status, text = 503, SHUTTING_DOWN
        raise ApiError(status, text, headers={"Connection": "close"})  # no next request can follow an incomplete body
    finally:
        for task in (reading, ending):
            task.cancel()
        await asyncio.gather(reading, ending, return_exceptions=True)


async def _receive_body(request: Request, limit: int) -> bytes:
    too_large = ApiError(413, f"the body is larger than {limit} bytes; shorten it", code="body_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    chunks, size = [], 0
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
