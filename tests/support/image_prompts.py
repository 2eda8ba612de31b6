"""Prompts with images in them, put together by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from triptych.core.engine_api.prompt_content import ContentSpan, PromptContent, content_ids
from triptych.modalities.vlm.prepared import PreparedImage


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """What a `TokenRequest` takes: ids, those of image positions among them, and the images."""

    prompt_ids: tuple[int, ...]
    images: tuple[PromptContent, ...]


def join_prompt(
    parts: Sequence[Sequence[int] | PreparedImage], encode: Callable[[str], Sequence[int]]
) -> ImagePrompt:
    """Text as ids and images, in order; `encode` reads spelled special tokens as such."""
    ids: list[int] = []
    images: list[PromptContent] = []
    for part in parts:
        if isinstance(part, PreparedImage):
            images.append(_place(part, ids, encode))
        else:
            ids += part
    return ImagePrompt(tuple(ids), tuple(images))


def _place(
    image: PreparedImage, ids: list[int], encode: Callable[[str], Sequence[int]]
) -> PromptContent:
    """Spell `image` at the end of `ids`."""
    filled = iter(content_ids(image.digest, image.num_features))
    runs: list[tuple[int, int]] = []
    for part in image.spelling:
        if isinstance(part, str):
            ids += encode(part)
        else:
            runs.append((len(ids), part))
            ids += [next(filled) for _ in range(part)]
    span = ContentSpan(digest=image.digest, runs=tuple(runs), grid=image.grid)
    return PromptContent(span=span, inputs=image.inputs)
