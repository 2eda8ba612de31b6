"""A tiny Qwen3-TTS with weights that follow from their names, and what the package made of it.

`qwen3_tts.json` was written once with the classes of PyPI's qwen-tts 0.1.1 (Apache-2.0) on
transformers 4.57.3, in float32, greedily: frames of codes, sound, and a speaker's vector.
"""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

GOLDEN: dict[str, Any] = json.loads(Path(__file__).with_name("qwen3_tts.json").read_text())
TEXT, SHORT_TEXT, INSTRUCTION = (10, 11, 12, 13, 14), (20, 21, 22), (1, 7, 6, 30, 31, 32, 2, 6)
ROLE = (1, 5, 6)
"""The ids of a text, of another, of a turn that describes a voice, and of the speaker's turn."""


def weight(name: str, shape: list[int]) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    if name.endswith("cluster_usage"):
        return 1 + values.abs()
    if len(shape) >= 2:
        gain = 0.6 if name.startswith("decoder.") else 1.5
        return values * (gain / math.sqrt(math.prod(shape[1:])))
    if name.endswith(("scale", "gamma")):
        return 0.5 + 0.1 * values
    if "norm" in name and name.endswith("weight"):
        return 1 + 0.1 * values
    return 0.1 * values


def weights(shapes: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    return {name: weight(name, shape) for name, shape in shapes.items()}


def qwen_tts(folder: Path, *, kind: str = "custom_voice") -> None:
    """Save the model and its codec in `folder`, without a tokenizer."""
    codec = folder / "speech_tokenizer"
    codec.mkdir(parents=True, exist_ok=True)
    config = {**GOLDEN["config"], "tts_model_type": kind}
    (folder / "config.json").write_text(json.dumps(config))
    (codec / "config.json").write_text(json.dumps(GOLDEN["codec"]))
    save_file(weights(GOLDEN["shapes"]), folder / "model.safetensors")
    save_file(weights(GOLDEN["codec_shapes"]), codec / "model.safetensors")
