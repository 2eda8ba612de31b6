"""The gate of a GeGLU MLP (Shazeer 2020, arXiv:2002.05202). Shapes: T tokens, F features."""

from __future__ import annotations

import torch
from torch.nn.functional import gelu


def gelu_and_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """`gelu(gate) * up`, the tanh kind, where the gate is the first half. Returns `[T, F]`."""
    assert gate_up_T2F.shape[1] % 2 == 0
    return _reference(gate_up_T2F)


def _reference(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=1)
    return gelu(gate_TF, approximate="tanh").mul_(up_TF)
