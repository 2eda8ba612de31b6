"""How Kokoro's weights get into the network.

Owns loading one of our folders. Tensor names are `convert`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from triptych.core.errors import WeightsError
from triptych.core.weights.checkpoint import Checkpoint
from triptych.core.weights.loading import Target, load_tensors
from triptych.modalities.tts.models.kokoro.config import VOICE_PREFIX, read_kokoro_config
from triptych.modalities.tts.models.kokoro.model import Kokoro, KokoroModel
from triptych.modalities.tts.models.kokoro.voices import Voices


def load_kokoro(
    folder: Path, device: torch.device, *, generator_dtype: torch.dtype = torch.float32
) -> Kokoro:
    """The model and its voices out of one of our folders.

    `generator_dtype` is the type of the generator's convolutions, nine tenths of the work;
    everything else is float32. Raises `WeightsError` when anything is missing or left over.
    """
    with Checkpoint.open(folder) as checkpoint:
        config = read_kokoro_config(checkpoint.config)
        with torch.device("meta"):
            model = KokoroModel(config)
        model = model.to_empty(device=device).requires_grad_(False).eval()
        model.decoder.generator.cast_convolutions(generator_dtype)
        targets = (Target(name, parameter) for name, parameter in model.named_parameters())
        load_tensors(checkpoint, targets, ignored=lambda name: name.startswith(VOICE_PREFIX))
        voices = Voices(dict(_read_voices(checkpoint, 2 * config.style_size)))
    return Kokoro(config=config, model=model, voices=voices)


def _read_voices(checkpoint: Checkpoint, size: int) -> Iterator[tuple[str, torch.Tensor]]:
    for name, info in checkpoint.tensors.items():
        if name.startswith(VOICE_PREFIX):
            if len(info.shape) != 3 or info.shape[0] == 0 or info.shape[1:] != (1, size):
                raise WeightsError(
                    f"The voice {name.removeprefix(VOICE_PREFIX)!r} has shape {list(info.shape)},"
                    f" but this model's have [lengths, 1, {size}]."
                )
            yield name.removeprefix(VOICE_PREFIX), checkpoint.read(name).clone()
