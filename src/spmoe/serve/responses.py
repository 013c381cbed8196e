"""HTTP responses: JSON, errors and server-sent events; watching for clients that leave."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from spmoe.errors import reason
from spmoe.serve.protocol import ApiError
from spmoe.serve.service import Submission

T = TypeVar("T")
log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


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


class EventStream(Response):
    """Server-sent events of a request that has begun; an error after the first event becomes the last event."""

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None], submission: Submission) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._submission = submission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events until the stream ends or the client leaves."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await unless_gone(receive, self._send_events(send))
        except ClientGone:
            pass
        finally:
            await self._events.aclose()
            await self._submission.close()

    async def _send_events(self, send: Send) -> None:
        async def send_body(body: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        await send_body(self._first)
        try:
            async for one in self._events:
                await send_body(one)
        except ApiError as error:
            await send_body(event(error.to_dict()))
        except Exception as error:
            log.error("a stream failed: %s", reason(error), exc_info=error)
            await send_body(event(internal_error(error).to_dict()))
        await send_body(DONE, more=False)
