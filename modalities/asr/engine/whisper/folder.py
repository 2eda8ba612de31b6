"""A Whisper's folder in transformers' layout, written from sizes, tensors and a tokenizer.

Owns the configs of released checkpoints. Knows no other format.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers.models.whisper.configuration_whisper import (
    NON_SPEECH_TOKENS,
    NON_SPEECH_TOKENS_MULTI,
    WhisperConfig,
)
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from triptych.core.weights.layout import SINGLE_NAME
from triptych.modalities.asr.spec import MULTILINGUAL_VOCABULARY

AlignmentHeads = Sequence[Sequence[int]]
"""Layers and heads of the cross-attentions that follow words."""


class WhisperSizes(msgspec.Struct, forbid_unknown_fields=True):
    """The sizes of a checkpoint, by OpenAI's names."""

    n_mels: int
    n_vocab: int
    n_audio_ctx: int
    n_audio_state: int
    n_audio_head: int
    n_audio_layer: int
    n_text_ctx: int
    n_text_state: int
    n_text_head: int
    n_text_layer: int


def write_whisper(
    folder: Path,
    sizes: WhisperSizes,
    tensors: Mapping[str, torch.Tensor],
    tokenizer: Tokenizer,
    alignment_heads: AlignmentHeads,
) -> None:
    """Fill `folder`; `tensors` have transformers' names."""
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / SINGLE_NAME, metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in _configs(sizes, tokenizer, alignment_heads):
        (folder / name).write_text(json.dumps(content, indent=2), encoding="utf-8")


def _configs(
    sizes: WhisperSizes, tokenizer: Tokenizer, alignment_heads: AlignmentHeads
) -> Iterator[tuple[str, dict[str, Any]]]:
    ids = tokenizer.get_vocab()
    end, start = ids["<|endoftext|>"], ids["<|startoftranscript|>"]
    named = {
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
        "decoder_start_token_id": start,
    }
    begin_suppressed = [*tokenizer.encode(" ").ids, end]
    yield "config.json", _model_config(sizes) | named
    is_multilingual = sizes.n_vocab >= MULTILINGUAL_VOCABULARY
    unspoken = NON_SPEECH_TOKENS_MULTI if is_multilingual else NON_SPEECH_TOKENS
    unsaid = range(ids["<|translate|>"], ids["<|notimestamps|>"])
    yield (
        "generation_config.json",
        named
        | {
            "alignment_heads": [list(each) for each in alignment_heads],
            "begin_suppress_tokens": begin_suppressed,
            "is_multilingual": is_multilingual,
            "max_initial_timestamp_index": 50,
            "max_length": sizes.n_text_ctx,
            "no_timestamps_token_id": ids["<|notimestamps|>"],
            "prev_sot_token_id": ids["<|startofprev|>"],
            "suppress_tokens": sorted({*unspoken, start, *unsaid}),
        }
        | (_languages(ids) if is_multilingual else {}),
    )
    yield (
        "preprocessor_config.json",
        {
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": sizes.n_mels,
            "processor_class": "WhisperProcessor",
        },
    )


def _languages(ids: Mapping[str, int]) -> dict[str, Any]:
    """The ids of languages and tasks."""
    codes = (f"<|{code}|>" for code in LANGUAGES)
    return {
        "lang_to_id": {code: ids[code] for code in codes if code in ids},
        "task_to_id": {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")},
    }


def _model_config(sizes: WhisperSizes) -> dict[str, Any]:
    config = WhisperConfig(
        vocab_size=sizes.n_vocab,
        num_mel_bins=sizes.n_mels,
        max_source_positions=sizes.n_audio_ctx,
        max_target_positions=sizes.n_text_ctx,
        d_model=sizes.n_audio_state,
        encoder_layers=sizes.n_audio_layer,
        encoder_attention_heads=sizes.n_audio_head,
        encoder_ffn_dim=4 * sizes.n_audio_state,
        decoder_layers=sizes.n_text_layer,
        decoder_attention_heads=sizes.n_text_head,
        decoder_ffn_dim=4 * sizes.n_text_state,
        architectures=["WhisperForConditionalGeneration"],
    )
    values: dict[str, Any] = config.to_diff_dict()
    return values
