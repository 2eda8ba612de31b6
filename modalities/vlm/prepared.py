"""An image as its model takes it, before it has a place in a prompt.

Owns what crosses from the process that prepares images. Neither torch nor transformers is needed.
"""

from __future__ import annotations

from typing import Any

import msgspec

from triptych.core.engine_api.prompt_content import Array, input_bytes


class PreparedImage(msgspec.Struct, frozen=True, kw_only=True):
    """What an encoder is called with, and what stands for the image in a prompt.

    `spelling` is text with the model's special tokens, and numbers of positions that its features
    fill. `grid` are the rows and columns of those, where positions follow them. Equal digests mean
    equal features.
    """

    digest: bytes
    inputs: dict[str, Array]
    spelling: tuple[str | int, ...]
    grid: tuple[int, int] = (0, 0)

    @property
    def num_features(self) -> int:
        """Positions of the prompt that it fills."""
        return sum(part for part in self.spelling if isinstance(part, int))

    @property
    def num_bytes(self) -> int:
        """Of what its encoder is called with."""
        return input_bytes(self.inputs)


class VisionFacts(msgspec.Struct, frozen=True):
    """`placeholder` is what a chat template puts for an image; `text` are fields of a config."""

    placeholder: str
    text: dict[str, Any]


class FactsReply(msgspec.Struct, frozen=True):
    """What a process that reads configurations answers."""

    facts: tuple[VisionFacts, ...] = ()
    error: str = ""
