"""Operations of recurrent layers on the rows of a step: convolutions and scans with states.

Owns their torch references, which take token after token. On a CPU the native kernels compute a
whole layer between its projections (native/recurrent.c); on a GPU Triton's kernels take their place
here. A row's result depends neither on other rows nor on the chunks of its tokens.

Shapes: T tokens of all rows, X channels, K tokens of a convolution, G key heads, H value heads,
D key dim, E value dim, L lines of states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import silu, softplus

_UNIT_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class StateRows:
    """The tokens of a step's rows between snapshots, in order: (slot, start, stop, line).

    The state in line `slot` goes on over tokens `start .. stop - 1`, and is then copied to `line`
    as well, unless that is -1.
    """

    segments: Sequence[tuple[int, int, int, int]]

    def tokens(self, states: Sequence[torch.Tensor]) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Each token, with views of the states that it updates in place."""
        for slot, start, stop, line in self.segments:
            own = [state[slot] for state in states]
            for token in range(start, stop):
                yield token, own
            if line >= 0:
                for state in states:
                    state[line] = state[slot]


@dataclass(frozen=True, slots=True)
class Convolution:
    """The weights of a convolution of each channel over a row's last K tokens, in float32."""

    weight_KX: torch.Tensor
    bias_X: torch.Tensor | None = None
    activates: bool = True


def convolve(
    x_TX: torch.Tensor, by: Convolution, state_LJX: torch.Tensor, rows: StateRows
) -> torch.Tensor:
    """The convolution of all rows, then SiLU if it activates, in the type of `x_TX`.

    A state has the last J = K - 1 inputs, in float32.
    """
    out_TX = torch.empty_like(x_TX)
    for token, (last_JX,) in rows.tokens([state_LJX]):
        window_KX = torch.cat((last_JX, x_TX[token : token + 1].float()))
        sum_X = (window_KX * by.weight_KX).sum(0)
        if by.bias_X is not None:
            sum_X = sum_X + by.bias_X
        out_TX[token] = silu(sum_X) if by.activates else sum_X
        last_JX.copy_(window_KX[1:])
    return out_TX


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """The inputs of the gated delta rule: of each token, and of all."""

    q_TGD: torch.Tensor
    k_TGD: torch.Tensor
    v_THE: torch.Tensor
    a_TH: torch.Tensor
    b_TH: torch.Tensor
    decay_H: torch.Tensor
    dt_bias_H: torch.Tensor


def gated_delta_rule(
    inputs: DeltaInputs, state_LHDE: torch.Tensor, rows: StateRows
) -> torch.Tensor:
    """The gated delta rule (Yang et al. 2024, arXiv:2412.06464): `y_THE`, in float32.

    Queries and keys are normalized to length 1, and queries divided by the root of their size. A
    key head serves as many value heads as there are for it. States are float32.
    """
    repeats = inputs.v_THE.shape[1] // inputs.q_TGD.shape[1]
    q_THD, k_THD = (
        _unit(x_TGD).repeat_interleave(repeats, dim=1) for x_TGD in (inputs.q_TGD, inputs.k_TGD)
    )
    q_THD = q_THD * q_THD.shape[2] ** -0.5
    v_THE, beta_TH = inputs.v_THE.float(), inputs.b_TH.float().sigmoid()
    decay_TH = torch.exp(inputs.decay_H * softplus(inputs.a_TH.float() + inputs.dt_bias_H))
    y_THE = torch.empty_like(v_THE)
    for token, (state_HDE,) in rows.tokens([state_LHDE]):
        k_HD1, q_HD1 = k_THD[token].unsqueeze(2), q_THD[token].unsqueeze(2)
        state_HDE.mul_(decay_TH[token, :, None, None])
        delta_HE = (v_THE[token] - (state_HDE * k_HD1).sum(1)) * beta_TH[token, :, None]
        state_HDE.add_(k_HD1 * delta_HE.unsqueeze(1))
        y_THE[token] = (state_HDE * q_HD1).sum(1)
    return y_THE


def _unit(x_TGD: torch.Tensor) -> torch.Tensor:
    x_TGD = x_TGD.float()
    return x_TGD * torch.rsqrt(x_TGD.square().sum(2, keepdim=True) + _UNIT_EPS)
