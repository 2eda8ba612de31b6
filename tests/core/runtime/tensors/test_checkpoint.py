"""Reading and placing tensors, and proving that none is missing or left over."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from support.block_weights import random_blocks
from support.weight_files import write_shards
from triptych.core.errors import WeightsError
from triptych.core.runtime.kernels.dequantize import PackedTensor
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.loading import TensorTarget, load_tensors

TENSORS = {
    "q": torch.arange(6.0).reshape(2, 3),
    "k": torch.arange(3.0).reshape(1, 3).to(torch.bfloat16),
    "norm": torch.full((3,), 2.0, dtype=torch.float16),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_shards(tmp_path, [{"q": TENSORS["q"]}, {n: TENSORS[n] for n in ("k", "norm")}])


def test_reads_tensors_and_configs(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    with Checkpoint.open(folder) as checkpoint:
        assert checkpoint.config == {"model_type": "llama"}
        assert checkpoint.generation_config == {"eos_token_id": 2}
        assert checkpoint.dtype == torch.float32
        assert checkpoint.num_bytes == 24 + 6 + 6
        read = {name: checkpoint.read(name) for name in checkpoint.tensors}
    # Tensors outlive the checkpoint they came from.
    for name, tensor in TENSORS.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


class _Reader:
    """Stands for the CPU kernels, which read blocks of one type."""

    def can_dequantize(self, packed: PackedTensor, dtype: torch.dtype) -> bool:
        return dtype == torch.float32

    def dequantize(self, packed: PackedTensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.full(packed.shape, 7, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_blocks_are_read_by_the_kernels_that_can(tmp_path: Path, dtype: torch.dtype) -> None:
    weight = random_blocks("q8_0", 4, 32, seed=1)
    tensors = {"blocks": weight.blocks_OB, "norm": torch.zeros(9, dtype=dtype)}
    metadata = {"blocks": json.dumps({"blocks": "q8_0"})}
    save_file(tensors, tmp_path / "model.safetensors", metadata)
    (tmp_path / "config.json").write_text("{}")
    with Checkpoint.open(tmp_path) as checkpoint:
        plain = checkpoint.read("blocks")
        checkpoint.native = _Reader()
        read = checkpoint.read("blocks")
    assert torch.equal(plain, weight.dequantize(dtype))
    assert torch.equal(read, plain if dtype == torch.float16 else torch.full_like(plain, 7))


def test_a_foreign_manifest_seals_nothing(folder: Path) -> None:
    (folder / "manifest.json").write_text(json.dumps({"files": ["app.js"], "version": 1}))
    with Checkpoint.open(folder) as checkpoint:
        assert torch.equal(checkpoint.read("q"), TENSORS["q"])


def test_absent_tensor_is_named(folder: Path) -> None:
    with Checkpoint.open(folder) as checkpoint, pytest.raises(WeightsError, match="'v'"):
        checkpoint.read("v")


def test_loads_into_slices_and_casts(folder: Path) -> None:
    fused = torch.zeros(3, 3, dtype=torch.bfloat16)
    norm = torch.zeros(3)
    targets = [
        TensorTarget("q", fused[:2]),
        TensorTarget("k", fused[2:]),
        TensorTarget("norm", norm),
    ]
    shares: list[float] = []
    with Checkpoint.open(folder) as checkpoint:
        load_tensors(checkpoint, targets, report=shares.append)
    assert torch.equal(fused.float(), torch.cat([TENSORS["q"], TENSORS["k"].float()]))
    assert norm.tolist() == [2.0] * 3
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


@pytest.mark.parametrize("ignored", [("k", "norm"), {"k", "norm"}, lambda name: name != "q"])
def test_ignored_tensors_may_be_left_over(folder: Path, ignored: object) -> None:
    into = torch.zeros(2, 3)
    with Checkpoint.open(folder) as checkpoint:
        load_tensors(checkpoint, [TensorTarget("q", into)], ignored=ignored)  # type: ignore[arg-type]
    assert torch.equal(into, TENSORS["q"])


def test_one_tensor_may_have_two_places(folder: Path) -> None:
    first, second = torch.zeros(2, 3), torch.zeros(2, 3)
    with Checkpoint.open(folder) as checkpoint:
        targets = [TensorTarget("q", first), TensorTarget("q", second)]
        load_tensors(checkpoint, targets, ignored=("k", "norm"))
    assert torch.equal(first, second)
