"""Muon (Jordan et al. 2024), which updates all matrices of one shape at once.

torch has it for one matrix after another, in bfloat16 alone: a GPU waits for thousands of launches
in each step, and processors without products of bfloat16 take sixty times as long.

Shapes: M matrices, R rows, C columns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_MOMENTUM = 0.95
_STEPS = ((3.4445, -4.775, 2.0315),) * 5
_LEAST_NORM = 1e-7


class Muon(torch.optim.Optimizer):
    """Steps as large as AdamW's would be (arXiv:2502.16982), so that both have one learning rate.

    `dtype` is that of the products.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        lr: float,
        *,
        weight_decay: float = 0.01,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        by_shape = defaultdict(list)
        for matrix in matrices:
            by_shape[tuple(matrix.shape)].append(matrix)
        groups = [{"params": alike} for alike in by_shape.values()]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        self._dtype = dtype

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One update. All matrices must have gradients."""
        for group in self.param_groups:
            matrices, rate = group["params"], group["lr"]
            gradients = torch.stack([matrix.grad for matrix in matrices])
            state = self.state[matrices[0]]
            if not state:
                state["momentum"] = torch.zeros_like(gradients)
            state["momentum"].lerp_(gradients, 1 - _MOMENTUM)
            ahead = gradients.lerp(state["momentum"], _MOMENTUM)
            changes = orthogonal(ahead.to(self._dtype)).to(gradients.dtype)
            torch._foreach_mul_(matrices, 1 - rate * group["weight_decay"])
            scale = 0.2 * max(matrices[0].shape) ** 0.5
            torch._foreach_add_(matrices, list(changes.unbind()), alpha=-rate * scale)


def orthogonal(matrices_MRC: Tensor) -> Tensor:
    """The nearly orthogonal matrix next to each `[M, R, C]`, by Newton-Schulz iteration."""
    is_tall = matrices_MRC.shape[1] > matrices_MRC.shape[2]
    found = matrices_MRC.mT if is_tall else matrices_MRC
    found = found / found.norm(dim=(1, 2), keepdim=True).clamp(min=_LEAST_NORM)
    for first, second, third in _STEPS:
        gram = found @ found.mT
        found = first * found + (second * gram + third * gram @ gram) @ found
    return found.mT if is_tall else found
