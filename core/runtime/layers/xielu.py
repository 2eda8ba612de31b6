"""xIELU, an activation with weights in each layer (Huang and Schlag 2024, arXiv:2411.13010).

Owns these weights. They are kept in float32, and so is the arithmetic.

Shapes: T tokens, F features.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn.functional import softplus

from triptych.core.runtime.kernels.native.arguments import GateArguments


class Xielu:
    """`positive * x^2 + beta * x` above 0; below, `negative * (exp(x) - 1 - x) + beta * x`.

    The exponent is `eps` at most.

    Fill `tensors`, by their last names in a checkpoint, then call `prepare`.
    """

    def __init__(self, device: torch.device) -> None:
        shapes: Mapping[str, tuple[int, ...]] = {
            "alpha_p": (1,),
            "alpha_n": (1,),
            "beta": (),
            "eps": (),
        }
        self.tensors = {
            name: torch.empty(shape, dtype=torch.float32, device=device)
            for name, shape in shapes.items()
        }
        self._rates = (0.0,) * 4

    def prepare(self) -> None:
        """Compute the rates from the loaded weights."""
        beta, eps = float(self.tensors["beta"]), float(self.tensors["eps"])
        positive, negative = (
            float(softplus(self.tensors[name])) for name in ("alpha_p", "alpha_n")
        )
        self._rates = positive, beta + negative, beta, eps

    def __call__(self, x_TF: torch.Tensor) -> torch.Tensor:
        """Apply it, in the type of `x_TF`."""
        positive, negative, beta, eps = self._rates
        x = x_TF.float()
        below = (torch.expm1(x.clamp(max=eps)) - x) * negative
        y_TF: torch.Tensor = torch.where(x > 0, positive * x * x, below) + beta * x
        return y_TF.to(x_TF.dtype)

    def arguments(self) -> GateArguments:
        """The structure for native kernels."""
        return GateArguments.xielu(*self._rates)
