"""Images as raw bytes, as they cross between processes.

Owns the type. Reads and writes no files.
"""

from __future__ import annotations

import msgspec


class Pixels(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An image: `rgb` holds height x width x 3 bytes, `alpha` height x width; empty if opaque."""

    width: int
    height: int
    rgb: bytes
    alpha: bytes = b""

    def crop(self, width: int, height: int) -> Pixels:
        """The upper left part of the given size, which is at most the image's."""
        if (width, height) == (self.width, self.height):
            return self
        return Pixels(
            width=width,
            height=height,
            rgb=_corner(self.rgb, 3 * self.width, height, 3 * width),
            alpha=_corner(self.alpha, self.width, height, width) if self.alpha else b"",
        )


def _corner(data: bytes, row_bytes: int, num_rows: int, num_bytes: int) -> bytes:
    """The first bytes of each of the first rows."""
    starts = range(0, num_rows * row_bytes, row_bytes)
    return b"".join(data[start : start + num_bytes] for start in starts)
