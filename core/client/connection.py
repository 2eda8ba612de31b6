"""Requests to a server: JSON, forms and streams of events.

Owns the connection, its key, and turning an error's body back into the exception that the server
raised, so that a command ends in the same way as with a model in its own process. Knows no route.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self
from urllib.parse import urlsplit

import httpx
import msgspec

from triptych.core.errors import (
    IGNORED_HEADER,
    ConfigError,
    EngineDown,
    ErrorInfo,
    InternalError,
    TriptychError,
    Unauthorized,
    from_info,
)

_log = logging.getLogger(__name__)
_CONNECT_TIMEOUT_S = 5.0
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
Files = Sequence[tuple[str, tuple[str, bytes]]]
"""Files of a form: a field's name with a file's name and bytes."""


class Connection:
    """A server at `url`. May be used from several threads at once."""

    def __init__(self, url: str, key: str = "") -> None:
        self.url = normalized_url(url)
        parts = urlsplit(self.url)
        is_plain = parts.scheme == "http"
        self._http = httpx.Client(
            base_url=self.url,
            headers={"authorization": f"Bearer {key}"} if key else {},
            # The certificates of authorities take longer to load than all other modules.
            # Those of `SSL_CERT_FILE` count for this machine, too, unlike its proxies.
            verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            if is_plain
            else httpx.create_ssl_context(),
            timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None),
            trust_env=not is_on_this_machine(url),  # never through a proxy
        )

    def get(self, path: str, *, timeout_s: float | None = None) -> Any:
        """Return the JSON of a GET request. Raises the server's error, or `EngineDown`."""
        return self._json("GET", path, timeout=httpx.Timeout(timeout_s, connect=_CONNECT_TIMEOUT_S))

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Return the JSON reply to a JSON body."""
        return self._json("POST", path, json=body)

    def delete(self, path: str) -> Any:
        """Return the JSON reply to a DELETE request."""
        return self._json("DELETE", path)

    def upload(self, path: str, fields: Mapping[str, Any], files: Files) -> bytes:
        """Return the reply to a form with files; list values become repeated fields."""
        return self._read("POST", path, data=fields, files=files)

    def events(
        self, path: str, body: Mapping[str, Any], files: Files = ()
    ) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed reply; a form is sent if there are `files`.

        Leaving the loop early closes the connection, which cancels the request.
        """
        sent: dict[str, Any] = {"data": body, "files": files} if files else {"json": body}
        with self._reported(), self._http.stream("POST", path, **sent) as response:
            _raise_for(response)
            for line in response.iter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                event: dict[str, Any] = msgspec.json.decode(data)
                if "error" in event and event["error"] is not None:
                    raise _error_of(event, 500)
                yield event

    def _json(self, method: str, path: str, **sent: Any) -> Any:
        try:
            return msgspec.json.decode(self._read(method, path, **sent))
        except msgspec.DecodeError as error:
            raise ConfigError(f"{self.url} does not answer as a Triptych server does.") from error

    def _read(self, method: str, path: str, **sent: Any) -> bytes:
        with self._reported():
            response = self._http.request(method, path, **sent)
            _raise_for(response)
            return response.content

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Turn errors of the network into `EngineDown`."""
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            reason = str(error) or "it does not answer"
            raise EngineDown(f"No connection to the server at {self.url}: {reason}.") from error
        except (httpx.TransportError, msgspec.DecodeError) as error:
            raise EngineDown(f"The connection to {self.url} broke off.") from error

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_on_this_machine(url: str) -> bool:
    """Whether a URL names this machine itself."""
    return urlsplit(normalized_url(url)).hostname in _LOOPBACK


def normalized_url(url: str) -> str:
    """Return the base URL of a server. Raises `ConfigError`."""
    whole = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(whole)
        is_url = parts.scheme in ("http", "https") and httpx.URL(whole).host and parts.port != 0
    except (httpx.InvalidURL, ValueError):
        is_url = False
    if not is_url:
        raise ConfigError(f"--server {url}: give a URL, as in http://127.0.0.1:8000.")
    return whole.rstrip("/").removesuffix("/v1")


def is_same_server(one: str, other: str) -> bool:
    """Whether two URLs name one server; on this machine, its port decides."""
    urls = normalized_url(one), normalized_url(other)
    if all(map(is_on_this_machine, urls)):
        return _port(urls[0]) == _port(urls[1])
    return urls[0] == urls[1]


def _port(url: str) -> int:
    parts = urlsplit(url)
    return parts.port or {"http": 80, "https": 443}[parts.scheme]


def _raise_for(response: httpx.Response) -> None:
    if response.is_success:
        if ignored := response.headers.get(IGNORED_HEADER):
            _log.warning("without effect here: %s", ignored)
        return
    content = response.read()
    try:
        body = msgspec.json.decode(content)
    except msgspec.DecodeError:
        body = None
    raise _error_of(body, response.status_code)


def _error_of(body: Any, status: int) -> TriptychError:
    """Return the exception that a server of ours described, or the nearest one to a status."""
    detail = body.get("error") if isinstance(body, dict) else None
    if isinstance(detail, dict) and isinstance(detail.get("code"), str):
        message, param = str(detail.get("message")), detail.get("param")
        return from_info(ErrorInfo(code=detail["code"], message=message, param=param))
    if status in (401, 403):
        return Unauthorized("The server refuses the key: give one with --server-key.")
    reason = body.get("reason") if isinstance(body, dict) else None  # of `/readyz`
    return InternalError(
        f"The server answered with status {status}{f': {reason}' if reason else ''}."
    )
