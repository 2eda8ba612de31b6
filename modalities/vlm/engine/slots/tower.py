"""EfficientNet-Lite2 without its classifier: feature maps at strides 16 and 32.

Owns the network, its batch norms folded into the convolutions, and the names of its released
weights. From "EfficientNet-Lite" (TensorFlow TPU models), arXiv:1905.11946.

Shapes: B images, H height, W width, C channels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

STAGES: Final = (
    # repeats, kernel, stride, expansion, channels
    (1, 3, 1, 1, 16),
    (3, 3, 2, 6, 24),
    (3, 5, 2, 6, 48),
    (4, 3, 2, 6, 88),
    (4, 5, 1, 6, 120),
    (5, 5, 2, 6, 208),
    (1, 3, 1, 6, 352),
)
STEM_CHANNELS: Final = 32
MIDDLE_CHANNELS: Final = STAGES[4][-1]
"""Channels of the map at stride 16."""
LAST_CHANNELS: Final = STAGES[-1][-1]
"""Channels of the map at stride 32."""

_NUM_MIDDLE_BLOCKS: Final = sum(stage[0] for stage in STAGES[:5])
_NORM_EPSILON: Final = 1e-3
_BLOCK = re.compile(r"_blocks\.(\d+)\._(expand|depthwise|project)_conv\.weight")
_NORMS: Final = {"expand": "_bn0", "depthwise": "_bn1", "project": "_bn2"}


class EfficientNetLite(nn.Module):
    """Images in -1..1 to maps at strides 16 and 32."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = SameConv(3, STEM_CHANNELS, 3, stride=2)
        self.blocks = nn.ModuleList()
        num_inputs = STEM_CHANNELS
        for repeats, kernel, stride, expansion, channels in STAGES:
            for index in range(repeats):
                step = stride if index == 0 else 1
                self.blocks.append(Block(num_inputs, channels, kernel, step, expansion))
                num_inputs = channels

    def forward(self, pixels_B3HW: Tensor) -> tuple[Tensor, Tensor]:
        """The maps `[B, C, H / 16, W / 16]` and `[B, C, H / 32, W / 32]`."""
        x = functional.relu6(self.stem(pixels_B3HW))
        for block in self.blocks[:_NUM_MIDDLE_BLOCKS]:
            x = block(x)
        middle = x
        for block in self.blocks[_NUM_MIDDLE_BLOCKS:]:
            x = block(x)
        return middle, x


class Block(nn.Module):
    """An inverted residual block: widen, depthwise convolution, narrow (arXiv:1801.04381)."""

    def __init__(
        self, num_inputs: int, num_outputs: int, kernel: int, stride: int, expansion: int
    ) -> None:
        super().__init__()
        wide = num_inputs * expansion
        self.expand = SameConv(num_inputs, wide, 1) if expansion > 1 else None
        self.depthwise = SameConv(wide, wide, kernel, stride=stride, groups=wide)
        self.project = SameConv(wide, num_outputs, 1)
        self._is_residual = stride == 1 and num_inputs == num_outputs

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, of the shape that its stride gives."""
        wide = x if self.expand is None else functional.relu6(self.expand(x))
        done: Tensor = self.project(functional.relu6(self.depthwise(wide)))
        return x + done if self._is_residual else done


class SameConv(nn.Conv2d):
    """A convolution with TensorFlow's "SAME" padding: the odd pixel is added at the end."""

    def __init__(
        self, num_inputs: int, num_outputs: int, kernel: int, stride: int = 1, groups: int = 1
    ) -> None:
        super().__init__(num_inputs, num_outputs, kernel, stride=stride, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        """Pad and convolve the images."""
        kernel, stride = self.kernel_size[0], self.stride[0]
        height, width = (
            max((-(-side // stride) - 1) * stride + kernel - side, 0) for side in x.shape[-2:]
        )
        if height % 2 == 0 and width % 2 == 0:
            return functional.conv2d(
                x, self.weight, self.bias, stride, (height // 2, width // 2), 1, self.groups
            )
        sides = (width // 2, width - width // 2, height // 2, height - height // 2)
        return super().forward(functional.pad(x, sides))


def from_released(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the released tensors (of `efficientnet_lite_pytorch`), with norms folded in."""
    state = _fold_norm(tensors, "_conv_stem.weight", "_bn0", "stem")
    for name in tensors:
        if found := _BLOCK.fullmatch(name):
            index, part = found.groups()
            norm = f"_blocks.{index}.{_NORMS[part]}"
            state |= _fold_norm(tensors, name, norm, f"blocks.{index}.{part}")
    return state


def _fold_norm(
    tensors: Mapping[str, Tensor], weight: str, norm: str, name: str
) -> dict[str, Tensor]:
    scale = tensors[f"{norm}.weight"] / torch.sqrt(tensors[f"{norm}.running_var"] + _NORM_EPSILON)
    return {
        f"{name}.weight": tensors[weight] * scale[:, None, None, None],
        f"{name}.bias": tensors[f"{norm}.bias"] - tensors[f"{norm}.running_mean"] * scale,
    }
