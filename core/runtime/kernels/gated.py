"""The activations of MLPs, and their gates: `act(gate) * up`, the gate in the first half.

Owns their torch references; on a GPU a gate is one kernel of Triton's.

Shapes: T tokens, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Literal

import torch
from torch.nn.functional import gelu, relu, silu

Activation = Literal["silu", "gelu_tanh", "relu2"]


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
    """The gate of an MLP, `[T, 2 F]` to `[T, F]`; with a `clamp` it is clamped SwiGLU."""
    if clamp is not None:
        return partial(clamped_silu_and_mul, clamp=clamp)
    return partial(_gated, activation=activation)


def activation_of(activation: Activation) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function between the projections of an MLP without a gate."""
    return _ACTIVATIONS[activation]


def silu_and_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """SwiGLU (Shazeer 2020, arXiv:2002.05202). Returns `[T, F]`."""
    return _gated(gate_up_T2F, "silu")


def gelu_and_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """GeGLU of the same paper, the tanh kind. Returns `[T, F]`."""
    return _gated(gate_up_T2F, "gelu_tanh")


def clamped_silu_and_mul(gate_up_T2F: torch.Tensor, clamp: SwigluClamp) -> torch.Tensor:
    """SwiGLU with limits. Returns `[T, F]`."""
    if gate_up_T2F.is_cuda:
        return _by_kernel(gate_up_T2F, "clamped_silu", clamp.alpha, clamp.limit)
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=1)
    gate_TF, up_TF = gate_TF.clamp(max=clamp.limit), up_TF.clamp(-clamp.limit, clamp.limit)
    return gate_TF * (gate_TF * clamp.alpha).sigmoid() * (up_TF + 1)


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """Primer's activation (So et al. 2021, arXiv:2109.08668)."""
    return relu(x).square_()


_ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = MappingProxyType(
    {"silu": silu, "gelu_tanh": partial(gelu, approximate="tanh"), "relu2": squared_relu}
)


def _gated(gate_up_T2F: torch.Tensor, activation: Activation) -> torch.Tensor:
    assert gate_up_T2F.shape[1] % 2 == 0
    if gate_up_T2F.is_cuda:
        return _by_kernel(gate_up_T2F, activation)
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=1)
    return _ACTIVATIONS[activation](gate_TF).mul_(up_TF)


def _by_kernel(gate_up_T2F: torch.Tensor, kind: str, *limits: float) -> torch.Tensor:
    from triptych.core.runtime.kernels.triton.gated import gated

    out_TF: torch.Tensor = gated(gate_up_T2F, kind, *limits)
    return out_TF
