"""Loads a speech model onto the device with the loader of its family.

Owns the choice by `config.json`, and the order in which a speech-token model is assembled: memory,
codec, weights, cache, runner, scheduler. Knows no architecture: blueprints do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from triptych.core.ledger import Ledger
from triptych.core.options.config import Config
from triptych.core.process.content_cache import ContentCache
from triptych.core.process.lazy import load
from triptych.core.runtime.decoders.causal_model import CausalModel
from triptych.core.runtime.devices.device import Device
from triptych.core.runtime.engine.cache_size import CacheSize
from triptych.core.runtime.engine.loader import TokenLoader
from triptych.core.runtime.engine.model_memory import ModelMemory
from triptych.core.runtime.engine.text_head import TextHead
from triptych.core.runtime.engine.token_runner import TokenHead
from triptych.core.runtime.graphs.captured import CapturedSteps
from triptych.core.runtime.graphs.decode import DecodeGraphs
from triptych.core.runtime.layers.attention import KvLayout
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.grouped import open_checkpoint
from triptych.core.weights.layout import read_json
from triptych.core.weights.resolve import ResolvedModel
from triptych.modalities.tts.engine.codecs.decoder import StreamingDecoder
from triptych.modalities.tts.engine.codecs.protocol import SpeechCodec
from triptych.modalities.tts.engine.frame_head import FrameHead
from triptych.modalities.tts.engine.models.blueprint import (
    Codes,
    FrameBlueprint,
    SpeechBlueprint,
    SpeechSetup,
)
from triptych.modalities.tts.engine.runner import AudioSteps, SpeechRunner, VoiceReader
from triptych.modalities.tts.modality import family_of
from triptych.modalities.tts.plan import FrameClock
from triptych.modalities.tts.scheduling.scheduler import SpeechScheduler
from triptych.modalities.tts.scheduling.state import SpeechModel
from triptych.schedulers.base import LoadedModel, ModelLoader

_VOICES_BYTES = 8 * 2**20  # codes of a few thousand clips of 10 s
_AUDIO_GRAPHS_BYTES = 64 * 2**20
_SAMPLE_GRAPHS_BYTES = 64 * 2**20  # in addition to decode steps; the least used are dropped
_LANGUAGE_SHARE = 0.8  # of the reported progress


def open_speech_loader(
    resolved: ResolvedModel, config: Config, device: Device, ledger: Ledger
) -> ModelLoader:
    """The loader of a speech model. Raises `WeightsError` for an unknown family."""
    fields = read_json(Path(resolved.folder) / "config.json")
    if fields.get("model_type") == "kokoro":
        loader: ModelLoader = load(family_of(fields).engine)(resolved, config, device, ledger)
        return loader
    return SpeechTokenLoader(resolved, config, device, ledger)


def open_blueprint(config: Mapping[str, Any], setup: SpeechSetup) -> SpeechBlueprint:
    """The blueprint of a speech-token model. Raises `WeightsError` that lists the families.

    Families are imported on demand: each imports its codec's library.
    """
    blueprint: SpeechBlueprint = load(family_of(config).engine)(config, setup)
    return blueprint


class SpeechTokenLoader(TokenLoader):
    """Implements `schedulers.base.ModelLoader` for models whose steps yield codes."""

    def load(self, report: Callable[[float], None]) -> LoadedModel:
        """Load the model; see `schedulers.base.ModelLoader.load`. On an error nothing is held."""
        with open_checkpoint(self._resolved.folder) as checkpoint, ExitStack() as stack:
            memory = self._memory(stack)
            setup = self._setup(memory, checkpoint)
            blueprint = open_blueprint(checkpoint.config, setup)
            audio_graphs = self._reserve(memory, blueprint)
            layout = blueprint.kv_layout(*memory.cache_format(setup.dtype))
            max_length = blueprint.max_length
            samples = isinstance(blueprint, FrameBlueprint)  # its sampling is captured as well
            graphs = self._graphs(
                memory,
                layout,
                max_length,
                lambda num, _: blueprint.activation_bytes(num, num if samples else 0),
            )
            if graphs is not None and samples:
                graphs = replace(graphs, spare_bytes=_SAMPLE_GRAPHS_BYTES)
            size = memory.reserve_cache(layout, max_length)
            memory.show()
            codec = blueprint.open_codec(
                num_rows=self._config.speech.max_streams,
                report=lambda done: report((1 - _LANGUAGE_SHARE) * done),
            )
            if audio_graphs is not None and isinstance(codec.decoder, StreamingDecoder):
                codec.decoder.capture_with(audio_graphs)
            head = self._head(checkpoint, blueprint, setup, report, graphs)
            device = setup.device
            voices = ContentCache[Codes](_VOICES_BYTES, copy=np.copy)
            runner = SpeechRunner(
                self._runner(
                    head,
                    layout,
                    size,
                    max_length=max_length,
                    native=setup.native,
                    graphs=graphs,
                ),
                AudioSteps(codec, blueprint.traits, blueprint.frames, device),
                VoiceReader(codec, blueprint.voice_prompt, voices, device),
                device,
            )
            stack.callback(runner.close)
            scheduler = self._scheduler(blueprint, codec, layout, size)
            close = stack.pop_all().close
        return LoadedModel(name=self.name, scheduler=scheduler, runner=runner, close=close)

    def _setup(self, memory: ModelMemory, checkpoint: Checkpoint) -> SpeechSetup:
        return SpeechSetup(
            folder=checkpoint.folder,
            options=self._config.speech,
            max_length=self._config.models.max_length,
            max_batch_size=self._config.schedule.max_batch_size + memory.captures,
            dtype=memory.dtype(checkpoint.dtype, takes_blocks=True),
            device=self._device.torch,
            native=memory.native_kernels(),
            encoding=memory.encoding(checkpoint),
        )

    def _reserve(self, memory: ModelMemory, blueprint: SpeechBlueprint) -> CapturedSteps | None:
        """Reserve the memory whose size is fixed; returns the codec's graphs."""
        options, speech = self._config.schedule, self._config.speech
        num_rows = options.max_batch_size
        num_tokens = options.max_batch_input_tokens + num_rows
        memory.reserve("weights", blueprint.weight_bytes())
        memory.reserve("codec", blueprint.codec_bytes())
        memory.reserve("voices", _VOICES_BYTES)
        step_bytes = blueprint.activation_bytes(num_tokens, num_rows)
        encode_bytes = blueprint.encode_bytes()
        remedy = "" if encode_bytes > step_bytes else None  # smaller steps would not help
        memory.reserve("activations", max(step_bytes, encode_bytes), remedy=remedy)
        # Captured steps have an extra row for padding.
        state_bytes = blueprint.codec_state_bytes(speech.max_streams + memory.captures)
        memory.reserve("codec-state", state_bytes)
        return memory.captured_steps(_AUDIO_GRAPHS_BYTES) if state_bytes else None

    def _head(
        self,
        checkpoint: Checkpoint,
        blueprint: SpeechBlueprint,
        setup: SpeechSetup,
        report: Callable[[float], None],
        graphs: DecodeGraphs | None,
    ) -> TokenHead:
        """Load the model and wrap it in the matching head."""
        model = blueprint.build(checkpoint, lambda done: report(1 - _LANGUAGE_SHARE * (1 - done)))
        num_rows, device = self._config.schedule.max_batch_size, setup.device
        sampler = self._sampler(blueprint.num_logits, setup.native, setup.max_batch_size)
        if isinstance(model, CausalModel):
            return TextHead(model, sampler, max_batch_size=num_rows, device=device)
        steps = None if graphs is None else graphs.steps
        return FrameHead(model, sampler, max_batch_size=num_rows, device=device, graphs=steps)

    def _scheduler(
        self,
        blueprint: SpeechBlueprint,
        codec: SpeechCodec,
        layout: KvLayout,
        size: CacheSize,
    ) -> SpeechScheduler:
        traits, decoder = blueprint.traits, codec.decoder
        clock = FrameClock(
            frame_s=decoder.hop / decoder.sample_rate,
            steps_per_frame=traits.steps_per_frame,
            delay_steps=traits.delay_steps,
            lookahead_frames=math.ceil(decoder.latency / decoder.hop),
        )
        model = SpeechModel(
            name=self.name,
            clock=clock,
            sample_rate=decoder.sample_rate,
            stop_ids=traits.stop_ids,
            voices=traits.voices,
            num_context_steps=traits.num_context_steps,
            context_end_ids=traits.context_end_ids,
            ids_per_step=traits.ids_per_step,
            can_clone=codec.encode is not None,
        )
        return SpeechScheduler(
            model=model,
            pool=self._pool(layout, size, shares=traits.causal_prompts),
            schedule=self._config.schedule,
            speech=self._config.speech,
            max_length=blueprint.max_length,
            namespace=self._namespace(layout, blueprint.max_length),
        )
