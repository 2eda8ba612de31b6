"""Pictures drawn by several ranks are those of one, whatever is divided, whichever cache skips."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from support.image_runner import WHOLE, RunnerDriver, image_request, open_executor
from support.rank_threads import on_ranks
from triptych.core.devices.rank_group import RankGroup
from triptych.core.errors import ConfigError
from triptych.core.pixels import Pixels
from triptych.modalities.diffusion.engine.families.table import check_divisible
from triptych.modalities.diffusion.engine.parallel.division import Division
from triptych.modalities.diffusion.plan import PictureRowResult
from triptych.modalities.diffusion.wire import ImageRequest, StepCache

pytestmark = pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")
CACHES = ("off", "planned", "taylorseer", "teacache", "first-block", "magcache")
Drawn = tuple[list[torch.Tensor], list[tuple[int, int]], list[Pixels]]


def draw(pipeline: str, requests: list[ImageRequest], division: Division = WHOLE) -> Drawn:
    """Latents, what was computed in each step, and the pictures."""
    driver = RunnerDriver(open_executor(pipeline, division=division))
    keys = driver.encode(*requests)
    counted: list[tuple[int, int]] = []
    for step in range(max(steps.num_steps for steps in driver.planned_steps.values())):
        going = [key for key in keys if step < driver.planned_steps[key].num_steps]
        counted += map(_counts, driver.denoise(going))
    pictures = driver.runner._pictures
    latents = [pictures[key].row.sample.sample.clone() for key in keys]
    return latents, counted, driver.decode(keys)


def _counts(row: PictureRowResult) -> tuple[int, int]:
    assert row.error is None
    return row.num_computed, row.num_rows


def draw_on(num_ranks: int, ulysses_degree: int, pipeline: str, asked: list[ImageRequest]) -> Drawn:
    """The same on several ranks, of which each must come to the same."""

    def work(group: RankGroup) -> Drawn:
        return draw(pipeline, asked, Division.of(group, ulysses_degree))

    first, *others = on_ranks(num_ranks, work)
    for latents, counted, pictures in others:
        assert all(map(torch.equal, latents, first[0]))
        assert (counted, pictures) == first[1:]
    return first


def asked(cache: str = "off", **fields: object) -> list[ImageRequest]:
    """A picture with guidance, and two without."""
    choice = StepCache(name=cache)  # type: ignore[arg-type]
    guided = image_request(guidance_scale=4.0, negative_prompt="dark", cache=choice, **fields)
    plain = partial(image_request, guidance_scale=1.0, cache=choice, num_steps=5)
    return [guided, plain(seed=1), plain(seed=2)]


@pytest.mark.parametrize("cache", CACHES)
def test_branches_on_two_ranks_are_those_of_one_to_the_bit(cache: str) -> None:
    expected = draw("ChromaPipeline", asked(cache))
    latents, counted, pictures = draw_on(2, 1, "ChromaPipeline", asked(cache))
    assert all(map(torch.equal, latents, expected[0]))
    assert (counted, pictures) == expected[1:]


@pytest.mark.parametrize("pipeline", ["StableDiffusionPipeline", "QwenImagePipeline"])
def test_branches_of_any_model_are_divided(pipeline: str) -> None:
    """One that has no blocks to skip, and one whose prompts differ in length."""
    expected = draw(pipeline, asked())
    latents, _, pictures = draw_on(2, 1, pipeline, asked())
    assert all(map(torch.equal, latents, expected[0]))
    assert pictures == expected[2]


def assert_close(found: Drawn, expected: Drawn) -> None:
    """Latents within 1e-5, as attention adds up in another order; bytes may round otherwise."""
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-5)
    assert found[1] == expected[1]
    for ours, theirs in zip(found[2], expected[2], strict=True):
        pairs = zip(ours.rgb, theirs.rgb, strict=True)
        assert max(abs(our - their) for our, their in pairs) <= 1


@pytest.mark.parametrize(
    ("pipeline", "cache"),
    [
        ("FluxPipeline", "off"),
        ("Flux2Pipeline", "off"),
        ("OvisImagePipeline", "off"),
        *(("ChromaPipeline", cache) for cache in CACHES),
    ],
)
def test_tokens_on_two_ranks_are_those_of_one(pipeline: str, cache: str) -> None:
    """And what caches skip, by distances that each rank sees a part of."""
    odd = {"width": 48, "height": 48}
    expected = draw(pipeline, asked(cache, **odd))
    assert_close(draw_on(2, 2, pipeline, asked(cache, **odd)), expected)


@pytest.mark.parametrize("cache", ["planned", "first-block"])
def test_branches_and_tokens_on_four_ranks(cache: str) -> None:
    expected = draw("ChromaPipeline", asked(cache))
    assert_close(draw_on(4, 2, "ChromaPipeline", asked(cache)), expected)


def test_what_has_no_tokens_of_its_own_is_refused() -> None:
    with pytest.raises(ConfigError, match="UNet2DConditionModel is not divided by tokens"):
        check_divisible("UNet2DConditionModel", {}, 2)
    with pytest.raises(ConfigError, match="has 4 heads here"):
        check_divisible("FluxTransformer2DModel", {"num_attention_heads": 4}, 5)
    check_divisible("FluxTransformer2DModel", {"num_attention_heads": 4}, 4)
