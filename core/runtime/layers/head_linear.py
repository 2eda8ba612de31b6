"""A small projection for each head, all in one call.

Owns the matrices `[H, O, I]`. Knows nothing of the meaning of heads.

Shapes: T tokens, H heads, I inputs and O outputs of a head.
"""

from __future__ import annotations

import torch


class HeadLinear:
    """`y_THO[:, h] = x_THI[:, h] @ weight_HOI[h].T`."""

    __slots__ = ("weight_HOI",)

    def __init__(self, weight_HOI: torch.Tensor) -> None:
        self.weight_HOI = weight_HOI.contiguous()

    def __call__(self, x_THI: torch.Tensor) -> torch.Tensor:
        """Project every head."""
        y_HTO = torch.bmm(x_THI.transpose(0, 1), self.weight_HOI.mT)
        return y_HTO.transpose(0, 1)
