"""Running the application: uvicorn, signals and the end of the server."""

from __future__ import annotations

import asyncio
import math
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from spmoe.serve.config import ServeConfig
from spmoe.serve.http import ApiError, error_response

_HEADER_SECONDS = 60.0  # from the beginning of a connection, or the last response, to the end of a request's headers
_EXTRA_SECONDS = 5  # for clients to read the errors of requests that were ended; then connections are closed


class Stoppable(Protocol):
    """Requests under way, as the server ends them: `state.service` of an application."""

    draining: asyncio.Event  # requests under way go on, new ones are refused

    async def abort_all(self) -> None:
        """End all requests; their clients get an error."""
        ...

    def close(self) -> None:
        """Release threads."""
        ...


class _Protocol(H11Protocol):
    """uvicorn's HTTP/1.1, with errors in OpenAI's shape.

    It also closes connections whose next request does not begin in time.
    """

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_request()

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # else the answer has begun, before the whole body
            error = error_response(ApiError(400, msg, headers={"Connection": "close"}))
            for part in (
                h11.Response(status_code=400, headers=error.raw_headers, reason=b"Bad Request"),
                h11.Data(data=bytes(error.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(part))
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def _await_request(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(_HEADER_SECONDS, self._close_without_request)

    def _close_without_request(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


class Server(uvicorn.Server):
    """uvicorn that ends with exit code 0 after SIGTERM or SIGINT, once requests under way are answered.

    The first signal stops accepting. After the shutdown timeout, or at the second signal, requests end with an error.
    """

    def __init__(self, app: FastAPI, config: ServeConfig, *, access_log: bool = False) -> None:
        timeout = int(config.shutdown_timeout) + _EXTRA_SECONDS
        super().__init__(
            uvicorn.Config(
                app,
                http=_Protocol,  # httptools loses the body of requests that offer HTTP/2, as Java's client does
                ws="none",
                log_config=None,
                log_level="info" if access_log else "warning",
                access_log=access_log,
                server_header=False,
                lifespan="off",
                timeout_keep_alive=math.ceil(_HEADER_SECONDS),  # connection pools of clients expect more than 5 s
                timeout_graceful_shutdown=timeout,
            )
        )
        self._service: Stoppable = app.state.service
        self._timeout = config.shutdown_timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until `stop` is called or a signal comes."""
        self._loop = asyncio.get_running_loop()
        with self._signals(self._loop):
            try:
                await self._serve(sockets)
            finally:
                if self._ending is not None:
                    self._ending.cancel()
                self._service.close()

    def stop(self) -> None:
        """Stop accepting, and end when requests under way are answered; callable from any thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._begin_to_end)

    @contextmanager
    def _signals(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Let signals stop the server, where this is the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            loop.add_signal_handler(number, self._begin_to_end)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _begin_to_end(self) -> None:
        first = not self._service.draining.is_set()
        self._service.draining.set()
        self.should_exit = True
        if self._ending is not None:
            self._ending.cancel()
        self._ending = asyncio.ensure_future(self._end_requests(self._timeout if first else 0.0))

    async def _end_requests(self, delay: float) -> None:
        """End requests after a delay, and again later: one that was being prepared may have started since."""
        await asyncio.sleep(delay)
        while True:
            await self._service.abort_all()
            await asyncio.sleep(0.1)


def serve(
    app: FastAPI, config: ServeConfig, bound: socket.socket, *, access_log: bool, ready: Callable[[], None]
) -> None:
    """Serve on a bound socket until a signal comes; call `ready` when requests are accepted."""

    async def run() -> None:
        server = Server(app, config, access_log=access_log)
        waiting = asyncio.ensure_future(_announce(server, ready))
        try:
            await server.serve([bound])
        finally:
            waiting.cancel()

    asyncio.run(run())


async def _announce(server: Server, ready: Callable[[], None]) -> None:
    while not server.started:
        await asyncio.sleep(0.01)
    ready()
