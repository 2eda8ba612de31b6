"""Digests that distinguish model files by content, from samples of large files.

Owns the choice of sampled blocks. Knows no layouts.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from triptych.core.errors import WeightsError
from triptych.core.process.regular_file import open_regular

SMALL_FILES = (".json", ".txt", ".jinja", ".model")
"""Suffixes of a part's files other than weights: configuration and tokenizer."""

_NUM_BLOCKS = 64
_BLOCK_BYTES = 16 * 2**10


def content_digest(file: Path) -> str:
    """SHA-256, hex, of a file's length and content; for large weight files, of 64 blocks.

    The blocks are spread evenly from the first byte to the last; files up to 1 MiB are hashed
    whole. The digest is the same on every host that has the file, and takes milliseconds instead of
    the minutes for a whole large model. Different trainings differ almost everywhere, but a change
    of a few rows may be missed. Raises `WeightsError`.
    """
    try:
        with open_regular(file) as stream:
            num_bytes = stream.seek(0, 2)
            num_blocks = -(-num_bytes // _BLOCK_BYTES)
            num_read = num_blocks if file.suffix in SMALL_FILES else min(num_blocks, _NUM_BLOCKS)
            digest = hashlib.sha256(f"{num_bytes}\n".encode())
            for n in range(num_read):
                stream.seek((num_blocks - 1) * n // max(1, num_read - 1) * _BLOCK_BYTES)
                digest.update(stream.read(_BLOCK_BYTES))
    except OSError as error:
        raise WeightsError(f"{file.name} cannot be read: {error.strerror}.") from error
    return digest.hexdigest()
