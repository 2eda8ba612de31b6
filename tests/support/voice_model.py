"""The embedded voice in small, with random weights, saved as the recipe exports it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaModel

from support.codec_models import randomize
from triptych.modalities.tts.configs.voice import AcousticConfig, CodecConfig, VoiceConfig
from triptych.modalities.tts.engine.models.voice.acoustic import AcousticInput, AcousticOutput
from triptych.modalities.tts.engine.models.voice.codec import VoiceCodec

CODEC = CodecConfig(
    hop=60,
    n_fft=240,
    num_codebooks=4,
    num_levels=5,
    step_dim=8,
    num_step_layers=1,
    frame_dim=8,
    frame_intermediate=12,
    num_frame_layers=2,
    pitch_dim=6,
)
ACOUSTIC = AcousticConfig(
    num_symbols=20,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    symbol_dim=6,
    num_symbols_before=2,
    num_symbols_after=3,
    max_held=3,
)
VOICE = VoiceConfig(codec=CODEC, acoustic=ACOUSTIC)


def voice_codec() -> VoiceCodec:
    codec = VoiceCodec(CODEC)
    randomize(codec)
    with torch.no_grad():
        codec.pitch.layers[-1].weight.normal_(0, 0.5)  # some frames voiced, some not
        codec.head.weight.mul_(0.3)
    return codec.prepare()


class ReferenceAcousticModel(nn.Module):
    """Both ends around transformers' Llama, whole sequences at a time: how it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.input = AcousticInput(ACOUSTIC, CODEC)
        config = LlamaConfig(
            vocab_size=1,
            hidden_size=ACOUSTIC.hidden_size,
            intermediate_size=ACOUSTIC.intermediate_size,
            num_hidden_layers=ACOUSTIC.num_layers,
            num_attention_heads=ACOUSTIC.num_heads,
            num_key_value_heads=ACOUSTIC.num_kv_heads,
            head_dim=ACOUSTIC.head_dim,
            rms_norm_eps=ACOUSTIC.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": ACOUSTIC.rope_theta},
            bos_token_id=None,
            eos_token_id=None,
        )
        self.stack = LlamaModel(config)
        self.stack.embed_tokens = nn.Identity()
        self.output = AcousticOutput(ACOUSTIC, CODEC)


def acoustic_model() -> ReferenceAcousticModel:
    torch.manual_seed(5)
    model = ReferenceAcousticModel().eval()
    randomize(model)
    return model


def save_voice(folder: Path) -> tuple[ReferenceAcousticModel, VoiceCodec]:
    """A model folder and what is in it."""
    parts = {"talker": acoustic_model(), "codec": voice_codec()}
    tensors = {
        f"{part}.{name}": tensor.float().contiguous()
        for part, module in parts.items()
        for name, tensor in module.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(VOICE.to_json()))
    return parts["talker"], parts["codec"]
