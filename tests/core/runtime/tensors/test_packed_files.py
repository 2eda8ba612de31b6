"""Packed weights in shared files: mapped as they were written, or not used at all."""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.tensors import packed_files
from triptych.core.runtime.tensors.packed_files import Packed, PackedFiles

KEY, OTHER, THIRD = ("0" * 64, "1" * 64, "2" * 64)


def weights_of(native: NativeKernels) -> Packed:
    plain_OI = torch.randn(40, 33, generator=torch.Generator().manual_seed(0))
    return {0: native.pack(plain_OI), 3: native.pack(plain_OI.bfloat16(), plain_OI.bfloat16())}


def test_weights_are_mapped_as_they_were_written(native: NativeKernels, tmp_path: Path) -> None:
    packed = weights_of(native)
    files = PackedFiles(tmp_path / "packed", native, maps_small_pages=True)
    assert files.find(KEY) is None
    with files.locked(KEY):
        written = files.write(KEY, packed)
    for found in (written, files.find(KEY)):
        assert found is not None
        assert found.keys() == packed.keys()
        for number, weights in packed.items():
            x_TI = torch.randn(3, 33).to(weights.dtype)
            assert torch.equal(native.linear(x_TI, found[number]), native.linear(x_TI, weights))
    file = tmp_path / "packed" / f"{KEY}.weights"
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a byte of the weights": lambda file: flip(file, -100),
    "a byte of the table": lambda file: flip(file, 60),
    "the magic": lambda file: flip(file, 0),
    "its end": lambda file: os.truncate(file, file.stat().st_size - 4096),
    "all but the header": lambda file: os.truncate(file, 20),
    "empty": lambda file: os.truncate(file, 0),
    "others may write": lambda file: file.chmod(0o666),
    "another name": lambda file: file.rename(file.with_name(f"{OTHER}.weights")),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_file_that_is_not_whole_or_not_ours_is_not_used(
    native: NativeKernels, tmp_path: Path, what: str
) -> None:
    files = PackedFiles(tmp_path, native, maps_small_pages=True)
    files.write(KEY, weights_of(native))
    DAMAGE[what](tmp_path / f"{KEY}.weights")
    assert files.find(KEY) is None
    assert files.find(OTHER) is None


@pytest.mark.parametrize(
    ("num_kept", "ages_s"), [(2.5, (10, 5)), (9, (40 * 86_400, 5))], ids=["room", "age"]
)
def test_the_file_unused_for_longest_gives_way(
    native: NativeKernels, tmp_path: Path, num_kept: float, ages_s: tuple[int, int]
) -> None:
    packed, now = weights_of(native), time.time()
    size = sum(weights.num_bytes for weights in packed.values())
    files = PackedFiles(tmp_path, native, maps_small_pages=True, max_bytes=int(num_kept * size))
    for key, age_s in zip((KEY, OTHER), ages_s, strict=True):
        held = files.write(key, packed)
        os.utime(tmp_path / f"{key}.weights", (now, now - age_s))
    (tmp_path / f"{KEY}.lock").touch()
    os.utime(tmp_path / f"{KEY}.lock", (now, now - 2 * 86_400))  # of a load that failed, say
    assert files.write(THIRD, packed) is not None
    assert files.find(KEY) is None
    assert not list(tmp_path.glob("*.lock"))
    assert files.find(OTHER) is not None
    assert held is not None
    assert bytes(held[0].parts[0].content) == bytes(packed[0].parts[0].content), "it stays mapped"
    small = PackedFiles(tmp_path, native, maps_small_pages=True, max_bytes=size - 1)
    assert small.write(KEY, packed) is None


def test_weights_in_memory_are_not_copied_from_their_file(
    native: NativeKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first load would hold them twice."""
    monkeypatch.setattr(packed_files, "has_huge_pages", lambda: True)
    monkeypatch.setattr(packed_files, "is_in_huge_pages", lambda address: False)
    monkeypatch.setattr(packed_files, "is_in_memory", lambda folder: False)
    files, packed = PackedFiles(tmp_path, native), weights_of(native)
    assert files.write(KEY, packed) is None
    found = files.find(KEY)
    assert found is not None
    assert bytes(found[3].parts[1].content) == bytes(packed[3].parts[1].content)


def test_where_files_are_not_mapped_none_is_written(
    native: NativeKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start would write one."""

    def refuse(*args: object, **options: object) -> NoReturn:
        raise OSError(errno.ENODEV, "No such device")

    packed = weights_of(native)
    monkeypatch.setattr(mmap, "mmap", refuse)
    assert PackedFiles(tmp_path, native, maps_small_pages=True).write(KEY, packed) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("maps_small_pages", [True, False])
def test_a_file_in_memory_is_mapped_or_not_written(
    native: NativeKernels,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    maps_small_pages: bool,
) -> None:
    monkeypatch.setattr(packed_files, "is_in_memory", lambda folder: True)
    files = PackedFiles(tmp_path, native, maps_small_pages=maps_small_pages)
    assert (files.write(KEY, weights_of(native)) is not None) == maps_small_pages
    assert bool(list(tmp_path.iterdir())) == maps_small_pages


def test_a_file_that_another_process_removes_meanwhile_does_not_matter(
    native: NativeKernels, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for name in (f"{OTHER}.weights", ".triptych-00000000.partial"):
        (tmp_path / name).symlink_to("nowhere")
    files = PackedFiles(tmp_path, native, maps_small_pages=True)
    assert files.write(KEY, weights_of(native)) is not None
    assert "are written to the cache folder" in caplog.text, "it is said"


def test_a_folder_that_cannot_be_written_is_done_without(
    native: NativeKernels, tmp_path: Path
) -> None:
    (tmp_path / "packed").touch()
    files = PackedFiles(tmp_path / "packed", native, maps_small_pages=True)
    with files.locked(KEY):
        assert files.write(KEY, weights_of(native)) is None
