"""DFlash drafts: what they compute, and which of them are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.decoder_families import save_family
from support.gpu_rehearsal import rehearse_gpu
from support.head_models import DRAFT, PAGE, Cells, DFlash, save_dflash
from triptych.core.errors import ConfigError
from triptych.core.runtime.decoders.heads.dflash import DFlashBlueprint, DFlashHead
from triptych.core.runtime.decoders.native import NativeBlueprint
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.decoder import Decoder
from triptych.core.runtime.tensors.checkpoint import Checkpoint

CPU = torch.device("cpu")
BLOCK = 5


def built(
    folder: Path,
    native: NativeKernels | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> tuple[DFlashHead, Decoder, Cells]:
    """The draft in `folder` for the model next to it, and its cells."""
    with Checkpoint.open(folder.parent / "target") as checkpoint:
        model = NativeBlueprint(
            checkpoint.config, max_length=64, dtype=dtype, device=device, native=native
        )
        target = model.build(checkpoint, lambda _: None)
    with Checkpoint.open(folder) as checkpoint:
        blueprint = DFlashBlueprint(checkpoint, model, native, "draft")
        head = blueprint.build(checkpoint, target, lambda _: None)
    assert (blueprint.hidden_layers, blueprint.block_size) == ((1, 3), 5)
    assert blueprint.weight_bytes() == checkpoint.num_bytes
    return head, target, Cells(blueprint.kv_layout(PAGE, dtype), native, device)


@pytest.fixture
def draft(tmp_path: Path) -> DFlash:
    save_family(tmp_path / "target", "Qwen3", tie_word_embeddings=False)
    return save_dflash(tmp_path / "draft")


@torch.inference_mode()
def run(head: DFlashHead, cells: Cells, states: list[torch.Tensor], start: int) -> torch.Tensor:
    """Follow the states from `start` on, then compute the block after them."""
    end = len(states[0])
    positions_T, step = cells.step(start, end - start)
    head.follow(head.fuse([state_TC[start:] for state_TC in states]), positions_T, step)
    ids_T = torch.tensor([7] + [head.mask_token_id] * (BLOCK - 1), device=states[0].device)
    positions_T, step = cells.step(end, BLOCK, [end + BLOCK] * BLOCK)
    return head.forward(ids_T, positions_T, step)


def states_of(num_tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(9, 48, generator=generator)[:num_tokens] for _ in range(2)]


def expected(draft: DFlash, target: Any, states: list[torch.Tensor]) -> torch.Tensor:
    ids_T = torch.tensor([7] + [198] * (BLOCK - 1))
    return draft(draft.context(states), target.embed(ids_T))


@pytest.mark.parametrize("has_kernels", [True, False])
def test_a_block_equals_the_published_forward(
    tmp_path: Path, draft: DFlash, native: NativeKernels, has_kernels: bool
) -> None:
    """Twice: the context takes the place of the first block's cells."""
    head, target, cells = built(tmp_path / "draft", native if has_kernels else None)
    assert (cells.kv.native is not None) == has_kernels
    for start, end in ((0, 6), (6, 9)):
        found_BC = run(head, cells, states_of(end), start)
        wanted_BC = expected(draft, target, states_of(end))
        torch.testing.assert_close(found_BC, wanted_BC, atol=2e-4, rtol=2e-4)
        torch.testing.assert_close(head.logits(found_BC), target.logits(found_BC))


@pytest.mark.gpu
def test_the_kernels_of_a_gpu(
    tmp_path: Path, draft: DFlash, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = rehearse_gpu(monkeypatch)
    head, target, cells = built(tmp_path / "draft", device=device)
    found_BC = run(head, cells, [state.to(device) for state in states_of(6)], 0).cpu()
    monkeypatch.undo()
    wanted_BC = expected(draft, target, states_of(6))
    torch.testing.assert_close(found_BC, wanted_BC.cpu(), atol=2e-4, rtol=2e-4)


def test_bfloat16_errs_no_more_than_torch(tmp_path: Path, native: NativeKernels) -> None:
    save_family(tmp_path / "target", "Qwen3", tie_word_embeddings=False)
    draft = save_dflash(tmp_path / "draft", torch.bfloat16)
    head, target, cells = built(tmp_path / "draft", native, torch.bfloat16)
    states = [state.bfloat16() for state in states_of(9)]
    found_BC, theirs_BC = run(head, cells, states, 0).float(), expected(draft, target, states)
    x_BC = target.embed(torch.tensor([7] + [198] * (BLOCK - 1))).float()
    draft.model.float()
    draft.hidden_norm.float()
    exact = replace(draft, projection_OI=draft.projection_OI.float())
    exact_BC = exact(exact.context([state.float() for state in states]), x_BC)
    ours, theirs = (float((each - exact_BC).norm()) for each in (found_BC, theirs_BC.float()))
    assert ours <= 1.5 * theirs


OTHERS = DRAFT["dflash_config"]
assert isinstance(OTHERS, dict)


@pytest.mark.parametrize(
    ("edits", "reason"),
    [
        ({"num_target_layers": 5}, "reads layers of a model of 5, not of 4"),
        ({"dflash_config": OTHERS | {"target_layer_ids": [4]}}, "reads layers of a model of 4"),
        ({"dflash_config": OTHERS | {"mask_token_id": 199}}, "names no mask_token_id within"),
        ({"dflash_config": OTHERS | {"use_swa": True}}, "has layers with windows, or others"),
        ({"layer_types": ["sliding_attention"] * 2}, "has layers with windows, or others"),
        ({"hidden_size": 24, "head_dim": 12}, "has 24 values for a token, and the model 48"),
        ({"dflash_config": {}, "architectures": [], "block_size": 0}, "is not usable"),
    ],
)
def test_others_are_refused(tmp_path: Path, edits: dict[str, Any], reason: str) -> None:
    save_family(tmp_path / "target", "Qwen3", tie_word_embeddings=False)
    save_dflash(tmp_path / "draft", **edits)
    with pytest.raises((ConfigError, ValueError), match=reason):
        built(tmp_path / "draft")
