"""The gates of MLPs: `act(gate) * up`, with the gate in the first half of the last axis.

Shapes: T tokens, F features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch.nn.functional import gelu, silu

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class SwigluClamp:
    """The limits of gpt-oss's gate (OpenAI 2025, arXiv:2508.10925).

    The gate is `x * sigmoid(alpha * x)` of `x` up to `limit`; the factor, between `-limit` and
    `limit`, is increased by 1.
    """

    alpha: float
    limit: float


def gate_of(
    activation: Activation, clamp: SwigluClamp | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The gate of an MLP."""
    if clamp is not None:
        return partial(clamped_silu_and_mul, clamp=clamp)
    return silu_and_mul if activation == "silu" else gelu_and_mul


def silu_and_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """SwiGLU (Shazeer 2020, arXiv:2002.05202). Returns `[T, F]`."""
    return _gated(gate_up_T2F, silu)


def gelu_and_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """GeGLU of the same paper, the tanh kind. Returns `[T, F]`."""
    return _gated(gate_up_T2F, _tanh_gelu)


def clamped_silu_and_mul(gate_up_T2F: torch.Tensor, clamp: SwigluClamp) -> torch.Tensor:
    """SwiGLU with limits. Returns `[T, F]`."""
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=1)
    gate_TF, up_TF = gate_TF.clamp(max=clamp.limit), up_TF.clamp(-clamp.limit, clamp.limit)
    return gate_TF * (gate_TF * clamp.alpha).sigmoid() * (up_TF + 1)


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
