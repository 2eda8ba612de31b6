"""The type that a device computes fastest in.

Owns the choice. Processors without products of bfloat16 convert each value: there a layer takes up
to sixty times as long as in float32.
"""

from __future__ import annotations

import torch

from triptych.core.runtime.devices.device import has_fast_cpu_bfloat16


def has_bfloat16(device: torch.device) -> bool:
    """Whether the device computes in bfloat16, and does not merely store it."""
    if device.type == "cpu":
        return has_fast_cpu_bfloat16()
    return torch.cuda.is_bf16_supported(including_emulation=False)


def mixed_precision(device: torch.device, *, keeps_casts: bool = True) -> torch.autocast:
    """Layers within compute in bfloat16 where that is fast; weights and sums stay in float32.

    `keeps_casts` keeps the weights' casts until the end of the context.
    """
    return torch.autocast(
        device.type, torch.bfloat16, enabled=has_bfloat16(device), cache_enabled=keeps_casts
    )
