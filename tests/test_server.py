"""The server object: a real server in processes of its own."""

from __future__ import annotations

import os
import socket
from typing import Any

import openai
import pytest

from triptych import Server, SetupError
from triptych.core.errors import ConfigError

pytestmark = pytest.mark.embedded
CLIENT_CERTIFICATES = {
    "ssl_cert_reqs": 2,
    "ssl_certfile": "server.pem",
    "ssl_keyfile": "server.key",
    "ssl_ca_certs": "clients.pem",
}


def test_it_serves_until_the_block_ends() -> None:
    with Server("embedded", api_key="secret", max_length=512) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret") as client:
            reply = client.chat.completions.create(
                model="embedded",
                messages=[{"role": "user", "content": "Hi"}],
                max_tokens=4,
            )
        assert reply.choices[0].message.content
        assert "secret" not in server.log.read_text()
        assert (server.log.parent / "options.yaml").stat().st_mode & 0o77 == 0
        pid = server.pid
    assert not server.is_running
    assert not server.log.exists()
    server.close()  # again
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("model", "options", "kind", "words"),
    [
        ("embedded", {"wrong": 1}, ConfigError, "wrong is not an option"),
        ("embedded", {"headless": True}, ConfigError, "headless"),
        ("embedded", CLIENT_CERTIFICATES, ConfigError, "ssl_cert_reqs"),
        ("/none/such", {}, SetupError, "no folder none/such|There is no folder"),
        ("embedded", {"start_timeout_s": 0.1}, SetupError, "not ready after"),
    ],
)
def test_a_start_that_fails_says_why(
    model: str, options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        Server(model, **options)


def test_a_port_in_use_is_refused() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(SetupError, match="in use"),
    ):
        Server("embedded", port=other.getsockname()[1])
