"""Images prepared for their models: the pixels of transformers' own processors, as bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.image_prompts import join_prompt
from support.vision_models import MODELS, encode, pixels
from triptych.core.engine_api.pixels import Pixels
from triptych.core.engine_api.prompt_content import Array
from triptych.core.errors import InvalidRequest, WeightsError
from triptych.modalities.vlm.configs.config import open_image_processor, read_config
from triptych.modalities.vlm.engine.encoder import Scaling
from triptych.modalities.vlm.processing.processor import ImageProcessor

IMAGE = pixels(40, 60, 1)


def processor(name: str, model: str = "m") -> ImageProcessor:
    return ImageProcessor(*MODELS[name](), model=model)


def array_of(array: Array) -> np.ndarray:
    return np.frombuffer(array.data, array.dtype).reshape(array.shape)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config, images = MODELS["llava"]()
    config.save_pretrained(tmp_path)
    images.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", MODELS)
def test_what_is_left_to_the_engine_makes_it_what_transformers_makes(name: str) -> None:
    config, images = MODELS[name]()
    made = ImageProcessor(config, images, model="m")
    ours = made.prepare(IMAGE).inputs
    rgb = np.frombuffer(IMAGE.rgb, np.uint8).reshape(IMAGE.height, IMAGE.width, 3)
    nested: Any = [[rgb]] if made.family.nests_images else [rgb]
    theirs = images(images=nested, return_tensors="np", **made.family.options(config))
    assert ours["pixel_values"].dtype == "uint8"
    scaled = Scaling.of(images)(torch.from_numpy(array_of(ours["pixel_values"]).copy()))
    expected = theirs["pixel_values"][0] if made.family.has_tiles else theirs["pixel_values"]
    np.testing.assert_allclose(scaled, expected, atol=1e-6)
    if "pixel_attention_mask" in theirs:
        assert "pixel_attention_mask" not in ours
        assert theirs["pixel_attention_mask"].all()
    for extra in ours.keys() - {"pixel_values"}:
        np.testing.assert_array_equal(array_of(ours[extra]), theirs[extra])


def test_padding_mask_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    config, images = MODELS["idefics3"]()
    made = ImageProcessor(config, images, model="m")
    whole = made.prepare(IMAGE)
    mask = np.ones((1, *whole.inputs["pixel_values"].shape[1:2], 28, 28), np.int64)
    mask[..., 20:] = 0

    def filled_up(**options: Any) -> Any:
        return {**images(**options), "pixel_attention_mask": mask}

    monkeypatch.setattr(made, "_images", filled_up)
    found = made.prepare(IMAGE)
    assert found.inputs["pixel_attention_mask"].dtype == "uint8"
    np.testing.assert_array_equal(array_of(found.inputs["pixel_attention_mask"]), mask)
    assert found.digest != whole.digest


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_has_a_position_for_every_feature(name: str) -> None:
    prepared = processor(name).prepare(IMAGE)
    prompt = join_prompt([(1, 2), prepared, (3,), prepared], encode)
    for image in prompt.images:
        assert image.span.num_features == prepared.num_features
        filled = [i for first, n in image.span.runs for i in range(first, first + n)]
        assert all(prompt.prompt_ids[i] >= 2**62 for i in filled)
    first, second = prompt.images
    assert first.span.end <= second.span.start
    assert sum(i >= 2**62 for i in prompt.prompt_ids) == 2 * prepared.num_features


def test_equal_images_have_equal_digests_and_nothing_else_has() -> None:
    one = processor("llava")
    digests = [
        one.prepare(IMAGE).digest,
        one.prepare(pixels(40, 60, 2)).digest,
        one.prepare(IMAGE, adapter="a").digest,
        processor("llava", "n").prepare(IMAGE).digest,
        processor("llava_next").prepare(IMAGE).digest,
    ]
    assert len(set(digests)) == len(digests)
    assert processor("llava").prepare(IMAGE).digest == digests[0]


def test_settings_that_leave_no_trace_in_the_bytes_are_in_the_digest() -> None:
    config, images = MODELS["llava"]()
    before = ImageProcessor(config, images, model="m").prepare(IMAGE).digest
    images.image_mean = [0.5, 0.5, 0.5]
    assert ImageProcessor(config, images, model="m").prepare(IMAGE).digest != before


def test_a_shape_that_the_model_does_not_take_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="1000 x 4"):
        processor("qwen2_vl").prepare(pixels(4, 1000))


def test_settings_are_read_from_older_and_newer_files(folder: Path) -> None:
    older = ImageProcessor.open(folder, model="m").prepare(IMAGE)
    settings = folder / "preprocessor_config.json"
    nested = {"image_processor": json.loads(settings.read_text())}
    settings.unlink()
    (folder / "processor_config.json").write_text(json.dumps(nested))
    assert ImageProcessor.open(folder, model="m").prepare(IMAGE).digest == older.digest


def test_a_folder_without_settings_is_refused(folder: Path) -> None:
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(WeightsError, match="preprocessor_config"):
        open_image_processor(folder)


@pytest.mark.parametrize(
    "name", ["Evil", "os", "", "AutoModel", "LlavaProcessor", "NoImageProcessor"]
)
def test_only_image_processors_are_made(folder: Path, name: str) -> None:
    settings = folder / "preprocessor_config.json"
    settings.write_text(json.dumps({"image_processor_type": name}))
    with pytest.raises(WeightsError, match="image processor"):
        open_image_processor(folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "llama"},
        {"model_type": ["llava"]},
        {},
        {"model_type": "llava", "vision_config": {"model_type": "nothing"}},
    ],
)
def test_configurations_of_no_use_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(WeightsError):
        read_config(fields)


def test_quantization_is_no_part_of_a_configuration() -> None:
    fields = {"model_type": "llava", "quantization_config": {"quant_method": "fp8"}}
    assert not hasattr(read_config(fields), "quantization_config")


def test_no_torch_is_needed(folder: Path) -> None:
    program = f"""
import sys
sys.modules["torch"] = None
from triptych.modalities.diffusion.wire import Pixels
from triptych.modalities.vlm.processing.processor import ImageProcessor
made = ImageProcessor.open({str(folder)!r}, model="m")
print(made.prepare(Pixels(width=2, height=2, rgb=bytes(12))).num_features)
"""
    run = subprocess.run(
        (sys.executable, "-c", program), capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "16"


@pytest.mark.parametrize(
    ("name", "placeholder"),
    [
        ("llava", "<image>"),
        ("pixtral", "[IMG]"),
        ("mistral3", "[IMG]"),
        ("qwen3_vl", "<|image_pad|>"),
    ],
)
def test_a_template_has_a_word_for_an_image(name: str, placeholder: str) -> None:
    assert processor(name).placeholder == placeholder


def test_an_image_of_one_pixel_is_an_image() -> None:
    assert processor("llava").prepare(Pixels(width=1, height=1, rgb=bytes(3))).num_features == 16
