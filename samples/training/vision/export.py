"""Export: checkpoints to the vision encoder's folder, joined to the language model's when used.

Owns the folder's files: config.json, preprocessor_config.json, generation_config.json, and
model.safetensors in bfloat16 with the tower, the slot head, the slot projector and the LoRA.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from language_training import ALPHA
from safetensors.torch import save_file
from torch import Tensor

from triptych.modalities.vlm.configs.slots import SlotConfig, SlotVisionConfig
from triptych.modalities.vlm.engine.slots.model import PREFIX
from triptych.modalities.vlm.engine.slots.tower import from_released

_PLACEHOLDER_ID = 16
"""<empty_output>: the id of image positions in the language model's vocabulary."""
_VISION_FIELDS = (
    "model_type", "image_size", "hidden_size", "reader_size", "intermediate_size",
    "num_hidden_layers", "num_attention_heads", "num_looks", "kinds", "fields", "sentence",
    "num_letters", "num_words",
)  # fmt: skip
_PICTURES = {
    "image_processor_type": "ViTImageProcessor",
    "do_resize": True,
    "resample": 3,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def export(folder: Path, tower: Path, vision: SlotVisionConfig, out: Path) -> None:
    """Write the trained weights of `folder`."""
    reader = torch.load(folder / "reader.pt", weights_only=True)["reader"]
    trained = torch.load(folder / "teller.pt", weights_only=True)
    parts = {
        "tower.": from_released(torch.load(tower, weights_only=True)),
        "reader.": reader,
        "teller.": trained["teller"],
        PREFIX: trained["changes"],
    }
    ranks = [len(tensor) for name, tensor in trained["changes"].items() if name.endswith(".down")]
    write(out, vision, parts, rank=max(ranks, default=0))


def write(
    out: Path, vision: SlotVisionConfig, parts: Mapping[str, Mapping[str, Tensor]], *, rank: int
) -> None:
    """Write the folder; `parts` are tensors by the prefix of their names."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{prefix}{name}": _stored(tensor)
        for prefix, part in parts.items()
        for name, tensor in part.items()
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    config = {
        "model_type": SlotConfig.model_type,
        "image_token_id": _PLACEHOLDER_ID,
        "adapter_rank": rank,
        "adapter_alpha": ALPHA,
        "vision_config": {name: getattr(vision, name) for name in _VISION_FIELDS},
    }
    size = {"height": vision.image_size, "width": vision.image_size}
    _write(out / "config.json", config)
    _write(out / "preprocessor_config.json", {**_PICTURES, "size": size})
    _write(out / "generation_config.json", {"temperature": 0.0})


def _stored(tensor: Tensor) -> Tensor:
    return (tensor.bfloat16() if tensor.is_floating_point() else tensor).contiguous()


def _write(file: Path, fields: object) -> None:
    file.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
