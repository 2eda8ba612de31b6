"""The names that families give to the tensors of their mixtures of experts.

Owns the table. Knows no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from triptych.core.runtime.layers.moe import MoeConfig
from triptych.core.runtime.tensors.stacked import StackedNames


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


def names_of(moe: MoeConfig | None) -> ExpertNames:
    """The names of a family; those of most where there are no experts."""
    return EXPERT_NAMES["" if moe is None else moe.naming]
