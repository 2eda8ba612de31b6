"""Files of `torch.save` read without an unpickler: as torch reads them, or refused in one line."""

from __future__ import annotations

import io
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from triptych.core.errors import WeightsError
from triptych.core.runtime.tensors import tensor_pickle
from triptych.core.runtime.tensors.torch_file import read_torch_file

DTYPES = [getattr(torch, name) for name in tensor_pickle.STORAGES.values()]


def same(ours: Any, theirs: Any) -> bool:
    """Whether two objects are alike in all that can be observed."""
    if isinstance(theirs, torch.Tensor):
        facts = [(each.dtype, each.shape, each.stride()) for each in (ours, theirs)]
        return facts[0] == facts[1] and torch.equal(ours, theirs)
    if isinstance(theirs, dict):
        return list(ours) == list(theirs) and all(same(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs and type(ours) is type(theirs))


def assert_read_as_torch_does(content: Any, folder: Path) -> Any:
    file = folder / "a.pt"
    torch.save(content, file)
    ours = read_torch_file(file)
    assert same(ours, torch.load(file, weights_only=True))
    return ours


def test_every_dtype(tmp_path: Path) -> None:
    content = {str(dtype): torch.randint(0, 2, (3, 4)).to(dtype) for dtype in DTYPES}
    assert_read_as_torch_does(content, tmp_path)


def test_views_of_one_storage(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(2, 3, 4)
    views = [
        base,
        base.permute(2, 0, 1),
        base[1:, ::2],
        base[0, 0, 1],
        base[:, :0],
        base.diagonal(),
    ]
    ours = assert_read_as_torch_does(dict(enumerate(views)), tmp_path)
    ours[0][0, 0, 1] = 99  # they share it, as those that were saved do
    assert ours[3] == 99


def test_modules_parameters_and_what_is_around_them(tmp_path: Path) -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    dims = {"n": 3, "big": 2**40, "f": 1.5, "s": "é", "l": [1, [2]], "t": (1, "x"), "no": None}
    content = {
        "state": layers.state_dict(),  # an OrderedDict with attributes
        "nested": {"a": OrderedDict(b=layers[0].weight)},
        "tied": [layers[0].weight, layers[0].weight],
        "dims": {**dims, "yes": True},
        "empty": torch.empty(0, 3),
    }
    assert_read_as_torch_does(content, tmp_path)


def test_empty_tensors_may_begin_anywhere(tmp_path: Path) -> None:
    views = [torch.empty(0)[2:], torch.ones(3)[3:], torch.empty(2, 0, 2**20)[1, :, 5:]]
    assert_read_as_torch_does(views, tmp_path)


def test_a_tensor_by_itself(tmp_path: Path) -> None:
    assert_read_as_torch_does(torch.ones(510, 1, 256), tmp_path)


@st.composite
def _tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    tensor = torch.randint(0, 2, shape).to(draw(st.sampled_from(DTYPES)))
    if shape and draw(st.booleans()):
        tensor = tensor.transpose(0, -1)
    if shape and draw(st.booleans()):
        tensor = tensor[draw(st.integers(0, shape[-1] if len(shape) > 1 else shape[0])) :: 2]
    return tensor


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
_CONTENTS = st.recursive(
    _SCALARS | _tensors(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=3)
        | st.tuples(inner, inner)
    ),
    max_leaves=6,
)
_SLOWLY = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60
)


@_SLOWLY
@given(content=st.dictionaries(st.text(), _CONTENTS, max_size=4))
def test_whatever_is_made_of_tensors(content: Mapping[str, Any], tmp_path: Path) -> None:
    assert_read_as_torch_does(content, tmp_path)


def _saved() -> bytes:
    file = io.BytesIO()
    torch.save({"a": torch.arange(6.0), "state": torch.nn.Linear(2, 2).state_dict()}, file)
    return file.getvalue()


_WHOLE = _saved()
_DIRECTORY = range(_WHOLE.index(b"PK\x01\x02"), len(_WHOLE))
"""Where the names and places of all records are."""
_BYTES = st.integers(0, 255)


