"""Taking over an exported model: its codec, text encoders and transformer as a start.

Owns where the parts go. New words are placed among the old ones by the linear map from MiniLM's
embeddings to each text encoder's, so that they are near those of similar meaning.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from corpus import read_scale
from diffusers import AutoencoderDC


def adopt_codec(folder: Path, exported: Path) -> None:
    """Write an exported folder's codec, and the scale of its latents, as if trained in `folder`."""
    codec = AutoencoderDC.from_pretrained(exported / "vae", dtype=torch.float32)
    config = json.loads((exported / "vae" / "config.json").read_text(encoding="utf-8"))
    (folder / "corpus").mkdir(parents=True, exist_ok=True)
    torch.save({"codec": codec.state_dict()}, folder / "codec.pt")
    scale = {"mean": config["shift_factor"], "deviation": 1 / config["scaling_factor"]}
    (folder / "corpus" / "scale.json").write_text(json.dumps(scale), encoding="utf-8")
    assert read_scale(folder)
