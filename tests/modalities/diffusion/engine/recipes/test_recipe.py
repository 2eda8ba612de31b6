"""Every bit of a seed counts, and small seeds are torch's own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.modalities.diffusion.engine.recipes import ernie, packed, qwen, qwen21, spatial
from triptych.modalities.diffusion.engine.recipes.recipe import row_seed, seeded_generator
from triptych.modalities.diffusion.engine.recipes.text import TextRecipe
from triptych.modalities.diffusion.spec import spec_of
from triptych.modalities.diffusion.wire import ImageRequest


def drawn(seed: int) -> bytes:
    return torch.randn(64, generator=seeded_generator(seed)).numpy().tobytes()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_seeds_of_32_bits_are_those_of_torch(seed: int) -> None:
    plain = torch.randn(64, generator=torch.Generator().manual_seed(seed))
    assert drawn(seed) == plain.numpy().tobytes()


@settings(max_examples=80, deadline=None)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 63))
def test_every_bit_counts(seed: int, bit: int) -> None:
    assert drawn(seed) != drawn(seed ^ (1 << bit))
    assert drawn(seed) == drawn(seed)


def test_seeds_that_torch_takes_for_one() -> None:
    seeds = (0, 2**32, 2**53, 1, 2**32 + 1, -1, 2**63 - 1, 2**32 - 1)
    assert len({drawn(seed) for seed in seeds}) == len(seeds)


def test_a_large_seed_draws_a_normal_distribution() -> None:
    noise = torch.randn(100_000, generator=seeded_generator(2**53))
    assert abs(float(noise.mean())) < 0.02
    assert abs(float(noise.std()) - 1) < 0.02


def test_images_after_the_first_have_seeds_of_their_own() -> None:
    seeds = [row_seed(2**40, index) for index in range(10)]
    assert len(set(seeds)) == 10
    assert all(0 <= seed < 2**32 for seed in seeds[1:])


class LetterTokenizer:
    """A token for each letter, and two around them."""

    model_max_length = 77

    def __call__(self, text: str, **options: object) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[0] * (len(text) + 2))


@pytest.mark.parametrize(
    ("kind", "pipeline", "window"),
    [
        (spatial.StableDiffusion, "StableDiffusionPipeline", 77),
        (spatial.StableDiffusionXL, "StableDiffusionXLPipeline", 77),
        (spatial.StableDiffusion3, "StableDiffusion3Pipeline", 256),
        (spatial.PixArt, "PixArtSigmaPipeline", 300),
        (spatial.PixArtAlpha, "PixArtAlphaPipeline", 120),
        (spatial.Sana, "SanaPipeline", 299),
        (spatial.AuraFlow, "AuraFlowPipeline", 256),
        (packed.Flux, "FluxPipeline", 77),
        (packed.Chroma, "ChromaPipeline", 512),
        (packed.OvisImage, "OvisImagePipeline", 256),
        (ernie.ErnieImage, "ErnieImagePipeline", 77),
        (qwen.QwenImage, "QwenImagePipeline", 512),
        (qwen.QwenImageEdit, "QwenImageEditPipeline", 1024),
        (qwen21.QwenImage21, "QwenImage21Pipeline", 1024),
    ],
)
def test_a_prompt_beyond_the_window_is_cut(
    kind: type[TextRecipe], pipeline: str, window: int
) -> None:
    parts = {f"{part}{n}": LetterTokenizer() for n in ("", "_2", "_3") for part in _PARTS}
    recipe = kind(parts, spec_of(pipeline))
    for num_letters in (1, window - 2, window - 1, 2000):
        request = ImageRequest(prompt="a" * num_letters, guidance_scale=1.0)
        assert recipe.is_prompt_cut(request) == (num_letters + 2 > window)
        assert recipe.num_prompt_tokens(request) == min(num_letters + 2, window)


_PARTS = ("tokenizer", "text_encoder")
