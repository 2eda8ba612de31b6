"""Models that see, of no family of ours: transformers' own on our paged cache, or refused."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from support.vision_fallbacks import MODELS, save_model
from support.vision_models import IMAGE_ID, pixels
from support.vision_processors import BEGIN_ID, END_ID, TorchvisionImages
from support.vision_rig import VisionRig, VisionRow
from triptych.core.engine_api.frames import FIRST_FRAME_ID
from triptych.core.errors import WeightsError
from triptych.modalities.vlm.engine.served import implementation_of

NUM_TOKENS = 4
HELLO, THEN, WHAT = (1, 5, 9, 12, BEGIN_ID), (END_ID, 13, BEGIN_ID), (END_ID, 20, 21, 22)
SUN, MOON = pixels(40, 60, 1), pixels(20, 90, 2)

Loaded = tuple[Any, Any, Path]


@pytest.fixture(scope="module", params=MODELS)
def loaded(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = tmp_path_factory.mktemp(request.param)
    return *save_model(request.param, folder), folder


@pytest.fixture(scope="module")
def rig(loaded: Loaded) -> VisionRig:
    made = VisionRig(loaded[2], max_length=512)
    made.encode = encoder_of(loaded[1])
    return made


def encoder_of(processor: Any) -> Any:
    return lambda spelled: processor.tokenizer(spelled, add_special_tokens=False)["input_ids"]


def expected(loaded: Loaded, row: VisionRow, *images: Any) -> torch.Tensor:
    """The logits of transformers' own model on the same ids and images."""
    model, processor, _ = loaded
    if isinstance(processor.image_processor, TorchvisionImages):
        found = prepared(row, inspect.signature(model.forward).parameters)
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


def prepared(row: VisionRow, names: Collection[str]) -> dict[str, torch.Tensor]:
    """The outputs of the child process for all images of a row, by these names."""
    several = [
        {
            name: torch.from_numpy(np.frombuffer(x.data, x.dtype).reshape(x.shape).copy())
            for name, x in image.inputs.items()
            if name in names
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


def test_a_hit_that_ends_inside_an_image(rig: VisionRig, loaded: Loaded) -> None:
    if rig.kv.states is not None or rig.limits.whole_spans:
        pytest.skip("such hits end at a snapshot, or before an image")
    first, second = (rig.look(HELLO, SUN, WHAT) for _ in range(2))
    rig.prefill(first)
    rig.share(second, first, num_pages=2)
    rig.prefill(second)
    rig.preempt(second)
    rig.decode(first)
    rig.prefill(second)
    torch.testing.assert_close(second.logits, first.logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["glm46v", "gemma4"])
def test_bfloat16_errs_no_more_than_the_class(name: str, tmp_path: Path) -> None:
    model, processor = save_model(name, tmp_path)
    rig = VisionRig(tmp_path, dtype=torch.bfloat16)
    rig.encode = encoder_of(processor)
    row = rig.look(HELLO, SUN, WHAT)
    rig.prefill(row)
    (ours_V,) = row.logits.values()
    exact = copy.deepcopy(model)
    for kept, cast in zip(exact.parameters(), model.parameters(), strict=True):
        cast.data = cast.data.bfloat16()  # of what a model keeps, parameters alone have its type
        kept.data = cast.data.float()
    theirs_V, exact_V = (
        expected((each, processor, tmp_path), row, SUN)[0].float() for each in (model, exact)
    )
    ours, theirs = (float((x_V - exact_V).norm()) for x_V in (ours_V.float(), theirs_V))
    assert ours <= 1.5 * theirs, f"relative: {ours / float(exact_V.norm()):.2g}"


@pytest.mark.parametrize(
    ("config", "implementation"),
    [(transformers.Gemma3Config, "native"), (transformers.Glm4vConfig, "transformers")],
)
def test_the_implementation_of_a_configuration(config: Any, implementation: str) -> None:
    assert implementation_of(config().to_dict()) == implementation


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.Kosmos2Config, "by a mask, and not by a token"),
        (transformers.Blip2Config, "no image_token_id"),
        (transformers.Gemma3nConfig, "requires the timm library"),
    ],
)
def test_what_is_missing_is_named(config: Any, reason: str) -> None:
    with pytest.raises(WeightsError, match=reason):
        implementation_of(config().to_dict())
