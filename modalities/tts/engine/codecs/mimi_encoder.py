"""Codes of recordings for Qwen3-TTS's tokenizer, whose encoder is Mimi's without a decoder.

Owns loading that half with transformers, and how many frames a recording has. Knows no model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from triptych.core.errors import WeightsError
from triptych.core.runtime.tensors.checkpoint import Checkpoint
from triptych.core.runtime.tensors.loading import MAX_NAMED
from triptych.core.runtime.tensors.quiet import errors_only, transformers_loading
from triptych.core.weights.layout import read_json, read_layout
from triptych.core.weights.library_errors import library_errors
from triptych.modalities.tts.engine.codecs.encode_memory import encode_bytes

_PREFIX = "encoder."
_DECODER_PARTS = ("decoder", "upsample")


class MimiEncoder:
    """The encoder in a tokenizer's folder, in float32."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._config: Mapping[str, Any] = read_json(folder / "config.json")

    def num_bytes(self) -> int:
        """Bytes of its weights."""
        layout = read_layout(self._folder)
        shapes = (info.shape for name, info in layout.items() if name.startswith(_PREFIX))
        return sum(4 * torch.Size(shape).numel() for shape in shapes)

    def encode_bytes(self) -> int:
        """Peak memory of encoding a recording."""
        fields = self._config.get("encoder_config") or {}
        return encode_bytes(fields.get("num_filters", 64), fields.get("sampling_rate", 24_000))

    def load(self, device: torch.device) -> None:
        """Load the weights. Raises `WeightsError` for missing or unexpected ones."""
        from transformers import MimiConfig, MimiModel

        fields = dict(self._config.get("encoder_config") or {})
        fields.pop("model_type", None)
        with Checkpoint(self._folder, read_layout(self._folder), {}) as checkpoint:
            own = [name for name in checkpoint.tensors if name.startswith(_PREFIX)]
            state = {name.removeprefix(_PREFIX): checkpoint.read(name) for name in own}
        with (
            library_errors("The codec's encoder_config is invalid"),
            transformers_loading(),
            errors_only("transformers.modeling_utils"),  # it lists the decoder as missing
        ):
            model, info = MimiModel.from_pretrained(
                None,
                config=MimiConfig(**fields),
                state_dict=state,
                dtype=torch.float32,
                output_loading_info=True,
            )
        missing = [name for name in info["missing_keys"] if not name.startswith(_DECODER_PARTS)]
        wrong = sorted(map(str, [*missing, *info["mismatched_keys"], *info["unexpected_keys"]]))
        if wrong:
            names = ", ".join(wrong[:MAX_NAMED])
            raise WeightsError(f"The codec's encoder does not fit its configuration: {names}.")
        for part in ("decoder", "decoder_transformer", "upsample"):
            if hasattr(model, part):
                setattr(model, part, None)
        self._model = model.to(device).eval()

    def __call__(self, pcm_S: Tensor) -> Tensor:
        """`codes_QF` of samples at the tokenizer's rate."""
        num_codebooks = int(self._config.get("encoder_valid_num_quantizers", 16))
        hop = int(self._config.get("encode_downsample_rate", 1920))
        codes_QF: Tensor = self._model.encode(
            pcm_S[None, None], num_quantizers=num_codebooks
        ).audio_codes[0]
        return codes_QF[:, : -(-len(pcm_S) // hop)]