def assert_read_or_refused_in_one_line(content: bytes, folder: Path) -> None:
    file = folder / "a.pt"
    file.unlink(missing_ok=True)  # some file systems are slow to empty one
    file.write_bytes(content)
    try:
        read_torch_file(file)
    except WeightsError as error:
        assert error.message.startswith("a.pt cannot be read: ")  # noqa: PT017
        assert "\n" not in error.message  # noqa: PT017


def changed(changes: Mapping[int, int]) -> bytes:
    content = bytearray(_WHOLE)
    for place, value in changes.items():
        content[place] = value
    return bytes(content)


_CHANGES = st.dictionaries(st.integers(0, len(_WHOLE) - 1), _BYTES, min_size=1, max_size=4)


@_SLOWLY
@given(changes=_CHANGES, num_bytes=st.integers(1, len(_WHOLE)))
def test_damage_ends_in_one_line(
    changes: Mapping[int, int], num_bytes: int, tmp_path: Path
) -> None:
    assert_read_or_refused_in_one_line(changed(changes)[:num_bytes], tmp_path)


@pytest.mark.parametrize("value", [0, 0x80, 0xFF])
def test_a_damaged_byte_of_the_directory_ends_in_one_line(value: int, tmp_path: Path) -> None:
    for place in _DIRECTORY:
        assert_read_or_refused_in_one_line(changed({place: value}), tmp_path)


@_SLOWLY
@given(changes=st.dictionaries(st.sampled_from(_DIRECTORY), _BYTES, min_size=1, max_size=3))
def test_a_damaged_directory_ends_in_one_line(changes: Mapping[int, int], tmp_path: Path) -> None:
    assert_read_or_refused_in_one_line(changed(changes), tmp_path)


# -- files that mean harm ----------------------------------------------------------------------


def text(word: str) -> bytes:
    return b"X" + struct.pack("<I", len(word.encode())) + word.encode()


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def name(of: str) -> bytes:
    module, _, attribute = of.rpartition(".")
    return f"c{module}\n{attribute}\n".encode()


def sizes(*values: int) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def storage(count: int = 4, key: str = "0", kind: str = "torch.FloatStorage") -> bytes:
    return b"(" + text("storage") + name(kind) + text(key) + text("cpu") + number(count) + b"tQ"


def tensor(stored: bytes, offset: int, size: bytes, stride: bytes) -> bytes:
    call = name("torch._utils._rebuild_tensor_v2")
    hooks = name("collections.OrderedDict") + b")R"
    return call + b"(" + stored + number(offset) + size + stride + b"\x89" + hooks + b"tR"


GOOD = tensor(storage(), 0, sizes(4), sizes(1))


def write(
    file: Path, described: bytes, *, compress: int = zipfile.ZIP_STORED, **records: bytes
) -> Path:
    with zipfile.ZipFile(file, "w", compress) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + described + b".")
        for record, content in {"data/0": bytes(16), **records}.items():
            archive.writestr(f"archive/{record}", content)
    return file


def test_the_words_of_these_tests_make_a_file(tmp_path: Path) -> None:
    assert same(read_torch_file(write(tmp_path / "a.pt", GOOD)), torch.zeros(4))


