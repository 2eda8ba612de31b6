"""The gates of MLPs: `act(gate) * up`, where the gate is the first half of the last axis.

Shapes: T tokens, F features.
"""

from __future__ import annotations

import torch
from torch.nn.functional import gelu, silu


def silu_and_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """SwiGLU (Shazeer 2020, arXiv:2002.05202). Returns `[T, F]`."""
    gate_TF, up_TF = _halves(gate_up_T2F)
    return silu(gate_TF).mul_(up_TF)


def gelu_and_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """GeGLU of the same paper, the tanh kind. Returns `[T, F]`."""
    gate_TF, up_TF = _halves(gate_up_T2F)
    return gelu(gate_TF, approximate="tanh").mul_(up_TF)


def _halves(gate_up_T2F: torch.Tensor) -> tuple[torch.Tensor, ...]:
    assert gate_up_T2F.shape[1] % 2 == 0
    return gate_up_T2F.chunk(2, dim=1)
