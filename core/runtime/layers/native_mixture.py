"""A mixture of experts in one native call, by itself or within the step of all layers.

Owns the addresses that the call needs. The arithmetic is that of `core.runtime.layers.moe`, in
core/runtime/kernels/native/mixture.c.

Shapes: T tokens, C hidden.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from triptych.core.runtime.kernels.native.arguments import (
    DTYPES,
    GateArguments,
    MixArguments,
    MixturePointers,
    ProjectionPointers,
    pointer,
)
from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.kernels.routing import SCORINGS, Routing
from triptych.core.runtime.layers.adapters import pointers_of
from triptych.core.runtime.layers.linear import Linear

if TYPE_CHECKING:
    from triptych.core.runtime.layers.moe import MoeMlp

_MOST = 64
"""The most chosen experts, and groups of experts, that the C code supports."""


def can_fuse_mixture(moe: MoeMlp) -> bool:
    """Whether a prepared mixture is whole and within the limits, with all weights packed."""
    routing, is_whole = moe.config.routing, moe.shard.length == moe.shard.total
    is_whole = is_whole and moe.features.length == moe.features.total
    counts = routing.num_chosen, routing.num_groups, routing.num_group_scores
    is_packed = all(linear.native is not None for linear in moe.linears())
    return is_whole and is_packed and max(counts) <= _MOST


class NativeMixture:
    """Runs a prepared mixture, and points layers to it."""

    def __init__(self, moe: MoeMlp, native: NativeKernels) -> None:
        self._owner, self._native = moe, native  # the pointers live no longer than these
        self._shared_gate = GateArguments.of(moe.activation)
        self.pointers = _point_to(moe)

    def scratch(self, x_TC: torch.Tensor) -> torch.Tensor:
        """Allocate the memory of a call."""
        num_tokens, hidden_size = x_TC.shape
        sizes = num_tokens, hidden_size, x_TC.dtype
        return self._native.mixture_scratch(self.pointers, *sizes)

    def __call__(self, x_TC: torch.Tensor, residual_TC: torch.Tensor | None) -> torch.Tensor:
        """Apply the experts. Adds to the residual where given."""
        assert x_TC.is_contiguous()
        y_TC, scratch = torch.empty_like(x_TC), self.scratch(x_TC)
        assert residual_TC is None or residual_TC.is_contiguous()
        num_tokens, hidden_size = x_TC.shape
        self._native.mix(
            MixArguments(
                ctypes.pointer(self.pointers),
                x_TC.data_ptr(),
                pointer(residual_TC),
                y_TC.data_ptr(),
                scratch.data_ptr(),
                num_tokens,
                hidden_size,
                self._shared_gate,
                DTYPES[x_TC.dtype],
                torch.get_num_threads(),
                1.0,
            )
        )
        return y_TC


def _point_to(moe: MoeMlp) -> MixturePointers:
    config, shared = moe.config, moe.shared
    return MixturePointers(
        router=projection(moe.router),
        shared_gate=_absent(moe.shared_gate),
        shared_gate_up=_absent(None if shared is None else shared.gate_up),
        shared_down=_absent(None if shared is None else shared.down),
        gate_up=_array([expert.gate_up for expert in moe.experts]),
        down=_array([expert.down for expert in moe.experts]),
        correction=pointer(moe.correction_E),
        num_experts=config.num_experts,
        intermediate=config.intermediate_size,
        shared_intermediate=config.shared_size,
        scales_inputs=config.scales_inputs,
        has_gate=config.has_gate,
        has_blocks=any(linear.has_blocks for linear in moe.linears()),
        gate=GateArguments.of(moe.activation, config.clamp),
        **_rules(config.routing),
    )


def _rules(routing: Routing) -> dict[str, int | float]:
    return {
        "num_chosen": routing.num_chosen,
        "scoring": SCORINGS.index(routing.scoring),
        "renormalizes": routing.renormalizes,
        "num_groups": routing.num_groups,
        "num_chosen_groups": routing.num_chosen_groups,
        "num_group_scores": routing.num_group_scores,
        "scale": routing.scale,
    }


def projection(linear: Linear) -> ProjectionPointers:
    """The structure of a prepared projection."""
    assert linear.native is not None
    return linear.native.projection(linear.bias_O, pointers_of(linear.adapters))


def _absent(linear: Linear | None) -> ProjectionPointers:
    return ProjectionPointers() if linear is None else projection(linear)


def _array(linears: Sequence[Linear]) -> ctypes.Array[ProjectionPointers]:
    return (ProjectionPointers * len(linears))(*map(projection, linears))
