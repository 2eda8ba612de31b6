"""A Whisper in CTranslate2's format becomes the one that it was converted from."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from transformers import WhisperForConditionalGeneration

from support.asr import CONFIG, FIRST_TIME, random_network, tokenizer
from triptych.core.errors import WeightsError
from triptych.modalities.asr.engine.whisper.ctranslate2 import convert_ctranslate2
from triptych.modalities.asr.spec import WhisperSpec

SIZES = {"vocab_size": FIRST_TIME + 1501, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}


def fused(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors by CTranslate2's names, as its converter of transformers' Whispers makes them."""
    found = {f"{stack}/num_heads": torch.tensor(2, dtype=torch.int16) for stack in CODERS}
    for stack, (embedding, layers) in CODERS.items():
        model = f"model.{stack}"
        found[f"{stack}/position_encodings/encodings"] = state[f"{model}.embed_positions.weight"]
        for part, name in (("gamma", "weight"), ("beta", "bias")):
            found[f"{stack}/layer_norm/{part}"] = state[f"{model}.layer_norm.{name}"]
        for name in embedding:
            found[f"{stack}/{name}"] = state[f"{model}.{embedding[name]}"]
        for layer in range(2):
            for block, (norm, linears) in layers.items():
                here, there = f"{stack}/layer_{layer}/{block}", f"{model}.layers.{layer}"
                for part, name in (("gamma", "weight"), ("beta", "bias")):
                    found[f"{here}/layer_norm/{part}"] = state[f"{there}.{norm}.{name}"]
                for number, modules in enumerate(linears):
                    for part in ("weight", "bias"):
                        pieces = [
                            state.get(f"{there}.{module}.{part}", torch.zeros(32).half())
                            for module in modules
                        ]
                        found[f"{here}/linear_{number}/{part}"] = torch.cat(pieces)
    return found


def _attention(name: str) -> list[str]:
    return [f"{name}.{part}_proj" for part in ("q", "k", "v", "out")]


_OWN, _CROSS = _attention("self_attn"), _attention("encoder_attn")
_FFN = ("final_layer_norm", [["fc1"], ["fc2"]])
_ENCODER = {"self_attention": ("self_attn_layer_norm", [_OWN[:3], _OWN[3:]]), "ffn": _FFN}
CODERS: dict[str, tuple[dict[str, str], dict[str, tuple[str, list[list[str]]]]]] = {
    "encoder": (
        {f"conv{n}/{part}": f"conv{n}.{part}" for n in (1, 2) for part in ("weight", "bias")},
        _ENCODER,
    ),
    "decoder": (
        {"embeddings/weight": "embed_tokens.weight"},
        {
            **_ENCODER,
            "attention": ("encoder_attn_layer_norm", [_CROSS[:1], _CROSS[1:3], _CROSS[3:]]),
        },
    ),
}


def write_model(file: Path, tensors: dict[str, torch.Tensor], *, version: int = 6) -> None:
    def text(value: str) -> bytes:
        return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"

    with file.open("wb") as sink:
        sink.write(struct.pack("<I", version) + text("WhisperSpec"))
        sink.write(struct.pack("<II", 3, len(tensors) + 1))
        sink.write(text("decoder/pre_norm") + struct.pack("<BBI", 0, 1, 1) + b"\1")
        for name, value in tensors.items():
            data, kind = value.contiguous().numpy().tobytes(), 4 if value.is_floating_point() else 2
            shape = struct.pack(f"<B{value.ndim}I", value.ndim, *value.shape)
            sink.write(text(name) + shape + struct.pack("<BI", kind, len(data)) + data)
        sink.write(struct.pack("<I", 0))


def convert(folder: Path, tensors: dict[str, torch.Tensor], **format_: int) -> None:
    write_model(folder / "model.bin", tensors, **format_)
    (folder / "ct2.json").write_text(json.dumps({"alignment_heads": [[1, 1]]}))
    tokenizer().save(str(folder / "ct2_tokenizer.json"))
    files = (folder / name for name in ("model.bin", "ct2.json", "ct2_tokenizer.json"))
    convert_ctranslate2(*files, folder)


def test_a_converted_model_has_its_weights_and_tokens(tmp_path: Path) -> None:
    state = random_network(**SIZES).half().state_dict()
    convert(tmp_path, fused(state))
    loaded = WhisperForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float16)
    for name, value in loaded.state_dict().items():
        torch.testing.assert_close(value, state[name])
    spec = WhisperSpec.read(tmp_path)
    assert spec.alignment_heads == ((1, 1),)
    assert (spec.config.encoder_attention_heads, spec.config.decoder_layers) == (2, 2)
    assert spec.first_timestamp_id == FIRST_TIME
    assert spec.config.max_source_positions == CONFIG["max_source_positions"]


def test_another_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"no Whisper in CTranslate2's format"):
        convert(tmp_path, {}, version=5)
