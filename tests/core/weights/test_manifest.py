"""What a sealed folder holds is proven: at once, ahead on a thread, or by who opens it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from triptych.core.errors import DamagedWeights, WeightsError
from triptych.core.weights.manifest import (
    MANIFEST_NAME,
    seal,
    skip_weight_files,
    verify,
    verify_if_sealed,
    verify_in_background,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    (tmp_path / "config.json").write_text("{}")
    seal(tmp_path, hashlib.sha256().hexdigest(), "here")
    return tmp_path


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_weights_may_be_left_to_those_who_open_them(folder: Path) -> None:
    flip(folder / "model.safetensors")
    with skip_weight_files():
        verify(folder)
    with pytest.raises(DamagedWeights, match=r"model\.safetensors is damaged"):
        verify_if_sealed(folder)


@pytest.mark.parametrize("damage", ["config", "length", "missing", "extra"])
def test_everything_else_is_looked_at_all_the_same(folder: Path, damage: str) -> None:
    weights = folder / "model.safetensors"
    match damage:
        case "config":
            flip(folder / "config.json")
        case "length":
            weights.write_bytes(bytes(999))
        case "missing":
            weights.unlink()
        case _:
            (folder / "more.safetensors").write_bytes(b"")
    with skip_weight_files(), pytest.raises(DamagedWeights):
        verify(folder)


def test_what_was_verified_ahead_is_not_hashed_again_but_once(folder: Path) -> None:
    verify_in_background([folder, folder])
    verify_if_sealed(folder)
    flip(folder / "model.safetensors")
    with pytest.raises(DamagedWeights):
        verify_if_sealed(folder)


def test_damage_found_ahead_is_reported_at_the_opening(folder: Path) -> None:
    flip(folder / "model.safetensors")
    verify_in_background([folder])
    with pytest.raises(DamagedWeights, match=r"model\.safetensors is damaged"):
        verify_if_sealed(folder)


def test_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / MANIFEST_NAME).write_text('{"name": "another program"}')
    verify_in_background([tmp_path])
    verify_if_sealed(tmp_path)
    with pytest.raises(WeightsError):
        verify(tmp_path)
