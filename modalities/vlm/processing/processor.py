"""From a decoded image to the engine's input: model pixels, and the image's spelling.

Owns the use of transformers' image processors for one image at a time, and an image's spelling in a
prompt. Runs in separate processes, off every event loop, most of them without torch.
Scaling and normalizing are left to the engine (`encoder`).
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from triptych.core.engine_api.pixels import Pixels
from triptych.core.engine_api.prompt_content import Array, ArrayType, content_digest
from triptych.core.errors import InvalidRequest
from triptych.core.weights.layout import read_json
from triptych.modalities.vlm.configs.config import open_image_processor, open_processor, read_config
from triptych.modalities.vlm.configs.families import ANY, MARK, family_of, is_pixtral, mark_images
from triptych.modalities.vlm.prepared import PreparedImage

_MASK = "pixel_attention_mask"
_TYPES: Mapping[str, ArrayType] = {"b": "bool", "f": "float32", "i": "int64", "u": "int64"}
_SAMPLES = ((64, 64), (320, 48), (48, 320))
_SPELLING = re.compile(f"({MARK}+)")


class ImageProcessor:
    """Prepares images for the model in one folder. `model` is the digest of its weights.

    A model of an unknown family also needs its whole `processor`.
    """

    def __init__(
        self, config: Any, image_processor: Any, *, model: str, processor: Any = None
    ) -> None:
        self.family = family_of(config)
        self._config = config
        self._images = image_processor
        self._whole = processor
        self._model = model
        self._options = dict(self.family.options(config))
        if processor is not None:
            tensors = "pt" if getattr(image_processor, "backend", "") == "torchvision" else "np"
            self._options = {**_settings(processor), "return_tensors": tensors}
        if self.family.has_scaling:
            self._options |= {"do_rescale": False, "do_normalize": False}
        self._settings = json.dumps(
            [image_processor.to_dict(), self._options], sort_keys=True, default=str
        )

    @classmethod
    def open(cls, folder: str | Path, *, model: str) -> Self:
        """Open a folder. Raises `WeightsError` if its configurations are invalid."""
        path = Path(folder)
        config, images = read_config(read_json(path / "config.json")), open_image_processor(path)
        is_known = family_of(config) is not ANY
        processor = None if is_known else open_processor(path, images)
        return cls(config, images, model=model, processor=processor)

    @property
    def placeholder(self) -> str:
        """The chat template's mark for an image."""
        if self.family is ANY:
            return str(self._whole.image_token)
        return "[IMG]" if is_pixtral(self._config) else self.family.placeholder

    def try_samples(self) -> None:
        """Process small images, so that all that is needed is loaded."""
        for width, height in _SAMPLES:
            self.prepare(Pixels(width=width, height=height, rgb=bytes(3 * width * height)))

    def prepare(self, pixels: Pixels, *, adapter: str = "") -> PreparedImage:
        """Process one image. Raises `InvalidRequest` if the model does not support its size."""
        rgb = np.frombuffer(pixels.rgb, np.uint8).reshape(pixels.height, pixels.width, 3)
        try:
            found, spelled = self._process(rgb)
        except ValueError as error:
            raise InvalidRequest(
                f"The model does not support images of {pixels.width} x {pixels.height} pixels."
            ) from error
        inputs = self._inputs(found)
        # Split the spelling into text and runs of marks.
        parts = filter(None, _SPELLING.split(spelled))
        digest = content_digest(inputs, settings=self._settings, model=self._model, adapter=adapter)
        return PreparedImage(
            digest=digest,
            inputs=inputs,
            spelling=tuple(len(part) if part[0] == MARK else part for part in parts),
            grid=self._grid(found),
        )

    def _process(self, rgb: NDArray[np.uint8]) -> tuple[Mapping[str, Any], str]:
        """The output of the model's processor for an image, and the spelling in a prompt."""
        options = {"input_data_format": "channels_last", **self._options}
        if self._whole is not None:
            images, *_ = self._whole.prepare_inputs_layout(images=[rgb])
            found, (spelled,) = self._whole._process_images(images, **options)
            return found, mark_images(self._config, self._whole, spelled)
        found = self._images(images=[[rgb]] if self.family.nests_images else [rgb], **options)
        return found, self.family.spell(self._config, self._images, found)

    def _inputs(self, found: Mapping[str, Any]) -> dict[str, Array]:
        """The arrays that the encoder is called with."""
        if self.family is ANY:
            return {name: _array(values) for name, values in _numbers(found)}
        arrays = {name: np.asarray(found[name]) for name in self.family.inputs if name in found}
        pixels = arrays["pixel_values"]
        if self.family.has_scaling:
            pixels = (pixels[0] if self.family.has_tiles else pixels).astype(np.uint8)
            if pixels.ndim == 2:  # patches of several video frames, all equal in an image
                images, length = self._images, len(pixels)
                frames = (length, len(images.image_mean), images.temporal_patch_size, -1)
                pixels = pixels.reshape(frames)[:, :, 0].reshape(length, -1)
        mask = arrays.pop(_MASK, None)
        if mask is not None and not mask.all():  # without a mask, all pixels are image
            arrays[_MASK] = mask.astype(np.uint8)
        return {name: _array(array) for name, array in (arrays | {"pixel_values": pixels}).items()}

    def _grid(self, found: Mapping[str, Any]) -> tuple[int, int]:
        if "image_grid_thw" not in found:
            return 0, 0
        _, height, width = (int(size) for size in found["image_grid_thw"][0])
        merge = getattr(self._images, "merge_size", 1)
        return height // merge, width // merge


def _settings(processor: Any) -> dict[str, Any]:
    """A processor's own arguments for images."""
    named = inspect.signature(processor._process_images).parameters.keys() - {"images", "kwargs"}
    flat = {name: getattr(processor, name) for name in named if hasattr(processor, name)}
    return {**getattr(processor, "images_kwargs", {}), **flat}


def _numbers(found: Mapping[str, Any]) -> Iterator[tuple[str, NDArray[Any]]]:
    """The outputs of a processor that are arrays; what else it counts only it can use."""
    for name, value in found.items():
        is_tensor = hasattr(value, "is_floating_point")
        values = np.asarray(value.float() if is_tensor and value.is_floating_point() else value)
        if values.dtype.kind in _TYPES:
            yield name, values


def _array(values: NDArray[Any]) -> Array:
    dtype: ArrayType = "uint8" if values.dtype == np.uint8 else _TYPES[values.dtype.kind]
    data = np.ascontiguousarray(values, dtype=dtype).tobytes()
    return Array(dtype, tuple(values.shape), data)
