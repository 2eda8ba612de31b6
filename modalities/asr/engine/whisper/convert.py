"""Converting OpenAI's English-only Whisper checkpoints to transformers' layout.

Owns the mapping of names, the configs, and the tokenizer made from ranked byte pairs. Knows neither
packages nor the cache.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from transformers.models.whisper.configuration_whisper import NON_SPEECH_TOKENS, WhisperConfig
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from triptych.core.errors import WeightsError
from triptych.core.process.typed import convert
from triptych.core.runtime.tensors.torch_file import read_torch_file
from triptych.core.text.byte_pairs import ranked_bpe
from triptych.core.weights.layout import SINGLE_NAME

_NUM_LANGUAGES = 99
_NUM_TIMESTAMPS = 1501
_ALIGNMENT_HEADS = ((1, 0), (2, 0), (2, 5), (3, 0), (3, 1), (3, 2), (3, 3), (3, 4))
"""Layer and head of tiny.en's cross-attentions that follow words, as published by OpenAI."""
_RENAMED = {
    "blocks": "layers",
    "mlp_ln": "final_layer_norm",
    "attn_ln": "self_attn_layer_norm",
    "cross_attn_ln": "encoder_attn_layer_norm",
    "attn": "self_attn",
    "cross_attn": "encoder_attn",
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "out": "out_proj",
    "ln": "layer_norm",
    "ln_post": "layer_norm",
    "token_embedding": "embed_tokens",
    "positional_embedding": "embed_positions.weight",
}


class _Dims(msgspec.Struct, forbid_unknown_fields=True):
    """The sizes in an OpenAI checkpoint."""

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


def convert_openai(weights: Path, ranks: Path, folder: Path) -> None:
    """Fill `folder` from OpenAI's checkpoint and vocabulary. Raises `WeightsError`."""
    checkpoint = read_torch_file(weights)
    try:
        dims = convert(checkpoint["dims"], _Dims)
        state: Mapping[str, torch.Tensor] = checkpoint["model_state_dict"]
    except (TypeError, KeyError, msgspec.ValidationError) as error:
        raise WeightsError(f"{weights.name} is not a Whisper checkpoint.") from error
    tokenizer = ranked_tokenizer(ranks.read_bytes())
    if tokenizer.get_vocab_size() != dims.n_vocab:
        raise WeightsError(f"The vocabularies of {weights.name} and {ranks.name} differ.")
    tensors = {openai_name(name): tensor.contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / SINGLE_NAME, metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in _configs(dims, tokenizer):
        (folder / name).write_text(json.dumps(content, indent=2), encoding="utf-8")


def openai_name(name: str) -> str:
    """The name in transformers of OpenAI's tensor `name`."""
    parts = name.replace("mlp.0", "fc1").replace("mlp.2", "fc2").split(".")
    return ".".join(("model", *(_RENAMED.get(part, part) for part in parts)))


def ranked_tokenizer(ranks: bytes) -> Tokenizer:
    """A byte-level BPE tokenizer from lines of `base64(token) rank`, with Whisper's special tokens.

    See `core.text.byte_pairs`.
    """
    lines = (line.split() for line in ranks.splitlines())
    tokenizer = Tokenizer(ranked_bpe({base64.b64decode(token): int(rank) for token, rank in lines}))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(token, normalized=False) for token in _special_tokens()]
    tokenizer.add_special_tokens(specials)
    return tokenizer


def _special_tokens() -> Iterator[str]:
    """The special tokens in the order of their ids, which follow the vocabulary's."""
    yield from ("<|endoftext|>", "<|startoftranscript|>")
    yield from (f"<|{code}|>" for code in list(LANGUAGES)[:_NUM_LANGUAGES])
    yield from ("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>")
    yield from ("<|nospeech|>", "<|notimestamps|>")
    yield from (f"<|{step * 0.02:.2f}|>" for step in range(_NUM_TIMESTAMPS))


def _configs(dims: _Dims, tokenizer: Tokenizer) -> Iterator[tuple[str, dict[str, Any]]]:
    ids = tokenizer.get_vocab()
    end, start = ids["<|endoftext|>"], ids["<|startoftranscript|>"]
    named = {
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
        "decoder_start_token_id": start,
    }
    begin_suppressed = [*tokenizer.encode(" ").ids, end]
    yield "config.json", _model_config(dims) | named
    unsaid = range(ids["<|translate|>"], ids["<|notimestamps|>"])
    yield (
        "generation_config.json",
        named
        | {
            "alignment_heads": _ALIGNMENT_HEADS,
            "begin_suppress_tokens": begin_suppressed,
            "is_multilingual": False,
            "max_initial_timestamp_index": 50,
            "max_length": dims.n_text_ctx,
            "no_timestamps_token_id": ids["<|notimestamps|>"],
            "prev_sot_token_id": ids["<|startofprev|>"],
            "suppress_tokens": sorted({*NON_SPEECH_TOKENS, start, *unsaid}),
        },
    )
    yield (
        "preprocessor_config.json",
        {
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": dims.n_mels,
            "processor_class": "WhisperProcessor",
        },
    )


def _model_config(dims: _Dims) -> dict[str, Any]:
    config = WhisperConfig(
        vocab_size=dims.n_vocab,
        num_mel_bins=dims.n_mels,
        max_source_positions=dims.n_audio_ctx,
        max_target_positions=dims.n_text_ctx,
        d_model=dims.n_audio_state,
        encoder_layers=dims.n_audio_layer,
        encoder_attention_heads=dims.n_audio_head,
        encoder_ffn_dim=4 * dims.n_audio_state,
        decoder_layers=dims.n_text_layer,
        decoder_attention_heads=dims.n_text_head,
        decoder_ffn_dim=4 * dims.n_text_state,
        architectures=["WhisperForConditionalGeneration"],
    )
    values: dict[str, Any] = config.to_diff_dict()
    return values
