"""What the API knows of an image model by its folder, and the sizes it generates."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.image_app import image_model, write_image_folder
from triptych.core.errors import InvalidRequest, WeightsError
from triptych.modalities.diffusion.api.image_model import MAX_ASPECT, ImageModel

PAINT = image_model()
MOST = 10**9


def test_facts_come_from_the_json_files(tmp_path: Path) -> None:
    model = ImageModel.open(write_image_folder(tmp_path))
    assert (model.name, model.multiple, model.default_size) == ("pix", 16, (512, 512))
    assert model.spec.default_steps == 20
    assert "dpm++2m" in model.samplers


def test_model_file_may_set_the_default_size(tmp_path: Path) -> None:
    model = ImageModel.open(write_image_folder(tmp_path, "FluxPipeline", default_size=128))
    assert model.default_size == (128, 128)
    plain = ImageModel.open(write_image_folder(tmp_path / "plain", "FluxPipeline"))
    assert plain.default_size == (1024, 1024)


def test_an_unknown_pipeline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="MysteryPipeline"):
        ImageModel.open(write_image_folder(tmp_path, "MysteryPipeline"))


@pytest.mark.parametrize("size", [(128, 128), (32, 32), (96, 288), (384, 128), (256, 256)])
def test_sizes_that_are_generated(size: tuple[int, int]) -> None:
    PAINT.check_size(size, max_pixels=256 * 256)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((100, 128), "multiples of 16"),
        ((16, 16), "32 to 512"),
        ((528, 256), "32 to 512"),
        ((20_000, 20_000), "32 to 512"),
        ((512, 160), "3 times"),
        ((272, 256), "65536 pixels"),
    ],
)
def test_sizes_that_are_not(size: tuple[int, int], expected: str) -> None:
    with pytest.raises(InvalidRequest, match=expected) as refused:
        PAINT.check_size(size, max_pixels=MOST)
    assert refused.value.param == "size"
    assert "128x128" in refused.value.message


def test_the_server_may_allow_less() -> None:
    with pytest.raises(InvalidRequest, match="20000 pixels"):
        PAINT.check_size((160, 160), max_pixels=20_000)


@given(width=st.integers(1, 9000), height=st.integers(1, 9000))
def test_a_size_like_an_image_can_always_be_generated(width: int, height: int) -> None:
    frame = PAINT.frame_like((width, height))
    PAINT.check_size(frame.generated, max_pixels=MOST)
    assert 0.5 < math.prod(frame.generated) / PAINT.default_pixels < 1.5
    assert all(
        generated_size - PAINT.multiple < shown <= generated_size
        for generated_size, shown in zip(*frame, strict=True)
    )


LARGE = replace(PAINT, default_size=(1024, 1024))


@pytest.mark.parametrize(
    ("image", "aspect"),
    [((128, 64), 2), ((64, 128), 0.5), ((300, 50), 3), ((50, 300), 1 / 3), ((160, 120), 4 / 3)],
)
def test_usual_shapes_are_kept_exactly(image: tuple[int, int], aspect: float) -> None:
    generated_size, (width, height) = PAINT.frame_like(image)
    assert generated_size == (width, height)
    assert width / height == pytest.approx(aspect)


@pytest.mark.parametrize("model", [PAINT, LARGE])
@given(width=st.integers(1, 9000), height=st.integers(1, 9000))
def test_the_shape_is_kept_within_a_hundredth(model: ImageModel, width: int, height: int) -> None:
    generated_size, shown = model.frame_like((width, height))
    aspect = min(max(width / height, 1 / MAX_ASPECT), MAX_ASPECT)
    assert shown[0] / shown[1] == pytest.approx(aspect, rel=0.0101)
    assert generated_size == shown or model is PAINT  # a finer grid wastes nothing
