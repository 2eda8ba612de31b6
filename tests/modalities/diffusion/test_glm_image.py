"""GLM-Image through the whole engine: its tokens are steps, and its images those of diffusers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import ImageChops

from support.diffusers_pipelines import SCHEDULERS, components, their_pipeline
from support.image_folders import save_pipeline
from triptych.core.errors import ConfigError, WeightsError
from triptych.modalities.diffusion.api.pipeline import ImagePipeline
from triptych.modalities.diffusion.engine import prior
from triptych.modalities.diffusion.engine.costs import GenerationCosts
from triptych.modalities.diffusion.engine.prior import ImageTokenModel, ImageTokens
from triptych.modalities.diffusion.engine.recipes.registry import open_recipe
from triptych.modalities.diffusion.engine.runner import DenoiseRunner
from triptych.modalities.diffusion.wire import ImageRequest

NAME = "GlmImagePipeline"
OPTIONS: dict[str, Any] = {"size": (64, 96), "num_steps": 2, "cache": "off"}
PROMPTS = {'A sign "Hi"': 5, "Two penguins by a house": 6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("glm")
    save_pipeline(folder, NAME)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "default_size": 96}))
    sampling = '{"do_sample": true, "temperature": 0.8, "top_k": 12, "top_p": 0.9}'
    (folder / "vision_language_encoder" / "generation_config.json").write_text(sampling)
    return folder


@pytest.fixture(scope="module")
def generate(folder: Path) -> Iterator[ImagePipeline]:
    with ImagePipeline.from_pretrained(str(folder), progress=False, dtype="float32") as pipeline:
        yield pipeline


def test_images_asked_for_together_are_those_of_diffusers(
    generate: ImagePipeline, folder: Path
) -> None:
    entries = [{"prompt": each, "seed": seed, **OPTIONS} for each, seed in PROMPTS.items()]
    ours = [found[0].image for found in generate.map(entries)]  # type: ignore[index]
    parts = components(NAME)
    theirs = their_pipeline(NAME, parts, SCHEDULERS[NAME][0])
    writer = parts["vision_language_encoder"]
    kept = writer.generation_config
    writer.generation_config = type(kept).from_pretrained(folder / "vision_language_encoder")
    for image, (prompt, seed) in zip(ours, PROMPTS.items(), strict=True):
        expected = theirs(
            prompt=prompt,
            width=64,
            height=96,
            num_inference_steps=2,
            generator=torch.Generator().manual_seed(seed),
        ).images[0]
        assert ImageChops.difference(image, expected).getextrema() <= ((0, 1),) * 3
    writer.generation_config = kept


def test_tokens_are_written_in_steps_that_others_may_come_between(
    generate: ImagePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: list[str] = []
    launch = DenoiseRunner.launch
    monkeypatch.setattr(
        DenoiseRunner, "launch", lambda own, plan: kinds.append(plan.kind) or launch(own, plan)
    )
    (first,) = generate("a cat", seed=1, **OPTIONS)
    assert kinds == ["encode", *["write"] * 8, "denoise", "denoise", "decode"]  # of 253 tokens
    assert generate("a cat", image=first.image, seed=1, strength=0.5, **OPTIONS)


def test_a_prompt_lays_out_no_images_and_its_quotes_are_bounded() -> None:
    recipe: Any = open_recipe(NAME, {**components(NAME), "scheduler": SCHEDULERS[NAME][0]})
    plain, laid_out = (
        recipe._asked(ImageRequest(prompt=prompt, width=64, height=96))["input_ids"]
        for prompt in ("a cat", "a <|image|>cat<sop><eop>")
    )
    assert plain.tolist() == laid_out.tolist()
    text = recipe.encode('"1" ' * 2000, is_negative=False)["encoder_hidden_states"]
    assert len(text) == 2048
    assert recipe.num_cut_tokens('"1" ' * 2000, is_negative=False) > 0


def test_a_long_prompt_is_read_in_parts_of_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = components(NAME)
    model = ImageTokenModel(parts["vision_language_encoder"], num_codes=20)
    ids = torch.randint(1, 20, (1, 50), generator=torch.Generator().manual_seed(3))
    seen: list[int] = []
    model.module.register_forward_pre_hook(
        lambda _, __, given: seen.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    logits = []
    for most in (64, 16):
        monkeypatch.setattr(prior, "MAX_READ", most)
        tokens = ImageTokens(
            model,
            {"input_ids": ids, "position_ids": torch.arange(50).expand(3, 1, 50)},
            torch.arange(50, 56).expand(3, 6),
            generator=torch.Generator(),
            done=lambda found: None,
        )
        with torch.no_grad():
            logits.append(tokens._logits())
    assert seen == [50, 16, 16, 16, 2]
    torch.testing.assert_close(*logits)


def test_the_memory_of_quoted_words_and_of_the_language_model_is_counted() -> None:
    parts = {**components(NAME), "scheduler": SCHEDULERS[NAME][0]}
    recipe: Any = open_recipe(NAME, parts)
    costs = GenerationCosts.of(recipe)
    width = parts["text_encoder"].config.d_model
    assert costs.text_bytes >= recipe.window * width * 4
    assert costs.encode_bytes >= recipe._writer.live_bytes > 0


def test_tokens_that_no_image_has_are_sampled_again() -> None:
    parts = components(NAME)
    model = ImageTokenModel(parts["vision_language_encoder"], num_codes=3)
    generator = torch.Generator().manual_seed(0)
    found = {model.sample(torch.zeros(20), generator) for _ in range(50)}
    assert found == {0, 1, 2}


def test_a_step_that_fails_is_taken_again_with_the_same_tokens() -> None:
    """The cache holds the last token by then: it must not be read twice."""
    written: list[list[int]] = []
    for fails in (False, True):
        parts = components(NAME)
        model = ImageTokenModel(parts["vision_language_encoder"], num_codes=20)
        tokens = ImageTokens(
            model,
            {
                "input_ids": torch.tensor([[1, 5, 9]]),
                "position_ids": torch.arange(3).expand(3, 1, 3),
            },
            torch.arange(3, 9).expand(3, 6),
            generator=torch.Generator().manual_seed(1),
            done=lambda found: written.append(found.tolist()),
        )
        tokens.advance(2)
        if fails:
            failing = model.module.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                tokens.advance(4)
            failing.remove()
        tokens.advance(4)
        tokens.advance(99)
        assert tokens.is_done
    assert written[0] == written[1]


def test_what_cannot_be_served_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="not divided over ranks"):
        ImagePipeline.from_pretrained(str(folder), progress=False, cfg_parallel_size=2)
    writer = components(NAME)["vision_language_encoder"]
    writer.generation_config.repetition_penalty = 1.5
    with pytest.raises(WeightsError, match="repetition_penalty is not served"):
        ImageTokenModel(writer, num_codes=3)
