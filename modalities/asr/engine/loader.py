"""Loading a recognizer onto the device: memory, weights, runner, scheduler.

Owns the order of these steps and the memory bound of a running recording. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from triptych.core.engine_api.job import Job
from triptych.core.engine_api.staged_plan import Stage
from triptych.core.errors import InvalidRequest
from triptych.core.runtime.engine.loader import DeviceLoader
from triptych.core.runtime.engine.staged_runner import StagedRunner
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.text.tokenizer import read_tokenizer
from triptych.modalities.asr.engine.model import WhisperNetwork
from triptych.modalities.asr.engine.recognizer import SpeechRecognizer
from triptych.modalities.asr.spec import FRAMES_PER_S, MAX_PART_S, SAMPLE_RATE, WhisperSpec
from triptych.modalities.asr.wire import TranscribeDelta, TranscribeRequest
from triptych.schedulers.base import LoadedModel
from triptych.schedulers.staged import JobPace, StagedScheduler, StageLimits

MAX_STARTED = 4
"""The most recordings with state on the device; other recordings wait."""
_SAMPLE_BYTES = 4


class AsrLoader(DeviceLoader):
    """The loader of recognizers. Implements `schedulers.base.ModelLoader`."""

    def load(self, report: Callable[[float], None]) -> LoadedModel:
        """Load the model; see `schedulers.base.ModelLoader.load`. On an error nothing is held."""
        spec = WhisperSpec.read(self._folder)
        with Checkpoint.open(self._folder) as checkpoint, ExitStack() as stack:
            memory = self._memory(stack)
            dtype = memory.dtype(checkpoint.dtype)
            memory.reserve("weights", WhisperNetwork.weight_bytes(checkpoint, dtype))
            memory.reserve("recordings", MAX_STARTED * state_bytes(spec, dtype))
            memory.show()
            network = WhisperNetwork.load(
                checkpoint,
                spec,
                dtype=dtype,
                device=self._device.torch,
                native=memory.native_kernels(),
                report=report,
            )
            tokenizer = read_tokenizer(Path(self._folder), self.name)
            runner = StagedRunner(SpeechRecognizer.of(network, tokenizer), self._device.torch)
            stack.callback(runner.close)
            close = stack.pop_all().close
        scheduler = StagedScheduler(
            model=self.name,
            open_pace=open_pace,
            max_jobs=self._config.schedule.max_queue_size,
            limits=StageLimits(max_started=MAX_STARTED),
        )
        return LoadedModel(name=self.name, scheduler=scheduler, runner=runner, close=close)


def open_pace(job: Job) -> JobPace:
    """A recording has no deadline: speech and chats go first. Raises `InvalidRequest`."""
    request: TranscribeRequest = job.request
    num_samples = len(request.pcm) // _SAMPLE_BYTES
    if len(request.pcm) % _SAMPLE_BYTES or not 0 < num_samples <= MAX_PART_S * SAMPLE_RATE:
        raise InvalidRequest(f"A part of a recording must have 1 sample to {MAX_PART_S} s.")
    return JobPace(
        Stage("listen", num_samples / SAMPLE_RATE),
        cancel_payload=TranscribeDelta(finish_reason="cancelled"),
    )


def state_bytes(spec: WhisperSpec, dtype: torch.dtype) -> int:
    """The most bytes of a running recording: its spectrogram, a window's caches and layers."""
    sizes = spec.config
    sound = MAX_PART_S * (SAMPLE_RATE + 2 * FRAMES_PER_S * sizes.num_mel_bins) * _SAMPLE_BYTES
    num_kept = sizes.max_source_positions + sizes.max_target_positions
    caches = 2 * sizes.decoder_layers * num_kept * sizes.d_model
    layer = sizes.max_source_positions * (4 * sizes.d_model + 2 * sizes.encoder_ffn_dim)
    return sound + (caches + layer) * dtype.itemsize + 4 * sizes.vocab_size * _SAMPLE_BYTES
