"""A recognizer made of a class of transformers: one window of sound in, tokens out.

Owns the interface of such families, running their modules layer by layer, and their inputs. A
family says which class, what its processor is called with, and how it decodes. Shape suffixes: B
batch (1), T time, D width, S samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from triptych.core.engine_api.staged_plan import Stage
from triptych.core.media.audio.resampling import Pcm
from triptych.core.runtime.devices.transfer import to_device
from triptych.modalities.asr.engine.tokens import SeededSampler
from triptych.modalities.asr.spec import SAMPLE_RATE
from triptych.modalities.asr.traits import Task
from triptych.modalities.asr.wire import TranscriptToken


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One window of a recording, with the options of its request."""

    pcm_S: Pcm
    language: str
    task: Task
    prompt: str
    temperature: float
    sampler: SeededSampler

    @property
    def duration_s(self) -> float:
        """The length in seconds."""
        return len(self.pcm_S) / SAMPLE_RATE


@dataclass(frozen=True, slots=True)
class Heard:
    """The tokens of a window, with times from its start if the family has them."""

    tokens: tuple[TranscriptToken, ...] = ()
    language: str = ""

    @property
    def has_times(self) -> bool:
        """Whether tokens have times."""
        return bool(self.tokens) and self.tokens[0].end_s >= 0


class WindowModel(ABC):
    """One family's network and processor, without state of any window.

    `network_class` and `processor_class` are transformers' names; `max_window_s` bounds a window.
    """

    network_class: ClassVar[str]
    processor_class: ClassVar[str]
    max_window_s: ClassVar[float] = 30.0

    def __init__(self, network: Any, processor: Any, tokenizer: Tokenizer) -> None:
        self.network = network
        self.processor = processor
        self.tokenizer = tokenizer
        self.config: Any = network.config
        self.device: torch.device = network.device
        self.dtype: torch.dtype = network.dtype

    @abstractmethod
    def hear(self, window: Window) -> Generator[Stage, None, Heard]:
        """Recognize a window. Its first stage has been announced by the caller."""

    @property
    def frames_per_position(self) -> int:
        """Frames of the features for each position of the encoder's output."""
        raise NotImplementedError

    @property
    def position_s(self) -> float:
        """The time between two positions of the encoder's output, in seconds."""
        features = self.processor.feature_extractor
        seconds: float = self.frames_per_position * features.hop_length / features.sampling_rate
        return seconds

    def inputs(self, window: Window) -> dict[str, Any]:
        """The network's inputs, from the family's processor, on the device."""
        return self.placed(
            self.processor(window.pcm_S, sampling_rate=SAMPLE_RATE, return_tensors="pt")
        )

    def placed(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors on the device, in the network's type; token ids stay on the host."""
        tensors = {name: each for name, each in found.items() if isinstance(each, Tensor)}
        return {
            name: each if name.endswith("input_ids") else self._placed(each)
            for name, each in tensors.items()
        }

    def _placed(self, value: Tensor) -> Tensor:
        return to_device(value.to(self.dtype) if value.is_floating_point() else value, self.device)

    def layerwise(
        self, stage: str, module: nn.Module, layers: nn.ModuleList, **inputs: Any
    ) -> Generator[Stage, None, Tensor]:
        """Run a module up to its first layer, and then one of its `layers` per stage.

        All layers must take the same arguments. What follows the last one is the caller's.
        """
        hidden_BTD, args, options = _up_to(layers[0], module, inputs)
        for layer in layers:
            yield Stage(stage, hidden_BTD.shape[-2])
            found = layer(hidden_BTD, *args, **options)
            hidden_BTD = found[0] if isinstance(found, tuple) else found
        return hidden_BTD


class _Reached(BaseException):
    """A module has been reached. Not an `Exception`, so that no library catches it."""


def _up_to(
    layer: nn.Module, module: nn.Module, inputs: Mapping[str, Any]
) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """Call `module` until it calls `layer`; returns the arguments of that call."""
    reached: list[Any] = []

    def stop(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        reached.extend((args, options))
        raise _Reached

    handle = layer.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        module(**inputs)
    except _Reached:
        (hidden_BTD, *args), options = reached
    finally:
        handle.remove()
    return hidden_BTD, tuple(args), options
