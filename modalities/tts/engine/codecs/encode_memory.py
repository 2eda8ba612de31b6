"""The memory in which recordings are encoded: of the longest one that a voice is made of.

Owns the estimate. Encoders are widest where they read samples: their first layer sets the peak.
"""

from __future__ import annotations

from torch import nn

from triptych.core.media.audio.intake import VOICE_LIMITS

_NUM_COPIES = 5
"""Outputs of the first layer, in float32, that exist at the peak: as measured, 4.5 with Mimi and
4.7 with Higgs Audio's tokenizer.
"""
_SEMANTIC = "semantic_model."
"""The second encoder of some codecs, which reads samples at a rate of its own."""


def longest_recording(sample_rate: int) -> int:
    """Samples of the longest recording of a voice."""
    return round(VOICE_LIMITS.max_seconds * sample_rate)


def encode_bytes(width: float, sample_rate: int) -> int:
    """Peak memory of an encoder whose first layer outputs `width` values for each sample."""
    return round(_NUM_COPIES * 4 * width * longest_recording(sample_rate))


def first_width(codec: nn.Module, sample_rate: int) -> float:
    """The most values for each sample that a layer outputs which reads samples; 0 without one."""
    semantic_rate = getattr(codec.config, "semantic_sample_rate", sample_rate)
    widths = (
        layer.out_channels
        / layer.stride[0]
        * (semantic_rate / sample_rate if name.startswith(_SEMANTIC) else 1)
        for name, layer in codec.named_modules()
        if isinstance(layer, nn.Conv1d) and layer.in_channels == 1
    )
    return max(widths, default=0)
