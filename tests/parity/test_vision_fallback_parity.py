"""Models that see, of no family of ours: transformers' own on our paged cache, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from support.vision_models import IMAGE_ID, TEXT, TOWER, VOCAB_SIZE, pixels, text
from support.vision_rig import VisionRig, VisionRow
from triptych.core.engine_api.frames import FIRST_FRAME_ID
from triptych.core.errors import WeightsError
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.modalities.vlm.engine.fallback import FallbackVisionBlueprint

NUM_TOKENS = 4
HELLO, WHAT = (1, 5, 9, 12), (20, 21, 22)
SUN, MOON = pixels(40, 60, 1), pixels(20, 90, 2)
SQUARE = {"height": 28, "width": 28}
SPECIAL = ("<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "TILE", "TILE_GLOBAL", "<|IMG_PATCH|>")


def tokenizer() -> Any:
    """One word per id; the model's special words among the last."""
    words = [f"w{index}" for index in range(VOCAB_SIZE)]
    words[0] = "<unk>"
    words[IMAGE_ID : IMAGE_ID + len(SPECIAL)] = SPECIAL
    made = Tokenizer(models.WordLevel(dict(zip(words, range(VOCAB_SIZE), strict=True)), "<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(list(SPECIAL))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


def vipllava() -> tuple[Any, Any]:
    config = transformers.VipLlavaConfig(
        text_config=TEXT,
        vision_config={**TOWER, "model_type": "clip_vision_model", "projection_dim": 16},
        vision_feature_layers=[-1, -2],
        image_token_index=IMAGE_ID,
    )
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=SQUARE)
    return config, transformers.LlavaProcessor(
        images,
        tokenizer(),
        patch_size=7,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
    )


def aya_vision() -> tuple[Any, Any]:
    config = transformers.AyaVisionConfig(
        text_config=text("cohere2", sliding_window=8, head_dim=8, logit_scale=0.5),
        vision_config={**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False},
        vision_feature_layer=-1,
        downsample_factor=2,
        image_token_index=IMAGE_ID,
    )
    images = transformers.GotOcr2ImageProcessorPil(size=SQUARE, min_patches=1, max_patches=4)
    return config, transformers.AyaVisionProcessor(
        images,
        tokenizer(),
        patch_size=7,
        img_size=28,
        downsample_factor=2,
        img_patch_token="<image>",
    )


MODELS = {"vipllava": vipllava, "aya_vision": aya_vision}


@pytest.fixture(scope="module", params=MODELS)
def loaded(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param)
    config, processor = MODELS[request.param]()
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model, processor, folder


@pytest.fixture
def rig(loaded: tuple[Any, Any, Path]) -> VisionRig:
    made = VisionRig(loaded[2])
    made.encode = tokenizer_of(loaded[1])
    return made


def tokenizer_of(processor: Any) -> Any:
    def encode(spelled: str) -> list[int]:
        return processor.tokenizer(spelled, add_special_tokens=False)["input_ids"]

    return encode


def expected(loaded: tuple[Any, Any, Path], row: VisionRow, *images: Any) -> torch.Tensor:
    model, processor, _ = loaded
    arrays = [np.frombuffer(p.rgb, np.uint8).reshape(p.height, p.width, 3) for p in images]
    options = getattr(processor, "images_kwargs", {})
    found = processor.image_processor(images=arrays, return_tensors="pt", **options)
    ids_T = torch.tensor(row.tokens[: row.num_prompt_tokens])
    ids_1T = ids_T.masked_fill(ids_T >= FIRST_FRAME_ID, IMAGE_ID)[None]
    output = model.generate(
        input_ids=ids_1T,
        attention_mask=torch.ones_like(ids_1T),
        pixel_values=found["pixel_values"],
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.cat(output.logits)


@pytest.mark.parametrize("chunk", [5, 1000])
def test_images_through_the_fallback(
    rig: VisionRig, loaded: tuple[Any, Any, Path], chunk: int
) -> None:
    row = rig.look(HELLO, SUN, WHAT, MOON, WHAT)
    other = rig.look(HELLO, MOON, WHAT)
    rig.prefill(other)
    while row.num_cached < row.num_prompt_tokens:
        rig.step((other, 0), (row, min(chunk, row.num_prompt_tokens - row.num_cached)))
    rig.decode(row, num_steps=NUM_TOKENS - 1)
    ours_NV = torch.stack([row.logits[position] for position in sorted(row.logits)])
    theirs_NV = expected(loaded, row, SUN, MOON)
    torch.testing.assert_close(ours_NV, theirs_NV, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("config", [transformers.Gemma3Config, transformers.Qwen2VLConfig])
def test_what_does_not_fit_the_cache_is_refused(config: Any, tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, {}, config().to_dict())
    with pytest.raises(WeightsError, match="see each other"):
        FallbackVisionBlueprint(
            checkpoint, max_length=0, dtype=torch.float32, device=torch.device("cpu")
        )
