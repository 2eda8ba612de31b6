"""Nothing leaves the server but what the operator allows, and that only to public addresses."""

from __future__ import annotations

import base64
import ipaddress
import socket
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote

import pytest

from triptych.core.errors import InvalidRequest, PayloadTooLarge
from triptych.core.media.fetch import Fetched, MediaFetcher, is_public

IMAGE = b"\x89PNG and so on"


class Canary(BaseHTTPRequestHandler):
    """Counts who comes."""

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, CanaryServer)
        server.hits.append((self.path, self.headers["host"]))
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("location", f"http://127.0.0.1:{server.server_port}/")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("content-type", "image/PNG; charset=x")
        if self.path == "/packed":
            self.send_header("content-encoding", "gzip")
        self.end_headers()
        if self.path == "/slow":
            server.is_closing.wait(30)
        self.wfile.write(IMAGE * (1000 if self.path == "/large" else 1))

    def log_message(self, *_: object) -> None:
        """Silence."""


class CanaryServer(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Canary)
        self.hits: list[tuple[str, str]] = []
        self.is_closing = threading.Event()


@pytest.fixture
def canary() -> Iterator[CanaryServer]:
    with CanaryServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.is_closing.set()
        server.shutdown()
        thread.join()


class Names:
    """A resolver that gives each answer once, and the last one for good."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def fetcher(canary: CanaryServer, names: Names, *domains: str, **given: object) -> MediaFetcher:
    options: dict[str, object] = {"max_bytes": 1000, "timeout_s": 20.0, **given}
    return MediaFetcher(
        domains=domains or ("*",),
        resolver=names,
        ports={canary.server_port, 80, 443},
        **options,  # type: ignore[arg-type]
    )


def open_to_all(_: object) -> bool:
    return True


# What goes where.


async def test_an_allowed_host_is_asked_by_its_name_at_the_address_that_was_checked(
    canary: CanaryServer,
) -> None:
    names = Names(["127.0.0.1"], ["10.0.0.1"])
    fetch = fetcher(canary, names, "pictures.example", allows=open_to_all)
    url = f"http://pictures.example:{canary.server_port}/a.png?b=%20c#d"
    assert await fetch.fetch(url) == Fetched(IMAGE, "image/png")
    assert names.asked == ["pictures.example"], "resolved once"
    assert canary.hits == [("/a.png?b=%20c", f"pictures.example:{canary.server_port}")]


INNER = [
    "127.0.0.1", "127.8.9.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254",
    "100.64.0.1", "0.0.0.0", "192.0.0.8", "198.18.0.1", "224.0.0.1", "240.0.0.1",
    "255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "fd00:ec2::254", "ff02::1",
    "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe",
    "2002:7f00:1::", "2001:db8::1",
]  # fmt: skip


@pytest.mark.parametrize("address", INNER)
async def test_no_name_leads_inside(address: str, canary: CanaryServer) -> None:
    assert not is_public(ipaddress.ip_address(address))
    for answer in ([address], ["93.184.216.34", address]):
        with pytest.raises(InvalidRequest, match="fetches nothing from"):
            await fetcher(canary, Names(answer)).fetch("http://harmless.example/")
    assert canary.hits == []


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1::1", "64:ff9b::808:808"])
def test_the_open_network_is_public(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


LITERALS = [
    "http://127.0.0.1:{port}/", "http://localhost:{port}/", "http://127.1:{port}/",
    "http://0x7f000001:{port}/", "http://2130706433:{port}/", "http://017700000001:{port}/",
    "http://0:{port}/", "http://[::1]:{port}/", "http://[::ffff:127.0.0.1]:{port}/",
    "http://[::ffff:7f00:1]:{port}/", "http://localhost.:{port}/", "http://LOCALHOST:{port}/",
    "http://169.254.169.254/latest/meta-data/",
]  # fmt: skip


@pytest.mark.parametrize("url", LITERALS)
async def test_no_way_of_writing_an_inner_address_gets_through(
    url: str, canary: CanaryServer
) -> None:
    fetch = MediaFetcher(
        domains=("*",), max_bytes=1000, timeout_s=2.0, ports={canary.server_port, 80}
    )
    with pytest.raises(InvalidRequest):
        await fetch.fetch(url.format(port=canary.server_port))
    assert canary.hits == []


MALFORMED = [
    "file:///etc/passwd", "ftp://host.example/", "gopher://host.example/", "//host.example/",
    "http:/host.example", "http://", "http:///x", "host.example", "", "javascript:alert(1)",
    "http://good.example\\@evil.example/", "http://good.example@evil.example/",
    "http://evil.example#@good.example\\", "http://user:key@good.example/",
    "http://good.example%2f@evil.example/", "http://good%00.example/", "http://good.example\t/",
    "http://good.example/\r\nHost: evil.example", "http://good.example:99999/",
    "http://good.example:0/", "http://good.example:x/", "http://-good.example/",
    "http://good..example/", "http://[::1", "http://[fe80::1%25eth0]/", "http://exämple.test/",
    "http://" + "a" * 9000 + ".example/", "HTTP ://good.example/", " http://good.example/",
    "http://good.example/{x}", "http://①②⑦.0.0.1/",
]  # fmt: skip


@pytest.mark.parametrize("url", MALFORMED)
async def test_a_url_that_parsers_could_read_differently_is_refused(
    url: str, canary: CanaryServer
) -> None:
    names = Names(["127.0.0.1"])
    with pytest.raises(InvalidRequest):
        await fetcher(canary, names, allows=open_to_all).fetch(url)
    assert names.asked == []


async def test_a_port_of_another_service_is_not_asked(canary: CanaryServer) -> None:
    names = Names(["93.184.216.34"])
    with pytest.raises(InvalidRequest, match="port 6379"):
        await fetcher(canary, names).fetch("http://good.example:6379/")
    assert names.asked == []


@pytest.mark.parametrize(
    ("domains", "host", "is_allowed"),
    [
        (("good.example",), "good.example", True),
        (("good.example",), "GOOD.example", True),
        (("good.example",), "a.good.example", False),
        (("good.example",), "notgood.example", False),
        (("*.good.example",), "a.good.example", True),
        (("*.good.example",), "good.example", False),
        (("*.good.example",), "notgood.example", False),
        (("*",), "any.example", True),
    ],
)
async def test_only_listed_hosts_are_asked(
    domains: tuple[str, ...], host: str, is_allowed: bool, canary: CanaryServer
) -> None:
    names = Names(["127.0.0.1"])
    fetch = fetcher(canary, names, *domains, allows=open_to_all)
    url = f"http://{host}:{canary.server_port}/"
    if is_allowed:
        assert (await fetch.fetch(url)).data == IMAGE
    else:
        with pytest.raises(InvalidRequest, match="fetches nothing from"):
            await fetch.fetch(url)
        assert names.asked == []


async def test_with_no_domain_nothing_is_even_resolved() -> None:
    names = Names(["93.184.216.34"])
    fetch = MediaFetcher(domains=(), max_bytes=9, timeout_s=1.0, resolver=names)
    with pytest.raises(InvalidRequest, match="--media-domains"):
        await fetch.fetch("https://good.example/")
    assert names.asked == []


# What comes back.


@pytest.mark.parametrize(
    ("path", "complaint"),
    [("/moved", "redirects are not followed"), ("/packed", "compressed"), ("/slow", "within")],
)
async def test_answers_that_are_no_file_are_refused(
    path: str, complaint: str, canary: CanaryServer
) -> None:
    timeout_s = 2.0 if path == "/slow" else 20.0
    fetch = fetcher(canary, Names(["127.0.0.1"]), allows=open_to_all, timeout_s=timeout_s)
    with pytest.raises(InvalidRequest, match=complaint) as caught:
        await fetch.fetch(f"http://good.example:{canary.server_port}{path}", param="image_url")
    assert caught.value.param == "image_url"
    assert [hit for hit, _ in canary.hits] == [path]


async def test_a_file_over_the_cap_is_dropped_on_the_way(canary: CanaryServer) -> None:
    fetch = fetcher(canary, Names(["127.0.0.1"]), allows=open_to_all)
    with pytest.raises(PayloadTooLarge):
        await fetch.fetch(f"http://good.example:{canary.server_port}/large")


async def test_a_host_that_is_not_there_is_the_callers_error(canary: CanaryServer) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        fetch = MediaFetcher(
            domains=("*",),
            max_bytes=9,
            timeout_s=2.0,
            resolver=Names(["127.0.0.1"]),
            allows=open_to_all,
            ports={free.getsockname()[1]},
        )
        with pytest.raises(InvalidRequest, match="could not be asked"):
            await fetch.fetch(f"http://good.example:{free.getsockname()[1]}/")


# Data URLs.


def data_fetcher(max_bytes: int = 100) -> MediaFetcher:
    return MediaFetcher(domains=(), max_bytes=max_bytes, timeout_s=1.0)


async def test_data_urls_need_no_network() -> None:
    encoded = base64.b64encode(IMAGE).decode()
    lines = base64.encodebytes(IMAGE).decode()
    for body in (lines, lines.replace("\n", "\r\n"), lines.replace("\n", "%0A"), quote(encoded)):
        assert (await data_fetcher().fetch(f"data:;base64,{body}")).data == IMAGE
    for head in ("data:image/png;base64", "DATA:image/PNG;name=a;base64"):
        assert await data_fetcher().fetch(f"{head},{encoded}") == Fetched(IMAGE, "image/png")
    assert await data_fetcher().fetch("data:,a%20b") == Fetched(b"a b", "")


@pytest.mark.parametrize(
    "url",
    ["data:image/png;base64", "data:image/png;base64,#", "data:image;base64,AA==", "data:a b,c"],
)
async def test_damaged_data_urls_are_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="data URL"):
        await data_fetcher().fetch(url)


async def test_data_urls_are_capped_before_they_are_decoded() -> None:
    encoded = base64.b64encode(bytes(101)).decode()
    with pytest.raises(PayloadTooLarge):
        await data_fetcher().fetch(f"data:;base64,{encoded}")
    exact = base64.b64encode(bytes(100)).decode()
    assert len((await data_fetcher().fetch(f"data:;base64,{exact}")).data) == 100
