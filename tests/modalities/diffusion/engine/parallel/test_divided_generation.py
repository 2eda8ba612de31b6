"""Latents of several ranks are those of one, whatever is divided and whichever cache skips."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from support.denoiser_families import build, conditioning_of, sample_of
from support.denoiser_stubs import NATIVE_CONFIGS
from support.rank_threads import on_ranks
from support.tiers import nightly
from triptych.core.errors import ConfigError
from triptych.core.runtime.devices.rank_group import RankGroup
from triptych.modalities.diffusion.engine.caches.methods import (
    CacheMethod,
    Level,
    first_block,
    magcache,
    planned,
    taylorseer,
    teacache,
)
from triptych.modalities.diffusion.engine.caches.row_cache import RowCache
from triptych.modalities.diffusion.engine.denoise import Denoiser
from triptych.modalities.diffusion.engine.denoise_row import DenoiseRow, GuidanceBranch
from triptych.modalities.diffusion.engine.families.model import Batch, Conditioning
from triptych.modalities.diffusion.engine.families.table import check_divisible, open_model
from triptych.modalities.diffusion.engine.guidance import Guidance
from triptych.modalities.diffusion.engine.parallel.division import Division
from triptych.modalities.diffusion.engine.samplers.registry import Spacing
from triptych.modalities.diffusion.engine.samplers.rows import start_row
from triptych.modalities.diffusion.engine.tensor_pool import TensorPools

pytestmark = pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")
CACHES: dict[str, Callable[[], CacheMethod | None]] = {
    "off": lambda: None,
    "planned": lambda: planned([step % 3 == 0 for step in range(6)]),
    "taylorseer": lambda: taylorseer(interval=3, warmup=2),
    "teacache": lambda: teacache("any", threshold=0.3, coefficients=(1.0, 0.0)),
    "teacache of outputs": lambda: teacache(
        "any", threshold=0.3, coefficients=(1.0, 0.0), level=Level.VELOCITY
    ),
    "first-block": lambda: first_block(threshold=0.3),
    "magcache": lambda: magcache((1.0, 0.99, 1.01), retention=0.1, level=Level.SPAN),
}
BY_TOKENS = (
    "ChromaTransformer2DModel",  # the model's tokens; of the others its blocks'
    "QwenImageTransformer2DModel",
    "SD3Transformer2DModel",
    "WanTransformer3DModel",
)
WHOLE = Division()
Generated = tuple[list[Tensor], list[list[int]]]
"""Latents, and how often each step ran the model for each branch."""


@cache
def module_of(name: str) -> nn.Module:
    return build(name)


def open_rows(name: str, cache_name: str, pools: TensorPools) -> list[DenoiseRow]:
    """An image with guidance, and two without."""
    rows = []
    for seed, num_branches in enumerate((2, 1, 1)):
        sample = start_row(
            sample_of(name, seed),
            NATIVE_CONFIGS["flow euler"],
            Spacing(num_steps=6),
            generator=torch.Generator().manual_seed(seed),
            pools=pools,
        )
        branches = []
        for number in range(num_branches):
            method = CACHES[cache_name]()
            kept = None if method is None else RowCache(method, 6, pools)
            conditioning = conditioning_of(name, 10 * seed + number)
            branches.append(GuidanceBranch(conditioning=conditioning, cache=kept))
        rows.append(DenoiseRow(sample=sample, branches=branches, guidance=Guidance(scale=3.0)))
    return rows


@torch.inference_mode()
def generate(name: str, cache_name: str, division: Division = WHOLE) -> Generated:
    """All images together, the last of which begins two steps later."""
    loop = Denoiser(open_model(module_of(name), division.tokens), division.branches)
    pools = TensorPools()
    rows, counted = open_rows(name, cache_name, pools), []
    for row in rows:
        loop.begin(row)
    while going := [row for row in rows if not row.is_done]:
        loop.step(going if rows[0].sample.step > 1 else going[:2])
        counted.append([branch.num_runs for row in rows for branch in row.branches])
    latents = [row.sample.sample.clone() for row in rows]
    for row in rows:
        row.release()
    assert pools.num_used == 0
    return latents, counted


def generate_on(num_ranks: int, ulysses_degree: int, name: str, cache_name: str) -> Generated:
    """The same on several ranks, of which each must come to the same bits."""

    def work(group: RankGroup) -> Generated:
        return generate(name, cache_name, Division.of(group, ulysses_degree))

    first, *others = on_ranks(num_ranks, work)
    for latents, counted in others:
        assert all(map(torch.equal, latents, first[0]))
        assert counted == first[1]
    return first


def skips(generated: Generated) -> bool:
    return any(count < 6 for count in generated[1][-1])


@pytest.mark.parametrize(
    ("name", "cache_name"),
    [*(("ChromaTransformer2DModel", each) for each in CACHES), ("UNet2DConditionModel", "planned")],
)
def test_branches_on_two_ranks_are_those_of_one_to_the_bit(name: str, cache_name: str) -> None:
    expected = generate(name, cache_name)
    assert skips(expected) == (cache_name != "off")
    latents, counted = generate_on(2, 1, name, cache_name)
    assert all(map(torch.equal, latents, expected[0]))
    assert counted == expected[1]


@pytest.mark.parametrize(
    ("name", "cache_name"),
    [
        ("FluxTransformer2DModel", "off"),
        ("Flux2Transformer2DModel", "off"),
        ("LongCatImageTransformer2DModel", "off"),
        ("OvisImageTransformer2DModel", "off"),
        *((name, "off") for name in BY_TOKENS),
        *((BY_TOKENS[0], each) for each in CACHES if each != "off"),
        *(nightly(name, each) for name in BY_TOKENS[1:] for each in CACHES if each != "off"),
    ],
)
def test_tokens_on_two_ranks_are_those_of_one(name: str, cache_name: str) -> None:
    """5 tokens of text do not divide evenly; each rank sees a part of what distances are of."""
    expected = generate(name, cache_name)
    latents, counted = generate_on(2, 2, name, cache_name)
    torch.testing.assert_close(latents, expected[0], atol=1e-5, rtol=1e-5)
    assert counted == expected[1]


@pytest.mark.parametrize("cache_name", ["planned", "first-block"])
def test_branches_and_tokens_on_four_ranks(cache_name: str) -> None:
    name = "ChromaTransformer2DModel"
    expected = generate(name, cache_name)
    latents, counted = generate_on(4, 2, name, cache_name)
    torch.testing.assert_close(latents, expected[0], atol=1e-5, rtol=1e-5)
    assert counted == expected[1]


@torch.inference_mode()
def test_tokens_of_an_image_that_is_edited_have_times_of_their_own() -> None:
    """Qwen-Image-Edit-2511: 16 generated tokens and 8 given, each with its time."""
    module = build("QwenImageTransformer2DModel", zero_cond_t=True)
    conditioning = replace(
        conditioning_of("QwenImageTransformer2DModel", 1),
        context=torch.randn(8, 16, generator=torch.Generator().manual_seed(2)),
        shared={"img_shapes": [[(1, 4, 4), (1, 2, 4)]]},
    )
    assert_divisible(module, sample_of("QwenImageTransformer2DModel", 3), conditioning)


@torch.inference_mode()
def test_a_text_as_long_as_a_part_of_the_image_is_not_taken_for_one() -> None:
    """Of 9 tokens one rank of Wan has 4, which attend to 4 of the text, too."""
    conditioning = Conditioning(rows={"encoder_hidden_states": torch.ones(4, 16)})
    sample = sample_of("WanTransformer3DModel", 3)[:, :, :6, :6]
    assert_divisible(module_of("WanTransformer3DModel"), sample, conditioning)


@torch.inference_mode()
def test_layers_in_which_an_image_attends_to_itself_alone() -> None:
    """Stable Diffusion 3.5 medium has such attention beside the other, with its tokens divided."""
    name = "SD3Transformer2DModel"
    module = build(name, dual_attention_layers=(0, 1), qk_norm="rms_norm")
    assert_divisible(module, sample_of(name, 3), conditioning_of(name, 1))


@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "QwenImageTransformer2DModel"])
@torch.inference_mode()
def test_a_text_of_less_tokens_than_ranks_is_not_divided(name: str) -> None:
    conditioning = conditioning_of(name, 1)
    text = {"encoder_hidden_states", "txt_ids"}
    rows = {arg: rows[:1] if arg in text else rows for arg, rows in conditioning.rows.items()}
    shared = {arg: rows[:1] if arg in text else rows for arg, rows in conditioning.shared.items()}
    assert_divisible(
        module_of(name), sample_of(name, 3), replace(conditioning, rows=rows, shared=shared)
    )


def assert_divisible(module: nn.Module, sample: Tensor, conditioning: Conditioning) -> None:
    times = torch.tensor([500.0])
    batch = Batch(samples=sample[None], times=times, conditioning=[conditioning])
    expected = open_model(module).velocity(batch)
    for found in on_ranks(2, lambda group: open_model(module, group).velocity(batch)):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_what_is_not_divided_by_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="UNet2DConditionModel is not divided by tokens"):
        check_divisible("UNet2DConditionModel", {}, 2)
    with pytest.raises(ConfigError, match="has 4 heads here"):
        check_divisible("FluxTransformer2DModel", {"num_attention_heads": 4}, 5)
    check_divisible("FluxTransformer2DModel", {"num_attention_heads": 4}, 4)
