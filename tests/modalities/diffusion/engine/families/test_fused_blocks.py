"""Fused blocks: every model answers as before, with adapters too, and keeps its tensors' names."""

from __future__ import annotations

import pytest
import torch

from support.denoiser_families import TINY, build, conditioning_of, sample_of
from support.gpu_rehearsal import rehearse_gpu
from triptych.modalities.diffusion.engine.adapters.branches import (
    AdapterBranch,
    apply_branches,
    make_share,
)
from triptych.modalities.diffusion.engine.families.fused_blocks import fuse_blocks
from triptych.modalities.diffusion.engine.families.model import Batch, DenoiseModel
from triptych.modalities.diffusion.engine.families.table import open_model

FLUX = "FluxTransformer2DModel"
NUM_FUSED = {
    FLUX: 12,  # blocks, their attention, and GELUs
    "ChromaTransformer2DModel": 8,  # attention and GELUs
    "QwenImageTransformer2DModel": 6,
    "SD3Transformer2DModel": 5,
    "GlmImageTransformer2DModel": 3,
    "HunyuanImageTransformer2DModel": 4,
    "LongCatImageTransformer2DModel": 4,
    "PixArtTransformer2DModel": 3,
    "WanTransformer3DModel": 3,
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning"),
]


def batch_of(name: str) -> Batch:
    return Batch(
        samples=torch.stack([sample_of(name, seed) for seed in range(2)]),
        times=torch.tensor([900.0, 20.0]),
        conditioning=[conditioning_of(name, seed) for seed in range(2)],
    )


@pytest.mark.parametrize("name", TINY)
def test_a_model_answers_as_before(name: str) -> None:
    module, batch = build(name), batch_of(name)
    state, model = module.state_dict(), open_model(module)
    expected = model.velocity(batch)
    assert fuse_blocks(module) == NUM_FUSED.get(name, 0)
    assert fuse_blocks(module) == 0
    torch.testing.assert_close(module.state_dict(), state, rtol=0, atol=0)
    torch.testing.assert_close(open_model(module).velocity(batch), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [FLUX, "ChromaTransformer2DModel"])
def test_the_kernels_of_a_gpu_answer_so_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, batch = build(name), batch_of(name)
    expected = open_model(module).velocity(batch)
    rehearse_gpu(monkeypatch)
    # On a CPU a product with GELU has the exact kind.
    monkeypatch.setattr(torch, "_addmm_activation", tanh_gelu_of_product)
    found = open_model(module).velocity(batch)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def tanh_gelu_of_product(
    bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, use_gelu: bool
) -> torch.Tensor:
    assert use_gelu
    return torch.nn.functional.gelu(torch.addmm(bias, x, weight), approximate="tanh")


@pytest.mark.parametrize("part", ["to_q", "to_k", "add_v_proj", "proj_mlp", "proj_out", "ff.net.0"])
def test_adapters_act_on_fused_layers(part: str) -> None:
    module, batch = build(FLUX), batch_of(FLUX)
    plain = open_model(module)
    expected, without = adapted_velocity(plain, part, batch), plain.velocity(batch)
    fuse_blocks(module)
    model = open_model(module)
    torch.testing.assert_close(adapted_velocity(model, part, batch), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(expected, without, atol=1e-3)
    torch.testing.assert_close(model.velocity(batch), without, rtol=1e-5, atol=1e-5)


def adapted_velocity(model: DenoiseModel, part: str, batch: Batch) -> torch.Tensor:
    """With branches of random weights on the linear layers whose path has this part."""
    generator = torch.Generator().manual_seed(0)
    branches = {}
    for path, layer in model.module.named_modules():
        if part in path and isinstance(layer, torch.nn.Linear):
            down = torch.randn(2, layer.in_features, generator=generator)
            up = torch.randn(layer.out_features, 2, generator=generator)
            branches[layer] = AdapterBranch(layer, down, up)
    with apply_branches([(branches, make_share([1.0, 0.5], torch.device("cpu")))]):
        return model.velocity(batch)
