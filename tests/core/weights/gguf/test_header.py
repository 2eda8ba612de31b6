"""GGUF headers written by an enemy: refused, by name, before anything is allocated."""

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.weight_files import tiny_tensors, write_gguf
from triptych.core.errors import WeightsError
from triptych.core.weights.gguf.convert import convert_gguf
from triptych.core.weights.gguf.header import GgufFile, open_gguf
from triptych.core.weights.progress import SilentProgress

MIB = 2**20


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def gguf(pairs: bytes = b"", tensors: bytes = b"", *, num_pairs: int = 0, num_tensors: int = 0,
         data: bytes = b"", version: int = 3) -> bytes:  # fmt: skip
    head = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_pairs) + pairs + tensors
    return head + b"\0" * (-len(head) % 32) + data


def tensor(
    name: bytes = b"t", dims: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0
) -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + shape + struct.pack("<IQ", kind, offset)


def uint32(key: bytes, value: int) -> bytes:
    return text(key) + struct.pack("<II", 4, value)


def array(kind: int, count: int, items: bytes = b"") -> bytes:
    return text(b"k") + struct.pack("<IIQ", 9, kind, count) + items


def read(folder: Path, content: bytes) -> GgufFile:
    file = folder / "evil.gguf"
    file.write_bytes(content)
    with open_gguf(file) as opened:
        return opened


def test_reads_what_the_library_wrote(tmp_path: Path) -> None:
    with open_gguf(write_gguf(tmp_path / "tiny.gguf")) as file:
        expected = tiny_tensors("llama")
        assert file.metadata["general.architecture"] == "llama"
        assert file.metadata["tokenizer.ggml.tokens"][0] == "<|endoftext|>"
        assert file.tensors.keys() == expected.keys()
        for name, info in file.tensors.items():
            assert info.shape == expected[name].shape
            assert np.array_equal(file.rows(info).reshape(-1).view("<f4"), expected[name].ravel())


def test_minimal_file_is_fine(tmp_path: Path) -> None:
    content = gguf(
        uint32(b"general.alignment", 64), tensor(), num_pairs=1, num_tensors=1, data=b"\0" * 96
    )
    assert read(tmp_path, content).tensors["t"].offset % 64 == 0


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "empty"),
        (b"GGUF", "needs 4 bytes, but 0 are left"),
        (b"GGML" + b"\0" * 64, "is not a GGUF file"),
        (gguf(version=1), "version 1"),
        (gguf(version=3 << 24), "version"),
        (gguf(num_tensors=2**60), f"{2**60} tensors do not fit"),
        (gguf(num_pairs=2**63), f"{2**63} metadata entries do not fit"),
        (gguf(text(b"k")[:8] + b"", num_pairs=1), "metadata entries do not fit"),
        (gguf(struct.pack("<Q", 2**62) + b"\0" * 64, num_pairs=1), "metadata key claims"),
        (gguf(text(b"\xff") + b"\0" * 64, num_pairs=1), "not UTF-8"),
        (gguf(text(b"k") + struct.pack("<IQ", 99, 0), num_pairs=1), "unknown type 99"),
        (gguf(text(b"k") + struct.pack("<IQ", 8, 2**60), num_pairs=1), "claims"),
        (gguf(array(8, 2**61), num_pairs=1), "do not fit"),
        (gguf(array(4, 2**62, b"\0" * 64), num_pairs=1), "do not fit"),
        (gguf(array(9, 1, b"\0" * 64), num_pairs=1), "unknown type 9"),
        (gguf(uint32(b"k", 1) * 2, num_pairs=2), "key 'k' appears twice"),
        (gguf(tensors=tensor() * 2, num_tensors=2, data=b"\0" * 64), "tensor 't' appears twice"),
        (gguf(tensors=tensor(dims=(2**63,)), num_tensors=1), "'t' ends at byte"),
        (gguf(tensors=tensor(dims=(2**32, 2**32)), num_tensors=1), "'t' ends at byte"),
        (gguf(tensors=tensor(dims=(2**63, 2**63, 2**63, 2)), num_tensors=1), "'t' ends at byte"),
        (gguf(tensors=tensor(dims=(0,)), num_tensors=1), "not in whole blocks"),
        (gguf(tensors=tensor(dims=(33, 1), kind=8), num_tensors=1), "not in whole blocks"),
        (gguf(tensors=tensor(dims=(1,) * 5) + b"\0" * 64, num_tensors=1), "5 dimensions"),
        (gguf(tensors=tensor(dims=()) + b"\0" * 64, num_tensors=1), "0 dimensions"),
        (gguf(tensors=tensor(kind=77), num_tensors=1), "unknown type 77"),
        (gguf(tensors=tensor(kind=4), num_tensors=1), "unknown type 4"),
        (gguf(tensors=tensor(offset=2**63), num_tensors=1, data=b"\0" * 64), "'t' ends at byte"),
        (gguf(tensors=tensor(offset=4), num_tensors=1, data=b"\0" * 64), "not aligned"),
        (gguf(tensors=tensor(), num_tensors=1, data=b"\0" * 31), "'t' ends at byte"),
        (gguf(tensors=tensor() + tensor(b"u"), num_tensors=2, data=b"\0" * 64), "'u' overlaps"),
        (gguf(uint32(b"general.alignment", 0), num_pairs=1), "alignment 0"),
        (gguf(uint32(b"general.alignment", 3), num_pairs=1), "alignment 3"),
        (gguf(uint32(b"general.alignment", 2**31), num_pairs=1), "alignment 2147483648"),
        (gguf(text(b"general.alignment") + struct.pack("<I", 8) + text(b"32"), num_pairs=1),
         "alignment '32'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "file",
)  # fmt: skip
def test_hostile_header_is_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(WeightsError, match=complaint) as caught:
            read(tmp_path, content)
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()
    assert "evil.gguf" in caught.value.message
    assert str(tmp_path) not in caught.value.message


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("tiny")
    return write_gguf(folder / "tiny.gguf", "qwen3").read_bytes()


@settings(max_examples=150, deadline=None)
@given(
    edits=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=6
    ),
    keep=st.floats(0.9, 1),
)
@example(edits=[(0.0, 0)], keep=1.0)
def test_mutated_files_raise_nothing_but_weights_errors(
    tiny: bytes,
    tmp_path_factory: pytest.TempPathFactory,
    edits: list[tuple[float, int]],
    keep: float,
) -> None:
    header_bytes = 8192  # metadata and tensor infos: where false values stand
    mutated = bytearray(tiny)
    for place, value in edits:
        mutated[int(place * header_bytes)] = value
    folder = tmp_path_factory.getbasetemp()
    file = folder / "mutated.gguf"
    file.write_bytes(mutated[: int(keep * len(mutated))])
    target = folder / "mutated"
    target.mkdir(exist_ok=True)
    tracemalloc.start()
    try:
        convert_gguf(file, target, SilentProgress())
    except WeightsError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 16 * MIB
