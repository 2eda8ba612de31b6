"""Twins of adaptive norms: every model answers as before, and its tensors keep their names."""

from __future__ import annotations

import pytest
import torch

from support.denoiser_families import TINY, build, conditioning_of, sample_of
from triptych.modalities.diffusion.engine.families.fused_norms import fuse_norms
from triptych.modalities.diffusion.engine.families.model import Batch
from triptych.modalities.diffusion.engine.families.table import open_model

# Blocks of these scale and shift norms of their own.
WITHOUT = {
    "PixArtTransformer2DModel",
    "SanaTransformer2DModel",
    "WanTransformer3DModel",
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning"),
]


@pytest.mark.parametrize("name", TINY)
def test_a_model_answers_as_before(name: str) -> None:
    module = build(name)
    batch = Batch(
        samples=torch.stack([sample_of(name, seed) for seed in range(2)]),
        times=torch.tensor([900.0, 20.0]),
        conditioning=[conditioning_of(name, seed) for seed in range(2)],
    )
    names, model = list(module.state_dict()), open_model(module)
    expected = model.velocity(batch)
    num_fused = fuse_norms(module)
    print(name, num_fused)
    assert fuse_norms(module) == 0
    assert list(module.state_dict()) == names
    torch.testing.assert_close(model.velocity(batch), expected, rtol=1e-5, atol=1e-5)
