"""The encoder of the embedded vision model, alone: the language model is not needed."""

from __future__ import annotations

import pytest
import torch

from triptych.core.engine_api.prompt_content import Array, ContentSpan, PromptContent
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.native_linear import NativeLinear, pack_linears
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.modalities.vlm.configs.config import read_config
from triptych.modalities.vlm.engine.encoder import Features, ImageEncoder, Scaling, load_encoder
from triptych.modalities.vlm.engine.slots.model import SlotModel
from triptych.modalities.vlm.source import FOLDER

SCALING = Scaling(factor=1 / 255, mean=(0.5,) * 3, std=(0.5,) * 3)


def noise(side: int, seed: int, num_features: int) -> PromptContent:
    shape, random = (1, 3, side, side), torch.Generator().manual_seed(seed)
    values = torch.randint(256, shape, generator=random, dtype=torch.uint8)
    pixels = Array(dtype="uint8", shape=shape, data=values.numpy().tobytes())
    span = ContentSpan(digest=bytes([seed]), runs=((0, num_features),))
    return PromptContent(span=span, inputs={"pixel_values": pixels})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@torch.inference_mode()
def test_an_image_has_the_same_features_with_others(
    dtype: torch.dtype, native: NativeKernels
) -> None:
    with Checkpoint.open(FOLDER) as checkpoint:
        config = read_config(checkpoint.config)
        names = [name for name in checkpoint.tensors if not name.startswith("adapter.")]
        (words,) = (name for name in names if name.endswith("teller.words"))
        config.text_config.hidden_size = checkpoint.tensors[words].shape[-1]
        model = load_encoder(checkpoint, config, SlotModel, dtype=dtype, names=names)
    pack_linears(model, native)
    is_packed = any(isinstance(module, NativeLinear) for module in model.modules())
    assert is_packed == native.can_pack(torch.zeros(2, 2, dtype=dtype))
    side = config.vision_config.image_size
    empty = torch.zeros(1, 3, side, side, dtype=dtype)
    num_features = model.get_image_features(empty).pooler_output.flatten(0, -2).shape[0]
    encoder = ImageEncoder(model, SCALING, batch_axis=0, dtype=dtype)
    images = [noise(side, seed, num_features) for seed in range(4)]
    for image, together in zip(images, encoder.encode(images), strict=True):
        (alone,) = encoder.encode([image])
        assert isinstance(alone, Features)
        assert isinstance(together, Features)
        assert torch.equal(alone.hidden_NC, together.hidden_NC)
