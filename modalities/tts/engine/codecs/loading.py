"""A codec's module from a checkpoint: transformers' own classes, and SNAC.

Owns which codec a configuration means, and where its tensors are. Weights stay in float32: codecs
are small, and rounding is heard. Knows nothing of streaming or of speech models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import nn

from triptych.core.errors import WeightsError
from triptych.core.typed import convert
from triptych.core.weights.quiet import without_progress_bar
from triptych.core.weights.tensors.checkpoint import Checkpoint
from triptych.core.weights.tensors.loading import MAX_NAMED, TensorTarget, load_tensors
from triptych.modalities.tts.engine.codecs.families.snac import Snac, SnacConfig

CODEC_TYPES = frozenset({"dac", "encodec", "higgs_audio_v2_tokenizer", "mimi", "xcodec"})
"""`model_type`s of transformers that are codecs."""


@dataclass(frozen=True, slots=True)
class CodecBlueprint:
    """A codec that is known but not yet loaded. Its tensors' names begin with `prefix`."""

    config: Mapping[str, Any]
    prefix: str = ""

    def num_bytes(self) -> int:
        """Bytes of its weights."""
        with torch.device("meta"):
            sketch = Snac(self._snac_config()) if self._is_snac else self._library_sketch()
        return sum(tensor.numel() * 4 for tensor in sketch.state_dict().values())

    def build(
        self, checkpoint: Checkpoint, device: torch.device, report: Callable[[float], None]
    ) -> nn.Module:
        """Allocate and load. Raises `WeightsError` naming tensor and file."""
        build = self._build_snac if self._is_snac else self._build_of_library
        module = build(checkpoint, device)
        report(1.0)
        return module.eval()

    @property
    def _is_snac(self) -> bool:
        return "vq_strides" in self.config

    def _build_snac(self, checkpoint: Checkpoint, device: torch.device) -> nn.Module:
        with device:
            module = Snac(self._snac_config())
        targets = [
            TensorTarget(self.prefix + name, into) for name, into in module.state_dict().items()
        ]
        load_tensors(checkpoint, targets, ignored=self._is_unused_of_snac)
        return module

    def _is_unused_of_snac(self, name: str) -> bool:
        """Other parts of a shared file, and what only encodes."""
        local = name.removeprefix(self.prefix)
        is_encoder = local.startswith("encoder.") or ".in_proj." in local
        return is_encoder or not name.startswith(self.prefix)

    def _build_of_library(self, checkpoint: Checkpoint, device: torch.device) -> nn.Module:
        """By transformers' own loading: files of several ages name their tensors differently."""
        own = {name for name in checkpoint.tensors if name.startswith(self.prefix)}
        state = {name.removeprefix(self.prefix): checkpoint.read(name) for name in own}
        config, model_class = self._library_classes()
        with without_progress_bar():
            module, info = model_class.from_pretrained(
                None,
                config=config,
                state_dict=state,
                dtype=torch.float32,
                output_loading_info=True,
            )
        for problem in ("missing_keys", "mismatched_keys", "unexpected_keys"):
            if info[problem]:
                names = ", ".join(sorted(map(str, info[problem]))[:MAX_NAMED])
                raise WeightsError(f"The audio codec has {problem.replace('_', ' ')}: {names}.")
        moved: nn.Module = module.to(device)
        return moved

    def _library_sketch(self) -> nn.Module:
        config, model_class = self._library_classes()
        sketch: nn.Module = model_class._from_config(config)
        return sketch

    def _library_classes(self) -> tuple[Any, Any]:
        """Configuration and model class of transformers, imported here: they are large."""
        kind = self.config.get("model_type")
        if kind not in CODEC_TYPES:
            known = ", ".join(sorted(CODEC_TYPES))
            raise WeightsError(f"{kind!r} is no audio codec that is known here: {known}, snac.")
        from transformers import MODEL_MAPPING, AutoConfig

        fields = {name: value for name, value in self.config.items() if name != "model_type"}
        config = AutoConfig.for_model(kind, **fields)
        return config, MODEL_MAPPING[type(config)]

    def _snac_config(self) -> SnacConfig:
        fields = dict(self.config)
        if fields.get("attn_window_size"):
            raise WeightsError("config.json: SNAC with an attn_window_size is not supported.")
        if "encoder_dim" in fields and "encoder_rates" in fields:
            width = fields["encoder_dim"] * 2 ** len(fields["encoder_rates"])
            fields.setdefault("latent_dim", width)
        try:
            return convert(fields, SnacConfig)
        except msgspec.ValidationError as error:
            raise WeightsError(f"The codec's config.json is not usable: {error}.") from None
