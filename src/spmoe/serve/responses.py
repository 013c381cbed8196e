"""The response of a stream: server-sent events."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from spmoe.errors import reason
from spmoe.serve.http import DONE, ApiError, ClientGone, event, internal_error, unless_gone
from spmoe.serve.service import Submission

log = logging.getLogger(__name__)


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
