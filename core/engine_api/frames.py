"""Frames: the several codes that one step of a speech model yields, and the id that names them.

Owns the ids. A scheduler sees one id per position whatever the model: where a step yields a frame
of codes, the id is a hash of them, so that the keys of cached pages are as exact for frames as for
tokens. The codes travel beside the ids (`TokenRequest.prompt_frames`, `TokenDelta.codes`,
`TokenRow.frames`), one entry per frame id, in order. Ids of frames and of text never meet: those
of frames are 2**62 and above. Knows no tensors and no model.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

StepCodes = tuple[int, ...]
"""What one step of a speech model yields: one id, or a column of codes."""
FIRST_FRAME_ID = 1 << 62
END_FRAME_ID = FIRST_FRAME_ID
"""What a frame model samples where its speech ends: the stop token of all of them. Has no codes."""


def frame_id(codes: Sequence[int]) -> int:
    """The id of a frame: bit 62, and 62 bits of the BLAKE2b digest of its codes."""
    packed = struct.pack(f"<{len(codes)}q", *codes)
    digest = int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")
    return FIRST_FRAME_ID | max(digest >> 2, 1)
