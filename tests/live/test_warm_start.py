"""A start from a bundle that was made elsewhere: what it promises hits, damage is reported."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.kernel_levels import cache_with_kernels
from support.serve_process import Server, eventually
from support.weight_files import write_gguf
from triptych.cli import main
from triptych.core.runtime.kernels.native.build import supported_levels

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("live") / "tiny.gguf")


@pytest.fixture(scope="module")
def bundle(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle far from the cache it was made with."""
    made = tmp_path_factory.mktemp("made")
    folder = made / "bundle"
    cache = cache_with_kernels(made / "cache")
    argv = ["--model", str(gguf), "--cache-dir", str(cache), "--bundle", str(folder)]
    assert main(["warm-cache", *argv]) == 0
    return folder.rename(tmp_path_factory.mktemp("moved") / "bundle")


@contextmanager
def started(gguf: Path, bundle: Path, here: Path) -> Iterator[Server]:
    """A server on a machine with an empty cache."""
    options = ("--bundle", str(bundle), "--cache-dir", str(here / "cache"), "--log-level", "debug")
    with Server("--model", str(gguf), *options, engine="real", log=here / "log") as server:
        server.wait_ready()
        eventually(lambda: "phase=ready" in server.output)
        yield server


def counts(server: Server, phase: str) -> tuple[int, int]:
    """Hits and misses of a phase, as the start showed them."""
    line = re.search(rf'phase="?{phase}"? .*hits (\d+), misses (\d+)', server.output)
    assert line is not None, server.output
    return int(line[1]), int(line[2])


def test_what_is_promised_hits_on_another_machine(gguf: Path, bundle: Path, tmp_path: Path) -> None:
    with started(gguf, bundle, tmp_path) as server:
        assert counts(server, "bundle") == (1, 0)
        assert counts(server, "weights") == (1, 0)
        if supported_levels():
            assert counts(server, "native kernels") == (1, 0)
        assert server.chat().status_code == 200
    assert not (tmp_path / "cache").exists(), "nothing had to be made"


def test_damaged_weights_are_reported_and_made_again(
    gguf: Path, bundle: Path, tmp_path: Path
) -> None:
    (weights,) = bundle.glob("models/*/model.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.unlink()
    weights.write_bytes(content)
    with started(gguf, bundle, tmp_path) as server:
        assert "not usable from the bundle, so it was created" in server.output
        assert "model.safetensors is damaged" in server.output
        assert counts(server, "weights") == (1, 1), "of two attempts"
        assert server.chat().status_code == 200
