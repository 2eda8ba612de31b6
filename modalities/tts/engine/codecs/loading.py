"""Opens the codec decoder that options and files specify.

Owns the options of the audio decoder, the codecs they can select, and the combinations that are
refused. Weights stay in float32: codecs are small, and rounding is audible. Knows no speech model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import torch
from torch import nn
from torch.nn.utils import parametrize

from triptych.core.errors import ConfigError, WeightsError
from triptych.core.options.config import SpeechOptions
from triptych.core.process.typed import convert, describe_mismatch
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.native_linear import pack_linears
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.loading import MAX_NAMED, TensorTarget, load_tensors
from triptych.core.runtime.tensors.quiet import transformers_loading
from triptych.core.weights.layout import read_json, read_layout
from triptych.core.weights.library_errors import library_errors
from triptych.modalities.tts.engine.codecs.decoder import Adapter, StreamingDecoder, state_bytes
from triptych.modalities.tts.engine.codecs.encode_memory import encode_bytes, first_width
from triptych.modalities.tts.engine.codecs.families.dac import dac, xcodec
from triptych.modalities.tts.engine.codecs.families.qwen3_tts import (
    MODEL_TYPE,
    Qwen3TtsDecoder,
    qwen3_tts,
    read_tokenizer_config,
)
from triptych.modalities.tts.engine.codecs.families.seanet import encodec, mimi
from triptych.modalities.tts.engine.codecs.families.snac import Snac, SnacConfig, snac
from triptych.modalities.tts.engine.codecs.protocol import CodecDecoder, SpeechCodec
from triptych.modalities.tts.engine.codecs.window import (
    OneShotCodec,
    PromptUse,
    WindowDecoder,
    WindowPolicy,
)

_OF_ENCODER = re.compile(r"\.in_proj\.|quantizer\.\w+\.input_proj\.")
CODEC_TYPES = frozenset({"dac", "encodec", "higgs_audio_v2_tokenizer", "mimi", "xcodec"})
"""The `model_type`s of transformers that are codecs."""

# By name: transformers' files are large, and not every release has every class.
_FAMILIES: MappingProxyType[str, Callable[[Any], Adapter]] = MappingProxyType(
    {
        "DacModel": dac,
        "EncodecModel": encodec,
        "HiggsAudioV2TokenizerModel": xcodec,
        "MimiModel": mimi,
        "Qwen3TtsDecoder": qwen3_tts,
        "Snac": snac,
        "XcodecModel": xcodec,
    }
)


def adapter_for(model: nn.Module) -> Adapter:
    """The adapter of a model's family. Raises `WeightsError` if no family knows its class."""
    name = type(model).__name__
    if name not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise WeightsError(f"No streaming decoder for {name}; known classes: {known}.")
    return _FAMILIES[name](model)


def build_decoder(model: nn.Module, *, num_rows: int, verify: bool = True) -> StreamingDecoder:
    """A streaming decoder of `num_rows` rows over a codec model, sharing its device and weights.

    The model is set to eval mode, and its weight norms are folded into plain weights. Raises
    `WeightsError` that names the module if the model cannot stream, or if a probe decoded in chunks
    differs from the model's own decoding.
    """
    fold_weight_norms(model.eval())
    return StreamingDecoder(adapter_for(model), num_rows=num_rows, verify=verify)


def fold_weight_norms(model: nn.Module) -> None:
    """Replace each parametrized weight, computed at every use, by its value."""
    for module in [m for m in model.modules() if parametrize.is_parametrized(m)]:
        names = module.parametrizations
        assert isinstance(names, nn.ModuleDict)
        for name in tuple(names):
            parametrize.remove_parametrizations(module, name)


