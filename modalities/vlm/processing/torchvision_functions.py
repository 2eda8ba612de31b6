"""The functions of torchvision that image processors of transformers call, on torch alone.

Owns these functions, and the modules under whose names transformers finds them. Newer processors
exist for torchvision only, which pins one release of torch; what they use of it are thin layers
over torch's own operations, so results equal torchvision's bit for bit. For processes that prepare
images: a process with torchvision keeps its own.

Shapes: tensors are images `[..., C, H, W]`; padding is left, top, right, bottom.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import Enum
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.nn import functional

_MODULES = ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2")
_FUNCTIONS = ".transforms.v2.functional"
_GREY = (0.2989, 0.587, 0.114)


class InterpolationMode(Enum):
    """How values between pixels are found; the names of `torch.nn.functional.interpolate`."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


_PILLOW_MODES = (
    InterpolationMode.NEAREST,
    InterpolationMode.LANCZOS,
    InterpolationMode.BILINEAR,
    InterpolationMode.BICUBIC,
    InterpolationMode.BOX,
    InterpolationMode.HAMMING,
)
_SMOOTH = (InterpolationMode.BILINEAR, InterpolationMode.BICUBIC, InterpolationMode.LANCZOS)
_BYTE_MODES = (InterpolationMode.BICUBIC, InterpolationMode.LANCZOS)


def resize(
    image: torch.Tensor,
    size: Sequence[int],
    interpolation: InterpolationMode | int = InterpolationMode.BILINEAR,
    *,
    antialias: bool | None = True,
) -> torch.Tensor:
    """Resize to `size`, height and width; bytes are rounded.

    A number is a mode of Pillow. Raises `ValueError` for a mode that torch has not.
    """
    height, width = size
    if isinstance(interpolation, int):
        interpolation = _PILLOW_MODES[interpolation]
    if tuple(image.shape[-2:]) == (height, width):
        return image
    if interpolation in (InterpolationMode.BOX, InterpolationMode.HAMMING):
        raise ValueError(f"Images are not resized by {interpolation.value}.")
    is_smooth = interpolation in _SMOOTH
    values = image.reshape(-1, *image.shape[-3:])
    is_cast = not (image.is_floating_point() or _resizes_bytes(image, interpolation))
    resized = functional.interpolate(
        values.float() if is_cast else values,
        size=(height, width),
        mode=interpolation.value,
        align_corners=False if is_smooth else None,
        antialias=bool(antialias) and is_smooth,
    )
    if is_cast:
        resized = (resized.clamp(0, 255) if image.dtype == torch.uint8 else resized).round_()
    return resized.to(image.dtype).reshape(*image.shape[:-2], height, width)


def _resizes_bytes(image: torch.Tensor, interpolation: InterpolationMode) -> bool:
    """Whether torch resizes bytes themselves, with another rounding than floating point."""
    if image.dtype != torch.uint8:
        return False
    if interpolation is InterpolationMode.BILINEAR:  # its bytes are fast with vectors alone
        return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return interpolation in _BYTE_MODES or interpolation not in _SMOOTH


def pad(
    image: torch.Tensor,
    padding: Sequence[int] | int,
    fill: Any = 0,
    padding_mode: str = "constant",
) -> torch.Tensor:
    """Add pixels of one value. Raises `ValueError` for other kinds of padding."""
    if padding_mode != "constant":
        raise ValueError(f"Images are not padded by mode {padding_mode!r}.")
    sides = [padding] * 4 if isinstance(padding, int) else list(padding)
    left, top, right, bottom = sides * (4 // len(sides))
    around = (left, right, top, bottom)
    if isinstance(fill, (list, tuple)) and len(fill) > 1:
        planes = zip(image.unbind(-3), fill, strict=True)
        return torch.stack([functional.pad(x, around, value=float(v)) for x, v in planes], dim=-3)
    value = fill[0] if isinstance(fill, (list, tuple)) else fill
    return functional.pad(image, around, value=float(value or 0))


def crop(image: torch.Tensor, top: int, left: int, height: int, width: int) -> torch.Tensor:
    """A part of an image, with zeros outside of it."""
    rows, columns = image.shape[-2:]
    bottom, right = top + height, left + width
    inside = image[..., max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)]
    before = (max(min(right, 0) - left, 0), max(min(bottom, 0) - top, 0))
    outside = (*before, max(right - max(columns, left), 0), max(bottom - max(rows, top), 0))
    return pad(inside, outside) if any(outside) else inside


def normalize(image: torch.Tensor, mean: Any, std: Any, inplace: bool = False) -> torch.Tensor:
    """`(image - mean) / std` per channel."""
    mean_C11, std_C11 = (
        torch.as_tensor(values, dtype=image.dtype, device=image.device) for values in (mean, std)
    )
    if mean_C11.dim() == 1:
        mean_C11 = mean_C11.view(-1, 1, 1)
    if std_C11.dim() == 1:
        std_C11 = std_C11.view(-1, 1, 1)
    centred = image.sub_(mean_C11) if inplace else image.sub(mean_C11)
    return centred.div_(std_C11)


def rgb_to_grayscale(image: torch.Tensor, num_output_channels: int = 1) -> torch.Tensor:
    """The brightness of an image, in one channel or three equal ones."""
    if image.shape[-3] == 1:
        return grayscale_to_rgb(image) if num_output_channels == 3 else image.clone()
    red, green, blue = image.unbind(-3)
    grey = red.mul(_GREY[0]).add_(green, alpha=_GREY[1]).add_(blue, alpha=_GREY[2])
    grey = grey.unsqueeze(-3).to(image.dtype)
    return grey.expand(image.shape) if num_output_channels == 3 else grey


def grayscale_to_rgb(image: torch.Tensor) -> torch.Tensor:
    """An image of three channels; one that has them is returned."""
    return image if image.shape[-3] >= 3 else image.repeat_interleave(3, dim=-3)


def pil_to_tensor(image: Any) -> torch.Tensor:
    """The bytes of a Pillow image, `[C, H, W]`."""
    pixels = torch.from_numpy(np.array(image, copy=True))
    return pixels.unsqueeze(0) if pixels.dim() == 2 else pixels.permute(2, 0, 1).contiguous()


def install() -> None:
    """Let transformers find these functions as torchvision, in a process that has not loaded it.

    Sets torch to one thread: the process may not start others.
    """
    torch.set_num_threads(1)
    known = {
        "InterpolationMode": InterpolationMode,
        **{function.__name__: function for function in _ALL},
    }
    for name in (*_MODULES, _FUNCTIONS):
        module: Any = ModuleType(f"torchvision{name}")
        module.__spec__ = ModuleSpec(module.__name__, None)
        module.__path__ = []
        module.__dict__.update(known)
        sys.modules[module.__name__] = module
        parent, _, last = module.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    sys.modules["torchvision"].__version__ = _version()  # type: ignore[attr-defined]
    sys.modules["torchvision"].__file__ = __file__


def _version() -> str:
    """The version of torchvision that belongs to this torch: of 2.14 it is 0.29."""
    minor = int(torch.__version__.split(".")[1])
    return f"0.{minor + 15}.0"


_ALL = (resize, pad, crop, normalize, rgb_to_grayscale, grayscale_to_rgb, pil_to_tensor)
