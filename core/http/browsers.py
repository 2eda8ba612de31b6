"""What web pages may ask of a server that has no keys.

Owns the check of `Host`, `Origin` and `Sec-Fetch-Site`: without keys, to reach the server is to be
let in, and a browser reaches it for any page. A page of another site could send it forms, and by
DNS rebinding read its answers under a name of the page's own. With keys a page would need one.
Knows nothing of CORS, which says what such pages may read.
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
from triptych.core.options.config import ServerOptions

_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_PRIVATE_ENDINGS = (".localhost", ".local", ".internal", ".svc", ".lan", ".home.arpa", ".test")
"""No page on the internet has such a name."""


class GuardSites:
    """ASGI middleware: answers 403 to what a page of another site asks, or under a foreign name."""

    def __init__(self, app: ASGIApp, options: ServerOptions, keyring: Keyring) -> None:
        self._app = app
        self._keyring = keyring
        self._names = frozenset(_names(options))
        public = _name_of(options.public_url)
        self._public = {name.lower() for name in options.allowed_host} | ({public} - {""})
        self._origins = frozenset(options.cors_origin)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request in, or refuse it."""
        if scope["type"] == "http" and not self._keyring.has_keys:
            try:
                self._check(scope["method"], Headers(scope=scope))
            except ForeignSite as error:
                await error_answer(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, method: str, headers: Headers) -> None:
        name = _name_of(f"//{headers.get('host', 'localhost')}")
        if not self._is_ours(name):
            raise ForeignSite(
                f"This server has no API keys and is not called {name[:80]!r}: start it with"
                " --allowed-host NAME, or with --api-key, or ask it by its address."
            )
        if method in _READING or "*" in self._origins:
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
                "A page of another site asks this server, which has no API keys: start it with"
                " --cors-origin ORIGIN to let that site in."
            )

    def _is_ours(self, name: str) -> bool:
        """Whether no site can have this name: an address, one without a dot, or an operator's."""
        if name in self._names or "." not in name or name.endswith(_PRIVATE_ENDINGS):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _names(options: ServerOptions) -> Iterable[str]:
    """The names that an operator gives the server."""
    yield options.host.lower()
    yield from (name.lower() for name in options.allowed_host)
    yield from map(_name_of, (options.public_url, *options.cors_origin))


def _name_of(url: str) -> str:
    """The host of a URL, in lower case; nothing where there is none."""
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return url
