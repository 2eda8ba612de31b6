"""Converting OpenAI's English-only Whisper checkpoints to transformers' layout.

Owns the mapping of names, and the tokenizer made from ranked byte pairs. Knows neither
packages nor the cache.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from triptych.core.errors import WeightsError
from triptych.core.process.typed import convert
from triptych.core.runtime.tensors.torch_file import read_torch_file
from triptych.core.text.byte_pairs import ranked_bpe
from triptych.modalities.asr.engine.whisper.folder import WhisperSizes, write_whisper

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


def convert_openai(weights: Path, ranks: Path, folder: Path) -> None:
    """Fill `folder` from OpenAI's checkpoint and vocabulary. Raises `WeightsError`."""
    checkpoint = read_torch_file(weights)
    try:
        sizes = convert(checkpoint["dims"], WhisperSizes)
        state: Mapping[str, torch.Tensor] = checkpoint["model_state_dict"]
    except (TypeError, KeyError, msgspec.ValidationError) as error:
        raise WeightsError(f"{weights.name} is not a Whisper checkpoint.") from error
    tokenizer = ranked_tokenizer(ranks.read_bytes())
    if tokenizer.get_vocab_size() != sizes.n_vocab:
        raise WeightsError(f"The vocabularies of {weights.name} and {ranks.name} differ.")
    tensors = {openai_name(name): tensor for name, tensor in state.items()}
    write_whisper(folder, sizes, tensors, tokenizer, _ALIGNMENT_HEADS)


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
