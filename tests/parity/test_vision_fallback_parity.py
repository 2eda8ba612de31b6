"""Models that see, of no family of ours: transformers' own on our paged cache, or refused."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from support.vision_fallbacks import BEGIN_ID, END_ID, MODELS, TorchvisionImages, save_model
from support.vision_models import IMAGE_ID, pixels
from support.vision_rig import VisionRig, VisionRow
from triptych.core.engine_api.frames import FIRST_FRAME_ID
from triptych.core.errors import WeightsError
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.modalities.vlm.engine.fallback import FallbackVisionBlueprint

NUM_TOKENS = 4
HELLO, THEN, WHAT = (1, 5, 9, 12, BEGIN_ID), (END_ID, 13, BEGIN_ID), (END_ID, 20, 21, 22)
SUN, MOON = pixels(40, 60, 1), pixels(20, 90, 2)

Loaded = tuple[Any, Any, Path]


@pytest.fixture(scope="module", params=MODELS)
def loaded(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = tmp_path_factory.mktemp(request.param)
    return *save_model(request.param, folder), folder


@pytest.fixture
def rig(loaded: Loaded) -> VisionRig:
    made = VisionRig(loaded[2])

    def encode(spelled: str) -> list[int]:
        ids: list[int] = loaded[1].tokenizer(spelled, add_special_tokens=False)["input_ids"]
        return ids

    made.encode = encode
    return made


def expected(loaded: Loaded, row: VisionRow, *images: Any) -> torch.Tensor:
    """The logits of transformers' own model on the same ids and images."""
    model, processor, _ = loaded
    if isinstance(processor.image_processor, TorchvisionImages):
        found = prepared(row)
    else:
        arrays = [np.frombuffer(p.rgb, np.uint8).reshape(p.height, p.width, 3) for p in images]
        options = {**getattr(processor, "images_kwargs", {}), "return_tensors": "pt"}
        found = processor.image_processor(images=arrays, **options)
    ids_T = torch.tensor(row.tokens[: row.num_prompt_tokens])
    ids_1T = ids_T.masked_fill(ids_T >= FIRST_FRAME_ID, IMAGE_ID)[None]
    output = model.generate(
        input_ids=ids_1T,
        attention_mask=torch.ones_like(ids_1T),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **inputs_of(model, ids_1T, found),
    )
    return torch.cat(output.logits)


def prepared(row: VisionRow) -> dict[str, torch.Tensor]:
    """The outputs of the child process for all images of a row."""
    several = [
        {
            name: torch.from_numpy(np.frombuffer(x.data, x.dtype).reshape(x.shape).copy())
            for name, x in image.inputs.items()
        }
        for image in row.images
    ]
    return {name: torch.cat([each[name] for each in several]) for name in several[0]}


def inputs_of(model: Any, ids_1T: torch.Tensor, found: Mapping[str, Any]) -> dict[str, Any]:
    """A model's inputs in addition to its prompt."""
    is_image_1T = (ids_1T == IMAGE_ID).int()
    around = torch.isin(ids_1T, torch.tensor([IMAGE_ID, BEGIN_ID, END_ID])).int()
    given = {"mm_token_type_ids": is_image_1T, "moe_mm_token_type_ids": around, **found}
    accepted = inspect.signature(model.forward).parameters
    return {name: value for name, value in given.items() if name in accepted}


@pytest.mark.parametrize("chunk", [5, 1000])
def test_images_through_the_fallback(rig: VisionRig, loaded: Loaded, chunk: int) -> None:
    row = rig.look(HELLO, SUN, THEN, MOON, WHAT)
    other = rig.look(HELLO, MOON, WHAT)
    rig.prefill(other)
    while row.num_cached < row.num_prompt_tokens:
        start, spans = row.num_cached, [image.span for image in row.images]
        stop = min(start + chunk, row.num_prompt_tokens)
        end = rig.limits.chunk_end(spans, row.num_prompt_tokens, range(start, stop))
        rig.step((other, 0), (row, end - start))
    rig.decode(row, num_steps=NUM_TOKENS - 1)
    ours_NV = torch.stack([row.logits[position] for position in sorted(row.logits)])
    theirs_NV = expected(loaded, row, SUN, MOON)
    torch.testing.assert_close(ours_NV, theirs_NV, atol=1e-4, rtol=1e-4)


def test_a_class_that_takes_no_features_is_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, {}, transformers.Kosmos2Config().to_dict())
    with pytest.raises(WeightsError, match="takes no features"):
        FallbackVisionBlueprint(
            checkpoint, max_length=0, dtype=torch.float32, device=torch.device("cpu")
        )
