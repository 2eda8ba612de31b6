"""Operations of recurrent layers on the rows of a step: convolutions and scans with states.

Owns their torch references, which take token after token. On a CPU the native kernels compute a
whole layer between its projections (native/recurrent.c); on a GPU Triton's kernels take their place
here. A row's result depends neither on other rows nor on the chunks of its tokens, but for Mamba
2's scan on a GPU.

Shapes: T tokens of all rows, X channels, K tokens of a convolution, G key heads, H value heads,
D key dim, E value dim, A decays of a head, L lines of states, B rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.functional import silu, softplus

_UNIT_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class StateWave:
    """The tokens of some rows up to their next snapshots, or to their ends.

    Row b has `lengths_B[b]` tokens from `starts_B[b]` on, and the state in line `slots_B[b]`. All
    are int64 on the device; no row is longer than `max_length`. Then lines are copied as `copies`
    say, each (source, target).
    """

    starts_B: torch.Tensor
    lengths_B: torch.Tensor
    slots_B: torch.Tensor
    max_length: int
    copies: Sequence[tuple[int, int]] = ()

    def tokens(self, state: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For the torch references: a token of every row, and their states, updated in place.

        Rows of one token go together; others one after the other.
        """
        if self.max_length == 1:
            own = state.index_select(0, self.slots_B)
            yield self.starts_B, own
            state.index_copy_(0, self.slots_B, own)
            return
        rows = (each.tolist() for each in (self.starts_B, self.lengths_B, self.slots_B))
        for start, length, slot in zip(*rows, strict=True):
            for token in range(start, start + length):
                yield self.starts_B.new_tensor([token]), state[slot : slot + 1]

    def close(self, state: torch.Tensor) -> None:
        """Copy the states of snapshots."""
        for source, target in self.copies:
            state[target] = state[source]


StateRows = Sequence[StateWave]
"""The tokens of a step's rows: each row's next tokens after its last ones."""


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
    y_TX = x_TX.new_empty(x_TX.shape)
    for wave in rows:
        if x_TX.is_cuda:
            from triptych.core.runtime.kernels.triton.short_conv import short_conv

            places = (wave.starts_B, wave.lengths_B, wave.slots_B, wave.max_length)
            short_conv(x_TX, by.weight_KX, by.bias_X, by.activates, state_LJX, y_TX, *places)
        else:
            _convolve(x_TX, by, state_LJX, wave, y_TX)
        wave.close(state_LJX)
    return y_TX


def _convolve(
    x_TX: torch.Tensor,
    by: Convolution,
    state_LJX: torch.Tensor,
    wave: StateWave,
    y_TX: torch.Tensor,
) -> None:
    for token_B, last_BJX in wave.tokens(state_LJX):
        window_BKX = torch.cat((last_BJX, x_TX[token_B].float().unsqueeze(1)), dim=1)
        sum_BX = (window_BKX * by.weight_KX).sum(1)
        if by.bias_X is not None:
            sum_BX = sum_BX + by.bias_X
        y_TX[token_B] = (silu(sum_BX) if by.activates else sum_BX).to(y_TX.dtype)
        last_BJX.copy_(window_BKX[:, 1:])


@dataclass(frozen=True, slots=True)
class DeltaInputs:
    """The inputs of the gated delta rule: of each token, and of all.

    A head has one decay, or one for each value of its key.
    """

    q_TGD: torch.Tensor
    k_TGD: torch.Tensor
    v_THE: torch.Tensor
    a_THA: torch.Tensor
    b_TH: torch.Tensor
    decay_H: torch.Tensor
    dt_bias_HA: torch.Tensor
    beta_scale: float = 1.0


def gated_delta_rule(
    inputs: DeltaInputs, state_LHDE: torch.Tensor, rows: StateRows
) -> torch.Tensor:
    """The gated delta rule (Yang et al. 2024, arXiv:2412.06464): `y_THE`, in float32.

    With a decay for each value of a key it is Kimi Delta Attention (arXiv:2510.26692). Queries and
    keys are normalized to length 1, and queries divided by the root of their size. A key head
    serves as many value heads as there are for it. States are float32.
    """
    y_THE = inputs.v_THE.new_empty(inputs.v_THE.shape, dtype=torch.float32)
    for wave in rows:
        if y_THE.is_cuda:
            from triptych.core.runtime.kernels.triton.delta_rule import delta_rule

            delta_rule(
                *(inputs.q_TGD, inputs.k_TGD, inputs.v_THE, inputs.a_THA, inputs.b_TH),
                *(inputs.decay_H, inputs.dt_bias_HA, state_LHDE, y_THE),
                *(wave.starts_B, wave.lengths_B, wave.slots_B, inputs.beta_scale),
            )
        else:
            _apply_delta_rule(inputs, state_LHDE, wave, y_THE)
        wave.close(state_LHDE)
    return y_THE