@dataclass(frozen=True, slots=True)
class CodecBlueprint:
    """A codec before it is loaded. The names of its tensors begin with `prefix`."""

    config: Mapping[str, Any]
    prefix: str = ""

    def num_bytes(self) -> int:
        """Bytes of the codec's weights."""
        return sum(tensor.numel() * 4 for tensor in self._construct_on_meta().state_dict().values())

    def state_bytes(self, num_rows: int) -> int:
        """Bytes of the state of `num_rows` streams; 0 for a codec that decodes windows."""
        module = self._construct_on_meta().float().eval()
        fold_weight_norms(module)
        try:
            return state_bytes(adapter_for(module), num_rows)
        except WeightsError:
            return 0

    def encode_bytes(self) -> int:
        """Peak memory of encoding a recording; 0 for a codec without an encoder."""
        module = self._construct_on_meta()
        if not hasattr(module, "encode"):
            return 0
        sample_rate = adapter_for(module).sample_rate
        return encode_bytes(first_width(module, sample_rate), sample_rate)

    def build(
        self, checkpoint: Checkpoint, device: torch.device, report: Callable[[float], None]
    ) -> nn.Module:
        """Allocate and load. Raises `WeightsError` that names tensor and file."""
        build = self._build_own if self._is_own else self._build_with_transformers
        module = build(checkpoint, device)
        report(1.0)
        return module.eval()

    @property
    def _is_snac(self) -> bool:
        return "vq_strides" in self.config

    @property
    def _is_own(self) -> bool:
        """Whether the module is ours, without an encoder."""
        return self._is_snac or self.config.get("model_type") == MODEL_TYPE

    def _build_own(self, checkpoint: Checkpoint, device: torch.device) -> nn.Module:
        with device:
            module = self._construct()
        targets = [
            TensorTarget(self.prefix + name, into) for name, into in module.state_dict().items()
        ]
        load_tensors(checkpoint, targets, ignored=self._is_unused)
        return module

    def _is_unused(self, name: str) -> bool:
        """Whether a tensor is of the encoder, or of another part of a shared file."""
        local = name.removeprefix(self.prefix)
        is_encoder = local.startswith("encoder.") or bool(_OF_ENCODER.search(local))
        return is_encoder or not name.startswith(self.prefix)

    def _build_with_transformers(self, checkpoint: Checkpoint, device: torch.device) -> nn.Module:
        """Load with transformers, which knows the tensor names of older files."""
        own = {name for name in checkpoint.tensors if name.startswith(self.prefix)}
        state = {name.removeprefix(self.prefix): checkpoint.read(name) for name in own}
        config, model_class = self._library_classes()
        with transformers_loading():
            module, info = model_class.from_pretrained(
                None,
                config=config,
                state_dict=state,
                dtype=torch.float32,
                output_loading_info=True,
            )
        for problem in ("missing_keys", "mismatched_keys", "unexpected_keys"):
            if info[problem]:
                names = ", ".join(sorted(map(str, info[problem]))[:MAX_NAMED])
                raise WeightsError(f"The audio codec has {problem.replace('_', ' ')}: {names}.")
        moved: nn.Module = module.to(device)
        return moved

    def _construct_on_meta(self) -> nn.Module:
        """Construct the module without memory."""
        with library_errors("The codec's config.json is invalid"), torch.device("meta"):
            return self._construct()

    def _construct(self) -> nn.Module:
        if self._is_snac:
            return Snac(self._snac_config())
        if self._is_own:
            return Qwen3TtsDecoder(read_tokenizer_config(self.config))
        config, model_class = self._library_classes()
        with transformers_loading():
            module: nn.Module = model_class._from_config(config)
        return module

    def _library_classes(self) -> tuple[Any, Any]:
        """Configuration and model class of transformers, which is imported on demand."""
        kind = self.config.get("model_type")
        if kind not in CODEC_TYPES:
            known = ", ".join(sorted((*CODEC_TYPES, MODEL_TYPE)))
            raise WeightsError(f"{kind!r} is not a known audio codec: {known}, snac.")
        from transformers import MODEL_MAPPING, AutoConfig

        fields = {name: value for name, value in self.config.items() if name != "model_type"}
        config = AutoConfig.for_model(kind, **fields)
        return config, MODEL_MAPPING[type(config)]

    def _snac_config(self) -> SnacConfig:
        fields = dict(self.config)
        if fields.get("attn_window_size"):
            raise WeightsError("config.json: SNAC with an attn_window_size is not supported.")
        if "encoder_dim" in fields and "encoder_rates" in fields:
            width = fields["encoder_dim"] * 2 ** len(fields["encoder_rates"])
            fields.setdefault("latent_dim", width)
        try:
            return convert(fields, SnacConfig)
        except msgspec.ValidationError as error:
            reason = describe_mismatch(error, fields)
            raise WeightsError(f"The codec's config.json is invalid: {reason}.") from None


