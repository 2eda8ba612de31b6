"""The gates of MLPs: `act(gate) * up`, with the gate in the first half of the last axis.

Shapes: T tokens, F features.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import gelu, silu


def silu_and_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """SwiGLU (Shazeer 2020, arXiv:2002.05202). Returns `[T, F]`."""
    return _gated(gate_up_T2F, silu)


def gelu_and_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """GeGLU of the same paper, the tanh kind. Returns `[T, F]`."""
    return _gated(gate_up_T2F, _tanh_gelu)


_tanh_gelu = partial(gelu, approximate="tanh")


def _gated(
    gate_up_T2F: torch.Tensor, activation: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    assert gate_up_T2F.shape[1] % 2 == 0
    if gate_up_T2F.is_cuda:
        from triptych.core.runtime.kernels.triton.gated import gated

        out_TF: torch.Tensor = gated(gate_up_T2F, activation is _tanh_gelu)
        return out_TF
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=1)
    return activation(gate_TF).mul_(up_TF)
