"""The server that the files of this folder share: the default models, short contexts."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from support.serve_process import Server


@pytest.fixture(scope="session")
def default_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that commands find by themselves if `$XDG_RUNTIME_DIR` is the folder of its log."""
    folder = tmp_path_factory.mktemp("live")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_RUNTIME_DIR", str(folder))
        options = ("--max-length", "2048", "--max-batch-size", "32")
        running = Server(*options, engine="real", log=folder / "log")
    with running:
        running.wait_ready()
        yield running


@pytest.fixture(scope="session")
def client(default_server: Server) -> Iterator[openai.OpenAI]:
    """A client of the shared server."""
    with default_server.openai() as connection:
        yield connection
