"""The names that families give to the tensors of their mixtures of experts.

Owns the table. Knows no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedNames:
    """The tensors that hold a projection of all experts, below the mixture.

    They are `[E, outputs, inputs]`, or `[E, inputs, outputs]` if transposed. The outputs of gate
    and up lie one after the other, or alternate. Biases, if any, end in `_bias`.
    """

    gate_up: str = "experts.gate_up_proj"
    down: str = "experts.down_proj"
    is_transposed: bool = True
    alternates: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Names of a layer's MLP, which may be a mixture; of the parts of a mixture, below it.

    `gate`, `up` and `down` are projections of each expert; checkpoints with `stacked` tensors are
    split to have them (see `core.runtime.tensors.stacked`).
    """

    module: str = "mlp"
    router: str = "gate"
    correction: str = "gate.e_score_correction_bias"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"
    stacked: StackedNames | None = None


EXPERT_NAMES: Mapping[str, ExpertNames] = MappingProxyType(
    {
        "": ExpertNames(),
        "mixtral": ExpertNames(module="block_sparse_moe", gate="w1", up="w3", down="w2"),
    }
)
"""By the `naming` of a `MoeConfig`; the first is that of most families."""
