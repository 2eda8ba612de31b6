"""Frames: the several codes that one step of a speech model yields, and the id of each frame.

Owns the ids. A scheduler sees one id per position for every model: where a step yields a frame of
codes, the id is a hash of them, so that the keys of cached pages are as exact for frames as for
tokens. The codes travel with the ids (`TokenRequest.prompt_frames`, `TokenDelta.codes`,
`TokenRow.frames`), one entry per frame id, in order. Frame ids are 2**62 and above, so they never
equal text ids. Knows no tensors and no model.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

StepCodes = tuple[int, ...]
"""The output of one step of a speech model: one id, or a column of codes."""
FIRST_FRAME_ID = 1 << 62
END_FRAME_ID = FIRST_FRAME_ID
"""The stop token of all frame models, sampled at the end of speech. Has no codes."""


def frame_id(codes: Sequence[int]) -> int:
    """The id of a frame: bit 62, and 62 bits of the BLAKE2b digest of its codes."""
    packed = struct.pack(f"<{len(codes)}q", *codes)
    digest = int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")
    return FIRST_FRAME_ID | max(digest >> 2, 1)