def _apply_delta_rule(
    inputs: DeltaInputs, state_LHDE: torch.Tensor, wave: StateWave, y_THE: torch.Tensor
) -> None:
    repeats = inputs.v_THE.shape[1] // inputs.q_TGD.shape[1]
    scale = inputs.q_TGD.shape[2] ** -0.5
    for token_B, state_BHDE in wave.tokens(state_LHDE):
        q_BHD1, k_BHD1 = (
            _unit(x_TGD[token_B]).repeat_interleave(repeats, dim=1).unsqueeze(3)
            for x_TGD in (inputs.q_TGD, inputs.k_TGD)
        )
        step_BHA = softplus(inputs.a_THA[token_B].float() + inputs.dt_bias_HA)
        beta_BH = inputs.b_TH[token_B].float().sigmoid() * inputs.beta_scale
        state_BHDE.mul_(torch.exp(inputs.decay_H.unsqueeze(1) * step_BHA).unsqueeze(3))
        delta_BHE = inputs.v_THE[token_B].float() - (state_BHDE * k_BHD1).sum(2)
        delta_BHE *= beta_BH.unsqueeze(2)
        state_BHDE.add_(k_BHD1 * delta_BHE.unsqueeze(2))
        y_THE[token_B] = (state_BHDE * (q_BHD1 * scale)).sum(2)


@dataclass(frozen=True, slots=True)
class ScanInputs:
    """The inputs of Mamba 2's scan: of each token, and of all. A step lies within `limits`."""

    x_THP: torch.Tensor
    b_TGN: torch.Tensor
    c_TGN: torch.Tensor
    dt_TH: torch.Tensor
    decay_H: torch.Tensor
    dt_bias_H: torch.Tensor
    skip_H: torch.Tensor
    limits: tuple[float, float]


def selective_scan(
    inputs: ScanInputs,
    state_LHPN: torch.Tensor,
    rows: StateRows,
    *,
    is_deterministic: bool = False,
) -> torch.Tensor:
    """Mamba 2's scan (Dao and Gu 2024, arXiv:2405.21060): `y_THP`, in float32. States are float32.

    P values of a head, N numbers for each; G groups of heads share B and C. On a GPU long rows are
    taken in blocks, whose results depend on the chunks of its tokens by rounding, unless they are
    to be `is_deterministic`.
    """
    y_THP = inputs.x_THP.new_empty(inputs.x_THP.shape, dtype=torch.float32)
    for wave in rows:
        if y_THP.is_cuda:
            from triptych.core.runtime.kernels.triton import selective_scan as on_gpu

            on_gpu.selective_scan(
                *(inputs.x_THP, inputs.b_TGN, inputs.c_TGN, inputs.dt_TH),
                *(inputs.decay_H, inputs.dt_bias_H, inputs.skip_H, list(inputs.limits)),
                *(state_LHPN, y_THP, wave.starts_B, wave.lengths_B, wave.slots_B),
                *(wave.max_length, is_deterministic),
            )
        else:
            _scan(inputs, state_LHPN, wave, y_THP)
        wave.close(state_LHPN)
    return y_THP


def _scan(
    inputs: ScanInputs, state_LHPN: torch.Tensor, wave: StateWave, y_THP: torch.Tensor
) -> None:
    repeats = inputs.x_THP.shape[1] // inputs.b_TGN.shape[1]
    for token_B, state_BHPN in wave.tokens(state_LHPN):
        b_BH1N, c_BH1N = (
            x_TGN[token_B].float().repeat_interleave(repeats, dim=1).unsqueeze(2)
            for x_TGN in (inputs.b_TGN, inputs.c_TGN)
        )
        x_BHP = inputs.x_THP[token_B].float()
        step_BH = softplus(inputs.dt_TH[token_B].float() + inputs.dt_bias_H).clamp(*inputs.limits)
        state_BHPN.mul_(torch.exp(inputs.decay_H * step_BH)[..., None, None])
        state_BHPN.add_((x_BHP * step_BH.unsqueeze(2)).unsqueeze(3) * b_BH1N)
        y_THP[token_B] = (state_BHPN * c_BH1N).sum(3) + inputs.skip_H.unsqueeze(1) * x_BHP


NormPlace = Literal["first", "last", "none"]
GateKind = Literal["silu", "sigmoid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedNorm:
    """The norm of each `size` values, by weights of all values or of a group, and a gate.

    The norm comes first, or last: then it reads what the gate yields. Without a norm there are
    weights all the same. The gate is SiLU, or the sigmoid, of `gate_scale` times its input.
    """

    weight: torch.Tensor
    size: int
    eps: float
    place: NormPlace
    gate: GateKind = "silu"
    gate_scale: float = 1.0


def gated_norm(y_TO: torch.Tensor, z_TO: torch.Tensor, norm: GatedNorm) -> torch.Tensor:
    """`norm(y) * gate(z)`, `norm(y * gate(z))` or `y * gate(z) * weight`, in the type of `z_TO`."""
    if z_TO.is_cuda:
        from triptych.core.runtime.kernels.triton.gated_norm import gated_norm as on_gpu

        rule = (norm.size, norm.eps, norm.place, norm.gate, norm.gate_scale)
        normed_TO: torch.Tensor = on_gpu(y_TO, z_TO, norm.weight, *rule)
        return normed_TO
    gate = silu if norm.gate == "silu" else torch.sigmoid
    groups, gate_TO = (-1, norm.size), gate(z_TO.float() * norm.gate_scale)
    y_TGX = (y_TO if norm.place == "first" else y_TO * gate_TO).unflatten(1, groups)
    if norm.place != "none":
        y_TGX = y_TGX * torch.rsqrt(y_TGX.square().mean(2, keepdim=True) + norm.eps)
    y_TO = (y_TGX * norm.weight.view(groups)).flatten(1)
    return (y_TO * gate_TO if norm.place == "first" else y_TO).to(z_TO.dtype)


def _unit(x_TGD: torch.Tensor) -> torch.Tensor:
    x_TGD = x_TGD.float()
    return x_TGD * torch.rsqrt(x_TGD.square().sum(2, keepdim=True) + _UNIT_EPS)
