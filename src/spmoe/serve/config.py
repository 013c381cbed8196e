"""Options of the server, and a check for the libraries that it needs. Imports none of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec

from spmoe.config import Size
from spmoe.errors import UsageError, suggestion

TOOL_CALL_PARSERS = ("hermes", "gpt-oss")
DEFAULT_MODEL_NAME = "spmoe-pair"  # of the pair that ships with the package
_LIBRARIES = {"serve": ("fastapi", "uvicorn", "prometheus_client"), "ray": ("ray",)}  # by extra


def require_extra(extra: str) -> None:
    """Raise UsageError unless the libraries of an extra, `serve` or `ray`, are installed."""
    if missing := [name for name in _LIBRARIES[extra] if find_spec(name) is None]:
        what = "the server" if extra == "serve" else "--ray-replicas"
        raise UsageError(
            f"{what} needs {', '.join(missing)}, not installed here; install with pip install 'spmoe[{extra}]'"
        )


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Options of the server. The engine has its own, `EngineConfig`."""

    served_model_names: tuple[str, ...] = (DEFAULT_MODEL_NAME,)  # the first one is in responses
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # none: every client is served
    allowed_origins: tuple[str, ...] = ()  # of web pages, for CORS; "*": all
    max_queued_requests: int = 256  # completions that wait for their first step
    max_body_size: int = 8 * 2**20  # bytes
    shutdown_timeout: float = 30.0  # seconds for requests under way, after SIGTERM or SIGINT
    tool_call_parser: str | None = None

    def __post_init__(self) -> None:
        if not self.served_model_names or not all(self.served_model_names):
            raise UsageError("served_model_name must not be empty; give a name")
        if not 0 <= self.port <= 65535:
            raise UsageError(f"port must be from 0 (any free one) to 65535, not {self.port}")
        if not all(key and key.isascii() and key.isprintable() and " " not in key for key in self.api_keys):
            raise UsageError("api_key must be printable ASCII characters without spaces; choose another key")
        if self.max_queued_requests < 1:
            raise UsageError(f"max_queued_requests must be at least 1, not {self.max_queued_requests}")
        if self.max_body_size < 1:
            raise UsageError(f"max_body_size must be at least 1 byte, not {self.max_body_size}")
        if not 0 <= self.shutdown_timeout < float("inf"):
            raise UsageError(f"shutdown_timeout must be 0 seconds or more, not {self.shutdown_timeout}")
        if self.tool_call_parser not in (None, *TOOL_CALL_PARSERS):
            wrong = self.tool_call_parser
            found = f"{wrong!r}{suggestion(wrong, TOOL_CALL_PARSERS)}"
            raise UsageError(f"tool_call_parser must be one of {', '.join(TOOL_CALL_PARSERS)}, not {found}")


def parse_body_size(text: str) -> int:
    """Return a size such as 8MiB in bytes."""
    size = Size.parse(text)
    if size.bytes is None:
        raise UsageError(f"max_body_size must be a size such as 8MiB, not {text!r}")
    return size.bytes
