"""Protection of a server without API keys against web pages of other sites.

Owns the check of `Host`, `Origin` and `Sec-Fetch-Site`. Without keys, any page in a browser that
reaches the server is let in: a page of another site could post forms to it, and read answers by DNS
rebinding. With keys, a page would need one. Knows nothing of CORS, which decides which answers such
pages may read.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from triptych.core.errors import ForeignSite
from triptych.core.http.auth import Keyring
from triptych.core.http.errors import error_answer
from triptych.core.http.upgrade import asks_for_websocket
from triptych.core.options.config import ServerOptions

_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_PRIVATE_ENDINGS = (".localhost", ".local", ".internal", ".svc", ".lan", ".home.arpa", ".test")
"""Host names that no page on the internet has."""


class GuardSites:
    """ASGI middleware: answers 403 to requests of foreign pages or under unknown host names."""

    def __init__(self, app: ASGIApp, options: ServerOptions, keyring: Keyring) -> None:
        self._app = app
        self._keyring = keyring
        self._names = frozenset(_names(options))
        public = _name_of(options.public_url)
        self._public = {name.lower() for name in options.allowed_host} | ({public} - {""})
        self._origins = frozenset(options.cors_origin)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] == "http" and not self._keyring.has_keys:
            try:
                self._check(_reads(scope), Headers(scope=scope))
            except ForeignSite as error:
                await error_answer(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, reads: bool, headers: Headers) -> None:
        name = _name_of(f"//{headers.get('host', 'localhost')}")
        if not self._is_ours(name):
            raise ForeignSite(
                f"This server has no API keys and does not accept the host name {name[:80]!r}:"
                " start it with --allowed-host NAME or with --api-key, or use its IP address."
            )
        if reads or "*" in self._origins:
            return
        origin = headers.get("origin", "")
        scheme, _, place = origin.partition(":")
        is_page = origin == "null" or scheme.lower() in ("http", "https")
        is_own = place.removeprefix("//") == headers.get("host") or _name_of(origin) in self._public
        is_other = is_page and not is_own
        if is_other and origin in self._origins:
            return
        if is_other or (not origin and headers.get("sec-fetch-site") == "cross-site"):
            raise ForeignSite(
                "A web page of another site called this server, which has no API keys: start it"
                " with --cors-origin ORIGIN to allow that site."
            )

    def _is_ours(self, name: str) -> bool:
        """Whether `name` is an IP address, has no dot, is private, or was set by the operator."""
        if name in self._names or "." not in name or name.endswith(_PRIVATE_ENDINGS):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _reads(scope: Scope) -> bool:
    """Whether a browser keeps the answer from pages of other sites: not that of a WebSocket."""
    return scope["method"] in _READING and not asks_for_websocket(scope["headers"])


def _names(options: ServerOptions) -> Iterable[str]:
    """Yield the host names from the options."""
    yield options.host.lower()
    yield from (name.lower() for name in options.allowed_host)
    yield from map(_name_of, (options.public_url, *options.cors_origin))


def _name_of(url: str) -> str:
    """Return the host of a URL in lower case, or an empty string."""
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return url
