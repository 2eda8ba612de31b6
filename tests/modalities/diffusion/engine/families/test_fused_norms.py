"""Twins of adaptive norms: every model answers as before, and its tensors keep their names."""

from __future__ import annotations

import pytest
import torch

from support.denoiser_families import TINY, build, conditioning_of, sample_of
from triptych.modalities.diffusion.engine.families.fused_norms import fuse_norms
from triptych.modalities.diffusion.engine.families.model import Batch
from triptych.modalities.diffusion.engine.families.table import open_model

# The others' blocks scale and shift their norms themselves.
NUM_TWINS = {
    "AuraFlowTransformer2DModel": 6,
    "Flux2Transformer2DModel": 1,
    "FluxTransformer2DModel": 7,
    "HunyuanImageTransformer2DModel": 7,
    "LongCatImageTransformer2DModel": 7,
    "OvisImageTransformer2DModel": 7,
    "QwenImageTransformer2DModel": 1,
    "SD3Transformer2DModel": 7,
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
    assert fuse_norms(module) == NUM_TWINS.get(name, 0)
    assert fuse_norms(module) == 0
    assert list(module.state_dict()) == names
    torch.testing.assert_close(model.velocity(batch), expected, rtol=1e-5, atol=1e-5)
