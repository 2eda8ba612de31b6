"""An image as input of its model, before it has a place in a prompt.

Owns the message from the process that prepares images. Needs neither torch nor transformers.
"""

from __future__ import annotations

from typing import Any

import msgspec

from triptych.core.engine_api.prompt_content import Array, input_bytes


class PreparedImage(msgspec.Struct, frozen=True, kw_only=True):
    """An encoder's inputs, and the image's representation in a prompt.

    `spelling` consists of text with the model's special tokens, and of the lengths of runs of
    positions that features fill. `grid` are the rows and columns of the features, if their
    positions follow a grid. Equal digests mean equal features.
    """

    digest: bytes
    inputs: dict[str, Array]
    spelling: tuple[str | int, ...]
    grid: tuple[int, int] = (0, 0)

    @property
    def num_features(self) -> int:
        """The number of prompt positions that the image fills."""
        return sum(part for part in self.spelling if isinstance(part, int))

    @property
    def num_bytes(self) -> int:
        """Bytes of the encoder's inputs."""
        return input_bytes(self.inputs)


class VisionFacts(msgspec.Struct, frozen=True):
    """Facts about a model that only transformers knows.

    `placeholder` is a chat template's mark for an image; `text` are fields of a config.
    """

    placeholder: str
    text: dict[str, Any]


class FactsReply(msgspec.Struct, frozen=True):
    """The answer of a process that reads configurations."""

    facts: tuple[VisionFacts, ...] = ()
    error: str = ""