CALL = b"(" + text("echo harm") + b"tR"
HOSTILE: Mapping[str, tuple[bytes, str]] = {
    "a function": (name("os.system") + CALL, "names 'os.system'"),
    "a builtin": (name("builtins.eval") + CALL, "names 'builtins.eval'"),
    "a method": (name("torch.FloatStorage.from_file") + CALL, "names"),
    "INST": (b"(" + text("echo") + b"ios\nsystem\n", "instruction INST"),
    "OBJ": (b"(" + name("collections.OrderedDict") + b"o", "instruction OBJ"),
    "NEWOBJ": (name("collections.OrderedDict") + b")\x81", "instruction NEWOBJ"),
    "STACK_GLOBAL": (text("os") + text("system") + b"\x93", "instruction STACK_GLOBAL"),
    "an extension": (b"\x82\x01", "instruction EXT1"),
    "a persistent id in text": (b"P1\n", "instruction PERSID"),
    "state of a tensor": (GOOD + b"}b", "sets the state of an object"),
    "state of a dict": (b"}}b", "sets the state of an object"),
    "state with slots": (
        name("collections.OrderedDict") + b")R" + b"(}}tb",
        "sets the state of an object",
    ),
    "a dict called": (
        name("collections.OrderedDict") + b"(]tR",
        "calls something that does not make a tensor",
    ),
    "a storage called": (
        name("torch.FloatStorage") + b"(K\x01tR",
        "calls something that does not make a tensor",
    ),
    "a name as data": (name("collections.OrderedDict"), "a name in place of data"),
    "a bare storage": (storage(), "a name in place of data"),
    "an untyped storage": (storage(kind="torch.storage.UntypedStorage"), "names"),
    "another id": (text("x") + b"Q", "not a storage"),
    "a path for a key": (storage(key="../0"), "not a storage"),
    "a key with other digits": (storage(key="²"), "not a storage"),
    "a negative storage": (storage(count=-4), "not a storage"),
    "a longer storage": (tensor(storage(5), 0, sizes(4), sizes(1)), "another size"),
    "a missing storage": (tensor(storage(key="7"), 0, sizes(4), sizes(1)), "another size"),
    "a storage in two ways": (
        b"(" + GOOD + tensor(storage(2, kind="torch.DoubleStorage"), 0, sizes(1), sizes(1)) + b"t",
        "two ways",
    ),
    "beyond the end": (tensor(storage(), 1, sizes(4), sizes(1)), "exceeds its storage"),
    "before the beginning": (tensor(storage(), -1, sizes(1), sizes(1)), "exceeds its storage"),
    "a long stride": (tensor(storage(), 0, sizes(2), sizes(4)), "exceeds its storage"),
    "a negative stride": (tensor(storage(), 3, sizes(2), sizes(-1)), "an invalid shape"),
    "a negative size": (tensor(storage(), 0, sizes(-1), sizes(1)), "an invalid shape"),
    "nothing of a great shape": (
        tensor(storage(), 0, sizes(2**30, 2**30, 2**30, 0), sizes(1, 1, 1, 1)),
        "an invalid shape",
    ),
    "a stride without end": (
        tensor(storage(), 0, sizes(1), b"(\x8a\x09" + b"\xff" * 8 + b"\x00t"),
        "an invalid shape",
    ),
    "more than there is": (tensor(storage(), 0, sizes(2**30, 4), sizes(0, 1)), "exceeds its st"),
    "sizes without end": (tensor(storage(), 0, sizes(*[1] * 99), sizes(*[1] * 99)), "an invalid"),
    "more sizes than strides": (tensor(storage(), 0, sizes(2, 2), sizes(1)), "damaged"),
    "a truth in a shape": (tensor(storage(), 0, b"(\x88t", sizes(1)), "an invalid shape"),
    "a dict that holds itself": (b"}q\x00" + text("a") + b"h\x00s", "a container twice"),
    "a list that holds itself": (b"]q\x00h\x00a", "a container twice"),
    "lists that double": (b"]q\x00(h\x00h\x00tq\x01", "a container twice"),
    "tuples that double": (
        b")q\x00" + b"".join(b"(h%ch%ctq%c" % (n, n, n + 1) for n in range(30)),
        "a container twice",
    ),
    "deep nesting": (b"]" * 200 + b"a" * 199, "nested more than 16 deep"),
    "a list as key": (b"}]Ns", "a key in it"),
    "half a pair": (b"}(Nu", "damaged"),
    "an item of nothing": (b"Ns", "damaged"),
    "an append to a dict": (b"}Na", "damaged"),
    "no memo": (b"h\x05", "damaged"),
    "no mark": (b"t", "damaged"),
    "a mark left": (b"(N", "damaged"),
    "two results": (b"NN", "damaged"),
    "no result": (b"", "damaged"),
    "protocol 5": (b"\x80\x05N", "protocol 5"),
    "a huge text": (b"X\xff\xff\xff\xffabc", "damaged"),
    "a huge number": (b"\x8b\xff\xff\xff\x7fabc", "damaged"),
    "no text": (b"X\x02\x00\x00\x00\xff\xff", "damaged"),
}


