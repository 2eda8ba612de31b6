"""HTTPS with a certificate made here: what is served, what is refused, what a start prints."""

from __future__ import annotations

import ssl
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from support.http import ANSWER, FakeEngine, chat, connect, documents, live, make_app, read_all
from support.serve_process import Server, eventually, write_model
from triptych.core.client.connection import Connection
from triptych.core.errors import ConfigError, EngineDown
from triptych.core.http.tls import tls_context
from triptych.core.options.config import ServerOptions


@dataclass(frozen=True)
class Files:
    """A server's certificate and key, a client's, and the authority that both trust."""

    folder: Path

    @property
    def options(self) -> dict[str, str]:
        return {
            "ssl_certfile": str(self.folder / "server.pem"),
            "ssl_keyfile": str(self.folder / "server.key"),
        }

    def trusting(self, *, has_certificate: bool = False) -> ssl.SSLContext:
        """The context of a client that trusts the authority."""
        context = ssl.create_default_context(cafile=str(self.folder / "ca.pem"))
        if has_certificate:
            context.load_cert_chain(self.folder / "client.pem")
        return context


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("tls")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    certificate.cert_chain_pems[0].write_to_path(folder / "server.pem")
    certificate.private_key_pem.write_to_path(folder / "server.key")
    authority.issue_cert("a@client").private_key_and_cert_chain_pem.write_to_path(
        folder / "client.pem"
    )
    authority.issue_cert("other").private_key_pem.write_to_path(folder / "other.key")
    key = serialization.load_pem_private_key(certificate.private_key_pem.bytes(), None)
    encrypted = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"s3cret"),
    )
    (folder / "encrypted.key").write_bytes(encrypted)
    (folder / "empty.pem").touch()
    return Files(folder)


def test_https_answers_and_streams(files: Files, tmp_path: Path) -> None:
    with live(make_app(tmp_path, FakeEngine(), **files.options)) as server:
        assert server.url.startswith("https://127.0.0.1:")
        with httpx.Client(base_url=server.url, verify=files.trusting()) as client:
            assert client.get("/livez").status_code == 200
            reply = client.post("/v1/chat/completions", json=chat(stream=True))
    *chunks, end = documents(reply.text)
    texts = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
    assert ("".join(texts), end) == (ANSWER, "[DONE]")


def test_commands_trust_the_authority_of_the_environment(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with live(make_app(tmp_path, FakeEngine(), **files.options)) as server:
        with closing(Connection(server.url)) as stranger, pytest.raises(EngineDown):
            stranger.get("/version")
        monkeypatch.setenv("SSL_CERT_FILE", str(files.folder / "ca.pem"))
        with closing(Connection(server.url)) as connection:
            assert connection.get("/version")["name"] == "triptych"


def test_a_refusal_before_the_app_arrives(files: Files, tmp_path: Path) -> None:
    with live(make_app(tmp_path, FakeEngine(), **files.options)) as server:
        headers = {"x-long": "x" * 70_000}
        reply = httpx.get(f"{server.url}/livez", headers=headers, verify=files.trusting())
    assert reply.status_code == 431


def test_plain_http_gets_no_answer(files: Files, tmp_path: Path) -> None:
    with (
        live(make_app(tmp_path, FakeEngine(), **files.options)) as server,
        connect(server) as sock,
    ):
        sock.sendall(b"GET /livez HTTP/1.1\r\nHost: t\r\n\r\n")
        assert b"HTTP/1.1" not in read_all(sock)


def test_a_client_certificate_may_be_required(files: Files, tmp_path: Path) -> None:
    demand = {"ssl_ca_certs": str(files.folder / "ca.pem"), "ssl_cert_reqs": 2}
    with live(make_app(tmp_path, FakeEngine(), **files.options, **demand)) as server:
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.url}/livez", verify=files.trusting())
        known = files.trusting(has_certificate=True)
        assert httpx.get(f"{server.url}/livez", verify=known).status_code == 200


@pytest.mark.parametrize(
    ("certificate", "key", "password", "message"),
    [
        ("none.pem", "server.key", "", "--ssl-certfile .*none.pem: cannot be read"),
        ("server.pem", "none.key", "", "--ssl-keyfile .*none.key: cannot be read"),
        ("server.pem", "other.key", "", "is not the key of the certificate"),
        ("server.pem", "encrypted.key", "", "set --ssl-keyfile-password"),
        ("server.pem", "encrypted.key", "wrong", "set --ssl-keyfile-password"),
        ("empty.pem", "server.key", "", "do not hold a certificate and its private key"),
        ("server.pem", "", "", "do not hold a certificate and its private key"),
    ],
)
def test_files_that_cannot_be_used_are_one_actionable_line(
    files: Files, certificate: str, key: str, password: str, message: str
) -> None:
    options = ServerOptions(
        ssl_certfile=str(files.folder / certificate),
        ssl_keyfile=str(files.folder / key) if key else "",
        ssl_keyfile_password=password,
    )
    with pytest.raises(ConfigError, match=message) as caught:
        tls_context(options)
    assert "\n" not in caught.value.message


def test_authorities_that_cannot_be_read(files: Files) -> None:
    wrong = ServerOptions(**files.options, ssl_ca_certs=str(files.folder / "empty.pem"))
    with pytest.raises(ConfigError, match="--ssl-ca-certs holds no certificates"):
        tls_context(wrong)


def test_an_encrypted_key_and_a_key_beside_its_certificate(files: Files, tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    names = ("server.key", "server.pem")
    both.write_bytes(b"".join((files.folder / name).read_bytes() for name in names))
    assert tls_context(ServerOptions(ssl_certfile=str(both))) is not None
    encrypted = {"ssl_keyfile": str(files.folder / "encrypted.key")}
    options = files.options | encrypted | {"ssl_keyfile_password": "s3cret"}
    assert tls_context(ServerOptions(**options)) is not None


def test_without_a_certificate_there_is_no_tls() -> None:
    assert tls_context(ServerOptions()) is None


def test_a_start_prints_the_address_and_no_secret(files: Files, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    flags = ["--model", f"tiny={folder}", "--log-level", "debug", "--hf-token", "hf_t0ken"]
    flags += ["--ssl-certfile", files.options["ssl_certfile"]]
    flags += ["--ssl-keyfile", str(files.folder / "encrypted.key")]
    flags += ["--ssl-keyfile-password", "s3cret"]
    with Server(*flags, log=tmp_path / "log") as server:
        url = f"https://127.0.0.1:{server.port}"
        server.client = httpx.Client(base_url=url, verify=files.trusting(), timeout=60)
        server.wait_ready()
        eventually(lambda: "ready" in server.output and url in server.output)
    assert "s3cret" not in server.output
    assert "hf_t0ken" not in server.output
    assert "http://" not in server.output