class HubCodec:
    """The codec of a speech-token model, in a folder as published.

    `folder` and `prefix` locate the model's own codec. `--audio-decoder` selects another folder,
    and the two related options select other weights and override fields of its configuration.
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
            where = "at --audio-decoder" if options.audio_decoder else "in this model's folder"
            raise ConfigError(
                f"There is no audio decoder {where}: give a local folder that holds its config.json"
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
        """Bytes of the codec's weights."""
        return self._blueprint.num_bytes()

    def state_bytes(self, num_rows: int) -> int:
        """Bytes of the state of `num_rows` streams."""
        return self._blueprint.state_bytes(num_rows)

    def encode_bytes(self) -> int:
        """Peak memory of encoding a recording; 0 for a codec without an encoder."""
        return self._blueprint.encode_bytes()

    def open(
        self,
        device: torch.device,
        report: Callable[[float], None],
        *,
        num_rows: int,
        num_codebooks: int,
        is_cloning: bool = False,
    ) -> SpeechCodec:
        """Load the codec; see `open_decoder`. With `is_cloning` the encoder is included.

        Raises `WeightsError` that names tensor and file, and `ConfigError` if frames of
        `num_codebooks` codes exceed the codec's codebooks.
        """
        with self._checkpoint() as checkpoint:
            module: Any = self._blueprint.build(checkpoint, device, report)
        pack_linears(module, self._native)
        decoder = open_decoder(module, self._options, num_rows=num_rows)
        adapter = adapter_for(module)
        if adapter.num_codebooks < num_codebooks:
            raise ConfigError(
                f"The audio decoder has {adapter.num_codebooks} codebooks, but this model generates"
                f" {num_codebooks}: select another with --audio-decoder."
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
            raise WeightsError(
                f"--audio-decoder-weights: {file.name} is not a safetensors file of this folder."
            )
        return Checkpoint(file.parent, tensors, {})


def open_decoder(module: nn.Module, options: SpeechOptions, *, num_rows: int) -> CodecDecoder:
    """The module's exact streaming decoder if it has one, else a windowed one.

    Raises `ConfigError` that names the option for window options that the decoder does not support,
    and `WeightsError` for a codec without streaming and without `--chunk-size`.
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
    """Raise `ConfigError` for options that a decoder with state does not use."""
    use = PromptUse(options.prepend_prompt_speech_tokens)
    _refuse(
        "this audio decoder streams and needs no context; leave it out.",
        {
            "buffer": options.buffer > 0,
            "block_causal": options.block_causal,
            "prepend_prompt_speech_tokens rolling": use is PromptUse.ROLLING,
            "prepend_prompt_speech_tokens_causal": options.prepend_prompt_speech_tokens_causal,
        },
    )


def window_policy(options: SpeechOptions) -> WindowPolicy:
    """The window policy that the options select. Raises `ConfigError` for a causal context.

    A decoder processes a window as a whole: no frame is hidden from earlier ones.
    """
    use = PromptUse(options.prepend_prompt_speech_tokens)
    is_prompt_causal = options.prepend_prompt_speech_tokens_causal and use is not PromptUse.NEVER
    _refuse(
        "this audio decoder cannot hide later frames from earlier ones; leave it out.",
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
