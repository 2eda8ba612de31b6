"""An image as raw bytes, between processes.

Owns the type. Files are read and written elsewhere.
"""

from __future__ import annotations

import msgspec


class Pixels(msgspec.Struct, frozen=True, kw_only=True):
    """An image: `rgb` holds height x width x 3 bytes."""

    width: int
    height: int
    rgb: bytes

    def cropped(self, width: int, height: int) -> Pixels:
        """The part of this size, no larger than the image, from the upper left corner."""
        if (width, height) == (self.width, self.height):
            return self
        row = 3 * self.width
        rows = (self.rgb[start : start + 3 * width] for start in range(0, height * row, row))
        return Pixels(width=width, height=height, rgb=b"".join(rows))
