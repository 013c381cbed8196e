"""The address to listen on. Imports no library of the server, so that a wrong one is reported at once."""

from __future__ import annotations

import ipaddress
import socket

from spmoe.errors import UsageError
from spmoe.serve.config import ServeConfig


def bind(config: ServeConfig) -> socket.socket:
    """Return a socket on the address, which does not listen yet; raise UsageError if that is not possible.

    Call this before a model is loaded, which takes long.
    """
    where = f"{config.host}:{config.port}"
    try:
        found = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"host {config.host!r} cannot be found ({error.strerror}); check --host") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except (OSError, OverflowError) as error:
        bound.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot listen on {where} ({reason}); choose another --port or --host") from error
    return bound


def is_loopback(bound: socket.socket) -> bool:
    """Return whether only this machine can reach a socket."""
    return ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback


def url_of(bound: socket.socket) -> str:
    """Return the base URL of a socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if bound.family == socket.AF_INET6 else f"http://{host}:{port}"
