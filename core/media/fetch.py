"""Fetches media that a request references: data URLs and, if allowed, web URLs.

Owns all outgoing requests of the server. Fetching from the network is off unless the operator lists
domains. A URL is parsed once and its host resolved once; all its addresses must be public, and the
connection goes to the checked address, even if the name resolves differently later. Redirects are
not followed, no proxy and no cookie is used, and bytes and time are limited. Never reads files.
Knows no modality.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self
from urllib.parse import SplitResult, unquote_to_bytes, urlsplit

import httpx

from triptych.core.errors import InvalidRequest, PayloadTooLarge
from triptych.core.options.config import ServerOptions

MAX_URL_CHARS: Final = 8192
_PORTS: Final = {"http": 80, "https": 443}
_FETCHED_PORTS: Final = frozenset({80, 443, 8080, 8443})
_HOST: Final = re.compile(r"(?!-)[a-z0-9-]{1,63}(?<!-)(\.(?!-)[a-z0-9-]{1,63}(?<!-))*")
_DATA: Final = re.compile(
    r"data:(?P<type>[\w.+-]+/[\w.+-]+)?(?P<rest>(;[\w.+-]+=[\w.+-]+)*)", re.IGNORECASE
)
_SPACES: Final = b" \t\r\n"
_CHARACTERS: Final = re.compile(r"[!#$%&'()*+,./0-9:;=?@A-Z\[\]_a-z~-]*")
_OK: Final = 200
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")
_SPECIAL: Final = tuple(map(ipaddress.IPv4Network, ("192.0.0.0/24", "192.88.99.0/24")))
"""Reserved for protocols; the standard library calls some of these addresses global."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses of a host and port, as text."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """The content of a URL, and the media type declared by the sender, or empty."""

    data: bytes | bytearray
    media_type: str


