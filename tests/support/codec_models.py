"""Codec models of transformers' own classes, tiny and with random weights."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import torch
import transformers
from torch import nn
from transformers import (
    DacConfig,
    DacModel,
    EncodecConfig,
    EncodecModel,
    HiggsAudioV2TokenizerConfig,
    HiggsAudioV2TokenizerModel,
    HubertConfig,
    MimiConfig,
    MimiModel,
    SpeechT5HifiGan,
    SpeechT5HifiGanConfig,
    VibeVoiceAcousticTokenizerConfig,
    VibeVoiceAcousticTokenizerModel,
    XcodecConfig,
    XcodecModel,
)
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniBigVGANConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavBigVGANModel
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeCode2WavConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from triptych.modalities.tts.engine.codecs.families.hifigan import HifiGan, HifiGanConfig
from triptych.modalities.tts.engine.codecs.families.snac import Snac, SnacConfig
from triptych.modalities.tts.engine.codecs.families.vocos import Vocos, VocosConfig

_TRANSFORMER = MappingProxyType(
    {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
)


def mimi(**changes: object) -> MimiModel:
    return MimiModel(
        MimiConfig(
            **_TRANSFORMER,
            num_filters=4,
            upsampling_ratios=[4, 3, 2],
            num_hidden_layers=2,
            head_dim=8,
            codebook_size=32,
            codebook_dim=8,
            vector_quantization_hidden_dimension=8,
            num_quantizers=4,
            frame_rate=12.5,
            sampling_rate=600,
            upsample_groups=16,
            sliding_window=7,
            **changes,
        )
    )


def pocket_tts() -> nn.Module:
    return transformers.PocketTTSAudioTokenizerModel(
        transformers.PocketTTSAudioTokenizerConfig(
            **_TRANSFORMER,
            num_filters=4,
            upsampling_ratios=[3, 2],
            latent_stride=4,
            latent_dim=6,
            num_hidden_layers=2,
            upsample_groups=16,
            sliding_window=5,
        )
    )


def encodec(**changes: object) -> EncodecModel:
    return EncodecModel(
        EncodecConfig(
            num_filters=4,
            upsampling_ratios=[4, 3, 2],
            hidden_size=16,
            codebook_size=32,
            codebook_dim=16,
            target_bandwidths=[3.0],
            sampling_rate=2400,
            num_residual_layers=2,
            **changes,
        )
    )


def dac(**changes: object) -> DacModel:
    return DacModel(
        DacConfig(
            encoder_hidden_size=4,
            downsampling_ratios=[2, 3],
            upsampling_ratios=[3, 2],
            decoder_hidden_size=16,
            n_codebooks=3,
            codebook_size=32,
            codebook_dim=4,
            hidden_size=16,
            **changes,
        )
    )


def _xcodec_parts() -> dict[str, object]:
    acoustic = {"encoder_hidden_size": 4, "downsampling_ratios": [8, 5, 4, 2], "hidden_size": 64}
    return {
        "acoustic_model_config": DacConfig(
            **acoustic, decoder_hidden_size=32, upsampling_ratios=[8, 5, 4, 2]
        ),
        "semantic_model_config": HubertConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
        ),
        "codebook_size": 32,
    }


def xcodec() -> XcodecModel:
    return XcodecModel(XcodecConfig(**_xcodec_parts(), codebook_dim=80))


def higgs() -> HiggsAudioV2TokenizerModel:
    return HiggsAudioV2TokenizerModel(
        HiggsAudioV2TokenizerConfig(**_xcodec_parts(), codebook_dim=8)
    )


def vibevoice() -> VibeVoiceAcousticTokenizerModel:
    return VibeVoiceAcousticTokenizerModel(
        VibeVoiceAcousticTokenizerConfig(
            num_filters=4, downsampling_ratios=[2, 3], depths=[2, 1, 1], hidden_size=6
        )
    )


def code2wav(**changes: object) -> Qwen3OmniMoeCode2Wav:
    return Qwen3OmniMoeCode2Wav(
        Qwen3OmniMoeCode2WavConfig(
            **_TRANSFORMER,
            codebook_size=32,
            sliding_window=6,
            num_hidden_layers=2,
            num_quantizers=3,
            **{"upsample_rates": (4, 3), **changes},
            upsampling_ratios=(2, 2),
            decoder_dim=16,
        )
    )


def snac(**changes: object) -> Snac:
    config = {"latent_dim": 12, "decoder_dim": 16, "decoder_rates": (4, 3), "codebook_size": 32}
    return Snac(SnacConfig(**{**config, **changes}))


_HIFIGAN = MappingProxyType(
    {
        "model_in_dim": 8,
        "upsample_initial_channel": 16,
        "upsample_rates": (4, 3),
        "upsample_kernel_sizes": (8, 7),
        "resblock_kernel_sizes": (3, 5),
        "resblock_dilation_sizes": ((1, 3), (1, 2)),
    }
)


def hifigan() -> HifiGan:
    return HifiGan(HifiGanConfig(**_HIFIGAN))


def speecht5_hifigan() -> SpeechT5HifiGan:
    lists = {
        key: [*value] if isinstance(value, tuple) else value for key, value in _HIFIGAN.items()
    }
    return SpeechT5HifiGan(SpeechT5HifiGanConfig(**lists))


def vocos(**changes: object) -> Vocos:
    config = {
        "input_channels": 6,
        "dim": 16,
        "intermediate_dim": 32,
        "num_layers": 2,
        "n_fft": 32,
        "hop_length": 8,
    }
    return Vocos(VocosConfig(**{**config, **changes}))


def bigvgan() -> Qwen2_5OmniToken2WavBigVGANModel:
    return Qwen2_5OmniToken2WavBigVGANModel(
        Qwen2_5OmniBigVGANConfig(
            mel_dim=6,
            upsample_initial_channel=16,
            upsample_rates=(3, 2),
            upsample_kernel_sizes=(7, 4),
            resblock_kernel_sizes=(3, 5),
            resblock_dilation_sizes=((1, 3, 5), (1, 2, 3)),
        )
    )


MODELS: MappingProxyType[str, Callable[[], nn.Module]] = MappingProxyType(
    {
        "mimi": mimi,
        "encodec": encodec,
        "dac": dac,
        "vibevoice": vibevoice,
        "code2wav": code2wav,
        # Younger than the oldest transformers supported.
        **({"pocket_tts": pocket_tts} if hasattr(transformers, "PocketTTSConfig") else {}),
        "xcodec": xcodec,
        "higgs": higgs,
        "snac": snac,
        "hifigan": hifigan,
        "speecht5_hifigan": speecht5_hifigan,
        "bigvgan": bigvgan,
        "vocos": vocos,
        "vocos_same": lambda: vocos(padding="same"),
    }
)


def random_model(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A tiny codec whose every weight matters: no zero codebook, no vanishing scale."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    randomise(model)
    if dtype is torch.float64:
        _compute_norms_in_double(model)
    return model.to(dtype)


def _compute_norms_in_double(model: nn.Module) -> None:
    """Some norms compute in float32 whatever their input, which would hide a structural error."""
    for path, module in [*model.named_modules()]:
        if type(module).__name__.endswith("RMSNorm"):
            norm = nn.RMSNorm(module.weight.shape, module.variance_epsilon)
            norm.weight = module.weight
            model.set_submodule(path, norm)


def randomise(model: nn.Module) -> None:
    """Draw every tensor anew, where fresh models have zeros, ones or near-silent weights."""
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not tensor.is_floating_point() or key.endswith("filter"):
                continue
            if key.endswith(("alpha", "beta")):
                tensor.uniform_(0.5, 1.5)
            elif tensor.dim() > 1 and not key.endswith("original0"):
                tensor.normal_(0, 0.6 * tensor[0].numel() ** -0.5)
            elif key.endswith(("embed", "embed_sum", "scale", "gamma", "bias")):
                tensor.normal_(0, 0.5)
