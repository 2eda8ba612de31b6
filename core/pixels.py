"""A picture as raw bytes, between processes.

Owns the type. Files are read and written elsewhere.
"""

from __future__ import annotations

import msgspec


class Pixels(msgspec.Struct, frozen=True, kw_only=True):
    """A picture: `rgb` holds height x width x 3 bytes."""

    width: int
    height: int
    rgb: bytes
