"""Converting a Whisper in CTranslate2's format to transformers' layout.

Owns reading the format's tensors (version 6, floating types) and the mapping of their names. Knows
neither packages nor the cache.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from triptych.core.errors import WeightsError
from triptych.core.weights.layout import read_json
from triptych.modalities.asr.engine.whisper.folder import WhisperSizes, write_whisper

_VERSION, _SPEC = 6, "WhisperSpec"
_DTYPES = {0: torch.float32, 2: torch.int16, 3: torch.int32, 4: torch.float16, 5: torch.bfloat16}
_BYTES = 1
_STACKS = {
    "position_encodings/encodings": "embed_positions.weight",
    "embeddings/weight": "embed_tokens.weight",
    "layer_norm/gamma": "layer_norm.weight",
    "layer_norm/beta": "layer_norm.bias",
    **{f"conv{n}/{part}": f"conv{n}.{part}" for n in (1, 2) for part in ("weight", "bias")},
}
_NORMS = {
    "self_attention": "self_attn_layer_norm",
    "attention": "encoder_attn_layer_norm",
    "ffn": "final_layer_norm",
}
_PARTS = {"gamma": "weight", "beta": "bias", "weight": "weight", "bias": "bias"}
_LINEARS = {
    ("self_attention", 0): ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attention", 1): ("self_attn.out_proj",),
    ("attention", 0): ("encoder_attn.q_proj",),
    ("attention", 1): ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    ("attention", 2): ("encoder_attn.out_proj",),
    ("ffn", 0): ("fc1",),
    ("ffn", 1): ("fc2",),
}
"""The layers that a fused one stands for."""


def convert_ctranslate2(model: Path, config: Path, tokenizer: Path, folder: Path) -> None:
    """Fill `folder` from a `model.bin` and the files next to it. Raises `WeightsError`."""
    found = read_tensors(model)
    tensors = dict(_renamed(found))
    spelled, heads = Tokenizer.from_file(str(tokenizer)), read_json(config)["alignment_heads"]
    write_whisper(folder, _sizes(tensors, found), tensors, spelled, heads)


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a `model.bin` by name. Raises `WeightsError` for another format."""
    data = bytearray(file.read_bytes())
    try:
        return dict(_tensors(_Reader(data)))
    except (struct.error, ValueError, KeyError) as error:
        raise WeightsError(f"{file.name} is no Whisper in CTranslate2's format.") from error


class _Reader:
    """Reads little-endian fields in order."""

    def __init__(self, data: bytearray) -> None:
        self._data = data
        self._at = 0

    def number(self, code: str) -> int:
        """An unsigned integer: B, H or I."""
        (value,) = struct.unpack_from(f"<{code}", self._data, self._at)
        self._at += struct.calcsize(code)
        return int(value)

    def take(self, num_bytes: int) -> bytearray:
        """Bytes, of which there must be enough."""
        taken = self._data[self._at : self._at + num_bytes]
        if len(taken) != num_bytes:
            raise ValueError("cut short")
        self._at += num_bytes
        return taken

    def text(self) -> str:
        """A string with its length before it and a zero after it."""
        return self.take(self.number("H")).rstrip(b"\0").decode()


def _tensors(reader: _Reader) -> Iterator[tuple[str, Tensor]]:
    if (reader.number("I"), reader.text()) != (_VERSION, _SPEC):
        raise ValueError("another format")
    reader.number("I")  # the revision of the spec
    for _ in range(reader.number("I")):
        name = reader.text()
        shape = [reader.number("I") for _ in range(reader.number("B"))]
        kind, num_bytes = reader.number("B"), reader.number("I")
        value = reader.take(num_bytes)
        if kind != _BYTES:  # flags, which Whisper's parts do not depend on
            yield name, torch.frombuffer(value, dtype=_DTYPES[kind]).reshape(shape)


def _renamed(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors by transformers' names, fused ones split. Keys have no bias."""
    for name, value in tensors.items():
        stack, _, rest = name.partition("/")
        if rest in _STACKS:
            yield f"model.{stack}.{_STACKS[rest]}", value
        elif rest.startswith("layer_"):
            layer, block, inner, part = rest.split("/")
            prefix = f"model.{stack}.layers.{layer.removeprefix('layer_')}"
            if inner == "layer_norm":
                yield f"{prefix}.{_NORMS[block]}.{_PARTS[part]}", value
                continue
            modules = _LINEARS[block, int(inner.removeprefix("linear_"))]
            for module, piece in zip(modules, value.chunk(len(modules)), strict=True):
                if part != "bias" or not module.endswith("k_proj"):
                    yield f"{prefix}.{module}.{part}", piece


def _sizes(tensors: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> WhisperSizes:
    def depth(stack: str) -> int:
        prefix = f"model.{stack}.layers."
        return sum(name.startswith(prefix) and name.endswith("fc1.bias") for name in tensors)

    def rows(name: str) -> Any:
        return tensors[f"model.{name}"].shape

    vocabulary, width = rows("decoder.embed_tokens.weight")
    return WhisperSizes(
        n_mels=rows("encoder.conv1.weight")[1],
        n_vocab=vocabulary,
        n_audio_ctx=rows("encoder.embed_positions.weight")[0],
        n_audio_state=width,
        n_audio_head=int(found["encoder/num_heads"]),
        n_audio_layer=depth("encoder"),
        n_text_ctx=rows("decoder.embed_positions.weight")[0],
        n_text_state=width,
        n_text_head=int(found["decoder/num_heads"]),
        n_text_layer=depth("decoder"),
    )
