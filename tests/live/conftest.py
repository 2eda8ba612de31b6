"""The server that several files of this folder share: the default models, short contexts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.serve_process import Server


@pytest.fixture(scope="session")
def default_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that commands find by themselves if `$XDG_RUNTIME_DIR` is the folder of its log."""
    folder = tmp_path_factory.mktemp("live")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_RUNTIME_DIR", str(folder))
        running = Server("--max-length", "2048", engine="real", log=folder / "log")
    with running:
        running.wait_ready()
        yield running