async def resolve(host: str, port: int) -> Sequence[str]:
    """The addresses from the system's resolver."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


class MediaFetcher:
    """Fetches for one server. `domains` are the allowed hosts; a `*.` prefix allows subdomains.

    `resolver`, `allows` (checks an address) and `ports` can be replaced in tests.
    """

    def __init__(
        self,
        *,
        domains: Sequence[str],
        max_bytes: int,
        timeout_s: float,
        resolver: Resolver = resolve,
        allows: Callable[[Address], bool] | None = None,
        ports: Collection[int] = _FETCHED_PORTS,
    ) -> None:
        self._domains = tuple(domain.lower().rstrip(".") for domain in domains)
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._resolver = resolver
        self._allows = allows or is_public
        self._ports = ports

    @classmethod
    def from_options(cls, options: ServerOptions) -> Self:
        """A fetcher with the operator's domains and limits."""
        return cls(
            domains=options.media_domains,
            max_bytes=options.max_upload_bytes,
            timeout_s=options.media_timeout_s,
        )

    async def fetch(self, url: str, *, param: str = "url") -> Fetched:
        """Fetch the content of a URL.

        Raises `InvalidRequest` for a URL that is not allowed, not well formed or does not answer in
        time, `PayloadTooLarge` for content over the limit.
        """
        try:
            if url[:5].lower() == "data:":
                return self._read_data(url)
            return await self._read_web(url)
        except (InvalidRequest, PayloadTooLarge) as error:
            error.param = error.param or param
            raise

    def _read_data(self, url: str) -> Fetched:
        head, comma, body = url.partition(",")
        is_base64 = head.endswith(";base64")
        media_type = data_media_type(head if comma else "")
        if len(body) > 4 * (self._max_bytes // 3 + 1):
            raise self._too_large()
        try:
            data = (
                base64.b64decode(plain_base64(body.encode()), validate=True)
                if is_base64
                else unquote_to_bytes(body)
            )
        except (binascii.Error, ValueError) as error:
            raise InvalidRequest("The data URL does not hold base64.") from error
        if len(data) > self._max_bytes:
            raise self._too_large()
        return Fetched(data, media_type)

    async def _read_web(self, url: str) -> Fetched:
        if not self._domains:
            raise InvalidRequest(
                "This server fetches nothing from the network: send a data URL, as in"
                " data:image/png;base64,... (the operator may allow hosts with --media-domains)."
            )
        parts = _parse(url)
        host, port = str(parts.hostname), parts.port or _PORTS[parts.scheme]
        if port not in self._ports:
            raise InvalidRequest(f"Nothing is fetched from port {port}.")
        if not self._is_listed(host):
            raise InvalidRequest(f"This server fetches nothing from {host[:100]}.")
        try:
            async with asyncio.timeout(self._timeout_s):
                address = await self._address_of(host, port)
                return await self._get(parts, host, port, address)
        except TimeoutError as error:
            raise InvalidRequest(
                f"{host[:100]} did not answer within {self._timeout_s:g} s."
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError, OSError) as error:
            raise InvalidRequest(f"{host[:100]} could not be asked.") from error

    def _is_listed(self, host: str) -> bool:
        return any(
            domain in ("*", host) or (domain.startswith("*.") and host.endswith(domain[1:]))
            for domain in self._domains
        )

    async def _address_of(self, host: str, port: int) -> Address:
        """The address to connect to. All addresses of the name must be allowed."""
        try:
            found = [ipaddress.ip_address(text) for text in await self._resolver(host, port)]
        except (OSError, ValueError, UnicodeError) as error:
            raise InvalidRequest(f"{host[:100]} could not be found.") from error
        if not found or not all(self._allows(address) for address in found):
            raise InvalidRequest(f"This server fetches nothing from {host[:100]}.")
        return found[0]

    async def _get(self, parts: SplitResult, host: str, port: int, address: Address) -> Fetched:
        shown = f"[{address}]" if address.version == 6 else str(address)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        named = host if port == _PORTS[parts.scheme] else f"{host}:{port}"
        headers = {"host": named, "accept": "*/*", "accept-encoding": "identity"}
        extensions: dict[str, Any] = {"sni_hostname": host}
        async with (
            httpx.AsyncClient(
                trust_env=False, follow_redirects=False, timeout=self._timeout_s
            ) as client,
            client.stream(
                "GET",
                f"{parts.scheme}://{shown}:{port}{path}",
                headers=headers,
                extensions=extensions,
            ) as reply,
        ):
            if reply.status_code != _OK:
                raise InvalidRequest(
                    f"{host[:100]} returned status {reply.status_code}; redirects are not followed."
                )
            if reply.headers.get("content-encoding", "identity") != "identity":
                raise InvalidRequest(
                    f"{host[:100]} sent a compressed response, which was not requested."
                )
            data = bytearray()
            async for piece in reply.aiter_raw():
                data += piece
                if len(data) > self._max_bytes:
                    raise self._too_large()
        media_type = str(reply.headers.get("content-type", ""))
        return Fetched(bytes(data), media_type.partition(";")[0].strip().lower())

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"A file may have at most {self._max_bytes} bytes.")


def plain_base64(text: bytes) -> bytes:
    """Base64 text without MIME line breaks and URL escapes."""
    plain = text.translate(None, _SPACES)
    return unquote_to_bytes(plain).translate(None, _SPACES) if b"%" in plain else plain


def data_media_type(head: str) -> str:
    """The media type of a data URL, from the part before its comma.

    Raises `InvalidRequest` if that is not well formed.
    """
    match = _DATA.fullmatch(head.removesuffix(";base64"))
    if match is None:
        raise InvalidRequest("The data URL is malformed; the form is data:image/png;base64,...")
    return (match["type"] or "").lower()


def is_public(address: Address) -> bool:
    """Whether an address is public, in any notation."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if inner is not None:
            return is_public(inner)
        if address in _NAT64:
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    if any(address in network for network in _SPECIAL):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def _parse(url: str) -> SplitResult:
    """Split a URL that all parsers read alike. Raises `InvalidRequest` for others."""
    refusal = InvalidRequest("The URL cannot be fetched: it needs http or https, and a host.")
    if len(url) > MAX_URL_CHARS or _CHARACTERS.fullmatch(url) is None:
        raise refusal
    try:
        parts = urlsplit(url)
        is_plain = parts.scheme in _PORTS and parts.port != 0
    except ValueError as error:
        raise refusal from error
    host = parts.hostname or ""
    is_plain = is_plain and not set(parts.netloc) & {"@", "%"}
    if not is_plain or not (_HOST.fullmatch(host) or _is_address(host)):
        raise refusal
    return parts


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
