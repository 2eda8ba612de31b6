"""A process that may open few files, and more connections than that: answers, and a short log."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from support import http as http_support
from support.http import until
from support.tiers import first

TESTS = Path(http_support.__file__).parents[1]
SERVER = """
import asyncio, logging, resource, sys
from pathlib import Path
from support.http import FakeEngine, make_app
from triptych.core.options.config import Config, ServerOptions
from triptych.core.http.server import serve
from triptych.core.http.wire import WireLimits

logging.basicConfig(level="WARNING")
app = make_app(Path(sys.argv[1]), FakeEngine())
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), int(sys.argv[2])))
wire = WireLimits() if sys.argv[3] == "unbounded" else None
config = Config(server=ServerOptions(port=0))
asyncio.run(serve(app, config, on_started=lambda it: print(it.url, flush=True), wire=wire))
"""


@contextmanager
def served(folder: Path, num_files: int, bound: str) -> Iterator[tuple[str, Path]]:
    """The URL of a server in a process that may open so many files, and its log."""
    log = folder / "log"
    args = (sys.executable, "-c", SERVER, str(folder), str(num_files), bound)
    with log.open("w") as opened, subprocess.Popen(
        args, stdout=subprocess.PIPE, stderr=opened, text=True, cwd=TESTS
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), log
        finally:
            process.kill()


def idle(url: str, count: int, ending: ExitStack) -> list[socket.socket]:
    host, port = url.removeprefix("http://").split(":")
    made = [socket.create_connection((host, int(port)), timeout=5.0) for _ in range(count)]
    return [ending.enter_context(each) for each in made]


def test_out_of_descriptors_is_a_line_a_second(tmp_path: Path) -> None:
    with served(tmp_path, 64, "unbounded") as (url, log):
        with ExitStack() as ending:
            idle(url, 100, ending)
            until(lambda: log.read_text().count("connections cannot be accepted") >= 2)
        until(lambda: httpx.get(f"{url}/livez").status_code == 200)
        text = log.read_text()
    assert "Traceback" not in text
    assert len(text.splitlines()) < 20


@pytest.mark.parametrize("num_files", first([64, 48, 200]))
def test_connections_leave_descriptors_for_all_else(tmp_path: Path, num_files: int) -> None:
    """However few there are: who is one too many is refused, and the log says how many are not."""
    with served(tmp_path, num_files, "bounded") as (url, log):
        with ExitStack() as ending:
            *_, last = idle(url, num_files, ending)
            assert last.recv(12) == b"HTTP/1.1 503"
        until(lambda: httpx.get(f"{url}/livez").status_code == 200)
        (line,) = log.read_text().splitlines()
    assert f"this process may have {num_files} open files" in line
