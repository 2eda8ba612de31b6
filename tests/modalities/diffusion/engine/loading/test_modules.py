"""A module filled without memory in between: in half precision as diffusers itself loads it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import diffusers
import pytest
import torch
from torch import nn

from support.denoiser_families import build, conditioning_of, sample_of
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.modalities.diffusion.engine.families.model import Batch
from triptych.modalities.diffusion.engine.families.table import open_model
from triptych.modalities.diffusion.engine.loading.modules import (
    Holding,
    open_diffusers_module,
    sketch,
)

pytestmark = pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")


def velocity(name: str, module: nn.Module) -> torch.Tensor:
    given = conditioning_of(name, 0)
    halved = {key: value.bfloat16() for key, value in given.rows.items()}
    return open_model(module).velocity(
        Batch(
            samples=sample_of(name, 0)[None],
            times=torch.tensor([500.0]),
            conditioning=[replace(given, rows=halved)],
        )
    )


@pytest.mark.parametrize(
    "name",
    [
        "FluxTransformer2DModel",
        "PixArtTransformer2DModel",  # positions are a buffer that no file has
        "WanTransformer3DModel",  # some weights stay in float32
    ],
)
def test_half_precision_is_diffusers_own(name: str, tmp_path: Path) -> None:
    build(name).save_pretrained(tmp_path)
    kind = getattr(diffusers, name)
    with Checkpoint.open(tmp_path) as checkpoint:
        ours = open_diffusers_module(
            kind,
            checkpoint,
            Holding(device=torch.device("cpu"), dtype=torch.bfloat16),
            lambda share: None,
        )
    theirs = kind.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    for key, tensor in theirs.state_dict().items():
        assert ours.state_dict()[key].dtype is tensor.dtype, key
    assert torch.equal(velocity(name, ours), velocity(name, theirs))
    assert not any(weight.requires_grad for weight in ours.parameters())


def test_a_sketch_takes_no_memory() -> None:
    """Of a model a thousand times too large for this machine."""
    config = {"num_layers": 1, "num_single_layers": 0, "attention_head_dim": 128}
    wide = {**config, "num_attention_heads": 2**13, "axes_dims_rope": [16, 56, 56]}
    module = sketch(diffusers.FluxTransformer2DModel, wide)
    assert sum(weight.numel() for weight in module.parameters()) > 2**42
    assert all(weight.is_meta for weight in module.parameters())
