"""Safetensors headers: what is proven before anything is mapped."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from support.weight_files import write_shards
from triptych.core.errors import WeightsError
from triptych.core.weights.layout import TensorInfo, read_header, read_json, read_layout

GOOD = save({"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)})


def raw_file(folder: Path, header: Any, data: bytes, *, length: int | None = None) -> Path:
    """A file with this header (JSON or bytes), whatever it says."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file = folder / "model.safetensors"
    file.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return file


def entry(*, dtype: str = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_reads_what_safetensors_wrote(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(GOOD)
    assert read_layout(tmp_path) == {
        "a": TensorInfo("a", (2, 3), "F32", "model.safetensors"),
        "b": TensorInfo("b", (4,), "BF16", "model.safetensors"),
    }


def test_metadata_and_empty_tensors_are_fine(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "e": entry(shape=[0], offsets=[0, 0])}
    assert list(read_header(raw_file(tmp_path, header, b""))) == ["e"]


@pytest.mark.parametrize(
    ("header", "data", "complaint"),
    [
        (b"", b"", "damaged header"),
        (b"[]", b"", "damaged header"),
        (b'{"a": 1}', b"", "damaged header"),
        (b"\xff\xff", b"", "damaged header"),
        (b'{"a":' * 100_000, b"", "damaged header"),
        ({"a": entry(dtype="F31")}, b"1234", "'a' .* unsupported type 'F31'"),
        ({"a": entry(shape=[2])}, b"1234", "'a' .* needs 8"),
        ({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, b"1234", "'a' .* impossible shape"),
        ({"a": entry(shape=[2**63])}, b"1234", "'a' .* impossible shape"),
        ({"a": entry(shape=[2**62] * 8)}, b"1234", "'a' .* needs"),
        ({"a": entry(shape=[-1, -1])}, b"1234", "'a' .* impossible shape"),
        ({"a": entry(shape=[1] * 9)}, b"1234", "'a' .* impossible shape"),
        ({"a": entry(offsets=[0, 8])}, b"12345678", "'a' .* needs 4"),
        ({"a": entry(offsets=[4, 8])}, b"12345678", "'a' .* leaves a hole"),
        ({"a": entry(offsets=[-4, 0])}, b"", "'a' .* overlaps"),
        ({"a": entry(), "b": entry()}, b"1234", "'b' .* overlaps another"),
        ({"a": entry()}, b"123", "truncated: tensor 'a' ends at byte 4 of 3"),
        ({"a": entry()}, b"12345", "1 bytes that belong to no tensor"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
         b'"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', b"12345678", "hole"),
    ],
)  # fmt: skip
def test_damaged_header_is_refused(
    tmp_path: Path, header: Any, data: bytes, complaint: str
) -> None:
    with pytest.raises(WeightsError, match=f"model.safetensors.*|{complaint}") as caught:
        read_header(raw_file(tmp_path, header, data))
    assert "model.safetensors" in caught.value.message
    assert str(tmp_path) not in caught.value.message
    caught.match(complaint)


@pytest.mark.parametrize("length", [101_000_000, 2**60, 2**64 - 1, 100])
def test_header_length_is_bounded(tmp_path: Path, length: int) -> None:
    with pytest.raises(WeightsError, match="its header claims"):
        read_header(raw_file(tmp_path, b"{}", b"", length=length))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_mutated_files_raise_nothing_but_weights_errors(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    mutated = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        mutated[data.draw(st.integers(0, len(mutated) - 1))] = data.draw(st.integers(0, 255))
    mutated = mutated[: data.draw(st.integers(0, len(mutated)))]
    file = tmp_path_factory.getbasetemp() / "mutated.safetensors"
    file.write_bytes(mutated)
    try:
        tensors = read_header(file)
    except WeightsError:
        return
    assert sum(info.num_bytes for info in tensors.values()) < len(mutated)


def test_sharded_folder_is_one_layout(tmp_path: Path) -> None:
    write_shards(tmp_path, [{"a": torch.ones(1)}, {"b": torch.ones(2), "c": torch.ones(3)}])
    layout = read_layout(tmp_path)
    assert {name: info.file[:11] for name, info in layout.items()} == {
        "a": "model-00001",
        "b": "model-00002",
        "c": "model-00002",
    }


@pytest.mark.parametrize(
    ("index", "complaint"),
    [
        ("{}", "index.json is damaged"),
        ('{"weight_map": {}}', "lists no tensors"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "a key appears twice"),
        ('{"weight_map": {"a": "../secret.safetensors"}}', "'a' in an invalid file"),
        ('{"weight_map": {"a": "weights.bin"}}', "'a' in an invalid file"),
        ("[" * 100_000, "index.json is damaged"),
        ("\0", "index.json is damaged"),
    ],
)
def test_damaged_index_is_refused(tmp_path: Path, index: str, complaint: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(WeightsError, match=complaint):
        read_layout(tmp_path)


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ((), "No model.safetensors"),
        (("pytorch_model.bin",), "pytorch_model.bin has an unsafe format"),
        (("model.ckpt", "readme.md"), "model.ckpt has an unsafe format"),
        (("a.safetensors", "b.safetensors"), "no model.safetensors.index.json"),
    ],
)
def test_unfit_folders_are_refused(tmp_path: Path, files: tuple[str, ...], complaint: str) -> None:
    for name in files:
        (tmp_path / name).write_bytes(GOOD)
    with pytest.raises(WeightsError, match=complaint):
        read_layout(tmp_path)


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"a":1,"a":2}', "\ud800".encode("utf-8", "surrogatepass")]
)
def test_damaged_json_is_refused(tmp_path: Path, text: str | bytes) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(WeightsError, match=r"config.json is damaged"):
        read_json(file)


def test_infinity_as_transformers_writes_it(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"limit": [0.0, {"__float__": "Infinity"}]}')
    assert read_json(file) == {"limit": [0.0, math.inf]}


def test_missing_json_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"config.json cannot be read"):
        read_json(tmp_path / "config.json")
