"""Digests of files: of the content alone, and made once."""

import hashlib
import os
from pathlib import Path

import pytest

from triptych.core.config import ModelOptions
from triptych.core.errors import WeightsError
from triptych.core.weights import file_digests
from triptych.core.weights.file_digests import FileDigests
from triptych.core.weights.progress import SilentProgress


class Counted(SilentProgress):
    """Counts the bytes that were hashed."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def advance(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes


def of(tmp_path: Path, *files: Path) -> tuple[list[str], int]:
    """Digests, and how many bytes were read for them."""
    progress = Counted()
    options = ModelOptions(cache_dir=str(tmp_path / "cache"))
    return FileDigests.open(options, progress).of(files), progress.num_bytes


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    made = [tmp_path / f"{n}.safetensors" for n in range(3)]
    for n, file in enumerate(made):
        file.write_bytes(bytes([n]) * 100)
    return made


def test_they_are_hashed_once(tmp_path: Path, files: list[Path]) -> None:
    expected = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    assert of(tmp_path, *files) == (expected, 300)
    assert of(tmp_path, *files) == (expected, 0)


def test_they_are_remembered_by_where_the_file_lies(tmp_path: Path, files: list[Path]) -> None:
    (known,), _ = of(tmp_path, files[0])
    moved = tmp_path / "elsewhere"
    moved.write_bytes(files[0].read_bytes())
    assert of(tmp_path, moved) == ([known], 100)


def test_a_change_that_keeps_length_and_time_is_seen(tmp_path: Path, files: list[Path]) -> None:
    before, _ = of(tmp_path, files[0])
    status = files[0].stat()
    files[0].write_bytes(b"z" * 100)
    os.utime(files[0], ns=(status.st_atime_ns, status.st_mtime_ns))
    assert files[0].stat().st_mtime_ns == status.st_mtime_ns
    after, num_read = of(tmp_path, files[0])
    assert (after != before, num_read) == (True, 100)


def test_what_is_remembered_badly_is_hashed_again(tmp_path: Path, files: list[Path]) -> None:
    before, _ = of(tmp_path, files[0])
    (remembered,) = (tmp_path / "cache" / "digests").iterdir()
    remembered.write_text("no digest")
    assert of(tmp_path, files[0]) == (before, 100)
    assert of(tmp_path, files[0]) == (before, 0)


def test_a_cache_that_cannot_be_written_to_is_no_error(tmp_path: Path, files: list[Path]) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    assert of(tmp_path, files[0])[1] == 100
    assert of(tmp_path, files[0])[1] == 100


def test_a_file_that_changes_meanwhile_is_not_remembered(
    tmp_path: Path, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hash_slowly(file: Path) -> str:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        file.write_bytes(b"y" * 50)
        return digest

    with monkeypatch.context() as patch:
        patch.setattr(file_digests, "sha256_file", hash_slowly)
        of(tmp_path, files[0])
    assert of(tmp_path, files[0]) == ([hashlib.sha256(b"y" * 50).hexdigest()], 50)


def test_a_file_that_is_not_there_is_named(tmp_path: Path, files: list[Path]) -> None:
    files[1].unlink()
    with pytest.raises(WeightsError, match=r"1\.safetensors cannot be read: No such file"):
        of(tmp_path, *files)
