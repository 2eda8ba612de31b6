"""Weights of four bits in words of 32.

Owns the order of the weights in a word. Knows nothing of scales, zeros or products.
"""

from __future__ import annotations

import torch

WEIGHTS_PER_WORD = 8
_SHIFTS = tuple(range(0, 4 * WEIGHTS_PER_WORD, 4))
_AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)
"""Bit shifts of eight consecutive outputs in a word of AWQ."""


def unpacked_words(words: torch.Tensor, layout: str) -> torch.Tensor:
    """Unpack words of four bits along the last dimension, as an `Int4Weight`'s layout has them."""
    shifts = _AWQ_SHIFTS if layout == "awq" else _SHIFTS
    shifts_8 = torch.tensor(shifts, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts_8) & 15).flatten(-2)


def packed_words(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes of four bits along the last dimension, the first one lowest."""
    shifts_8 = torch.tensor(_SHIFTS, dtype=torch.int32, device=codes.device)
    words: torch.Tensor = codes.unflatten(-1, (-1, WEIGHTS_PER_WORD)) << shifts_8
    return words.sum(-1, dtype=torch.int32)
