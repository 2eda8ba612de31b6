"""The hub library's own variables work: mirrors, tokens, proxies, and no network at all.

They are read when it is imported, so each case is a process of its own that asks a hub made here.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from safetensors.torch import save

COMMIT = "c" * 40
FILES = {"config.json": b'{"model_type": "llama"}', "model.safetensors": save({"a": torch.ones(2)})}
FETCH = """
import sys
from triptych.core.errors import WeightsError
from triptych.core.options.table import resolve
from triptych.core.weights.hub import download_snapshot
try:
    folder = download_snapshot("org/model", resolve().models)
except WeightsError as error:
    sys.exit(error.message)
print(sorted(file.name for file in folder.iterdir()))
"""


@dataclass
class MadeHub:
    """A hub with one repository, which also answers as a proxy. `token`: what it asks for."""

    url: str = ""
    token: str = ""
    hosts: set[str] = field(default_factory=set)
    tokens: set[str] = field(default_factory=set)


def _handler(hub: MadeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(has_body=True)

        def do_HEAD(self) -> None:
            self._answer(has_body=False)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

        def _answer(self, *, has_body: bool) -> None:
            target = urlsplit(self.path)
            hub.hosts.add(target.netloc or self.headers["host"])
            token = self.headers.get("authorization", "").removeprefix("Bearer ")
            hub.tokens.add(token)
            if hub.token and token != hub.token:
                self._send(401, b"{}", {"x-error-code": "GatedRepo"}, has_body=has_body)
            elif target.path.startswith("/api/models/org/model"):
                siblings = [{"rfilename": name, "size": len(FILES[name])} for name in FILES]
                tree = [
                    {"type": "file", "path": name, "size": len(FILES[name]), "oid": "0" * 40}
                    for name in FILES
                ]
                info = {"id": "org/model", "sha": COMMIT, "siblings": siblings}
                shown = tree if "/tree/" in target.path else info
                self._send(200, json.dumps(shown).encode(), {}, has_body=has_body)
            else:
                content = FILES.get(target.path.rpartition("/")[2], b"")
                tag = f'"{hashlib.sha256(content).hexdigest()}"'
                headers = {"etag": tag, "x-repo-commit": COMMIT}
                self._send(200 if content else 404, content, headers, has_body=has_body)

        def _send(
            self, status: int, body: bytes, headers: dict[str, str], *, has_body: bool
        ) -> None:
            self.send_response(status)
            for name, value in {"content-length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if has_body:
                self.wfile.write(body)

    return Handler


@pytest.fixture
def made_hub() -> Iterator[MadeHub]:
    hub = MadeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield hub
    server.shutdown()
    server.server_close()
    thread.join()


def fetch(folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Fetch the model in a process with these variables alone."""
    names = ("HF_", "HTTP_", "HTTPS_", "ALL_", "NO_", "TRIPTYCH_")
    kept = {k: v for k, v in os.environ.items() if not k.upper().startswith(names)}
    home = {"HF_HOME": str(folder / "home"), "TRIPTYCH_CACHE_DIR": str(folder / "cache")}
    return subprocess.run(
        [sys.executable, "-c", FETCH],
        env={**kept, **home, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


WHOLE = "['config.json', 'model.safetensors']\n"


def test_a_mirror_is_asked_instead_of_the_hub(made_hub: MadeHub, tmp_path: Path) -> None:
    done = fetch(tmp_path, HF_ENDPOINT=made_hub.url)
    assert (done.returncode, done.stdout) == (0, WHOLE), done.stderr
    assert made_hub.hosts == {urlsplit(made_hub.url).netloc}
    offline = fetch(tmp_path, HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert (offline.returncode, offline.stdout) == (0, WHOLE), offline.stderr


@pytest.mark.parametrize("variable", ["HF_TOKEN", "TRIPTYCH_HF_TOKEN"])
def test_a_token_opens_a_gated_model(made_hub: MadeHub, tmp_path: Path, variable: str) -> None:
    made_hub.token = "hf_s3cret"
    refused = fetch(tmp_path, HF_ENDPOINT=made_hub.url)
    assert "is gated: accept its terms on the hub, and set HF_TOKEN" in refused.stderr
    done = fetch(tmp_path, HF_ENDPOINT=made_hub.url, **{variable: made_hub.token})
    assert (done.returncode, done.stdout) == (0, WHOLE), done.stderr
    assert made_hub.token not in done.stderr
    assert made_hub.token in made_hub.tokens


def test_a_proxy_is_asked_for_the_hub(made_hub: MadeHub, tmp_path: Path) -> None:
    done = fetch(tmp_path, HF_ENDPOINT="http://hub.invalid", HTTP_PROXY=made_hub.url)
    assert (done.returncode, done.stdout) == (0, WHOLE), done.stderr
    assert made_hub.hosts == {"hub.invalid"}


def test_without_a_hub_the_error_says_so(tmp_path: Path) -> None:
    done = fetch(tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert "the hub cannot be reached. Run `triptych models fetch org/model`" in done.stderr
