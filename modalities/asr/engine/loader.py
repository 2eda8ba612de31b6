"""Loading a recognizer onto the device: memory, weights, runner, scheduler.

Owns the order of these steps. Each family has its blueprint. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from triptych.core.engine_api.job import Job
from triptych.core.engine_api.staged_plan import Stage
from triptych.core.errors import InvalidRequest
from triptych.core.process.lazy import load
from triptych.core.runtime.engine.loader import DeviceLoader
from triptych.core.runtime.engine.staged_runner import StagedRunner
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.modalities.asr.engine.blueprint import BlueprintSetup, RecognizerBlueprint
from triptych.modalities.asr.families import family_of
from triptych.modalities.asr.spec import MAX_PART_S, SAMPLE_RATE
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
        with Checkpoint.open(self._folder) as checkpoint, ExitStack() as stack:
            open_blueprint = load(family_of(checkpoint.config).engine)
            memory = self._memory(stack)
            setup = BlueprintSetup(
                checkpoint=checkpoint,
                name=self.name,
                dtype=memory.dtype(checkpoint.dtype),
                device=self._device.torch,
                native=memory.native_kernels(),
            )
            blueprint: RecognizerBlueprint = open_blueprint(setup)
            memory.reserve("weights", blueprint.weight_bytes())
            memory.reserve("recordings", MAX_STARTED * blueprint.recording_bytes())
            memory.show()
            runner = StagedRunner(blueprint.build(report), self._device.torch)
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
