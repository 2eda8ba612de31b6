"""A server from Python.

Owns the `Server` object: `triptych serve` in processes of its own, from its start until it is
ready, and its end. Knows no model and no route but that of readiness.
"""

from __future__ import annotations

import http.client
import signal
import socket
import ssl
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import msgspec

from triptych.core.errors import ConfigError, SetupError
from triptych.core.http.listener import bind
from triptych.core.http.tls import scheme_of
from triptych.core.options.config import Config
from triptych.core.options.server import ServerOptions
from triptych.core.options.table import Resolved, declared, resolve_keywords, value_of

_POLL_S = 0.1
_STOP_TIMEOUT_S = 60.0
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104 - to connect to
_NUM_SHOWN_LINES = 5


class Server:
    """A server in processes of its own, which ends with the block or with this process.

        with Server("embedded") as server:
            client = OpenAI(base_url=f"{server.url}/v1", api_key="none")

    `models` and the other keywords are those of `triptych serve`; without `port` a free one is
    chosen. The server's log is the file `log`, which is removed at the end.
    """

    def __init__(
        self, models: str | Sequence[str] = (), *, start_timeout_s: float = 1800.0, **options: Any
    ) -> None:
        """Start the server and wait until it is ready.

        Raises `ConfigError` for options before anything starts, and `SetupError` with the server's
        last words if it ends before it is ready, or is not ready in time.
        """
        named = [models] if isinstance(models, str) else list(models)
        given = {"port": _free_port(), "log_format": "text", **options}
        resolved = resolve_keywords({"model": tuple(named), **given})
        _check(resolved.config.server)
        self._config = resolved.config
        self._folder = TemporaryDirectory(prefix="triptych-server-")
        self.log = Path(self._folder.name) / "server.log"
        self._process = self._launch(resolved)
        self._abandoned = weakref.finalize(self, self._process.terminate)
        try:
            self._wait_ready(start_timeout_s)
        except BaseException:  # also Ctrl-C: nothing may keep running without its owner
            self.close()
            raise

    @property
    def url(self) -> str:
        """The server's address, for instance http://127.0.0.1:8000."""
        host, port = _address(self._config)
        return f"{scheme_of(self._config.server)}://{f'[{host}]' if ':' in host else host}:{port}"

    @property
    def pid(self) -> int:
        """The id of its supervising process."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the server's processes run."""
        return self._process.poll() is None

    def close(self) -> None:
        """Let requests in flight end, then end the server. A second call does nothing."""
        if self.is_running:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(self._config.server.drain_timeout_s + _STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._abandoned.detach()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _launch(self, resolved: Resolved) -> subprocess.Popen[bytes]:
        """Start the command; options are in a private file, since some are secrets."""
        options = {
            name: value_of(resolved.config, option)
            for name, option in declared().items()
            if name in resolved.explicit and value_of(resolved.config, option) != ()
        }
        file = Path(self._folder.name) / "options.yaml"
        file.touch(mode=0o600)
        file.write_bytes(msgspec.json.encode(options))
        command = (sys.executable, "-m", "triptych", "serve", "--config-file", str(file))
        with self.log.open("wb") as log:
            nothing = subprocess.DEVNULL
            return subprocess.Popen(command, stdin=nothing, stdout=log, stderr=log)  # noqa: S603 - our own

    def _wait_ready(self, timeout_s: float) -> None:
        give_up_s = time.monotonic() + timeout_s
        while not (self._is_ready() and self.is_running):
            if not self.is_running:
                raise SetupError(f"The server ended before it was ready. {self._last_words()}")
            if time.monotonic() > give_up_s:
                raise SetupError(
                    f"The server was not ready after {timeout_s:g} s. {self._last_words()}"
                )
            time.sleep(_POLL_S)

    def _is_ready(self) -> bool:
        host, port = _address(self._config)
        connection = (
            http.client.HTTPSConnection(host, port, timeout=5, context=_unverified())
            if scheme_of(self._config.server) == "https"
            else http.client.HTTPConnection(host, port, timeout=5)
        )
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _last_words(self) -> str:
        lines = self.log.read_text("utf-8", "replace").strip().splitlines()
        return " ".join(lines[-_NUM_SHOWN_LINES:])


def _check(server: ServerOptions) -> None:
    """Raise `ConfigError` for options by which readiness cannot be seen, or a port in use."""
    if server.headless:
        raise ConfigError("headless is for engines without HTTP; start them with the command.")
    if server.ssl_cert_reqs:
        raise ConfigError("ssl_cert_reqs asks for clients' certificates; start with the command.")
    bind(server).close()  # another server may answer there


def _address(config: Config) -> tuple[str, int]:
    """Where this process reaches the server."""
    server = config.server
    return _ANY_HOST.get(server.host, server.host), server.port


def _unverified() -> ssl.SSLContext:
    """For the readiness of one's own server, whose certificate may name another host."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
