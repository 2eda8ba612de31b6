"""Authentication by API keys, and the routes that need none.

Owns the frozen set of public routes; every other method and path needs a key once keys are
configured, whether or not it exists. Keys are kept as digests, and a request is compared with all
of them in constant time. Knows no route's work.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import secrets
from collections.abc import Iterable, Set
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from triptych.core.engine_api.caller import Principal
from triptych.core.errors import ConfigError, Unauthorized
from triptych.core.http.errors import error_answer
from triptych.core.http.upgrade import asks_for_websocket, offered_subprotocols
from triptych.core.options.config import ServerOptions

PUBLIC_ROUTES = frozenset(
    itertools.product(
        ("GET", "HEAD"), ("/livez", "/readyz", "/health", "/v1/health", "/ping", "/version")
    )
)
"""Routes that need no key, in addition to the page. `/metrics` shows other callers' activity and is
not public."""


OWN_PRINCIPAL = "triptych.principal"
"""Scope key of the caller on whose behalf the server sends a request to itself. Clients cannot set
it."""

KEY_SUBPROTOCOL = "openai-insecure-api-key."
"""Prefix of the key among the subprotocols that OpenAI's browser clients offer."""


class Keyring:
    """The accepted API keys. Without keys, all requests are accepted as one caller."""

    def __init__(
        self,
        keys: Iterable[str],
        *,
        admin_keys: Iterable[str] = (),
        is_cache_shared: bool = False,
        salt: bytes = b"",
    ) -> None:
        self._admins = frozenset(map(_digest, admin_keys))
        self._digests = tuple(dict.fromkeys([*map(_digest, keys), *self._admins]))
        self._salt = salt or secrets.token_bytes(32)
        self._is_cache_shared = is_cache_shared

    @classmethod
    def from_options(cls, options: ServerOptions, salt: bytes = b"") -> Keyring:
        """Read the keys of the options; tenants have the same names wherever `salt` is the same.

        Raises `ConfigError`.
        """
        return cls(
            _configured(options),
            admin_keys=options.admin_key,
            is_cache_shared=options.share_prefix_across_keys,
            salt=salt,
        )

    @property
    def has_keys(self) -> bool:
        """Whether a request needs a key."""
        return bool(self._digests)

    def principal_of(self, owner: str) -> Principal | None:
        """Return the caller with the id `owner`; `None` if its key is no longer accepted."""
        if not self._digests:
            return Principal() if owner == Principal().owner else None
        found = (digest for digest in self._digests if _owner(digest) == owner)
        return next(map(self._principal, found), None)

    def identify(self, authorization: str) -> Principal:
        """Return the caller of an `Authorization` header. Raises `Unauthorized`."""
        if not self._digests:
            return Principal(is_admin=True)
        scheme, _, key = authorization.partition(" ")
        given = _digest(key.strip())
        is_known = False
        for digest in self._digests:
            is_known |= hmac.compare_digest(digest, given)
        if not is_known or scheme.lower() != "bearer":
            raise Unauthorized(
                "Wrong or missing API key: send it as 'Authorization: Bearer <key>' or as"
                " 'x-api-key: <key>'."
            )
        return self._principal(given)

    def _principal(self, digest: bytes) -> Principal:
        tenant = hmac.new(self._salt, digest, hashlib.sha256).hexdigest()[:32]
        return Principal(
            key=tenant[:12],
            tenant="" if self._is_cache_shared else tenant,
            owner=_owner(digest),
            is_admin=digest in self._admins,
        )


class RequireKey:
    """ASGI middleware: sets `principal` in `scope["state"]`, or answers 401.

    It also sets `is_public` (the route needs no key) and `has_key` (the caller's key is valid).
    Only the raw path of the request line decides: a `Host` header that changes the URL cannot turn
    a private route into a public one.
    """

    def __init__(
        self, app: ASGIApp, keyring: Keyring, public: Set[tuple[str, str]] = PUBLIC_ROUTES
    ) -> None:
        self._app = app
        self._keyring = keyring
        self._public = public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] == "http":
            state = scope["state"]
            state["is_public"] = (scope["method"], scope["path"]) in self._public
            try:
                own: Principal | None = scope.get(OWN_PRINCIPAL)
                state["principal"] = own or self._keyring.identify(_authorization(scope))
                state["has_key"] = True
            except Unauthorized as error:
                state["has_key"] = False
                if not state["is_public"]:
                    await error_answer(error, scope)(scope, receive, send)
                    return
        await self._app(scope, receive, send)


def _authorization(scope: Scope) -> str:
    """Return the `Authorization` header; some clients send the bare key as `x-api-key`.

    Browsers cannot set headers of a WebSocket, and send the key as one of its subprotocols.
    """
    headers = Headers(scope=scope)
    bare = headers.get("x-api-key", "") or _subprotocol_key(scope)
    return headers.get("authorization") or f"Bearer {bare}"


def _subprotocol_key(scope: Scope) -> str:
    if not asks_for_websocket(scope["headers"]):
        return ""
    names = offered_subprotocols(scope)
    found = (name for name in names if name.startswith(KEY_SUBPROTOCOL))
    return next(found, "").removeprefix(KEY_SUBPROTOCOL)


def owners(options: ServerOptions) -> list[str]:
    """Return the owner ids of the configured keys, in order; one id without keys.

    Raises `ConfigError`.
    """
    return [_owner(_digest(key)) for key in _configured(options)] or [Principal().owner]


def _owner(digest: bytes) -> str:
    return hmac.new(digest, b"owner", hashlib.sha256).hexdigest()[:32]


def _configured(options: ServerOptions) -> list[str]:
    keys = [*options.api_key, *_read_keys(options.api_key_file), *options.admin_key]
    if any(not key.strip() for key in keys):
        raise ConfigError("an API key must not be empty.")
    return keys


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _read_keys(file: str) -> list[str]:
    if not file:
        return []
    try:
        lines = Path(file).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file: {file} cannot be read.") from error
    keys = [key for line in lines if (key := line.strip()) and not key.startswith("#")]
    if not keys:  # an empty file must not open the server to everyone
        raise ConfigError(f"--api-key-file: {file} contains no key.")
    return keys
