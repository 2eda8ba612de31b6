"""Maps between several residual streams, whose coefficients depend on the first one (AltUp).

Owns the operations and their torch references; the layer that calls them is
`core.runtime.layers.altup`. A row's result does not depend on other rows.

Shapes: T tokens, C hidden, N streams, S pairs of streams.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Router(NamedTuple):
    """Makes routes of a token: `tanh(weight @ normalized(x))`, one for each stream.

    The weight, float32, includes that of the norm.
    """

    weight_NC: torch.Tensor
    eps: float


def predict_streams(x_TNC: torch.Tensor, router: Router, weight_SN: torch.Tensor) -> torch.Tensor:
    """Streams plus sums of all streams, `[T, N, C]`: pair `q * N + p` is what q takes of p."""
    if x_TNC.is_cuda:
        from triptych.core.runtime.kernels.triton.altup import predict_streams as on_gpu

        predicted_TNC: torch.Tensor = on_gpu(x_TNC, *router, weight_SN)
        return predicted_TNC
    num_streams = x_TNC.shape[1]
    by_TNN = (_routes(x_TNC[:, 0], router) @ weight_SN.float().t()).unflatten(1, (num_streams, -1))
    return torch.baddbmm(x_TNC.float(), by_TNN, x_TNC.float()).to(x_TNC.dtype)


def correct_streams(
    predicted_TNC: torch.Tensor, computed_TC: torch.Tensor, router: Router, weight_NN: torch.Tensor
) -> torch.Tensor:
    """Predicted streams, each changed by a multiple of how the first one differs: `[T, N, C]`."""
    if computed_TC.is_cuda:
        from triptych.core.runtime.kernels.triton.altup import correct_streams as on_gpu

        corrected_TNC: torch.Tensor = on_gpu(predicted_TNC, computed_TC, *router, weight_NN)
        return corrected_TNC
    by_TN = 1 + _routes(computed_TC, router) @ weight_NN.float().t()
    change_TC = computed_TC.float() - predicted_TNC[:, 0].float()
    return torch.addcmul(predicted_TNC.float(), by_TN[..., None], change_TC[:, None]).to(
        computed_TC.dtype
    )


def _routes(x_TC: torch.Tensor, router: Router) -> torch.Tensor:
    """The routes of each token, `[T, N]`, float32."""
    x_TC = x_TC.float()
    factor_T1 = torch.rsqrt(x_TC.square().mean(1, keepdim=True) + router.eps)
    return ((x_TC @ router.weight_NC.t()) * factor_T1).tanh_()
