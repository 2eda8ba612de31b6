"""From options to a codec decoder: which codec, in which way it decodes, on what it says no.

Owns the options of the audio decoder. Knows no speech model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from triptych.core.config import SpeechOptions
from triptych.core.errors import ConfigError, WeightsError
from triptych.core.kernels.native.library import NativeKernels
from triptych.core.layers.native_linear import pack_linears
from triptych.core.weights.layout import read_json, read_layout
from triptych.core.weights.tensors.checkpoint import Checkpoint
from triptych.modalities.tts.engine.codecs.decoder import Adapter
from triptych.modalities.tts.engine.codecs.loading import CodecBlueprint
from triptych.modalities.tts.engine.codecs.protocol import CodecDecoder, SpeechCodec
from triptych.modalities.tts.engine.codecs.registry import (
    adapter_for,
    build_decoder,
    fold_weight_norms,
)
from triptych.modalities.tts.engine.codecs.window import (
    OneShotCodec,
    PromptUse,
    WindowDecoder,
    WindowPolicy,
)


class HubCodec:
    """The codec of a speech-token model, in a folder as anyone publishes it.

    `folder` and `prefix` say where the model's own is; `--audio-decoder` names another folder, and
    the two options beside it other weights and other fields of its configuration.
    """

    def __init__(
        self,
        folder: Path,
        options: SpeechOptions,
        *,
        config: Mapping[str, Any] | None = None,
        prefix: str = "",
        native: NativeKernels | None = None,
    ) -> None:
        if options.audio_decoder:
            folder, config, prefix = Path(options.audio_decoder), None, ""
        if config is None and not (folder / "config.json").is_file():
            where = "at --audio-decoder" if options.audio_decoder else "beside this model"
            raise ConfigError(
                f"There is no audio decoder {where}: name a local folder that holds its config.json"
                " and safetensors with --audio-decoder."
            )
        fields = dict(config if config is not None else read_json(folder / "config.json"))
        if options.audio_decoder_config:
            fields.update(read_json(Path(options.audio_decoder_config)))
        if options.audio_decoder_weights:
            prefix = ""
        self._folder = folder
        self._weights = options.audio_decoder_weights
        self._options = options
        self._native = native
        self._blueprint = CodecBlueprint(fields, prefix)

    def num_bytes(self) -> int:
        """Bytes of its weights."""
        return self._blueprint.num_bytes()

    def open(
        self,
        device: torch.device,
        report: Callable[[float], None],
        *,
        num_rows: int,
        num_codebooks: int,
        is_cloning: bool = False,
    ) -> SpeechCodec:
        """Load the codec; see `open_decoder`. Its encoder is offered where voices are cloned.

        Raises `WeightsError` naming tensor and file, and `ConfigError` where frames of
        `num_codebooks` codes are more than it has books for.
        """
        with self._checkpoint() as checkpoint:
            module: Any = self._blueprint.build(checkpoint, device, report)
        pack_linears(module, self._native)
        decoder = open_decoder(module, self._options, num_rows=num_rows)
        adapter = adapter_for(module)
        if adapter.num_codebooks < num_codebooks:
            raise ConfigError(
                f"The audio decoder has {adapter.num_codebooks} codebooks and this model speaks"
                f" {num_codebooks}: name one that fits with --audio-decoder."
            )

        def encode(pcm_S: torch.Tensor) -> torch.Tensor:
            codes_QF: torch.Tensor = module.encode(pcm_S[None, None]).audio_codes[0]
            return codes_QF[:num_codebooks]

        return SpeechCodec(
            decoder=decoder,
            codebook_size=adapter.codebook_size,
            encode=encode if is_cloning and hasattr(module, "encode") else None,
        )

    def _checkpoint(self) -> Checkpoint:
        if not self._weights:
            return Checkpoint(self._folder, read_layout(self._folder), {})
        file = Path(self._weights)
        layout = read_layout(file.parent)
        tensors = {name: info for name, info in layout.items() if info.file == file.name}
        if not tensors:
            raise WeightsError(f"--audio-decoder-weights: {file.name} is no safetensors file here.")
        return Checkpoint(file.parent, tensors, {})


def open_decoder(module: nn.Module, options: SpeechOptions, *, num_rows: int) -> CodecDecoder:
    """The module's exact streaming decoder, or else one of windows.

    Raises `ConfigError`, naming the option, for options of windows that the decoder cannot have,
    and `WeightsError` where there is no streaming and no `--chunk-size`.
    """
    try:
        decoder: CodecDecoder = build_decoder(module, num_rows=num_rows)
    except WeightsError:
        if not options.chunk_size:
            raise
        fold_weight_norms(module)
        return WindowDecoder(
            one_shot(adapter_for(module)), window_policy(options), num_rows=num_rows
        )
    refuse_window_options(options)
    return decoder


def refuse_window_options(options: SpeechOptions) -> None:
    """Raise `ConfigError` for what a decoder that keeps its state has no use for."""
    use = PromptUse(options.prepend_prompt_speech_tokens)
    _refuse(
        "this audio decoder keeps its state and needs no context; leave it out.",
        {
            "buffer": options.buffer > 0,
            "block_causal": options.block_causal,
            "prepend_prompt_speech_tokens rolling": use is PromptUse.ROLLING,
            "prepend_prompt_speech_tokens_causal": options.prepend_prompt_speech_tokens_causal,
        },
    )


def window_policy(options: SpeechOptions) -> WindowPolicy:
    """What the options say of windows. Raises `ConfigError` for a causal context.

    A decoder sees a window whole: no frame of it is hidden from those before.
    """
    use = PromptUse(options.prepend_prompt_speech_tokens)
    is_prompt_causal = options.prepend_prompt_speech_tokens_causal and use is not PromptUse.NEVER
    _refuse(
        "this audio decoder cannot keep frames from seeing those that follow; leave it out.",
        {
            "block_causal": options.block_causal and options.buffer > 0,
            "prepend_prompt_speech_tokens_causal": is_prompt_causal,
        },
    )
    return WindowPolicy(buffer=options.buffer, prompt_use=use)


def _refuse(reason: str, options: Mapping[str, bool]) -> None:
    for name, is_given in options.items():
        if is_given:
            raise ConfigError(f"{name}: {reason}")


def one_shot(adapter: Adapter) -> OneShotCodec:
    """A codec's own decoding of whole stretches."""
    with torch.inference_mode():
        pcm_1S = adapter.one_shot(adapter.probe_codes(1, 8))
    return OneShotCodec(
        decode=adapter.one_shot,
        num_codebooks=adapter.num_codebooks,
        sample_rate=adapter.sample_rate,
        hop=math.ceil(pcm_1S.shape[1] / 8),
    )
