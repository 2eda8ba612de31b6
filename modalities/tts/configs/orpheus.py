"""The `speech` block of `config.json`, which marks a Llama as a speech model of Orpheus's layout.

Owns the published layout's numbers (Orpheus 3B 0.1, Canopy Labs, 2025): they are the defaults, so
`{"layout": "orpheus"}` is a whole block. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from triptych.core.errors import WeightsError
from triptych.core.process.typed import convert, describe_mismatch

Id = Annotated[int, msgspec.Meta(ge=0)]

CODES_PER_FRAME = 7
FRAME_ORDER = (0, 1, 4, 2, 3, 5, 6)
"""The token of a frame that holds each of SNAC's codes: one coarse, two middle, four fine ones."""


class SpeechBlock(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How text and codes are encoded as tokens.

    A prompt is `prompt_start`, the tokens of "voice: text", `prompt_end`. The code of a frame's
    `i`-th token is its id less `first_code_id + i * codebook_size`. `codec` is SNAC's folder in the
    model's folder.
    """

    layout: str
    codec: str = "snac"
    first_code_id: Id = 128_266
    codebook_size: Annotated[int, msgspec.Meta(ge=1)] = 4096
    prompt_start: tuple[Id, ...] = (128_259,)
    prompt_end: tuple[Id, ...] = (128_009, 128_260, 128_261, 128_257)
    stop_ids: tuple[Id, ...] = (128_258, 128_262)
    voices: tuple[str, ...] = ("tara", "leah", "jess", "leo", "dan", "mia", "zac", "zoe")
    tags: tuple[str, ...] = (
        "laugh",
        "chuckle",
        "sigh",
        "cough",
        "sniffle",
        "groan",
        "yawn",
        "gasp",
    )


def read_speech_block(config: Mapping[str, Any]) -> SpeechBlock:
    """Read the block. Raises `WeightsError` that names the field."""
    try:
        block = convert(config.get("speech"), SpeechBlock)
    except msgspec.ValidationError as error:
        reason = describe_mismatch(error, config.get("speech"))
        raise WeightsError(f"config.json: speech is invalid: {reason}.") from None
    if block.layout != "orpheus":
        raise WeightsError(f"config.json: unknown speech layout {block.layout!r}; use orpheus.")
    if not block.voices:
        raise WeightsError("config.json: speech lists no voices.")
    return block
