"""Answers with vectors, which are long texts.

Owns how they are written: on a thread, vector by vector, so that nobody else waits for the numbers.
Knows no route.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from pydantic import BaseModel
from starlette.responses import Response

from triptych.core.text.threads import on_text_thread
from triptych.modalities.embedding.api.service import Floats


async def written(
    reply: BaseModel, field: str, vectors: Sequence[Floats], entry: Callable[[int, Floats], Any]
) -> Response:
    """`reply` with a list in its `field`: of each vector, by its index, the `entry`."""

    def write() -> bytes:
        entries = [entry(index, vector) for index, vector in enumerate(vectors)]
        return msgspec.json.encode({**reply.model_dump(), field: entries})

    num_numbers = sum(vector.size for vector in vectors)
    document = await on_text_thread(num_numbers, write)
    return Response(document, media_type="application/json")


def numbers(vector: Floats) -> msgspec.Raw:
    """The numbers of a vector, or of one per token, as JSON."""
    return msgspec.Raw(msgspec.json.encode(vector.tolist()))
