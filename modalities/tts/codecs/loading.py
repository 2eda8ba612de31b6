"""A codec's module from a checkpoint: transformers' own classes, and SNAC.

Owns which codec a configuration means, and where its tensors are. Weights stay in float32: codecs
are small, and rounding is heard. Knows nothing of streaming or of speech models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import nn

from triptych.core.errors import WeightsError
from triptych.core.weights.checkpoint import Checkpoint
from triptych.core.weights.loading import Target, load_tensors
from triptych.modalities.tts.codecs.families.snac import Snac, SnacConfig

CODEC_TYPES = frozenset(
    {"dac", "encodec", "higgs_audio_v2_tokenizer", "mimi", "vibevoice_acoustic_tokenizer", "xcodec"}
)
"""`model_type`s of transformers that are codecs of discrete or continuous frames we stream."""

_OLD_NAMES = (
    ("parametrizations.weight.original0", "weight_g"),
    ("parametrizations.weight.original1", "weight_v"),
)


@dataclass(frozen=True, slots=True)
class CodecBlueprint:
    """A codec that is known but not yet loaded. Its tensors' names begin with `prefix`."""

    config: Mapping[str, Any]
    prefix: str = ""

    def num_bytes(self) -> int:
        """Bytes of its weights."""
        with torch.device("meta"):
            sketch = self._sketch()
        return sum(tensor.numel() * 4 for tensor in sketch.state_dict().values())

    def build(
        self, checkpoint: Checkpoint, device: torch.device, report: Callable[[float], None]
    ) -> nn.Module:
        """Allocate and load. Raises `WeightsError` naming tensor and file."""
        with device:
            module = self._sketch().float().eval()
        targets = list(self._targets(module, checkpoint))
        load_tensors(checkpoint, targets, ignored=self._is_unused, report=report)
        return module

    def _sketch(self) -> nn.Module:
        if "vq_strides" in self.config:
            return Snac(_snac_config(self.config))
        kind = self.config.get("model_type")
        if kind not in CODEC_TYPES:
            known = ", ".join(sorted(CODEC_TYPES))
            raise WeightsError(f"{kind!r} is no audio codec that is known here: {known}, snac.")
        from transformers import AutoConfig, AutoModel

        fields = {name: value for name, value in self.config.items() if name != "model_type"}
        with _uninitialised():
            module: nn.Module = AutoModel.from_config(AutoConfig.for_model(kind, **fields))
        return module

    def _targets(self, module: nn.Module, checkpoint: Checkpoint) -> Iterator[Target]:
        """Every tensor of the module; older files write weight norms under other names."""
        for name, tensor in module.state_dict().items():
            stored = self.prefix + name
            for new, old in _OLD_NAMES:
                if stored not in checkpoint.tensors:
                    stored = stored.replace(new, old)
            yield Target(stored, tensor)

    def _is_unused(self, name: str) -> bool:
        """The other parts of a shared file; of SNAC, what only encodes."""
        is_other = not name.startswith(self.prefix)
        local = name.removeprefix(self.prefix)
        is_encoder = local.startswith("encoder.") or ".in_proj." in local
        return is_other or ("vq_strides" in self.config and is_encoder)


def _snac_config(config: Mapping[str, Any]) -> SnacConfig:
    if config.get("attn_window_size"):
        raise WeightsError("config.json: SNAC with an attn_window_size is not supported.")
    fields = dict(config)
    if "encoder_dim" in fields and "encoder_rates" in fields:
        fields.setdefault("latent_dim", fields["encoder_dim"] * 2 ** len(fields["encoder_rates"]))
    try:
        return msgspec.convert(fields, SnacConfig)
    except msgspec.ValidationError as error:
        raise WeightsError(f"The codec's config.json is not usable: {error}.") from None


@contextmanager
def _uninitialised() -> Iterator[None]:
    """Modules made here are not filled with random numbers first."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        yield
