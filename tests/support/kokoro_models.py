"""A Kokoro small enough to test with, and its files as others lay them out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from triptych.modalities.tts.configs.kokoro import KOKORO_82M, read_kokoro_config
from triptych.modalities.tts.engine.models.kokoro.layers import finish
from triptych.modalities.tts.engine.models.kokoro.model import (
    Kokoro,
    KokoroModel,
    SentenceRequest,
    Voices,
    require_finite,
)

TINY: dict[str, Any] = {
    **KOKORO_82M,
    "hidden_dim": 16,
    "style_dim": 8,
    "n_layer": 1,
    "decoder_channels": 16,
    "residual_channels": 4,
    "plbert": {
        "hidden_size": 16,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "max_position_embeddings": 64,
        "num_hidden_layers": 2,
        "embedding_size": 8,
    },
    "istftnet": {**KOKORO_82M["istftnet"], "upsample_initial_channel": 16},
}
_THEIRS = (
    (r"^bert\.layer\.", "bert.encoder.albert_layer_groups.0.albert_layers.0."),
    (r"^bert\.mapping\.", "bert.encoder.embedding_hidden_mapping_in."),
    (r"^predictor\.duration_proj\.", "predictor.duration_proj.linear_layer."),
    (r"^decoder\.asr_res\.", "decoder.asr_res.0."),
    (r"^(text_encoder\.cnn\.\d+\.1)\.weight$", r"\1.gamma"),
    (r"^(text_encoder\.cnn\.\d+\.1)\.bias$", r"\1.beta"),
)
_NORMED = re.compile(r"conv|\.ups\.|\.pool\.|asr_res|cnn\.\d+\.0")


def tiny_model() -> KokoroModel:
    """Random weights that make voiced speech of a few frames a phoneme."""
    torch.manual_seed(0)
    model = KokoroModel(read_kokoro_config(TINY)).eval().requires_grad_(False)
    model.predictor.duration_proj.bias.sub_(2.5)
    model.predictor.F0_proj.get_parameter("bias").fill_(150.0)
    return model


def tiny_voices() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(62, 1, 16, generator=generator) for name in ("af_one", "bm_two")}


def tiny_kokoro() -> Kokoro:
    model = tiny_model()
    return Kokoro(config=model.config, model=model, voices=Voices(tiny_voices()))


def synthesize(
    kokoro: Kokoro, phoneme_ids: Sequence[int], voice: str, *, speed: float = 1.0, seed: int = 0
) -> Tensor:
    """One sentence's samples [S], by the network alone."""
    return render(kokoro, [kokoro.sentence(phoneme_ids, voice, speed=speed, seed=seed)])[0]


@torch.inference_mode()
def render(kokoro: Kokoro, sentences: Sequence[SentenceRequest]) -> list[Tensor]:
    """The samples of sentences that share a batch."""
    plans = [finish(kokoro.model.plan(sentence)) for sentence in sentences]
    return [require_finite(row) for row in finish(kokoro.model.render(plans))]


def their_name(name: str) -> str:
    for pattern, replacement in _THEIRS:
        name = re.sub(pattern, replacement, name)
    return name


def write_hub_folder(folder: Path, model: KokoroModel, config: Mapping[str, Any] = TINY) -> None:
    """As the hub has it: a .pth of state dicts with split norms, config.json and voices/*.pt."""
    size = model.config.albert.hidden_size
    pooler = {
        "module.pooler.weight": torch.ones(size, size),
        "module.pooler.bias": torch.ones(size),
    }
    parts: dict[str, dict[str, Tensor]] = {"bert": pooler}
    for name, tensor in model.state_dict().items():
        module, _, rest = their_name(name).partition(".")
        part = parts.setdefault(module, {})
        if _NORMED.search(name) and name.endswith("weight") and ".noise_convs." not in name:
            part[f"module.{rest}_v"] = 3 * tensor
            norms = tensor.flatten(1).norm(dim=1)
            part[f"module.{rest}_g"] = norms.reshape(-1, *[1] * (tensor.ndim - 1))
        else:
            part[f"module.{rest}"] = tensor
    torch.save(parts, folder / "kokoro-v1_0.pth")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "voices").mkdir()
    for name, table in tiny_voices().items():
        torch.save(table, folder / "voices" / f"{name}.pt")
