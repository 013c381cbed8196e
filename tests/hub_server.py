"""A model hub on this machine: the few endpoints that the hub client calls, and the bytes that each file cost."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

COMMIT = "c" * 40  # of every repository, until another one is set


class HubServer:
    """Serves directories as repositories. `served` counts the bytes of every file that was read."""

    def __init__(self) -> None:
        self.repositories: dict[str, Path] = {}
        self.gated: set[str] = set()  # anyone may list their files, but not read them
        self.cards: dict[str, dict[str, Any]] = {}
        self.served: Counter[str] = Counter()
        self.commit = COMMIT
        self.requests = 0
        self.delay = 0.0  # seconds before each file
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """URL of the server."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def _answer(self, *, body: bool) -> None:
        self.hub.requests += 1
        path = unquote(urlsplit(self.path).path).strip("/")
        for name, directory in self.hub.repositories.items():
            files = {str(p.relative_to(directory)): p for p in sorted(directory.rglob("*")) if p.is_file()}
            if path in (f"api/models/{name}", f"api/models/{name}/revision/main"):
                siblings = [_entry(file, p, "rfilename") for file, p in files.items()]
                card = self.hub.cards.get(name)
                return self._send_json(
                    {"id": name, "sha": self.hub.commit, "siblings": siblings, "cardData": card}, body
                )
            if path == f"api/models/{name}/tree/{self.hub.commit}":
                return self._send_json([{"type": "file", **_entry(file, p, "path")} for file, p in files.items()], body)
            for revision in ("main", self.hub.commit):
                prefix = f"{name}/resolve/{revision}/"
                if path.startswith(prefix):
                    if name in self.hub.gated:
                        return self._send(403, b"", {"X-Error-Code": "GatedRepo"}, body)
                    file = path.removeprefix(prefix)
                    if file not in files:
                        return self._send(
                            404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": self.hub.commit}, body
                        )
                    return self._send_file(file, files[file], body)
        return self._send(404, b"", {"X-Error-Code": "RepoNotFound"}, body)

    def _send_file(self, file: str, path: Path, body: bool) -> None:
        data, status, headers = path.read_bytes(), 200, {"ETag": f'"{_etag(path)}"', "X-Repo-Commit": self.hub.commit}
        if (wanted := self.headers.get("Range")) is not None:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            total, data, status = len(data), data[int(first) : int(last or len(data)) + 1], 206
            headers["Content-Range"] = f"bytes {first}-{int(first) + len(data) - 1}/{total}"
        if body:
            time.sleep(self.hub.delay)
            self.hub.served[file] += len(data)
        self._send(status, data, headers, body)

    def _send_json(self, value: Any, body: bool) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"}, body)

    def _send(self, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


def _entry(file: str, path: Path, key: str) -> dict[str, Any]:
    size, digest = path.stat().st_size, _digest(path)
    entry: dict[str, Any] = {key: file, "size": size, "blobId": digest[:40], "oid": digest[:40]}
    if path.suffix == ".safetensors":  # large files are stored apart
        entry["lfs"] = {"size": size, "sha256": digest, "oid": digest, "pointerSize": 130}
    return entry


def _etag(path: Path) -> str:
    return _digest(path) if path.suffix == ".safetensors" else _digest(path)[:40]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def hub_server(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Serve a hub, and point the hub client at it, with its cache in this directory."""
    server = HubServer()
    monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
    template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    try:
        yield server
    finally:
        server.close()
