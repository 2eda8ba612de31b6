"""Encoding answers with vectors.

Owns encoding on a thread, so that other requests do not wait, and the formats of a vector. Knows no
route.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from starlette.responses import Response

from triptych.core.text.threads import on_text_thread
from triptych.modalities.embedding.api.service import Floats


async def json_response(vectors: Sequence[Floats], document: Callable[[], object]) -> Response:
    """The response with the JSON of `document()`, which holds `vectors`."""
    num_numbers = sum(vector.size for vector in vectors)
    text = await on_text_thread(num_numbers, lambda: msgspec.json.encode(document()))
    return Response(text, media_type="application/json")


def numbers(vector: Floats) -> msgspec.Raw:
    """The numbers of a vector, or of a vector per token, as JSON."""
    return msgspec.Raw(msgspec.json.encode(vector.tolist()))


def to_base64(vector: Floats) -> str:
    """The numbers as little-endian float32 in base64."""
    return base64.b64encode(np.ascontiguousarray(vector, "<f4").tobytes()).decode()


def signs(vector: Floats) -> list[int]:
    """One bit per number, set if it is not negative, packed into bytes, highest bit first."""
    packed: list[int] = np.packbits(vector >= 0).tolist()
    return packed
