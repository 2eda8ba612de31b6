"""Addresses of engines with a role: `HOST:PORT`, or `unix:PATH` on one host.

Owns opening sockets on such an address, and the shared secret. Knows no messages.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from triptych.core.errors import ConfigError

_UNIX = "unix:"
_PREFILL_FLAG = "--prefill-address"
_BACKLOG = 64
_LEAST_SECRET_BYTES = 16
_MAX_SECRET_BYTES = 4096


@dataclass(frozen=True, slots=True)
class PageAddress:
    """A TCP address, or the path of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""
    flag: str = _PREFILL_FLAG

    @classmethod
    def parse(cls, text: str, flag: str = _PREFILL_FLAG) -> Self:
        """Parse `text`, the value of the option `flag`. Raises `ConfigError`."""
        if text.startswith(_UNIX) and len(text) > len(_UNIX):
            return cls(path=text.removeprefix(_UNIX), flag=flag)
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise ConfigError(
                f"{flag} {text}: write HOST:PORT, or unix:PATH for a socket on this host."
            )
        return cls(host=host.strip("[]"), port=int(port), flag=flag)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{_UNIX}{self.path}" if self.path else f"{host}:{self.port}"

    def listen(self) -> socket.socket:
        """A listening socket. Raises `ConfigError` if the address cannot be bound."""
        try:
            listener = self._listen_unix() if self.path else self._listen()
        except OSError as error:
            raise ConfigError(
                f"{self.flag} {self}: cannot listen ({error.strerror or error}); an engine with"
                " this role serves one model and needs its own address."
            ) from error
        listener.setblocking(False)
        return listener

    async def connect(self) -> socket.socket:
        """A connected non-blocking socket. Raises `OSError`."""
        if self.path:
            return await _connect(socket.AF_UNIX, self.path)
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        for family, _, _, _, target in found[:-1]:  # a name may resolve to both families
            with suppress(OSError):
                return await _connect(family, target)
        family, _, _, _, target = found[-1]
        return await _connect(family, target)

    def unlink(self) -> None:
        """Remove the file of a Unix socket, while it still listens."""
        if self.path:
            with suppress(OSError):
                os.unlink(self.path)

    def _listen(self) -> socket.socket:
        found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
        return socket.create_server((self.host, self.port), family=found[0], backlog=_BACKLOG)

    def _listen_unix(self) -> socket.socket:
        """Replaces the socket file of a killed server; only this user may connect."""
        probe = socket.socket(socket.AF_UNIX)
        with probe, suppress(FileNotFoundError, ConnectionRefusedError):
            probe.connect(self.path)
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        with suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.lstat(self.path).st_mode):
                os.unlink(self.path)
        listener = socket.socket(socket.AF_UNIX)
        umask = os.umask(0o177)
        try:
            listener.bind(self.path)
            listener.listen(_BACKLOG)
        except BaseException:
            listener.close()
            raise
        finally:
            os.umask(umask)
        return listener


async def _connect(family: int, target: object) -> socket.socket:
    opened = socket.socket(family)
    try:
        opened.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(opened, target)  # type: ignore[arg-type]  # tuple or path
    except BaseException:
        opened.close()
        raise
    set_tcp_options(opened)
    return opened


def set_tcp_options(connected: socket.socket) -> None:
    """Disable Nagle's algorithm and enable keep-alive on a TCP socket."""
    if connected.family != socket.AF_UNIX:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def read_secret(file: str) -> bytes:
    """Read the engines' shared secret. Raises `ConfigError`."""
    try:
        with Path(file).expanduser().open("rb") as opened:
            secret = opened.read(_MAX_SECRET_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(f"--pipeline-key-file {file}: {error.strerror}.") from error
    if not _LEAST_SECRET_BYTES <= len(secret) <= _MAX_SECRET_BYTES:
        raise ConfigError(
            f"--pipeline-key-file {file}: a secret has {_LEAST_SECRET_BYTES} to"
            f" {_MAX_SECRET_BYTES} bytes; `openssl rand -hex 32` makes one."
        )
    return secret
