"""Which implementation serves an image-text model, or why none does.

Owns the answer from a configuration alone, before weights are loaded. A model that runs on
transformers is compared with its class once it is loaded (`proof`), and may be refused then.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.modalities.vlm.engine.blueprint import is_native
from triptych.modalities.vlm.engine.fallback import FallbackVisionBlueprint


def implementation_of(config: Mapping[str, Any]) -> Literal["native", "transformers"]:
    """The implementation of a `config.json`. Raises `WeightsError` with the reason if none."""
    if is_native(config):
        return "native"
    checkpoint = Checkpoint(Path(), {}, dict(config))
    device = torch.device("cpu")
    blueprint = FallbackVisionBlueprint(
        checkpoint, max_length=0, dtype=torch.bfloat16, device=device
    )
    blueprint.text.known_plan()
    return "transformers"
