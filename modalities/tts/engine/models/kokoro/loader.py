"""Loads Kokoro onto the device: memory, weights, runner, scheduler.

Owns the order of these, how many sentences run at once, and the type of the convolutions. Tensor
names are `convert`'s. Knows no text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from triptych.core.engine_api.job import Job
from triptych.core.errors import ConfigError, InvalidRequest, UnsupportedOption, WeightsError
from triptych.core.ledger import Ledger
from triptych.core.options.config import Config, SpeechOptions
from triptych.core.runtime.devices.device import Device
from triptych.core.runtime.engine.loader import DeviceLoader
from triptych.core.runtime.engine.staged_runner import StagedRunner
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.native_linear import pack_linears
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.loading import TensorTarget, load_tensors
from triptych.core.weights.encoding import plain_type
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.tts.configs.kokoro import VOICE_PREFIX, KokoroConfig, read_kokoro_config
from triptych.modalities.tts.engine.models.kokoro.model import (
    MAX_BATCH_FRAMES,
    Kokoro,
    KokoroModel,
    Voices,
)
from triptych.modalities.tts.engine.models.kokoro.stages import StagedKokoro
from triptych.modalities.tts.scheduling.playback import SpeechPace
from triptych.modalities.tts.wire import SpeechRequest
from triptych.schedulers.base import LoadedModel
from triptych.schedulers.staged import StagedScheduler, StageLimits

MAX_STARTED_ON_CPU, MAX_STARTED_ON_GPU = 4, 16
MAX_ROWS_ON_GPU, UNITS_PER_JOB_ON_GPU = 8, 4
_CPU_FRAMES = 2048  # of all running sentences: four of the longest that a front end makes
_NUM_LIVE_TENSORS = 8  # at the highest rate, at the peak of a residual block
_USELESS_OPTIONS = (
    "audio_decoder",
    "audio_decoder_weights",
    "audio_decoder_config",
    "chunk_size",
    "buffer",
    "block_causal",
    "prepend_prompt_speech_tokens",
    "prepend_prompt_speech_tokens_causal",
)


class KokoroLoader(DeviceLoader):
    """Implements `schedulers.base.ModelLoader`. Raises `ConfigError` for codec options."""

    def __init__(
        self, resolved: ResolvedModel, config: Config, device: Device, ledger: Ledger
    ) -> None:
        super().__init__(resolved, config, device, ledger)
        for option in _USELESS_OPTIONS:
            if getattr(config.speech, option) != getattr(SpeechOptions(), option):
                raise ConfigError(
                    f"{self.name} generates whole sentences and has no codec options: leave out"
                    f" --{option.replace('_', '-')}."
                )

    def load(self, report: Callable[[float], None]) -> LoadedModel:
        """Load the model; see `schedulers.base.ModelLoader.load`. On an error nothing is held."""
        dtype = self._conv_dtype()
        num_frames = _CPU_FRAMES if self._device.is_cpu else MAX_BATCH_FRAMES
        with ExitStack() as stack:
            memory = self._memory(stack)
            with Checkpoint.open(self._folder) as checkpoint:
                config = read_kokoro_config(checkpoint.config)
                memory.reserve("weights", weight_bytes(checkpoint, dtype))
            memory.reserve("activations", num_frames * frame_bytes(config), remedy="")
            memory.show()
            kokoro = load_kokoro(
                self._folder,
                self._device.torch,
                conv_dtype=dtype,
                native=memory.native_kernels(),
                report=report,
            )
            runner = StagedRunner(StagedKokoro(kokoro), self._device.torch)
            stack.callback(runner.close)
            close = stack.pop_all().close
        scheduler = self._scheduler(kokoro)
        return LoadedModel(name=self.name, scheduler=scheduler, runner=runner, close=close)

    def _conv_dtype(self) -> torch.dtype:
        """bfloat16 if the device is fast in it or an option selects it, else float32."""
        wanted = plain_type(self._config.models)
        if wanted != "auto":
            return torch.bfloat16 if wanted == "bfloat16" else torch.float32
        is_fast = self._device.compute_dtype(torch.bfloat16) is torch.bfloat16
        return torch.bfloat16 if is_fast else torch.float32

    def _scheduler(self, kokoro: Kokoro) -> StagedScheduler:
        schedule, is_cpu = self._config.schedule, self._device.is_cpu
        most = MAX_STARTED_ON_CPU if is_cpu else MAX_STARTED_ON_GPU
        return StagedScheduler(
            model=self.name,
            open_pace=partial(open_pace, kokoro, self._config),
            max_jobs=schedule.max_queue_size + self._config.speech.max_streams,
            limits=StageLimits(
                max_rows=1 if is_cpu else MAX_ROWS_ON_GPU,
                max_started=min(most, self._config.speech.max_streams),
                units_per_job=1 if is_cpu else UNITS_PER_JOB_ON_GPU,
            ),
        )


def load_kokoro(
    folder: Path,
    device: torch.device,
    *,
    conv_dtype: torch.dtype = torch.float32,
    native: NativeKernels | None = None,
    report: Callable[[float], None] | None = None,
) -> Kokoro:
    """The model and its voices from one of our folders.

    `conv_dtype` is the type of the decoder's convolutions, nine tenths of the work; everything else
    is float32. `native` are kernels for a model on a CPU. `report` receives the completed share.
    Raises `WeightsError` for missing or unexpected tensors.
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
    """Device bytes that `load_kokoro` will take; voices stay on the host."""
    model = _skeleton(read_kokoro_config(checkpoint.config), conv_dtype)
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())


def _skeleton(config: KokoroConfig, conv_dtype: torch.dtype) -> KokoroModel:
    """Construct the model on torch's meta device."""
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


def open_pace(kokoro: Kokoro, config: Config, job: Job) -> SpeechPace:
    """A request's pace. Raises `RequestError` for a request that the model does not support."""
    request = job.request
    assert isinstance(request, SpeechRequest), "a Kokoro job is a speech request"
    if not request.segments:
        raise InvalidRequest("There is nothing to say.", param="input")
    if request.clip is not None:
        raise UnsupportedOption(
            "Kokoro cannot imitate recordings; mix its voices, as in af_heart*0.7+af_bella.",
            param="voice",
        )
    for segment in request.segments:
        kokoro.sentence(segment.prompt_ids, request.voice, speed=request.speed)
    return SpeechPace(
        request,
        arrival_s=job.arrival_s,
        target_s=config.speech.target_first_audio_s,
        sample_rate=kokoro.sample_rate,
        max_lead_s=config.speech.max_lead_s,
    )


def frame_bytes(config: KokoroConfig) -> int:
    """Peak bytes per frame (1/40 s) of a running sentence.

    The widest tensors are those of the generator's last rate, in float32.
    """
    generator = config.generator
    channels = generator.upsample_initial_channel >> len(generator.upsample_rates)
    positions = generator.samples_per_frame // generator.hop
    return _NUM_LIVE_TENSORS * 4 * channels * positions
