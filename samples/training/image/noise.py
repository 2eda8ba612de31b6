"""The noise that images are trained with, and how much of it.

Owns how noise carries a code (`pictures/chances.py`). Knows nothing of models.

Shapes: B images, T tokens, C channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

_UNCODED = 0.12  # of images: what an edit starts from has noise that knows nothing of it
_MIDDLE, _SPREAD = 0.9, 1.3  # of the logits of levels


def coded_noise(codes_BC: Tensor, num_tokens: int) -> Tensor:
    """Noise `[B, T, C]` that carries codes: as the means of its channels, over their deviation.

    Codes are standard normals, so over all images such noise is as any other, and any noise can be
    started from. For some images, noise and code have nothing to do with each other.
    """
    noise_BTC = torch.randn(len(codes_BC), num_tokens, codes_BC.shape[1], device=codes_BC.device)
    means_BC = codes_BC / num_tokens**0.5
    is_coded_B = torch.rand(len(codes_BC), device=codes_BC.device) >= _UNCODED
    change_BC = (means_BC - noise_BTC.mean(1)) * is_coded_B[:, None]
    return noise_BTC + change_BC[:, None]


def noise_levels(count: int, device: torch.device) -> Tensor:
    """So many levels in 0..1, logit-normal (arXiv:2403.03206), rather high."""
    return (_MIDDLE + _SPREAD * torch.randn(count, device=device)).sigmoid()
