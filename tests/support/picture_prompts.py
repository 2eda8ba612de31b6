"""Prompts with pictures in them, put together by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from triptych.core.engine_api.prompt_content import ContentSpan, PromptContent, content_ids
from triptych.modalities.vlm.prepared import PreparedPicture


@dataclass(frozen=True, slots=True)
class PicturePrompt:
    """What a `TokenRequest` takes: ids, those of picture positions among them, and the pictures."""

    prompt_ids: tuple[int, ...]
    pictures: tuple[PromptContent, ...]


def join_prompt(
    parts: Sequence[Sequence[int] | PreparedPicture], encode: Callable[[str], Sequence[int]]
) -> PicturePrompt:
    """Text as ids and pictures, in order; `encode` reads spelled special tokens as such."""
    ids: list[int] = []
    pictures: list[PromptContent] = []
    for part in parts:
        if isinstance(part, PreparedPicture):
            pictures.append(_place(part, ids, encode))
        else:
            ids += part
    return PicturePrompt(tuple(ids), tuple(pictures))


def _place(
    picture: PreparedPicture, ids: list[int], encode: Callable[[str], Sequence[int]]
) -> PromptContent:
    """Spell `picture` at the end of `ids`."""
    filled = iter(content_ids(picture.digest, picture.num_features))
    runs: list[tuple[int, int]] = []
    for part in picture.spelling:
        if isinstance(part, str):
            ids += encode(part)
        else:
            runs.append((len(ids), part))
            ids += [next(filled) for _ in range(part)]
    span = ContentSpan(digest=picture.digest, runs=tuple(runs), grid=picture.grid)
    return PromptContent(span=span, inputs=picture.inputs)
