"""Export: checkpoints to the folder that ships, config.json and bfloat16 safetensors.

Owns the names and sizes of the files, and refuses to exceed the voice's size limit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from teacher import asset
from torch import Tensor

from triptych.modalities.tts.configs.voice import AcousticConfig, CodecConfig, VoiceConfig

MAX_CODEC_PARAMETERS, MAX_TALKER_PARAMETERS = 6_000_000, 14_000_000
MAX_BYTES = 40_000_000
PAD_ID = 0


def export(folder: Path, out: Path, talker: AcousticConfig, codec: CodecConfig) -> None:
    """Write the voice trained in `folder` to `out`."""
    parts = {
        "codec": _state(folder / "codec.pt", "codec"),
        "talker": _state(folder / "talker.pt", "talker"),
    }
    for name, limit in (("codec", MAX_CODEC_PARAMETERS), ("talker", MAX_TALKER_PARAMETERS)):
        count = sum(tensor.numel() for tensor in parts[name].values())
        print(f"{name}: {count / 1e6:.2f} M parameters")
        if count > limit:
            raise SystemExit(f"The {name} has {count} parameters; {limit} are allowed.")
    tensors = {
        f"{part}.{name}": tensor.to(torch.bfloat16).contiguous()
        for part, state in parts.items()
        for name, tensor in state.items()
    }
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    values: dict[str, Any] = {
        **VoiceConfig(codec=codec, acoustic=talker).to_json(),
        "voices": [
            {
                "name": "heart",
                "description": "American woman, trained on synthetic speech",
                "language": "en-US",
            }
        ],
        "max_phonemes": 220,
        "sampling": {"temperature": 0.0},
        "prompt_prefix": [PAD_ID],
        "prompt_suffix": [PAD_ID, talker.num_symbols],
        "vocab": json.loads(asset("vocab.json").read_text(encoding="utf-8")),
    }
    text = json.dumps(values, ensure_ascii=False, indent=1)
    (out / "config.json").write_text(text + "\n", encoding="utf-8")
    size = sum(file.stat().st_size for file in out.iterdir())
    print(f"{out}: {size / 1e6:.1f} MB")
    if size > MAX_BYTES:
        raise SystemExit(f"The folder weighs more than {MAX_BYTES / 1e6:.0f} MB.")


def _state(path: Path, part: str) -> dict[str, Tensor]:
    checkpoint: dict[str, dict[str, Tensor]] = torch.load(
        path, weights_only=True, map_location="cpu"
    )
    return checkpoint[part]
