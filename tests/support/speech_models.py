"""Tiny random speech-token models in transformers' own words, saved as anyone would save them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from support.codec_models import mimi, random_model, randomize
from triptych.core.options.config import SpeechOptions
from triptych.modalities.tts.engine.models.blueprint import SpeechSetup

_TRANSFORMER = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "initializer_range": 0.2,
}


def csm(
    folder: Path, *, vocab_size: int = 32, hidden_size: int = 32
) -> transformers.CsmForConditionalGeneration:
    """Saved in `folder`; four codebooks, of which Mimi has 32 codes each, and 48 words."""
    codec = mimi()
    randomize(codec)
    config = transformers.CsmConfig(
        **_TRANSFORMER,
        hidden_size=hidden_size,
        num_codebooks=4,
        vocab_size=vocab_size,
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
            "hidden_size": hidden_size // 2,
            "backbone_hidden_size": hidden_size,
            "num_codebooks": 4,
            "vocab_size": vocab_size,
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


ORPHEUS_CODES = 32
"""Codes of each codebook of the tiny SNAC, and words of the tiny Llama before them."""
ORPHEUS_STOP = 40


def orpheus(folder: Path, *, hidden_size: int = 32) -> transformers.LlamaForCausalLM:
    """Saved in `folder` with a tiny SNAC: 48 words, then seven places of 32 codes each."""
    config = transformers.LlamaConfig(
        **_TRANSFORMER,
        hidden_size=hidden_size,
        vocab_size=48 + 7 * ORPHEUS_CODES,
        max_position_embeddings=192,
        eos_token_id=ORPHEUS_STOP,
        bos_token_id=1,
    )
    torch.manual_seed(8)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    file = folder / "config.json"
    block = {
        "layout": "orpheus",
        "first_code_id": 48,
        "codebook_size": ORPHEUS_CODES,
        "prompt_start": [41],
        "prompt_end": [42, 43],
        "stop_ids": [ORPHEUS_STOP],
    }
    file.write_text(json.dumps({**json.loads(file.read_text()), "speech": block}))
    codec = random_model("snac", torch.float32)
    (folder / "snac").mkdir()
    fields = {name: getattr(codec.config, name) for name in codec.config.__dataclass_fields__}
    (folder / "snac" / "config.json").write_text(json.dumps(fields))
    save_file(codec.state_dict(), folder / "snac" / "model.safetensors")
    return transformers.LlamaForCausalLM.from_pretrained(folder).eval()


def higgs(folder: Path, *, hidden_size: int = 32) -> tuple[Any, Any]:
    """Saved in `folder` with a tiny tokenizer of sound: eight codebooks of 32 codes, 64 words.

    The model ends its streams now and then: the mark of the end is made likelier.
    """
    codec = random_model("higgs", torch.float32)
    num_codebooks = codec.config.num_quantizers
    config = transformers.HiggsAudioV2Config(
        **_TRANSFORMER,
        hidden_size=hidden_size,
        head_dim=hidden_size // 4,
        vocab_size=64,
        max_position_embeddings=128,
        num_codebooks=num_codebooks,
        codebook_size=34,
        audio_stream_bos_id=32,
        audio_stream_eos_id=33,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=50,
        audio_token_id=51,
        audio_bos_token_id=52,
        audio_delay_token_id=53,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    torch.manual_seed(4)
    model = transformers.HiggsAudioV2ForConditionalGeneration(config).eval()
    model.save_pretrained(folder)
    codec.save_pretrained(folder / "audio_tokenizer")
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "audio_eos_token_id": 54}))
    loaded = transformers.HiggsAudioV2ForConditionalGeneration.from_pretrained(folder).eval()
    return loaded, codec
