"""Layers that predict further tokens: their places in files, and what they compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.gpu_rehearsal import rehearse_gpu
from support.head_models import LAYOUTS, PAGE, Cells, Mtp, save_mtp, write_predicting
from triptych.core.errors import ConfigError
from triptych.core.runtime.decoders.heads.mtp import MtpBlueprint, MtpHead
from triptych.core.runtime.decoders.native import NativeBlueprint
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.decoder import Decoder
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.weights.gguf.convert import convert_gguf
from triptych.core.weights.progress import SilentProgress

CPU = torch.device("cpu")
NUM_TOKENS = 11
SHARED = ("embed_tokens.weight", "head.weight")


def built(
    folder: Path,
    native: NativeKernels | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> tuple[MtpBlueprint, MtpHead]:
    with Checkpoint.open(folder) as checkpoint:
        target = NativeBlueprint(
            checkpoint.config, max_length=64, dtype=dtype, device=device, native=native
        )
        blueprint = MtpBlueprint(checkpoint, target, native, "tiny")
        decoder: Decoder = target.build(checkpoint, lambda _: None)
        return blueprint, blueprint.build(checkpoint, decoder, lambda _: None)


def inputs(mtp: Mtp) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    size = mtp.model.config.hidden_size
    ids_T = torch.randint(3, 90, (NUM_TOKENS,), generator=generator)
    hidden_TC = torch.randn(NUM_TOKENS, size, generator=generator)
    return ids_T, hidden_TC.to(mtp.projection_OI.dtype)


@torch.inference_mode()
def run(blueprint: MtpBlueprint, head: MtpHead, *given: Any) -> torch.Tensor:
    """A chunk of seven tokens, three more, and one by itself: the result of all."""
    ids_T, hidden_TC, cells = given
    found, start = [], 0
    for count in (7, 3, 1):
        part = slice(start, start + count)
        positions_T, step = cells.step(start, count)
        rows_TC = head.fuse([hidden_TC[part].clone()])
        found.append(head.forward(ids_T[part], rows_TC, positions_T, step))
        start += count
    return torch.cat(found)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_layer_equals_transformers(tmp_path: Path, native: NativeKernels, name: str) -> None:
    mtp = save_mtp(tmp_path, name)
    ids_T, hidden_TC = inputs(mtp)
    expected_TC = mtp(ids_T, hidden_TC)
    for kernels in (native, None):
        blueprint, head = built(tmp_path, kernels)
        cells = Cells(blueprint.kv_layout(PAGE, torch.float32), kernels)
        assert (cells.kv.native is None) == (kernels is None)
        found_TC = run(blueprint, head, ids_T, hidden_TC, cells)
        torch.testing.assert_close(found_TC, expected_TC, atol=2e-4, rtol=2e-4)
        torch.testing.assert_close(
            head.logits(found_TC), mtp.logits(expected_TC), atol=2e-4, rtol=2e-4
        )


@torch.inference_mode()
def test_its_result_is_the_next_hidden_state(tmp_path: Path, native: NativeKernels) -> None:
    mtp = save_mtp(tmp_path, "glm-4.5")
    ids_T, hidden_TC = inputs(mtp)
    blueprint, head = built(tmp_path, native)
    cells = Cells(blueprint.kv_layout(PAGE, torch.float32), native)
    rows_TC = hidden_TC.clone()
    for position in range(6, NUM_TOKENS):
        if position == 6:
            last_TC = head.forward(ids_T[:6], rows_TC[:6].clone(), *cells.step(0, 6))[-1:]
        rows_TC[position] = last_TC
        expected_TC = mtp(ids_T[: position + 1], rows_TC[: position + 1])[-1:]
        last_TC = head.forward(
            ids_T[position : position + 1], last_TC.clone(), *cells.step(position, 1)
        )
        torch.testing.assert_close(last_TC, expected_TC, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3.5"])
def test_bfloat16_errs_no_more_than_transformers(
    tmp_path: Path, native: NativeKernels, name: str
) -> None:
    rounded = save_mtp(tmp_path, name, torch.bfloat16)
    ids_T, hidden_TC = inputs(rounded)
    theirs_TC = rounded(ids_T, hidden_TC).float()
    blueprint, head = built(tmp_path, native, torch.bfloat16)
    cells = Cells(blueprint.kv_layout(PAGE, torch.bfloat16), native)
    found_TC = run(blueprint, head, ids_T, hidden_TC, cells).float()
    rounded.model.float()
    rounded.embedding_norm.float()
    rounded.hidden_norm.float()
    rounded.final_norm.float()
    rounded.projection_OI = rounded.projection_OI.float()
    exact_TC = rounded(ids_T, hidden_TC.float())
    ours, theirs = (float((x_TC - exact_TC).norm()) for x_TC in (found_TC, theirs_TC))
    assert ours <= 1.5 * theirs


@pytest.mark.gpu
def test_the_kernels_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mtp = save_mtp(tmp_path, "qwen3.5")
    ids_T, hidden_TC = inputs(mtp)
    expected_TC = mtp(ids_T, hidden_TC)
    device = rehearse_gpu(monkeypatch)
    blueprint, head = built(tmp_path, device=device)
    cells = Cells(blueprint.kv_layout(PAGE, torch.float32), None, device)
    found_TC = run(blueprint, head, ids_T.to(device), hidden_TC.to(device), cells).cpu()
    monkeypatch.undo()
    torch.testing.assert_close(found_TC, expected_TC, atol=2e-4, rtol=2e-4)


def test_its_memory_is_that_of_its_own_weights(tmp_path: Path) -> None:
    save_mtp(tmp_path, "deepseek-v3")
    blueprint, head = built(tmp_path)
    with Checkpoint.open(tmp_path) as checkpoint:
        own = [
            info.num_bytes
            for name, info in checkpoint.tensors.items()
            if name.startswith("model.layers.2.") and not name.endswith(SHARED)
        ]
    assert blueprint.weight_bytes() == sum(own)
    assert head.vocab_size == blueprint.vocab_size == 199


def test_a_step_holds_the_scores_of_its_index(tmp_path: Path, native: NativeKernels) -> None:
    """As much as the model's steps, whose layers are alike, and what joins both inputs."""
    mtp = save_mtp(tmp_path, "deepseek-v3.2")
    with Checkpoint.open(tmp_path) as checkpoint:
        target = NativeBlueprint(
            checkpoint.config, max_length=64, dtype=torch.float32, device=CPU, native=native
        )
        blueprint = MtpBlueprint(checkpoint, target, native, "tiny")
    assert blueprint.config.key_index is not None
    joined_bytes = 100 * 4 * mtp.model.config.hidden_size * torch.float32.itemsize
    assert blueprint.activation_bytes(100, 1) == target.activation_bytes(100, 1) + joined_bytes


@pytest.mark.parametrize("name", ["glm4moe", "deepseek2", "qwen35"])
def test_the_layer_of_a_gguf_file(tmp_path: Path, native: NativeKernels, name: str) -> None:
    file, mtp = write_predicting(name, tmp_path)
    folder = tmp_path / "converted"
    folder.mkdir()
    convert_gguf(file, folder, SilentProgress())
    blueprint, head = built(folder, native)
    ids_T, hidden_TC = inputs(mtp)
    cells = Cells(blueprint.kv_layout(PAGE, torch.float32), native)
    found_TC = run(blueprint, head, ids_T, hidden_TC, cells)
    torch.testing.assert_close(found_TC, mtp(ids_T, hidden_TC), atol=2e-4, rtol=2e-4)


def test_a_checkpoint_without_one_is_refused(tmp_path: Path) -> None:
    mtp = save_mtp(tmp_path, "mimo")
    mtp.model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has no layer that predicts further tokens"):
        built(tmp_path)
