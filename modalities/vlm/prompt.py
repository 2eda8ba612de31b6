"""A prompt with pictures in it, from its parts.

Owns how ids of text and of picture positions are put together. Knows no template and no tokenizer
but as a function. Neither torch nor transformers is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from triptych.core.vision import Array, Picture, PictureSpan, picture_ids


class PreparedPicture(msgspec.Struct, frozen=True, kw_only=True):
    """A picture as its model takes it.

    `spelling` is what stands for it in a prompt: text with the model's special tokens, and numbers
    of positions that its features fill. `grid` are the rows and columns of those, where positions
    follow them. Equal digests mean equal features.
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
        """What its encoder is called with."""
        return sum(len(array.data) for array in self.inputs.values())


@dataclass(frozen=True, slots=True)
class SeeingPrompt:
    """What a `TokenRequest` takes: ids, those of picture positions among them, and the pictures."""

    prompt_ids: tuple[int, ...]
    pictures: tuple[Picture, ...]


def join_prompt(
    parts: Sequence[Sequence[int] | PreparedPicture], encode: Callable[[str], Sequence[int]]
) -> SeeingPrompt:
    """Text as ids and pictures, in order; `encode` reads spelled special tokens as such."""
    ids: list[int] = []
    pictures: list[Picture] = []
    for part in parts:
        if isinstance(part, PreparedPicture):
            pictures.append(_place(part, ids, encode))
        else:
            ids += part
    return SeeingPrompt(tuple(ids), tuple(pictures))


def _place(
    picture: PreparedPicture, ids: list[int], encode: Callable[[str], Sequence[int]]
) -> Picture:
    """Spell `picture` at the end of `ids`."""
    filled = iter(picture_ids(picture.digest, picture.num_features))
    runs: list[tuple[int, int]] = []
    for part in picture.spelling:
        if isinstance(part, str):
            ids += encode(part)
        else:
            runs.append((len(ids), part))
            ids += [next(filled) for _ in range(part)]
    span = PictureSpan(digest=picture.digest, runs=tuple(runs), grid=picture.grid)
    return Picture(span=span, inputs=picture.inputs)
