"""A bundle's manifest says what it said when it was written, or nothing."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from triptych.core.bundle.manifest import (
    MODELS,
    NAME,
    BundledKernels,
    BundledModel,
    BundleManifest,
    MemoryProfile,
    read_bundle_manifest,
    seal_files,
    write_manifest,
)
from triptych.core.errors import BundleError

MANIFEST = BundleManifest(
    made_at="2026-01-02T03:04:05+00:00",
    versions={"triptych": "0.1.0"},
    options={"dtype": "auto"},
    device="cpu",
    models=(BundledModel(reference="m", digest="d", folder="f", seal="s", stamp="t"),),
    kernels=BundledKernels(
        architecture="x86_64", processor=("avx2",), level="avx2", recipe="r", file="k.so"
    ),
    targets={"cuda:90": ("linear.square",)},
    memory=MemoryProfile(planned={"m/weights": 7}, taken_bytes=8),
    phases={"weights": 0.5},
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "k.so").write_bytes(b"code")
    (tmp_path / MODELS / "f").mkdir(parents=True)
    (tmp_path / MODELS / "f" / "model.safetensors").write_bytes(b"weights")
    manifest = msgspec.structs.replace(MANIFEST, files=seal_files(tmp_path))
    write_manifest(tmp_path, manifest)
    return tmp_path


def test_round_trip(folder: Path) -> None:
    read = read_bundle_manifest(folder)
    assert msgspec.structs.replace(read, files={}) == MANIFEST
    assert read.files.keys() == {"k.so"}, "models have seals of their own"
    assert read.files["k.so"].num_bytes == 4


def test_every_flipped_byte_is_found(folder: Path) -> None:
    file = folder / NAME
    whole = file.read_bytes()
    for place in range(0, len(whole), 7):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(BundleError):
            read_bundle_manifest(folder)


@pytest.mark.parametrize("content", [b"", b"{}", b"[" * 100_000, b'{"sha256": 3}', b"\xff\xfe"])
def test_what_is_no_manifest(folder: Path, content: bytes) -> None:
    (folder / NAME).write_bytes(content)
    with pytest.raises(BundleError, match=r"bundle\.json is damaged"):
        read_bundle_manifest(folder)


def test_a_manifest_of_another_version_is_not_guessed_at(folder: Path) -> None:
    write_manifest(folder, msgspec.structs.replace(MANIFEST, version=99))
    with pytest.raises(BundleError, match="another kind or version"):
        read_bundle_manifest(folder)
    fields = json.loads(msgspec.json.encode(MANIFEST)) | {"models": 3}
    write_manifest(folder, fields)  # type: ignore[arg-type]
    with pytest.raises(BundleError, match="another kind or version"):
        read_bundle_manifest(folder)


def test_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="cannot be read"):
        read_bundle_manifest(tmp_path)
    (tmp_path / NAME).mkdir()
    with pytest.raises(BundleError, match="cannot be read"):
        read_bundle_manifest(tmp_path)
