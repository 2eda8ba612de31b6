"""Images as raw bytes, as they cross between processes.

Owns the type. Reads and writes no files.
"""

from __future__ import annotations

import msgspec


class Pixels(msgspec.Struct, frozen=True, kw_only=True):
    """An image: `rgb` holds height x width x 3 bytes."""

    width: int
    height: int
    rgb: bytes

    def crop(self, width: int, height: int) -> Pixels:
        """The upper left part of the given size, which is at most the image's."""
        if (width, height) == (self.width, self.height):
            return self
        row = 3 * self.width
        rows = (self.rgb[start : start + 3 * width] for start in range(0, height * row, row))
        return Pixels(width=width, height=height, rgb=b"".join(rows))
