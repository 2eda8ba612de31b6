"""Codec models of transformers' own classes, tiny and with random weights."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import torch
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
    XcodecConfig,
    XcodecModel,
)

from triptych.modalities.tts.engine.codecs.families.snac import Snac, SnacConfig

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
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            conv_dim=(16,) * 7,
        ),
        "codebook_size": 32,
    }


def xcodec() -> XcodecModel:
    return XcodecModel(XcodecConfig(**_xcodec_parts(), codebook_dim=80))


def higgs() -> HiggsAudioV2TokenizerModel:
    return HiggsAudioV2TokenizerModel(
        HiggsAudioV2TokenizerConfig(**_xcodec_parts(), codebook_dim=8)
    )


def snac(**changes: object) -> Snac:
    config = {"latent_dim": 12, "decoder_dim": 16, "decoder_rates": (4, 3), "codebook_size": 32}
    return Snac(SnacConfig(**{**config, **changes}))


MODELS: MappingProxyType[str, Callable[[], nn.Module]] = MappingProxyType(
    {
        "mimi": mimi,
        "encodec": encodec,
        "dac": dac,
        "xcodec": xcodec,
        "higgs": higgs,
        "snac": snac,
    }
)


def random_model(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A tiny codec whose every weight matters: no zero codebook, no vanishing scale."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    randomize(model)
    return model.to(dtype)


def randomize(model: nn.Module) -> None:
    """Draw every tensor again, where fresh models have zeros, ones or near-silent weights."""
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not tensor.is_floating_point():
                continue
            if key.endswith(("alpha", "beta")):
                tensor.uniform_(0.5, 1.5)
            elif tensor.dim() > 1 and not key.endswith("original0"):
                tensor.normal_(0, 0.6 * tensor[0].numel() ** -0.5)
            elif key.endswith(("embed", "embed_sum", "scale", "gamma", "bias")):
                tensor.normal_(0, 0.5)
