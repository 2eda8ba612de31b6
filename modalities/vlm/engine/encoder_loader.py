"""Loads the encoder of a vision model onto the device, without the language model.

Owns the loading order of an engine of role encode, and the choice of loader by role. Knows no
architecture.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from triptych.core.errors import ConfigError
from triptych.core.kv.parts import PartKind
from triptych.core.ledger import Ledger
from triptych.core.options.config import Config
from triptych.core.options.pipeline_plan import PipelinePlan
from triptych.core.runtime.devices.device import Device
from triptych.core.runtime.engine.staged_runner import StagedRunner
from triptych.core.runtime.tensors.grouped import open_checkpoint
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.vlm.engine.blueprint import VisionBlueprint
from triptych.modalities.vlm.engine.encoding import EncodingModel
from triptych.modalities.vlm.engine.feature_memory import OutgoingFeatures
from triptych.modalities.vlm.engine.loader import (
    RESERVED_PATCHES,
    STEP_PATCHES,
    VisionLoader,
    no_separate_encoder,
)
from triptych.modalities.vlm.scheduling.encoding import EncodeScheduler, SentFeatures
from triptych.schedulers.base import LoadedModel, ModelLoader
from triptych.schedulers.roles.pipeline_roles import open_server


def open_vision_loader(
    resolved: ResolvedModel, config: Config, device: Device, ledger: Ledger
) -> ModelLoader:
    """The loader of a vision model: of the whole model, or of its encoder."""
    encodes = PipelinePlan.checked(config).encodes
    kind = VisionEncoderLoader if encodes else VisionLoader
    return kind(resolved, config, device, ledger)


class VisionEncoderLoader(VisionLoader):
    """Implements `schedulers.base.ModelLoader` for the encoder alone."""

    def load(self, report: Callable[[float], None]) -> LoadedModel:
        """Load the encoder; see `schedulers.base.ModelLoader.load`. On an error nothing is held."""
        endpoint = PipelinePlan.checked(self._config).features
        with open_checkpoint(self._resolved.folder) as checkpoint, ExitStack() as stack:
            memory = self._memory(stack)
            checkpoint.native = native = memory.native_kernels()
            blueprint = self._blueprint(checkpoint, memory, native)
            if not isinstance(blueprint, VisionBlueprint):
                raise ConfigError(no_separate_encoder(self.name, "--pipeline-role encode"))
            memory.reserve("vision-weights", blueprint.encoder_bytes())
            memory.reserve("activations", blueprint.encoder_activation_bytes(RESERVED_PATCHES))
            cache_bytes = self._reserve_cache(memory, blueprint)
            memory.show()
            encoder = blueprint.build_encoder()
            report(1.0)
            device, layout = self._device.torch, blueprint.feature_layout
            runner = StagedRunner(EncodingModel(encoder, layout.dtype), device)
            stack.callback(runner.close)
            max_entries = self._config.cache.max_vision_cache_entries
            features = OutgoingFeatures(layout, cache_bytes, max_entries, device)
            server = open_server(
                endpoint, self._feature_format(blueprint, features), {PartKind.FULL: features}
            )
            stack.callback(server.close)
            close = stack.pop_all().close
        scheduler = EncodeScheduler(
            model=self.name,
            max_jobs=self._config.schedule.max_queue_size,
            max_step_patches=STEP_PATCHES
            if encoder.is_batched
            else 1,  # else each is sent immediately
        )
        sent = SentFeatures(scheduler, features, server, self.name)
        return LoadedModel(
            name=self.name,
            scheduler=scheduler,
            runner=runner,
            close=close,
            connect=sent.connect,
            attach=sent.attach,
        )
