"""Digests of a model's files: of their content, all of it or samples."""

import os
from pathlib import Path

import pytest

from triptych.core.errors import WeightsError
from triptych.core.weights.content_digests import content_digest

_MIB = 2**20


def write(file: Path, content: bytes) -> str:
    file.write_bytes(content)
    return content_digest(file)


@pytest.mark.parametrize("num_bytes", [0, 1, 16 * 2**10, 16 * 2**10 + 1, _MIB])
def test_every_byte_of_a_small_file_counts(tmp_path: Path, num_bytes: int) -> None:
    file = tmp_path / "model.safetensors"
    found = {write(file, bytes(num_bytes))}
    for at in {0, num_bytes // 3, num_bytes - 1} if num_bytes else ():
        found.add(write(file, bytes(at) + b"x" + bytes(num_bytes - at - 1)))
    found.add(write(file, bytes(num_bytes + 1)))
    assert len(found) == 2 + len({0, num_bytes // 3, num_bytes - 1} if num_bytes else ())


def test_of_a_large_one_the_ends_and_every_large_part_count(tmp_path: Path) -> None:
    size, part = 40 * _MIB, _MIB
    file = tmp_path / "model.safetensors"
    found = {write(file, bytes(size)), write(file, bytes(size + 1))}
    places = [range(1), range(size - 1, size), *(range(n, n + part) for n in (5, size // 2))]
    for place in places:
        content = bytearray(size)
        content[place.start : place.stop] = b"x" * len(place)
        found.add(write(file, bytes(content)))
    assert len(found) == 2 + len(places)


def test_all_of_a_large_vocabulary_counts(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    before = write(file, bytes(4 * _MIB))
    assert write(file, bytes(2 * _MIB + 7) + b"x" + bytes(2 * _MIB - 8)) != before


def test_neither_place_nor_times_count(tmp_path: Path) -> None:
    one, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    assert write(one, b"abc") == write(other, b"abc")
    os.utime(other, ns=(0, 0))
    assert content_digest(one) == content_digest(other)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"a\.safetensors cannot be read: No such file"):
        content_digest(tmp_path / "a.safetensors")
