"""Steps of vision models: images through each tower, and prompts with what came of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch._subclasses.fake_tensor import DynamicOutputShapeException

from support.dry_run import DryRun, dry_run
from support.fake_cuda import FakeCuda
from support.image_prompts import join_prompt
from support.tiers import among
from support.vision_models import MODELS, encode, pixels, save_model
from triptych.core.engine_api.sampling_params import SamplingParams
from triptych.core.engine_api.tokens import TokenRequest
from triptych.core.options.config import Config
from triptych.modalities.vlm.engine.loader import VisionLoader
from triptych.modalities.vlm.processing.processor import ImageProcessor

GREEDY = SamplingParams(temperature=0.0, max_tokens=3)


LOOK_AT_VALUES = {"idefics3", "smolvlm"}
"""Families whose code in transformers leaves out images that are all zeros."""

RUN = MODELS.keys() - LOOK_AT_VALUES
LIKE_OTHERS = {"llava", "llava_next", "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_5_moe"}
"""Families with the tower of another one."""


@pytest.mark.parametrize("family", among(sorted(RUN), RUN - LIKE_OTHERS))
def test_each_tower(gpu: FakeCuda, tmp_path: Path, config: Config, family: str) -> None:
    save_model(family, tmp_path)
    run = dry_run(gpu, VisionLoader, tmp_path, config)
    look(run, ImageProcessor.open(tmp_path, model="00"), (40, 56), (28, 28), (40, 56))
    assert run.runner.peaks.keys() >= {"encode", "decode"}
    assert [fault for fault in gpu.faults if "/transformers/" not in fault] == []


@pytest.mark.parametrize("family", sorted(LOOK_AT_VALUES))
def test_towers_that_wait_whatever_we_do(
    gpu: FakeCuda, tmp_path: Path, config: Config, family: str
) -> None:
    save_model(family, tmp_path)
    run = dry_run(gpu, VisionLoader, tmp_path, config)
    with pytest.raises(DynamicOutputShapeException):
        look(run, ImageProcessor.open(tmp_path, model="00"), (28, 28))


def look(run: DryRun, processor: ImageProcessor, *sizes: tuple[int, int]) -> None:
    for number, size in enumerate(sizes):
        image = processor.prepare(pixels(*size, seed=number))
        prompt = join_prompt([[3, 4, 5], image, [6, 7]], encode)
        asked = TokenRequest(prompt_ids=prompt.prompt_ids, contents=prompt.images, sampling=GREEDY)
        run.submit(str(number), asked)
    run.end_well()
