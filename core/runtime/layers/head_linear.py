"""A small projection for each head, all in one call.

Owns the matrices `[H, O, I]`. Knows nothing of the meaning of heads.

Shapes: T tokens, H heads, I inputs and O outputs of a head.
"""

from __future__ import annotations

import torch

from triptych.core.runtime.kernels.native.arguments import NativeWeights, ProjectionPointers
from triptych.core.runtime.kernels.native.library import NativeKernels


class HeadLinear:
    """`y_THO[:, h] = x_THI[:, h] @ weight_HOI[h].T`.

    With our CPU kernels rows are independent of each other; on a GPU if it `is_deterministic`.
    """

    __slots__ = ("_is_deterministic", "_kernels", "_weight_HOI", "native")

    def __init__(
        self,
        weight_HOI: torch.Tensor,
        kernels: NativeKernels | None = None,
        *,
        is_deterministic: bool = False,
    ) -> None:
        self._is_deterministic = is_deterministic
        self._weight_HOI, self._kernels = weight_HOI.contiguous(), kernels
        self.native: NativeWeights | None = None
        if kernels is not None and kernels.can_pack(weight_HOI[0]):
            self.native = kernels.pack(*self._weight_HOI)
            self._weight_HOI = weight_HOI.new_empty(0)

    def projection(self) -> ProjectionPointers:
        """The structure for a layer of the native step, which needs our kernels."""
        assert self.native is not None
        return self.native.projection(None)

    def __call__(self, x_THI: torch.Tensor) -> torch.Tensor:
        """Project every head."""
        if self.native is not None:
            assert self._kernels is not None
            return self._kernels.head_linear(x_THI, self.native)
        if self._is_deterministic and x_THI.is_cuda:
            from triptych.core.runtime.kernels.triton.head_linear import head_linear

            y_THO: torch.Tensor = head_linear(x_THI, self._weight_HOI)
            return y_THO
        return torch.bmm(x_THI.transpose(0, 1), self._weight_HOI.mT).transpose(0, 1)