@pytest.mark.parametrize("case", sorted(HOSTILE))
def test_hostile_descriptions_are_refused_in_one_line(case: str, tmp_path: Path) -> None:
    described, reason = HOSTILE[case]
    file = write(tmp_path / "a.pt", described)
    with pytest.raises(WeightsError) as caught:
        read_torch_file(file)
    assert caught.value.message.startswith("a.pt cannot be read: ")
    assert reason in caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 200


def test_many_copies_of_a_storage_are_refused(tmp_path: Path) -> None:
    whole = tensor(storage(2**14), 0, sizes(2**14), sizes(1))
    assert read_torch_file(write(tmp_path / "a.pt", b"(" + whole * 8 + b"t", **LARGE))
    with pytest.raises(WeightsError, match="many times as large as the file"):
        read_torch_file(write(tmp_path / "b.pt", b"(" + whole * 9 + b"t", **LARGE))


LARGE = {"data/0": bytes(2**16)}


def test_long_descriptions_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "a.pt", b"N0" * 100 + b"N")
    monkeypatch.setattr(tensor_pickle, "MAX_OPCODES", 50)
    with pytest.raises(WeightsError, match="instruction"):
        read_torch_file(file)
    monkeypatch.setattr(tensor_pickle, "MAX_BYTES", 60)
    with pytest.raises(WeightsError, match=r"is too large|has \d+ bytes"):
        read_torch_file(file)


@pytest.mark.parametrize(
    ("records", "reason"),
    [
        ({"byteorder": b"big"}, "big-endian"),
        ({"byteorder": b"little" * 99}, "'byteorder' is too large"),
        ({"x/data.pkl": b""}, "no description"),
    ],
)
def test_hostile_records(records: Mapping[str, bytes], reason: str, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=reason):
        read_torch_file(write(tmp_path / "a.pt", GOOD, **records))


def test_compressed_records_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a.pt", GOOD, compress=zipfile.ZIP_DEFLATED, bomb=bytes(2**20))
    with pytest.raises(WeightsError, match="compressed or encrypted"):
        read_torch_file(file)


def test_records_that_overlap_are_refused(tmp_path: Path) -> None:
    """Two names for one record, as a zip bomb without compression has."""
    file = write(tmp_path / "a.pt", GOOD)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("archive/data/1", bytes(16))
        archive.getinfo("archive/data/1").header_offset = archive.getinfo(
            "archive/data/0"
        ).header_offset
    with pytest.raises(WeightsError, match="overlap"):
        read_torch_file(file)


def test_two_records_of_one_name_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "a.pt", GOOD)
    with zipfile.ZipFile(file, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("archive/data/0", bytes(16))
    with pytest.raises(WeightsError, match="two records in it have one name"):
        read_torch_file(file)


def test_truth_values_are_checked(tmp_path: Path) -> None:
    described = tensor(storage(16, kind="torch.BoolStorage"), 0, sizes(16), sizes(1))
    with pytest.raises(WeightsError, match="neither 0 nor 1"):
        read_torch_file(write(tmp_path / "a.pt", described, **{"data/0": b"\x02" * 16}))


def test_the_old_format_is_refused_with_advice(tmp_path: Path) -> None:
    file = tmp_path / "old.pt"
    torch.save({"a": torch.ones(2)}, file, _use_new_zipfile_serialization=False)
    with pytest.raises(WeightsError, match=r"since version 1\.6; load it elsewhere and save it"):
        read_torch_file(file)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"^nowhere\.pt cannot be read"):
        read_torch_file(tmp_path / "nowhere.pt")
