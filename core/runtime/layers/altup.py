"""Alternating updates: several residual streams, of which each layer computes one (Gemma 3n).

Owns the streams' beginning and end, the part of a layer that predicts all streams and corrects them
by what it has computed (Baykal et al. 2023, arXiv:2301.13310), and the low-rank path next to
attention. The active stream is the first.

Shapes: T tokens, C hidden, N streams, R rank of the low-rank path.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from triptych.core.runtime.kernels.altup import Router, correct_streams, predict_streams
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.kernels.row_moments import as_large_as
from triptych.core.runtime.layers.linear import Linear
from triptych.core.runtime.layers.norm import RMSNorm

MAX_STREAMS = 8
"""The most streams of the native step, which has a token's coefficients on its stack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUpConfig:
    """`num_streams` residual streams, and low-rank paths of `laurel_rank`."""

    hidden_size: int
    num_streams: int
    laurel_rank: int
    norm_eps: float


class Streams:
    """Makes the streams of embedded tokens, and one hidden state of the last layer's streams."""

    def __init__(self, config: AltUpConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        size, others = config.hidden_size, config.num_streams - 1
        self.spread = Linear(size, others * size, has_bias=False, dtype=dtype, device=device)
        self.gather = [
            Linear(size, size, has_bias=False, dtype=dtype, device=device) for _ in range(others)
        ]

    def linears(self) -> Iterator[Linear]:
        """Iterate over the projections."""
        yield self.spread
        yield from self.gather

    def prepare(self, native: NativeKernels | None = None) -> None:
        """Bring the loaded weights into the layout the step uses."""
        for linear in self.linears():
            linear.prepare(native)

    def open(self, x_TC: torch.Tensor) -> torch.Tensor:
        """The streams of embedded tokens, `[T, N, C]`: these, and projections as large as these."""
        others = self.spread(x_TC).unflatten(1, (-1, x_TC.shape[1]))
        parts = [x_TC, *(as_large_as(x_TC, other) for other in others.unbind(1))]
        return torch.stack(parts, dim=1)

    def close(self, x_TNC: torch.Tensor) -> torch.Tensor:
        """The mean of the first stream and of projections of the others as large as it."""
        first, *others = (x_TC.contiguous() for x_TC in x_TNC.unbind(1))
        total_TC = first.float()
        for project, other in zip(self.gather, others, strict=True):
            total_TC = total_TC + as_large_as(first, project(other))
        return (total_TC / self.config.num_streams).to(first.dtype)


class Laurel:
    """A low-rank path: `x + norm(right(left(x)))`."""

    def __init__(self, config: AltUpConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        sizes = config.hidden_size, config.laurel_rank
        self.left = Linear(*sizes, has_bias=False, dtype=dtype, device=device)
        self.right = Linear(*sizes[::-1], has_bias=False, dtype=dtype, device=device)
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype, device=device)

    def linears(self) -> Iterator[Linear]:
        """Iterate over its projections."""
        yield from (self.left, self.right)

    def __call__(self, x_TC: torch.Tensor) -> torch.Tensor:
        """Compute the path of every token."""
        return x_TC + self.norm(self.right(self.left(x_TC)))


class AltUp:
    """A layer's maps between streams, whose coefficients depend on the active stream."""

    def __init__(self, config: AltUpConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        size, num = config.hidden_size, config.num_streams
        self.config = config
        self.laurel = Laurel(config, dtype=dtype, device=device)
        self.router_norm = RMSNorm(size, eps=config.norm_eps, dtype=dtype, device=device)
        self.router_NC = torch.empty(num, size, dtype=dtype, device=device)
        self.predict_SN = torch.empty(num * num, num, dtype=dtype, device=device)
        self.correct_NN = torch.empty(num, num, dtype=dtype, device=device)
        self.scale_C = torch.empty(size, dtype=dtype, device=device)
        self.router: Router | None = None

    def linears(self) -> Iterator[Linear]:
        """Iterate over the projections."""
        yield from self.laurel.linears()

    def prepare(self, native: NativeKernels | None = None) -> None:
        """Bring the loaded weights into the layout the step uses."""
        for linear in self.linears():
            linear.prepare(native)
        for norm in (self.router_norm, self.laurel.norm):
            norm.prepare()
        weight_NC = self.router_NC.float() * self.router_norm.weight_C.float()
        self.router = Router(weight_NC / self.config.hidden_size, self.config.norm_eps)

    def predict(self, x_TNC: torch.Tensor) -> torch.Tensor:
        """All streams as the layer before leaves them, mixed: `[T, N, C]`."""
        assert self.router is not None, "call prepare() before the first step"
        return predict_streams(x_TNC, self.router, self.predict_SN)

    def correct(self, predicted_TNC: torch.Tensor, computed_TC: torch.Tensor) -> torch.Tensor:
        """The predicted streams, changed by how the computed stream differs: `[T, N, C]`."""
        assert self.router is not None
        return correct_streams(predicted_TNC, computed_TC, self.router, self.correct_NN)
