"""`triptych models` lists, fetches, verifies and removes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from support.weight_files import write_gguf
from triptych.cli import main
from triptych.core.weights.manifest import seal
from triptych.core.weights.packages import EMBEDDED
from triptych.core.weights.resolve import EMBEDDED_NAME
from triptych.modalities.catalog import catalog


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def models(cache: Path, *argv: str) -> int:
    return main(["models", *argv, "--cache-dir", str(cache)])


@pytest.fixture
def fetched(cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The cache folder of a fetched tiny model."""
    assert models(cache, "fetch", str(write_gguf(tmp_path / "tiny.gguf"))) == 0
    line = capsys.readouterr().out.strip()
    assert line.startswith("tiny is in ")
    return Path(line.removeprefix("tiny is in "))


def add_snapshot(cache: Path) -> Path:
    """A hub model as the hub's library lays it out."""
    repository = cache / "hub" / "models--org--model"
    snapshot = repository / "snapshots" / ("c" * 40)
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("c" * 40)
    save_file({"a": torch.ones(2)}, repository / "weights")
    import hashlib

    digest = hashlib.sha256((repository / "weights").read_bytes()).hexdigest()
    (repository / "weights").rename(repository / "blobs" / digest)
    (snapshot / "model.safetensors").symlink_to(repository / "blobs" / digest)
    return repository / "blobs" / digest


def test_empty_cache(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert models(cache, "list") == 0
    first, _, *further = capsys.readouterr().out.splitlines()
    assert first == "0 models, 0 bytes"
    assert [line.split()[0] for line in further[2:]] == [entry.name for entry in catalog()]
    assert models(cache, "verify") == 0
    assert not cache.exists()


def test_list_verify_remove(fetched: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert models(cache, "list") == 0
    words = capsys.readouterr().out.splitlines()[1].split()
    assert words[:2] == ["tiny.gguf", "chat"]
    assert words[-3:] == ["converted", fetched.name[:12], "ok"]
    assert models(cache, "verify", "tiny.gguf") == 0
    assert capsys.readouterr().out == "tiny.gguf: ok\n"
    assert models(cache, "remove", fetched.name[:8]) == 0
    assert "tiny.gguf is removed" in capsys.readouterr().out
    assert not fetched.exists()


def test_verify_rehashes(fetched: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = fetched / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert models(cache, "verify") == 1
    assert "model.safetensors is damaged" in capsys.readouterr().out


def test_quarantined_weights_are_listed_and_can_be_removed(
    fetched: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fetched.rename(f"{fetched}.corrupt")
    assert models(cache, "list") == 0
    assert capsys.readouterr().out.splitlines()[1].split()[-1] == "damaged"
    assert models(cache, "remove", fetched.name[:12]) == 0
    assert not list((cache / "models").iterdir())


def test_hub_models_are_listed_verified_and_removed_too(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blob = add_snapshot(cache)
    assert models(cache, "list") == 0
    words = capsys.readouterr().out.splitlines()[1].split()
    assert (words[:2], words[-3:]) == (["org/model", "-"], ["hub", "c" * 12, "ok"])
    assert models(cache, "verify", "org/model") == 0
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    assert models(cache, "verify", "org/model") == 1
    assert "differs from the hub's" in capsys.readouterr().out
    assert models(cache, "remove", "org/model") == 0
    assert not blob.exists()


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (("remove",), "Name the models to remove"),
        (("verify", "nobody"), "No stored model is called 'nobody'"),
        (("fetch", "./nobody"), "no folder nobody"),
    ],
)
def test_mistakes_are_one_line(
    argv: tuple[str, ...], complaint: str, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert models(cache, *argv) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1


def test_without_an_action_models_are_listed(
    fetched: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert models(cache) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[1].startswith("tiny.gguf")
    assert "kokoro-82m" in text
    assert models(cache, "list", "tiny.gguf") == 0
    assert "kokoro-82m" not in capsys.readouterr().out


def test_the_embedded_model_has_one_name(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = cache / "models" / ("a" * 64)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    seal(folder, folder.name, EMBEDDED.reference)
    assert models(cache, "list", "embedded") == 0
    listed = capsys.readouterr().out.splitlines()[1]
    assert listed.split()[0] == EMBEDDED_NAME
    assert models(cache, "remove", EMBEDDED_NAME) == 0
    assert capsys.readouterr().out.startswith(f"{EMBEDDED_NAME} is removed")
