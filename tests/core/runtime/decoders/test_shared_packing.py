"""Packed weights of a decoder in a file: the second load reads none, and computes the same."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from support.decoder_families import FAMILIES, save_family
from support.decoder_rig import decoder_rig
from triptych.core.engine_api.resolved_model import ResolvedModel
from triptych.core.errors import ConfigError
from triptych.core.ledger import Ledger
from triptych.core.options.config import Config, DeviceOptions, ModelOptions
from triptych.core.runtime.decoders import shared_packing
from triptych.core.runtime.decoders.native import NativeBlueprint
from triptych.core.runtime.decoders.shared_packing import SharedPacking
from triptych.core.runtime.devices.device import Device
from triptych.core.runtime.engine.model_memory import ModelMemory
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.decoder import Decoder
from triptych.core.runtime.tensors import packed_files
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.packed_files import PackedFiles
from triptych.core.weights.encoding import WeightEncoding

CPU = torch.device("cpu")


def build(
    folder: Path,
    native: NativeKernels | None,
    packing: SharedPacking | None,
    encoding: str = "auto",
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Decoder, set[str]]:
    """The decoder, and the tensors that were read for it."""
    read: set[str] = set()
    with Checkpoint.open(folder) as checkpoint:
        reads = checkpoint.read
        checkpoint.read = lambda name: read.add(name) or reads(name)  # type: ignore[method-assign]
        blueprint = NativeBlueprint(
            checkpoint.config,
            max_length=0,
            dtype=dtype,
            device=CPU,
            native=native,
            encoding=WeightEncoding.of(encoding, checkpoint.tensors),
        )
        blueprint.packing = packing
        return blueprint.build(checkpoint, lambda share: None), read


def logits_of(decoder: Decoder, native: NativeKernels | None) -> torch.Tensor:
    rig = decoder_rig(decoder, native=native)
    row = rig.open(range(3, 12))
    rig.prefill(row)
    rig.decode(row, num_steps=2)
    return torch.stack(list(row.logits.values()))


@pytest.mark.parametrize(
    ("name", "encoding"),
    [("llama-biased-tied", "auto"), ("qwen2", "q8_0"), ("qwen3-moe", "auto"), ("youtu", "auto")],
)
@torch.inference_mode()
def test_the_second_load_maps_what_the_first_packed(
    native: NativeKernels,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    encoding: str,
) -> None:
    monkeypatch.setattr(shared_packing, "LEAST_VALUES", 0)
    family, extra = FAMILIES[name]
    save_family(tmp_path, family, **extra)
    expected = logits_of(build(tmp_path, native, None, encoding)[0], native)
    packing = SharedPacking(
        PackedFiles(tmp_path / "packed", native, maps_small_pages=True), "model"
    )
    for is_there in (False, True):
        decoder, read = build(tmp_path, native, packing, encoding)
        assert torch.equal(logits_of(decoder, native), expected)
        projections = {each for each in read if each.endswith("proj.weight")}
        assert bool(projections - {each for each in read if "kv_b" in each}) is not is_there
    assert len(list((tmp_path / "packed").glob("*.weights"))) == 1
    _, read = build(tmp_path, native, packing, encoding, torch.float32)
    assert projections < read, "weights of another type have a file of their own"
    assert len(list((tmp_path / "packed").glob("*.weights"))) == 2


@pytest.mark.parametrize("is_native", [True, False])
@torch.inference_mode()
def test_without_it_no_weight_stays_mapped(
    native: NativeKernels, tmp_path: Path, *, is_native: bool
) -> None:
    """A file may change in place, and what computes is not in its small pages."""
    save_family(tmp_path, "Llama")
    kernels = native if is_native else None
    decoder, _ = build(tmp_path, kernels, None, dtype=torch.float32)
    expected = logits_of(decoder, kernels)
    (file,) = tmp_path.glob("*.safetensors")
    with file.open("r+b") as content:
        content.write(bytes(file.stat().st_size))
    assert torch.equal(logits_of(decoder, kernels), expected)


def test_small_weights_are_not_shared(native: NativeKernels, tmp_path: Path) -> None:
    save_family(tmp_path, "Llama")
    build(
        tmp_path,
        native,
        SharedPacking(PackedFiles(tmp_path / "packed", native, maps_small_pages=True), "model"),
    )
    assert not (tmp_path / "packed").exists()


def test_weights_that_are_not_packed_have_no_file(
    native: NativeKernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels pack no float16."""
    monkeypatch.setattr(shared_packing, "LEAST_VALUES", 0)
    monkeypatch.setattr(packed_files, "has_huge_pages", lambda: True)
    save_family(tmp_path, "Llama")
    packing = SharedPacking(PackedFiles(tmp_path / "packed", native), "model")
    build(tmp_path, native, packing, dtype=torch.float16)
    assert not list(tmp_path.glob("packed/*.weights"))


def memory_of(folder: Path, **device: Any) -> ModelMemory:
    model = ResolvedModel(name="tiny", reference="tiny", folder=str(folder), digest="")
    options = Config(device=DeviceOptions(**device), models=ModelOptions(cache_dir=str(folder)))
    return ModelMemory(model, options, Device(CPU), Ledger(2**20), ExitStack())


def test_sharing_without_native_kernels_is_refused(tmp_path: Path) -> None:
    memory = memory_of(tmp_path, share_weights=True, cpu_kernels="torch")
    with pytest.raises(ConfigError, match=r"--share-weights: .* tiny .* leave it out"):
        memory.packing(memory.native_kernels())


def test_files_beside_the_weights_change_nothing(native: NativeKernels, tmp_path: Path) -> None:
    """A log in the folder would make a new file of weights at each start."""
    save_family(tmp_path, "Llama")
    memory = memory_of(tmp_path)
    before = memory.packing(native)
    (tmp_path / "server.log").touch()
    after = memory.packing(native)
    (weights,) = tmp_path.glob("*.safetensors")
    os.utime(weights, (1, 1))
    changed = memory.packing(native)
    assert before is not None
    assert after is not None
    assert changed is not None
    assert before.model == after.model != changed.model
