"""The listening socket, bound before anything slow starts.

Owns binding and the server's URL. Imports no web framework: the supervisor binds the socket and
passes it to the API process.
"""

from __future__ import annotations

import os
import socket

from triptych.core.errors import ConfigError
from triptych.core.http.tls import scheme_of
from triptych.core.options.config import ServerOptions

BACKLOG = 2048


def bind(options: ServerOptions) -> socket.socket:
    """Bind the port. Raises `ConfigError` if it is in use or the address is not local."""
    try:
        family = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((options.host, options.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"Cannot listen on {options.host}:{options.port} ({_reason(error)}):"
            " choose another --host or --port."
        ) from error


def url_of(listener: socket.socket, options: ServerOptions) -> str:
    """Return the URL of `listener`."""
    host, port = listener.getsockname()[:2]
    return f"{scheme_of(options)}://{f'[{host}]' if ':' in host else host}:{port}"


def _reason(error: OSError) -> str:
    """Return the system's message, to which `socket.create_server` appends the address."""
    is_name = isinstance(error, socket.gaierror)
    return str(error.strerror) if is_name or error.errno is None else os.strerror(error.errno)
