"""Types of transformers that read images, or more than text, in a way that is not served.

Owns the reason for each. Reads no file, and needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from triptych.core.errors import WeightsError

_CROSS = "its layers read images by cross-attention, for which the paged cache has no place"
_ENCODER = "its decoder reads an encoder's states; the models that chat here are decoders alone"
_TOKENS = "its images become tokens of its vocabulary, and not features of a vision encoder"
_MASKED = "its class marks where images are by a mask, and not by a token"

_REASONS: Mapping[str, str] = MappingProxyType(
    {
        "blip": _CROSS,
        "chameleon": _TOKENS,
        "diffusion_gemma": "it writes a block of tokens at a time, by diffusion",
        "emu3": _TOKENS,
        "evolla": "it reads proteins, and no images",
        "florence2": _ENCODER,
        "fuyu": "it has no vision encoder: its language model reads patches of an image",
        "git": "its class writes images before the text, and caches tokens that are not given",
        "idefics": _CROSS,
        "instructblipvideo": "it reads videos alone",
        "kosmos-2": _MASKED,
        "kosmos-2.5": _MASKED,
        "mllama": _CROSS,
        "phi4_multimodal": "it reads images with an adapter that its text must not use, and its"
        " class takes pixels where others take features",
        "pi0": "it moves robots, and writes no text",
        "pix2struct": _ENCODER,
        "pp_formulanet": _ENCODER,
        "t5gemma2": _ENCODER,
        "udop": _ENCODER,
        "vision-encoder-decoder": _ENCODER,
    }
)


def check_served(model_type: object) -> None:
    """Raise `WeightsError` with the reason for a type that is not served."""
    if isinstance(model_type, str) and model_type in _REASONS:
        raise WeightsError(f"model_type {model_type!r} in config.json: {_REASONS[model_type]}.")
