"""Our functions of torchvision's names: against Pillow and numpy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from triptych.modalities.vlm.configs.processor_files import needs_torch
from triptych.modalities.vlm.processing import torchvision_functions as functions
from triptych.modalities.vlm.processing.torchvision_functions import InterpolationMode

PIXELS = np.random.default_rng(3).integers(64, 192, (41, 67, 3), dtype=np.uint8)
IMAGE = torch.from_numpy(PIXELS).permute(2, 0, 1)


@pytest.mark.parametrize("size", [(20, 31), (36, 60)])
@pytest.mark.parametrize("mode", ["BILINEAR", "BICUBIC"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_sizes_are_those_of_pillow_but_for_rounding(
    size: tuple[int, int], mode: str, dtype: torch.dtype
) -> None:
    wanted = Image.fromarray(PIXELS).resize(size[::-1], Image.Resampling[mode])
    found = functions.resize(IMAGE.to(dtype), size, InterpolationMode[mode])
    assert found.dtype == dtype
    found_HW3 = found.float().clamp(0, 255).round().permute(1, 2, 0)
    assert (found_HW3 - torch.from_numpy(np.array(wanted)).float()).abs().max() <= 2  # of 255
    by_number = functions.resize(IMAGE.to(dtype), size, int(Image.Resampling[mode]))
    assert torch.equal(found, by_number)


@pytest.mark.parametrize(
    "place", [(-3, -2, 20, 30), (2, 3, 10, 11), (30, 60, 40, 20), (50, 0, 4, 4)]
)
def test_a_crop_has_zeros_outside_of_the_image(place: tuple[int, int, int, int]) -> None:
    top, left, height, width = place
    around = np.pad(PIXELS, ((64, 64), (64, 64), (0, 0)))
    wanted = around[64 + top :, 64 + left :][:height, :width]
    found = functions.crop(IMAGE, *place)
    assert np.array_equal(found.permute(1, 2, 0).numpy(), wanted)


@pytest.mark.parametrize("fill", [7, (1, 2, 3)])
def test_padding_is_left_top_right_bottom(fill: Any) -> None:
    found = functions.pad(IMAGE, (1, 2, 3, 4), fill).permute(1, 2, 0)
    assert found.shape == (41 + 6, 67 + 4, 3)
    assert torch.equal(found[2:-4, 1:-3], IMAGE.permute(1, 2, 0))
    assert (found[0, 0] == torch.tensor(fill)).all()


def test_what_torch_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="padded"):
        functions.pad(IMAGE, 3, padding_mode="reflect")
    with pytest.raises(ValueError, match="resized"):
        functions.resize(IMAGE, (3, 3), InterpolationMode.BOX)


@pytest.mark.parametrize(
    ("name", "is_needed"),
    [("Llama4ImageProcessorFast", True), ("Qwen2VLImageProcessorFast", False)],
)
def test_which_processors_need_torch(name: str, is_needed: bool, tmp_path: Path) -> None:
    fields = json.dumps({"image_processor_type": name})
    (tmp_path / "preprocessor_config.json").write_text(fields)
    assert needs_torch(tmp_path) == is_needed
