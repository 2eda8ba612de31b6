"""Tiny random speech-token models in transformers' own words, saved as anyone would save them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from fakes_codecs import mimi, randomise

from triptych.core.config import SpeechOptions
from triptych.modalities.tts.models.blueprint import SpeechSetup

_TRANSFORMER = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "initializer_range": 0.2,
}


def csm(folder: Path) -> transformers.CsmForConditionalGeneration:
    """Saved in `folder`; four codebooks of 32 codes, 48 words, eight of Mimi's frames a second."""
    codec = mimi()
    randomise(codec)
    config = transformers.CsmConfig(
        **_TRANSFORMER,
        hidden_size=32,
        num_codebooks=4,
        vocab_size=32,
        text_vocab_size=48,
        max_position_embeddings=96,
        codebook_pad_token_id=31,
        codebook_eos_token_id=0,
        pad_token_id=45,
        audio_token_id=45,
        audio_eos_token_id=46,
        bos_token_id=1,
        codec_config=codec.config.to_dict(),
        depth_decoder_config={
            **_TRANSFORMER,
            "hidden_size": 16,
            "backbone_hidden_size": 32,
            "num_codebooks": 4,
            "vocab_size": 32,
            "max_position_embeddings": 5,
        },
    )
    torch.manual_seed(3)
    model = transformers.CsmForConditionalGeneration(config).eval()
    model.codec_model.load_state_dict(codec.state_dict())
    model.save_pretrained(folder)
    return transformers.CsmForConditionalGeneration.from_pretrained(folder).eval()


def setup_of(folder: Path, **options: Any) -> SpeechSetup:
    return SpeechSetup(
        folder=folder,
        options=SpeechOptions(**options),
        max_length=0,
        max_batch_size=16,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
