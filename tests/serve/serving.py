"""Servers in threads and processes, and waiting for what they do."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import spmoe
from spmoe import AsyncLLM

if TYPE_CHECKING:
    from openai import OpenAI

    from spmoe.serve.service import Service

PATIENCE = 60.0  # seconds until a wait counts as a hang


class RunningServer:
    """A server in a thread."""

    def __init__(self, llm: AsyncLLM, **options: Any) -> None:
        from spmoe.serve.address import bind, url_of
        from spmoe.serve.app import make_app
        from spmoe.serve.config import ServeConfig
        from spmoe.serve.server import Server

        config = ServeConfig(**{"port": 0, "shutdown_timeout": 5.0, **options})
        self.app = make_app(llm, config)
        self.llm = llm
        self.service: Service = self.app.state.service
        self._socket = bind(config)
        self.url = url_of(self._socket)
        self._server = Server(self.app, config)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve([self._socket])))
        self._thread.start()
        wait_until(lambda: self._server.started)

    def client(self, api_key: str = "none", **options: Any) -> OpenAI:
        """Return an OpenAI client."""
        import openai

        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=api_key, **{"max_retries": 0, "timeout": PATIENCE, **options}
        )

    def begin_to_stop(self) -> None:
        """Do what a signal does."""
        self._server.stop()

    def join(self) -> None:
        """Wait for the end of the server."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the server does not end"
        self._socket.close()

    def idle(self) -> bool:
        """Return whether no request runs or waits, in the server and in the engine."""
        return self.service.waiting == 0 and tuple(self.llm.load) == (0, 0)


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until something is true; fail if that seems to hang."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "waited for too long"
        time.sleep(0.01)


@contextmanager
def running(llm: AsyncLLM, **options: Any) -> Iterator[RunningServer]:
    """Run a server for an engine."""
    server = RunningServer(llm, **options)
    try:
        yield server
    finally:
        server.begin_to_stop()
        server.join()


@contextmanager
def serve_process(
    home: Path, *words: str, **environment: str
) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """Run `spmoe serve` in a process; yield it, its URL, and the lines of its standard error."""
    source = str(Path(spmoe.__file__).parents[1])
    started = subprocess.Popen(
        [sys.executable, "-m", "spmoe", "serve", "--port", "0", *words],
        env={**os.environ, "PYTHONPATH": source, "SPMOE_HOME": str(home), **environment},
        stderr=subprocess.PIPE,
        text=True,
    )
    lines: list[str] = []
    ready = threading.Event()

    def read() -> None:
        assert started.stderr is not None
        for line in started.stderr:
            lines.append(line)
            if line.startswith("serving "):
                ready.set()
        ready.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert ready.wait(2 * PATIENCE)
        found = re.search(r"http://\S+:\d+", "".join(lines))
        assert found, "".join(lines)
        yield started, found[0], lines
    finally:
        started.kill()
        started.wait()
        reader.join()
