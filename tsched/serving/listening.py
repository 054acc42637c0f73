"""The socket that a server listens on. Loads next to nothing: a port in use is said before anything else is begun."""

from __future__ import annotations

import resource
import socket

from tsched.torch_free import TKernelsError

BACKLOG = 2048
"""Connections that wait to be taken."""


class ServerStartError(TKernelsError, RuntimeError):
    """The server could not start; the message says why."""


def open_socket(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes a free one.

    Raises:
        ServerStartError: The port is in use, or the host is none of this machine.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ServerStartError(f"cannot listen at {host}:{port}: {reason}") from error
    listening.setblocking(False)
    return listening


def allow_all_files() -> None:
    """Lets this process have as many open files as it ever may, for each connection is one; shells give it 1,024."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
