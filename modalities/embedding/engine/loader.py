"""Loading an encoder onto the device: memory, weights, runner, scheduler.

Owns the order of these steps. Knows no HTTP.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from triptych.core.engine_api.job import Job
from triptych.core.errors import ConfigError, InvalidRequest
from triptych.core.ledger import Ledger
from triptych.core.options.config import Config
from triptych.core.process.lazy import load
from triptych.core.runtime.devices.device import Device
from triptych.core.runtime.engine.loader import DeviceLoader
from triptych.core.runtime.engine.model_memory import ModelMemory
from triptych.core.runtime.engine.staged_runner import StagedRunner
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.native_linear import pack_linears
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.weights.layout import read_json
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.embedding.architecture import is_cross_encoder
from triptych.modalities.embedding.engine.blueprint import EncoderBlueprint, Sizes
from triptych.modalities.embedding.engine.runner import STAGE, Embedder, load_dense
from triptych.modalities.embedding.kinds import ModelKind, kind_of
from triptych.modalities.embedding.pooling import PoolingSpec
from triptych.modalities.embedding.scheduling import BatchPace
from triptych.modalities.embedding.wire import EmbedRequest
from triptych.modalities.llm.engine.loader import LlmLoader
from triptych.schedulers.base import LoadedModel, ModelLoader
from triptych.schedulers.staged import StagedScheduler, StageLimits

_log = logging.getLogger(__name__)

MAX_STEP_TEXTS = 256
_ENGINE = "triptych.modalities.embedding.engine"
_BLUEPRINTS: Mapping[ModelKind, str] = MappingProxyType(
    {
        ModelKind.PACKED: f"{_ENGINE}.encoder:PackedBlueprint",
        ModelKind.CLASS: f"{_ENGINE}.class_encoder:ClassBlueprint",  # it loads transformers
    }
)
_TRUNK, _HEAD = re.compile("Model$"), "lm_head."
_CPU_STEP_TOKENS = 768
"""Larger steps are no faster on a CPU, because they exceed its caches."""


def open_embedding_loader(
    resolved: ResolvedModel, config: Config, device: Device, ledger: Ledger
) -> ModelLoader:
    """The loader of an embedding model: an encoder, or a decoder in the token engine."""
    folder = Path(resolved.folder)
    if kind_of(folder, read_json(folder / "config.json")) in _BLUEPRINTS:
        if config.device.tensor_parallel_size > 1:
            _log.warning("%s is an encoder: it runs on one device", resolved.name)
        if config.device.cpu_offload_gb:
            raise ConfigError(
                f"--cpu-offload-gb: {resolved.name} is an encoder and keeps its layers on the"
                " device; leave it out."
            )
        return EmbeddingLoader(resolved, config, device, ledger)
    return DecoderLoader(resolved, config, device, ledger)


class DecoderLoader(LlmLoader):
    """The loader of decoders, which read texts and generate none.

    Many are stored without a head, and by their trunk's name.
    """

    generates: ClassVar[bool] = False

    def _blueprint(
        self, checkpoint: Checkpoint, memory: ModelMemory, native: NativeKernels | None
    ) -> Any:
        config = checkpoint.config
        names = [str(name) for name in config.get("architectures") or ()]
        named = [_TRUNK.sub("ForCausalLM", name) for name in names]
        has_head = any(name.startswith(_HEAD) for name in checkpoint.tensors)
        tied = {} if has_head else {"tie_word_embeddings": True}
        checkpoint.config = {**config, "architectures": named, **tied}
        return super()._blueprint(checkpoint, memory, native)


class EmbeddingLoader(DeviceLoader):
    """The loader of encoders. Implements `schedulers.base.ModelLoader`."""

    def __init__(
        self, resolved: ResolvedModel, config: Config, device: Device, ledger: Ledger
    ) -> None:
        super().__init__(resolved, config, device, ledger)
        self._config = self._with_batch_limits(config)

    def load(self, report: Callable[[float], None]) -> LoadedModel:
        """Load the model; see `schedulers.base.ModelLoader.load`. On an error nothing is held."""
        with Checkpoint.open(self._folder) as checkpoint, ExitStack() as stack:
            memory = self._memory(stack)
            dtype, device = memory.dtype(checkpoint.dtype), self._device.torch
            kind = kind_of(self._folder, checkpoint.config)
            blueprint: EncoderBlueprint = load(_BLUEPRINTS[kind])(checkpoint, dtype)
            spec = PoolingSpec.of(self._folder, checkpoint.config)
            step_tokens = self._config.schedule.max_batch_input_tokens
            if self._device.is_cpu:
                step_tokens = min(step_tokens, _CPU_STEP_TOKENS)
            memory.reserve("weights", blueprint.weight_bytes())
            memory.reserve("activations", blueprint.activation_bytes(step_tokens))
            memory.show()
            encoder = blueprint.build(device, report)
            dense = blueprint.build_head(device) or load_dense(self._folder, spec, device)
            native = memory.native_kernels()
            pack_linears(encoder, native)
            pack_linears(dense, native)
            scores = is_cross_encoder(checkpoint.config)
            pools = scores or self._config.models.pool_embeddings
            embedder = Embedder(encoder, spec, dense, pools=pools)
            sizes = blueprint.sizes
            runner = StagedRunner(embedder, device)
            stack.callback(runner.close)
            close = stack.pop_all().close
        scheduler = StagedScheduler(
            model=self.name,
            open_pace=partial(_open_pace, sizes),
            max_jobs=self._config.schedule.max_queue_size,
            limits=StageLimits(
                max_rows=MAX_STEP_TEXTS,
                max_size=step_tokens,
                max_started=2 * MAX_STEP_TEXTS,
                units_per_job=MAX_STEP_TEXTS,
            ),
        )
        return LoadedModel(name=self.name, scheduler=scheduler, runner=runner, close=close)


def _open_pace(sizes: Sizes, job: Job) -> BatchPace:
    """Texts have no deadline: speech and chat go first. Raises `InvalidRequest`."""
    request: EmbedRequest = job.request
    lengths = [len(text) for text in request.texts]
    if not lengths or not min(lengths) or max(lengths) > sizes.max_length:
        raise InvalidRequest(f"A text holds 1 to {sizes.max_length} tokens.")
    if any(max(text) >= sizes.vocab_size for text in request.texts):
        raise InvalidRequest("A text holds a token that the model does not know.")
    if len(request.second_starts) not in (0, len(lengths)):
        raise InvalidRequest("Either all texts are pairs, or none is.")
    return BatchPace(STAGE, lengths)
