"""How Kokoro's weights get into the network.

Owns loading one of our folders. Tensor names are `convert`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from triptych.core.errors import WeightsError
from triptych.core.kernels.native.library import NativeKernels
from triptych.core.layers.native_linear import pack_linears
from triptych.core.weights.tensors.checkpoint import Checkpoint
from triptych.core.weights.tensors.loading import TensorTarget, load_tensors
from triptych.modalities.tts.configs.kokoro import (
    VOICE_PREFIX,
    KokoroConfig,
    read_kokoro_config,
)
from triptych.modalities.tts.engine.models.kokoro.model import Kokoro, KokoroModel
from triptych.modalities.tts.engine.models.kokoro.voices import Voices


def load_kokoro(
    folder: Path,
    device: torch.device,
    *,
    conv_dtype: torch.dtype = torch.float32,
    native: NativeKernels | None = None,
    report: Callable[[float], None] | None = None,
) -> Kokoro:
    """The model and its voices out of one of our folders.

    `conv_dtype` is the type of the decoder's convolutions, nine tenths of the work; everything
    else is float32. `native` are kernels for a model on a CPU. `report` hears the share that is
    done. Raises `WeightsError` when anything is missing or left over.
    """
    with Checkpoint.open(folder) as checkpoint:
        config = read_kokoro_config(checkpoint.config)
        model = _skeleton(config, conv_dtype).to_empty(device=device)
        model.decoder.use_native(native)
        targets = (TensorTarget(name, parameter) for name, parameter in model.named_parameters())
        load_tensors(
            checkpoint,
            targets,
            ignored=lambda name: name.startswith(VOICE_PREFIX),
            report=report,
        )
        pack_linears(model, native)
        voices = Voices(dict(_read_voices(checkpoint, 2 * config.style_size)))
    return Kokoro(config=config, model=model, voices=voices)


def weight_bytes(checkpoint: Checkpoint, conv_dtype: torch.dtype) -> int:
    """What `load_kokoro` will take of the device; voices stay on the host."""
    model = _skeleton(read_kokoro_config(checkpoint.config), conv_dtype)
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())


def _skeleton(config: KokoroConfig, conv_dtype: torch.dtype) -> KokoroModel:
    """The model without memory behind its weights."""
    with torch.device("meta"):
        model = KokoroModel(config)
    model.decoder.cast_convolutions(conv_dtype)
    return model.requires_grad_(False).eval()


def _read_voices(checkpoint: Checkpoint, size: int) -> Iterator[tuple[str, torch.Tensor]]:
    for name, info in checkpoint.tensors.items():
        if name.startswith(VOICE_PREFIX):
            if len(info.shape) != 3 or info.shape[0] == 0 or info.shape[1:] != (1, size):
                raise WeightsError(
                    f"The voice {name.removeprefix(VOICE_PREFIX)!r} has shape {list(info.shape)},"
                    f" but this model's have [lengths, 1, {size}]."
                )
            yield name.removeprefix(VOICE_PREFIX), checkpoint.read(name).clone()
