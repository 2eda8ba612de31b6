"""Latent attention of transformers' classes on our pages: rows stay as they are compressed.

Owns the recognition of such modules, by the one method with which all of these classes make keys
and values from rows (`expand_kv`), and what takes its place while our attention runs: rows pass
through, and the matrices are applied to queries and results instead (`core.runtime.layers.
latent_attention`). With another attention, as in the proof, the method is the class's own. Knows
neither pages nor steps.

Shapes: T tokens, H heads, N values of a head's key without position, P rotated values, L compressed
values of a row, D = L + P of a whole row, V values of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from triptych.core.runtime.kernels.native.library import NativeKernels
from triptych.core.runtime.layers.attention import LatentShape
from triptych.core.runtime.layers.head_linear import HeadLinear

_EXPAND = "expand_kv"
_SIZES = ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank", "v_head_dim")


class RowExpansion:
    """Takes the place of a module's `expand_kv`, where it runs with the attention `name`."""

    def __init__(self, module: Any, name: str) -> None:
        self._module, self._name, self._expand = module, name, getattr(module, _EXPAND)
        self.layer = int(module.layer_idx)
        nope_dim, rope_dim, rank, value_dim = (getattr(module, size) for size in _SIZES)
        self._sizes = nope_dim, value_dim
        self.value_dim: int = value_dim
        num_heads = module.kv_b_proj.out_features // (nope_dim + value_dim)
        self.shape = LatentShape(num_heads=num_heads, head_dim=rank + rope_dim, value_dim=rank)
        self._heads: tuple[HeadLinear, HeadLinear] | None = None

    def __call__(
        self, latent_11TL: torch.Tensor, key_11TP: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows as keys, and their compressed part as values."""
        if self._module.config._attn_implementation != self._name:
            expanded: tuple[torch.Tensor, torch.Tensor] = self._expand(latent_11TL, key_11TP)
            return expanded
        return torch.cat((latent_11TL, key_11TP), dim=3), latent_11TL

    def take_weight(self, native: NativeKernels | None) -> None:
        """Split the matrix that makes keys and values."""
        weight_HXL = self._module.kv_b_proj.weight.detach().unflatten(0, (-1, sum(self._sizes)))
        keys_HNL, values_HVL = weight_HXL.split(self._sizes, dim=1)
        self._heads = HeadLinear(keys_HNL.mT, native), HeadLinear(values_HVL, native)

    def drop_weight(self) -> None:
        """Release the whole matrix: the class's own method does not run any more."""
        self._module.kv_b_proj = None

    def queries(self, q_THX: torch.Tensor) -> torch.Tensor:
        """Queries in the space of rows, `[T, H, D]`."""
        assert self._heads is not None
        nope_THN, rope_THP = q_THX.tensor_split((self._sizes[0],), dim=2)
        return torch.cat((self._heads[0](nope_THN), rope_THP), dim=2)

    def results(self, out_THL: torch.Tensor) -> torch.Tensor:
        """Results in the space of values, `[T, H, V]`."""
        assert self._heads is not None
        return self._heads[1](out_THL)


def store_rows(model: nn.Module, name: str) -> list[RowExpansion]:
    """Replace the expansions of a model's latent attention; none if it has no such layers."""
    expansions = []
    for module in _latent_modules(model):
        setattr(module, _EXPAND, expansion := RowExpansion(module, name))
        expansions.append(expansion)
    return expansions


def expansion_of(module: nn.Module) -> RowExpansion | None:
    """The replaced expansion of a module, if any."""
    found = vars(module).get(_EXPAND)
    return found if isinstance(found, RowExpansion) else None


def _latent_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The modules with the method, with known sizes, and with a plain matrix of these sizes."""
    for module in model.modules():
        sizes: list[Any] = [getattr(module, size, None) for size in _SIZES]
        up: Any = getattr(module, "kv_b_proj", None)
        if not hasattr(module, _EXPAND) or not all(isinstance(size, int) for size in sizes):
            continue
        nope_dim, _, rank, value_dim = sizes
        if not isinstance(up, nn.Linear) or _has_bias(up) or up.in_features != rank:
            continue
        if up.out_features % (nope_dim + value_dim) == 0:
            yield module


def _has_bias(linear: nn.Linear) -> bool:
    return linear._parameters["bias"] is not None
