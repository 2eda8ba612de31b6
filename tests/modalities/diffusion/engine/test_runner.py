"""The runner: plans become images, and whatever fails leaves the rest as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import NoneType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.image_runner import RunnerDriver, image_request, open_executor
from triptych.core.engine_api.pixels import Pixels
from triptych.core.errors import InternalError, InvalidRequest, NonFinite, OutOfMemory
from triptych.modalities.diffusion.engine import denoise
from triptych.modalities.diffusion.engine.executor import ImageExecutor
from triptych.modalities.diffusion.plan import ImageKey, ImageRow, ImageStart
from triptych.modalities.diffusion.wire import StepCache

METHODS = ("off", "planned", "taylorseer", "teacache", "first-block", "magcache")


@pytest.fixture(scope="module")
def executor() -> ImageExecutor:
    return open_executor()


@pytest.fixture
def driver(executor: ImageExecutor) -> Iterator[RunnerDriver]:
    """A runner; what a test leaves in it is released, and nothing else may be left then."""
    driver = RunnerDriver(executor)
    yield driver
    driver.run("release", dropped=tuple(driver.runner._images))
    assert driver.runner.num_images == 0
    assert executor.pools.num_used == 0
    assert executor._prompts.num_references == 0


def latents_of(driver: RunnerDriver, key: ImageKey) -> Tensor:
    return driver.runner._images[key].row.sample.sample


def decisions_of(driver: RunnerDriver, key: ImageKey) -> list[int]:
    branches = driver.runner._images[key].row.branches
    return [branch.cache.decisions.num_computed for branch in branches if branch.cache]


def spoil(driver: RunnerDriver, key: ImageKey, value: float) -> None:
    sample = driver.runner._images[key].row.sample
    with torch.inference_mode():
        sample.pool.write(sample.cells[:1], torch.full((1, *sample.pool.shape), value))


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at_call: int = 0) -> None:
    """The call of that number runs out of memory, before it does anything."""
    original, calls = getattr(owner, name), []

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) - 1 == at_call:
            raise torch.OutOfMemoryError("there is none left")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)


def fail_where(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, is_guilty: Callable[[Any], bool]
) -> list[int]:
    """Calls about anything guilty raise. Returns, filled as it happens, how many each is about."""
    original, sizes = getattr(owner, name), []

    def call(*args: Any) -> Any:
        about = args[-1]
        sizes.append(len(about))
        if any(map(is_guilty, about.samples if name == "velocity" else about)):
            raise RuntimeError("a fault of ours")
        return original(*args)

    monkeypatch.setattr(owner, name, call)
    return sizes


def closeness(ours: Pixels, theirs: Pixels) -> int:
    assert (ours.width, ours.height) == (theirs.width, theirs.height)
    pair = [np.frombuffer(pixels.rgb, np.uint8).astype(int) for pixels in (ours, theirs)]
    return int(np.abs(pair[0] - pair[1]).max())


@pytest.mark.parametrize("name", METHODS)
def test_a_row_alone_and_in_a_batch_skips_the_same_and_ends_the_same(
    driver: RunnerDriver, name: str
) -> None:
    cache = StepCache(name=name)  # type: ignore[arg-type]
    asked = [
        image_request(seed=1, num_steps=9, cache=cache),
        image_request(seed=2, num_steps=7, cache=cache, prompt="A blue car", guidance_scale=1.0),
        image_request(seed=3, num_steps=9, cache=StepCache(name="taylorseer")),
        image_request(seed=4, num_steps=5, width=96),
    ]
    alone = []
    for index, request in enumerate(asked):
        (key,) = driver.encode(request, first=10 + index)
        for _ in range(driver.planned_steps[key].num_steps):
            driver.denoise([key])
        alone.append((latents_of(driver, key), decisions_of(driver, key)))
        driver.run("release", dropped=(key,))
    keys = driver.encode(*asked)
    driver.denoise(keys[:1])  # one step ahead of the others
    done = {key: int(key == keys[0]) for key in keys}
    while going := [key for key in keys if done[key] < driver.planned_steps[key].num_steps]:
        driver.denoise(going)
        done.update({key: done[key] + 1 for key in going})
    for key, (expected, num_computed) in zip(keys, alone, strict=True):
        assert decisions_of(driver, key) == num_computed
        scale = float(expected.abs().max())
        assert float((latents_of(driver, key) - expected).abs().max()) <= 1e-5 * scale
    if name != "off":
        assert decisions_of(driver, keys[0])[0] < 9


@pytest.mark.parametrize("name", METHODS)
def test_planned_steps_match_the_runs(driver: RunnerDriver, name: str) -> None:
    request = image_request(num_steps=9, cache=StepCache(name=name))  # type: ignore[arg-type]
    (key,) = driver.encode(request)
    planned, num_done = driver.planned_steps[key], 0
    assert planned.num_steps == 9
    assert planned.num_prompt_tokens == 13  # a token per letter, and two around them
    counts = [row.num_computed for _ in range(9) for row in driver.denoise([key])]
    for num_rows, num_computed in zip(planned.num_rows, counts, strict=True):
        assert num_computed <= bool(num_rows)
        num_done += num_computed
    if name in {"planned", "taylorseer", "off"}:
        assert counts == [int(num_rows > 0) for num_rows in planned.num_rows]
    assert (num_done == 9) == (name == "off")


@pytest.mark.parametrize("name", METHODS)
def test_a_step_shared_between_two_plans_is_the_same_step(driver: RunnerDriver, name: str) -> None:
    cache = StepCache(name=name)  # type: ignore[arg-type]
    request = image_request(num_steps=9, cache=cache)
    whole, shared = driver.encode(request, request)
    for _ in range(9):
        (at_once,) = driver.denoise([whole])
        (ahead,) = driver.denoise([shared], num_steps=0, evaluates_ahead=True)
        (taken,) = driver.denoise([shared])
        assert ahead.num_computed == 0
        assert taken.num_computed == at_once.num_computed
        assert ahead.num_rows + taken.num_rows == at_once.num_rows
        assert ahead.num_rows <= 1
    assert decisions_of(driver, shared) == decisions_of(driver, whole)
    expected = latents_of(driver, whole)
    scale = float(expected.abs().max())
    assert float((latents_of(driver, shared) - expected).abs().max()) <= 1e-5 * scale


def test_a_branch_is_asked_ahead_after_the_skips_before_it(driver: RunnerDriver) -> None:
    request = image_request(num_steps=9, cache=StepCache(name="planned"))
    whole, shared = driver.encode(request, request)
    driver.denoise([shared])
    for num_skips in (2, 2, 1):
        (ahead,) = driver.denoise([shared], num_steps=num_skips, evaluates_ahead=True)
        (taken,) = driver.denoise([shared])
        assert (ahead.num_rows, taken.num_rows, taken.num_computed) == (1, 1, 1)
    first, second = driver.finish([whole])[0], driver.decode([shared])[0]
    assert closeness(first, second) <= 1


def test_a_branch_that_ran_out_of_memory_is_asked_again(
    driver: RunnerDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, shared = driver.encode(*[image_request(num_steps=3)] * 2)
    driver.denoise([shared], num_steps=0, evaluates_ahead=True)
    fail_once(monkeypatch, denoise, "evaluate")
    with pytest.raises(OutOfMemory):
        driver.denoise([shared])
    (taken,) = driver.denoise([shared])
    assert (taken.num_computed, taken.num_rows) == (1, 1)
    driver.denoise([whole])
    assert torch.allclose(latents_of(driver, whole), latents_of(driver, shared), atol=1e-5)


def test_an_image_stepped_by_a_failed_plan_is_not_asked_ahead(
    driver: RunnerDriver,
) -> None:
    """Its plan is made again in halves: the first runs no branch, the second takes no step."""
    cache = StepCache(name="planned")
    (whole,) = driver.encode(image_request(num_steps=9, cache=cache))
    (key,) = driver.encode(image_request(num_steps=9, cache=cache), first=1)
    driver.denoise([key])
    driver.runner._images[key].step = 0  # as if the scheduler did not know of it
    (ahead,) = driver.denoise([key], num_steps=0, evaluates_ahead=True)
    (taken,) = driver.denoise([key])
    assert (ahead.num_computed, taken.num_computed) == (0, 0) or taken.num_computed == 1
    for num_steps in (3, 3, 2):
        (row,) = driver.denoise([key], num_steps=num_steps)
        assert row.num_computed == 1
    assert closeness(driver.finish([whole])[0], driver.decode([key])[0]) <= 1


def test_skips_are_taken_on_the_way_to_the_next_run(driver: RunnerDriver) -> None:
    request = image_request(num_steps=9, cache=StepCache(name="planned"))
    keys = driver.encode(request, image_request(num_steps=9, cache=StepCache(name="planned")))
    assert driver.planned_steps[keys[0]].num_rows == (2, 0, 0, 2, 0, 0, 2, 0, 2)
    (expected,) = driver.finish(keys[:1])
    results = [driver.denoise(keys[1:], num_steps=count) for count in (1, 3, 3, 2)]
    assert [row.num_computed for (row,) in results] == [1, 1, 1, 1]
    (leapt,) = driver.decode(keys[1:])
    assert closeness(leapt, expected) <= 1


def test_previews_come_when_asked_for_and_near_the_image(driver: RunnerDriver) -> None:
    (key,) = driver.encode(image_request(num_steps=6))
    previews = []
    for step in range(6):
        (row,) = driver.denoise([key], has_preview=step % 2 == 1)
        previews.append(row.pixels)
    assert [pixels is not None for pixels in previews] == [False, True] * 3
    last = previews[-1]
    assert last is not None
    assert (last.width, last.height, len(last.rgb)) == (8, 8, 192)
    clean = latents_of(driver, key)
    expected = driver.executor._decoder.preview(clean, driver.runner._images[key].request)
    assert closeness(last, Pixels(width=8, height=8, rgb=expected.get().numpy().tobytes())) <= 1


def test_what_cannot_be_generated_ends_itself_alone(driver: RunnerDriver) -> None:
    keys = [ImageKey("bad", 0), ImageKey("good", 0)]
    requests = [image_request(width=65), image_request()]
    starts = [ImageStart(key=k, request=r) for k, r in zip(keys, requests, strict=True)]
    bad, good = driver.run("encode", starts=tuple(starts))
    assert isinstance(bad.error, InvalidRequest)
    assert bad.error.param == "size"
    assert good.planned is not None
    assert driver.runner.num_images == 1


def test_latents_that_are_not_finite_fail_their_row_alone(driver: RunnerDriver) -> None:
    keys = driver.encode(image_request(), image_request(seed=8))
    (expected,) = driver.finish(driver.encode(image_request(seed=8), first=5))
    spoil(driver, keys[0], float("nan"))
    spoiled, sound = driver.denoise(keys)
    assert isinstance(spoiled.error, NonFinite)
    assert sound.error is None
    driver.run("release", dropped=keys[:1])
    (generated,) = driver.finish(keys[1:], done=1)
    assert closeness(generated, expected) <= 1


def test_an_image_that_is_not_finite_is_no_image(driver: RunnerDriver) -> None:
    keys = driver.encode(image_request(), image_request(seed=8))
    driver.denoise(keys, num_steps=6)
    spoil(driver, keys[0], float("inf"))
    spoiled, sound = driver.run("decode", rows=tuple(ImageRow(key=key) for key in keys))
    assert isinstance(spoiled.error, NonFinite)
    assert sound.pixels is not None
    assert driver.runner.num_images == 0


def test_equal_prompts_are_encoded_once(
    driver: RunnerDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[str] = []
    recipe = driver.executor.recipe
    original = type(recipe).encode

    def encode(self: Any, prompt: str, *, is_negative: bool) -> dict[str, Tensor]:
        encoded.append(prompt)
        return original(self, prompt, is_negative=is_negative)

    monkeypatch.setattr(type(recipe), "encode", encode)
    many = image_request(prompt="Something new", negative_prompt="blur", tenant="a")
    starts = [ImageStart(key=ImageKey("n", index), request=many) for index in range(3)]
    driver.run("encode", starts=tuple(starts))
    assert encoded == ["Something new", "blur"]
    driver.encode(many)
    assert encoded == ["Something new", "blur"]
    held = driver.executor._prompts.num_references
    assert held == 8
    driver.encode(
        image_request(prompt="Something new", negative_prompt="blur", tenant="b"), first=9
    )
    assert encoded == ["Something new", "blur"] * 2


def test_images_asked_for_together_differ(driver: RunnerDriver) -> None:
    request = image_request()
    keys = [ImageKey("n", index) for index in range(2)]
    driver.run("encode", starts=tuple(ImageStart(key=key, request=request) for key in keys))
    first, second = (latents_of(driver, key) for key in keys)
    assert not torch.allclose(first, second)
    assert torch.equal(first, latents_of(driver, driver.encode(request)[0]))


def test_a_fault_in_a_run_ends_its_row_alone(
    driver: RunnerDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [image_request(seed=seed, guidance_scale=1.0) for seed in (7, 8, 9)]
    expected = driver.finish(driver.encode(*asked, first=5))
    keys = driver.encode(*asked)
    driver.denoise(keys, num_steps=2)
    spoil(driver, keys[1], 1e6)
    model = type(driver.executor._denoiser.model)
    with monkeypatch.context() as patch:
        sizes = fail_where(patch, model, "velocity", lambda sample: bool(sample.max() > 1e5))
        rows = driver.denoise(keys, has_preview=True)
    assert sizes == [3, 1, 1, 1]
    assert [type(row.error) for row in rows] == [NoneType, InternalError, NoneType]
    assert [row.pixels is not None for row in rows] == [True, False, True]
    assert [row.num_computed for row in rows] == [1, 0, 1]
    driver.run("release", dropped=keys[1:2])
    generated = driver.finish(keys[::2], done=3)
    pairs = zip(generated, expected[::2], strict=True)
    assert all(closeness(ours, theirs) <= 1 for ours, theirs in pairs)


def test_a_fault_in_a_prompt_ends_its_image_alone(
    driver: RunnerDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [image_request(prompt=prompt) for prompt in ("A hen", "A curse", "A fox")]
    starts = [ImageStart(key=ImageKey(request.prompt, 0), request=request) for request in requests]
    recipe = type(driver.executor.recipe)
    fail_where(monkeypatch, recipe, "encode_all", lambda prompt: prompt.text == "A curse")
    rows = driver.run("encode", starts=tuple(starts))
    assert [type(row.error) for row in rows] == [NoneType, InternalError, NoneType]
    assert driver.runner.num_images == 2


def test_a_fault_in_pixels_ends_their_image_alone(
    driver: RunnerDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = driver.encode(image_request(), image_request(seed=8))
    driver.denoise(keys, num_steps=6)
    spoil(driver, keys[0], 1e6)
    recipe = type(driver.executor.recipe)
    fail_where(monkeypatch, recipe, "decode_all", lambda sample: bool(sample[0].max() > 1e5))
    rows = driver.run("decode", rows=tuple(ImageRow(key=key) for key in keys))
    assert [type(row.error) for row in rows] == [InternalError, NoneType]
    assert rows[1].pixels is not None
    assert driver.runner.num_images == 1


def test_a_fault_of_every_row_is_none_of_theirs(
    driver: RunnerDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = driver.encode(image_request(), image_request(seed=8))
    model = type(driver.executor._denoiser.model)
    with monkeypatch.context() as patch:
        fail_where(patch, model, "velocity", lambda sample: True)
        with pytest.raises(RuntimeError, match="a fault of ours"):
            driver.denoise(keys)
    assert [row.num_computed for row in driver.denoise(keys)] == [1, 1]


@pytest.mark.parametrize("place", ["velocity", "advance", "take_skips"])
def test_a_step_without_memory_can_be_taken_again_in_parts(
    driver: RunnerDriver, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    asked = [
        image_request(num_steps=9, cache=StepCache(name="planned")),
        image_request(seed=8, num_steps=9, width=96, cache=StepCache(name="planned")),
    ]
    expected = driver.finish(driver.encode(*asked, first=5))
    keys = driver.encode(*asked)
    driver.denoise(keys)
    owner: Any = type(driver.executor._denoiser.model) if place == "velocity" else denoise
    with monkeypatch.context() as patch:
        fail_once(patch, owner, place, at_call=1)
        with pytest.raises(OutOfMemory):
            driver.denoise(keys, num_steps=3)
    results = [driver.denoise([key], num_steps=3, has_preview=True)[0] for key in keys]
    assert [row.num_computed for row in results] == [1, 1]
    driver.denoise(keys, num_steps=3)
    driver.denoise(keys, num_steps=2)
    generated = driver.decode(keys)
    assert all(
        closeness(ours, theirs) <= 1 for ours, theirs in zip(generated, expected, strict=True)
    )


@pytest.mark.parametrize("at_call", [0, 1])
def test_encoding_without_memory_begins_nothing(
    driver: RunnerDriver, monkeypatch: pytest.MonkeyPatch, at_call: int
) -> None:
    with monkeypatch.context() as patch:
        fail_once(patch, type(driver.executor.recipe), "prepare", at_call=at_call)
        with pytest.raises(OutOfMemory):
            driver.encode(image_request(), image_request(seed=8))
    assert driver.runner.num_images == 0
    assert driver.executor.pools.num_used == 0
    assert driver.executor._prompts.num_references == 0
    assert len(driver.finish(driver.encode(image_request()))) == 1


def test_decoding_without_memory_keeps_the_images(
    driver: RunnerDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = driver.encode(image_request(), image_request(seed=8, width=96))
    driver.denoise(keys, num_steps=6)
    with monkeypatch.context() as patch:
        fail_once(patch, type(driver.executor.recipe), "decode_all", at_call=1)
        with pytest.raises(OutOfMemory):
            driver.decode(keys)
    assert len([pixels for key in keys for pixels in driver.decode([key])]) == 2


def test_images_of_one_size_are_decoded_together_as_far_as_there_is_room(
    driver: RunnerDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [image_request(seed=seed, width=64 + 32 * (seed % 2)) for seed in range(5)]
    expected = [driver.finish(driver.encode(request, first=9))[0] for request in asked]
    monkeypatch.setattr(driver.executor._decoder, "_shares_runs", True)  # as on a GPU
    monkeypatch.setattr(driver.executor._decoder, "_whole_pixels", 2 * 64 * 64)
    together: list[int] = []
    recipe = driver.executor.recipe
    original = recipe.decode_all

    def decode_all(samples: Any) -> Tensor:
        together.append(len(samples))
        return original(samples)

    monkeypatch.setattr(recipe, "decode_all", decode_all)
    generated = driver.finish(driver.encode(*asked))
    assert together == [2, 1, 1, 1]
    assert all(
        closeness(ours, theirs) <= 1 for ours, theirs in zip(generated, expected, strict=True)
    )


def test_large_images_are_decoded_in_tiles(
    driver: RunnerDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    vae = driver.executor.recipe.vae
    monkeypatch.setattr(driver.executor._decoder, "_whole_pixels", 64 * 64)
    for width, is_tiled in ((64, False), (96, True), (64, False)):
        driver.finish(driver.encode(image_request(width=width, num_steps=1)))
        assert vae.use_tiling is is_tiled


def test_a_size_out_of_use_holds_no_memory(driver: RunnerDriver) -> None:
    held = []
    for width in (64, 96, 128, 64):
        (key,) = driver.encode(image_request(width=width))
        held.append(driver.executor.pools.num_bytes)
        driver.run("release", dropped=(key,))
    assert held[3] == held[0] < held[1] < held[2]


def test_a_runner_that_closes_lets_go_of_all(executor: ImageExecutor) -> None:
    driver = RunnerDriver(open_executor())
    driver.encode(image_request(), image_request(seed=8))
    pools = driver.executor.pools
    driver.runner.close()
    assert pools.num_used == 0
    assert pools.num_bytes == 0
